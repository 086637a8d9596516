"""A strict, lazy reader of Hugging Face folders: config.json, and a table of tensors that are views of mapped safetensors files.

The tensors are in model.safetensors, or in the files that model.safetensors.index.json names.
"""

import os
import re
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ..base.errors import FileFormatError, MissingFileError, shown
from ..base.validate import check_exists, path_of, text_of
from ..model.records import Config
from ..text.hf_tokenizer import tokenizer_metadata
from .hf_config import Recipe, read_recipe
from .hf_weights import HFWeights
from .overrides import check_has
from .safetensors_file import json_of, open_safetensors
from .tensors import Tensor

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_MAX_JSON = 1 << 25  # bytes: the longest tokenizer.json published has some 30 million
_MAX_SHARDS = 1024
_MAX_NAME = 255  # bytes of a file's name: systems raise OSError for a longer one


@dataclass(frozen=True, eq=False)
class HFSource:
    """An open folder as the source of a Model. Its files stay mapped as long as any array taken from here lives."""

    path: Path
    keys: Mapping[str, Any] = field(repr=False)  # of config.json
    tensors: Mapping[str, Tensor] = field(repr=False)  # by their own names
    size: int  # bytes of all files with tensors

    kind = "Hugging Face folder"
    version = None

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The tokenizer, as the keys that a GGUF file has for it. Raises FileFormatError or UnsupportedError."""
        names = ("tokenizer.json", "tokenizer_config.json")
        tokenizer, config = (_read_json(self.path / name) if (self.path / name).is_file() else {} for name in names)
        template = self.path / "chat_template.jinja"
        text = text_of(template, _MAX_JSON) if template.is_file() else None
        return tokenizer_metadata(self.path, tokenizer, config, self.keys, text)

    def without(self, key: str) -> "HFSource":
        """The folder as if config.json had not this key, whose dots lead into objects. Raises OptionError if it has not."""
        keys = deepcopy(dict(self.keys))
        inner: Any = keys
        *path, last = key.split(".")
        for name in path:
            inner = inner.get(name) if isinstance(inner, dict) else None
        check_has(self.path / "config.json", key, isinstance(inner, dict) and last in inner)
        del inner[last]
        return replace(self, keys=keys)

    @cached_property
    def recipe(self) -> Recipe:
        """Everything that config.json says about the model."""
        return read_recipe(self.keys, self.path / "config.json")

    @property
    def config(self) -> Config:
        """From config.json."""
        return self.recipe.config

    def weights(self, allow_nan: bool, i2s_layout: str) -> HFWeights:
        """The tensors of the folder, none of which is I2_S."""
        return HFWeights(self.path, self.tensors, self.recipe, allow_nan)


def open_folder(path: str | os.PathLike[str]) -> HFSource:
    """Check the form of config.json and the headers of all safetensors files.

    Raises FileFormatError or MissingFileError. PermissionError passes through.
    """
    path = path_of(path)
    config_path = path / "config.json"
    if not config_path.exists():
        raise MissingFileError(f"{config_path}: no such file, expected a Hugging Face folder or the path of a GGUF file")
    config = _read_json(config_path)
    index = _index(path)
    files = [SINGLE] if index is None else sorted(set(index.values()))
    tensors: dict[str, Tensor] = {}
    for file in files:
        if index is not None and not (path / file).exists():
            raise FileFormatError(f"{path / file}: the file is missing, {INDEX} has tensors in it")
        for name, tensor in open_safetensors(_checked(path / file)).items():
            if index is not None and index.get(name) != file:
                raise FileFormatError(f"{path / file}: tensor {shown(name)} is in {shown(index.get(name))} by {INDEX}")
            tensors[name] = tensor
    for name in (index or {}).keys() - tensors.keys():
        raise FileFormatError(f"{path / (index or {})[name]}: tensor {shown(name)} is missing, {INDEX} has it there")
    return HFSource(path, config, tensors, sum((path / file).stat().st_size for file in files))


def _read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file of bounded size. Raises FileFormatError."""
    value = json_of(_checked(path), _MAX_JSON)
    if not isinstance(value, dict):
        raise FileFormatError(f"{path}: {shown(value)}, expected a JSON object")
    return value


def _checked(path: Path) -> Path:
    check_exists(path)
    if not path.is_file():
        raise FileFormatError(f"{path}: expected a file")
    return path


def _index(path: Path) -> dict[str, str] | None:
    """The name of each tensor's file in the folder. None if there is a model.safetensors, which wins over an index as in transformers."""
    where = path / INDEX
    if (path / SINGLE).exists() or not where.exists():
        return None
    index = _read_json(where).get("weight_map")
    if not isinstance(index, dict) or not index:
        raise FileFormatError(f"{where}: weight_map is {shown(index)}, expected an object of file names")
    for name, file in index.items():
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file) or len(file.encode()) > _MAX_NAME:
            place = f"tensor {shown(name)} is in {shown(file)}"
            raise FileFormatError(f"{where}: {place}, expected the name of a safetensors file of the folder")
    if len(set(index.values())) > _MAX_SHARDS:
        raise FileFormatError(f"{where}: {len(set(index.values()))} files, expected at most {_MAX_SHARDS}")
    return index
