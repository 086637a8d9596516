"""The certified head: the largest logits, to the bit, without computing them all.

Greedy and top-k decoding need only the largest logits, but reading the output table is more than half of a decoded token's work. An int8
copy of the table, half the size of float16's, gives an interval for every logit. Only rows whose interval reaches the k-th
largest lower bound can be among the k largest, and for those the logits are computed exactly. The chosen token is always the one that
all exact logits would give, because the intervals are proven.

For a row w = a q + e (q its codes, a their step) and x = b p + c r + f (two int8 rows, coarse and fine, and a rest), by Cauchy and Schwarz

    |w.x - a (b q.p + c q.r)|  =  |e.x + a q.f|  <=  |e| |x| + (|w| + |e|) |f|

and the logit itself, summed in float32 by the contract in m = ceil(D / 16) + 4 roundings, is within |w| |x| m u / (1 - m u) of w.x,
u = 2^-24 (Higham, Accuracy and Stability of Numerical Algorithms, 3.1). All lengths are rounded up.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from ..base import file_pages
from ..base.errors import ShapeError, UnsupportedError
from ..base.validate import integer
from ..kernels import certified as kernels
from ..kernels import cpu
from ..kernels.fast.emit import LANES
from ..kernels.float_state import steady

Floats = NDArray[np.float32]

LARGEST_K = 256
"""The largest k: for more logits than these, computing all is as fast."""

MOST_COLUMNS = (2**31 - 1) // (127 * 63)
"""The longest row: in longer ones a sum of products of codes might not fit 32 bits."""

_LEVELS = 63  # of each int8 row of x: AVX2 adds two products of 255 * 63 in 16 bits
_SAFE = 2.0**100  # beyond this a float32 logit might overflow: all are computed then, so that the overflow is reported


@dataclass
class Counter:
    """Counts of the work that the certificate saved."""

    calls: int = 0  # rows of x
    rescored: int = 0  # logits computed exactly, of V for each call
    fallbacks: int = 0  # calls that computed all


@dataclass(frozen=True, eq=False)
class CertifiedHead:
    """An output table with its int8 copy."""

    table: NDArray  # [V, D] float32, float16, or bfloat16 as uint16 bits
    k: int  # number of the largest logits to compute
    copy: kernels.Copy = field(repr=False)
    counter: Counter = field(default_factory=Counter)

    @steady
    def __call__(self, x: Floats) -> Floats:  # [R, D] -> [R, V]
        """Logits of which at least the k largest of each row (and all that equal the last of these) are exact; others may be -inf."""
        self.counter.calls += len(x)
        if not np.isfinite(x).all():
            return self._all(x)
        low, high = self._intervals(x)
        if max(-low.min(), high.max()) > _SAFE:
            return self._all(x)
        logits = np.full(low.shape, -np.inf, np.float32)
        for row, out, lower, upper in zip(x, logits, low, high, strict=True):
            threshold = lower.max() if self.k == 1 else np.partition(lower, -self.k)[-self.k]
            candidates = np.flatnonzero(upper >= threshold)
            out[candidates] = cpu.matmul(row[None], self.table[candidates])[0]
            self.counter.rescored += len(candidates)
        return logits

    def _all(self, x: Floats) -> Floats:
        self.counter.fallbacks += len(x)
        return cpu.matmul(x, self.table)

    def _intervals(self, x: Floats) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        exact = x.astype(np.float64)
        coarse = np.maximum(np.abs(exact).max(axis=1), 2.0**-100) / _LEVELS
        p = np.rint(exact / coarse[:, None])
        rest = exact - coarse[:, None] * p
        fine = coarse / (2 * _LEVELS)
        r = np.clip(np.rint(rest / fine[:, None]), -_LEVELS, _LEVELS)
        rest = rest - fine[:, None] * r
        up = 1 + 2.0**-40  # for the roundings of float64 on this page
        size, unseen = (np.sqrt((part * part).sum(axis=1)) * up for part in (exact, rest))
        unseen = unseen + size * 2.0**-45
        roundings = -(-x.shape[1] // LANES) + 4
        unit = roundings * 2.0**-24 / (1 - roundings * 2.0**-24) + 2.0**-40
        q = np.stack([p, r], axis=1).reshape(-1, x.shape[1]).astype(np.int8)
        slack = unseen + unit * (size + unseen)
        return kernels.intervals(self.copy, kernels.Split(q, coarse, fine, size, slack))


@steady
def certify(table: NDArray, k: int = 1) -> CertifiedHead:
    """A head for the k largest logits of a float32, float16 or bfloat16 (uint16) table [V, D]; a copy of V * D bytes is made.

    A table in a mapped file gives its pages back as it is copied: what the head reads of it later are the rows that could win.

    Raises OptionError for k outside 1..LARGEST_K or V, ShapeError for an array that is no table [V, D], UnsupportedError for another dtype
    or rows longer than MOST_COLUMNS.
    """
    if not isinstance(table, np.ndarray) or table.dtype not in (np.float32, np.float16, np.uint16):
        raise UnsupportedError(f"a certified head needs a float32, float16 or bfloat16 table, not {type(table).__name__}")
    if table.ndim != 2 or 0 in table.shape or not table.flags.c_contiguous:
        raise ShapeError(f"a certified head needs a table [V, D] whose rows are end to end, not one of shape {table.shape}")
    if table.shape[1] > MOST_COLUMNS:
        raise UnsupportedError(f"a certified head cannot have rows of {table.shape[1]} numbers, expected at most {MOST_COLUMNS}")
    k = integer("k", k, 1, min(LARGEST_K, len(table)))
    return CertifiedHead(table, k, kernels.copy(table, file_pages.release))
