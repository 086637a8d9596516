"""The laws share nothing with what they judge: what two of them run is noticed by another if it is wrong.

The four are spec.py, contract/, judge/law/ and the kernels. The engine runs contract and kernels alike, so that it is shared, too.
"""

import ast
import inspect
from dataclasses import replace
from fnmatch import fnmatch
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from block_samples import arm_layout, four_row_layout
from child import WITHOUT_NUMBA, run_python
from gguf import GGMLQuantizationType
from gguf.quants import dequantize
from imports import MODULES, reached
from models import random_model
from planted import called, functions, gives_nothing, planted
from recorder import Recorder, record_all

from bitnet_np import BITNET_CPP, EXACT, LLAMA_CPP, contract, spec
from bitnet_np.base import block_formats
from bitnet_np.base.tensor_types import FEW_BITS
from bitnet_np.engine import masks
from bitnet_np.engine.cache import new_cache
from bitnet_np.engine.cache_types import KINDS
from bitnet_np.engine.forward_pass import compute_logits, feed_forward, forward, forward_full, forward_incremental, forward_layer, prefill
from bitnet_np.engine.tokens import pad
from bitnet_np.judge.bounds import within
from bitnet_np.judge.law import graph, products
from bitnet_np.judge.verdict import Verdict
from bitnet_np.kernels import cpu
from bitnet_np.model import packing, rope, widen
from bitnet_np.model.dense import dense_view
from bitnet_np.model.records import LongRope, Yarn
from bitnet_np.testing.models import random_table
from bitnet_np.traces.points import Key

# --- without kernels ------------------------------------------------------------------------------------------------------------------

ALONE = """
for name in sys.argv[2:]:
    importlib.import_module(name)
print([name for name in sys.modules if name.startswith("bitnet_np.kernels")])
"""


@pytest.mark.parametrize("law", ["spec", "contract", "judge.law"])
def test_a_law_loads_no_kernel(law):
    own = [module for module in MODULES if f"{module}.".startswith(f"bitnet_np.{law}.")]
    assert run_python(WITHOUT_NUMBA + ALONE, Path(spec.__file__).parent, *own).strip() == "[]"
    assert not [module for module in reached(law) if module.startswith("bitnet_np.kernels")]


# --- cases ----------------------------------------------------------------------------------------------------------------------------

SIZES = {"width": 32, "ffn": 40, "heads": 2, "kv_heads": 1, "head_dim": 32, "vocab": 40, "n_layers": 2}
WIDE = SIZES | {"width": 256, "ffn": 256, "head_dim": 128, "n_layers": 1}
LENGTH = 7


@cache
def model_of(**shape):
    return random_model(3, **SIZES | shape)


def by_key(points):
    return {Key(*key): np.asarray(x).reshape(len(x), -1) for key, x in points.items()}


def keeps_the_law(model, dialect, ids, points):
    """Whether each tensor is what the law makes of those before it. Where the definition notes none, the law's own is taken."""
    known = {key: x.astype(np.float64) for key, x in points.items()} | {graph.TOKENS: ids}
    for operation in graph.operations(model, dialect):
        expected = operation.evaluate(*(known[key] for key in operation.inputs))
        if within(expected, known.setdefault(operation.key, expected.value))[0] > Verdict.ROUNDING:
            return False
    return True


def agree(dialect, **shape):
    """Whether law, definition, contract and kernels say the same of a model's tensors, in whole and token by token.

    The kernels come last: they have no bounds checks, and a fault that they share with the contract may lead them anywhere.
    """
    model = model_of(**shape)
    model = replace(model, **rope.rope_fields(model.config, model.rope_factors))
    ids = np.arange(LENGTH) * 5 % model.config.vocab
    points = Recorder()
    whole = forward_full(model, ids[None], dialect=dialect, ops=contract, record=points)[0]
    if not same(whole, points["result_output", None]):
        return False
    if dialect.kv == "float32" and not keeps_the_law(model, dialect, ids, by_key(points)):
        return False
    if dialect is EXACT:
        defined = {}
        logits = spec.forward(dense_view(model), ids, lambda name, n, x: defined.update({(name, n): np.array(x)}))
        if not same(logits, defined["result_output", None]) or not keeps_the_law(model, dialect, ids, by_key(defined)):
            return False
    if not same(whole, forward_incremental(model, ids[None], dialect=dialect, ops=contract, chunk=3)[0]):
        return False
    ours = record_all(model, ids, dialect=dialect)
    return all(same(x, ours[key]) for key, x in points.items()) and same(whole, forward_incremental(model, ids[None], dialect=dialect)[0])


def same(a, b):
    return a.tobytes() == b.tobytes()


def of_cache(ops):
    """Logits of a sequence, of which one was forked and rolled back, that both slots of a cache go on with; and whether all else is 0."""
    model, ids = model_of(family="bitnet-b1.58"), np.arange(LENGTH) * 5 % 40
    cache = new_cache(model.config, 2, 20, ops)
    first, is_clean = prefill(model, ids[None], cache, slots=[0], ops=ops, block=3)[0], is_zero_past_the_ends(cache)
    cache.fork(0, [1], 5)
    cache.rollback(1, 2)
    cache.resize(capacity=11)
    cache.truncate(0, 3)
    is_clean = is_clean and is_zero_past_the_ends(cache) and cache.k.shape[1:3] == (2, cache.capacity) == (2, 11)
    tokens, lengths = pad([ids[3:], ids[3:5]])
    logits = forward(model, tokens, cache, lengths, ops=ops)
    cache.clear(0)
    return [first, *logits], is_clean and is_zero_past_the_ends(cache) and cache.lengths.tolist() == [0, 5]


def is_zero_past_the_ends(cache):
    return not any(array[:, slot, length:].any() for array in (cache.k, cache.v) for slot, length in enumerate(cache.lengths))


def caches_agree():
    ids = np.arange(LENGTH) * 5 % 40
    whole = forward_full(model_of(family="bitnet-b1.58"), ids[None], ops=contract)[0]
    (first, longer, shorter), is_clean = of_cache(contract)
    if not (same(first, whole[-1]) and same(longer, whole[3:]) and same(shorter[:2], whole[3:5]) and not shorter[2:].any() and is_clean):
        return False
    ours, is_clean = of_cache(cpu)
    return all(map(same, ours, (first, longer, shorter))) and is_clean


def ways_agree():
    """A layer and a feed-forward by themselves, and the choice of a way, give what the whole pass does."""
    model, ids = model_of(family="bitnet-b1.58"), np.arange(LENGTH) * 5 % 40
    for ops in (contract, cpu):
        points = record_all(model, ids, ops=ops)
        pairs = [
            (forward_layer(model, 0, points["inp_embd", None][None], ops=ops), points["l_out", 0]),
            (feed_forward(model, 0, points["ffn_inp", 0][None], ops=ops), points["ffn_down", 0]),
            *((compute_logits(model, ids[None], mode=mode, ops=ops), points["result_output", None]) for mode in ("auto", "incremental")),
        ]
        if not all(same(x, y) for x, y in pairs):
            return False
    return True


def masks_agree():
    """A window as a mask: the definition's, in pieces too; for sequences of two lengths; and by the model's own rule."""
    window = masks.Pattern(window=3)
    whole, defined = masks.mask(7, 7, window), spec.causal_mask(7, 7, 0, 3).astype(np.float32)
    alike = (
        *(whole, np.concatenate([*masks.rows(7, 7, window, block=3)]), masks.MaskCache().get(7, 7, window)),
        *(masks.as_additive(seen) for seen in (masks.as_bool(whole), masks.mask(7, 7, window, form="bool"))),
    )
    if not all(same(x, defined) for x in alike) or masks.fully_masked(whole).any():
        return False
    if not same(masks.part(whole, 3, 5).copy(), defined[2:5, :5].copy()) or not same(
        masks.causal(2, 3), np.float32([[0, 0, -np.inf], [0, 0, 0]])
    ):
        return False
    model, (tokens, lengths) = model_of(family="llama", window=3), pad([np.arange(7), np.arange(4)])
    own = masks.batch(lengths, pattern=window)
    by_rule = forward_full(model, tokens, lengths, ops=contract)
    return all(same(forward_full(model, tokens, lengths, mask=own, strict=True, ops=ops), by_rule) for ops in (contract, cpu))


def forgetting(remembered, case):
    """A case without what a function remembers, before and after: right results hide a fault, and wrong ones outlive it."""
    remembered.cache_clear()
    try:
        return case()
    finally:
        remembered.cache_clear()


def blocks_agree():
    """Every type's blocks, by the tables of their bits as they are made anew, and by gguf-py."""
    tree = ast.parse(Path(block_formats.__file__).read_text("utf-8"))
    (table,) = (node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FORMATS")
    formats = eval(compile(ast.Expression(table), "formats", "eval"), vars(block_formats))
    assert formats.keys() == block_formats.FORMATS.keys()
    for name, record in formats.items():
        blocks = random_table(np.random.default_rng(1), name, 20, 256)
        ours = contract.blocks.weights_as(blocks.data, record)
        if not (ours == widen.float32(blocks)).all() or record.weights != blocks.type.block:
            return False
        if blocks.type not in FEW_BITS and not (ours == dequantize(blocks.data, GGMLQuantizationType(blocks.type.number))).all():
            return False
    return True


def packings_agree():
    """A ternary matrix, as kernels stream it and in files, by the contract's own way to read the one and the tests' to write the other."""
    matrix = np.random.default_rng(0).integers(-1, 2, (20, 256)).astype(np.int8)
    packed, rows = packing.pack(matrix, 0.5), np.array([3, 0, 19])
    trailer = np.zeros(packing.TRAILER, np.uint8)
    trailer[:4] = np.float32([0.5]).view(np.uint8)
    in_layouts = {"64/16": arm_layout(matrix), "4-rows": four_row_layout(matrix)}
    from_layouts = (packing.I2S_LAYOUTS[name](np.concatenate([data, trailer]), matrix.shape) for name, data in in_layouts.items())
    return (
        (contract.products.unpacked(packed.codes, packed.shape) == matrix).all()
        and (packing.unpack(packed) == matrix).all()
        and (packing.unpack_rows(packed, rows) == matrix[rows]).all()
        and all((data == packing.to_i2s(packed)).all() for data in from_layouts)
    )


def scalings_agree():
    """What scales RoPE: YaRN's factors are the definition's, LongRoPE's those of the context, and magnitudes those of their papers."""
    c, other = model_of(**YARN).config, model_of(**LONGROPE).config
    yarn, longrope = (rope.rope_fields(config, None)["rope_factors"] for config in (c, other))
    in_between = 1 / ((1 - 0.25) / 8 + 0.25)  # 1,000 positions hold 1.75 waves, a quarter of the way from 1 to 4
    pairs = (
        (yarn, spec.yarn_factors(c.rope_base, c.rope_pairs, c.yarn)),
        (longrope, 3),
        (rope.yarn_magnitude(8.0), 0.1 * np.log(8) + 1),
        (rope.longrope_magnitude(8.0, 256), (1 + np.log(8) / np.log(256)) ** 0.5),
        (rope.llama3_factors(np.array([1, 1e-4, 1.75e-3 * 2 * np.pi]), 8.0, 1.0, 4.0, 1000), [1, 8, in_between]),
    )
    return all(np.allclose(x, y, rtol=1e-6) for x, y in pairs)


YARN = {"family": "phi3", "yarn": Yarn(4.0, 16), "rope_magnitude": 1.2}
LONGROPE = {"family": "phi3", "longrope": LongRope(256, (2.0,) * 16, (3.0,) * 16)}
CASES = {
    "blocks": blocks_agree,
    "packings": packings_agree,
    "scalings": scalings_agree,
    "caches": caches_agree,
    "ways": ways_agree,
    "masks": lambda: forgetting(masks._remembered, masks_agree),
    "bitnet": partial(agree, EXACT, family="bitnet-b1.58"),
    "qwen2moe": partial(agree, EXACT, family="qwen2moe", weights="ternary", experts=4),
    "gemma2": partial(agree, EXACT, family="gemma2"),
    "gemma3": partial(agree, EXACT, family="gemma3"),
    "minicpm": partial(agree, EXACT, family="minicpm"),
    "phi2": partial(agree, EXACT, family="phi2", kv_heads=2),
    "gpt2": partial(agree, EXACT, family="gpt2", kv_heads=2),
    "GELU": partial(agree, EXACT, family="gptneox", kv_heads=2, activation="gelu"),
    "smollm3": partial(agree, EXACT, family="smollm3", rope_layers=(1,)),
    "qwen3, pooled": partial(agree, EXACT, family="qwen3", pooling="mean", inner_norms=True),
    "YaRN": partial(agree, EXACT, **YARN),
    "LongRoPE": partial(agree, EXACT, **LONGROPE),
    "YaRN, llama.cpp": partial(agree, LLAMA_CPP, **YARN),
    "gpt2, llama.cpp": partial(agree, LLAMA_CPP, family="gpt2", kv_heads=2, table="float16"),
    "bitnet.cpp": partial(agree, BITNET_CPP, family="bitnet-b1.58", table="float16"),
    "blocks, llama.cpp": partial(agree, LLAMA_CPP, family="llama", **WIDE, table="Q4_1"),
    "ternary blocks": partial(agree, EXACT, family="llama", **WIDE, weights="TQ2_0"),
    **{f"kv={kind}": partial(agree, LLAMA_CPP.with_cache(kind), family="llama", table="bfloat16") for kind in KINDS[1:]},
}
"""Whether the laws and the kernels agree, on what each of them computes anew. The cheapest come first."""

# --- what they share ------------------------------------------------------------------------------------------------------------------

SIDES = {
    "spec": ("spec", "model.dense"),
    "contract": ("contract", "engine.forward_pass"),
    "law": ("judge.law",),
    "kernels": ("kernels", "engine.forward_pass"),
}

IN_A_CONTRACT = {
    **dict.fromkeys(("checks.has_non_finite", "checks._any_carries"), "ask whether logits are numbers"),
    "float_state.is_default": "asks how the processor rounds",
    **dict.fromkeys(("launching.launch", "launching.read_only"), "start what asks that"),
}
"""The functions of kernels/ that run while the contract computes, and what for: none of them gives a number."""

NOT_PLANTED = {
    "refuses what cannot be, or names the flaw": """
        base.validate.* model.checks.* *.__post_init__ engine.cache_types.check engine.cache._written_to
        engine.cache.KVCache._check_idle engine.cache.KVCache._check_room
        engine.mask_checks._check_additive engine.mask_checks.check_causal engine.forward_pass.check_cache
        engine.tokens.check_context engine.tokens.refuse_text model.packing._check_i2_s model.records._check_*
    """,
    "runs in a forked child alone": "engine.cache._after_fork",
    "words, and sizes of memory": "base.errors.* *.__repr__ *.nbytes model.records._summary",
    "says what a model or a dialect is, before anything is computed": """
        model.families.* model.records.window_fields model.records.Config.has_choice model.records.Layer.linears
        engine.dialects.Dialect.with_cache
    """,
    "chooses among ways of the same bits": "engine.network.Runtime.observed base.block_formats.Integers.four_bits",
    "runs for kernels alone: no pass of the contract is recorded": "engine.repeats.*",
    "does nothing": "engine.network.ignore spec.ignore",
    "is declared here, and computed by backends": "engine.backend.*",
    "reads or writes files": "base.whole_file.*",
}
"""What needs no fault planted, by names with stars, and why: no result is made of a number that it gives."""
EXEMPT = " ".join(NOT_PLANTED.values()).split()


def shared():
    """The functions of all modules that two of the four reach by their imports, by code, without those of kernels/."""
    by_side = [reached(*rooms) for rooms in SIDES.values()]
    modules = [module for module in MODULES if sum(module in side for side in by_side) > 1 and not module.startswith("bitnet_np.kernels")]
    return {code: function for module in modules for code, function in functions(module).items()}


def is_right(case):
    products._cached.cache_clear()
    try:
        return bool(CASES[case]())
    except Exception:
        return False


def name_of(function):
    return f"{function.__module__.removeprefix('bitnet_np.')}.{function.__qualname__}"


def test_the_contract_computes_without_kernels():
    kernels = {code: function for module in MODULES if ".kernels." in module for code, function in functions(module).items()}
    ids, ran = np.arange(LENGTH)[None], {}
    for dialect, table in ((EXACT, "float32"), (BITNET_CPP, "float32"), (LLAMA_CPP.with_cache("q8_0"), "bfloat16")):
        model = model_of(family="gpt2", kv_heads=2, table=table)
        decode = partial(forward_incremental, model, ids, dialect=dialect, ops=contract)
        decode()  # and load what asks for numbers that are not finite
        ran |= called(decode, kernels)
    assert {name_of(kernels[code]).removeprefix("kernels.") for code in ran} == IN_A_CONTRACT.keys()


@pytest.mark.parametrize("side", [cpu, contract], ids=["kernels", "contract"])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_rounding_is_wrong_on_one_side_alone(side, kind):
    assert is_right(f"kv={kind}")
    with planted(inspect.unwrap(side.round_as)):
        assert not is_right(f"kv={kind}")


def test_a_fault_in_what_is_shared_is_noticed(is_thorough):
    """Every function that the cases call, in a usual run every third, is made wrong by itself, and one of them finds it. Those that never
    give a number stay."""
    every = shared()
    assert [name for name in EXEMPT if not any(fnmatch(name_of(function), name) for function in every.values())] == []
    found = {code: function for code, function in every.items() if not any(fnmatch(name_of(function), name) for name in EXEMPT)}
    assert [case for case in CASES if not CASES[case]()] == []  # which makes the models, too
    calls = {case: called(CASES[case], found) for case in CASES}
    unnoticed = []
    for code, function in list(found.items())[:: 1 if is_thorough else 3]:
        those = [case for case, ran in calls.items() if code in ran and (ran[code] or gives_nothing(function))]
        with planted(function):
            if those and all(map(is_right, those)):
                unnoticed.append(name_of(function))
    assert unnoticed == []
    uncalled = [name_of(function) for code, function in found.items() if not any(code in ran for ran in calls.values())]
    assert uncalled == []
