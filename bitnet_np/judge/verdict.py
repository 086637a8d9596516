"""Verdicts on another engine's numbers, and their exit codes."""

from enum import IntEnum
from typing import Self

from ..base.errors import WrongError


class Verdict(IntEnum):
    """From best to worst; a whole comparison is as good as its worst part."""

    SAME_BITS = 0  # the same bits
    ROUNDING = 1  # float32 sums in another order
    FLIPS = 2  # int8 codes on the other side of a rounding boundary, or float16 roundings
    NARROW = 3  # roundings to narrow types that were not declared
    WRONG = 4  # more than rounding explains: a bug
    INVALID = 5  # cannot be compared: NaN, another shape, other tokens

    def __str__(self) -> str:
        return self.name

    def __format__(self, spec: str) -> str:
        return format(self.name, spec)

    @property
    def text(self) -> str:
        """The verdict in words."""
        return _MEANINGS[self]

    @property
    def outcome(self) -> str:
        """PASS or FAIL, as exit codes say it: FAIL where rounding does not explain the difference, or nothing can be compared."""
        return "PASS" if self.passed else "FAIL"

    @property
    def passed(self) -> bool:
        """Whether the numbers are correct. A verdict itself is a number: SAME_BITS is 0, so it is not to be asked for its truth."""
        return self.exit_code == 0

    @property
    def rank(self) -> tuple[bool, int]:
        """The order among several sequences: WRONG of one is the worst, so that INVALID of another does not hide it."""
        return self == Verdict.WRONG, self

    @property
    def exit_code(self) -> int:
        """0: correct. 1: a difference that rounding does not explain. 2: nothing to compare."""
        return {Verdict.WRONG: 1, Verdict.INVALID: 2}.get(self, 0)


_MEANINGS = {
    Verdict.SAME_BITS: "same bits",
    Verdict.ROUNDING: "differs only by float32 rounding: sums in another order",
    Verdict.FLIPS: "all differences are within what flipped int8 codes or float16 rounding can cause",
    Verdict.NARROW: "correct, apart from undeclared narrow-type rounding",
    Verdict.WRONG: "differs by more than rounding explains",
    Verdict.INVALID: "cannot be compared",
}


class Judged:
    """A result that passed or did not, and is true if it passed."""

    verdict: Verdict

    @property
    def passed(self) -> bool:
        """Whether the numbers are correct: PASS, and exit code 0 of the command."""
        return self.verdict.passed

    @property
    def failure(self) -> str:
        """What the error of `raise_if_wrong` says."""
        raise NotImplementedError

    def __bool__(self) -> bool:
        return self.passed

    def raise_if_wrong(self) -> Self:
        """The result itself if it passed. Raises WrongError otherwise, which says what is wrong and where."""
        if not self:
            raise WrongError(self.failure)
        return self
