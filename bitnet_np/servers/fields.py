"""Values of a server's JSON, taken out only after their types are checked. Every function raises ServerError, which names the value."""

from typing import Any, TypeVar

from ..base.errors import ServerError, shown

T = TypeVar("T")

_NAMES = {dict: "an object", list: "an array", str: "a string", int: "an integer", bool: "true or false"}
_MOST = 1 << 31  # token ids are int32 in every server


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


def listed(where: str, value: Any) -> dict[int, float]:
    """The log-probabilities by token id of an array of objects with `id` and `logprob`."""
    entries: dict[int, float] = {}
    for i, item in enumerate(of_type(where, value, list)):
        here = f"{where}[{i}]"
        identifier = token(f"{here}.id", of_type(here, item, dict).get("id"))
        if identifier in entries:
            raise ServerError(f"{here}.id is {identifier}, which is there twice")
        entries[identifier] = logprob(f"{here}.logprob", item.get("logprob"))
    return entries


def prompt_length(where: str, value: Any, sent: int) -> None:
    """Check the number of prompt tokens that the server counted against the number that was sent."""
    if of_type(where, value, int) != sent:
        more = ": it puts a BOS in front of token ids" if value == sent + 1 else ""
        raise ServerError(f"{where} is {shown(value)}, but {sent} token ids were sent{more}")
