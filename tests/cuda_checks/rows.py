"""Norms, the quantiser, RoPE, writes to caches, masks, and kernels over single numbers."""

import numpy as np
from numpy.typing import NDArray

from bitnet_np import selftest
from bitnet_np.dispatch import Above, make_mask
from bitnet_np.gpu import arrays
from bitnet_np.gpu.backend import Cuda
from bitnet_np.kernels import cpu, masks
from bitnet_np.kernels.cuda import norms
from bitnet_np.kernels.cuda.target import PIECE
from bitnet_np.masks import Pattern, mask
from cuda_checks.common import check, device, equal_where_finite, few_threads, normal, odd_rows, rng, same


def _quantized_alike(on: Cuda, quantized: tuple, x: NDArray[np.float32]) -> None:
    """Codes, their sums, and scales are those of the CPU for x."""
    codes, scale = cpu.quantize(x)
    np.testing.assert_array_equal(on.to_host(quantized[0]), codes)
    equal_where_finite(on, quantized[1], scale)
    words = arrays.now(quantized[0])
    sums = on.to_host(words.words).view(np.int32).reshape(-1, words.row_words)[: len(x), -4]
    np.testing.assert_array_equal(sums, codes.sum(axis=1, dtype=np.int32))


@check
def quantize() -> None:
    on = device()
    for width in (1, 33, 128, 300):
        x = odd_rows(width)
        _quantized_alike(on, on.quantize(on.upload(x)), x)


@check
def rms_norm() -> None:
    """Few rows get large blocks; more rows than there are processors get smaller ones."""
    for on in (device(), device(processors=1)):
        for width in (1, 33, 300, PIECE + 70):  # the last is more than fits shared memory at once
            x, gain = odd_rows(width), normal(width, seed=1)
            out = on.rms_norm(on.upload(x), on.upload(gain), 1e-5)
            ours = cpu.rms_norm(x, gain, 1e-5)
            equal_where_finite(on, out, ours)
            _quantized_alike(on, on.quantize(out), ours)


@check
def norms_of_what_comes_before() -> None:
    """The norm that reads a sum or a gate works it out, if nobody has read it before, and leaves it for others."""
    for name, width, processors in (
        ("add", 33, 132),
        ("relu2_gate", 300, 132),
        ("silu_gate", 20, 1),  # blocks of 256 threads
        ("relu2_gate", norms.WIDEST, 132),
        ("relu2_gate", 6912, 1),  # blocks of 512
        ("silu_gate", norms.WIDEST + 20, 132),
    ):
        on = device(processors)
        a, b, gain = normal(3, width), normal(3, width, seed=1), normal(width, seed=2)
        ours = getattr(cpu, name)(a, b)
        uploaded = getattr(on, name)(on.upload(a), on.upload(b))
        normed = on.rms_norm(uploaded, on.upload(gain), 1e-5)
        same(on, normed, cpu.rms_norm(ours, gain, 1e-5))
        _quantized_alike(on, on.quantize(normed), cpu.rms_norm(ours, gain, 1e-5))
        same(on, uploaded, ours)
        again = on.rms_norm(uploaded, on.upload(gain), 1e-5)
        _quantized_alike(on, on.quantize(again), cpu.rms_norm(ours, gain, 1e-5))
        by_16_bytes = width % 4 == 0 and width <= norms.WIDEST
        assert again.is_open() == by_16_bytes  # codes leave the norm itself to whoever asks for it
        same(on, again, cpu.rms_norm(ours, gain, 1e-5))
        same(on, on.add(uploaded, uploaded), ours + ours)


@check
def norms_fold_their_lanes_by_halving() -> None:
    on, (x, _) = device(), selftest.rows_that_tell_lanes()
    gain = np.ones(x.shape[1], np.float32)
    same(on, on.rms_norm(on.upload(x), on.upload(gain), 0.0), cpu.rms_norm(x, gain, 0.0))


@check
def layer_norm() -> None:
    on = device()
    for width in (1, 33, PIECE + 90):
        x, gain, bias = normal(2, width) + 3, normal(width, seed=1), normal(width, seed=2)
        x[-1, -1] = 1e30 if width == 33 else x[-1, -1]  # its square is not a float32
        x_uploaded, gain_uploaded = on.upload(x), on.upload(gain)
        for b, b_uploaded in ((bias, on.upload(bias)), (None, None)):
            equal_where_finite(on, on.layer_norm(x_uploaded, gain_uploaded, b_uploaded, 1e-5), cpu.layer_norm(x, gain, b, 1e-5))


@check
def numbers() -> None:
    on = device()
    a, b = odd_rows(20), normal(6, 20, seed=1)
    a[0, :8] = [-0.0, 0.0, 90, -90, -104, 9, -9, 1]
    a_uploaded, b_uploaded = on.upload(a), on.upload(b)
    with np.errstate(all="ignore"):
        for name in ("add", "relu2_gate", "silu_gate", "gelu_gate"):
            equal_where_finite(on, getattr(on, name)(a_uploaded, b_uploaded), getattr(cpu, name)(a, b))
        for name in ("gelu", "gelu_tanh"):
            equal_where_finite(on, getattr(on, name)(a_uploaded), getattr(cpu, name)(a))
        equal_where_finite(on, on.soft_cap(a_uploaded, np.float32(3)), cpu.soft_cap(a, np.float32(3)))
        equal_where_finite(on, on.add_bias(a_uploaded, on.upload(b[0])), cpu.add_bias(a, b[0]))
        equal_where_finite(on, on.scaled(a_uploaded, np.float32(0.3)), cpu.scaled(a, np.float32(0.3)))
    rows = np.array([4, 0, 0])
    same(on, on.take(b_uploaded, on.upload(rows)), cpu.take(b, rows))


@check
def rope() -> None:
    on = device()
    x, angle = normal(3, 2, 10), rng().uniform(0, 1e5, (3, 4))
    cos, sin = cpu.rotations(angle)
    rotations = on.rotations(angle)
    for name in ("rope", "rope_adjacent"):
        rotated, ours = getattr(on, name)(on.upload(x), *rotations), getattr(cpu, name)(x, cos, sin)
        same(on, rotated, ours)
        same(on, on.add(rotated, rotated), ours + ours)


@check
def largest_of_rows() -> None:
    """The first of equal ones, zeros of both signs among them, in rows shorter and longer than a block looks at; none beside a NaN."""
    on = device()
    for width in (1, 5, 1024 * 8 + 3):
        x = -np.abs(normal(9, width))
        x[1], x[2], x[8] = 0, -0.0, -3e38
        x[3, width // 2], x[4, -1], x[5, width // 3 :] = 0.0, 7, 2.5
        if width > 1:
            x[2, 1], x[3, 0] = 0.0, -0.0
        expected = x.argmax(axis=1)
        for row, number in ((6, np.nan), (7, -np.inf), (0, np.inf)):
            x[row, width - 1], expected[row] = number, -1
        on.largest(on.upload(x), out := on.empty((len(x),), np.int64))
        np.testing.assert_array_equal(on.to_host(out), expected)


@check
def keep_erase_carry() -> None:
    """Writes keys and values to their places in a ring, erases some and copies some."""
    on, slot, position = device(), np.array([0, 2, 2]), np.array([3, 6, 9])
    k, v, angle = normal(3, 2, 6), normal(3, 2, 6, seed=1), rng().uniform(0, 9, (3, 3))
    k[1, 0, 5], v[0, 0, 0], v[2, 1, 1] = 70000, 1e-6, 65519.9
    ours = cpu.rope(k, *cpu.rotations(angle)), v
    for dtype in (np.float32, np.int16):
        caches = [np.zeros((2, 3, 5, 2, 6), dtype) for _ in ours]
        uploaded = [on.upload(array) for array in caches]
        rotated = on.rope(on.upload(k), *on.rotations(angle))
        on.keep(rotated, on.upload(v), on.upload(slot), on.upload(position), *(array[1] for array in uploaded))
        for array, new in zip(caches, ours, strict=True):
            with np.errstate(over="ignore"):
                half = new.astype(np.float16)
            half[~np.isfinite(half)] = np.float16(np.nan)
            array[1, slot, position % 5] = new if dtype == np.float32 else half.view(np.int16)
        for array, theirs in zip(caches, uploaded, strict=True):
            np.testing.assert_array_equal(on.to_host(theirs), array)
    on.carry(uploaded[0], 2, uploaded[1], 1, 6, 10)
    caches[1][:, 1, np.arange(6, 10) % 5] = caches[0][:, 2, np.arange(6, 10) % 5]
    np.testing.assert_array_equal(on.to_host(uploaded[1]), caches[1])
    on.erase(uploaded[1], 2, 4, 7)
    caches[1][:, 2, [4, 0, 1]] = 0
    np.testing.assert_array_equal(on.to_host(uploaded[1]), caches[1])


@check
def few_threads_for_many_numbers() -> None:
    """A thread of a kernel over single numbers takes several where there are more numbers than threads."""
    with few_threads():
        for each in (numbers, rope, keep_erase_carry, spread, fill_mask):
            each()


@check
def spread() -> None:
    on = device()
    x, slot, position = normal(4, 2, 3), np.array([0, 0, 2, 2]), np.array([0, 1, 0, 4])
    uploaded = on.upload(x), on.upload(slot), on.upload(position)
    same(on, on.spread(*uploaded, (3, 5)), cpu.spread(x, slot, position, (3, 5)))


@check
def fill_mask() -> None:
    on = device()
    queries, past, keys = np.array([3, 2]), np.array([2, 0]), np.array([5, 2])
    for pattern in ((0, 0, 0, 0), (2, 0, 0, 0), (0, 3, 0, 0), (0, 0, 2, 1)):
        ours, out = np.empty((2, 3, 5), np.float32), on.empty((2, 3, 5))
        masks.fill_mask(ours, 0, queries, past, keys, *pattern)
        on.fill_mask(out, 0, on.upload(queries), on.upload(past), on.upload(keys), *pattern)
        same(on, out, ours)


@check
def mask_where_the_policy_says() -> None:
    on = device()
    for limit in (0, 100):
        made = make_mask(3, 5, Pattern(window=2), ops=on, policy=Above(("q_len", "k_len"), limit))
        same(on, made, mask(3, 5, Pattern(window=2)))
