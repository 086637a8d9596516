"""`bitnet-np logits`: reference logits of token ids."""

import argparse
import os
import time
from typing import cast, get_args

import numpy as np

from ..base.errors import OptionError, shown
from ..base.tables import table
from ..engine.forward_pass import Mode, compute_logits, path_of
from ..testing.selftest import digest
from .arguments import check_out, dialect_of, save_npy
from .inputs import opened
from .printing import answer

TOP = 5
MODE_VARIABLE = "BITNET_NP_MODE"


def _mode(arguments: argparse.Namespace) -> Mode:
    """The mode that --mode names, or --chunk implies, or the environment names. Raises OptionError."""
    if arguments.mode is not None or arguments.chunk is not None:
        return arguments.mode or "incremental"
    mode = os.environ.get(MODE_VARIABLE) or "auto"
    if mode not in get_args(Mode):
        raise OptionError(f"the environment variable {MODE_VARIABLE} is {shown(mode)}, expected one of {', '.join(get_args(Mode))}")
    return cast(Mode, mode)


def run(arguments: argparse.Namespace) -> int:
    """Print the checksum and the largest logits, write all to --out; returns the exit code."""
    mode = _mode(arguments)
    if arguments.chunk is not None and mode != "incremental":
        raise OptionError(f"--chunk needs --mode incremental, not {mode}: no other mode has chunks")
    check_out("--out", arguments.out, ".npy")
    inputs = opened(arguments)
    ids = inputs.token_ids()
    model, dialect = inputs.model(), dialect_of(arguments)
    start = time.perf_counter()
    logits = compute_logits(
        model,
        ids if ids.ndim == 2 else ids[None],
        mode=mode,
        parallel_threshold=arguments.parallel_threshold,
        chunk=1 if arguments.chunk is None else arguments.chunk,
        last_only=arguments.last,
        dialect=dialect,
        ops=arguments.ops,
    )
    result = logits if ids.ndim == 2 else logits[0]
    seconds = time.perf_counter() - start
    last = np.atleast_2d(result if arguments.last else result[..., -1, :])
    if arguments.out is not None:
        save_npy(arguments.out, result)
    top = [[(int(i), float(row[i])) for i in np.argsort(-row, kind="stable")[:TOP]] for row in last]
    checksum = digest(result)
    tops = [[{"id": i, "logit": value} for i, value in row] for row in top]
    how = {"dialect": dialect.name, "mode": mode, "path": path_of(mode, ids.shape[-1], arguments.parallel_threshold)}
    parts = [f"shape   {list(result.shape)} float32\nsha256  {checksum}"]
    for b, row in enumerate(top):
        heading = f"last position{f' of sequence {b}' if ids.ndim == 2 else ''}\n"
        parts.append(heading + table(("token", "logit"), [(str(i), f"{value:+.6f}") for i, value in row]))
    return answer(arguments, {"shape": result.shape, "sha256": checksum, "top": tops, **how, "seconds": seconds}, "\n\n".join(parts))
