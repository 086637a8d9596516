"""`bitnet-np vectors DIR`: test vectors for engines in any language, with how far each number may be off."""

import argparse

from ..base.errors import OptionError
from ..files.load import open_model
from ..vectors.choose import SIZES, choice, like
from ..vectors.pack import write
from .arguments import DOWNLOAD
from .printing import answer

SUMMARY = "Write test vectors for engines in any language, and what checks them in C and Rust."


ARGUMENTS = f"""
folder@DIR: a new folder
--size {"|".join(SIZES)} = full: small has fewer widths, families and types
--families F1,F2,...: the families of whole models
--types T1,T2,...: the types of matrices, such as ternary, Q4_K
--operations O1,O2,...: the operations, such as rms_norm, matmul; model stands for whole models
--like MODEL: the family, types and operations of this model alone; options above come before it
{DOWNLOAD}
"""


def run(arguments: argparse.Namespace) -> int:
    """Write the pack; returns the exit code."""
    named = {name: getattr(arguments, name) for name in ("families", "types", "operations")}
    chosen = [None if text is None else [part for part in text.split(",") if part] for text in named.values()]
    if arguments.like is not None:
        chosen = [
            own if own is not None else of_model
            for own, of_model in zip(chosen, like(open_model(arguments.like, arguments.download)), strict=True)
        ]
    if arguments.folder.exists() and (not arguments.folder.is_dir() or any(arguments.folder.iterdir())):
        raise OptionError(f"{arguments.folder} is there, expected a new folder or an empty one")
    facts = write(arguments.folder, choice(arguments.size, *chosen).cases())
    text = (
        f"{arguments.folder}: version {facts['version']}, {facts['cases']} cases in {facts['files']} files, {facts['bytes'] / 1e6:.2f} MB"
    )
    return answer(arguments, {"folder": str(arguments.folder), **facts}, text)
