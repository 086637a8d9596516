"""Every error a caller can cause. All are ValueErrors, so a caller may catch one family or Python's own."""

from collections.abc import Collection, Sequence
from difflib import get_close_matches


class Error(ValueError):
    """Base of the family. The message names the file, tensor or argument, its value, and what was expected."""


class FileFormatError(Error):
    """A file is damaged, truncated or not what its name says."""


class MissingFileError(Error, FileNotFoundError):
    """A file or folder is not there."""


class UnsupportedError(Error):
    """A file or request is well formed, but asks for something this package does not do."""


class ShapeError(Error):
    """An array has the wrong number of axes, a wrong length or a wrong dtype."""


class TokenRangeError(Error):
    """A token id is negative or not in the vocabulary."""


class EmptyInputError(Error):
    """No tokens, no sequences, or an empty sequence inside a batch."""


class CapacityError(Error):
    """A KV cache has no room for the positions asked for."""


class ContextLimitError(CapacityError):
    """A sequence would have more positions than the model's context."""


class SlotError(Error, IndexError):
    """A KV cache slot does not exist, is named twice, or is in use."""


class MaskError(ShapeError):
    """A mask has an impossible size, the wrong shape or form, or lets a query see a key that it must not."""


class NonFiniteError(Error):
    """NaN or infinity where a finite number is needed."""


class ServerError(Error):
    """A server cannot be reached, refuses a request, or sends an answer that its API does not have."""


class WrongError(Error):
    """What another engine computed did not pass: it is wrong, or cannot be compared."""


class OptionError(Error):
    """An option has a value it cannot take, or two options contradict each other."""


def shown(value: object) -> str:
    """The repr of a value from outside, cut to 80 characters: safe to print on a terminal."""
    try:
        return shortened(repr(value), 80)
    except RecursionError:
        return f"a {type(value).__name__} that nests too deep"
    except Exception:  # an integer of more than 4,300 digits, or of a class whose repr raises
        return f"a {type(value).__name__} that cannot be shown"


def listed(items: Sequence[object], most: int = 4) -> str:
    """The first of some items between commas, and how many more there are."""
    more = f" and {len(items) - most} more" if len(items) > most else ""
    return ", ".join(map(str, items[:most])) + more


def meant(word: str, known: Collection[str]) -> str:
    """The end of a message that refuses a word: the known words that are like it, if there are any."""
    near = get_close_matches(word, known, 2)
    return f", did you mean {' or '.join(near)}?" if near else ""


def shortened(text: str, most: int = 120) -> str:
    """A text cut to `most` characters, with dots where its end is missing."""
    return text if len(text) <= most else text[: most - 3] + "..."
