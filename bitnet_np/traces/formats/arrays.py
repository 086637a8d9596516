"""The trace of a file's arrays: points by their labels, in normal form, and the rows of steps of decoding joined.

Arrays of several sequences are cut into those of each.
"""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...base.errors import Error, FileFormatError, OptionError, shown
from ...model.records import Config
from ..labels import direct, meanings, returned
from ..normal_form import agreed_tokens, checked_dtype, checked_tokens, heads_of, normal_form, without_leading_ones
from ..points import MEANINGS, SCORES, Entry, Key, Points, Trace
from .loose_labels import nearest, not_understood, read_labels

MAX_POINTS = 1 << 16
"""Most points of one trace; 30 layers have 700."""


@contextmanager
def damaged(what: str) -> Iterator[None]:
    """Whatever is raised within, other than ours, becomes FileFormatError: libraries raise nearly anything for a damaged file."""
    try:
        yield
    except Error:
        raise
    except Exception as error:
        raise FileFormatError(f"{what}: {shown(str(error) or type(error).__name__)}") from None


def files_in(path: Path, ending: str, folders: re.Pattern[str], most: int) -> dict[str, Path]:
    """The files of a folder and of folders in it of such names, by their names within it. Raises FileFormatError for more than `most`."""
    inside = (Path(entry) for entry in os.scandir(path) if folders.fullmatch(entry.name) and entry.is_dir())
    files = [Path(entry) for folder in (path, *inside) for entry in os.scandir(folder) if entry.name.endswith(ending) and entry.is_file()]
    if len(files) > most:
        raise FileFormatError(f"{path}: {len(files)} files, expected {most} at most")
    return {file.relative_to(path).as_posix(): file for file in sorted(files)}


def head_of(path: Path, count: int) -> tuple[bytes, int]:
    """The first bytes of a file, at most `count`, and the size of the file."""
    with open(path, "rb") as file:
        return file.read(count), os.fstat(file.fileno()).st_size


def check_size(path: Path, size: int, expected: int, what: str, unit: str = "bytes") -> None:
    """Raises FileFormatError for a file of another size than what it holds has."""
    if size != expected:
        raise FileFormatError(f"{path}: {size} {unit}, expected {expected} for {what}")


def bare_shape(path: Path, shape: tuple[int, ...], count: int) -> tuple[int, ...]:
    """The shape of `count` numbers in a file that does not say it. A first length of -1 stands for as many rows as there are.

    Raises OptionError for a shape of no array.
    """
    if not shape or min(shape[1:], default=1) < 1 or not (shape[0] > 0 or (shape[0] == -1 and len(shape) > 1)):
        raise OptionError(f"{path}: shape is {list(shape)}, expected positive lengths, or -1 and those of a row")
    return shape if shape[0] > 0 else (max(1, count // prod(shape[1:])), *shape[1:])


class Header(NamedTuple):
    """An array in a file: its shape and dtype, and where its data lie."""

    shape: tuple[int, ...]
    dtype: np.dtype
    fortran: bool
    offset: int  # of the data

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def array(self, data: NDArray[np.uint8]) -> NDArray:
        """The array, given its bytes."""
        return data.view(self.dtype).reshape(self.shape, order="F" if self.fortran else "C")

    def entry(self, path: Path) -> Entry:
        """The array in a file whose header was read before, which is mapped when it is asked for."""
        return Entry(self.shape, self.dtype, partial(self.map_from, path))

    def map_from(self, path: Path) -> NDArray:
        """The array, mapped from that file. Raises FileFormatError if the file has become shorter."""
        if self.nbytes == 0:
            return np.empty(self.shape, self.dtype)
        try:
            return self.array(np.memmap(path, np.uint8, "r", self.offset, (self.nbytes,)).view(np.ndarray))
        except ValueError as error:
            raise FileFormatError(f"{path}: the file has changed since it was opened: {error}") from None


_ROWS_AND_WIDTH = {name for name, (axes, _) in MEANINGS.items() if axes == "T D"} - {"result_norm"}  # of the last token alone, perhaps

_WHOLE = -1
"""In place of a step's number: the rows of all tokens."""

_Parts = dict[Key | None, dict[int, list[str]]]
"""The labels of each point, or of the token ids, by steps: several that engines give one tensor."""


class Labelled(NamedTuple):
    """A file's arrays by their labels (labels.py), of one sequence or of several."""

    arrays: Mapping[str, Entry]
    path: Path
    kind: str  # the format, for messages
    ignored: tuple[str, ...] = ()  # records of the file that are none of these arrays

    def trace(self, tokens: NDArray | None = None, config: Config | None = None) -> Trace:
        """The trace of one sequence; labels that stand for nothing are ignored, and its notes say so.

        tokens, config: the token ids and the model, if they are known; they tell axes apart. Where labels have steps, a point is the rows
        of all steps, one after another. Raises FileFormatError if there is no point, if a point is there twice, if a step is missing, or if
        the file holds other tokens.
        """
        where, as_given = str(self.path), _unstacked(self.arrays, config)
        labels_read, notes = read_labels(as_given, config, where)
        arrays = {labels_read[label]: entry for label, entry in as_given.items()}
        parts = _parts(arrays, config, where)
        held = parts.pop(None, {})
        in_file = {step: checked_tokens(arrays[label].load(), where) for step, (label,) in sorted(held.items())}
        ids = agreed_tokens(np.concatenate([*in_file.values()]) if in_file else None, tokens, where)
        rows = _rows_of_steps(parts, arrays, where) | {step: len(part) for step, part in in_file.items()}
        rows[_WHOLE] = None if ids is None else len(ids)
        understood = _labels(held, *parts.values())
        # of scores each step has more keys than the one before
        points = {key: steps for key, steps in parts.items() if key and (key.name not in SCORES or _WHOLE in steps)}
        used = _labels(held, *points.values())
        entries = {key: _point(key, steps, arrays, rows, where, config) for key, steps in points.items()}
        ignored = (*self.ignored, *(label for label in arrays if label not in used))
        if not entries:
            raise FileFormatError(
                f"{where}: no point of a forward pass in it, expected labels such as attn_norm-0; it has {_start(ignored)}"
            )
        if unread := tuple(label for label in arrays if label not in understood):
            notes = (*notes, not_understood(unread))
        return Trace(Points(entries), ids, f"{where} ({self.kind})", ignored=ignored, unread=unread, notes=notes)


def _unstacked(arrays: Mapping[str, Entry], config: Config | None) -> Mapping[str, Entry]:
    """The arrays of a file; of a stack of hidden_states alone, [layers + 1, T, D] or [layers + 1, 1, T, D], each by its label."""
    if config is None or len(arrays) != 1:
        return arrays
    (entry,) = arrays.values()
    if len(entry.shape) < 3 or (entry.shape[0], entry.shape[-1]) != (config.n_layers + 1, config.width):
        return arrays
    return {
        f"hidden_states.{n}": Entry(entry.shape[1:], entry.dtype, lambda n=n: entry.load()[n])  # type: ignore[misc]
        for n in range(config.n_layers + 1)
    }


def _named(key: Key | None, step: int) -> str:
    return f"{key or 'tokens'}{'' if step == _WHOLE else f' of step {step}'}"


def _parts(arrays: Mapping[str, Entry], config: Config | None, where: str) -> _Parts:
    """What each label stands for. Raises FileFormatError for a point that is there twice, as a whole and by steps, or lacks a step."""
    parts: _Parts = {}
    for label, (key, step, second) in sorted(meanings(arrays, config, where).items(), key=lambda item: item[1].second):
        n = _WHOLE if step is None else step
        labels = parts.setdefault(key, {}).setdefault(n, [])
        if labels and not second:
            raise FileFormatError(f"{where}: {_named(key, n)} is there twice, expected each point once")
        labels.append(label)
    numbers = {step for by_step in parts.values() for step in by_step} - {_WHOLE}
    for key, by_step in parts.items():
        if _WHOLE in by_step and len(by_step) > 1:
            raise FileFormatError(f"{where}: {key or 'tokens'} is there as a whole and by steps, expected one of both")
        missing = min(numbers, default=0)
        while missing in by_step:
            missing += 1
        if _WHOLE not in by_step and missing <= max(numbers):
            span = f"{min(numbers)} to {max(numbers)}"
            raise FileFormatError(f"{where}: {key or 'tokens'} has no step {missing}, expected each from {span}, the steps of the dump")
    return parts


def _normal(key: Key, entry: Entry, rows: int | None, where: str, config: Config | None) -> Entry:
    """The array of a point in normal form. Raises FileFormatError if the point cannot have its shape or dtype."""
    form = normal_form(key, entry.shape, rows, where, heads_of(key, config))
    dtype = checked_dtype(key, entry.dtype, where).newbyteorder("=")
    return Entry(form.shape, dtype, lambda: form.of(entry.load()).astype(dtype, copy=False))


def _labels(*parts: Mapping[int, Sequence[str]]) -> set[str]:
    """All labels of points, or of the token ids."""
    return {label for by_step in parts for labels in by_step.values() for label in labels}


def _point(
    key: Key,
    by_step: Mapping[int, Sequence[str]],
    arrays: Mapping[str, Entry],
    rows: Mapping[int, int | None],
    where: str,
    config: Config | None,
) -> Entry:
    """The array of a point: of each step one of the arrays that a file has of it, which must agree, one after another."""
    steps = []
    for step, labels in sorted(by_step.items()):
        forms = {label: _normal(key, arrays[label], rows[step], where, config) for label in labels}
        steps.append(_agreed(_named(key, step), forms, where))
    return _joined(key, steps, where)


def _rows_of_steps(parts: _Parts, arrays: Mapping[str, Entry], where: str) -> dict[int, int | None]:
    """The number of rows of each step, by a point whose shape cannot be read in two ways; None without one."""
    rows: dict[int, int | None] = {step: None for by_step in parts.values() for step in by_step}
    for key, by_step in parts.items():
        for step, (label, *_) in by_step.items():
            if key is not None and key.name in _ROWS_AND_WIDTH and len(arrays[label].shape) > 1:
                rows[step] = normal_form(key, arrays[label].shape, None, where).shape[0]
    return rows


def _agreed(name: str, entries: Mapping[str, Entry], where: str) -> Entry:
    """The first of the arrays that a file has of one tensor, by label. Raises FileFormatError if they are not the same."""
    (_, first), *others = entries.items()
    for label, entry in others:
        if not np.array_equal(first.load(), entry.load(), equal_nan=True):
            raise FileFormatError(f"{where}: {shown(label)} is {name} again, with other numbers, expected the same")
    return first


def _start(labels: Sequence[str]) -> str:
    """The first labels of a file without points, with the name that the first may stand for."""
    if not labels:
        return "nothing"
    first, *others = map(shown, labels[:5])
    near = nearest(labels[0])
    return ", ".join([first + (f" (did you mean {near}?)" if near else ""), *others])


def _joined(key: Key, steps: list[Entry], where: str) -> Entry:
    """The rows of all steps, one after another."""
    if len({(step.dtype, step.shape[1:]) for step in steps}) > 1:
        several = ", ".join(dict.fromkeys(f"{step.dtype} {list(step.shape)}" for step in steps))
        raise FileFormatError(f"{where}: the steps of {key} are {several}, expected one dtype and one width")
    shape = sum(step.shape[0] for step in steps), *steps[0].shape[1:]
    return Entry(shape, steps[0].dtype, lambda: np.concatenate([step.load() for step in steps])) if len(steps) > 1 else steps[0]


@dataclass(frozen=True)
class Batch:
    """Arrays of several sequences: [B, T, ...] or [BT, ...], padded where lengths differ, or all tokens end to end, [sum of lengths, ...].

    Scores are [B, H, T, T].
    """

    content: Labelled
    lengths: tuple[int, ...]  # of the sequences, at least two
    left: bool = False  # whether padding is in front of a sequence

    def misfit(self) -> str | None:
        """Why the arrays cannot belong to the sequences of these lengths; None if they can."""
        count = len(self.lengths)
        for label, entry in self.content.arrays.items():
            shape = self._shape(entry)
            if not shape or 0 in shape or shape[0] not in (count, sum(self.lengths)):
                expected = f"{count} sequences, [{count}, {max(self.lengths)}, width], or {sum(self.lengths)} rows"
                return f"{self.content.path}: {shown(label)} has shape {list(entry.shape)}, expected {expected}"
        return None

    def padded(self) -> bool:
        """Whether there are rows of padding."""
        shapes = [self._shape(entry) for entry in self.content.arrays.values()]
        return min(self.lengths) < max(self.lengths) and any(shape[1:2] == (max(self.lengths),) for shape in shapes)

    def sequence(self, b: int) -> Labelled:
        """The arrays of one sequence, without padding."""
        return self.content._replace(arrays={label: self._cut(label, array, b) for label, array in self.content.arrays.items()})

    def _shape(self, entry: Entry) -> tuple[int, ...]:
        """The shape without leading axes of length 1; [BT, ...] of padded sequences as [B, T, ...]."""
        shape, count, longest = without_leading_ones(entry.shape, 1), len(self.lengths), max(self.lengths)
        if shape[:1] == (count * longest,) and count * longest != sum(self.lengths):
            shape = (count, longest, *shape[1:])
        return shape

    def _cut(self, label: str, entry: Entry, b: int) -> Entry:
        shape, longest, length = self._shape(entry), max(self.lengths), self.lengths[b]
        index: tuple[int | slice, ...] = (b,)
        kept = slice(longest - length, None) if self.left else slice(length)
        if shape[0] != len(self.lengths):
            end = sum(self.lengths[: b + 1])
            index = (slice(end - length, end),)
        elif len(shape) == 4 and (key := direct(label) or returned(label, None)) is not None and key.name in SCORES:
            index = (b, slice(None), kept, kept)
        elif shape[1:2] == (longest,):
            index = (b, kept)
        part = np.broadcast_to(np.zeros((), entry.dtype), shape)[index].shape
        return Entry(part, entry.dtype, lambda: entry.load().reshape(shape)[index])
