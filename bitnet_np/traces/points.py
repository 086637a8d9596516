"""Recorded points of a forward pass: the table of their names, and traces of them."""

import re
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..base.errors import shortened
from ..model.families import NORMS
from ..model.records import MATRICES

TOP_EXPERTS = "ffn_moe_topk"
"""The numbers of each token's experts: integers, as llama.cpp names them."""
POOLED = "result_embd_pooled"
"""The one vector of a sequence in an embedding model: a point with one row, whatever the number of tokens."""


class Point(NamedTuple):
    """A row of the table of points. Other projects may have several names for one, between blanks; the usual one comes first."""

    name: str  # ours: llama.cpp's where it has one
    axes: str  # T tokens, D width, H heads of K numbers, G key-value heads, F feed-forward width, E experts, k of a token, V vocabulary
    meaning: str
    whole: bool = False  # whether it is the whole model's, and not a layer's
    codes: bool = False  # whether ternary matrices of some family take it, as int8 codes with scales
    weight: str = ""  # the field in records.Layer or records.Model of the matrix whose product it is, or of its norm's gain
    ggml: str = ""  # nodes of bitnet.cpp's graph: name.OPERATION, as one name stands for several nodes
    llama_cpp: str = ""  # nodes of llama.cpp's graphs, where they are others
    module: str = ""  # modules whose output it is, within the layer or the model; transformers' and GGUF's follow from `weight`
    takes: str = ""  # the point that these modules take
    around: str = ""  # modules with these inside, which give the same
    bitnet_rs: str = ""  # BitNet-rs's tracepoints
    aprt: str = ""  # aprender's stages


def _point(name: str, axes: str, meaning: str, operation: str = "", **fields: Any) -> Point:
    """A row of the table; operation: of its node in bitnet.cpp's graph, if the node has the same name."""
    return Point(name, axes, meaning, **({"ggml": f"{name}.{operation}"} if operation else {}) | fields)


LAYER_INPUT = "attn_inp"
"""The output of the previous layer, or of the embedding. Codes made from it have this name."""

POINTS = (
    _point("inp_embd", "T D", "rows of the embedding for the tokens", "GET_ROWS", whole=True, weight="token_embd")._replace(
        module="tok_embeddings", bitnet_rs="embeddings", aprt="embedding"
    ),
    _point("inpL", "T D", "inp_embd plus learned positions, in models that have them", "ADD", whole=True),
    _point("inp_scaled", "T D", "the embedding times its scale, in models that have one", "SCALE", whole=True),
    _point("attn_norm", "T D", "norm in front of attention, in models that have one", "MUL", codes=True, weight="attn_norm")._replace(
        module="attention_norm", takes=LAYER_INPUT, bitnet_rs="attn_norm", aprt="attn_norm"
    ),
    _point(LAYER_INPUT, "", "the layer's input, in models without a norm in front of attention", codes=True),
    _point("Qcur", "T HK", "queries: matrix product with scale and bias", "MUL_MAT", weight="attn_q")._replace(
        llama_cpp="Qcur.ADD", module="attention.wq", takes="attn_norm", bitnet_rs="q_proj"
    ),
    _point("Kcur", "T GK", "keys: matrix product with scale and bias", "MUL_MAT", weight="attn_k")._replace(
        llama_cpp="Kcur.ADD", module="attention.wk", takes="attn_norm"
    ),
    _point("Vcur", "T GK", "values: matrix product with scale and bias", "MUL_MAT", weight="attn_v")._replace(
        llama_cpp="Vcur.ADD", module="attention.wv", takes="attn_norm"
    ),
    _point("Qcur_normed", "T HK", "queries after their norm, of each head or of all together, in models that have one", "MUL")._replace(
        weight="attn_q_norm", takes="Qcur"
    ),
    _point("Kcur_normed", "T GK", "keys after their norm, of each head or of all together, in models that have one", "MUL")._replace(
        weight="attn_k_norm", takes="Kcur"
    ),
    _point("Qcur_rope", "T HK", "queries after RoPE", ggml="Qcur.ROPE", aprt="q_post_rope"),
    _point("Kcur_rope", "T GK", "keys after RoPE", ggml="Kcur.ROPE", aprt="k_post_rope"),
    _point(
        "kq", "H T T", "attention scores q.k / sqrt(K), or with the model's own scale and cap; 0 where the query does not see the key"
    )._replace(ggml="kq.MUL_MAT", aprt="attn_scores"),
    _point("kq_soft_max", "H T T", "attention probabilities: softmax of the scores")._replace(
        ggml="kq_soft_max_ext.SOFT_MAX", bitnet_rs="attn_scores_softmax", aprt="attn_softmax"
    ),
    _point("kqv_out", "T HK", "output of attention, heads side by side", "CONT", codes=True, llama_cpp="kqv_out.RESHAPE", aprt="attention"),
    _point("attn_sub_norm", "T HK", "norm of kqv_out, in models that have one", "MUL", codes=True, weight="attn_sub_norm", takes="kqv_out"),
    _point("attn_o_out", "T D", "output matrix of attention, before the residual", "MUL_MAT", weight="attn_output")._replace(
        llama_cpp="attn_out.MUL_MAT", module="attention.wo", takes="kqv_out", around="self_attn attention attn", aprt="attn_out"
    ),
    _point("attn_post_norm", "T D", "norm of attn_o_out, in models that have one", "MUL", weight="post_attention_norm")._replace(
        module="post_self_attn_layernorm"
    ),
    _point(
        "ffn_inp",
        "T D",
        "attention's branch, times the residual scale, plus the layer's input; absent where attention and feed-forward run in parallel",
    )._replace(ggml="ffn_inp.ADD", codes=True, aprt="post_attn_residual"),
    _point("ffn_norm", "T D", "norm in front of the feed-forward, in models that have one", "MUL", codes=True, weight="ffn_norm")._replace(
        takes="ffn_inp", aprt="ffn_norm"
    ),
    _point("ffn_moe_logits", "T E", "router's product, in models that have experts", "MUL_MAT", weight="ffn_gate_inp", takes="ffn_norm"),
    _point(TOP_EXPERTS, "T k", "numbers of each token's experts, int32: those with the largest logits, largest first", "VIEW")._replace(
        aprt="moe_router_indices"
    ),
    _point(
        "ffn_moe_weights", "T k", "their weights: the softmax of all logits, divided by the sum of these k where the model does that"
    )._replace(ggml="ffn_moe_weights.GET_ROWS", llama_cpp="ffn_moe_weights_norm.DIV", aprt="moe_router"),
    _point("ffn_moe_gate", "T kF", "gate matrix of each of these experts, side by side", "MUL_MAT_ID"),
    _point("ffn_moe_up", "T kF", "up matrix of each", "MUL_MAT_ID"),
    _point("ffn_moe_swiglu", "T kF", "SiLU(gate) * up of each", "SWIGLU", llama_cpp="ffn_moe_swiglu.GLU"),
    _point("ffn_moe_down", "T kD", "down matrix of each", "MUL_MAT_ID"),
    _point("ffn_moe_out", "T D", "sum of their weights times ffn_moe_down", "ADD")._replace(
        llama_cpp="ffn_moe_out.CONT", module="mlp.experts block_sparse_moe.experts", aprt="moe_ffn_out"
    ),
    _point(
        "ffn_gate", "T F", "gate matrix, before the activation function, in models that have a gate", "MUL_MAT", weight="ffn_gate"
    )._replace(module="feed_forward.w1", takes="ffn_norm", aprt="ffn_gate"),
    _point("ffn_up", "T F", "up matrix", "MUL_MAT", weight="ffn_up", module="feed_forward.w3", takes="ffn_norm", aprt="ffn_up"),
    _point("ffn_out", "T F", "relu(gate)^2 * up, SiLU(gate) * up, GELU(gate) * up, or GELU(up)", "MUL", codes=True)._replace(
        llama_cpp="ffn_swiglu.SWIGLU ffn_swiglu.GLU ffn_gate_par.MUL", aprt="ffn_swigl"
    ),
    _point("ffn_sub_norm", "T F", "norm of ffn_out, in models that have one", "MUL", codes=True, weight="ffn_sub_norm", takes="ffn_out"),
    _point("ffn_down", "T D", "down matrix, before the residual", "MUL_MAT", weight="ffn_down")._replace(
        llama_cpp="ffn_out.MUL_MAT ffn_down.ADD ffn_shexp.MUL_MAT",
        module="feed_forward.w2",
        takes="ffn_out",
        around="mlp feed_forward block_sparse_moe",
        aprt="ffn_out",
    ),
    _point("ffn_shexp_out", "T D", "ffn_down times the sigmoid of its gate, in models that have a shared expert", "MUL"),
    _point("ffn_post_norm", "T D", "norm of ffn_down, in models that have one", "MUL", weight="post_ffw_norm"),
    _point("l_out", "T D", "output of the layer", "ADD", module=".", takes=LAYER_INPUT, aprt="post_ffn_residual"),
    _point("result_norm", "T D", "final norm", "MUL", whole=True, weight="output_norm", bitnet_rs="all_layers_out", aprt="final_norm"),
    _point(
        POOLED,
        "1 D",
        "mean of result_norm over all tokens, or that of the first (cls) or the last token, in models that state one",
        whole=True,
    )._replace(ggml="result_embd_pooled.MUL_MAT result_embd_pooled.GET_ROWS"),
    _point("result_output", "T V", "logits, scaled and capped where the model does that", "MUL_MAT", whole=True, weight="output")._replace(
        takes="result_norm", around="logits", bitnet_rs="logits", aprt="lm_head"
    ),
    _point("log_probs", "T V", "log-softmax of the logits, for files that hold no logits", whole=True),
)
"""Some have companions: `<name>_codes` [T, width] int8 and `<name>_scale` [T], the int8 codes that a ternary matrix takes instead of
`<name>` and the steps per unit, 127 / max |x| of the row; and `<name>_in`, the norm inside a matrix. Numbers are float32, row by row."""

POINT = {point.name: point for point in POINTS}
MEANINGS = {point.name: (point.axes, point.meaning) for point in POINTS if point.axes}
"""Axes and meaning of each point."""
LINEAR_NAMES = tuple(point.name for point in POINTS if point.weight in MATRICES)
"""The outputs of a layer's matrices."""
FIELDS = {name: POINT[name].weight for name in (*LINEAR_NAMES, "ffn_moe_logits")}
"""The output of each of a layer's matrices, including the router -> the matrix's field in records.Layer."""
MAY_BE_QUANTIZED = (*(point.name for point in POINTS if point.codes), *(f"{name}_in" for name in LINEAR_NAMES))
"""The inputs of ternary matrices in any family; <name>_in is the norm inside the matrix that gives <name>."""
SCORES = tuple(name for name, (axes, _) in MEANINGS.items() if axes == "H T T")
SLOTS = tuple(name for name, (axes, _) in MEANINGS.items() if axes.startswith("T k") and name != TOP_EXPERTS)
"""The points that may have an axis of each token's experts: [T, k, width]."""
HEADS = tuple(name for name, (axes, _) in MEANINGS.items() if axes in ("T HK", "T GK") and name not in NORMS)
"""The points that may have an axis of heads: [T, heads, K]."""
MODEL_NAMES = tuple(point.name for point in POINTS if point.whole)


def _in_order() -> Iterator[str]:
    for point in POINTS:
        inner = (f"{point.name}_in",) if point.name in LINEAR_NAMES else ()
        for name in (*inner, point.name):
            if not point.whole and name != LAYER_INPUT:  # which is another layer's point
                yield name
            if name in MAY_BE_QUANTIZED:
                yield from (name + "_codes", name + "_scale")


LAYER_NAMES = tuple(_in_order())
"""The points of a layer, in the order they are computed."""

RECORDED = (*(name for name in LAYER_NAMES if name not in SCORES), *(name for name in MODEL_NAMES if name != "log_probs"))
"""The points that forward passes record, over all families. Scores are computed on request; log_probs come from files without logits."""


def ours_of(column: str) -> dict[str, str]:
    """The names in a column of the table -> our names."""
    return {name: point.name for point in POINTS for name in getattr(point, column).split()}


LOSS = "loss"
GRADIENTS = tuple(f"grad_{name}" for name in (*NORMS, *(matrix + end for matrix in MATRICES for end in ("", "_bias"))))
"""The loss's gradients for a layer's parameters, by GGUF's names of these without the ending."""
MODEL_GRADIENTS = ("grad_token_embd", "grad_output_norm", "grad_output")

_TENSOR = re.compile(r"(?:blk\.(0|[1-9][0-9]{0,5})\.)?([a-z_]+)\.(weight|bias)")
_LABEL = re.compile(r"([A-Za-z_]+)(?:-(0|[1-9][0-9]{0,5}))?")


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


class Points(UserDict[Key, Any]):
    """The points of a file, made from their entries. Each access reads or maps the array again."""

    @property
    def entries(self) -> dict[Key, Entry]:
        return self.data

    def __getitem__(self, key: Key) -> NDArray:
        return self.data[key].load()


@dataclass(frozen=True, eq=False, repr=False)
class Trace:
    """The tensors that one engine computed for one sequence.

    A point with fewer rows than there are tokens has the rows of `positions`, or the last token's row if `positions` is None.
    """

    points: Mapping[Key, NDArray]
    tokens: NDArray[np.int64] | None  # [T]
    origin: str  # the file and its format, for messages
    positions: NDArray[np.int64] | None = None  # [P] of the rows, where a file has only some
    ignored: tuple[str, ...] = ()  # records of the file that are no point, by the file's names
    unread: tuple[str, ...] = ()  # those of them that are tensors by label
    notes: tuple[str, ...] = ()  # how labels are read that are not written as ours, and which are not understood
    log_probs: Callable[[NDArray], NDArray] | None = None  # logits [P, V] as the file stores them, where it rounds their log-softmax

    def __repr__(self) -> str:
        tokens = "unknown tokens" if self.tokens is None else f"{len(self.tokens)} tokens"
        return f"Trace({shortened(self.origin)}: {len(self.points)} tensors of {tokens})"

    def without(self, key: Key) -> "Trace":
        """The trace without one point."""
        points = Points(self.points.entries) if isinstance(self.points, Points) else dict(self.points)
        del points[key]
        return replace(self, points=points)
