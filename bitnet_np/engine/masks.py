"""Masks as arrays: which keys each query sees. For callers that need an array;
the attention kernels work from positions.

Rows are queries, columns are keys; query i stands at position past + i, key j at position j. Two forms:

* "additive": 0 where the key is seen, -infinity where not, to be added to scores. Never a large negative
  number: that gives the same softmax only as long as a row sees something, and a row that sees nothing would
  attend to everything.
* "bool": True where the key is seen, as ONNX's Attention and PyTorch's scaled_dot_product_attention read it.

A row that sees nothing gives zeros (`fully_masked` finds such rows). A float mask of zeros and ones is
refused wherever an additive one is expected: added to scores it hides nothing, and lets the future through.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from functools import lru_cache
from threading import Lock
from typing import Literal, NamedTuple, TypedDict, Unpack, get_args

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from ..base.errors import MaskError
from ..base.validate import array_of, choice, instance
from .mask_checks import LARGEST, Form
from .mask_checks import as_additive as as_additive  # public here
from .mask_checks import as_bool as as_bool
from .mask_checks import check as check
from .mask_checks import check_causal as check_causal
from .mask_checks import dtype_of_form as _dtype
from .mask_checks import fully_masked as fully_masked
from .mask_checks import size as _size

Align = Literal["bottom_right", "top_left"]

STREAM_ROWS = 256
# elements of a mask that is kept; queries and keys of one whose line is: 17 MB at most in all
_SMALL, _MEDIUM = 1 << 14, 1 << 13


class _Fields(NamedTuple):
    window: int = 0
    prefix: int = 0
    block: int = 0
    sinks: int = 0


class Pattern(_Fields):
    """The rule that says which keys k a query at position p sees. A field that is 0 adds no condition.

    The query sees all keys up to its own, k <= p, narrowed by
    window: the last `window` keys only, p - window < k, its own included (as in Mistral, ONNX and llama.cpp),
    block: only the keys in the query's block of `block` positions, k // block == p // block,
    and widened by
    sinks: the first `sinks` keys with k <= p, outside the window or block too
    (StreamingLLM, arXiv 2309.17453),
    prefix: the first `prefix` keys for every query, even those with k > p (prefix-LM, arXiv 1910.10683).

    Raises MaskError for a field that is no integer from 0 to 2**31 - 1,
    and for sinks without a window or block.
    """

    __slots__ = ()

    def __new__(cls, window: int = 0, prefix: int = 0, block: int = 0, sinks: int = 0) -> "Pattern":
        self = super().__new__(cls, *map(_size, cls._fields, (window, prefix, block, sinks)))
        if self.sinks and not (self.window or self.block):
            why = "every earlier key is seen anyway"
            raise MaskError(f"sinks is {self.sinks} without a window or block: {why}")
        return self


CAUSAL = Pattern()


class Plan(NamedTuple):
    """Everything that determines one mask, checked. It is also the key of MaskCache."""

    q_len: int
    k_len: int
    past: int
    pattern: Pattern
    dtype: np.dtype  # bool for the form "bool"


def plan(
    q_len: int,
    k_len: int,
    pattern: Pattern = CAUSAL,
    *,
    past: int | None = None,
    align: Align = "bottom_right",
    form: Form = "additive",
    dtype: DTypeLike = np.float32,
) -> Plan:
    """The checked arguments of `mask`, for a caller that fills the mask elsewhere.
    Raises what `mask` does."""
    q_len, k_len = _size("q_len", q_len), _size("k_len", k_len)
    choice("align", align, get_args(Align), MaskError)
    if q_len and not k_len:
        raise MaskError(f"{q_len} queries have no keys to see")
    if align == "top_left":
        if past:
            raise MaskError(f"past is {past}, but align='top_left' means 0")
        past = 0
    else:
        past = max(k_len - q_len, 0) if past is None else _size("past", past)
        if q_len and k_len < past + q_len:
            fewer = f"{k_len} keys are fewer than {past} past and {q_len} queries"
            raise MaskError(f"{fewer}; align='top_left' if that is meant")
    return Plan(q_len, k_len, past, instance("pattern", pattern, Pattern), _dtype(form, dtype))


class _How(TypedDict, total=False):
    """The options of `mask`."""

    past: int | None
    align: Align
    form: Form
    dtype: DTypeLike


def mask(q_len: int, k_len: int, pattern: Pattern = CAUSAL, **how: Unpack[_How]) -> NDArray:
    """The mask [q_len, k_len] of one sequence.

    past: number of keys before the first query's own, by default k_len - q_len: the last query sees the last
    key. Keys after the last query are hidden, like all future keys. With align="top_left" past is 0, and only
    then may there be fewer keys than queries.
    form: "additive" or "bool". dtype: of an additive mask: float32 (the default), float64 or float16.

    q_len 0 gives [0, k_len]. Raises MaskError for queries without keys, fewer keys than queries,
    or a negative size.
    """
    planned, kept = _planned(q_len, k_len, pattern, how)
    return _build(planned) if kept is None else kept.copy()


def causal(q_len: int, k_len: int, *, form: Form = "additive", dtype: DTypeLike = np.float32) -> NDArray:
    """The causal mask [q_len, k_len]: each query sees the k_len - q_len keys before the first one,
    and all up to its own."""
    return mask(q_len, k_len, form=form, dtype=dtype)


def rows(
    q_len: int,
    k_len: int,
    pattern: Pattern = CAUSAL,
    *,
    block: int = STREAM_ROWS,
    **how: Unpack[_How],
) -> Iterator[NDArray]:
    """The mask that `mask` gives, in pieces of `block` rows, with O(block * k_len) memory.

    Raises, on the call itself, what `mask` does, and MaskError for a block below 1.
    """
    planned = plan(q_len, k_len, pattern, **how)
    _size("block", block, 1)
    return (
        _build(planned._replace(q_len=min(block, planned.q_len - start), past=planned.past + start))
        for start in range(0, planned.q_len, block)
    )


def batch(
    q_lens: ArrayLike,
    *,
    k_lens: ArrayLike | None = None,
    past_lens: ArrayLike | None = None,
    pattern: Pattern = CAUSAL,
    form: Form = "additive",
    dtype: DTypeLike = np.float32,
) -> NDArray:
    """The masks [B, 1, longest q, longest k] of sequences of different lengths.

    Sequence b has q_lens[b] queries after past_lens[b] keys (default 0), or k_lens[b] keys in all; give one
    or neither of them. Rows past a sequence's queries are padding and see nothing; columns past its keys are
    padding and are never seen.

    Raises MaskError for lengths that are not one integer for each sequence,
    or for a sequence with fewer keys than queries.
    """
    queries = _sizes("q_lens", q_lens)
    if k_lens is not None and past_lens is not None:
        raise MaskError("k_lens and past_lens say the same thing, expected one of them")
    past = np.zeros_like(queries) if past_lens is None else _sizes("past_lens", past_lens)
    keys = past if k_lens is None else _sizes("k_lens", k_lens)
    if keys.shape != queries.shape:
        raise MaskError(f"{len(keys)} sequences have keys and {len(queries)} have queries, expected as many")
    if k_lens is None:
        keys = past + queries
    for b in np.flatnonzero(keys < queries):
        raise MaskError(f"sequence {b} has {queries[b]} queries and only {keys[b]} keys")
    dtype, pattern = _dtype(form, dtype), instance("pattern", pattern, Pattern)
    out = np.full((len(queries), 1, queries.max(), keys.max()), _hidden(dtype), dtype)
    for sequence, q_len, k_len in zip(out[:, 0], queries.tolist(), keys.tolist(), strict=True):
        _fill(sequence[:q_len, :k_len], k_len - q_len, pattern)
    return out


def part(whole: NDArray, q_len: int, k_len: int, *, past: int | None = None) -> NDArray:
    """The mask [q_len, k_len] that `mask` gives,
    as a read-only view of a larger one [N, N] of the same pattern: nothing is made.

    whole: mask(N, N, pattern), made once for the longest sequence. past: as in `mask`. Raises what `mask`
    does, and MaskError for a mask that is not square, or too small.
    """
    planned, whole = plan(q_len, k_len, past=past), array_of("the larger mask", whole, MaskError)
    end = max(planned.past + q_len, k_len)
    if whole.ndim != 2 or whole.shape[0] != whole.shape[1] or len(whole) < end:
        shape = list(whole.shape)
        raise MaskError(f"the larger mask has shape {shape}, expected [N, N] with N at least {end}")
    view = whole[planned.past : planned.past + q_len, :k_len]
    view.flags.writeable = False
    return view


# --- the cache ----------------------------------------------------------------------------------------------


class MaskCache:
    """A cache of masks, for callers that need the same ones again and again. Results are shared,
    so they are read-only.

    It holds at most `entries` masks, each of at most `side` queries and keys, and `nbytes` bytes in all; the
    least recently used goes first. A larger mask is made again each time. `hits` and `misses` count requests.
    Safe to share between threads.
    """

    def __init__(self, entries: int = 100, side: int = 2048, nbytes: int = 1 << 28):
        self.entries = _size("entries", entries, 1)
        self.side, self.limit = _size("side", side), _size("nbytes", nbytes)
        self.hits = self.misses = self.nbytes = 0
        self._masks: OrderedDict[Plan, NDArray] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._masks)

    def get(self, q_len: int, k_len: int, pattern: Pattern = CAUSAL, **how: Unpack[_How]) -> NDArray:
        """As `mask`, but read-only, and the same array while the cache holds it."""
        key = _planned(q_len, k_len, pattern, how)[0]
        with self._lock:
            cached = self._masks.get(key)
            if cached is not None:
                self.hits += 1
                self._masks.move_to_end(key)
                return cached
            self.misses += 1
            array = _build(key)
            array.flags.writeable = False
            if max(q_len, k_len) <= self.side and array.nbytes <= self.limit:
                self._masks[key] = array
                self.nbytes += array.nbytes
                while len(self._masks) > self.entries or self.nbytes > self.limit:
                    self.nbytes -= self._masks.popitem(last=False)[1].nbytes
            return array

    def warm(self, sizes: Iterable[int]) -> None:
        """Make the causal masks [n, n] of these sizes now."""
        for n in sizes:
            self.get(n, n)

    def clear(self) -> None:
        """Forget every mask; the counters stay."""
        with self._lock:
            self._masks.clear()
            self.nbytes = 0


# --- checked arguments --------------------------------------------------------------------------------------


def _sizes(name: str, values: ArrayLike) -> NDArray[np.int64]:
    sizes = array_of(name, values, MaskError)
    if sizes.ndim != 1 or sizes.size == 0 or sizes.dtype.kind not in "iu":
        given = f"{name} has shape {sizes.shape} and dtype {sizes.dtype}"
        raise MaskError(f"{given}, expected integers, one for each sequence")
    if (wrong := (sizes < 0) | (sizes > LARGEST)).any():
        b = wrong.argmax()
        raise MaskError(f"{name}[{b}] is {sizes[b]}, expected 0 to {LARGEST}")
    return sizes.astype(np.int64)


@lru_cache(maxsize=128, typed=True)  # typed: True is no 1
def _remembered(q_len: int, k_len: int, pattern: Pattern, **how: Unpack[_How]) -> tuple[Plan, NDArray | None]:
    """The plan, and what the mask is copied from, if it is not large: itself,
    or the line that its rows are parts of."""
    planned = plan(q_len, k_len, pattern, **how)
    if planned.q_len * planned.k_len <= _SMALL:
        return planned, _build(planned)
    if planned.q_len + planned.k_len <= _MEDIUM and pattern == Pattern(pattern.window):
        return planned, _shifted(planned.q_len, planned.k_len, planned.past, pattern.window, planned.dtype)
    return planned, None


def _planned(q_len: int, k_len: int, pattern: Pattern, how: _How) -> tuple[Plan, NDArray | None]:
    """As `_remembered`, also where an argument cannot be hashed or compared.
    The checks alone take longer than a small mask."""
    try:
        return _remembered(q_len, k_len, pattern, **how)  # type: ignore[arg-type]
    except MaskError:
        raise
    except Exception:  # whatever its __hash__ or __eq__ raises, `plan` reports the error
        return plan(q_len, k_len, pattern, **how), None


def _hidden(dtype: np.dtype) -> float:
    """What hides a key: False, or -infinity."""
    return False if dtype == np.bool_ else -np.inf


def _shifted(q_len: int, k_len: int, past: int, window: int, dtype: np.dtype) -> NDArray:
    """The mask of a window or of none, as a view: each row is the one before, shifted by one key."""
    line = np.full(q_len + k_len, _hidden(dtype), dtype)  # the last row is its beginning
    end, size = past + q_len, dtype.itemsize
    line[max(end - window, 0) if window else 0 : end] = dtype == np.bool_
    return np.ndarray((q_len, k_len), dtype, line, max(q_len - 1, 0) * size, (-size, size))


def _fill(out: NDArray, past: int, pattern: Pattern) -> None:  # [q_len, k_len]
    q_len, k_len = out.shape
    out[:] = _shifted(q_len, k_len, past, pattern.window, out.dtype)
    if pattern.block:
        for start in range(past // pattern.block * pattern.block, past + q_len, pattern.block):
            out[max(start - past, 0) : start + pattern.block - past, :start] = _hidden(out.dtype)
    if pattern.sinks:
        out[:, : pattern.sinks] = _shifted(q_len, k_len, past, 0, out.dtype)[:, : pattern.sinks]
    if pattern.prefix:
        out[:, : pattern.prefix] = out.dtype == np.bool_


def _build(plan: Plan) -> NDArray:
    out = np.empty((plan.q_len, plan.k_len), plan.dtype)
    _fill(out, plan.past, plan.pattern)
    return out
