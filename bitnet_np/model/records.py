"""The records that a model is made of: flat arrays, each with its shape in a comment. Behaviour is elsewhere.

Letters used in every shape comment of this package:
    B sequences   T tokens of one call   R rows (tokens of all sequences, end to end)   S positions a cache holds
    L layers      D model width          F feed-forward width                           V vocabulary
    E experts
    H query heads G key-value heads      K head width       J rotated pairs of a head   M, N a matrix's input and output width
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from ..base.errors import ShapeError, UnsupportedError, shown
from ..base.tensor_types import BF16, F16, F32, TensorType
from ..base.validate import choice, flag, instance, integer, items_of, number, positive

Activation = Literal["relu2", "silu", "gelu_gate", "gelu", "gelu_tanh"]
"""The feed-forward's: relu(gate)^2 * up, silu(gate) * up, or the GELU by tanh of the gate, times up; without a gate the exact GELU (erf) or
its approximation by tanh."""

Norm = Literal["rms", "layer"]

Rope = Literal["halves", "adjacent", "none"]
"""The numbers of a head that make a pair: (i, i + J) as in GPT-NeoX, or (2i, 2i + 1) as in the permuted rows of Llama's GGUF files."""

Pooling = Literal["none", "mean", "cls", "last"]
"""The rows after the final norm that an embedding model makes one vector of: all, by their mean; the first one; the last one. In the
order of llama.cpp's numbers for them."""

LONGEST_CONTEXT = 1 << 20  # positions whose angles are exact (rope.LARGEST_ANGLE); the longest context in use is 1,010,000

_MOST = {
    "vocab": 1 << 31,  # token ids are int32 in files and in every engine
    "context": LONGEST_CONTEXT,
    "width": 1 << 19,  # an int32 lane of the ternary kernels sums a quarter of these columns, each at most 128 * 127
    "ffn": 1 << 19,
    "head_dim": 1 << 12,
    "n_layers": 1 << 12,  # so that a list of layers stays short, whatever a file says
    "q_width": 1 << 19,
    "experts": 1 << 12,
    "shared_ffn": 1 << 19,
}


_SMALLEST, _LARGEST = 2.0**-126, 2.0**127  # factors: normal numbers of float32


@dataclass(frozen=True)
class Yarn:
    """YaRN's scaling of RoPE's frequencies (arXiv 2309.00071); rope.yarn_factors has the rule.

    Raises UnsupportedError for numbers that cannot be.
    """

    factor: float  # divides the frequencies of slow pairs
    original: int  # the context that the model was trained for before it was stretched
    fast: float = 32.0  # pairs that turn more often than this in the original context keep their frequency
    slow: float = 1.0  # those that turn less often are divided by the whole factor
    truncate: bool = True  # the borders between them are whole numbers of pairs

    def __post_init__(self) -> None:
        integer("YaRN's original context", self.original, 1, error=UnsupportedError)
        for name in ("factor", "fast", "slow"):
            positive(f"YaRN's {name}", getattr(self, name), UnsupportedError)
        if not _SMALLEST <= self.factor < _LARGEST:
            raise UnsupportedError(f"YaRN's factor is {self.factor}, expected a positive number of float32")
        flag("YaRN's truncate", self.truncate)
        if not self.fast > self.slow:
            raise UnsupportedError(f"YaRN's fast and slow are {self.fast} and {self.slow}, expected the first to be larger")


@dataclass(frozen=True)
class LongRope:
    """LongRoPE's factors of RoPE's frequencies (arXiv 2402.13753): one list for the context that the model was trained for, one beyond it.

    Raises UnsupportedError for numbers that cannot be.
    """

    original: int  # the longest context that takes the short list
    short: tuple[float, ...]  # [J]
    long: tuple[float, ...]  # [J]

    def __post_init__(self) -> None:
        integer("LongRoPE's original context", self.original, 2, error=UnsupportedError)
        for name in ("short", "long"):
            factors = list(items_of(f"LongRoPE's {name} list", getattr(self, name), UnsupportedError))
            if not all(_SMALLEST <= number(f"a factor of LongRoPE's {name} list", x) < _LARGEST for x in factors):
                raise UnsupportedError(f"LongRoPE's {name} list is {shown(factors)}, expected positive numbers of float32")


@dataclass(frozen=True)
class Config:
    """The numbers of a model. Names follow GGUF's keys where those are short enough; defaults are BitNet b1.58's.

    Raises ShapeError for sizes that do not go together, UnsupportedError for a model that no kernel here can compute.
    """

    architecture: str
    vocab: int  # V
    context: int  # positions the model was trained for
    width: int  # D
    n_layers: int  # L
    ffn: int  # F, of each expert in a model that has experts
    heads: int  # H
    kv_heads: int  # G, divides H
    head_dim: int  # K
    eps: float  # inside the root of every norm
    rope_base: float
    activation: Activation = "relu2"
    norm: Norm = "rms"
    rope: Rope = "halves"
    rope_width: int | None = None  # 2J, the first numbers of a head, which are rotated; None: all K
    rope_layers: tuple[int, ...] | None = None  # the layers that rotate queries and keys; None: all
    rope_scaling: float = 1.0  # positions are divided by it (linear scaling)
    yarn: Yarn | None = None  # the scaling of frequencies that Model.rope_factors follows from; None: they are the file's own
    longrope: LongRope | None = None  # the same of LongRoPE: the context says which list they are
    rope_magnitude: float = 1.0  # multiplies RoPE's cosines and sines
    local_layers: tuple[int, ...] = ()  # the layers whose RoPE is not scaled (Gemma 3, arXiv 2503.19786; OLMo 3)
    local_rope_base: float | None = None  # their base (Gemma 3); None: the base of all layers
    parallel_residual: bool = False  # attention and feed-forward both read the layer's input
    shared_norm: bool = False  # and after the same norm, which is attention's (Phi)
    window: int | None = None  # the keys a query sees at most, its own the last of them (Mistral 7B, arXiv 2310.06825); None: all
    window_layers: tuple[int, ...] | None = None  # the layers that have this window; None: all
    joint_qk_norms: bool = False  # norms of queries and of keys are over all heads together (OLMo 2), not over each
    attention_scale: float | None = None  # multiplies q . k; None: 1 / sqrt(K)
    score_cap: float | None = None  # attention scores s become cap * tanh(s / cap) (Gemma 2, arXiv 2408.00118); None: not capped
    embedding_scale: float = 1.0  # multiplies the embedding
    residual_scale: float = 1.0  # multiplies the output of a branch before it is added
    logit_scale: float = 1.0  # divides the logits
    logit_cap: float | None = None  # logits x become cap * tanh(x / cap), after the scale; None: not capped
    experts: int = 0  # E feed-forwards of a layer; each token takes some (Mixtral, arXiv 2401.04088). 0: one, for all tokens
    experts_used: int = 0  # the experts that a token takes
    normalized_experts: bool = True  # the weights of a token's experts are divided by their sum
    shared_ffn: int = 0  # the feed-forward width of an expert that every token takes in addition to the others (Qwen2-MoE); 0: none
    pooling: Pooling = "none"  # how an embedding model makes one vector of a sequence (engine/pooling.py); logits do not depend on it

    def __post_init__(self) -> None:
        _check_kinds(self)
        _check_numbers(self)
        _check_experts(self)
        _check_rope(self)
        _check_scaling(self)
        _check_layers(self)

    def window_of(self, layer: int) -> int | None:
        """The keys that a query of this layer sees at most; None: all."""
        return self.window if self.window_layers is None or layer in self.window_layers else None

    def rotates(self, layer: int) -> bool:
        """Whether this layer rotates its queries and keys."""
        return self.rope != "none" and (self.rope_layers is None or layer in self.rope_layers)

    @property
    def q_width(self) -> int:
        """H * K: the width of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """G * K: the width of all keys, or of all values, of a token."""
        return self.kv_heads * self.head_dim

    @property
    def q_norm_width(self) -> int:
        """The numbers that a norm of queries takes together."""
        return self.q_width if self.joint_qk_norms else self.head_dim

    @property
    def k_norm_width(self) -> int:
        """The numbers that a norm of keys takes together."""
        return self.kv_width if self.joint_qk_norms else self.head_dim

    @property
    def rope_pairs(self) -> int:
        """J: the pairs of a head that RoPE rotates."""
        return 0 if self.rope == "none" else (self.rope_width or self.head_dim) // 2

    @property
    def gated(self) -> bool:
        """Whether the feed-forward has a gate in addition to up."""
        return self.activation in ("relu2", "silu", "gelu_gate")

    @property
    def dense_ffn(self) -> int:
        """The width of the feed-forward that every token takes; 0 if there are only experts."""
        return self.shared_ffn if self.experts else self.ffn

    @property
    def has_choice(self) -> bool:
        """Whether a token takes some experts and not all."""
        return 0 < self.experts_used < self.experts


def _check_kinds(c: Config) -> None:
    """Checks what is no number."""
    instance("architecture", c.architecture, str)
    for name, kind in (("yarn", Yarn), ("longrope", LongRope)):
        if getattr(c, name) is not None:
            instance(name, getattr(c, name), kind)
    for name, choices in (("activation", Activation), ("norm", Norm), ("rope", Rope), ("pooling", Pooling)):
        choice(name, getattr(c, name), get_args(choices), UnsupportedError)
    for name in ("parallel_residual", "shared_norm", "joint_qk_norms", "normalized_experts"):
        flag(name, getattr(c, name))
    if c.shared_norm and not c.parallel_residual:
        raise UnsupportedError("shared_norm is True without parallel_residual, expected branches that read the same input")


def _check_numbers(c: Config) -> None:
    """Checks each number by itself, and that heads share keys and values evenly."""
    for name in ("vocab", "context", "width", "n_layers", "ffn", "heads", "kv_heads", "head_dim"):
        integer(name, getattr(c, name), 1, error=ShapeError)
    for name in ("experts", "shared_ffn"):
        integer(name, getattr(c, name), 0, error=ShapeError)
    for name, most in _MOST.items():
        if getattr(c, name) > most:
            raise UnsupportedError(f"{name} is {getattr(c, name)}, expected at most {most}")
    if c.heads % c.kv_heads:
        raise ShapeError(f"{c.heads} query heads cannot share {c.kv_heads} key-value heads evenly")
    if c.window is not None:
        integer("window", c.window, 1, LONGEST_CONTEXT, ShapeError)
    for name in ("eps", "rope_base", "rope_scaling", "rope_magnitude", "embedding_scale", "residual_scale", "logit_scale"):
        positive(name, getattr(c, name), UnsupportedError)
    for name in ("attention_scale", "score_cap", "logit_cap", "local_rope_base"):
        if getattr(c, name) is not None:
            positive(name, getattr(c, name), UnsupportedError)


def _check_experts(c: Config) -> None:
    """Checks that a token's experts are some of the model's."""
    integer("experts_used", c.experts_used, int(c.experts > 0), error=ShapeError)
    if c.experts_used > c.experts or (c.shared_ffn and not c.experts):
        raise ShapeError(f"experts_used is {c.experts_used} and shared_ffn {c.shared_ffn} in a model of {c.experts} experts")
    if c.experts and not c.gated:
        raise UnsupportedError(f"activation is {c.activation} in a model of experts, expected one with a gate")


def _check_rope(c: Config) -> None:
    """Checks that RoPE rotates pairs of a head's numbers."""
    if c.rope_width is None:
        if c.rope != "none" and c.head_dim % 2:
            raise ShapeError(f"head width {c.head_dim} is odd, but RoPE rotates pairs")
    elif c.rope == "none" or integer("rope_width", c.rope_width, 0, error=ShapeError) not in range(2, c.head_dim + 1, 2):
        raise ShapeError(f"{c.rope_width} numbers of each head are rotated, expected an even number from 2 to {c.head_dim}")
    if c.local_layers and c.rope == "none":
        raise ShapeError(f"local_layers are {c.local_layers} with rope {c.rope!r}, expected RoPE")


def _check_scaling(c: Config) -> None:
    """Checks that RoPE is scaled in one way."""
    if c.longrope is not None:
        if c.rope == "none" or c.rope_scaling != 1 or c.yarn is not None:
            raise UnsupportedError(f"LongRoPE in a model with rope {c.rope!r} that is also scaled in another way")
        for which, divisors in (("short", c.longrope.short), ("long", c.longrope.long)):
            if len(divisors) != c.rope_pairs:
                raise ShapeError(f"LongRoPE's {which} list has {len(divisors)} factors, expected {c.rope_pairs}")
    if c.yarn is not None and (c.rope == "none" or c.rope_scaling != 1 or c.rope_base <= 1):
        raise UnsupportedError(
            f"YaRN in a model with rope {c.rope!r}, rope_base {c.rope_base} and rope_scaling {c.rope_scaling}, "
            "expected RoPE with a base above 1 and no other scaling"
        )
    if c.local_rope_base is not None and (c.yarn is not None or c.longrope is not None or c.rope_magnitude != 1):
        raise UnsupportedError(f"local_rope_base is {c.local_rope_base} in a model with YaRN or LongRoPE, expected linear scaling or none")


def _check_layers(c: Config) -> None:
    """Checks the lists of layers."""
    for name in ("window_layers", "rope_layers", "local_layers"):
        layers = getattr(c, name)
        numbers = isinstance(layers, tuple) and all(isinstance(n, int) and n in range(c.n_layers) for n in layers)
        if layers is not None and not numbers:
            raise ShapeError(f"{name} are {shown(layers)}, expected numbers of {c.n_layers} layers")


@dataclass(frozen=True, eq=False, repr=False)
class Blocks:
    """A matrix in one of ggml's block types, as it lies in the file."""

    data: NDArray[np.uint8]  # [N, bytes of a row], read-only
    type: TensorType
    shape: tuple[int, int]  # (N, M)

    def __repr__(self) -> str:
        return f"Blocks({self.type.name} {list(self.shape)})"

    @property
    def nbytes(self) -> int:
        return self.data.nbytes


@dataclass(frozen=True, eq=False, repr=False)
class Ternary:
    """A matrix of -1, 0, +1 times one scale, packed as the kernels stream it (see packing.py)."""

    codes: NDArray[np.uint8]  # [ceil(N/16) * ceil(M/16) * 64], read-only
    scale: np.float32
    shape: tuple[int, int]  # (N, M)
    blocks: Blocks | None = None  # the same matrix as the file has it, where that is one of ggml's types

    def __repr__(self) -> str:
        return f"Ternary({list(self.shape)}, scale {self.scale:.6g})"

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes


Table = Blocks | NDArray
"""A matrix of numbers: blocks, float32, float16, or bfloat16 as its uint16 bits."""

FLOAT_TYPES = {np.dtype(np.float32): F32, np.dtype(np.float16): F16, np.dtype(np.uint16): BF16}
"""The types of matrices that are no blocks, by their dtypes."""

Weights = Ternary | Table


def _summary(weights: Weights) -> str:
    """The type and the shape of a matrix, for the repr of what holds it."""
    return f"{weights.dtype} {list(weights.shape)}" if isinstance(weights, np.ndarray) else repr(weights)


@dataclass(frozen=True, eq=False, repr=False)
class Linear:
    """A matrix and what belongs to it: (norm(x) W^T) * scale + bias.

    Ternary weights take the input as int8 codes, one scale for each token; all other weights take it in float32.
    """

    weights: Weights  # [N, M]
    bias: NDArray[np.float32] | None = None  # [N]
    scale: np.float32 | None = None  # multiplies the product, in addition to the scale of the weights
    norm: NDArray[np.float32] | None = None  # [M] gain of an RMS norm of the input
    norm_eps: float | None = None  # of that norm; None: the model's

    def __repr__(self) -> str:
        return f"Linear({_summary(self.weights)}{' with bias' if self.bias is not None else ''})"

    @property
    def shape(self) -> tuple[int, int]:
        """(N, M)."""
        n, m = self.weights.shape
        return n, m


@dataclass(frozen=True, eq=False, repr=False)
class Expert:
    """One expert of a layer: a feed-forward that some of the tokens take."""

    ffn_gate: Annotated[Linear, "ffn", "width"]
    ffn_up: Annotated[Linear, "ffn", "width"]
    ffn_down: Annotated[Linear, "width", "ffn"]

    def __repr__(self) -> str:
        return f"Expert({_summary(self.ffn_up.weights)})"


_Gain = NDArray[np.float32] | None


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Layer:
    """One transformer block, in the order of its operations. A field that the family does not have is None.

    In a model with experts, ffn_gate, ffn_up and ffn_down are those of the shared expert, of width shared_ffn, if there is one.
    """

    attn_norm: Annotated[_Gain, "width"] = None  # before attention
    attn_q: Annotated[Linear, "q_width", "width"]
    attn_k: Annotated[Linear, "kv_width", "width"]
    attn_v: Annotated[Linear, "kv_width", "width"]
    attn_q_norm: Annotated[_Gain, "q_norm_width"] = None  # of each query head, or [H*K] of all together
    attn_k_norm: Annotated[_Gain, "k_norm_width"] = None  # of each key head, or [G*K] of all together
    attn_sub_norm: Annotated[_Gain, "q_width"] = None  # after attention
    attn_output: Annotated[Linear, "width", "q_width"]
    post_attention_norm: Annotated[_Gain, "width"] = None  # after attention's output matrix
    ffn_norm: Annotated[_Gain, "width"] = None  # before the feed-forward
    ffn_gate: Annotated[Linear | None, "dense_ffn", "width"] = None
    ffn_up: Annotated[Linear | None, "dense_ffn", "width"] = None
    ffn_sub_norm: Annotated[_Gain, "dense_ffn"] = None  # after the activation
    ffn_down: Annotated[Linear | None, "width", "dense_ffn"] = None
    post_ffw_norm: Annotated[_Gain, "width"] = None  # after the feed-forward
    attn_norm_bias: Annotated[_Gain, "width"] = None
    ffn_norm_bias: Annotated[_Gain, "width"] = None
    ffn_gate_inp: Annotated[Linear | None, "experts", "width"] = None  # the router: its products choose a token's experts
    ffn_gate_inp_shexp: Annotated[_Gain, "width"] = None  # the sigmoid of its product multiplies the shared expert
    experts: tuple[Expert, ...] = ()  # E of them

    def __repr__(self) -> str:
        names = [name for name, value in vars(self).items() if value is not None and name != "experts"]
        return f"Layer({', '.join(names)}{f', {len(self.experts)} experts' if self.experts else ''})"

    def linears(self) -> Iterator[tuple[str, Linear]]:
        """All matrices by name; those of expert 3 are ffn_gate.3, ffn_up.3 and ffn_down.3."""
        yield from ((name, value) for name, value in vars(self).items() if isinstance(value, Linear))
        for n, expert in enumerate(self.experts):
            yield from ((f"{name}.{n}", value) for name, value in vars(expert).items())


@dataclass(frozen=True, eq=False, repr=False)
class Model:
    """Everything a forward pass reads."""

    config: Config
    token_embd: Annotated[Table, "vocab", "width"]
    layers: tuple[Layer, ...]
    output_norm: Annotated[NDArray[np.float32], "width"]
    rope_frequency: Annotated[NDArray[np.float64], "rope_pairs"]  # radians per position, all scaling included
    local_rope_frequency: Annotated[NDArray[np.float64] | None, "rope_pairs"] = None  # the same in Config.local_layers
    output: Annotated[Table | None, "vocab", "width"] = None  # None: the head is token_embd
    output_bias: Annotated[_Gain, "vocab"] = None
    output_norm_bias: Annotated[_Gain, "width"] = None
    position_embd: Annotated[Table | None, "context", "width"] = None  # added to the embedding
    rope_factors: Annotated[_Gain, "rope_pairs"] = None  # divide rope_frequency in addition to rope_scaling (Llama 3)
    stated_dtype: str = ""  # the float type that the file tells engines to compute in; empty where it tells none
    norm_offset: float = 0.0  # what norms add to their weights as the file has them, included in those here (1 in folders of Gemma)

    def __repr__(self) -> str:
        c = self.config
        return f"Model({c.architecture}: {c.n_layers} layers, width {c.width}, {c.vocab} tokens, head {_summary(self.head)})"

    @property
    def head(self) -> Table:
        """[V, D], whether or not it is the embedding."""
        return self.token_embd if self.output is None else self.output


MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""The seven matrices of a layer, by their fields. A router is none of them."""
QKV = MATRICES[:3]
"""The matrices that read the same input. They may be rows of one tensor, attn_qkv."""
GATE_UP = MATRICES[4:6]
"""The feed-forward's matrices that read the same input. In some families they are rows of one tensor, ffn_up."""


_HINTS = {record: get_type_hints(record, include_extras=True) for record in (Model, Layer, Expert)}
_SIZES: dict[type, dict[str, tuple[str, ...]]] = {
    record: {name: hint.__metadata__ for name, hint in hints.items() if get_origin(hint) is Annotated} for record, hints in _HINTS.items()
}
"""The numbers of Config that are the shape of each field, as its annotation has them."""


def shapes_of(record: type[Model | Layer | Expert], c: Config) -> dict[str, Any]:
    """The shape of the array, or (N, M) of the matrix, of each field of a record, in the order of the operations."""
    return {name: tuple(getattr(c, size) for size in sizes) for name, sizes in _SIZES[record].items()}


def window_fields(window: int | None, layers: Sequence[int], n_layers: int) -> dict[str, Any]:
    """The fields of a Config in which these layers, of n_layers, see a window of `window` keys, if any, and all others everything."""
    if window is None or not layers:
        return {"window": None}
    return {"window": window, "window_layers": None if len(layers) == n_layers else tuple(layers)}


def with_local_rope(config: Config) -> Config:
    """The Config of a model all of whose layers turn as the local ones of this one do: by their base, without scaling."""
    plain: dict[str, Any] = {"rope_scaling": 1.0, "yarn": None, "longrope": None, "rope_magnitude": 1.0}
    return replace(config, rope_base=config.local_rope_base or config.rope_base, local_layers=(), **plain)


def with_rope_of(model: Model, layer: int | None) -> Model:
    """The model with this layer's RoPE in every layer: itself, unless it has local layers and this is one."""
    if layer not in model.config.local_layers:
        return model
    assert model.local_rope_frequency is not None
    return replace(model, config=with_local_rope(model.config), rope_frequency=model.local_rope_frequency, rope_factors=None)


def frozen(record: Any) -> Any:
    """The same record with its arrays made read-only, in place.

    So kernels are compiled for one type of array, and nobody changes a weight by accident.
    """
    for name, value in vars(record).items():
        if isinstance(value, np.ndarray):
            value.flags.writeable = False
        elif isinstance(value, Linear | Ternary | Blocks):
            frozen(value)
        elif name == "experts" and isinstance(value, tuple):
            for expert in value:
                frozen(expert)
    return record
