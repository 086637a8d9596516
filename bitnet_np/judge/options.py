"""What a caller asks of the judge, as one record."""

from dataclasses import dataclass

from ..base.errors import OptionError
from ..base.progress import Bars, no_bars
from ..base.validate import number
from .detail import Details
from .law.precision import FLOAT32, Precision

USUAL_BUDGET = 15.0
"""Seconds by default: half of them are for the first wrong tensor, or for logits alone."""
SEARCHING = "searching for causes, in seconds"
"""The label of the bar that shows them."""


@dataclass(frozen=True)
class Options:
    """How a dump is to be judged."""

    precision: Precision | None = None  # where the engine keeps numbers in fewer bits; None: as they show; others are NARROW
    prefix: int = 0  # tokens of each sequence that the dump has no rows of: an earlier call had them
    bars: Bars = no_bars  # what is told how far the work is
    details: Details | None = None  # what collects the worst numbers and errors by position of each tensor, if somebody wants them
    budget: float = USUAL_BUDGET  # seconds of computing that the search for causes may take
    strict: bool = False  # whether roundings that are not declared are wrong
    stated: tuple[str, ...] = ()  # float types that the engine's own words say it computes in, the likeliest first
    keeps_known: bool = False  # on Ctrl-C: whether the search ends and what is known is reported

    def __post_init__(self) -> None:
        if not number("budget", self.budget) >= 0:
            raise OptionError(f"budget is {self.budget}, expected seconds, 0 or more")

    @property
    def effort(self) -> float:
        """Times the work that mistakes may take by default, for those who give more time."""
        return max(1.0, self.budget / USUAL_BUDGET)

    @property
    def is_strict(self) -> bool:
        """Whether what is declared is all that the engine rounds, as "exact" says by itself."""
        return self.strict or self.precision == FLOAT32


DEFAULT = Options()
