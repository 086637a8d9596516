"""`bitnet-np convert IN OUT.gguf`: write any model that can be loaded as a GGUF file."""

import argparse
from pathlib import Path

from ..base.errors import OptionError
from ..files.convert import HEADS, TYPES, convert, is_permuted
from ..files.load import model_from, open_model
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
    lines = [f"{out}: {facts['bytes']:,} bytes, {model.config.architecture}"]
    if permuted:
        lines.append(
            "rows of queries and keys are permuted, as this architecture has them: logits agree to float32 rounding, not to the bit"
        )
    return answer(arguments, facts, "\n".join(lines))
