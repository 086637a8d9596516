"""A command whose arguments are parsed: what it computes with, what it may write, and what it is measured by."""

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numba

from ..base.errors import OptionError
from ..base.tables import table
from ..base.validate import integer
from ..base.whole_file import whole_file
from ..engine.metrics import Metrics
from ..gpu.dispatch import choose
from ..kernels.float_state import steady
from .arguments import check_out
from .compiling import compiling


@steady
def run(arguments: argparse.Namespace) -> int:
    """Run the module of a command; returns the exit code. Raises OptionError for threads and outputs that cannot be."""
    threads = getattr(arguments, "threads", None)
    if threads is not None:
        numba.set_num_threads(integer("--threads", threads, 1, numba.config.NUMBA_NUM_THREADS))
    arguments.json |= getattr(arguments, "format", None) == "json"
    _check_outputs(arguments)
    with compiling(), _measured(arguments):
        code: int = import_module(f"{__package__}.{arguments.command}").run(arguments)
    return code


_FILES = ("metrics", "plot", "html", "receipt", "save_all_logits")
"""The options that name a file to write, whatever the command, besides --out."""


def _check_outputs(arguments: argparse.Namespace) -> None:
    """Refuse to overwrite a file that is read, unless --force is given, and files that cannot be written."""
    existing = {name: path for name, path in vars(arguments).items() if isinstance(path, Path) and path.exists()}
    outputs = {name: existing.pop(name) for name in ("out", *_FILES) if name in existing}
    for name, out in outputs.items():
        for source in existing.values():
            inside = source.is_dir() and out.parent.samefile(source) and out.suffix in (".safetensors", ".json")  # of a model's folder
            if (inside or out.samefile(source)) and not getattr(arguments, "force", False):
                option = "OUT.gguf" if arguments.command == "convert" else f"--{name.replace('_', '-')}"
                raise OptionError(f"{option} is {out}, which is read: {source}")
    for name in _FILES:
        check_out(f"--{name.replace('_', '-')}", getattr(arguments, name, None))


@contextmanager
def _measured(arguments: argparse.Namespace) -> Iterator[None]:
    """Context of a command: sets the backend that it computes with, and reports its metrics afterwards if --metrics asks for them."""
    path: Path | None = getattr(arguments, "metrics", None)
    metrics = Metrics()
    ops, reason = choose(getattr(arguments, "device", "cpu"))
    arguments.ops = ops if path is None else metrics.ops(ops, reason)
    yield
    if path is not None:
        with whole_file(path) as part:
            part.write_text(json.dumps(metrics.as_dict(), indent=1) + "\n", "utf-8")
        sys.stdout.flush()
        print(table(*metrics.table()), file=sys.stderr)
        print(
            f"{metrics.forwards} forwards, {metrics.layers} layers, {metrics.kv_positions} positions written to KV caches", file=sys.stderr
        )
