"""`bitnet-np vectors DIR`: test vectors for engines in any language, with how far each number may be off."""

import argparse

from .. import __version__
from ..files.load import model_from, open_model
from ..testing.model_cases import TABLES
from ..vectors.choose import CHOICES, cases
from ..vectors.pack import write
from .arguments import new_folder
from .printing import answer

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
