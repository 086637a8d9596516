"""`bitnet-np convert IN OUT.gguf`: write any model that can be loaded as a GGUF file."""

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import OptionError
from ..engine.forward_pass import forward_full
from ..files.convert import HEADS, TYPES, convert, is_permuted
from ..files.load import load, model_from, open_model
from ..judge.measures import judge
from ..model.records import Model
from . import progress
from .arguments import check_out
from .printing import answer


def run(arguments: argparse.Namespace) -> int:
    """Write the file; returns the exit code."""
    out: Path = arguments.out
    check_out("OUT.gguf", out, ".gguf")
    if out.exists() and not arguments.force:
        raise OptionError(f"{out} is there, --force replaces it")
    source = open_model(arguments.model, arguments.download)
    model = model_from(source, progress.bar("reading"), allow_nan=arguments.allow_nan, i2s_layout=arguments.i2s_layout)
    matrix, head = TYPES.get(arguments.type), HEADS.get(arguments.head)
    convert(model, out, source, matrix=matrix, head=head, rounding=arguments.allow_rounding, progress=progress.bar("writing"))
    permuted = is_permuted(model.config)
    facts = {"out": str(out), "bytes": out.stat().st_size, "architecture": model.config.architecture, "permuted": permuted}
    moved = _moved(model, load(out)) if arguments.allow_rounding and not arguments.allow_nan else None
    lines = [f"{out}: {facts['bytes']:,} bytes, {model.config.architecture}"]
    if permuted:
        lines.append(
            "rows of queries and keys are permuted, as this architecture has them: logits agree to float32 rounding, not to the bit"
        )
    if moved:
        lines.append(_report(moved))
    return answer(arguments, facts | ({"rounding": moved} if moved else {}), "\n".join(lines))


_TOKENS = 32


def _moved(model: Model, converted: Model) -> dict[str, Any]:
    """How far logits of some random tokens are from those of the source."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab, (1, min(_TOKENS, model.config.context)))
    judgement = judge(forward_full(model, ids)[0], forward_full(converted, ids)[0]).as_dict()
    return {name: judgement[name] for name in ("verdict", "positions", "max_error", "nmse", "top1")}


def _report(moved: dict[str, Any]) -> str:
    if moved["verdict"] == "SAME_BITS":
        return f"rounding changed no bit of the logits of {moved['positions']} random tokens"
    return (
        f"logits of {moved['positions']} random tokens move by at most {moved['max_error']:.3g} (NMSE {moved['nmse']:.2g}), "
        f"and at {moved['top1']:.0%} of the positions the same token stays first"
    )
