"""The space of small models and calls: each case is a few numbers, whose values lie around the edges that engines have.

The first value of each list is the plainest: `Case()` is the plainest case, and a case shrinks by taking first values.
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import ALL_BLOCK_TYPES
from ..base.tensor_types import I2_S as _I2_S
from ..model.checks import check_model
from ..model.families import ARCHITECTURES, FAMILIES, Family
from ..model.records import Blocks, Layer, Linear, LongRope, Model, Ternary, Weights, frozen
from ..model.rope import rope_fields
from .models import WINDOW, Generator, random_model

_BLOCKS = {kind.name: kind.block for kind in ALL_BLOCK_TYPES}
_FLOATS = ("float32", "float16", "bfloat16")
CONTEXT = 512
MOST_TOKENS = 500  # of all sequences of a call, or two sequences


@dataclass(frozen=True)
class Case:
    """A random model and a call, as numbers: what one run of an engine computes."""

    family: str = "llama"
    weights: str = "float32"  # of the layers' matrices: a float dtype, "ternary", or a block type
    table: str = "float32"  # of embedding and head
    tied: bool = False  # whether the head is the embedding
    extras: bool = False  # whether the model has the tensors that its family may leave out: biases, scales, factors of RoPE
    layers: int = 1
    width: int = 64
    ffn: int = 64
    kv_heads: int = 2
    group: int = 1  # query heads that share a key-value head
    head_dim: int = 32
    vocab: int = 64
    window: int = 0  # keys that a query sees; 0: all
    rope_width: int = 0  # numbers of a head that are rotated; 0: all, or what the family has
    experts: int = 0
    experts_used: int = 2  # those that a token takes, where there are experts
    rope_base: float = 10000.0
    eps: float = 1e-5
    length: int = 4  # tokens of the longest sequence
    batch: int = 1  # sequences of the call
    ragged: bool = False  # whether the later sequences are shorter than the first
    chunk: int = 0  # tokens that the engine takes at a time; 0: all
    prefix: int = 0  # tokens whose keys and values are there from an earlier call
    threads: int = 1
    tokens: str = "inner"  # ids but the first and the last of the vocabulary; "first", "last", "low": often these, or 0 to 3; "alike": one
    seed: int = 0

    def __hash__(self) -> int:
        return hash((*vars(self).values(),))  # asked for by name, as dataclasses do it, the fields take twice as long


FIELDS = tuple(field.name for field in fields(Case))
CALL = ("length", "batch", "ragged", "chunk", "prefix", "threads", "tokens")
"""The fields that the model does not depend on."""

EDGES: Mapping[str, tuple[Any, ...]] = {
    "family": ("llama", *(name for name in ARCHITECTURES if name not in ("llama", "bitnet-25"))),
    "weights": (*_FLOATS, "Q8_0", "Q4_0", "Q6_K", "Q4_K", "Q5_K", "Q5_0", "Q4_1", "Q5_1", "Q3_K", "Q2_K", "IQ4_NL", "MXFP4",
                "TQ2_0", "TQ1_0"),
    "table": _FLOATS,
    "tied": (False, True),
    "extras": (False, True),
    "layers": (1, 2, 3, 4, 6),
    "width": (64, 32, 96, 128, 160, 256, 512, 40, 33, 65, 72, 100, 257),
    "ffn": (64, 32, 96, 128, 192, 256, 384, 512, 40, 33, 65, 100, 130, 257),
    "kv_heads": (2, 1, 3, 4, 5, 8),
    "group": (1, 2, 3, 4, 5, 8),
    "head_dim": (32, 64, 128, 96, 80, 48, 16, 40, 72, 112, 256),
    "vocab": (64, 96, 128, 256, 320, 512, 1000, 33, 65, 100, 127, 129, 255, 257, 301),
    "window": (0, 8, 16, 32, 33, 64, 100, 128, 300),
    "rope_width": (0, 8, 16, 24),
    "experts": (0, 4, 5, 8),
    "experts_used": (2, 1, 3, 4),
    "rope_base": (10000.0, 500000.0, 1000000.0, 100.0),
    "eps": (1e-5, 1e-6, 1e-3),
    "length": (4, 3, 2, 1, 5, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64, 65, 96, 100, 127, 128, 129,
               160, 200, 255, 256, 257, 300),
    "batch": (1, 2, 3, 4, 5, 8),
    "ragged": (False, True),
    "chunk": (0, 1, 2, 3, 4, 5, 7, 8, 16, 17, 31, 32, 33, 64, 128),
    "prefix": (0, 1, 2, 5, 8, 16, 31, 32, 33, 64, 100),
    "threads": (1, 2, 3, 4, 8),
    "tokens": ("inner", "first", "last", "low", "alike"),
    "seed": (0, 1, 2, 3, 4, 5, 6, 7),
}  # fmt: skip
"""The values of each field that are drawn, the plainest first."""


@lru_cache(1 << 14)
def fitted(case: Case) -> Case:
    """The nearest case that can be: whole blocks, what the family has, a prefix shorter than the sequence."""
    return with_fields(case, _fitted_sizes(case) | _fitted_traits(case) | _fitted_call(case))


def with_fields(case: Case, fields: Mapping[str, Any]) -> Case:
    """The case with other values of these fields. dataclasses.replace takes ten times as long, and a hunt weighs thousands of cases."""
    other = object.__new__(Case)
    vars(other).update(vars(case), **fields)
    return other


def _fitted_sizes(case: Case) -> dict[str, Any]:
    """Rows of whole blocks."""
    ternary = FAMILIES[case.family].ternary or case.weights == "ternary"
    weights = "ternary" if ternary and case.weights not in ("TQ1_0", "TQ2_0") else case.weights
    block = _BLOCKS.get(weights, _I2_S.block if ternary else 1)
    group, head_dim = min(case.group, max(1, 24 // case.kv_heads)), case.head_dim + case.head_dim % 2
    while case.kv_heads * group * head_dim % block:
        group, head_dim = (group + 1, head_dim) if group < 16 else (1, _up(head_dim, min(block, 64)))
    width, ffn = _up(case.width, max(block, _BLOCKS.get(case.table, 1))), _up(case.ffn, block)
    rope_width = case.rope_width
    if rope_width > head_dim or (not rope_width and "rope_width" in FAMILIES[case.family].required):
        rope_width = head_dim // 2 // 2 * 2 or 2
    if not FAMILIES[case.family].partial_rope:
        rope_width = 0
    return {"weights": weights, "width": width, "ffn": ffn, "group": group, "head_dim": head_dim, "rope_width": rope_width}


def _always_windowed(traits: Family) -> bool:
    """Whether all models of a family have layers with a window."""
    return "window" in traits.required or traits.local_rope_base is not None


def _fitted_traits(case: Case) -> dict[str, Any]:
    """What the family has."""
    traits = FAMILIES[case.family]
    window = case.window or WINDOW * _always_windowed(traits) if traits.windows else 0
    experts = case.experts if "experts" in traits.numbers else 0
    if "experts" in traits.required:
        experts = case.experts or 4
    used = min(case.experts_used, experts) if experts else Case.experts_used
    rope_base = 10000.0 if traits.config["rope"] == "none" else case.rope_base
    return {"window": window, "experts": experts, "experts_used": used, "rope_base": rope_base}


def _fitted_call(case: Case) -> dict[str, Any]:
    """A call that the context has room for."""
    length = min(case.length, CONTEXT)
    batch = min(case.batch, max(2, MOST_TOKENS // length))
    prefix = min(case.prefix, min(_lengths(length, batch, case.ragged)) - 1)
    ragged, chunk = case.ragged and batch > 1 and length > 1, 0 if case.chunk >= length - prefix else case.chunk
    return {"length": length, "batch": batch, "ragged": ragged, "prefix": prefix, "chunk": chunk}


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def lengths_of(case: Case) -> tuple[int, ...]:
    """The tokens of each sequence of the call."""
    return _lengths(case.length, case.batch, case.ragged)


def _lengths(length: int, batch: int, ragged: bool) -> tuple[int, ...]:
    return tuple(max(1, length * (4, 2, 3, 1)[b % 4] // 4) for b in range(batch)) if ragged else (max(1, length),) * batch


def tokens_of(case: Case) -> tuple[NDArray[np.int64], ...]:
    """The ids of each sequence. A shorter length has the first ids of a longer one."""
    return tuple(_ids(case.seed, b, case.vocab, case.tokens)[:length].copy() for b, length in enumerate(lengths_of(case)))


@lru_cache(1 << 10)  # of the thousands of cases that a hunt weighs, most have the ids of another one
def _ids(seed: int, b: int, vocab: int, tokens: str) -> NDArray[np.int64]:
    """The ids of the longest sequence in place b of a batch."""
    rng = np.random.default_rng([seed, b, 7])
    ids = 1 + rng.integers(0, 1 << 40, CONTEXT) % max(vocab - 2, 1)
    if tokens == "alike":
        ids[:] = ids[0]
    elif tokens != "inner":
        often = rng.random(CONTEXT) < 0.5
        often[0] = True
        ids[often] = ids[often] % 4 if tokens == "low" else {"first": 0, "last": vocab - 1}[tokens]
    return np.minimum(ids, vocab - 1)


_OFTEN = {"first": ", some ids 0", "last": ", some ids the last", "low": ", some ids below 4", "alike": ", all ids equal"}


def in_words(case: Case) -> str:
    """A case in words: what makes it other than the plainest, and its sizes."""
    c, plain, plural = case, Case(), lambda n, word: f"{n} {word}{'s' * (n != 1)}"
    heads, lengths = plural(c.kv_heads * c.group, "head"), ", ".join(map(str, lengths_of(c)))
    heads += f" that share {plural(c.kv_heads, 'key head')}" * (c.group > 1)
    sizes = f"{c.family}, {plural(c.layers, 'layer')}, width {c.width}, {heads} of width {c.head_dim}, feed-forward {c.ffn}"
    traits = {
        f"{c.table} embedding": c.table != plain.table,
        "tied head": c.tied,
        "optional tensors": c.extras,
        f"window {c.window}": c.window,
        f"{c.rope_width} numbers of a head rotated": c.rope_width,
        f"{plural(c.experts, 'expert')}, {c.experts_used} of them used": c.experts,
        f"RoPE base {c.rope_base:g}": c.rope_base != plain.rope_base,
        f"eps {c.eps:g}": c.eps != plain.eps,
    }
    call = f"{lengths} tokens" if c.ragged else plural(c.length, "token")
    call = f"{c.batch} sequences of " * (c.batch > 1) + call + (f" in chunks of {c.chunk}" if c.chunk else " in one prefill")
    call += f" behind a reused prefix of {c.prefix}" * (c.prefix > 0) + f" on {c.threads} threads" * (c.threads > 1)
    call += _OFTEN.get(c.tokens, "")
    return ", ".join([f"{sizes}, vocabulary {c.vocab}, {c.weights}", *(words for words, so in traits.items() if so), call])


_KEPT = ("attention_scale", "score_cap", "residual_scale", "logit_scale", "logit_cap", "parallel_residual", "rope_scaling", "yarn",
         "rope_magnitude", "local_rope_base")  # fmt: skip
"""The fields of Config that a model like another one takes as they are."""


def model_of(case: Case, like: Model | None = None, rng: Generator | None = None) -> Model:
    """The random model of a case. like: a model whose other settings, such as scales, caps, biases and factors of RoPE, it takes. rng: in
    place of the case's seed."""
    traits = FAMILIES[case.family]
    shape: dict[str, Any] = {name: getattr(case, name) for name in ("width", "ffn", "head_dim", "vocab", "kv_heads", "rope_base", "eps")}
    shape |= {"heads": case.kv_heads * case.group, "n_layers": case.layers, "context": CONTEXT}
    if "shared_ffn" in traits.required:
        shape["shared_ffn"] = case.ffn
    if case.window:
        shape["window"] = case.window
        if not _always_windowed(traits):
            shape["window_layers"] = tuple(range(case.layers - 1)) if case.layers > 1 and traits.window_period else None
    if case.rope_width:
        shape["rope_width"] = case.rope_width
    if case.experts:
        shape |= {"experts": case.experts, "experts_used": case.experts_used}
    if like is not None:
        shape |= {name: getattr(like.config, name) for name in _KEPT}
        if (long := like.config.longrope) is not None:
            lists = (np.resize(x, (case.rope_width or case.head_dim) // 2).tolist() for x in (long.short, long.long))
            shape["longrope"] = LongRope(long.original, *map(tuple, lists))
    model = random_model(
        case.seed if rng is None else rng, family=case.family, table=case.table, weights=case.weights, tied=case.tied, **shape
    )
    return model if case.extras and like is None else _without_extras(model, like)


def _without_extras(model: Model, like: Model | None) -> Model:
    """The model without the tensors that its family may leave out, but for those that `like` has."""
    traits = FAMILIES[model.config.architecture]

    def plain(name: str, linear: Linear, of: Layer | None) -> Linear:
        wanted = getattr(of, name, None) or Linear(linear.weights)
        biased = name in traits.biases or wanted.bias is not None
        return frozen(Linear(linear.weights, linear.bias if biased else None, linear.scale if wanted.scale is not None else None))

    first = None if like is None else like.layers[0]
    changed: list[dict[str, Any]] = [
        {name: plain(name, x, first) for name, x in vars(w).items() if isinstance(x, Linear)} for w in model.layers
    ]
    biased = (traits.partial_rope and traits.head_bias) if like is None else like.output_bias is not None
    return replace(
        model,
        layers=tuple(replace(w, **fields) for w, fields in zip(model.layers, changed, strict=True)),
        output_bias=model.output_bias if biased else None,
        **rope_fields(model.config, None if like is None or like.rope_factors is None else model.rope_factors),
    )


def case_like(model: Model) -> tuple[Case, dict[str, tuple[Any, ...]]]:
    """The plainest case of a model's family and types, and the values of its fields to draw, the model's own among them.

    Raises ShapeError for a model that cannot be.
    """
    check_model(model)
    c, w = model.config, model.layers[0].attn_q.weights
    fixed: dict[str, Any] = {
        "family": c.architecture,
        "weights": type_name(getattr(w, "blocks", None) or w),
        "table": type_name(model.token_embd),
        "tied": model.output is None,
        "extras": c.yarn is None and c.longrope is None and model.rope_factors is not None,
    }
    drawn = dict(EDGES) | {name: (value,) for name, value in fixed.items()}
    numbers = {
        "head_dim": c.head_dim, "group": c.heads // c.kv_heads, "rope_base": c.rope_base, "eps": c.eps, "rope_width": c.rope_width or 0,
    }  # fmt: skip
    for name, value in numbers.items():
        drawn[name] = tuple(
            dict.fromkeys([value, *EDGES[name]] if name in ("rope_base", "eps") else [*EDGES[name][:1], value, *EDGES[name][1:]])
        )
    sizes = {"width": c.width, "ffn": c.ffn, "kv_heads": c.kv_heads, "vocab": c.vocab}
    layers = ("layers", c.n_layers), ("layers", FAMILIES[c.architecture].window_period + 1)  # a whole period and one
    for name, value in (*sizes.items(), *layers):
        if value <= 2 * max(EDGES[name]):
            drawn[name] = tuple(dict.fromkeys([*drawn[name][:1], value, *drawn[name][1:]]))
    always = _always_windowed(FAMILIES[c.architecture])
    drawn["window"] = tuple(dict.fromkeys([*[c.window or WINDOW if always else 0], *[c.window] * bool(c.window), *EDGES["window"][1:]]))
    drawn["experts"] = tuple(dict.fromkeys([*EDGES["experts"][1:2], c.experts, *EDGES["experts"][2:]])) if c.experts else (0,)
    drawn["experts_used"] = tuple(dict.fromkeys([Case.experts_used, c.experts_used or Case.experts_used, *EDGES["experts_used"]]))
    return fitted(
        replace(Case(), **fixed, **{name: drawn[name][0] for name in ("experts", "window")}, rope_base=c.rope_base, eps=c.eps)
    ), drawn


def type_name(weights: Weights) -> str:
    """The type of a matrix by its name: a float dtype, "ternary", or a block type."""
    if isinstance(weights, Ternary):
        return "ternary"
    return weights.type.name if isinstance(weights, Blocks) else {"uint16": "bfloat16"}.get(str(weights.dtype), str(weights.dtype))
