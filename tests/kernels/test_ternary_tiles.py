"""Ternary products by each way: on matrix tiles, the processor's or their plain twin, and on vectors, for few tokens or for many."""

import ctypes
import sys
from contextlib import contextmanager
from unittest import mock

import numpy as np
import pytest
from assembly import X86, assembly, lowered
from child import run_python
from hypothesis import example, given, settings
from hypothesis import strategies as st
from models import assert_same_bits, seeds
from numba import njit, types

from bitnet_np import contract, spec
from bitnet_np.kernels import cpu, launching, ternary, ternary_product, ternary_tiles
from bitnet_np.kernels.fast import amx, emit, simd, ternary_steps
from bitnet_np.kernels.processor import cpu_features
from bitnet_np.model import packing

UNITS = {"twin": amx.PLAIN, "processor": amx.PROCESSOR, "vectors": None, "as tokens are few or many": None}
on_each_unit = pytest.mark.parametrize("unit", UNITS)


@contextmanager
def on(unit):
    """Calls of any number of tokens run on this unit, from codes that are unpacked once, or as the number of tokens decides."""
    if unit == "processor" and amx.why_absent():
        pytest.skip(amx.why_absent())
    least = {"vectors": (ternary_product, 1), "as tokens are few or many": (ternary_product, ternary_product.LEAST)}
    module, tokens = least.get(unit, (ternary_tiles, 1))
    with mock.patch.multiple(amx, unit=lambda: UNITS[unit]), mock.patch.object(module, "LEAST", tokens):
        yield


def products(rng, rows, width, heights, scale):
    """Results and what they should be, of matrices of these heights and one input. The contract is held to the definition."""
    q = rng.integers(-127, 128, (rows, width)).astype(np.int8)
    matrices = [rng.integers(-1, 2, (height, width)) for height in heights]
    packed = [packing.pack(matrix, rng.uniform(0.01, 2)) for matrix in matrices]
    results = cpu.ternary_matmuls(q, scale, *((p.codes, p.scale, p.shape[0]) for p in packed))
    expected = [contract.ternary_matmul(q, scale, p.codes, p.scale, len(m)) for m, p in zip(matrices, packed, strict=True)]
    for matrix, p, product in zip(matrices, packed, expected, strict=True):
        exact = spec.ternary_matmul(q.astype(np.float64), scale[:, None].astype(np.float64), matrix, float(p.scale))
        some = np.isfinite(product)
        rounded = 2 * 2.0**-24 / (1 - 2.0**-23) * np.abs(exact[some]) + 2.0**-148  # in the division and in the product
        assert (np.abs(product[some] - exact[some]) <= rounded).all()
    return zip(results, expected, strict=True)


@on_each_unit
@pytest.mark.parametrize("small", [0, 1 << 60], ids=["shared", "alone"])
@given(
    seed=seeds,
    rows=st.integers(1, 70),
    width=st.integers(1, 1200),
    heights=st.lists(st.integers(1, 70), min_size=1, max_size=3),
)
@example(seed=0, rows=33, width=1025, heights=[33, 16, 17])  # three blocks of columns, and one of a single step
@example(seed=0, rows=16, width=512, heights=[32])
@example(seed=0, rows=17, width=64, heights=[31, 1])
@example(seed=0, rows=5, width=257, heights=[65, 16, 1])  # one step more than words hold
@example(seed=0, rows=4, width=256, heights=[64])
@example(seed=0, rows=1, width=40, heights=[33, 16, 1])
@example(seed=0, rows=2, width=257, heights=[70, 5])
@example(seed=0, rows=7, width=300, heights=[1, 65, 70])
@settings(max_examples=25)
def test_products_have_the_bits_of_the_contract(unit, small, seed, rows, width, heights):
    rng = np.random.default_rng(seed)
    with on(unit), mock.patch.object(launching, "SMALL", small):
        for result, expected in products(rng, rows, width, heights, np.exp2(rng.uniform(-5, 20, rows)).astype(np.float32)):
            assert_same_bits(result, expected)


@on_each_unit
@pytest.mark.parametrize("code", [-128, -127, 127])
def test_the_largest_sums_fit(unit, code):
    """Words hold 16 bits. A code of -128 comes from no quantiser, but from callers."""
    weights = packing.pack(np.ones((40, 1024), int), 1.0)
    with on(unit):
        for rows in (1, 2, 5):
            q = np.full((rows, 1024), code, np.int8)
            assert (cpu.ternary_matmul(q, np.ones(rows, np.float32), weights.codes, weights.scale, 40) == 1024 * code).all()


@pytest.mark.parametrize("unit", ["twin", "processor"])
def test_activations_that_do_not_fit_a_cache_are_multiplied_part_by_part(unit, monkeypatch):
    monkeypatch.setattr(ternary_tiles, "_SHARED", 1 << 12)
    monkeypatch.setattr(ternary_tiles, "ternary_matmul", launching.parallel(ternary_tiles.ternary_matmul.body.py_func))
    with on(unit):
        for result, expected in products(np.random.default_rng(1), 70, 200, [40, 5], np.full(70, 3, np.float32)):
            assert_same_bits(result, expected)


@on_each_unit
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("scale", [2.0**-61, 2.0**-60, 2.0**60, 2.0**61, 1e-36, 1e38, np.nan])
def test_scales_of_any_size_are_divided_by(unit, scale):
    """Reciprocals serve for moderate scales only. One row with another makes all rows divide."""
    scales = np.full(40, 3, np.float32)
    scales[7] = scale
    with on(unit):
        for result, expected in products(np.random.default_rng(1), 40, 70, [40], scales):
            assert_same_bits(np.nan_to_num(result, nan=7), np.nan_to_num(expected, nan=7))


def test_few_tokens_and_processors_without_tiles_use_vectors(monkeypatch):
    used = []
    monkeypatch.setattr(ternary_tiles, "ternary_matmul", "tiles")
    for name in ("few_tokens", "many_tokens"):
        monkeypatch.setattr(ternary_product, name, "vectors")
    monkeypatch.setattr(ternary, "launch", lambda kernel, *_: used.append(kernel))
    weights = packing.pack(np.ones((3, 64), int), 1.0)
    for unit, rows in ((amx.PLAIN, ternary_tiles.LEAST), (amx.PLAIN, ternary_tiles.LEAST - 1), (None, 99)):
        monkeypatch.setattr(amx, "unit", lambda unit=unit: unit)
        cpu.ternary_matmul(np.ones((rows, 64), np.int8), np.ones(rows, np.float32), weights.codes, weights.scale, 3)
    assert used == ["tiles", "vectors", "vectors"]


def test_the_inner_step_is_four_dots_of_tiles_and_calls_nothing():
    """Compiled for a processor with tiles, and read: between the first and the last instruction on tiles of a step nothing is called."""
    n, unit = types.intp, types.uint64
    lines = assembly(lowered(ternary_tiles._multiply, (unit, n, n, n), "avx512-vnni"), X86, "sapphirerapids", "")
    names = [line[0] for line in lines if line]
    first, last = names.index("tileloadd"), len(names) - names[::-1].index("tdpbssd")
    assert [name for name in names[first:last] if name.startswith(("tile", "tdp"))] == (
        ["tileloadd", "tileloadd", "tdpbssd", "tileloadd", "tdpbssd", "tileloadd", "tdpbssd", "tdpbssd"]
    )
    assert not [name for name in names[first:last] if name.startswith("call")]


# --- the system -----------------------------------------------------------------------------------------------------------------------

HAS_TILES = {"amx-tile", "amx-int8"} <= cpu_features() and sys.platform == "linux"
with_tiles = pytest.mark.skipif(not HAS_TILES, reason="no processor with tiles, or not Linux")

BEGIN = """
import ctypes, os, signal, threading
import numpy as np
from bitnet_np.model import packing
from bitnet_np.kernels import cpu
from bitnet_np.kernels.fast import amx
rng = np.random.default_rng(0)
q, scale = rng.integers(-127, 128, (64, 640)).astype(np.int8), np.full(64, 3, np.float32)
weights = packing.pack(rng.integers(-1, 2, (320, 640)), 0.5)
product = lambda: cpu.ternary_matmul(q, scale, weights.codes, weights.scale, 320).tobytes()
"""


def run(program):
    return run_python(BEGIN + program).splitlines()


VECTORS = """
unit, amx.unit = amx.unit, lambda: None
expected = product()
amx.unit = unit
"""


@with_tiles
def test_where_linux_refuses_products_are_the_same():
    """A stack for signals without room for tiles makes it refuse."""
    small = """
class Stack(ctypes.Structure):
    _fields_ = [("start", ctypes.c_void_p), ("flags", ctypes.c_int), ("size", ctypes.c_size_t)]
room = ctypes.create_string_buffer(6000)
assert ctypes.CDLL(None).sigaltstack(ctypes.byref(Stack(ctypes.addressof(room), 0, 6000)), None) == 0
"""
    check = "print(amx.why_absent()); print(product() == expected)"
    assert run(VECTORS + check) == ["", "True"]
    reason, same = run(small + VECTORS + check)
    assert reason.startswith("Linux refuses permission, error ")
    assert same == "True"


@with_tiles
def test_signals_in_the_middle_change_nothing():
    """Each of thousands of signals saves and restores the tiles."""
    program = """
count = 0
def handler(*_):
    global count
    count += 1
signal.signal(signal.SIGALRM, handler)
signal.setitimer(signal.ITIMER_REAL, 1e-4, 1e-4)
same = all(product() == expected for _ in range(500))
signal.setitimer(signal.ITIMER_REAL, 0)
print(same, count > 50)
"""
    assert run(VECTORS + program) == ["True True"]


@with_tiles
def test_a_forked_child_and_threads_have_tiles_too():
    program = """
same = [product() == expected]
child = os.fork()
if child == 0:
    os._exit(0 if amx.why_absent() == "" and product() == expected else 1)
same.append(os.waitpid(child, 0)[1] == 0)
def work():
    same.append(all(product() == expected for _ in range(100)))
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
for thread in threads: thread.join()
print(*same)
"""
    assert run(VECTORS + program) == ["True True True True True"]


@pytest.mark.parametrize(
    ("features", "platform", "library", "reason"),
    [
        ({"amx-tile", "avx512bw"}, "linux", None, "amx-int8 is not among"),
        ({"amx-tile", "amx-int8", "avx512bw"}, "win32", None, "not known how to ask win32"),
        ({"amx-tile", "amx-int8", "avx512bw"}, "linux", OSError("no library"), "no way to ask Linux for permission: no library"),
        ({"amx-tile", "amx-int8", "avx512bw"}, "linux", lambda *_: -1, "Linux refuses permission, error "),
        ({"amx-tile", "amx-int8", "avx512bw"}, "linux", lambda *_: 0, ""),
    ],
)
def test_the_reason_why_there_are_no_tiles(monkeypatch, features, platform, library, reason):
    monkeypatch.setattr(amx, "cpu_features", lambda: features)
    monkeypatch.setattr(amx, "architecture", lambda: "x86_64")
    monkeypatch.setattr(sys, "platform", platform)
    loaded = {"side_effect": library} if isinstance(library, OSError) else {"return_value": mock.Mock(syscall=library)}
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(**loaded))
    answer = amx.why_absent.__wrapped__()
    assert answer.startswith(reason)
    assert bool(answer) == bool(reason)


# --- division -------------------------------------------------------------------------------------------------------------------------


@njit(parallel=False, error_model="numpy")
def _worst_quotients(first, last, most, wrong):
    """Try b = first..last of 2^23..2^24 with every a whose quotient is within `most` units of a middle between two float32.

    A quotient of a >= b has a middle m / 2^24, of a smaller a m / 2^25, m odd: a * 2^24 (2^25) - b * m is `j`.
    """
    tried = 0
    for b in range(first, last):
        twos = 0
        while b >> twos & 1 == 0:
            twos += 1
        odd = b >> twos
        inverse = odd  # modulo 2^3; each round doubles the bits
        for _ in range(5):
            inverse = inverse * (2 - odd * inverse) & 0xFFFFFFFF
        for bits in (24, 25):
            for j in range(-most, most + 1):
                if j == 0 or j & ((1 << twos) - 1):
                    continue
                period = 1 << bits - twos
                m = (-(j >> twos) * inverse) & (period - 1)
                while m < 1 << 25:
                    a = (b * m + j) >> bits
                    if m & 1 and m > 1 << 24 and 1 << 23 <= a < 1 << 24 and (a >= b) == (bits == 24):
                        tried += 1
                        x, y = np.float32(a), np.float32(b)
                        inverted = np.float32(1) / y
                        guess = x * inverted
                        corrected = simd.fma(simd.fma(-guess, y, x), inverted, guess)
                        if corrected != x / y:
                            wrong[0] = a
                            wrong[1] = b
                            return -1
                    m += period
    return tried


def test_division_by_reciprocals_is_right_wherever_it_is_close():
    """The proof of ternary_steps.py's `_by_reciprocal` leaves these cases, all of which are tried."""
    wrong = np.zeros(2, np.int64)
    tried = _worst_quotients(1 << 23, 1 << 24, 8, wrong)
    assert tried > 30_000_000, wrong


def test_processors_without_fused_multiply_add_divide():
    """By any scale, and by an infinite one: tests/support/processors.py compares it with others."""
    range_of_reciprocals = ternary_product._LEAST_DIVISOR, ternary_product._MOST_DIVISOR
    assert range_of_reciprocals == (ternary_steps.MODERATE if emit.has_fma() else (np.inf, -np.inf))
