"""config.json of a Hugging Face folder -> what the numbers of its tensors mean. Nothing is guessed.

The rules are those of transformers: its configuration classes, modeling_rope_utils and integrations/bitnet. A key that could change the
arithmetic and is not known here is refused by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from ..errors import FileFormatError, UnsupportedError, shown
from ..families import FAMILIES, MATRICES
from ..model import Activation, Config, window_fields
from .hf_model_types import MODEL_TYPES, ModelType

T = TypeVar("T")
_REQUIRED: Any = object()


@dataclass(frozen=True)
class Quantization:
    """Which linears take int8 activations, and what their weights are.

    packed: -1, 0, +1 in bytes of four; else master weights, quantised here. divides: by weight_scale; else multiplied by it.
    """

    packed: bool
    divides: bool
    inner_norms: bool  # an RMS norm of its own at the input of each linear
    norm_eps: float
    skipped: tuple[str, ...]  # modules_to_not_convert

    def converts(self, module: str) -> bool:
        """Whether a linear is quantised: none of `skipped` is the end of its name, or its start up to a dot or to its end."""
        return not any(
            module.endswith(key) or (module.startswith(key) and (key.endswith(".") or module[len(key) : len(key) + 1] in ("", ".")))
            for key in self.skipped
        )


@dataclass(frozen=True)
class Llama3Scaling:
    """The four numbers of rope.llama3_factors."""

    factor: float
    low: float
    high: float
    original: int


@dataclass(frozen=True)
class Recipe:
    """What config.json says."""

    config: Config
    kind: ModelType
    tied: bool  # the head is the embedding
    biases: tuple[str, ...]  # fields of model.Layer
    quantization: Quantization | None
    llama3: Llama3Scaling | None


# what changes nothing in a forward pass, or only training
_NEUTRAL = frozenset(
    {
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "attention_dropout",
        "attn_pdrop",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "dtype",
        "embd_pdrop",
        "eos_token_id",
        "gradient_checkpointing",
        "hidden_dropout",
        "id2label",
        "initializer_range",
        "keys_to_ignore_at_inference",
        "label2id",
        "max_window_layers",
        "n_ctx",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "problem_type",
        "resid_pdrop",
        "return_dict",
        "return_dict_in_generate",
        "sep_token_id",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
        "tokenizer_class",
        "torch_dtype",
        "torchscript",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        "use_bfloat16",
        "use_cache",
    }
)
# what must have one of these values, if it is there
_FIXED: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "is_decoder": (False, True),  # of cross attention only, which is off
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "cross_attention_hidden_size": (None,),
    "pretraining_tp": (1, None),
    "pruned_heads": ({}, None),
    "reorder_and_upcast_attn": (False,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "scale_attn_weights": (True,),
    "use_sliding_window": (False,),
}


class _Keys:
    """The keys of an object that nobody has taken yet."""

    def __init__(self, where: str, told: Mapping[str, Any]) -> None:
        self.where, self.left = where, dict(told)

    def take(self, key: str, kind: type[T], default: Any = _REQUIRED) -> T:
        """The value of `key`. A null is as good as no key; an integer is as good as a float."""
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

    def fixed(self, key: str, *values: Any) -> None:
        """Refuse any other value of `key`. No key is as good as any of them."""
        value = self.left.pop(key, values[0])
        if not any(value == known and type(value) is type(known) for known in values):
            raise UnsupportedError(f"{self.where}: {key} is {shown(value)}, supported are {', '.join(map(repr, values))}")

    def end(self) -> None:
        """Refuse what is left."""
        for key, value in self.left.items():
            raise UnsupportedError(f"{self.where}: {shown(key)} = {shown(value)} is a setting this package does not implement")


def read_recipe(told: Mapping[str, Any], path: Path) -> Recipe:
    """Of config.json's object; `path` is for messages. Raises FileFormatError, UnsupportedError or ShapeError."""
    keys = _Keys(str(path), told)
    model_type = keys.take("model_type", str)
    if model_type not in MODEL_TYPES:
        raise UnsupportedError(f"{path}: model_type is {shown(model_type)}, supported are {', '.join(MODEL_TYPES)}")
    kind = MODEL_TYPES[model_type]
    classes = keys.take("architectures", list, [kind.causal_lm])
    if classes != [kind.causal_lm]:
        raise UnsupportedError(f"{path}: architectures is {shown(classes)}, supported for {model_type} is {kind.causal_lm}")

    def take(key: str, expected: type[T], default: Any = _REQUIRED) -> T:
        return keys.take(kind.names.get(key, key), expected, default)

    heads, width = take("num_attention_heads", int), take("hidden_size", int)
    ffn = take("intermediate_size", int, 4 * width if model_type == "gpt2" else _REQUIRED)
    activation = take("hidden_act", str)
    if activation not in kind.architectures:
        raise UnsupportedError(f"{path}: hidden_act is {shown(activation)}, supported for {model_type} are {', '.join(kind.architectures)}")
    architecture = kind.architectures[activation]
    family = FAMILIES[architecture]
    head_dim = keys.take("head_dim", int, None)
    if head_dim is None:
        if heads < 1 or width % heads:
            raise FileFormatError(f"{path}: hidden_size {width} is no multiple of num_attention_heads {heads}")
        head_dim = width // heads
    norm_eps = take("layer_norm_eps" if family.config["norm"] == "layer" else "rms_norm_eps", float)
    base, scaling, llama3, fraction = (10000.0, 1.0, None, 1.0) if family.config["rope"] == "none" else _rope(keys, family.partial_rope)
    if not (fraction == 1 or (family.partial_rope and 0 < fraction < 1)):
        raise UnsupportedError(f"{path}: partial_rotary_factor is {fraction}, which {model_type} cannot have")
    rotated = int(head_dim * fraction)
    sets = {
        "activation": _ACTIVATIONS.get(activation, activation),
        "rope": "halves" if family.config["rope"] == "adjacent" else family.config["rope"],  # of GGUF's permuted rows only
        "parallel_residual": keys.take("use_parallel_residual", bool, True) if family.chooses_residual else False,
    }
    try:
        config = Config(
            architecture=architecture,
            vocab=keys.take("vocab_size", int),
            context=take("max_position_embeddings", int),
            width=width,
            n_layers=take("num_hidden_layers", int),
            ffn=ffn,
            heads=heads,
            kv_heads=keys.take("num_key_value_heads", int, heads),
            head_dim=head_dim,
            eps=norm_eps,
            rope_base=base,
            rope_width=None if rotated == head_dim else rotated,
            rope_scaling=scaling,
            **{**family.config, **cast(dict[str, Any], sets)},
        )
        config = replace(config, **_window(keys, kind, config.n_layers))
    except ValueError as error:
        raise type(error)(str(error) if str(path) in str(error) else f"{path}: {error}") from None
    biases = _biases(keys, model_type, architecture)
    tied = keys.take("tie_word_embeddings", bool, kind.tied)
    quantization = _quantization(keys, kind)
    for key, values in _FIXED.items():
        keys.fixed(key, *values)
    for key in _NEUTRAL:
        keys.left.pop(key, None)
    keys.end()
    return Recipe(config, kind, tied, biases, quantization, llama3)


_ACTIVATIONS: dict[str, Activation] = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
"""transformers' name -> ours, where they differ. Both of those are the approximation by tanh, in other words."""


_DEFAULT_WINDOW, _FIRST_LAYER = 4096, 28  # sliding_window and max_window_layers where config.json does not say


def _window(keys: _Keys, kind: ModelType, n_layers: int) -> dict[str, Any]:
    """The fields of a Config that say which layers see a window only. One that is switched off is a number without a meaning."""
    if not kind.window:
        if "use_sliding_window" in keys.left:
            keys.left.pop("sliding_window", None)
        keys.fixed("sliding_window", None)
        _layer_types(keys, n_layers, ("full_attention",))
        return {}
    window: int | None = keys.take("sliding_window", int, None) if "sliding_window" in keys.left else _DEFAULT_WINDOW
    first = 0
    if kind.window == "switched":
        first = keys.take("max_window_layers", int, _FIRST_LAYER)
        window = window if keys.take("use_sliding_window", bool, False) else None
        types = _layer_types(keys, n_layers, ("full_attention", "sliding_attention"))
        if types:
            sliding = [n for n, value in enumerate(types) if value == "sliding_attention"]
            if sliding and window is None:
                raise FileFormatError(f"{keys.where}: layer_types has sliding_attention, but no sliding_window is in use")
            return window_fields(window, sliding, n_layers)
    return window_fields(window, [] if window is None else range(first, n_layers), n_layers)


def _layer_types(keys: _Keys, n_layers: int, supported: tuple[str, ...]) -> list[str]:
    """layer_types, one for each layer, if it is there."""
    types = keys.take("layer_types", list, [])
    if any(value not in supported for value in types) or len(types) not in (0, n_layers):
        expected = f"{' or '.join(supported)}, for each of {n_layers} layers"
        raise UnsupportedError(f"{keys.where}: layer_types is {shown(types)}, supported is {expected}")
    return types


def _rope(keys: _Keys, partial: bool) -> tuple[float, float, Llama3Scaling | None, float]:
    """Base, what positions are divided by, Llama 3's scaling, and the part of a head that is rotated.

    They are keys of rope_parameters; older files have rope_theta beside rope_scaling, and gpt_neox had names of its own.
    """
    where = keys.where
    old = {new: keys.left.pop(name) for name, new in _OLD_ROPE.items() if name in keys.left}
    told: dict[str, Any] = {}
    for source in (old, keys.take("rope_scaling", dict, {}), keys.take("rope_parameters", dict, {})):
        for name, value in source.items():
            name = "rope_type" if name == "type" else name
            if told.setdefault(name, value) != value:
                raise FileFormatError(f"{where}: RoPE's {shown(name)} is {shown(told[name])} and {shown(value)}, expected one value")
    rope = _Keys(f"{where}: RoPE", told)
    base, fraction = rope.take("rope_theta", float), rope.take("partial_rotary_factor", float, _REQUIRED if partial else 1.0)
    kind, factor, llama3 = rope.take("rope_type", str, "default"), 1.0, None
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedError(f"{where}: RoPE's rope_type is {shown(kind)}, supported are default, linear and llama3")
    if kind == "linear":
        factor = rope.take("factor", float)
    if kind == "llama3":
        llama3 = Llama3Scaling(
            rope.take("factor", float),
            rope.take("low_freq_factor", float),
            rope.take("high_freq_factor", float),
            rope.take("original_max_position_embeddings", int),
        )
        if not (0 < llama3.factor < float("inf") and 0 < llama3.low < llama3.high < float("inf") and llama3.original > 0):
            raise FileFormatError(f"{where}: RoPE has the scaling {llama3}, expected positive numbers, low less than high")
    rope.end()
    return base, factor, llama3, fraction


_OLD_ROPE = {
    "rope_theta": "rope_theta",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
    "partial_rotary_factor": "partial_rotary_factor",
}


def _biases(keys: _Keys, model_type: str, architecture: str) -> tuple[str, ...]:
    """Matrices that have one."""
    family = FAMILIES[architecture]
    if not family.optional_biases or model_type == "mistral":
        keys.fixed("attention_bias", model_type == "gpt_neox")
        keys.fixed("mlp_bias", False)
        return family.biases
    attention, mlp = keys.take("attention_bias", bool, False), keys.take("mlp_bias", bool, False)
    return tuple(name for name in MATRICES if (attention if name.startswith("attn") else mlp))


def _quantization(keys: _Keys, kind: ModelType) -> Quantization | None:
    """quantization_config of BitNet. One linear_class divides by the scale that the other multiplies by.

    Files from before there were two (Falcon3-1.58's, HF1BitLLM's) name neither class nor mode: what they have is bitlinear, offline, which
    is transformers' default, too. A mode without a class is a file of both times, and refused.
    """
    told = keys.take("quantization_config", dict, None)
    if told is None:
        return None
    keys = _Keys(f"{keys.where}: quantization_config", told)
    keys.fixed("quant_method", "bitnet")
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
    found = Quantization(
        packed=mode == "offline",
        divides=linear == "bitlinear",
        inner_norms=keys.take("use_rms_norm", bool, False),
        norm_eps=keys.take("rms_norm_eps", float, 1e-6),
        skipped=skipped,
    )
    if found.converts("lm_head"):
        raise UnsupportedError(f"{keys.where}: modules_to_not_convert is {shown(list(skipped))}: the head, too, would be quantised")
    if not 0 < found.norm_eps < float("inf"):
        raise FileFormatError(f"{keys.where}: rms_norm_eps is {found.norm_eps}, expected a positive number")
    keys.end()
    return found
