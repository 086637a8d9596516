"""The architecture table: the traits of each supported family of models, by the architecture of its GGUF files.

An architecture means what llama.cpp computes for its files; `bitnet-b1.58` and `bitnet-25` mean what bitnet.cpp and transformers compute.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .records import GATE_UP, MATRICES, QKV, Config, Layer, shapes_of

NORMS = ("attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm")
"""The norms of a BitNet layer. Other families have no sub-norms."""
FUSED = {"attn_qkv": QKV, "ffn_up": GATE_UP}
"""The tensors that may hold the rows of several matrices, one matrix after the other."""
_UNGATED = tuple(name for name in MATRICES if name != "ffn_gate")


@dataclass(frozen=True)
class Family:
    """The traits of an architecture's models and GGUF files."""

    config: Mapping[str, Any]  # the fields of records.Config that the architecture implies
    norms: tuple[str, ...] = ("attn_norm", "ffn_norm")  # of a layer; each LayerNorm has a bias
    head_norms: tuple[str, ...] = ()  # of queries and of keys
    matrices: tuple[str, ...] = MATRICES
    biases: tuple[str, ...] = ()  # matrices that have a bias
    optional_biases: tuple[str, ...] = ()  # matrices that may have a bias
    scales: bool = False  # blk.<n>.<matrix>.scale may multiply a product
    ternary: bool = False  # all matrices of layers are ternary
    rope_factors: bool = False  # rope_freqs.weight may divide RoPE's frequencies
    longrope: bool = False  # rope_factors_short.weight and rope_factors_long.weight may divide them, by the context
    partial_rope: bool = False  # rope.dimension_count may be less than the head width
    windows: bool = False  # attention.sliding_window may limit what layers see
    window_period: int = 0  # if the file does not say which layers have the window: all but every window_period-th; 0: all
    positions: bool = False  # position_embd.weight is added to the embedding
    head_bias: bool = False  # output.bias may be added to the logits
    required: tuple[str, ...] = ()  # fields of records.Config that a file must state, in addition to those that all files must
    rope_period: int = 0  # every rope_period-th layer does not rotate; 0: all rotate
    chooses_residual: bool = False  # use_parallel_residual says whether attention and feed-forward read the same input
    scaling: bool = True  # rope.scaling.* may divide positions
    numbers: tuple[str, ...] = ()  # fields of records.Config that a file may state, of those that few families have
    scales_embedding: bool = False  # the embedding is multiplied by the root of the width
    inner_norms: bool = False  # blk.<n>.<matrix>_norm_in.weight may norm a matrix's input
    fused: tuple[str, ...] = ()  # the tensors of FUSED that the family's files have
    local_rope: bool = False  # RoPE is not scaled in layers with the window
    local_rope_base: float | None = None  # RoPE's base in them, if the file states none; None: the base of all layers
    wide_scale: int = 0  # a model with this many layers has the attention scale 1 / sqrt(D / H), all others 1 / sqrt(K)
    expert_width: bool = False  # a file states the width of an expert, and the width of a feed-forward that no layer has


_BITNET = {"activation": "relu2", "norm": "rms", "rope": "halves"}
_RELEASED = Family(
    _BITNET,
    norms=NORMS,
    ternary=True,
    required=("kv_heads", "rope_base"),
    scaling=False,
)
_QWEN = {"activation": "silu", "norm": "rms", "rope": "halves"}
_LLAMA = {"activation": "silu", "norm": "rms", "rope": "adjacent"}
_GEMMA = {"activation": "gelu_gate", "norm": "rms", "rope": "halves"}
_HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
_BOTH_SIDES = ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm")
_FACTORS = ("embedding_scale", "residual_scale", "logit_scale")
_CAPS = ("score_cap", "logit_cap")
_EXPERTS = ("experts", "experts_used")
_LLAMA_LIKE = Family(_LLAMA, optional_biases=MATRICES, rope_factors=True)
_QWEN_EXPERTS = Family(_QWEN | {"normalized_experts": True}, numbers=_EXPERTS, expert_width=True)
_LATER_GEMMA = Family(_GEMMA, norms=_BOTH_SIDES, windows=True, scales_embedding=True)
_LAYER_NORM = {"activation": "gelu_tanh", "norm": "layer", "rope": "halves"}
_GELU = Family(_LAYER_NORM, matrices=_UNGATED, biases=_UNGATED)
_PARTLY_ROTATED = replace(_GELU, partial_rope=True, head_bias=True, required=("rope_width",))

FAMILIES: dict[str, Family] = {
    "bitnet-b1.58": _RELEASED,
    "bitnet-25": _RELEASED,  # the name that an earlier upload of the same model used
    "bitnet": Family(_BITNET | {"activation": "silu"}, norms=NORMS, scales=True, ternary=True),
    "llama": replace(_LLAMA_LIKE, windows=True, numbers=_EXPERTS),
    "qwen2": Family(_QWEN, biases=QKV, head_bias=True, windows=True),
    "qwen3": Family(_QWEN, head_norms=_HEAD_NORMS, windows=True, inner_norms=True),
    "qwen2moe": replace(
        _QWEN_EXPERTS,
        config=_QWEN | {"normalized_experts": False},
        biases=QKV,
        numbers=(*_EXPERTS, "shared_ffn"),
        required=(*_EXPERTS, "shared_ffn", "expert_ffn"),
    ),
    "qwen3moe": replace(_QWEN_EXPERTS, head_norms=_HEAD_NORMS, required=(*_EXPERTS, "expert_ffn")),
    "phi3": Family(_QWEN, longrope=True, partial_rope=True, windows=True, fused=("ffn_up",)),
    "smollm3": Family(_LLAMA, rope_period=4),
    "granite": replace(_LLAMA_LIKE, numbers=(*_FACTORS, "attention_scale"), required=("logit_scale",)),
    "minicpm": replace(_LLAMA_LIKE, longrope=True, numbers=_FACTORS, required=_FACTORS),
    "olmo2": Family(
        _QWEN | {"joint_qk_norms": True},
        norms=("post_attention_norm", "post_ffw_norm"),
        head_norms=_HEAD_NORMS,
        windows=True,  # OLMo 3's: its files also have this architecture
        window_period=4,
        local_rope=True,
    ),
    "gemma": Family(_GEMMA, scales_embedding=True),
    "gemma2": replace(_LATER_GEMMA, window_period=2, numbers=_CAPS, required=("window", *_CAPS), wide_scale=46),
    "gemma3": replace(
        _LATER_GEMMA,
        head_norms=_HEAD_NORMS,
        window_period=6,
        numbers=("logit_cap", "local_rope_base"),
        local_rope=True,
        local_rope_base=10000.0,
        wide_scale=62,
    ),
    "gptneox": replace(  # llama.cpp has no exact GELU here
        _PARTLY_ROTATED, fused=("attn_qkv",), required=("rope_width", "parallel_residual"), chooses_residual=True
    ),
    "gpt2": replace(_GELU, config=_LAYER_NORM | {"rope": "none"}, fused=("attn_qkv",), positions=True, scaling=False),
    "starcoder2": replace(_GELU, windows=True),
    "phi2": replace(_PARTLY_ROTATED, config=_LAYER_NORM | {"parallel_residual": True, "shared_norm": True}, norms=("attn_norm",)),
    "stablelm": Family(
        {"activation": "silu", "norm": "layer", "rope": "halves"}, optional_biases=QKV, partial_rope=True, required=("rope_width",)
    ),
}
ARCHITECTURES = tuple(FAMILIES)


def implied(c: Config) -> dict[str, Any]:
    """The fields of a Config that its architecture derives from others: no GGUF file states them."""
    family = FAMILIES[c.architecture]
    fields: dict[str, Any] = {}
    if family.scales_embedding:
        fields["embedding_scale"] = c.width**0.5
    if family.rope_period:
        fields["rope_layers"] = tuple(n for n in range(c.n_layers) if (n + 1) % family.rope_period)
    if family.local_rope:
        fields["local_layers"] = tuple(n for n in range(c.n_layers) if c.window_of(n) is not None)
    if family.wide_scale:
        fields["attention_scale"] = (c.width // c.heads) ** -0.5 if c.n_layers == family.wide_scale else None
    return fields


def windowed_layers(architecture: str, n_layers: int, period: int | None = None) -> tuple[int, ...]:
    """The layers with a window, for a file that does not name them. period: as Family.window_period; None: the family's."""
    period = FAMILIES[architecture].window_period if period is None else period
    return tuple(n for n in range(n_layers) if not period or (n + 1) % period)


def layer_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """The shapes of a layer's matrices and gains that the architecture has, but for experts, by field of Layer; (N, M) for a matrix."""
    family = FAMILIES[c.architecture]
    fields = {*family.norms, *family.head_norms, *family.matrices}
    if c.experts:
        fields |= {"ffn_gate_inp", "ffn_gate_inp_shexp"}
        fields -= set() if c.shared_ffn else {"ffn_gate", "ffn_up", "ffn_down", "ffn_gate_inp_shexp"}
    return {name: shape for name, shape in shapes_of(Layer, c).items() if name in fields}
