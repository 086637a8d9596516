"""Model families: which GGUF architectures are supported, and what their keys and tensors are called.

A key or tensor that is not in these tables could change the arithmetic, so it is refused by name. What an architecture means is what
llama.cpp (for `bitnet-b1.58` and `bitnet-25`, bitnet.cpp and transformers) makes of its files.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, localcontext
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from .errors import FileFormatError, ShapeError, UnsupportedError, shown
from .files.gguf_file import GGUFFile
from .model import Config, shapes_of_layer

NORMS = ("attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm")
"""The norms of a layer of BitNet; other families have no sub-norms."""
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
"""Fields of model.Layer that are matrices, with a tensor blk.<n>.<field>.weight each, or attn_qkv for the first three."""
QKV = MATRICES[:3]
"""Those that read the same input, and may be rows of one tensor."""
UNGATED = tuple(name for name in MATRICES if name != "ffn_gate")


@dataclass(frozen=True)
class Family:
    """What an architecture's files have.

    config: the fields of model.Config that the architecture implies. norms: of a layer; LayerNorms have a bias each. biases: matrices
    that have one; optional_biases: that may have one. scales: a tensor blk.<n>.<matrix>.scale may multiply a product. ternary: all
    matrices of the layers are. partial_rope: rope.dimension_count may be less than the head width. windows: attention.sliding_window may
    say that layers see a window only. required: keys without a default.
    """

    config: Mapping[str, Any]
    norms: tuple[str, ...] = ("attn_norm", "ffn_norm")
    head_norms: tuple[str, ...] = ()  # of queries and of keys, [K]
    matrices: tuple[str, ...] = MATRICES
    biases: tuple[str, ...] = ()
    optional_biases: tuple[str, ...] = ()
    scales: bool = False
    ternary: bool = False
    rope_factors: bool = False  # rope_freqs.weight may be there
    partial_rope: bool = False
    windows: bool = False
    positions: bool = False  # position_embd.weight
    head_bias: bool = False  # output.bias may be there
    required: tuple[str, ...] = ()
    keys: Mapping[str, type] = field(default_factory=dict)  # more of them
    scaling: bool = True  # rope.scaling.* are known


_BITNET = {"activation": "relu2", "norm": "rms", "rope": "halves"}
_RELEASED = Family(
    _BITNET,
    norms=NORMS,
    ternary=True,
    required=("attention.head_count_kv", "rope.freq_base"),
    scaling=False,
)
_QWEN = {"activation": "silu", "norm": "rms", "rope": "halves"}

FAMILIES: dict[str, Family] = {
    "bitnet-b1.58": _RELEASED,
    "bitnet-25": _RELEASED,  # the name that an earlier upload of the same model used
    "bitnet": Family(_BITNET | {"activation": "silu"}, norms=NORMS, scales=True, ternary=True),
    "llama": Family({"activation": "silu", "norm": "rms", "rope": "adjacent"}, optional_biases=MATRICES, rope_factors=True, windows=True),
    "qwen2": Family(_QWEN, biases=QKV, head_bias=True, windows=True),
    "qwen3": Family(_QWEN, head_norms=("attn_q_norm", "attn_k_norm"), windows=True),
    "gptneox": Family(
        {"activation": "gelu_tanh", "norm": "layer", "rope": "halves"},  # llama.cpp has no exact GELU here
        matrices=UNGATED,
        biases=UNGATED,
        partial_rope=True,
        head_bias=True,
        required=("rope.dimension_count", "use_parallel_residual"),
        keys={"use_parallel_residual": bool},
    ),
    "gpt2": Family(
        {"activation": "gelu_tanh", "norm": "layer", "rope": "none"}, matrices=UNGATED, biases=UNGATED, positions=True, scaling=False
    ),
}
ARCHITECTURES = tuple(FAMILIES)

KEYS: dict[str, type] = {
    "context_length": int,
    "embedding_length": int,
    "block_count": int,
    "feed_forward_length": int,
    "attention.head_count": int,
    "attention.head_count_kv": int,
    "attention.key_length": int,
    "attention.value_length": int,
    "vocab_size": int,
}
EPSILON = {"rms": "attention.layer_norm_rms_epsilon", "layer": "attention.layer_norm_epsilon"}
"""Of each kind of norm, the key of Config.eps."""
_REQUIRED = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count")
_ROPE: dict[str, type] = {"rope.freq_base": float, "rope.dimension_count": int}
_SCALING: dict[str, type] = {"rope.scaling.type": str, "rope.scaling.factor": float, "rope.scale_linear": float}
# llama.cpp reads these of other architectures only, and sees everything in files of ours that have them
_WINDOW: dict[str, type] = {"attention.sliding_window": int, "attention.sliding_window_pattern": np.ndarray}
# what writers put into files although it changes nothing, with the value that says so (None: any)
NEUTRAL: dict[str, Any] = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": None,
    "rope.scaling.original_context_length": None,  # llama.cpp reads it for yarn only; Llama 3's scaling is in rope_freqs.weight
    "pooling_type": None,  # of embedding models: how hidden states become one vector, after the forward pass
}


def architecture(file: GGUFFile) -> str:
    """The file's architecture, if it is one of ours."""
    name = file.require("general.architecture", str)
    if name not in FAMILIES:
        raise UnsupportedError(f"{file.path}: general.architecture is {name!r}, supported are {', '.join(ARCHITECTURES)}")
    if file.get("split.count", int, 1) > 1:
        raise UnsupportedError(f"{file.path}: split.count is {file.metadata['split.count']}, expected one file with the whole model")
    return name


def _values(file: GGUFFile, name: str) -> dict[str, Any]:
    """The architecture's keys, each of its type, None where it is not there."""
    family, prefix = FAMILIES[name], name + "."
    rope = {} if family.config["rope"] == "none" else _ROPE | (_SCALING if family.scaling else {})
    epsilon = EPSILON[family.config["norm"]]
    known = KEYS | {epsilon: float} | rope | dict(family.keys) | (_WINDOW if family.windows else {})
    for key, value in file.metadata.items():
        plain = key[len(prefix) :]
        if not key.startswith(prefix) or plain in known:
            continue
        if family.scaling and plain in NEUTRAL and (NEUTRAL[plain] is None or (np.ndim(value) == 0 and value == NEUTRAL[plain])):
            continue
        raise UnsupportedError(f"{file.path}: {key} = {shown(value)} is a setting this package does not implement")
    required = (*_REQUIRED, epsilon, *family.required)
    found = {
        key: file.require(prefix + key, kind) if key in required else file.get(prefix + key, kind, None) for key, kind in known.items()
    }
    return found | {"epsilon": found[epsilon]}


def _rope_scaling(file: GGUFFile, prefix: str, value: Mapping[str, Any]) -> float:
    """What positions are divided by. llama.cpp takes a missing type for linear, and no or zero factor for none."""
    kind = value.get("rope.scaling.type") or "linear"
    if kind not in ("none", "linear"):
        raise UnsupportedError(f"{file.path}: {prefix}rope.scaling.type is {shown(kind)}, supported are none and linear")
    factor = value.get("rope.scaling.factor")
    factor = value.get("rope.scale_linear") if factor is None else factor
    return 1.0 if kind == "none" or not factor else factor


def _window(file: GGUFFile, prefix: str, value: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of a Config: how many keys a query sees, where that is said, and in which layers."""
    window, pattern = value.get("attention.sliding_window") or None, value.get("attention.sliding_window_pattern")
    if pattern is None:
        return {"window": window}
    if pattern.dtype != np.bool_ or len(pattern) != value["block_count"]:
        expected = f"{value['block_count']} bools, one for each layer"
        raise UnsupportedError(f"{file.path}: {prefix}attention.sliding_window_pattern is {shown(pattern)}, supported are {expected}")
    if window is None and pattern.any():
        raise FileFormatError(f"{file.path}: {prefix}attention.sliding_window_pattern has layers with a window, but none is told")
    return windows(window, np.flatnonzero(pattern).tolist(), len(pattern))


def windows(window: int | None, layers: Sequence[int], n_layers: int) -> dict[str, Any]:
    """Fields of a Config whose layers of these numbers see `window` keys."""
    if not layers:
        return {"window": None}
    return {"window": window, "window_layers": None if len(layers) == n_layers else tuple(layers)}


def read_config(file: GGUFFile) -> Config:
    """The model's numbers. A key of the architecture that we do not know could change the arithmetic, so it is refused by name."""
    name = architecture(file)
    family, prefix = FAMILIES[name], name + "."
    value = _values(file, name)

    heads, width = value["attention.head_count"], value["embedding_length"]
    head_dim = value["attention.key_length"]
    if head_dim is None:
        if heads < 1 or width % heads:
            raise FileFormatError(
                f"{file.path}: {width} = {prefix}embedding_length is no multiple of {heads} = {prefix}attention.head_count"
            )
        head_dim = width // heads
    for key in ("rope.dimension_count", "attention.value_length"):
        if value.get(key) not in (None, head_dim) and not (key == "rope.dimension_count" and family.partial_rope):
            raise UnsupportedError(f"{file.path}: {prefix}{key} is {value[key]}, only the head width {head_dim} is supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FileFormatError(f"{file.path}: no tensor token_embd.weight of two dimensions")
    if value["vocab_size"] not in (None, embedding.shape[0]):
        raise FileFormatError(f"{file.path}: {prefix}vocab_size is {value['vocab_size']}, token_embd.weight has {embedding.shape[0]} rows")
    rotated, kv_heads, base = value.get("rope.dimension_count"), value["attention.head_count_kv"], value.get("rope.freq_base")
    try:
        return Config(
            architecture=name,
            vocab=embedding.shape[0],
            context=value["context_length"],
            width=width,
            n_layers=value["block_count"],
            ffn=value["feed_forward_length"],
            heads=heads,
            kv_heads=heads if kv_heads is None else kv_heads,
            head_dim=head_dim,
            eps=value["epsilon"],
            rope_base=10000.0 if base is None else base,
            rope_width=None if rotated == head_dim else rotated,
            rope_scaling=_rope_scaling(file, prefix, value),
            parallel_residual=value.get("use_parallel_residual", False),
            **_window(file, prefix, value),
            **family.config,
        )
    except ValueError as error:
        raise type(error)(f"{file.path}: {error}") from None


def layer_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Field of model.Layer -> the shape that the tensor blk.<n>.<field>.weight of its architecture must have."""
    family = FAMILIES[c.architecture]
    there = {*family.norms, *family.head_norms, *family.matrices}
    return {name: shape for name, shape in shapes_of_layer(c).items() if name in there}


LARGEST_ANGLE = 1.6e6
"""Radians to which cosine and sine are exact (kernels/scalar.py)."""


def rope_frequencies(base: float, width: int, factors: NDArray[np.float32] | None = None, scaling: float = 1.0) -> NDArray[np.float64]:
    """base^(-2i / width) for i < width / 2, radians per position, divided by `factors` [width / 2] and by `scaling`.

    The powers are correctly rounded: those of a math library differ between machines.
    """
    with localcontext(prec=40):
        powers = [Decimal(base) ** (Decimal(-2 * i) / Decimal(width)) for i in range(width // 2)]
    frequencies = np.array([float(power) for power in powers])
    if factors is not None:
        if factors.shape != frequencies.shape:
            raise ShapeError(f"{factors.shape[0]} factors of RoPE's frequencies, expected {frequencies.size}")
        frequencies = frequencies / factors
    with np.errstate(over="ignore"):
        return frequencies / scaling


def check_angles(config: Config, frequencies: NDArray[np.float64]) -> None:
    """Raises UnsupportedError if not every angle of the context can be computed exactly."""
    angle = config.context * frequencies.max(initial=0)
    if not angle <= LARGEST_ANGLE:
        raise UnsupportedError(
            f"RoPE's angles reach {angle:.3g} radians in the context, expected at most {LARGEST_ANGLE:.3g}; "
            f"the base is {config.rope_base}, the context {config.context}, positions are divided by {config.rope_scaling}"
        )


def llama3_factors(frequencies: NDArray[np.float64], factor: float, low: float, high: float, original: int) -> NDArray[np.float64]:
    """What Llama 3.1's scaling divides frequencies [J] by: GGUF files keep these numbers as rope_freqs.weight, config.json the four here.

    Waves that fit the `original` context more than `high` times stay, those that fit it less than `low` times are stretched by `factor`,
    and in between the frequency goes from one to the other linearly ("The Llama 3 Herd of Models", arXiv 2407.21783, and its code).
    """
    fits = original * frequencies / (2 * np.pi)
    smooth = np.clip((fits - low) / (high - low), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


# --- Hugging Face ---------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ModelType:
    """How transformers names what a `model_type` of config.json has.

    architectures: activation of the feed-forward -> the architecture above with the same arithmetic. causal_lm: the one class that is read.
    names: key of config.json that is called otherwise here -> what transformers' other model types call it. layer, embedding, norm,
    positions: modules. window: sliding_window is on always, or if use_sliding_window says so. modules: field of model.Layer -> module of
    a decoder layer; several matrices may be rows of one.
    """

    architectures: Mapping[str, str]
    causal_lm: str
    modules: Mapping[str, str]
    layer: str = "model.layers.{}."
    embedding: str = "model.embed_tokens"
    norm: str = "model.norm"
    positions: str = ""
    window: Literal["", "always", "switched"] = ""
    names: Mapping[str, str] = field(default_factory=dict)
    tied: bool = False  # where config.json does not say
    quantizable: bool = True  # its linears may be BitLinear or AutoBitLinear
    transposed: bool = False  # matrices are [M, N]
    fused_by_head: bool = False  # rows of attn_q, attn_k and attn_v are one matrix, a head's after the other's
    buffers: tuple[str, ...] = ()  # of a layer, in old files: they can be computed, and transformers does not read them


HF_MODULES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_sub_norm": "self_attn.attn_sub_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_sub_norm": "mlp.ffn_sub_norm",
    "ffn_down": "mlp.down_proj",
}
"""Of Llama and all that descend from it. A family has those of its norms and matrices."""

_NEOX_MODULES = {
    "attn_norm": "input_layernorm",
    **dict.fromkeys(QKV, "attention.query_key_value"),
    "attn_output": "attention.dense",
    "ffn_norm": "post_attention_layernorm",
    "ffn_up": "mlp.dense_h_to_4h",
    "ffn_down": "mlp.dense_4h_to_h",
}
_GPT2_MODULES = {
    "attn_norm": "ln_1",
    **dict.fromkeys(QKV, "attn.c_attn"),
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_OLD_ROPE = ("self_attn.rotary_emb.inv_freq",)

MODEL_TYPES: dict[str, ModelType] = {
    "bitnet": ModelType({"relu2": "bitnet-b1.58", "silu": "bitnet"}, "BitNetForCausalLM", HF_MODULES, buffers=_OLD_ROPE),
    "llama": ModelType({"silu": "llama"}, "LlamaForCausalLM", HF_MODULES, buffers=_OLD_ROPE),
    "qwen2": ModelType({"silu": "qwen2"}, "Qwen2ForCausalLM", HF_MODULES, window="switched", buffers=_OLD_ROPE),
    "qwen3": ModelType({"silu": "qwen3"}, "Qwen3ForCausalLM", HF_MODULES, window="switched", buffers=_OLD_ROPE),
    "mistral": ModelType({"silu": "llama"}, "MistralForCausalLM", HF_MODULES, window="always", quantizable=False, buffers=_OLD_ROPE),
    "gpt_neox": ModelType(
        dict.fromkeys(("gelu", "gelu_new", "gelu_pytorch_tanh"), "gptneox"),
        "GPTNeoXForCausalLM",
        _NEOX_MODULES,
        layer="gpt_neox.layers.{}.",
        embedding="gpt_neox.embed_in",
        norm="gpt_neox.final_layer_norm",
        quantizable=False,
        fused_by_head=True,
        buffers=("attention.bias", "attention.masked_bias", "attention.rotary_emb.inv_freq"),
    ),
    "gpt2": ModelType(
        dict.fromkeys(("gelu_new", "gelu_pytorch_tanh"), "gpt2"),
        "GPT2LMHeadModel",
        _GPT2_MODULES,
        layer="transformer.h.{}.",
        embedding="transformer.wte",
        norm="transformer.ln_f",
        positions="transformer.wpe",
        names={
            "hidden_size": "n_embd",
            "num_hidden_layers": "n_layer",
            "num_attention_heads": "n_head",
            "intermediate_size": "n_inner",
            "max_position_embeddings": "n_positions",
            "hidden_act": "activation_function",
            "layer_norm_eps": "layer_norm_epsilon",
        },
        tied=True,
        quantizable=False,
        transposed=True,
        buffers=("attn.bias", "attn.masked_bias"),
    ),
}
"""By `model_type` of config.json. The exact GELU of gpt_neox is `gelu`, which no GGUF architecture has."""
