"""Recorded points of a forward pass: their names, their shapes, and traces of them.

Every point of a trace has one normal form, whatever file it came from: float points [T, width], heads side by side; `<name>_codes`
[T, M]; `<name>_scale` [T]; attention scores `kq` and probabilities `kq_soft_max` [H, T, S], of which only s <= t means anything.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import FileFormatError, shortened, shown
from ..families import MATRICES, NORMS
from ..model import Config

TOP_EXPERTS = "ffn_moe_topk"
"""The numbers of each token's experts: integers, as llama.cpp names them."""
LINEAR_NAMES = ("Qcur", "Kcur", "Vcur", "attn_o_out", "ffn_gate", "ffn_up", "ffn_down")
"""The outputs of a layer's matrices."""
QUANTIZED = NORMS
"""The inputs of the ternary matrices of a BitNet with sub-norms."""
MAY_BE_QUANTIZED = (*QUANTIZED, "attn_inp", "kqv_out", "ffn_inp", "ffn_out", *(f"{name}_in" for name in LINEAR_NAMES))
"""The inputs of ternary matrices in any family; <name>_in is the norm inside the matrix that gives <name>, attn_inp the layer's input."""
SCORES = ("kq", "kq_soft_max")
POOLED = "result_embd_pooled"
"""The one vector of a sequence in an embedding model: a point with one row, whatever the number of tokens."""
MODEL_NAMES = ("inp_embd", "inpL", "inp_scaled", "result_norm", POOLED, "result_output", "log_probs")


def _in_order() -> Iterator[str]:
    for name in (
        "attn_norm",
        "attn_inp",
        *("Qcur", "Kcur", "Vcur"),
        *("Qcur_normed", "Kcur_normed", "Qcur_rope", "Kcur_rope"),
        *SCORES,
        "kqv_out",
        "attn_sub_norm",
        "attn_o_out",
        "attn_post_norm",
        "ffn_inp",
        "ffn_norm",
        *("ffn_moe_logits", TOP_EXPERTS, "ffn_moe_weights"),
        *("ffn_moe_gate", "ffn_moe_up", "ffn_moe_swiglu", "ffn_moe_down", "ffn_moe_out"),
        *("ffn_gate", "ffn_up", "ffn_out"),
        "ffn_sub_norm",
        "ffn_down",
        "ffn_shexp_out",
        "ffn_post_norm",
        "l_out",
    ):
        for point in (f"{name}_in", name) if name in LINEAR_NAMES else (name,):
            if point != "attn_inp":  # another layer's point
                yield point
            if point in MAY_BE_QUANTIZED:
                yield from (point + "_codes", point + "_scale")


LAYER_NAMES = tuple(_in_order())
"""The points of a layer, in the order they are computed."""

RECORDED = (*(name for name in LAYER_NAMES if name not in SCORES), *(name for name in MODEL_NAMES if name != "log_probs"))
"""The points that forward passes record, over all families. Scores are computed on request; log_probs come from files without logits."""

MEANINGS = {
    "inp_embd": ("T D", "rows of the embedding for the tokens"),
    "inpL": ("T D", "inp_embd plus learned positions, in models that have them"),
    "inp_scaled": ("T D", "the embedding times its scale, in models that have one"),
    "attn_norm": ("T D", "norm in front of attention, in models that have one"),
    "Qcur": ("T HK", "queries: matrix product with scale and bias"),
    "Kcur": ("T GK", "keys: matrix product with scale and bias"),
    "Vcur": ("T GK", "values: matrix product with scale and bias"),
    "Qcur_normed": ("T HK", "queries after their norm, of each head or of all together, in models that have one"),
    "Kcur_normed": ("T GK", "keys after their norm, of each head or of all together, in models that have one"),
    "Qcur_rope": ("T HK", "queries after RoPE"),
    "Kcur_rope": ("T GK", "keys after RoPE"),
    "kq": ("H T T", "attention scores q.k / sqrt(K), or with the model's own scale and cap; 0 where the query does not see the key"),
    "kq_soft_max": ("H T T", "attention probabilities: softmax of the scores"),
    "kqv_out": ("T HK", "output of attention, heads side by side"),
    "attn_sub_norm": ("T HK", "norm of kqv_out, in models that have one"),
    "attn_o_out": ("T D", "output matrix of attention, before the residual"),
    "attn_post_norm": ("T D", "norm of attn_o_out, in models that have one"),
    "ffn_inp": (
        "T D",
        "attention's branch, times the residual scale, plus the layer's input; absent where attention and feed-forward run in parallel",
    ),
    "ffn_norm": ("T D", "norm in front of the feed-forward, in models that have one"),
    "ffn_moe_logits": ("T E", "router's product, in models that have experts"),
    "ffn_moe_topk": ("T k", "numbers of each token's experts, int32: those with the largest logits, largest first"),
    "ffn_moe_weights": ("T k", "their weights: the softmax of all logits, divided by the sum of these k where the model does that"),
    "ffn_moe_gate": ("T kF", "gate matrix of each of these experts, side by side"),
    "ffn_moe_up": ("T kF", "up matrix of each"),
    "ffn_moe_swiglu": ("T kF", "SiLU(gate) * up of each"),
    "ffn_moe_down": ("T kD", "down matrix of each"),
    "ffn_moe_out": ("T D", "sum of their weights times ffn_moe_down"),
    "ffn_shexp_out": ("T D", "ffn_down times the sigmoid of its gate, in models that have a shared expert"),
    "ffn_gate": ("T F", "gate matrix, before the activation function, in models that have a gate"),
    "ffn_up": ("T F", "up matrix"),
    "ffn_out": ("T F", "relu(gate)^2 * up, SiLU(gate) * up, GELU(gate) * up, or GELU(up)"),
    "ffn_sub_norm": ("T F", "norm of ffn_out, in models that have one"),
    "ffn_down": ("T D", "down matrix, before the residual"),
    "ffn_post_norm": ("T D", "norm of ffn_down, in models that have one"),
    "l_out": ("T D", "output of the layer"),
    "result_norm": ("T D", "final norm"),
    POOLED: ("1 D", "mean of result_norm over all tokens, or that of the first (cls) or the last token, in models that state one"),
    "result_output": ("T V", "logits, scaled and capped where the model does that"),
    "log_probs": ("T V", "log-softmax of the logits, for files that hold no logits"),
}
"""Axes and meaning of each point. Some have companions: `<name>_codes` [T, width] int8 and `<name>_scale` [T], the int8 codes that a
ternary matrix takes instead of `<name>` and the steps per unit, 127 / max |x| of the row; and `<name>_in`, the norm inside a matrix.
T tokens, D width, H heads of K numbers, G key-value heads, F feed-forward width, E experts, k of a token, V vocabulary. Numbers are
float32, row by row."""

LOSS = "loss"
GRADIENTS = tuple(f"grad_{name}" for name in (*NORMS, *(matrix + end for matrix in MATRICES for end in ("", "_bias"))))
"""The loss's gradients for a layer's parameters, by GGUF's names of these without the ending."""
MODEL_GRADIENTS = ("grad_token_embd", "grad_output_norm", "grad_output")

_TENSOR = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z_]+)\.(weight|bias)")
_LABEL = re.compile(r"([A-Za-z_]+)(?:-(0|[1-9][0-9]{0,5}))?")
SLOTS = ("ffn_moe_weights", "ffn_moe_gate", "ffn_moe_up", "ffn_moe_swiglu", "ffn_moe_down")
"""The points that may have an axis of each token's experts: [T, k, width]."""
_HEADS = ("Qcur", "Kcur", "Vcur", "Qcur_normed", "Kcur_normed", "Qcur_rope", "Kcur_rope", "kqv_out")


class Key(NamedTuple):
    """A point: its name, and its layer if it has one."""

    name: str
    layer: int | None

    def __str__(self) -> str:
        """The label that files use: attn_norm-0, result_norm."""
        return self.name if self.layer is None else f"{self.name}-{self.layer}"

    @property
    def place(self) -> str:
        """The point in words: layer 3 ffn_inp."""
        return self.name if self.layer is None else f"layer {self.layer} {self.name}"


def meaning(name: str) -> str:
    """The meaning of a point of a forward pass, in a line."""
    for end, text in (("_codes", "{} as int8 codes"), ("_scale", "codes per unit of {}: 127 / max |x| of each token")):
        if name.endswith(end):
            return text.format(name.removesuffix(end))
    if name.endswith("_in"):
        return f"the norm inside the matrix that gives {name.removesuffix('_in')}"
    return MEANINGS[name][1]


def key_of(label: str) -> Key | None:
    """The point that a label names; None if there is no such point."""
    match = _LABEL.fullmatch(label)
    if not match:
        return None
    name, layer = match[1], match[2]
    if name not in ((*MODEL_NAMES, *MODEL_GRADIENTS, LOSS) if layer is None else (*LAYER_NAMES, *GRADIENTS)):
        return None
    return Key(name, None if layer is None else int(layer))


def gradient_key(tensor: str) -> Key | None:
    """The gradient of the parameter with this name in GGUF, such as blk.0.attn_q.weight; None if there is no such parameter."""
    match = _TENSOR.fullmatch(tensor)
    if not match:
        return None
    layer, name, end = match.groups()
    return key_of(f"grad_{name}{'_bias' * (end == 'bias')}{'' if layer is None else f'-{layer}'}")


@dataclass(frozen=True)
class Entry:
    """An array in a file: shape and dtype by its header, and a function that loads it."""

    shape: tuple[int, ...]
    dtype: np.dtype
    load: Callable[[], NDArray] = field(repr=False)


class Points(Mapping[Key, NDArray]):
    """The points of a file. Each access reads or maps the array anew."""

    def __init__(self, entries: Mapping[Key, Entry]) -> None:
        self.entries = dict(entries)

    def __getitem__(self, key: Key) -> NDArray:
        return self.entries[key].load()

    def __contains__(self, key: object) -> bool:
        return key in self.entries  # Mapping's own would read the array to find out

    def __iter__(self) -> Iterator[Key]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The tensors that one engine computed for one sequence.

    A point with fewer rows than there are tokens has those of `positions`, or that of the last token if `positions` is None.
    """

    points: Mapping[Key, NDArray]
    tokens: NDArray[np.int64] | None  # [T]
    origin: str  # the file and its format, for messages
    positions: NDArray[np.int64] | None = None  # [P] of the rows, where a file has only some
    ignored: tuple[str, ...] = ()  # records of the file that are no point, by the file's names
    notes: Mapping[str, object] = field(default_factory=dict)
    log_probs: Callable[[NDArray], NDArray] | None = None  # logits [P, V] as the file stores them, where it rounds their log-softmax

    def __repr__(self) -> str:
        tokens = "unknown tokens" if self.tokens is None else f"{len(self.tokens)} tokens"
        return f"Trace({shortened(self.origin)}: {len(self.points)} tensors of {tokens})"

    def without(self, key: Key) -> "Trace":
        """The trace without one point."""
        points = self.points
        if isinstance(points, Points):
            return replace(self, points=Points({k: entry for k, entry in points.entries.items() if k != key}))
        return replace(self, points={k: array for k, array in points.items() if k != key})


class Form(NamedTuple):
    """How an array of a file is brought into normal form."""

    shape: tuple[int, ...]  # in normal form
    axes: tuple[int, ...]  # of the array in the file, without those of length 1 that say nothing
    heads_first: bool = False  # whether `axes` are [heads, tokens, head width]

    def of(self, array: NDArray) -> NDArray:
        """The array in normal form."""
        array = array.reshape(self.axes)
        return (array.swapaxes(0, 1) if self.heads_first else array).reshape(self.shape)


def heads_of(key: Key, config: Config | None) -> int | None:
    """The number of heads that a point of a model has side by side; None if it has none, or if there is no config to know it from."""
    if config is None or key.name not in _HEADS:
        return None
    return config.kv_heads if key.name.startswith(("K", "V")) else config.heads


def normal_form(key: Key, shape: tuple[int, ...], rows: int | None, where: str, heads: int | None = None) -> Form:
    """How a point of this shape in a file becomes normal: leading axes of length 1 go, heads are put side by side.

    Points that have heads may be [T, H * K], [T, H, K] or [H, T, K], each with an axis of one sequence in front. The axis of the tokens is
    the one of length `rows`, the number of tokens; where that is not known, or both or neither have this length, the other one has `heads`,
    the number of heads. Where neither is known the tokens come first.

    Raises FileFormatError if the point cannot have such a shape, or if there are as many tokens as heads, so that both could come first.
    """

    def refuse(expected: str) -> FileFormatError:
        return FileFormatError(f"{where}: {shown(str(key))} has shape {list(shape)}, expected {expected}")

    def flat(*axes: int) -> Form:
        return Form(axes, axes)

    if not shape or 0 in shape:
        raise refuse("numbers, at least one")
    if key.name in SCORES:
        left = without_leading_ones(shape, 3)
        if len(left) != 3:
            raise refuse("[heads, tokens, keys]")
        return flat(*left)
    if key.name.endswith("_scale"):
        long = tuple(n for n in shape if n > 1) or (1,)
        if len(long) != 1:
            raise refuse("[tokens]")
        return flat(*long)
    left = without_leading_ones(shape, 3)
    if key.name in SLOTS and len(left) == 3 and (left[0] == rows or (rows is None and left[0] != 1)):
        return Form((left[0], left[1] * left[2]), left)
    if len(left) == 1:
        return flat(1, *left)
    if len(left) == 2:
        return flat(*left)
    if len(left) > 3:
        raise refuse("[tokens, width]")
    a, b, c = left
    if a == 1 and rows != 1 and (rows == b or key.name not in _HEADS):  # a batch of one
        return flat(b, c)
    if key.name not in _HEADS:
        if a == 1:
            return flat(b, c)
        raise refuse("[tokens, width]: one sequence")
    if a == b == rows and a > 1:
        raise refuse(f"[{a}, heads * head width]: with {a} tokens and {a} heads either could be the first axis")
    heads_first = b == rows if rows in (a, b) and a != rows else rows not in (a, b) and a == heads != b
    if heads_first and heads not in (None, a):
        raise refuse(f"[tokens, width] or {heads} heads: one sequence")
    return Form((b, a * c) if heads_first else (a, b * c), left, heads_first)


def without_leading_ones(shape: tuple[int, ...], axes: int) -> tuple[int, ...]:
    """A shape without leading axes of length 1, as long as it has more than `axes` axes."""
    while len(shape) > axes and shape[0] == 1:
        shape = shape[1:]
    return shape


def checked_dtype(key: object, dtype: np.dtype, where: str) -> np.dtype:
    """`dtype`, checked to be integers or floats of 64 bits at most. Raises FileFormatError that names the point `key`."""
    if dtype.kind not in "fiu" or dtype.itemsize > 8:
        raise FileFormatError(f"{where}: {shown(str(key))} has dtype {dtype}, expected integers or floats of 64 bits at most")
    return dtype


def checked_tokens(array: NDArray, where: str) -> NDArray[np.int64]:
    """Token ids of one sequence, [T] or [1, T], as [T]. Raises FileFormatError."""
    if array.ndim == 2 and len(array) == 1:
        array = array[0]
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu" or array.dtype.itemsize > 8:
        raise FileFormatError(f"{where}: tokens are {array.dtype} {list(array.shape)}, expected integers [T], at least one")
    if int(array.min()) < 0 or int(array.max()) >= 2**31:
        raise FileFormatError(f"{where}: tokens have the values {array.min()} to {array.max()}, expected ids from 0 to 2**31 - 1")
    return array.astype(np.int64)


def agreed_tokens(in_file: NDArray | None, expected: NDArray | None, where: str) -> NDArray[np.int64] | None:
    """The token ids of a trace, [T]: those in its file, or those the caller expects; None if neither has any.

    Raises FileFormatError if both have some, and not the same.
    """
    held, ids = (None if tokens is None else checked_tokens(tokens, where) for tokens in (in_file, expected))
    if held is not None and ids is not None and not np.array_equal(held, ids):
        raise FileFormatError(f"{where}: holds the tokens {_start(held)}, expected {_start(ids)}")
    return ids if held is None else held


def _start(ids: NDArray[np.int64]) -> str:
    return f"[{', '.join(map(str, ids[:8]))}{', ...' * (len(ids) > 8)}]"
