"""What a caller asks of the judge, as one record."""

from dataclasses import dataclass

from ..base.progress import Bars, no_bars
from .law.precision import Precision
from .report.detail import Details


@dataclass(frozen=True)
class Options:
    """How a dump is to be judged."""

    precision: Precision | None = None  # where the engine keeps numbers in fewer bits; None: as they show, other roundings are intended
    effort: float = 1.0  # times the work that mistakes may take by default
    prefix: int = 0  # tokens of each sequence that the dump has no rows of: an earlier call had them
    bars: Bars = no_bars  # what is told how far the work is
    details: Details | None = None  # what collects the worst numbers and errors by position of each tensor, if somebody wants them


DEFAULT = Options()
