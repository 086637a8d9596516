"""The machine's peaks: bytes read, int8 products by tiles and by vectors, and float32 fused multiply-adds per second.

Achieved figures are given as fractions of the peaks, so each is measured the way that flatters the machine most: reads of more memory than
any cache holds, the best of several ways; arithmetic in registers alone, with the instruction the kernels use, and enough independent
chains to fill the pipelines; and the best of several bursts, because a neighbour can only slow one down.
"""

import contextlib
import mmap
import time
from collections.abc import Callable

import numba
import numpy as np
from llvmlite import ir
from numba import njit, prange
from numpy.typing import NDArray

from bitnet_np.kernels.fast import amx, byte_dots, emit, simd
from bitnet_np.kernels.launching import serial
from bitnet_np.kernels.processor import architecture, instruction_path

from .rounds import CheckError, Sample, timed

# logical registers: 12 of AVX-512's 32, or 8 of the 16 of AVX2 and SSE
_CHAINS = 12 if emit.is_wide() else 2 if instruction_path() == "ssse3" else 4
_STEPS = 200_000  # of every chain in one burst: 5 to 25 ms
_STEPS_OF_A_WORD = 50  # steps whose sums fit words
_BURSTS = 4
_OPAQUE = {"x86_64": "=v,0", "aarch64": "=w,0"}.get(architecture())


# --- arithmetic -----------------------------------------------------------------------------------------------------------------------


@emit.emitted(returns=emit.first)
def _dots(b, tile, code, x):
    """Each register of a tile of sums += byte dot products, as the kernels add them for many tokens.

    The numbers are the same every time, and an optimiser would compute them once: an empty assembly statement in front of each hides that.
    """
    codes, numbers = (b.splat(b.trunc(value, emit.I8), emit.V64I8) for value in (code, x))
    pieces, sums = b.slices(numbers, byte_dots.own(b).pieces), []
    for total in tile:
        pieces = [b.asm(ir.FunctionType(p.type, [p.type]), "", _OPAQUE, [p], True) for p in pieces]
        sums.append(byte_dots.add_four(b, total, codes, b.joined(pieces)))
    return sums


@emit.emitted(returns=emit.first)
def _fmas(b, tile, x, y):
    """Each register of the tile = x * y + itself."""
    x, y = (b.splat(value, emit.V16F32) for value in (x, y))
    return [b.fma(x, y, total) for total in tile]


@njit(parallel=True, error_model="numpy")
def _dot_loop(steps, code, x, out):
    for thread in prange(out.size):
        tile = simd.tile_i32(1, _CHAINS)
        for _ in range(steps // _STEPS_OF_A_WORD):
            sums = byte_dots.open_sums(tile)
            for _ in range(_STEPS_OF_A_WORD):
                sums = _dots(sums, code, x)
            tile = byte_dots.close_sums(tile, sums)
        totals = np.empty(emit.LANES, np.int32)
        simd.store_sums(tile, totals)
        out[thread] = totals[0]


@njit(parallel=True, error_model="numpy")
def _fma_loop(steps, a, b, out):
    for thread in prange(out.size):
        tile = simd.tile_f32(1, _CHAINS)
        for _ in range(steps):
            tile = _fmas(tile, a, b)
        totals = np.empty(emit.LANES, np.float32)
        simd.store_sums(tile, totals)
        out[thread] = totals[0]


def dot_products(threads: int) -> float:
    """int8 multiply-adds per second. The result is checked: so many codes of 1 times 3 in each step."""
    out = np.empty(threads, np.int32)
    seconds = timed(lambda: _dot_loop(_STEPS, np.int8(1), np.int8(3), out))
    if (out != _STEPS * emit.STEP * 3).any():
        raise CheckError(f"byte dot products sum up to {out}")
    return _STEPS * _CHAINS * emit.STEP * threads / seconds


@serial
def _multiply_tiles(unit, steps):
    """Four chains of products of tiles, as many as two by two tiles of sums have."""
    for _ in range(steps):
        amx.tile_dot(unit, 0, 4, 6)
        amx.tile_dot(unit, 1, 4, 7)
        amx.tile_dot(unit, 2, 5, 6)
        amx.tile_dot(unit, 3, 5, 7)


@serial
def _tiles_of(memory, ones, steps, sums):
    """Products of activations of 1 and codes of 1, `steps` times over, and one tile of their sums."""
    unit, tile = amx.configure(memory, amx.ROWS, amx.WIDTH), np.int64(ones.ctypes.data)
    amx.tile_load(unit, 4, tile, amx.WIDTH)
    amx.tile_load(unit, 5, tile, amx.WIDTH)
    amx.tile_load(unit, 6, tile, amx.WIDTH)
    amx.tile_load(unit, 7, tile, amx.WIDTH)
    _multiply_tiles(unit, steps)
    amx.tile_store(unit, 3, np.int64(sums.ctypes.data), amx.WIDTH)
    amx.tile_release(unit)


@njit(parallel=True, error_model="numpy")
def _tile_loop(memory, ones, steps, sums):
    for thread in prange(sums.shape[0]):
        _tiles_of(memory.copy(), ones, steps, sums[thread])


def tile_products(threads: int, steps: int = _STEPS) -> float:
    """int8 multiply-adds per second on matrix tiles. The result is checked: each sum is 64 for each step."""
    sums, ones = np.empty((threads, amx.SIZE // 4), np.int32), np.ones(amx.SIZE, np.int8)
    seconds = timed(lambda: _tile_loop(amx.unit(), ones, steps, sums))
    if (sums != steps * amx.WIDTH).any():
        raise CheckError(f"products of tiles sum up to {sums}")
    return steps * 4 * amx.SIZE * amx.ROWS * threads / seconds


def fused_multiply_adds(threads: int) -> float:
    """float32 multiply-adds per second. The result is checked."""
    out = np.empty(threads, np.float32)
    seconds = timed(lambda: _fma_loop(_STEPS, np.float32(0.5), np.float32(0.5), out))
    if (out != _STEPS * emit.LANES * 0.25).any():
        raise CheckError(f"fused multiply-adds sum up to {out}")
    return _STEPS * _CHAINS * emit.LANES * threads / seconds


# --- memory ---------------------------------------------------------------------------------------------------------------------------


@njit(parallel=True, error_model="numpy")
def _read_one(words, combined):
    for part in prange(combined.size):
        words_read = words[part * words.size // combined.size : (part + 1) * words.size // combined.size]
        both = np.uint64(0)
        for i in range(words_read.size):
            both |= words_read[i]
        combined[part] = both


@njit(parallel=True, error_model="numpy")
def _read_four(words, combined):
    for part in prange(combined.size):
        words_read = words[part * words.size // combined.size : (part + 1) * words.size // combined.size]
        n = words_read.size // 4
        a, b, c, d = words_read[:n], words_read[n : 2 * n], words_read[2 * n : 3 * n], words_read[3 * n : 4 * n]
        both = np.uint64(0)
        for i in range(n):
            both |= a[i] | b[i] | c[i] | d[i]
        combined[part] = both


def _memory(nbytes: int, huge: bool) -> NDArray[np.uint64]:
    """Anonymous memory with or without huge pages, where the system offers the choice, all of it present."""
    area = mmap.mmap(-1, nbytes)
    advice = getattr(mmap, "MADV_HUGEPAGE" if huge else "MADV_NOHUGEPAGE", None)
    if advice is not None:
        with contextlib.suppress(OSError):  # a kernel built without huge pages: both areas are the same then
            area.madvise(advice)
    words = np.frombuffer(area, np.uint64)
    words[:] = 1
    return words


class Peaks:
    """The machine's peaks, measured once per round: `Peaks(megabytes)(threads)` -> a sample.

    Its keys: "read" in bytes per second, the best of the ways "read, ..." which are there as well; "fma" in multiply-adds per second;
    "int8", too, where the processor has byte dot products, and "tiles" where it has tiles.
    """

    def __init__(self, megabytes: int = 1024):
        self._memory = {name: _memory(megabytes << 20, name == "huge pages") for name in ("huge pages", "small pages")}
        self._combined = np.zeros(64, np.uint64)
        self._has_dots = instruction_path() != "generic" and _OPAQUE is not None
        self(1)  # compile

    def __call__(self, threads: int) -> Sample:
        numba.set_num_threads(threads)
        begin = time.perf_counter()
        ways: dict[str, float] = {}
        loops: dict[str, Callable] = {"one stream": _read_one, "four streams": _read_four}
        for pages, words in self._memory.items():
            for streams, loop in loops.items():
                ways[f"read, {pages}, {streams}"] = words.nbytes / timed(lambda loop=loop, words=words: loop(words, self._combined))  # type: ignore[misc]
                if (self._combined != 1).any():
                    raise CheckError(f"words of 1 were read as {self._combined}")
        sample = {"read": max(ways.values()), **ways, "fma": max(fused_multiply_adds(threads) for _ in range(_BURSTS))}
        if self._has_dots:
            sample["int8"] = max(dot_products(threads) for _ in range(_BURSTS))
        if amx.unit() is not None:
            sample["tiles"] = max(tile_products(threads) for _ in range(_BURSTS))
        return {"seconds": time.perf_counter() - begin, **sample}
