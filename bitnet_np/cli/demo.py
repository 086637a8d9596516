"""`bitnet-np demo DIR`: a model, tokens and two dumps of them, one right and one of an engine with a bug, to try `check` on."""

import argparse
import shlex
import shutil
from itertools import count
from typing import Any

from ..engine.backend import Backend, Wrapped
from ..files import embedded
from ..files.load import load
from ..kernels import cpu
from ..traces.record import record_trace
from .arguments import new_folder
from .printing import answer

TOKENS = (1535, 395, 396, 258, 388, 335, 270, 258, 592, 989)
"""Once upon a time there was a little rabbit: as ids, because the tokenizer needs the extra `text`."""
FAULTY_LAYER = 3


def run(arguments: argparse.Namespace) -> int:
    """Write the files and print the commands; returns the exit code."""
    folder = new_folder(arguments.folder)
    folder.mkdir(parents=True, exist_ok=True)
    model, tokens, right, wrong = paths = [folder / name for name in ("model.gguf", "tokens.txt", "right.npz", "wrong.npz")]
    with embedded.demo_path() as path:
        shutil.copyfile(path, model)
    tokens.write_text(" ".join(map(str, TOKENS)) + "\n", "utf-8")
    record_trace(load(model), TOKENS, right)
    record_trace(load(model), TOKENS, wrong, ops=_faulty(cpu))
    check = ["check", str(model), "--tokens-file", str(tokens), "--theirs"]
    commands = [shlex.join(["bitnet-np", *words]) for words in (["inspect", str(model)], [*check, str(right)], [*check, str(wrong)])]
    facts = {"folder": str(folder), "files": [path.name for path in paths], "commands": commands}
    return answer(arguments, facts, "\n".join(commands))


def _faulty(ops: Backend) -> Wrapped:
    """A backend with the mistake of many ports: the gate of one layer's feed-forward goes through SiLU in place of squared ReLU."""
    layers = count()

    def gate(*operands: Any) -> Any:
        return (ops.silu_gate if next(layers) == FAULTY_LAYER else ops.relu2_gate)(*operands)

    return Wrapped(ops, relu2_gate=gate)
