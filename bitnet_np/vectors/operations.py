"""The cases of single operations: inputs from integer arithmetic, the law's result in float64 with its bounds, and the contract's bits.

Sizes are those at which vector registers, blocks and chunks end. Each operation on rows has a case of numbers that bugs live at.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from .. import contract
from ..base.tensor_types import ALL_BLOCK_TYPES, TERNARY_TYPES, TensorType
from ..contract.numbers import exp
from ..engine import masks
from ..engine.dialects import EXACT, LLAMA_CPP, Dialect
from ..generation import sampling
from ..judge.law import definition as law
from ..judge.law.expected import WIDE, Expected
from ..judge.law.expression import Node, constant, mapped, tensor
from ..judge.law.functions import ACTIVATION_NAMES
from ..judge.law.running_error import expected
from ..model import packing
from ..model.records import Blocks, Linear
from ..model.rope import rope_fields
from ..testing.models import random_model, random_table
from ..testing.noise import EDGES, Noise, noise
from ..testing.selftest import ROWS
from ..traces.points import Key
from .pack import SHAPES, Case, Output, bounded, equal
from .portable import portable

Arrays = dict[str, Any]
f32 = np.float32

WIDTHS = {"small": (33,), "full": (1, 8, 16, 33, 64, 257)}
"""The widths of rows, by the size of a pack."""
_FINITE: Any = EDGES[np.abs(EDGES) < 1e37]
_TAME: Any = np.array([0, -0.0, 0.5, -1.5, 2.5, 1e-20, -1e-20, 1e15, -1e15], f32)
"""Numbers whose squares neither leave float32's range nor vanish."""
_LAW = "bitnet_np/judge/law/definition.py, {}; its bounds: running_error.py; its bits: bitnet_np/contract"


def _expected(tree: Node, inputs: Arrays) -> Expected:
    """What the law expects of rows [R, ...], in arithmetic that is the same everywhere."""
    wide = {Key(name, None): portable(array.reshape(len(array), -1).astype(np.float64)) for name, array in inputs.items()}

    def fixed(node: Node) -> Node:
        if node.kind != "constant" or node.is_matrix:
            return node
        return Node(node.kind, (), node.noun, node.what, portable(np.asarray(node.value, np.float64)))

    with np.errstate(all="ignore"):
        return expected(mapped(tree, fixed), wide, WIDE)


def _tensors(*names: str) -> list[Any]:
    return [tensor(Key(name, None)) for name in names]


def _numbers(**numbers: Any) -> Arrays:
    """Numbers of an operation; those that are None are left out."""
    return {name: np.array(number, np.float64) for name, number in numbers.items() if number is not None}


def _case(operation: str, which: str, what: str, law_of: str, inputs: Arrays, outputs: Any, **words: str) -> Case:
    """law_of: a function of judge/law/definition.py, or another source. outputs: an array's rule, or several by name."""
    outputs, source = outputs if isinstance(outputs, dict) else {"y": outputs}, law_of if "/" in law_of else _LAW.format(law_of)
    return Case(f"{operation}-{which}", operation, what, source, inputs, outputs, words)


def _of_two(kind: str) -> Callable[..., Node]:
    return lambda a, b: Node(kind, (a, b if isinstance(b, Node) else constant("", np.asarray(b, np.float64))), "the result")


_ACTIVATIONS = {"relu2_gate": "relu2", "silu_gate": "silu", "gelu_gate": "gelu_gate", "gelu": "gelu", "gelu_tanh": "gelu_tanh"}
_TREES: dict[str, Callable[..., Node]] = {
    "rms_norm": law.rms,
    "layer_norm": law.layer_norm,
    "add": _of_two("sum"),
    "add_bias": _of_two("sum"),
    "scaled": _of_two("product"),
    **{name: partial(law.gated, ACTIVATION_NAMES[activation]) for name, activation in _ACTIVATIONS.items()},
    "soft_cap": lambda x, cap: law.capped(x, float(cap), "the cap"),
    "mix": partial(law.mixed, None),  # type: ignore[arg-type]
    "sigmoid_gate": lambda x, gate: Node("product", (x, Node("sigmoid", (gate,), "the gate", "sigmoid")), "the gated numbers"),
}
"""Operations on rows: their arguments, in the order of the contract's -> the law's expression."""
NAMES = (*_TREES, "quantize", "matmul", "embed", "ternary_matmul", "matmul_as_llama_cpp", "rope", "attend", "mask")
NAMES += ("top_experts", "expert_weights", "experts_matmul", "pool", "head", "sample")
"""Every operation that has cases."""


def _of_rows(name: str, which: str, draw: Callable[..., Any], what: str) -> Case:
    arguments = ROWS[name](draw)
    names = [*inspect.signature(getattr(contract, name)).parameters]
    inputs: Arrays = {key: x if np.ndim(x) else np.array(x, np.float64) for key, x in zip(names, arguments, strict=True)}
    read = {key: x for key, x in inputs.items() if x.ndim > 1}
    if name == "quantize":
        results, makers = contract.quantize(*arguments), (law.codes, law.code_scale)
        made: Any = zip(("codes", "scale"), makers, results, strict=True)
        outputs: Any = {key: bounded(_expected(make(None, *_tensors("x")), read), bits.shape, bits) for key, make, bits in made}
    else:
        nodes = [_tensors(key)[0] if key in read else x for key, x in zip(names, arguments, strict=True)]
        bits = getattr(contract, name)(*arguments)
        outputs = bounded(_expected(_TREES[name](*nodes), read), bits.shape, bits)
    return _case(name, which, what, name, inputs, outputs)


def _edged(edges: Any, seed: int, *shape: int) -> Any:
    """Numbers, a third of which are edges; of several rows the first is zero, the second has ties of the quantiser."""
    shape = tuple(n if n < 10 else 64 for n in shape)
    x, place, which = (noise(seed + more, *shape) for more in (0, 900, 901))
    x = np.where(np.abs(place) < 1 / 3, edges[(np.abs(which) * len(edges)).astype(int)], x)
    if x.ndim > 1 and len(x) > 2:
        x[0], x[1] = 0, np.rint(8 * x[1].clip(-1, 1)) + f32(0.5)
        x[1].reshape(-1)[0] = 127
    return x


def rows(name: str, widths: Sequence[int]) -> Iterator[Case]:
    """An operation on rows of each width, and on edges."""
    for width in widths:
        sized = lambda n, width=width: 1 if n == 1 else 3 if n < 10 else width  # noqa: E731
        yield _of_rows(name, str(width), lambda seed, *shape, sized=sized: noise(seed, *map(sized, shape)), f"rows of {width} numbers")
    edges = partial(_edged, _TAME if name.endswith("_norm") else _FINITE)
    yield _of_rows(name, "edges", edges, "zeros of both signs, ties, denormal and large numbers, a row of zeros")
    if name == "quantize":
        x: Any = noise(910, 4, 33)
        x[1, 5], x[2, 0], x[3] = np.nan, np.inf, 0
        codes, scale = contract.quantize(x)
        outputs = {"codes": equal(codes), "scale": equal(scale)}
        yield _case(name, "nan", "rows with NaN or infinity: codes 0, scale NaN", "codes", {"x": x}, outputs)


def _product(dialect: Dialect, x: Any, weights: Any, bits: Any) -> Output:
    place: Any = SimpleNamespace(dialect=dialect)
    e = _expected(law.matrix_product(place, _tensors("x")[0], Linear(weights)), {"x": x})
    return bounded(e, e.value.shape, bits)


def _embedding(table: Any, kind: str) -> Case:
    """Rows of a table, which are exact."""
    in_blocks, tokens = isinstance(table, Blocks), np.array([8, 0, 7, 0])
    data, tree = table.data if in_blocks else table, Node("rows", (constant("", law.matrix_of(table)), *_tensors("tokens")), "the rows")
    bits = contract.embed_blocks(data, table.type, tokens) if in_blocks else contract.embed(table, tokens)
    y = bounded(_expected(tree, {"tokens": tokens}), bits.shape, bits)
    return _case("embed", kind, f"rows of a table of {kind}", "embedding", {"tokens": tokens, "w": data}, y, type=kind)


FLOATS = ("float32", "float16", "bfloat16")


def floats(kind: str, widths: Sequence[int]) -> Iterator[Case]:
    """Products with matrices of floats, and rows of a table."""
    for i, width in enumerate(widths):
        count, n = (1, 3, 2, 17)[i % 4], (3, 17, 8, 5)[i % 4]
        x, table = noise(920, count, width), random_table(Noise(921 + i), kind, n, width)
        assert isinstance(table, np.ndarray)
        what = f"{count} rows times a matrix [{n}, {width}] of {kind}"
        y = _product(EXACT, x, table, contract.matmul(x, table))
        yield _case("matmul", f"{kind}-{width}", what, "matrix_product", {"x": x, "w": table}, y, type=kind)
    yield _embedding(random_table(Noise(930), kind, 11, 33), kind)


def ternary(widths: Sequence[int]) -> Iterator[Case]:
    """Ternary matrices after the quantiser. Where rows are whole blocks of I2_S, its bytes are also an input."""
    for i, width in enumerate((*widths, 128)):
        x, n = 3 * noise(940 + i, (1, 3)[i % 2], width), (5, 8)[i % 2]
        weights = packing.pack(np.rint(noise(950 + i, n, width)).astype(np.int8), 0.37)
        bits = contract.ternary_matmul(*contract.quantize(x), weights.codes, weights.scale, n)
        inputs = {"x": x, "w": packing.unpack(weights)} | _numbers(w_scale=weights.scale)
        inputs |= {"i2_s": packing.to_i2s(weights)} if width == 128 else {}
        what = f"{len(x)} rows, quantised to int8, times a ternary matrix [{n}, {width}] and its scale"
        yield _case("ternary_matmul", str(width), what, "matrix_product", inputs, _product(EXACT, x, weights, bits))


def blocks(kind: TensorType, size: str) -> Iterator[Case]:
    """The rows of a matrix in one of ggml's block types, its product as defined, and as llama.cpp's CPU backend computes it."""
    n, width = 9, kind.block * (1 if size == "small" or kind.block > 64 else 3)
    table, x = random_table(Noise(960), kind.name, n, width), noise(961, 2, width)
    assert isinstance(table, Blocks)
    yield _embedding(table, kind.name)
    plain = theirs = None
    if kind not in TERNARY_TYPES:
        plain, (theirs,) = contract.matmul_blocks(x, table.data, kind), contract.matmuls_blocks_as_llama_cpp(x, (table.data, kind))
    ours = "ternary_matmul" if kind in TERNARY_TYPES else "matmul"
    rounded = ", rows rounded as llama.cpp's CPU backend rounds them"
    for name, dialect, bits, how in ((ours, EXACT, plain, ""), ("matmul_as_llama_cpp", LLAMA_CPP, theirs, rounded)):
        what = f"2 rows times a matrix [{n}, {width}] of {kind.name}{', rows quantised to int8' if name == 'ternary_matmul' else how}"
        inputs = {"x": x, "w": table.data} | _numbers(n=n)
        yield _case(name, kind.name, what, "matrix_product", inputs, _product(dialect, x, table, bits), type=kind.name)


def _place(name: str, factors: Any = None, **fields: Any) -> law.Place:
    """A place in a small model with these fields of Config."""
    shape: Any = {"vocab": 8, "width": 8, "ffn": 8, "n_layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 8, "context": 1 << 17}
    model = random_model(Noise(970), family="llama", **shape)
    config, divisors = replace(model.config, **fields), None if factors is None else np.array(factors, f32)
    return law.Place(replace(model, config=config, **rope_fields(config, divisors)), EXACT, Key(name, 0))


def rope() -> Iterator[Case]:
    """RoPE in both pairings, of whole heads and parts, far positions, scaled positions and frequencies."""
    for which, (start, fields) in SHAPES["rope"].items():
        place = _place("Qcur_rope", **fields)
        c, factors = place.config, place.model.rope_factors
        x = 2 * noise(971, 5, 2, c.head_dim)
        turns = contract.rotations(EXACT.angles(start + np.arange(5), place.model))
        turns = turns if c.rope_magnitude == 1 else tuple(contract.scaled(t, f32(c.rope_magnitude)) for t in turns)  # type: ignore[assignment]
        bits = (contract.rope if c.rope == "halves" else contract.rope_adjacent)(x, *turns)
        inputs = {"x": x} | ({} if factors is None else {"factors": factors}) | _numbers(start=start, base=c.rope_base)
        inputs |= _numbers(width=2 * c.rope_pairs, scaling=c.rope_scaling, magnitude=c.rope_magnitude)
        what = f"RoPE of pairs {'(i, i + width / 2)' if c.rope == 'halves' else '(2i, 2i + 1)'} at positions {start} to {start + 4}"
        e = _expected(law.rotation(place, _tensors("x")[0], start), {"x": x})
        yield _case("rope", which, what, "rotation", inputs, bounded(e, x.shape, bits), pairs=c.rope)


def attention() -> Iterator[Case]:
    """Attention of whole sequences and of last rows over a cache, with shared heads, windows, caps and scales."""
    for which, (count, past, heads, kv_heads, width, fields) in SHAPES["attend"].items():
        place = _place("kqv_out", heads=heads, kv_heads=kv_heads, head_dim=width, **fields)
        q, k, v = 4 * noise(981, count, heads, width), noise(982, count, kv_heads, width), noise(983, count, kv_heads, width)
        c, last = place.config, slice(past, None)
        numbers = [None if n is None else f32(n) for n in (c.attention_scale, c.score_cap)]
        bits = contract.attend(q, k[None], v[None], np.zeros(count, np.int64), np.arange(count), c.window, *numbers)
        e = _expected(law.attention(place, *_tensors("q", "k", "v")), {"q": q, "k": k, "v": v})
        inputs = {"q": q[last].copy(), "k": k, "v": v} | _numbers(past=past, window=c.window, scale=law.score_scale(c), cap=c.score_cap)
        what = f"{count - past} queries of {heads} heads over {count} keys of {kv_heads}"
        yield _case("attend", which, what, "attention", inputs, bounded(e, q[last].shape, bits.reshape(count, -1), last))


def mask() -> Iterator[Case]:
    """Who sees whom."""
    for which, (queries, keys, fields) in SHAPES["mask"].items():
        seen = masks.mask(queries, keys, masks.Pattern(**fields), form="bool")
        numbers = _numbers(queries=queries, keys=keys, **(dict.fromkeys(masks.Pattern._fields, 0) | fields))
        yield _case("mask", which, "1 where a query sees a key", "bitnet_np/engine/masks.py, Pattern", numbers, equal(seen))


def experts() -> Iterator[Case]:
    """Routers, with ties, and the products of chosen experts."""
    for count, k in ((8, 2), (37, 3)):
        logits: Any = (np.rint(40 * noise(990, 5, count)) / f32(8)).astype(f32)
        chosen = contract.top_experts(logits, k)
        place, read = _place("ffn_moe", experts=count, experts_used=k), {"logits": logits}
        e = _expected(law.top_experts(place, *_tensors("logits")), read)
        what = f"the {k} largest of {count} logits, of equal ones the lower number first"
        yield _case("top_experts", str(count), what, "top_experts", read | _numbers(k=k), bounded(e, chosen.shape, chosen))
        for normalized, name in ((False, f"{count}"), (True, f"{count}-normalized")):
            place, read = _place("x", experts=count, experts_used=k, normalized_experts=normalized), {"logits": logits, "experts": chosen}
            bits = contract.expert_weights(logits, chosen, normalized)
            y = bounded(_expected(law.expert_weights(place, *_tensors(*read)), read), bits.shape, bits)
            what = "the softmax of all logits at these experts" + ", divided by their sum" * normalized
            yield _case("expert_weights", name, what, "expert_weights", read | _numbers(normalized=normalized), y)
    matrices, read = noise(991, 4, 6, 33), {"x": noise(992, 3, 33), "experts": np.array([[3, 0], [1, 3], [2, 1]], np.int32)}
    x, slots = _tensors("x", "experts")
    e = _expected(law.of_experts(_place("ffn_moe_up"), x, slots, [Linear(w) for w in matrices]), read)
    what = "rows times the matrices of their experts"
    yield _case("experts_matmul", "4", what, "of_experts", read | {"w": matrices}, bounded(e, (3, 2, 6)))


def around() -> Iterator[Case]:
    """Pooling; the head with a bias, a scale and a cap; the choice of a token: greedy with ties, by temperature, by top_p."""
    x = noise(995, 7, 33)
    for pooling in ("mean", "cls", "last"):
        e = _expected(law.pooled(_place("x", pooling=pooling), *_tensors("x")), {"x": x})
        yield _case("pool", pooling, f"one row of 7: {pooling}", "pooled", {"x": x}, bounded(e, (1, 33)), pooling=pooling)
    table, bias = noise(996, 40, 33), noise(997, 40)
    place = _place("result_output", logit_scale=2.5, logit_cap=3.0)
    e = _expected(law.head(replace(place, model=replace(place.model, output=table, output_bias=bias)), *_tensors("x")), {"x": x})
    read = {"x": x, "w": table, "bias": bias} | _numbers(divisor=2.5, cap=3.0)
    yield _case("head", "all", "logits: a product, a bias, a divisor, a soft cap", "head", read, bounded(e, (7, 40)))
    logits: Any = (np.rint(40 * noise(998, 40)) / f32(8)).astype(f32)
    what = "the first token, by falling logit, at which the sum of probabilities exceeds the uniform number"
    for which, (temperature, top_p, uniform) in SHAPES["sample"].items():
        token = int(logits.argmax())
        if temperature:
            token = sampling.drawn(logits, exp((logits - logits.max()) / f32(temperature)), top_p, uniform)
        inputs = {"logits": logits} | _numbers(temperature=temperature, top_p=top_p, uniform=uniform)
        yield _case("sample", which, what, "bitnet_np/generation/sampling.py, choose", inputs, {"token": equal(np.array([token]))})


def cases(size: str, types: Sequence[str], wanted: Sequence[str]) -> Iterator[Case]:
    """Every case of the wanted operations. types: of matrices."""
    widths = WIDTHS[size]
    groups: list[tuple[tuple[str, ...], Iterator[Case]]] = [((name,), rows(name, widths)) for name in (*_TREES, "quantize")]
    groups += [(("matmul", "embed"), floats(kind, widths)) for kind in FLOATS if kind in types]
    groups += [(("ternary_matmul",), ternary(widths))] if "ternary" in types else []
    groups += [
        (("embed", "matmul", "ternary_matmul", "matmul_as_llama_cpp"), blocks(kind, size)) for kind in ALL_BLOCK_TYPES if kind.name in types
    ]
    groups += [(("rope",), rope()), (("attend",), attention()), (("mask",), mask())]
    groups += [(("top_experts", "expert_weights", "experts_matmul"), experts()), (("pool", "head", "sample"), around())]
    for names, made in groups:
        if not {*names}.isdisjoint(wanted):
            yield from (case for case in made if case.operation in wanted)
