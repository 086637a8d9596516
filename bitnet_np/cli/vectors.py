"""`bitnet-np vectors DIR`: test vectors for engines in any language, with how far each number may be off.

Examples:
  bitnet-np vectors pack
  bitnet-np vectors pack --size small --operations rms_norm,matmul
"""

import argparse

from .. import __version__
from ..files.load import model_from, open_model
from ..testing.model_cases import TABLES
from ..vectors.choose import CHOICES, SIZES, cases
from ..vectors.pack import write
from .arguments import DOWNLOAD, new_folder
from .printing import answer

SUMMARY = "Write test vectors for engines in any language, and what checks them in C and Rust."


ARGUMENTS = f"""
folder@DIR: a new folder
--size {"|".join(SIZES)} = full: small has fewer widths, families and types
--families F1,F2,...: the families of whole models
--types T1,T2,...: the types of matrices, such as ternary, Q4_K
--operations O1,O2,...: the operations, such as rms_norm, matmul; model stands for whole models
--like MODEL: also a small model with this one's ties, biases, scalings and window; where they are not named, its family and types alone
{DOWNLOAD}
"""
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I2_S": "ternary"}
"""The names that types of a file's tensors have in a pack, where they differ."""


def run(arguments: argparse.Namespace) -> int:
    """Write the pack; returns the exit code."""
    folder, named, like = new_folder(arguments.folder), {}, None
    if arguments.like is not None:
        source = open_model(arguments.like, arguments.download)
        like = model_from(source)
        types = {_TYPES.get(tensor.type.name, tensor.type.name) for tensor in source.tensors.values()}
        named = {"families": [source.config.architecture], "types": [kind for kind in TABLES if kind in types]}
    named |= {name: text.split(",") for name in CHOICES if (text := getattr(arguments, name)) is not None}
    facts = write(folder, cases(arguments.size, like, **named), __version__)
    text = f"{folder}: version {facts['version']}, {facts['cases']} cases in {facts['files']} files, {facts['bytes'] / 1e6:.2f} MB"
    return answer(arguments, {"folder": str(folder), **facts}, text)
