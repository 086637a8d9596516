"""What a server returns for a prompt, whatever its API, made from JSON whose values are used only after their types are checked.

Every function raises ServerError, which names the value.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ServerError, shown

T = TypeVar("T")
Entries = dict[int, float]
"""Log-probabilities by token id."""

_NAMES = {dict: "an object", list: "an array", str: "a string", int: "an integer", bool: "true or false"}
_MOST = 1 << 31  # token ids are int32 in every server


@dataclass(frozen=True, eq=False)
class TopLogprobs:
    """The most probable next tokens after one position, as a server or a file has them."""

    position: int  # of the token that they follow
    ids: NDArray[np.int64]  # [n], no two alike, the most probable first
    logprobs: NDArray[np.float64]  # [n] natural logarithms, NaN where the server sent none; nothing else is checked. Or logits


@dataclass(frozen=True, eq=False)
class Completions:
    """A greedy completion with log-probabilities."""

    tokens: NDArray[np.int64] = field(repr=False)  # [N] the prompt, and what the server continued it with
    prompt: int  # number of tokens of the prompt, at least 1
    k: int  # log-probabilities asked for at each position: no token that is not listed may be more probable than the k-th
    top: tuple[TopLogprobs, ...] = field(repr=False)  # by position, ascending; positions may be missing
    notes: tuple[str, ...] = ()  # what the server left out
    logits: bool = False  # whether logits stand in place of log-probabilities
    dialect: str | None = None  # whose roundings they have, where the answer shows it


def top_logprobs(position: int, entries: dict[int, float]) -> TopLogprobs:
    """The record of log-probabilities by token id, sorted. NaN comes last."""
    ids, values = np.array(list(entries), np.int64), np.array(list(entries.values()), np.float64)
    order = np.argsort(-values, kind="stable")
    return TopLogprobs(position, ids[order], values[order])


def of_type(where: str, value: Any, kind: type[T]) -> T:
    """`value`, if it is exactly of this type: true is no integer."""
    if type(value) is not kind:
        raise ServerError(f"{where} is {shown(value)}, expected {_NAMES[kind]}")
    return value


def member(where: str, value: Any, name: str, kind: type[T]) -> T:
    """The member `name` of an object, which must be there."""
    return of_type(f"{where}.{name}", of_type(where, value, dict).get(name), kind)


def token(where: str, value: Any) -> int:
    """A token id."""
    if not 0 <= of_type(where, value, int) < _MOST:
        raise ServerError(f"{where} is {shown(value)}, expected a token id")
    return value


def tokens(where: str, value: Any) -> list[int]:
    """An array of token ids."""
    return [token(f"{where}[{i}]", item) for i, item in enumerate(of_type(where, value, list))]


def logprob(where: str, value: Any) -> float:
    """A log-probability. null, which JSON has in place of NaN, is NaN; whether the number makes sense is for the judge to say."""
    if value is None:
        return float("nan")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ServerError(f"{where} is {shown(value)}, expected a number")
    try:
        return float(value)
    except OverflowError:
        return float("inf") if value > 0 else float("-inf")


def listed(where: str, value: Any, pair: Callable[[str, Any], tuple[int, float]] | None = None) -> Entries:
    """The log-probabilities by token id of an array. pair: those of an item; without it they are objects with `id` and `logprob`."""
    entries: Entries = {}
    for i, item in enumerate(of_type(where, value, list)):
        here = f"{where}[{i}]"
        identifier, number = (pair or _object)(here, item)
        if identifier in entries:
            raise ServerError(f"{here} has the id {identifier}, which is there twice")
        entries[identifier] = number
    return entries


def _object(where: str, value: Any) -> tuple[int, float]:
    return token(f"{where}.id", of_type(where, value, dict).get("id")), logprob(f"{where}.logprob", value.get("logprob"))


def rows(where: str, items: Sequence[Any], first: int, entries: Callable[[str, Any], Entries]) -> dict[int, Entries]:
    """The entries of an array's items by the position whose logits they are; `first` is the first item's. At -1 nothing is predicted."""
    return {first + i: entries(f"{where}[{i}]", item) for i, item in enumerate(items) if first + i >= 0}


def completions(where: str, ids: Sequence[int], new: Sequence[int], most: int, k: int, by_position: Mapping[int, Entries]) -> Completions:
    """The record of a prompt `ids` that the server continued by the tokens `new`, `most` at most."""
    if len(new) > most:
        raise ServerError(f"{where}: {len(new)} tokens were generated, expected at most {most}")
    top = tuple(top_logprobs(position, by_position[position]) for position in sorted(by_position))
    return Completions(np.array([*ids, *new], np.int64), len(ids), k, top)


def prompt_length(where: str, value: Any, sent: int) -> None:
    """Check the number of prompt tokens that the server counted against the number that was sent."""
    if of_type(where, value, int) != sent:
        more = ": it puts a BOS in front of token ids" if value == sent + 1 else ""
        raise ServerError(f"{where} is {shown(value)}, but {sent} token ids were sent{more}")
