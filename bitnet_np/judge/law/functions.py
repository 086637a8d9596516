"""The steps that expressions are made of, and the tables of steps that one may be mistaken for another."""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ... import spec
from .formats import TYPES, Array

Function = Callable[[Array], Array]


# --- tables: functions of one number, of a row, masks, types ----------------------------------------------------------------------------


GELU_BY_TANH = "GELU's approximation by tanh"
ACTIVATION_NAMES = {"relu2": "relu^2", "silu": "SiLU", "gelu_gate": GELU_BY_TANH, "gelu": "the exact GELU", "gelu_tanh": GELU_BY_TANH}
"""The names of the functions that Config.activation stands for."""
ACTIVATIONS: dict[str, Function] = {
    "SiLU": lambda x: x * spec.sigmoid(x),
    "relu^2": lambda x: np.maximum(x, 0) ** 2,
    "the exact GELU": spec.gelu,
    GELU_BY_TANH: spec.gelu_tanh,
    "relu": lambda x: np.maximum(x, 0),
    "sigmoid": spec.sigmoid,
    "tanh": np.tanh,
    "quick GELU": lambda x: x * spec.sigmoid(1.702 * x),
    "square": np.square,
    "exp": np.exp,
    "nothing": lambda x: x,
}
"""Activation functions. Each may stand in the place of another."""
_UNCUT = 0.25  # of the numbers that are clipped: a limit that nearly all are beyond makes another constant of them
ROOTS: dict[str, Function] = {"root": np.sqrt, "nothing": lambda x: x}
CURVES: dict[str, Function] = {"tanh": np.tanh, "clipping to -1..1": lambda x: np.clip(x, -1, 1)}
EXPONENTIALS: dict[str, Function] = {"exp": np.exp, "exp2": np.exp2, "sigmoid": spec.sigmoid}
SIGMOIDS: dict[str, Function] = {"sigmoid": spec.sigmoid, "tanh": np.tanh, "exp": np.exp, "SiLU": ACTIVATIONS["SiLU"]}
ROUNDINGS: dict[str, Function] = {
    "rounding to the nearest": np.rint,
    "truncation": np.trunc,
    "rounding down": np.floor,
    "rounding up": np.ceil,
    "rounding halves away from zero": lambda x: np.sign(x) * np.floor(np.abs(x) + 0.5),
    "adding a half and truncation": lambda x: np.trunc(x + 0.5),
    "no rounding": lambda x: x,
}
TOTALS: dict[str, Function] = {
    "sum": lambda x: x.sum(axis=1),
    "mean": lambda x: x.mean(axis=1),
    "first": lambda x: x[:, 0],
    "last": lambda x: x[:, -1],
}
POOLS: dict[str, Function] = {
    "the mean of all tokens": lambda x: x.mean(axis=0, keepdims=True),
    "the first token": lambda x: x[:1],
    "the last token": lambda x: x[-1:],
}
OF_ONE: dict[str, dict[str, Function]] = {
    "activation": ACTIVATIONS,
    "root": ROOTS,
    "curve": CURVES,
    "exponential": EXPONENTIALS,
    "sigmoid": SIGMOIDS,
    "rounding": ROUNDINGS,
    "total": TOTALS,
    "pooled": POOLS,
}
"""Tables of functions of single numbers, of the results of a token's experts, or of all tokens, by the kind of their nodes."""


def _in_groups(size: int, function: Function) -> Function:
    """A reduction of each `size` numbers by themselves, repeated for each of them; NaN where that is no cut of a row."""

    def reduced(x: Array) -> Array:
        if x.shape[-1] % size or x.shape[-1] == size:
            return np.full((*x.shape[:-1], 1), np.nan)
        return np.repeat(function(x.reshape(*x.shape[:-1], -1, size))[..., 0], size, axis=-1)

    return reduced


def _mean_square(x: Array) -> Array:
    return np.square(x).mean(axis=-1, keepdims=True)


def _largest(x: Array) -> Array:
    return np.abs(x).max(axis=-1, keepdims=True)


def _of_parts(count: int, x: Array) -> Array:
    return _in_groups(max(x.shape[-1] // count, 1), _mean_square)(x)


def _of_all_heads(x: Array) -> Array:
    return np.broadcast_to(np.square(x).mean(axis=(-2, -1), keepdims=True), (*x.shape[:-1], 1)) if x.ndim > 2 else np.full((1, 1), np.nan)


REDUCTIONS: dict[str, Function] = {
    "mean square": _mean_square,
    "mean": lambda x: x.mean(axis=-1, keepdims=True),
    "sum": lambda x: x.sum(axis=-1, keepdims=True),
    "largest number": lambda x: x.max(axis=-1, keepdims=True),
    "largest magnitude": _largest,
    "mean magnitude": lambda x: np.abs(x).mean(axis=-1, keepdims=True),
    "root mean square": lambda x: np.sqrt(_mean_square(x)),
    "sum of squares": lambda x: np.square(x).sum(axis=-1, keepdims=True),
    "variance": lambda x: x.var(axis=-1, keepdims=True),
    "sum of squares over the width less one": lambda x: np.square(x).sum(axis=-1, keepdims=True) / max(x.shape[-1] - 1, 1),
    "largest magnitude of all tokens": lambda x: np.full((*x.shape[:-1], 1), np.abs(x).max()),
    "largest magnitude of each element over all tokens": lambda x: np.abs(x).max(axis=0, keepdims=True),
    "mean square of all heads": _of_all_heads,
    **{f"mean square of each {size} numbers": _in_groups(size, _mean_square) for size in (8, 16, 32, 64, 128, 256)},
    **{f"mean square of each of {count} parts": partial(_of_parts, count) for count in (2, 4, 8)},
    **{f"largest magnitude of each {size} numbers": _in_groups(size, _largest) for size in (8, 16, 32, 64, 128, 256)},
}
"""Reductions of rows, the number of which is kept for a quotient. Each may stand in the place of another."""


# --- order ------------------------------------------------------------------------------------------------------------------------------


def _relaid(x: Array, axis: int, rows: int) -> Array:
    """The axis, read as `rows` by the rest, transposed."""
    count = x.shape[axis]
    if count % rows or rows in (1, count):
        return np.full(x.shape, np.nan)
    return np.take(x, np.arange(count).reshape(rows, -1).T.ravel(), axis=axis)


ORDERS: dict[str, Callable[..., Array]] = {
    "in the opposite order": lambda x, axis: np.flip(x, axis),
    "shifted by one, the one before in the place of each": lambda x, axis: np.roll(x, 1, axis),
    "shifted by one, the next one in the place of each": lambda x, axis: np.roll(x, -1, axis),
    "with their halves exchanged": lambda x, axis: np.roll(x, x.shape[axis] // 2, axis),
    "interleaved: those of the second half between those of the first": lambda x, axis: _relaid(x, axis, 2),
    "those of even numbers before those of odd ones": lambda x, axis: _relaid(x, axis, max(x.shape[axis] // 2, 1)),
    "all the first one": lambda x, axis: np.broadcast_to(np.take(x, [0], axis), x.shape),
    "all the last one": lambda x, axis: np.broadcast_to(np.take(x, [-1], axis), x.shape),
}
"""Orders of the things along an axis, which an index that is computed wrongly gives."""


Start = tuple[int, int, int]
"""How much farther apart rows are read than they lie, how far behind their place, and of which number each start is a multiple."""


def starts(what: str, offsets: Iterable[int]) -> Iterator[tuple[str, Start]]:
    """Yields places that rows, or heads, may be read from by mistake, in words."""
    for n in offsets:
        if what == "row":
            yield f"numbers are read {abs(n)} {'behind' if n > 0 else 'before'} their place", (0, n, 1)
        yield f"{what}s are read by a stride that is {abs(n)} too {'large' if n > 0 else 'small'}", (n, 0, 1)
    for n in (2**k for k in range(1, 8)):
        yield f"{what}s are read from the last multiple of {n} before their start", (0, 0, n)


def places_from(start: Start, count: int, width: int) -> NDArray[np.intp]:
    """The place of each number that is read, of so many rows."""
    stride, offset, multiple = start
    return ((np.arange(count)[:, None] * (width + stride) + offset) // multiple * multiple + np.arange(width)).ravel()


def read_from(x: Array, start: Start, size: int | None = None) -> Array:
    """x [T, width] with its rows, or each `size` numbers, read from there; the nearest number where there is none."""
    size = size or x.shape[1]
    return x.ravel()[places_from(start, x.size // size, size).clip(0, x.size - 1)].reshape(x.shape)


def read_padded(x: Array, size: int, more: int) -> Array:
    """x [T, width] with the heads of each row read as if so many numbers lay behind each; 0 behind the row."""
    at = (np.arange(x.shape[1] // size)[:, None] * (size + more) + np.arange(size)).ravel()
    return np.pad(x, ((0, 0), (0, int(at[-1]) + 1 - x.shape[1])))[:, at]


# --- steps --------------------------------------------------------------------------------------------------------------------------------


def pairs(layout: str, count: int, width: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """The places in a head of this width of the first and the second number of each rotated pair."""
    i = np.arange(count)
    return {"halves": (i, i + count), "across": (i, i + width // 2)}.get(layout, (2 * i, 2 * i + 1))


def _paired(heads: Array, first: Array, second: Array, layout: str) -> Array:
    """The heads [T, H, K] with these numbers of pairs, [T, H, J] each."""
    out = heads.copy()
    for places, numbers in zip(pairs(layout, first.shape[-1], heads.shape[-1]), (first, second), strict=True):
        out[..., places] = numbers
    return out


def by_query(x: Array) -> Array:
    """[H, T, S] -> [T, H * S]."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def visible_by_query(x: Array) -> Array:
    """The same, with 0 for what is minus infinity."""
    return by_query(np.where(np.isfinite(x), x, 0))


def by_head(x: Array) -> Array:
    """[T, H * T] -> [H, T, T]."""
    return x.reshape(len(x), -1, len(x)).transpose(1, 0, 2)


Sees = Callable[[NDArray, NDArray, float, int], NDArray]
"""The rule of a mask: query i [T, 1], key j [T], the window, and a number -> True where i sees j."""


def causal(i: NDArray, j: NDArray, window: float) -> NDArray:
    """Whether query i sees key j."""
    return (j <= i) & (j > i - window)


MASKS: dict[str, tuple[str, Sees]] = {
    "none": ("the mask is missing: tokens see the future", lambda i, j, w, n: j > i - w),
    "next": ("the mask is off by one: a token sees the next one", lambda i, j, w, n: (j <= i + 1) & (j > i - w)),
    "not_itself": ("the mask is off by one: a token does not see itself", lambda i, j, w, n: (causal(i, j, w) & (j < i)) | (i + j == 0)),
    "no_window": ("the window is missing: all tokens before are seen", lambda i, j, w, n: j <= i),
    "longer": ("the window is too long by one: it does not count the token itself", lambda i, j, w, n: causal(i, j, w + 1)),
    "shorter": ("the window is too short by one", lambda i, j, w, n: causal(i, j, w - 1)),
    "not_first": ("the first token is not seen by later ones", lambda i, j, w, n: causal(i, j, w) & ((j > 0) | (i == 0))),
    "blocks": ("blocks as long as the window are seen instead of a window", lambda i, j, w, n: (j <= i) & (j // w == i // w)),
    "prefix": ("the first {n} tokens are seen by all, as a prefix is", lambda i, j, w, n: causal(i, j, w) | (j < n)),
    "last_only": ("only the last {n} tokens are seen, as in a window, or in a ring of so many slots", lambda i, j, w, n: causal(i, j, n)),
    "sink": (
        "only the last {n} tokens and the first are seen: a window with a sink",
        lambda i, j, w, n: causal(i, j, w) & ((j < 1) | (j > i - n)),
    ),
    "chunk": ("tokens see the future within their chunk of {n}", lambda i, j, w, n: causal(i, j, w) | (i // n == j // n)),
    "own_chunk": ("tokens see their own chunk of {n} alone", lambda i, j, w, n: causal(i, j, w) & (i // n == j // n)),
    "aligned": (
        "in each chunk of {n}, keys are seen up to the token's number in the chunk: the mask is aligned with the first key",
        lambda i, j, w, n: causal(i % n, j, w),
    ),
    "later_aligned": (
        "from position {n} on, keys are seen up to the token's number in the chunk: the mask is aligned with the first key",
        lambda i, j, w, n: causal(np.where(i < n, i, i - n), j, w),
    ),
    "first_only": ("keys from position {n} on are not seen: there is no room for more", lambda i, j, w, n: causal(i, j, w) & (j < n)),
    "later_chunk": (
        "tokens from position {n} on see each other's future: a later chunk is not masked inside",
        lambda i, j, w, n: causal(i, j, w) | ((i >= n) & (j >= n)),
    ),
    "border": (
        "tokens from position {n} on do not see those before: the cache is lost at the border of a chunk",
        lambda i, j, w, n: causal(i, j, w) & ((i < n) | (j >= n)),
    ),
}
"""Rules of who sees whom, in words and as functions. The braces are a number of tokens n. Where tensors are there, others are solved for:
readings/cells.py."""


def _mask(scores: Array, what: tuple[int, str, int]) -> Array:
    """Scores of what a query must not see are minus infinity. what: the window, 0 where there is none; a rule by its id, "" for the right
    one, and its number."""
    window, rule, n = what
    i, j, w = np.arange(scores.shape[-2])[:, None], np.arange(scores.shape[-1]), window or np.inf
    return np.where(MASKS[rule][1](i, j, w, n) if rule else causal(i, j, w), scores, -np.inf)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "sum": lambda *terms: sum(terms[1:], terms[0]),
    "difference": lambda a, b: a - b,
    "product": lambda a, b: a * b,
    "quotient": lambda a, b: a / b,
    "power": lambda a, b: a**b,
    "at least": np.maximum,
    "finite": lambda x, number: np.where(np.isfinite(x), x, number),
    "matmul": lambda x, matrix: x @ matrix.T,
    "opaque": lambda *inputs, what: what(*inputs),
    "linears": lambda what: what,
    **{kind: (lambda x, what, table=table: table[what](x)) for kind, table in OF_ONE.items()},
    "reduction": lambda x, what: REDUCTIONS[what](x),
    "rounded": lambda x, what: TYPES[what](x),
    "order": lambda x, what: ORDERS[what[0]](x, what[1]),
    "clipped": lambda x, limit: np.clip(x, -limit, limit),
    "clipped above": lambda x, limit: np.minimum(x, limit) if np.mean(x < limit) > _UNCUT else np.full_like(x, np.nan),
    "cut": lambda codes, most: np.clip(codes, -most - 1, most),
    "heads": lambda x, what: x.reshape(len(x), what, -1),
    "joined": lambda x: x.reshape(len(x), -1),
    "heads last": lambda x: x.swapaxes(1, 2).reshape(len(x), -1),
    "rows": lambda table, ids: table[ids.astype(np.intp) % len(table)],
    "columns": lambda x, what: x if np.ndim(x) == 0 or np.shape(x)[-1] == 1 else x[..., what],
    "outer": np.multiply.outer,
    "circle": lambda angle: np.stack([np.cos(angle), np.sin(angle)]),
    "turn": lambda circle, what: circle[what][:, None],
    "of pairs": lambda heads, what: heads[..., pairs(what[0], what[2], heads.shape[-1])[what[1]]],
    "paired": lambda heads, first, second, what: _paired(heads, first, second, what),
    "grouped": lambda kv, what: spec.by_query_head(kv, what),
    "scores": lambda q, k: q.swapaxes(0, 1) @ k.transpose(1, 2, 0),
    "mask": _mask,
    "largest of": lambda x: np.nan_to_num(x.max(axis=-1, keepdims=True), posinf=0.0, neginf=0.0),
    "softmax sum": lambda x: np.maximum(x.sum(axis=-1, keepdims=True), 1e-300),
    "weighted": lambda p, v: (p @ v.swapaxes(0, 1)).swapaxes(0, 1),
    "experts": lambda logits, what: spec.top_experts(logits, what).astype(np.float64),
    "taken": lambda x, experts: np.take_along_axis(x, experts.astype(np.intp), axis=-1),
    "slots": lambda y, weights: y.reshape(*weights.shape, -1),
    "column": lambda x: x[..., None],
    "dot": lambda x, gain: (x @ gain)[:, None],
}
"""The functions of nodes, by their kind. what: the option of a node, where it has one."""
