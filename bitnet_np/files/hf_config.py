"""config.json of a Hugging Face folder -> the Recipe by which its tensors become a Model. Nothing is guessed.

The rules are those of transformers: its configuration classes, modeling_rope_utils and integrations/bitnet. A key that could change the
arithmetic and is not known here is refused by name.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

from ..base.errors import FileFormatError, UnsupportedError, shown
from ..base.validate import integer, positive
from ..model.families import FAMILIES, Family, implied, windowed_layers
from ..model.records import MATRICES, Config, LongRope, Yarn, window_fields
from ..model.rope import llama3_factors, longrope_magnitude, rope_frequencies, yarn_magnitude
from .hf_model_types import MODEL_TYPES, OTHER_CLASSES, TEXT_PARTS, ModelType, TextPart
from .mlx_groups import Groups, read_groups
from .overrides import how_to_ignore, not_implemented
from .tensors import of_file

T = TypeVar("T")
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Quantization:
    """The linears that take int8 activations, and the file's form of their ternary weights."""

    packed: bool  # the file has the codes, four in a byte; else master weights, quantised at loading
    divides: bool  # products are divided by weight_scale; else multiplied by it
    inner_norms: bool  # each linear has an RMS norm at its input
    norm_eps: float  # epsilon of those norms
    skipped: tuple[str, ...]  # modules_to_not_convert

    def converts(self, module: str) -> bool:
        """Whether a linear is quantised: none of `skipped` is the end of its name, or its start up to a dot or to its end."""
        return not any(
            module.endswith(key) or (module.startswith(key) and (key.endswith(".") or module[len(key) : len(key) + 1] in ("", ".")))
            for key in self.skipped
        )


@dataclass(frozen=True)
class Recipe:
    """Everything that config.json says about the model."""

    config: Config
    kind: ModelType
    tied: bool  # the head is the embedding
    biases: tuple[str, ...]  # the matrices that have a bias, by their fields in records.Layer
    quantization: Quantization | None
    groups: Groups | None  # weights are quantised in groups, by mlx-lm
    rope_factors: NDArray[np.float64] | None  # [J] Llama 3's, for which Config has no field
    stated_dtype: str  # see Model
    part: TextPart | None  # how the text model lies in the folder of a larger one


_DTYPES = ("bfloat16", "float16", "float32")
_NEUTRAL = frozenset(
    (
        *("_attn_implementation_autoset", "_commit_hash", "_name_or_path", "auto_map", "dtype", "torch_dtype", "tokenizer_class"),
        *("transformers_version", "unsloth_fixed", "unsloth_version", "torchscript", "use_bfloat16", "use_cache"),
        *("attention_dropout", "attn_pdrop", "embd_pdrop", "hidden_dropout", "resid_pdrop", "classifier_dropout"),
        *("gradient_checkpointing", "initializer_range", "router_aux_loss_coef", "output_router_logits"),
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "n_ctx", "max_window_layers", "chunk_size_feed_forward"),
        *("keys_to_ignore_at_inference", "output_attentions", "output_hidden_states", "return_dict", "return_dict_in_generate"),
        *("id2label", "label2id", "problem_type", "task_specific_params"),
        *("summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj"),
    )
)
"""Keys that change nothing in a forward pass, or only in training."""

_OFF = ("add_cross_attention", "is_encoder_decoder", "tie_encoder_decoder", "reorder_and_upcast_attn", "scale_attn_by_inverse_layer_idx")
_FIXED: dict[str, tuple[Any, ...]] = dict.fromkeys((*_OFF, "use_sliding_window"), (False,))
_FIXED |= {"cross_attention_hidden_size": (None,), "pretraining_tp": (1, None), "pruned_heads": ({}, None), "scale_attn_weights": (True,)}
_FIXED |= {"attention_bias": (False,), "mlp_bias": (False,), "decoder_sparse_step": (1,), "mlp_only_layers": ([], None)}
_FIXED |= {"use_bidirectional_attention": (None, False), "is_decoder": (False, True)}  # matters to cross attention only, which is off
"""Keys that may be missing, or else must have one of these values."""


class _UnreadKeys:
    """The keys of a JSON object that nobody has taken yet; `path` leads to it from config.json's own keys, and ends in a dot."""

    names: Mapping[str, str] = {}  # the usual name of a key -> its name here, where they differ

    def __init__(self, where: str, values: Mapping[str, Any], path: str = "") -> None:
        self.where, self.left, self.path = where, dict(values), path

    def take(self, key: str, kind: type[T], default: Any = _REQUIRED) -> T:
        """The value of `key`, by its usual name, which must be of that type. null counts as missing; an integer counts as a float."""
        key = self.names.get(key, key)
        value = self.left.pop(key, None)
        if value is None:
            if default is _REQUIRED:
                raise FileFormatError(f"{self.where}: {key} is missing, expected {kind.__name__}")
            return cast(T, default)
        if kind is float and type(value) is int and abs(value) < 2**53:
            value = float(value)
        if kind is int and type(value) is int and not 0 <= value < 2**31:
            raise FileFormatError(f"{self.where}: {key} is {shown(value)}, expected a number from 0 to 2**31 - 1")
        if type(value) is not kind:
            raise FileFormatError(f"{self.where}: {key} is {shown(value)}, expected {kind.__name__}")
        return cast(T, value)

    def take_fixed(self, key: str, *values: Any) -> None:
        """Refuse any other value of `key`. The key may be missing."""
        value = self.left.pop(key, values[0])
        if not any(value == known and type(value) is type(known) for known in values):
            raise UnsupportedError(f"{self.where}: {key} is {shown(value)}, supported are {', '.join(map(repr, values))}")

    def inner(self, key: str, where: str = "", default: Any = _REQUIRED) -> "_UnreadKeys":
        """The keys of the object that is the value of `key`."""
        return _UnreadKeys(where or f"{self.where}: {key}", self.take(key, dict, default), f"{self.path}{key}.")

    def check_all_taken(self) -> None:
        """Refuse the keys that are left: they could change the arithmetic."""
        for key, value in self.left.items():
            raise UnsupportedError(f"{self.where}: {not_implemented(shown(key), value)}; {how_to_ignore(self.path + key)}")


def read_recipe(config_json: Mapping[str, Any], path: Path) -> Recipe:
    """The Recipe in config.json's object; `path` is for messages. Raises FileFormatError, UnsupportedError or ShapeError."""
    keys, part = _text_keys(_UnreadKeys(str(path), config_json))
    model_type, kind = _model_type(keys)
    keys.names = kind.names
    keys.left = dict(kind.defaults) | keys.left
    for key, value in kind.inert.items():
        keys.take_fixed(key, value)
    if keys.left.get("is_bitnet_config") is True and keys.left.get("quantization_config") is None:
        missing = "is_bitnet_config is True, and no quantization_config says how linears are quantised"
        raise UnsupportedError(f"{keys.where}: {missing}; {how_to_ignore('is_bitnet_config')}")
    keys.take_fixed("is_bitnet_config", False, True)
    with of_file(path):
        config, rope_factors = _config(keys, model_type, kind)
    biases = {field for key, fields in kind.biases.items() if keys.take(key, bool, False) for field in fields}
    recipe = Recipe(
        config=config,
        kind=kind,
        biases=tuple(field for field in MATRICES if field in biases or field in FAMILIES[config.architecture].biases),
        tied=keys.take("tie_word_embeddings", bool, kind.tied),
        groups=_groups(keys),  # before the other form of quantization_config
        quantization=_quantization(keys, kind),
        rope_factors=rope_factors,
        stated_dtype=_dtype(config_json) or _dtype(keys.left),
        part=part,
    )
    _check_neutral(keys)
    return recipe


def _dtype(keys: Mapping[str, Any]) -> str:
    """The float type that transformers and servers compute in unless they are told another; empty where config.json names none."""
    return next((name for key in ("dtype", "torch_dtype") for name in _DTYPES if keys.get(key) == name), "")


def _check_neutral(keys: _UnreadKeys) -> None:
    """Refuse the keys that are left, but for those that change nothing."""
    for key, values in _FIXED.items():
        keys.take_fixed(key, *values)
    for key in _NEUTRAL:
        keys.left.pop(key, None)
    keys.check_all_taken()


def _text_keys(keys: _UnreadKeys) -> tuple[_UnreadKeys, TextPart | None]:
    """The keys of the text model: all of them, or text_config's in a model that has other parts."""
    part = TEXT_PARTS.get(keys.left["model_type"]) if isinstance(keys.left.get("model_type"), str) else None
    if part is None:
        return keys, None
    keys.take("model_type", str)
    keys.take_fixed("architectures", [part.whole])
    text = {"model_type": part.model_type, **keys.take("text_config", dict)}
    if "tie_word_embeddings" in keys.left:
        text["tie_word_embeddings"] = keys.left.pop("tie_word_embeddings")
    for key in part.other_keys:
        keys.left.pop(key, None)
    _check_neutral(keys)
    keys = _UnreadKeys(f"{keys.where}: text_config", text, "text_config.")
    keys.left.pop("architectures", None)  # the whole model's class says how the text model is used
    keys.take_fixed("model_type", part.model_type)
    keys.left["model_type"] = part.model_type
    return keys, part


def _model_type(keys: _UnreadKeys) -> tuple[str, ModelType]:
    """model_type, one of MODEL_TYPES, and the row of the class that is read."""
    model_type = keys.take("model_type", str)
    if model_type not in MODEL_TYPES:
        raise UnsupportedError(f"{keys.where}: model_type is {shown(model_type)}, supported are {', '.join(MODEL_TYPES)}")
    kinds = [MODEL_TYPES[model_type], *(kind for (of_type, _), kind in OTHER_CLASSES.items() if of_type == model_type)]
    classes = keys.take("architectures", list, [kinds[0].causal_lm])
    for kind in kinds:
        if classes == [kind.causal_lm]:
            return model_type, kind
    supported = " or ".join(kind.causal_lm for kind in kinds)
    raise UnsupportedError(f"{keys.where}: architectures is {shown(classes)}, supported for {model_type} is {supported}")


_SIZES = {"vocab": "vocab_size", "context": "max_position_embeddings", "width": "hidden_size", "n_layers": "num_hidden_layers"}
_SIZES |= {"heads": "num_attention_heads"}


def _config(keys: _UnreadKeys, model_type: str, kind: ModelType) -> tuple[Config, NDArray[np.float64] | None]:
    """The numbers of the model, and Llama 3's factors of RoPE's frequencies."""
    fields: dict[str, Any] = {field: keys.take(key, int) for field, key in _SIZES.items()}
    heads, width = fields["heads"], fields["width"]
    experts = _experts(keys, kind) if kind.experts else {}
    if "ffn" not in experts:
        fields["ffn"] = keys.take("intermediate_size", int, 4 * width if model_type == "gpt2" else _REQUIRED)
    activation = keys.take("hidden_act", str)
    if activation not in kind.architectures:
        choices = ", ".join(kind.architectures)
        raise UnsupportedError(f"{keys.where}: hidden_act is {shown(activation)}, supported for {model_type} are {choices}")
    family = FAMILIES[kind.architectures[activation]]
    fields["head_dim"] = _head_dim(keys, width, heads)
    fields["kv_heads"] = keys.take("num_key_value_heads", int, heads)
    fields["eps"] = keys.take("layer_norm_eps" if family.config["norm"] == "layer" else "rms_norm_eps", float)
    rope, llama3 = _rotation(keys, model_type, kind, family, fields["head_dim"])
    if rope.get("rope_magnitude", 1.0) is None:
        original = rope["longrope"].original
        rope["rope_magnitude"] = longrope_magnitude(fields["context"] / original, original)
    fields |= {**rope, **family.config, **experts}
    if activation == "gelu" and "ffn_gate" not in family.matrices:
        fields["activation"] = "gelu"  # exact, as no GGUF file has it
    if family.config["rope"] == "adjacent":
        fields["rope"] = "halves"  # only GGUF's rows are permuted
    if family.chooses_residual:
        fields["parallel_residual"] = keys.take("use_parallel_residual", bool, True)
    config = Config(kind.architectures[activation], **fields)
    for key in kind.ignored:
        keys.left.pop(key, None)
    config = replace(config, **_window(keys, kind, config), **_numbers(keys, config, kind), **_rope_layers(keys, config))
    local = {"local_layers": implied(config)["local_layers"]} if family.local_rope else {}
    factors = None if llama3 is None else llama3_factors(rope_frequencies(config.rope_base, 2 * config.rope_pairs), *llama3)
    return replace(config, **local), factors


def _head_dim(keys: _UnreadKeys, width: int, heads: int) -> int:
    """The width of a head: a share of the model's, if it is not stated."""
    head_dim: int | None = keys.take("head_dim", int, None)
    if head_dim is None and (heads < 1 or width % heads):
        raise FileFormatError(f"{keys.where}: hidden_size {width} is no multiple of num_attention_heads {heads}")
    return width // heads if head_dim is None else head_dim


def _rotation(keys: _UnreadKeys, model_type: str, kind: ModelType, family: Family, head_dim: int) -> tuple[dict[str, Any], Any]:
    """The fields of a Config that say how a head is rotated, and the numbers of Llama 3's scaling if there is one.

    They are keys of rope_parameters. Older files have rope_theta next to rope_scaling, and gpt_neox uses other names.
    """
    if family.config["rope"] == "none":
        return {"rope_base": 10000.0}, None
    local_base = None if kind.rope_bases is None else _local_rope_base(keys, kind.rope_bases[1])
    inner = _rope_keys(keys)
    rope: dict[str, Any] = {"rope_base": inner.take("rope_theta", float, _REQUIRED if kind.rope_bases is None else kind.rope_bases[0])}
    fraction = inner.take("partial_rotary_factor", float, 1.0 if kind.whole_rope or not family.partial_rope else _REQUIRED)
    rope |= _scaling(inner, keys.left.get("original_max_position_embeddings"))
    llama3 = rope.pop("llama3", None)
    inner.check_all_taken()
    if not (fraction == 1 or (family.partial_rope and 0 < fraction < 1)):
        raise UnsupportedError(f"{keys.where}: partial_rotary_factor is {fraction}, which {model_type} cannot have")
    if family.local_rope_base is not None:
        rope["local_rope_base"] = local_base
    elif local_base not in (None, rope["rope_base"]):
        bases = f"RoPE's base is {rope['rope_base']} in global and {local_base} in local layers"
        raise UnsupportedError(f"{keys.where}: {bases}, expected one in {model_type}")
    if (rotated := int(head_dim * fraction)) != head_dim:
        rope["rope_width"] = rotated
    return rope, llama3


def _rope_keys(keys: _UnreadKeys) -> _UnreadKeys:
    """RoPE's keys, in whichever of three places they stand, by their names in rope_parameters. Raises FileFormatError for two values."""
    old = {new: keys.left.pop(name) for name, new in _OLD_ROPE.items() if name in keys.left}
    path = "rope_parameters." if "rope_parameters" in keys.left else "rope_scaling."
    merged: dict[str, Any] = {}
    for source in (old, keys.take("rope_scaling", dict, {}), keys.take("rope_parameters", dict, {})):
        for name, value in source.items():
            name = "rope_type" if name == "type" else name
            if merged.setdefault(name, value) != value:
                raise FileFormatError(f"{keys.where}: RoPE's {shown(name)} is {shown(merged[name])} and {shown(value)}, expected one value")
    return _UnreadKeys(f"{keys.where}: RoPE", merged, path)


def _experts(keys: _UnreadKeys, kind: ModelType) -> dict[str, Any]:
    """The fields of a Config that say how a token takes experts. All layers must have some."""
    names = [name for name in ("num_local_experts", "num_experts") if name in keys.left]  # transformers has either for the same number
    counts = {name: keys.take(name, int) for name in names or ["num_experts"]}
    if len(set(counts.values())) > 1:
        raise FileFormatError(f"{keys.where}: num_local_experts and num_experts are {counts}, expected one number")
    fields: dict[str, Any] = {"experts": min(counts.values()), "experts_used": keys.take("num_experts_per_tok", int)}
    if kind.expert_sizes:
        keys.take("intermediate_size", int, 0)  # of layers without experts
        fields |= {field: keys.take(key, int) for field, key in kind.expert_sizes.items()}
        fields["normalized_experts"] = keys.take("norm_topk_prob", bool, False)
    for field, key in {"experts": next(iter(counts)), **kind.expert_sizes}.items():
        if not fields[field]:
            raise UnsupportedError(f"{keys.where}: {key} is 0, expected a model of experts")
    return fields


def _numbers(keys: _UnreadKeys, config: Config, kind: ModelType) -> dict[str, Any]:
    """The factors and soft caps of a Config."""
    fields: dict[str, Any] = {"embedding_scale": config.width**0.5} if FAMILIES[config.architecture].scales_embedding else {}
    fields |= {field: keys.take(key, float, 1.0) for field, key in kind.numbers.items()}
    if kind.depth_scaled:
        depth, base = keys.take("scale_depth", float), keys.take("dim_model_base", int)
        integer(f"{keys.where}: dim_model_base", base, 1, error=FileFormatError)
        fields |= {"residual_scale": depth / config.n_layers**0.5, "logit_scale": config.width / base}
    for field, key in kind.caps.items():
        if key not in keys.left:
            raise FileFormatError(f"{keys.where}: {key} is missing, expected a number or null")
        fields[field] = keys.take(key, float, None)
    if "query_pre_attn_scalar" in keys.left and kind.caps:
        value = keys.take("query_pre_attn_scalar", float)
        positive(f"{keys.where}: query_pre_attn_scalar", value, FileFormatError)
        fields["attention_scale"] = None if value == config.head_dim else value**-0.5
    return fields


def _rope_layers(keys: _UnreadKeys, config: Config) -> dict[str, Any]:
    """The field of a Config that says which layers rotate, in types that have layers without RoPE: 1 in no_rope_layers stands for RoPE."""
    period = FAMILIES[config.architecture].rope_period
    if not period:
        return {}
    period = keys.take("no_rope_layer_interval", int, period)
    integer(f"{keys.where}: no_rope_layer_interval", period, 1, error=FileFormatError)
    has_rope = keys.take("no_rope_layers", list, [int((n + 1) % period != 0) for n in range(config.n_layers)])
    if len(has_rope) != config.n_layers or any(type(value) is not int or value not in (0, 1) for value in has_rope):
        raise FileFormatError(f"{keys.where}: no_rope_layers is {shown(has_rope)}, expected 0 or 1 for each of {config.n_layers} layers")
    return {"rope_layers": tuple(n for n, value in enumerate(has_rope) if value)}


def _window(keys: _UnreadKeys, kind: ModelType, config: Config) -> dict[str, Any]:
    """The fields of a Config that say which layers see a window only."""
    if kind.window == "all":
        window: int | None = keys.take("sliding_window", int, None)
        return window_fields(window, range(config.n_layers), config.n_layers)
    types = _layer_types(keys, config.n_layers, ("full_attention", "sliding_attention")[: 2 if kind.window else 1])
    if kind.window:
        return (_switched_window if kind.window == "switched" else _window_of_layers)(keys, config, types)
    if "use_sliding_window" in keys.left:
        keys.left.pop("sliding_window", None)
    keys.take_fixed("sliding_window", None)
    return {}


def _layer_types(keys: _UnreadKeys, n_layers: int, supported: Sequence[str]) -> list[str] | None:
    """The kind of attention of each layer, if it is stated."""
    types: list[str] = keys.take("layer_types", list, [])
    if any(value not in supported for value in types) or len(types) not in (0, n_layers):
        expected = f"{' or '.join(supported)}, for each of {n_layers} layers"
        raise UnsupportedError(f"{keys.where}: layer_types is {shown(types)}, supported is {expected}")
    return types or None


def _switched_window(keys: _UnreadKeys, config: Config, types: Sequence[str] | None) -> dict[str, Any]:
    """The window of a model that may have it switched off, and then ignores it."""
    window: int | None = keys.take("sliding_window", int, None)
    layers = _sliding(types, range(keys.take("max_window_layers", int), config.n_layers))
    window = window if keys.take("use_sliding_window", bool) else None
    if window is None and types is not None and layers:
        raise FileFormatError(f"{keys.where}: layer_types has sliding_attention, but no sliding_window is in use")
    return window_fields(window, layers, config.n_layers)


def _window_of_layers(keys: _UnreadKeys, config: Config, types: Sequence[str] | None) -> dict[str, Any]:
    """The window of the layers that layer_types names, or the family."""
    window: int | None = keys.take("sliding_window", int, None)
    period: int | None = keys.take("sliding_window_pattern", int, None) if config.local_rope_base else None
    if period == 0:
        raise FileFormatError(f"{keys.where}: sliding_window_pattern is 0, expected at least 1")
    keys.left.pop("_sliding_window_pattern", None)  # transformers writes it next to layer_types
    layers = _sliding(types, windowed_layers(config.architecture, config.n_layers, period))
    if window is None and layers:
        raise FileFormatError(f"{keys.where}: layer_types has sliding_attention, but sliding_window is null")
    return window_fields(window, layers, config.n_layers)


def _sliding(types: Sequence[str] | None, usual: Sequence[int]) -> Sequence[int]:
    """The layers with a window: those that are stated, or the usual ones."""
    return usual if types is None else [n for n, value in enumerate(types) if value == "sliding_attention"]


def _local_rope_base(keys: _UnreadKeys, default: float) -> float:
    """RoPE's base in local layers; what rope_parameters say of the others stays in `keys`."""
    base: float | None = keys.take("rope_local_base_freq", float, None)
    if keys.left.get("rope_parameters") is not None:
        kinds = keys.inner("rope_parameters")
        keys.left["rope_parameters"] = kinds.take("full_attention", dict, {})
        local = kinds.inner("sliding_attention", f"{keys.where}: RoPE in local layers", {})
        kinds.check_all_taken()
        local.take_fixed("rope_type", "default")
        theta = local.take("rope_theta", float, base)
        if base not in (None, theta):
            stated = f"rope_local_base_freq is {base}, and rope_theta of local layers {theta}"
            raise FileFormatError(f"{keys.where}: {stated}, expected one value")
        base = theta
        local.check_all_taken()
    return default if base is None else base


def _scaling(keys: _UnreadKeys, outside: Any) -> dict[str, Any]:
    """The fields of a Config that say how RoPE is scaled; for Llama 3's scaling the numbers of rope.llama3_factors.

    outside: another value of the context that is stretched, if config.json has one. A rope_magnitude of None is LongRoPE's, which follows
    from the model's context.
    """
    kind = keys.take("rope_type", str, "default")
    if kind not in _SCALINGS:
        raise UnsupportedError(f"{keys.where}'s rope_type is {shown(kind)}, supported are default, linear, llama3, yarn and longrope")
    return _SCALINGS[kind](keys, outside)


def _no_scaling(keys: _UnreadKeys, outside: Any) -> dict[str, Any]:
    return {}


def _linear(keys: _UnreadKeys, outside: Any) -> dict[str, Any]:
    return {"rope_scaling": keys.take("factor", float)}


def _llama3(keys: _UnreadKeys, outside: Any) -> dict[str, Any]:
    factor, original = keys.take("factor", float), keys.take(_ORIGINAL, int)
    low, high = keys.take("low_freq_factor", float), keys.take("high_freq_factor", float)
    if not (0 < factor < float("inf") and 0 < low < high < float("inf") and original > 0):
        scaling = f"factor {factor}, low {low}, high {high} and original {original}"
        raise FileFormatError(f"{keys.where} has the scaling {scaling}, expected positive numbers, low less than high")
    return {"llama3": (factor, low, high, original)}


def _yarn(keys: _UnreadKeys, outside: Any) -> dict[str, Any]:
    original, factor = _original(keys, outside, _REQUIRED), keys.take("factor", float)
    borders = keys.take("beta_fast", float, 32.0), keys.take("beta_slow", float, 1.0), keys.take("truncate", bool, True)
    weights = keys.take("mscale", float, 0.0), keys.take("mscale_all_dim", float, 0.0)
    yarn, magnitude = Yarn(factor, original, *borders), keys.take("attention_factor", float, None)
    if magnitude is None:
        magnitude = yarn_magnitude(factor, *weights) if all(weights) else yarn_magnitude(factor)
    return {"yarn": yarn, "rope_magnitude": magnitude}


def _longrope(keys: _UnreadKeys, outside: Any) -> dict[str, Any]:
    original, factor = _original(keys, outside, _REQUIRED if outside is None else outside), keys.take("factor", float, None)
    magnitude: float | None = keys.take("attention_factor", float, None)
    lists = [tuple(keys.take(name, list)) for name in ("short_factor", "long_factor")]
    if not all(type(x) is float or (type(x) is int and abs(x) < 2**53) for factors in lists for x in factors):
        raise FileFormatError(f"{keys.where}: short_factor and long_factor are {shown(lists)}, expected lists of numbers")
    if magnitude is None and factor is not None:
        magnitude = longrope_magnitude(factor, original)
    return {"longrope": LongRope(original, *(tuple(map(float, factors)) for factors in lists)), "rope_magnitude": magnitude}


def _original(keys: _UnreadKeys, outside: Any, default: Any) -> int:
    """The context that is stretched, which `outside` must agree with."""
    original = keys.take(_ORIGINAL, int, default)
    if outside not in (None, original):
        raise FileFormatError(f"{keys.where}'s {_ORIGINAL} is {original}, that outside it {shown(outside)}, expected one")
    return original


_ORIGINAL = "original_max_position_embeddings"
_SCALINGS: dict[str, Callable[[_UnreadKeys, Any], dict[str, Any]]]
_SCALINGS = {"default": _no_scaling, "linear": _linear, "llama3": _llama3, "yarn": _yarn, "longrope": _longrope}

_OLD_ROPE = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "partial_rotary_factor": "partial_rotary_factor",
}
"""The names of rope_parameters' keys, by those that older files have outside of it."""


def _groups(keys: _UnreadKeys) -> Groups | None:
    """mlx-lm's quantization, which its folders have under two names."""
    first, second = (keys.left.get(name) for name in ("quantization", "quantization_config"))
    if first is None and not (isinstance(second, dict) and "group_size" in second and "quant_method" not in second):
        return None
    if None not in (first, second) and first != second:
        raise FileFormatError(f"{keys.where}: quantization is {shown(first)} and quantization_config {shown(second)}, expected the same")
    for name in ("quantization", "quantization_config"):
        keys.left.pop(name, None)
    where = "quantization_config" if first is None else "quantization"
    return read_groups(f"{keys.where}: {where}", second if first is None else first)


def _quantization(keys: _UnreadKeys, kind: ModelType) -> Quantization | None:
    """BitNet's quantization_config. One linear_class divides by the scale that the other multiplies by.

    Files from before there were two classes (Falcon3-1.58's, HF1BitLLM's) name neither class nor mode. They are bitlinear, offline, which
    is also transformers' default. A mode without a class is ambiguous, and refused.
    """
    if keys.left.setdefault("quantization_config", None) is None:
        del keys.left["quantization_config"]
        return Quantization(packed=False, divides=False, inner_norms=False, norm_eps=1e-6, skipped=("lm_head",)) if kind.masters else None
    keys = keys.inner("quantization_config")
    keys.take_fixed("quant_method", "bitnet")
    if not kind.quantizable:
        raise UnsupportedError(f"{keys.where}: supported for linears of BitNet and Llama, not for {kind.causal_lm}")
    mode = keys.take("quantization_mode", str, None)
    linear = keys.take("linear_class", str, "bitlinear" if mode is None else None)
    if linear not in ("bitlinear", "autobitlinear"):
        raise UnsupportedError(
            f"{keys.where}: linear_class is {shown(linear or 'missing')}, expected 'bitlinear' (divides by weight_scale) "
            "or 'autobitlinear' (multiplies by it): find out which, and say so in config.json"
        )
    mode = mode or "offline"
    if mode not in ("online", "offline") or (linear, mode) == ("bitlinear", "online"):
        choices = "offline" if linear == "bitlinear" else "online or offline"
        raise UnsupportedError(f"{keys.where}: quantization_mode of {linear} is {shown(mode)}, expected {choices}")
    skipped = tuple(keys.take("modules_to_not_convert", list, ["lm_head"]))
    if not all(isinstance(name, str) and re.fullmatch(r"[\w.]+", name) for name in skipped):
        raise UnsupportedError(f"{keys.where}: modules_to_not_convert is {shown(list(skipped))}, expected plain names of modules")
    quantization = Quantization(
        packed=mode == "offline",
        divides=linear == "bitlinear",
        inner_norms=keys.take("use_rms_norm", bool, False),
        norm_eps=keys.take("rms_norm_eps", float, 1e-6),
        skipped=skipped,
    )
    if quantization.converts("lm_head"):
        raise UnsupportedError(f"{keys.where}: modules_to_not_convert is {shown(list(skipped))}: the head would also be quantised")
    positive(f"{keys.where}: rms_norm_eps", quantization.norm_eps, FileFormatError)
    keys.check_all_taken()
    return quantization
