"""A plan of a sweep: a TOML file, checked whole before anything starts. Every error names the line.

[models]            name = "file, folder or glob", or a list of them
[tokens]            name = { ids = [1, 2] }, { files = "globs" }, { text = "..." } or { random = length, seed = 0, count = 1 }
[[run]]             do = "logits", "nll" or "check", and with which models and tokens; any number of them
"""

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import Error, FileFormatError, OptionError, listed, shown
from ..base.validate import integer, integers, number, path_of, text_of
from ..engine.dialects import DIALECTS
from ..engine.machine import digest_of
from ..engine.tokens import check_tokens
from ..files.load import Source, open_model
from ..generation.nll import check_windows
from ..judge.precision import PROFILES
from ..judge.verdict import Verdict
from ..model import packing
from ..model.records import Config
from ..text.tokenizer import tokenizer_from
from ..traces.token_files import check_ids, read_token_ids
from .process import ModelFile
from .tasks import OPERATIONS, Task, profile_of

MOST_ROWS = 1_000_000
"""Rows of a plan: Dask's scheduler holds them all."""

_MOST_TEXT = 1 << 24  # bytes
_TOP = {"models": dict, "tokens": dict, "run": list}
_KINDS = {"ids": list, "files": (str, list), "text": str, "random": int}
_RUN = {"do": str, "models": list, "tokens": list, "as": str, "precision": str, "i2s_layout": str}
_MORE: dict[str, dict[str, Any]] = {
    "logits": {},
    "nll": {"at_most": (int, float)},
    "check": {"accept": str, "dump": str},
}


@dataclass(frozen=True)
class _Place:
    """A part of a plan, for messages: a table's header and the number of tables with that header before it."""

    path: Path
    text: str = field(repr=False)
    header: str = ""
    n: int = 0

    def error(self, message: str, key: str = "") -> OptionError:
        """An error of this part, or of a key in it, with its line."""
        line, inside, left = 0, not self.header, self.n
        for row, text in enumerate(self.text.splitlines(), 1):
            stripped = text.strip()
            if stripped.startswith("["):
                inside = bool(self.header) and re.sub(r"\s", "", stripped).startswith(self.header) and (left := left - 1) < 0
                line = row if inside and not line else line
            elif inside and key and re.match(rf"[\"']?{re.escape(key)}[\"']?\s*=", stripped):
                line = row
                break
        where = f"{self.path}, line {line}" if line else str(self.path)
        return OptionError(f"{where}: {message}")

    def member(self, table: Mapping[str, Any], key: str, kind: Any, default: Any = None) -> Any:
        """A value of a table that has to be of this type. Without a default it has to be there."""
        value = table.get(key, default)
        if value is None:
            raise self.error(f"{key} is missing")
        if not isinstance(value, kind) or isinstance(value, bool):
            kinds = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            raise self.error(f"{key} is {shown(value)}, expected a value of type {kinds}", key)
        return value

    def texts(self, table: Mapping[str, Any], key: str, default: Any = None) -> list[str]:
        """A list of texts; a single text is a list of one."""
        value = self.member(table, key, (str, list), default)
        values = [value] if isinstance(value, str) else value
        if not values or not all(isinstance(text, str) and text and "\0" not in text for text in values):
            raise self.error(f"{key} is {shown(value)}, expected texts that are not empty", key)
        return values

    def known(self, table: Mapping[str, Any], keys: Any) -> None:
        """Raises OptionError for a key that has no meaning here."""
        for key in table:
            if key not in keys:
                raise self.error(f"unknown key {shown(key)}, expected {', '.join(keys)}", key)

    def one_of(self, table: Mapping[str, Any], key: str, choices: Any, default: str | None = None) -> str:
        """A text that is one of the choices."""
        value = self.member(table, key, str, default)
        if value not in choices and value != default:
            raise self.error(f"{key} is {shown(value)}, expected one of {', '.join(choices)}", key)
        return value


def read_plan(path: Path) -> tuple[Task, ...]:
    """The rows of a plan, which is read and checked with every file that it names. Paths in it are relative to its folder.

    Raises OptionError or FileFormatError that names the line: for a key or value that has no meaning, a file that is not there, a model
    that is not supported, tokens outside a vocabulary or a context.
    """
    path = path_of(path)
    text = text_of(path, _MOST_TEXT)
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # its message has the line
        raise FileFormatError(f"{path}: no TOML: {error}") from None
    top = _Place(path, text)
    top.known(content, _TOP)
    tables = {key: top.member(content, key, kind) for key, kind in _TOP.items()}
    reader = _Reader(path, text, tables["models"], tables["tokens"])
    tasks: dict[str, Task] = {}
    for n, run in enumerate(tables["run"]):
        place = _Place(path, text, "[[run]]", n)
        if not isinstance(run, dict):
            raise top.error(f"run is {shown(run)}, expected tables [[run]]", "run")
        for task in reader.tasks(place, run):
            tasks.setdefault(task.key, task)
            if len(tasks) > MOST_ROWS:
                raise place.error(f"more than {MOST_ROWS} rows, expected at most so many")
    return tuple(tasks.values())


class _Reader:
    """The models and tokens of a plan, each read when an entry asks for it."""

    def __init__(self, path: Path, text: str, models: dict[str, Any], tokens: dict[str, Any]) -> None:
        self.folder, self.models, self.tokens = path.parent, models, tokens
        self.model_place, self.token_place = _Place(path, text, "[models]"), _Place(path, text, "[tokens]")
        self.paths, self.opened, self.sequences = cache(self._paths), cache(self._opened), cache(self._sequences)
        self.digest, self.encoded = cache(digest_of), cache(self._encoded)

    def tasks(self, place: _Place, run: Mapping[str, Any]) -> Iterator[Task]:
        """The tasks of one entry: every model with every sequence of tokens."""
        do = place.one_of(run, "do", OPERATIONS)
        place.known(run, _RUN | _MORE[do])
        fixed = {"operation": do} | self._settings(place, run, do)
        layout = place.one_of(run, "i2s_layout", packing.I2S_LAYOUTS, packing.I2S_DEFAULT)
        for name in self._chosen(place, run, "models", self.models):
            for path in self.paths(name):
                source, sha256 = self.opened(name, path)
                model = ModelFile(str(path), sha256, i2s_layout=layout)
                for tokens in self._chosen(place, run, "tokens", self.tokens):
                    for label, ids in self._ids(tokens, source):
                        self._check_ids(place, source, ids, do, f"{path}, {label}")
                        yield Task(model=model, tokens=label, ids=ids, **fixed | self._dump(place, run, do, path, label))

    def _settings(self, place: _Place, run: Mapping[str, Any], do: str) -> dict[str, Any]:
        """The fields of a task that an entry gives all its rows."""
        settings: dict[str, Any] = {"dialect": place.one_of(run, "as", PROFILES if do == "check" else DIALECTS, "")}
        settings["precision"] = place.member(run, "precision", str, "")
        try:
            profile_of(do, settings["dialect"], settings["precision"])
        except Error as error:
            raise place.error(str(error), "precision") from None
        if "at_most" in run:
            settings["at_most"] = number("at_most", place.member(run, "at_most", (int, float)))
        if do == "check":
            settings["accept"] = place.one_of(run, "accept", [v.name for v in Verdict if v.exit_code == 0], Verdict.NARROW.name)
        return settings

    def _dump(self, place: _Place, run: Mapping[str, Any], do: str, path: Path, label: str) -> dict[str, str]:
        """The dump that a row of `check` judges."""
        if do != "check":
            return {}
        pattern = place.texts(run, "dump")[0]
        names = {"{model}": path.stem, "{tokens}": label}
        for name in sorted({*re.findall(r"\{\w*\}", pattern)} - names.keys()):
            raise place.error(f"dump has {name}, expected {', '.join(names)}", "dump")
        dump = (self.folder / re.sub(r"\{\w*\}", lambda match: names[match[0]], pattern)).absolute()
        if not dump.exists():
            raise place.error(f"{dump}: no such file or folder", "dump")
        return {"dump": str(dump), "dump_sha256": self.digest(dump)}

    def _chosen(self, place: _Place, run: Mapping[str, Any], key: str, table: dict[str, Any]) -> list[str]:
        """The names of models or tokens of an entry: those it lists, or all."""
        names = place.texts(run, key, list(table))
        for name in names:
            if name not in table:
                raise place.error(f"{key} has {shown(name)}, expected names of [{key}]: {listed(list(table))}", key)
        return names

    def _files(self, place: _Place, key: str, patterns: list[str]) -> list[Path]:
        """The files that names and globs stand for."""
        paths: list[Path] = []
        for pattern in patterns:
            path = (self.folder / pattern).absolute()
            try:
                matches = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            except (ValueError, OSError) as error:
                raise place.error(f"{key} has {shown(pattern)}: {error}", key) from None
            if not matches:
                raise place.error(f"{key} has {shown(pattern)}: no such file or folder", key)
            paths += matches
        return paths

    def _paths(self, name: str) -> list[Path]:
        """The model files of a name. A folder that is no model is all GGUF files in it."""
        paths = []
        for path in self._files(self.model_place, name, self.model_place.texts(self.models, name)):
            is_zoo = path.is_dir() and not (path / "config.json").exists()
            paths += sorted(path.glob("*.gguf")) if is_zoo else [path]
        if not paths:
            raise self.model_place.error(f"{name}: no GGUF file in the folder", name)
        return paths

    def _opened(self, name: str, path: Path) -> tuple[Source, str]:
        """A model's header, and the digest of its file."""
        try:
            source = open_model(path)
            source.config()
        except (Error, OSError) as error:
            raise self.model_place.error(str(error), name) from None
        return source, self.digest(path)

    def _ids(self, name: str, source: Source) -> Iterator[tuple[str, NDArray[np.int64]]]:
        """The labels and ids of the sequences of a name; those of texts and random ones depend on the model."""
        place, table = self.token_place, self.token_place.member(self.tokens, name, dict)
        kinds = [kind for kind in _KINDS if kind in table]
        if len(kinds) != 1 or set(table) - {*kinds, *(("seed", "count") if kinds == ["random"] else ())}:
            raise place.error(f"{name} has the keys {shown(list(table))}, expected one of {', '.join(_KINDS)}", name)
        try:
            place.member(table, kinds[0], _KINDS[kinds[0]])
            if kinds == ["text"]:
                yield name, self.encoded(name, source.path)
            elif kinds == ["random"]:
                yield from _random(name, source.config(), table["random"], table.get("seed", 0), table.get("count", 1))
            else:
                yield from self.sequences(name)
        except (Error, ValueError, OSError) as error:
            raise error if str(place.path) in str(error) else place.error(f"{name}: {error}", name) from None

    def _encoded(self, name: str, path: Path) -> NDArray[np.int64]:
        source = open_model(path)
        ids = tokenizer_from(source.metadata, source.path).encode(self.tokens[name]["text"])
        return integers("tokens", check_ids(name, np.asarray(ids)), 1)

    def _sequences(self, name: str) -> list[tuple[str, NDArray[np.int64]]]:
        """The sequences of a name that are the same for every model."""
        place, table = self.token_place, self.tokens[name]
        if "ids" in table:
            return [(name, integers("ids", check_ids(name, np.asarray(table["ids"])), 1))]
        sequences: list[tuple[str, NDArray[np.int64]]] = []
        for path in self._files(place, name, place.texts(table, "files")):
            ids = check_ids(str(path), read_token_ids(path))
            rows = integers(str(path), ids, ids.ndim)
            label = f"{name}-{path.stem}"
            sequences += [(label, rows)] if rows.ndim == 1 else [(f"{label}-{n}", row) for n, row in enumerate(rows)]
        return sequences

    def _check_ids(self, place: _Place, source: Source, ids: NDArray[np.int64], do: str, what: str) -> None:
        """Raises OptionError for tokens that the operation cannot take with this model."""
        config = source.config()
        try:
            if do == "nll":
                check_windows(config, ids)
            elif len(check_tokens(config, ids[None]).ids[0]) > config.context:
                raise OptionError(f"{len(ids)} tokens, the model's context is {config.context}")
        except Error as error:
            raise place.error(f"{what}: {error}") from None


def _random(name: str, config: Config, length: Any, seed: Any, count: Any) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Sequences of random ids of a model's vocabulary, each from a generator of its own."""
    length, seed = integer("random", length, 1, config.context), integer("seed", seed, 0)
    for n in range(integer("count", count, 1, MOST_ROWS)):
        yield (name if count == 1 else f"{name}-{n}"), np.random.default_rng([seed, n]).integers(0, config.vocab, length)
