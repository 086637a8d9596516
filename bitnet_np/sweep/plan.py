"""A plan of a sweep: a TOML file, checked whole before anything starts. Every error names the line.

[models]            name = "file, folder or glob", or a list of them
[tokens]            name = { ids = [1, 2] }, { files = "globs" }, { text = "..." } or { random = length, seed = 0, count = 1 }
[[run]]             do = "logits", "nll" or "check", and with which models and tokens; any number of them
"""

import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import UnionType
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from ..base.errors import FileFormatError, OptionError, listed, shown
from ..base.validate import check_exists, integer, integers, path_of, text_of
from ..engine.dialects import DIALECTS
from ..engine.tokens import check_tokens
from ..files.digest import digest_of
from ..files.load import open_model
from ..generation.nll import check_windows
from ..judge.law.precision import PROFILES
from ..judge.verdict import Verdict
from ..model import packing
from ..text.tokenizer import tokenizer_from
from ..traces.token_files import check_ids, read_token_ids
from .tasks import OPERATIONS, ModelFile, Task

MOST_ROWS = 1_000_000
"""Rows of a plan: Dask's scheduler holds them all."""

_MOST_TEXT = 1 << 24  # bytes

Kinds = Mapping[str, type | UnionType | Collection[str]]
"""The keys of a table, each with its type or the texts that it may be."""

_TOML: dict[Any, str] = {dict: "a table", list: "an array", str: "a string", int: "an integer", float: "a float"}
"""What TOML calls these types."""

_TOP: Kinds = {"models": dict, "tokens": dict, "run": list}
_TOKENS: Kinds = {"ids": list, "files": str | list, "text": str, "random": int}
_ANY: Kinds = {"do": OPERATIONS, "models": list, "tokens": list, "precision": str, "i2s_layout": packing.I2S_LAYOUTS}
_RUN: dict[str, Kinds] = {
    "logits": {**_ANY, "as": DIALECTS},
    "nll": {**_ANY, "as": DIALECTS, "at_most": int | float},
    "check": {**_ANY, "as": PROFILES, "accept": [v.name for v in Verdict if v.exit_code == 0], "dump": str},
}


class _PlanError(OptionError):
    """An error that names its line."""


@dataclass(frozen=True)
class _Table:
    """A table of a plan: its values, and where it stands, for messages."""

    path: Path
    text: str = field(repr=False)
    values: Mapping[str, Any]
    header: str = ""  # as its line begins
    n: int = 0  # tables with that header before it

    @contextmanager
    def at(self, key: str = "", what: str = "") -> Iterator[None]:
        """Context in which errors belong to a key: they name its line, or the header's line if the key is not found, and `what`."""
        try:
            yield
        except _PlanError:
            raise
        except (ValueError, OSError) as error:
            lines = list(enumerate(self.text.splitlines(), 1))
            headers = [n for n, line in lines if line.lstrip().startswith(self.header)]
            begin = headers[self.n] if self.n < len(headers) else 1
            word = re.compile(rf"\s*[\"']?{re.escape(key)}[\"']?\s*=")
            keys = (n for n, line in lines[begin - 1 :] if key in self.values and word.match(line))
            raise _PlanError(f"{self.path}, line {next(keys, begin)}: {what}{error}") from None

    def check(self, kinds: Kinds, *needed: str) -> None:
        """Raises OptionError for a key or a value that has no meaning here, or a key that is needed and not there."""
        for key in (*needed, *self.values):
            with self.at(key):
                if key not in kinds:
                    raise OptionError(f"unknown key {shown(key)}, expected {', '.join(kinds)}")
                _check(key, self.values.get(key), kinds[key])


def _check(key: str, value: Any, kind: type | UnionType | Collection[str]) -> None:
    """Raises OptionError for a value that is not of its type, or none of the texts that it may be."""
    if value is None:
        raise OptionError(f"{key} is missing")
    expected = kind if isinstance(kind, type | UnionType) else str
    if not isinstance(value, expected) or isinstance(value, bool):
        raise OptionError(f"{key} is {shown(value)}, expected {' or '.join(_TOML[known] for known in get_args(expected) or [expected])}")
    if not isinstance(kind, type | UnionType) and value not in kind:
        raise OptionError(f"{key} is {shown(value)}, expected one of {', '.join(kind)}")


def _texts(key: str, value: Any) -> list[str]:
    """A list of texts; a single text is a list of one. Raises OptionError."""
    values = value if isinstance(value, list) else [value]
    if not values or not all(isinstance(text, str) and text and "\0" not in text for text in values):
        raise OptionError(f"{key} is {shown(value)}, expected texts that are not empty")
    return values


def read_plan(path: Path) -> tuple[Task, ...]:
    """The rows of a plan, which is read and checked with every file that they need. Paths in it are relative to its folder.

    Raises OptionError or FileFormatError that names the line: for a key or value that has no meaning, a file that is not there, a model
    that is not supported, tokens outside a vocabulary or a context.
    """
    path = path_of(path)
    text = text_of(path, _MOST_TEXT)
    try:
        top = _Table(path, text, tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # its message has the line
        raise FileFormatError(f"{path}: no TOML: {error}") from None
    top.check(_TOP, *_TOP)
    reader = _Reader(*(replace(top, values=top.values[name], header=f"[{name}") for name in ("models", "tokens")))
    tasks: dict[str, Task] = {}
    for n, values in enumerate(top.values["run"]):
        run = replace(top, values=values, header="[[run]]", n=n)
        with run.at():
            _check("run", values, dict)
            for task in reader.tasks(run):
                tasks.setdefault(task.key, task)
                if len(tasks) > MOST_ROWS:
                    raise OptionError(f"the plan has more than the {MOST_ROWS} rows that it may have")
    return tuple(tasks.values())


class _Reader:
    """The models and tokens of a plan, each read when an entry asks for it, once."""

    def __init__(self, models: _Table, tokens: _Table) -> None:
        self.folder, self.models, self.tokens = models.path.parent, models, tokens
        self.files, self.sequences, self.source, self.rows = cache(self._files), cache(self._sequences), cache(open_model), cache(_rows)

    def tasks(self, run: _Table) -> Iterator[Task]:
        """The tasks of one entry: every model with every sequence of tokens."""
        values, do = run.values, run.values.get("do")
        run.check(_RUN.get(str(do), _RUN["check"]), "do", *(("dump",) if do == "check" else ()))
        settings = {"operation": do, "dialect": values.get("as", ""), "precision": values.get("precision", "")}
        settings |= {key: values[key] for key in ("accept", "at_most") if key in values}
        layout = {"i2s_layout": values["i2s_layout"]} if "i2s_layout" in values else {}
        for file in (file for name in self._named(run, "models", self.models) for file in self.files(name)):
            config = self.source(file.path).config
            names = self._named(run, "tokens", self.tokens)
            for label, ids in (sequence for name in names for sequence in self.sequences(name, file.path)):
                with run.at(what=f"{file.path}, {label}: "):
                    if do == "nll":
                        check_windows(config, ids)
                    elif len(check_tokens(config, ids[None]).ids[0]) > config.context:
                        raise OptionError(f"{len(ids)} tokens, the model's context is {config.context}")
                task = Task(model=replace(file, **layout), tokens=label, ids=ids, **settings, **self._dump(run, file, label))
                with run.at("precision"):
                    task.profile()
                yield task

    def _named(self, run: _Table, key: str, table: _Table) -> list[str]:
        """The names of models or tokens of an entry: those it lists, or all."""
        with run.at(key):
            names = _texts(key, run.values.get(key, list(table.values)))
            for name in names:
                if name not in table.values:
                    raise OptionError(f"{key} has {shown(name)}, expected names of [{key}]: {listed(list(table.values))}")
            return names

    def _dump(self, run: _Table, file: ModelFile, label: str) -> dict[str, Any]:
        """The dump that a row of `check` judges."""
        if "dump" not in run.values:
            return {}
        names = {"{model}": Path(file.path).stem, "{tokens}": label}
        with run.at("dump"):
            (pattern,) = _texts("dump", run.values["dump"])
            for name in sorted({*re.findall(r"\{\w*\}", pattern)} - names.keys()):
                raise OptionError(f"dump has {name}, expected {', '.join(names)}")
            dump = (self.folder / re.sub(r"\{\w*\}", lambda match: names[match[0]], pattern)).absolute()
            check_exists(dump)
            return {"dump": str(dump), "dump_sha256": digest_of(dump)}

    def _matches(self, key: str, patterns: Any) -> Iterator[Path]:
        """The files that names and globs stand for."""
        for pattern in _texts(key, patterns):
            path = (self.folder / pattern).absolute()
            matches = [path] if path.exists() else sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))
            if not matches:
                raise OptionError(f"{key} has {shown(pattern)}: no such file or folder")
            yield from matches

    def _files(self, name: str) -> list[ModelFile]:
        """The models of a name. A folder that is no model is all GGUF files in it."""
        files = []
        with self.models.at(name):
            for path in self._matches(name, self.models.values[name]):
                is_zoo = path.is_dir() and not (path / "config.json").exists()
                models = sorted(path.glob("*.gguf")) if is_zoo else [path]
                files += [ModelFile(str(file), digest_of(file)) for file in models]
            if not files:
                raise OptionError(f"{name}: no GGUF file in the folder")
            for file in files:
                _ = self.source(file.path).config  # is read, or refused, here
        return files

    def _sequences(self, name: str, model: str) -> list[tuple[str, NDArray[np.int64]]]:
        """The labels and ids of the sequences of a name; those of texts and random ones depend on the model."""
        table, source = self.tokens.values[name], self.source(model)
        with self.tokens.at(name, f"{name}: "):
            _check(name, table, dict)
            kinds = [kind for kind in _TOKENS if kind in table]
            if len(kinds) != 1 or set(table) - {*kinds, *(("seed", "count") if kinds == ["random"] else ())}:
                raise OptionError(f"keys are {shown(list(table))}, expected one of {', '.join(_TOKENS)}")
            (kind,) = kinds
            _check(kind, table[kind], _TOKENS[kind])
            if kind == "random":
                length, vocab = integer("random", table[kind], 1, source.config.context), source.config.vocab
                seed, count = integer("seed", table.get("seed", 0), 0), integer("count", table.get("count", 1), 1, MOST_ROWS)
                rows = [np.random.default_rng([seed, n]).integers(0, vocab, length) for n in range(count)]
                return [(name if count == 1 else f"{name}-{n}", row) for n, row in enumerate(rows)]
            if kind == "files":
                read = [(f"{name}-{path.stem}", self.rows(path)) for path in self._matches(kind, table[kind])]
                return [
                    (f"{label}-{n}" if rows.ndim == 2 else label, row) for label, rows in read for n, row in enumerate(np.atleast_2d(rows))
                ]
            ids = table[kind] if kind == "ids" else tokenizer_from(source.metadata, source.path).encode(table[kind])
            return [(name, integers(kind, check_ids(kind, np.asarray(ids)), 1))]


def _rows(path: Path) -> NDArray[np.int64]:
    """The sequences in a file, [T] or [B, T]."""
    ids = check_ids(str(path), read_token_ids(path))
    return integers(str(path), ids, ids.ndim)
