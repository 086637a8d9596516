"""The points that the labels of a dump stand for: our names, names of other engines' modules, and steps of decoding.

A label is one of these:

* our name for a point, such as attn_norm-0;
* the path of a module, such as model.layers.0.mlp.down_proj, which stands for its output. It may end in .output or .input, and in .0
  where the output is a tuple. Modules are named as in transformers and mlx-lm, in Meta's Llama and tinygrad, or as GGUF names weights;
* hidden_states.N, as transformers gives them with output_hidden_states: the embedding, the outputs of the layers, and in place of the
  last one's the final norm. A tuple of them that was saved alone has only numbers, arr_N or layer_N;
* attentions.N, router_logits.N and past_key_values.N.0 or .1, the keys and values of transformers' cache: what else its models return;
* the name of a GGUF tensor, which stands for its gradient;
* any of these with the number of a step, as step-17/l_out-3 or l_out-3.step-17: the rows that the engine computed in that step.
"""

import re
from collections.abc import Iterable
from typing import NamedTuple

from ..base.errors import FileFormatError, shown
from ..files.hf_model_types import MODEL_TYPES, OTHER_CLASSES
from ..model.families import FAMILIES
from ..model.records import Config
from .points import LAYER_INPUT, LINEAR_NAMES, POINT, POINTS, TOP_EXPERTS, Key, gradient_key, key_of

TOKENS = "tokens"
"""The label of the token ids."""

_AFTER, _BEFORE = "post_feedforward_layernorm", "post_attention_layernorm"
_AFTER_ATTENTION = "post_self_attn_layernorm"
_FIELDS: dict[str, str] = {}
"""The modules of transformers' models, by their names within the layer or the model -> the field of records.Layer or Model that they hold.

A name of several meanings has the first one in MODEL_TYPES. Modules of several matrices are left out: they give no point.
"""
for _kind in (*MODEL_TYPES.values(), *OTHER_CLASSES.values()):
    _whole = {"token_embd": _kind.embedding, "output_norm": _kind.norm, "output": _kind.file_head or "lm_head"}
    _single = {field: module for field, module in _kind.modules.items() if [*_kind.modules.values()].count(module) == 1}
    for _field, _module in (_single | {field: module.rpartition(".")[2] for field, module in _whole.items()}).items():
        _FIELDS.setdefault(_module, _field)

MODULES = {
    point.name: [module for module, field in _FIELDS.items() if field == point.weight]
    + [name.strip(".") for name in (*point.module.split(), *point.weight.split())]
    for point in POINTS
    if point.module or point.weight
}
"""The modules that give each point: of transformers' Llama and BitNet first, then others', and the name that GGUF has for the weight."""
_AROUND = {point.name: point.around.split(" ") for point in POINTS if point.around}
_USUAL = {other: usual for usual, *others in (*MODULES.values(), *_AROUND.values()) for other in others}
"""A module in some family or engine -> the same one in transformers' Llama and BitNet."""

_OUTPUTS = {(usual, POINT[name].whole): name for name, (usual, *_) in MODULES.items()}
_OUTPUTS |= {(f"{MODULES[name][0]}.rms_norm", False): f"{name}_in" for name in LINEAR_NAMES}
"""A module, and whether it is the model's and not a layer's -> the point that it gives, if no module inside it gives the same."""

INPUTS = {usual: POINT[name].takes for name, (usual, *_) in MODULES.items() if POINT[name].takes}
INPUTS |= {"self_attn": "attn_norm", "mlp": "ffn_norm"}
"""The points that modules take."""

_LIKE_INNER = {usual: name for name, (usual, *_) in _AROUND.items()}
"""Modules that give the same point as one inside them."""

_BEHIND_SUB_NORMS = {point.takes: point.name for point in POINTS if point.name.endswith("_sub_norm")}
"""The input of a branch's last matrix -> the norm that comes between them in models with sub-norms."""

_STEP = re.compile(r"(?:step-([0-9]{1,9})/)?(.+?)(?:\.step-([0-9]{1,9}))?", re.DOTALL)
_PREFIX = re.compile(r"(?:(?:module|_orig_mod|base_model|language_model|text_model|model|transformer|gpt_neox)\.)*")
_LAYER = re.compile(r"(?:(?:layers|h|blk)\.|layer_)(0|[1-9][0-9]{0,5})(?:\.(.+))?")
_END = re.compile(r"\.(input|output)(?:\.0)?$|\.0$")
_HIDDEN = re.compile(r"hidden_states\.(0|[1-9][0-9]{0,5})")
_EMBEDDING = Key("inp_embd", None)

_CACHE = r"(?:cache|past_key_values)\.(?:layers\.N\.{0}s|{0}_cache\.N|N\.{1})"
_ROUTER = r"(?:.*\.)?layers\.N\.(?:mlp|block_sparse_moe)\.gate(?:\.output)?"
_RETURNED = {
    re.compile(label.replace("N", "(0|[1-9][0-9]{0,5})")): name
    for label, name in {
        r"attentions\.N": "kq_soft_max",
        r"router_logits\.N": "ffn_moe_logits",
        _CACHE.format("key", 0): "Kcur_rope",
        _CACHE.format("value", 1): "Vcur",
        _ROUTER + r"\.1": "ffn_moe_weights",
        _ROUTER + r"\.2": TOP_EXPERTS,
    }.items()
}
"""What a model of transformers returns for each layer, or its router after the logits -> the point; keys that no RoPE turns are Kcur."""


class Meaning(NamedTuple):
    """The point that a label stands for."""

    key: Key | None  # None: the token ids
    step: int | None  # the step of decoding that its rows are of
    second: bool  # whether engines also give the same tensor under another label


class Side(NamedTuple):
    """The input or the output of a module."""

    module: str  # as transformers' Llama names it, within the layer or the model
    layer: int | None
    is_input: bool = False

    @property
    def output(self) -> Key | None:
        """The point that the module gives, if no module inside it gives the same."""
        name = _OUTPUTS.get((self.module, self.layer is None))
        return None if name is None else Key(name, self.layer)


def side_of(label: str) -> Side | None:
    """The input or output of a module that a label such as model.layers.0.mlp.output stands for; None if it is none of a known module."""
    end = _END.search(label)
    for path, is_input in ((label, False), *([] if end is None else [(label[: end.start()], end[1] == "input")])):
        prefix = _PREFIX.match(path)
        inside = path if prefix is None else path[prefix.end() :]
        layer = _LAYER.fullmatch(inside)
        module = inside if layer is None else layer[2] or ""
        module = _USUAL.get(module, module)
        side = Side(module, None if layer is None else int(layer[1]), is_input)
        if side.output is not None or ((layer is None) == (module == "logits") and module in _LIKE_INNER):
            return side
    return None


def names_to_look_up(paths: Iterable[str]) -> dict[str, str]:
    """Each label or module, and the one to look up for it.

    The norm `post_attention_layernorm` of a layer is the feed-forward's in Llama. In models that also have a norm after the feed-forward,
    it is the one after attention, as its name says.
    """
    paths = list(paths)
    after = any(_AFTER in path for path in paths)
    return {path: path.replace(_BEFORE, _AFTER_ATTENTION) if after else path for path in paths}


def layer_input(layer: int, config: Config | None) -> Key:
    """The point that is a layer's input."""
    if layer:
        return Key("l_out", layer - 1)
    if config is not None and config.embedding_scale != 1:
        return Key("inp_scaled", None)
    return Key("inpL" if config is not None and FAMILIES[config.architecture].positions else "inp_embd", None)


def meanings(labels: Iterable[str], config: Config | None, where: str) -> dict[str, Meaning]:
    """What the labels of a dump stand for; labels that stand for nothing are left out.

    config: the model's, if it is known. Without it, a module's input is taken to be after a sub-norm if the dump has that norm, and the
    highest of hidden_states is taken for the final norm: all of them, from 0, must be there. Raises FileFormatError.
    """
    split = _without_steps(labels, config)
    direct_keys = _direct_keys({label for label, _ in split.values()}, config)
    present = {key for key in direct_keys.values() if key is not None}
    hidden = {label: int(match[1]) for label in direct_keys if (match := _HIDDEN.fullmatch(label))}
    last = _last_hidden(set(hidden.values()), config, where)
    table = {}
    for whole, (label, step) in split.items():
        key = direct_keys[label]
        again = key is None and label != TOKENS
        if label in hidden:
            n = hidden[label]
            key = Key("result_norm", None) if n == last else layer_input(n, config)
        elif again:
            key = returned(label, config) or second(label, present, config)
        if key is not None or label == TOKENS:
            table[whole] = Meaning(key, step, again)
    return table


def _without_steps(labels: Iterable[str], config: Config | None) -> dict[str, tuple[str, int | None]]:
    """Each label, and the one to look up with the step. A tuple of all hidden states that was saved alone gets transformers' labels."""
    split = {label: split_step(text) for label, text in names_to_look_up(labels).items()}
    numbers = () if config is None else range(config.n_layers + 1)
    for prefix in ("", "arr_", "layer_"):
        names = {f"{prefix}{n}": f"hidden_states.{n}" for n in numbers}
        if names.keys() <= {label for label, _ in split.values()}:
            split = {whole: (names.get(label, label), step) for whole, (label, step) in split.items()}
    return split


def _direct_keys(labels: Iterable[str], config: Config | None) -> dict[str, Key | None]:
    """The points that labels are by themselves. In a family that scales the embedding, the module's output is the scaled one."""
    keys = {label: direct(label) for label in labels}
    if config is None or not FAMILIES[config.architecture].scales_embedding:
        return keys
    scaled = Key("inp_scaled", None)
    return {label: scaled if key == _EMBEDDING and side_of(label) is not None else key for label, key in keys.items()}


def _last_hidden(numbers: set[int], config: Config | None, where: str) -> int:
    """The number of the hidden state that is the final norm. Raises FileFormatError for numbers that a model's cannot have."""
    most = max(numbers, default=0)
    if config is None:
        if numbers and (len(numbers) != most + 1 or most == 0):
            expected = "all from 0 on, as without a model the last is taken for the final norm"
            raise FileFormatError(f"{where}: hidden_states {shown(sorted(numbers)[:8])}, expected {expected}")
        return most
    if most > config.n_layers:
        last = f"hidden_states.{config.n_layers}"
        raise FileFormatError(f"{where}: hidden_states.{most} for {config.n_layers} layers, expected at most {last}")
    return config.n_layers


def split_step(label: str) -> tuple[str, int | None]:
    """A label without its step, and the step."""
    match = _STEP.fullmatch(label)
    if match is None or (match[1] and match[3]):
        return label, None
    step = match[1] or match[3]
    return match[2], None if step is None else int(step)


def direct(label: str) -> Key | None:
    """The point of a label that is its own: our name, or a module's output; the name of a GGUF tensor stands for its gradient."""
    if (key := key_of(label)) is not None:
        return key
    side = side_of(label)
    return gradient_key(label) if side is None or side.is_input else side.output


def second(label: str, present: set[Key], config: Config | None) -> Key | None:
    """The point of a module's input, or of the output of a module that gives the same point as one inside it."""
    side = side_of(label)
    if side is None:
        return None
    name = INPUTS.get(side.module.removesuffix(".rms_norm")) if side.is_input else _LIKE_INNER.get(side.module)
    if name is None:
        return None
    if name == LAYER_INPUT and side.layer is not None:
        return layer_input(side.layer, config)
    if side.module == "mlp" and not side.is_input and any(key.name == "ffn_moe_logits" for key in present):
        return None  # with a shared expert it gives a sum that is no point
    if name in _BEHIND_SUB_NORMS and not side.module.endswith("sub_norm"):
        norm = Key(_BEHIND_SUB_NORMS[name], side.layer)
        if norm in present if config is None else norm.name in FAMILIES[config.architecture].norms:
            return norm
    return Key(name, side.layer)


def returned(label: str, config: Config | None) -> Key | None:
    """The point of what a model of transformers, or its router, returns for each layer."""
    for pattern, name in _RETURNED.items():
        if (match := pattern.fullmatch(label)) is not None:
            layer = int(match[match.lastindex or 0])
            rotates = config is None or layer >= config.n_layers or config.rotates(layer)
            return Key(name if rotates else name.removesuffix("_rope"), layer)
    return None
