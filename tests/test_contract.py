"""The contract in plain NumPy: no kernel runs in it, and every operation, path, family and cache has the bits of the kernels.

Operations are held to the definition, too, by the judge's law for single operations, as tests/engine/test_network.py does for whole models.
"""

import math
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from child import WITHOUT_NUMBA, run_python
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits, family_shapes, padded, random_model, random_tokens, seeds
from operation_draws import CASES, Draw, same

import bitnet_np as bn
from bitnet_np import contract
from bitnet_np.base.errors import CapacityError, NonFiniteError
from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, Q4_K, Q8_0
from bitnet_np.contract import arrays, blocks, numbers, products
from bitnet_np.engine.backend import OPERATIONS
from bitnet_np.engine.dialects import BITNET_CPP, EXACT, LLAMA_CPP
from bitnet_np.judge.bounds import within
from bitnet_np.judge.law import definition
from bitnet_np.judge.law import running_error as law
from bitnet_np.judge.law.expected import WIDE
from bitnet_np.judge.law.expression import Node, tensor
from bitnet_np.judge.law.functions import ACTIVATION_NAMES
from bitnet_np.judge.verdict import Verdict
from bitnet_np.kernels import cpu, scalar
from bitnet_np.kernels.ggml import activations
from bitnet_np.testing.models import random_table
from bitnet_np.traces.points import Key

f32 = np.float32

# --- without kernels ------------------------------------------------------------------------------------------------------------------

ALONE = """
import numpy as np
from bitnet_np import contract
print(contract.rms_norm(np.float32([[3, 4]]), np.float32([1, 1]), 0.0).tolist())
print(sorted(name for name in sys.modules if name.startswith("bitnet_np.")))
"""


def test_it_runs_where_there_is_no_numba():
    package = Path(contract.__file__).parents[1]
    result, modules = run_python(WITHOUT_NUMBA + ALONE, package).splitlines()
    assert eval(result)[0] == pytest.approx([3 / 12.5**0.5, 4 / 12.5**0.5])
    tables = ("base", "base.block_formats", "base.errors", "base.tensor_types")
    own = tuple(f"contract.{name}" for name in ("arrays", "attention", "blocks", "experts", "numbers", "products", "rows"))
    assert eval(modules) == sorted(f"bitnet_np.{name}" for name in ("contract", *own, *tables))


def test_its_constants_are_those_of_the_kernels():
    ours = {name: value for name, value in vars(numbers).items() if name.isupper()}
    ours |= {"CHUNK": contract.CHUNK, "PI_2": numbers.PI_2, "SIN": numbers.SIN, "COS": numbers.COS}
    for name, value in ours.items():
        if name == "LANES":
            theirs = cpu.quantize.__globals__["LANES"]
        else:
            theirs = getattr(scalar, name, None) if hasattr(scalar, name) else getattr(scalar, f"_{name}")
        assert value == theirs, name


# --- every operation ------------------------------------------------------------------------------------------------------------------

WITHOUT_NUMBERS = {"storage", "upload", "empty", "resident", "to_host", "wait", "mark"}


EXPRESSIONS = {
    "rms_norm": definition.rms,
    "layer_norm": definition.layer_norm,
    "mix": partial(definition.mixed, None),
    "top_experts": lambda logits, k: Node("experts", (logits,), what=k),
    **{name if name in OPERATIONS else f"{name}_gate": partial(definition.gated, function) for name, function in ACTIVATION_NAMES.items()},
}
"""The judge's expressions of what an operation of a backend takes.

Experts' weights are left out: many of the logits drawn are equal, and share their errors.
"""


def expected(name, arguments):
    """What the judge's law says of an operation: arrays of rows are tensors, those of one row are weights of the model."""
    keys = {Key(f"argument {i}", None): x for i, x in enumerate(arguments) if np.ndim(x) > 1}
    nodes = [tensor(Key(f"argument {i}", None)) if np.ndim(x) > 1 else x for i, x in enumerate(arguments)]
    return law.expected(EXPRESSIONS[name](*nodes), {key: x.astype(np.float64) for key, x in keys.items()}, WIDE)


def test_every_operation_has_a_case():
    assert set(CASES) | WITHOUT_NUMBERS == set(OPERATIONS)
    assert all(callable(getattr(contract, name)) for name in OPERATIONS)
    assert (contract.device, contract.exact_only) == ("cpu", False)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("edges", [False, True], ids=["numbers", "edges"])
@pytest.mark.parametrize("name", CASES)
@given(seed=seeds)
@settings(max_examples=25)
def test_an_operation_has_the_bits_of_the_kernel_and_is_the_definitions(name, edges, seed):
    """By the judge's law, where it has the operation. Arguments stay as they are, and no result is in their memory."""
    with np.errstate(all="ignore"):
        arguments = CASES[name](Draw(np.random.default_rng(seed), edges))
        results = []
        for ops in (contract, cpu):
            given = [each for each in arguments if isinstance(each, np.ndarray)]
            before = [each.tobytes() for each in given]
            result = getattr(ops, name)(*arguments)
            results.append(result)
            assert [each.tobytes() for each in given] == before
            made = result if isinstance(result, tuple | list) else [result]
            assert not any(np.may_share_memory(array, each) for array in made for each in given)
    assert same(*results)
    if name in EXPRESSIONS and not edges:
        verdict, reason, _ = within(expected(name, arguments), results[0].astype(np.float64))
        assert verdict <= Verdict.ROUNDING, reason


@pytest.mark.parametrize("sign", [1, -1])
def test_a_fused_sum_is_rounded_once(sign):
    """Half a unit in the last place less 2^-70, which float64 would take for the tie."""
    almost_half = f32(1 + 2.0**-23), f32((1 - 2.0**-23) * 2.0**-24)
    c = f32(1 + 2.0**-23 * np.arange(1, 5))
    assert (numbers.fma(sign * almost_half[0], almost_half[1], c) == c).all()


# exact values, and errors in units of 2^-24 of them: a unit in the last place is two at most
FUNCTIONS = {
    "tanh": (np.tanh, lambda x: 5.4),
    "normal_cdf": (np.vectorize(lambda x: math.erfc(-x / math.sqrt(2)) / 2), lambda x: 5 * (1 + x * x / 2)),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_of_one_number_is_as_near_as_the_kernel_says(name):
    """Over all sizes of numbers. tests/kernels/test_kernels.py has the exponential, tests below the operations that are made of these."""
    exact, units = FUNCTIONS[name]
    x = np.linspace(f32(2.0**-30).view(np.uint32), f32(8.48).view(np.uint32), 30_000).astype(np.uint32).view(f32)
    x = np.concatenate([-x, x])
    expected = exact(x.astype(np.float64))
    assert (np.abs(getattr(numbers, name)(x) - expected) <= units(x.astype(np.float64)) * 2.0**-24 * np.abs(expected)).all()


@pytest.mark.parametrize("kind", ALL_BLOCK_TYPES, ids=lambda kind: kind.name)
def test_every_type_of_blocks_has_the_bits_of_the_kernels(kind):
    """The draws above leave out some of them."""
    for rows, n, width in ((2, 5, 512), (9, 70, 1280)):
        x, data = Draw(np.random.default_rng(0)).numbers(rows, width), random_table(np.random.default_rng(1), kind.name, n, width).data
        tokens = np.arange(5)
        assert same(contract.embed_blocks(data, kind, tokens), cpu.embed_blocks(data, kind, tokens))
        assert same(contract.matmul_blocks(x, data, kind), cpu.matmul_blocks(x, data, kind))


@pytest.mark.parametrize("name", ["matmul", "matmul_blocks", "matmuls_blocks_as_llama_cpp", "ternary_matmul", "attend", "attend_float16"])
def test_what_is_computed_together_changes_no_bit(monkeypatch, name):
    """Some outputs or rows at a time, because of the memory that they take."""
    arguments = CASES[name](Draw(np.random.default_rng(1)))
    expected = getattr(contract, name)(*arguments)
    monkeypatch.setattr(arrays, "SIZE", 700)
    monkeypatch.setattr(products, "OUTPUTS", 3)
    assert same(getattr(contract, name)(*arguments), expected)


@pytest.mark.parametrize("kind", [Q4_K, Q8_0], ids=lambda kind: kind.name)
@given(seed=seeds, exponent=st.integers(-30, 30) | st.sampled_from([-133, -142]), steps=st.sampled_from([0, 4, 254]))
def test_activations_are_rounded_as_the_kernels_round_them(kind, seed, exponent, steps):
    """Also those that are no numbers, or too small to divide by, and multiples of a number: rounding ties, several of the largest
    magnitude, blocks of zeros.
    """
    rng = np.random.default_rng(seed)
    x = Draw(rng, edges=bool(seed % 2)).numbers(3, 512)
    if steps:
        x = rng.integers(-steps, steps + 1, x.shape) * rng.choice([0, 0.5], (3, 1)).astype(f32)
    with np.errstate(all="ignore"):
        x = np.ldexp(x, exponent).astype(f32)
        codes, scale, sums = blocks.rounded(x, kind)
        *theirs, their_sums = activations.rounded(x, kind.block)
        assert same((codes, scale), theirs)
        widened = activations.round_as_q8_k(x) if kind.block == 256 else activations.round_as_q8_0(x)
        assert same(widened, codes * np.repeat(scale, x.shape[1] // scale.shape[1], axis=1))
        assert kind.block == 256 or same(sums, their_sums)


# --- whole models ---------------------------------------------------------------------------------------------------------------------

DIALECTS = [EXACT, BITNET_CPP, LLAMA_CPP, EXACT.with_cache("bfloat16"), LLAMA_CPP.with_cache("float16")]


def small(shape: dict) -> dict:
    """A shape whose numbers plain NumPy computes in a moment."""
    return {**shape, "width": min(shape["width"], 64), "ffn": min(shape["ffn"], 45), "n_layers": min(shape["n_layers"], 2)}


@given(shape=family_shapes(), seed=seeds, counts=st.lists(st.integers(1, 12), min_size=1, max_size=2), dialect=st.sampled_from(DIALECTS))
@settings(max_examples=40)
def test_every_family_has_the_bits_of_the_kernels(shape, seed, counts, dialect):
    """Whole sequences; and decoding token by token, the first of each in one pass."""
    model, rng = random_model(seed, **small(shape)), np.random.default_rng(seed)
    tokens, lengths = padded(rng, [random_tokens(rng, model, n) for n in counts])
    expected = bn.forward_full(model, tokens, lengths, dialect=dialect)
    assert_same_bits(bn.forward_full(model, tokens, lengths, dialect=dialect, ops=contract), expected)
    assert_same_bits(bn.forward_incremental(model, tokens, lengths, dialect=dialect, ops=contract), expected)


# --- storage --------------------------------------------------------------------------------------------------------------------------


@given(seed=seeds, dtype=st.sampled_from([np.float32, np.float16]))
@settings(max_examples=15)
def test_a_cache_in_its_storage_holds_what_the_kernels_does(seed, dtype):
    """Chunks, forked, rolled back and resized: the same bytes, and the same logits."""
    model, rng = random_model(seed, width=32, ffn=36, heads=2, kv_heads=1, head_dim=6, vocab=20, window=20), np.random.default_rng(seed)
    tokens, cut = random_tokens(rng, model, 1, 200), int(rng.integers(1, 199))
    caches, logits = [], []
    for ops, storage in ((cpu, cpu.storage()), (contract, contract.storage()), (contract, cpu.storage())):
        cache = bn.KVCache(model.config, 2, 300, dtype, storage=storage)
        seen = [bn.prefill(model, tokens[:, :cut], cache, slots=[0], ops=ops, block=90)]
        seen.append(bn.forward(model, tokens[:, cut:], cache, slots=[0], ops=ops, last_only=True))
        cache.rollback(0, 1)
        cache.fork(0, [1])
        seen.append(bn.forward(model, [[1], [2]], cache, ops=ops, last_only=True))
        cache.resize(capacity=250)
        cache.clear(0)
        caches.append(cache)
        logits.append(np.concatenate(seen))
    for cache, other in zip(caches[1:], logits[1:], strict=True):
        assert_same_bits(other, logits[0])
        assert (cache.k.tobytes(), cache.v.tobytes()) == (caches[0].k.tobytes(), caches[0].v.tobytes())


def test_what_a_storage_cannot_hold_is_an_error():
    model, storage = random_model(0), contract.storage()
    with pytest.raises(CapacityError, match="there is no memory for 9 sequences of 1152921504606846976 positions"):
        bn.KVCache(model.config, 9, 2**60, storage=storage)
    cache = bn.KVCache(model.config, 1, 4, np.float16, storage=storage)
    large = np.full((1, 3, 20), 1e5, f32)
    with pytest.raises(NonFiniteError, match="a value of layer 1 is not a number within float16's range"):
        cache.storage.write(1, cache.k[1], cache.v[1], np.array([0]), np.array([0]), np.zeros_like(large), large)
