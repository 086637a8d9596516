"""The operations of kernels/cpu.py on a GPU: the same names and parameters, and the same bits. Arrays are the device's.

Methods check nothing, like the CPU's kernels: callers have checked the arguments.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from math import prod
from typing import Any

import numpy as np
from numba import cuda
from numpy.typing import DTypeLike, NDArray

from ..errors import ShapeError, UnsupportedError
from ..kernels import cpu
from ..kernels.attention import chunks_touched, scale_and_cap
from ..kernels.cuda import attention, attention_split, floats, layout, norms, ternary, ternary_groups
from ..kernels.cuda import rows as row_kernels
from ..kernels.cuda.attention_shape import EIGHT, WIDEST, Shape, shape_for
from ..kernels.scalar import CHUNK
from ..model import Ternary
from ..tensor_types import TensorType
from .arrays import Arena, Codes, Deferred, DeviceArray, DeviceTable, StoredArray, allocated, host, now, view, write
from .device import NO_EXPERTS
from .launch import Launcher
from .products import OneRow, apart, three_of
from .storage import DeviceStorage

GRID = 4096  # blocks at most of a kernel over single numbers
BLOCK = 256  # threads of a block of such a kernel, or of a block that owns a row
LARGE_BLOCK = 1024  # threads of a block that owns a row, where rows are too few to keep the device busy
_WARPS = 8  # warps of a block of `ternary.gemv`, or half of them
_DEPTH = 4  # tiles that a warp of it asks for at most before it needs the first
_HALVES = 8  # half warps of a block of `floats.matmul`, each with floats.ROWS rows of a table
_TOKENS = 16  # tokens at most that it multiplies a row of a table with at a time
_MANY = 64  # queries for each processor from which on attention takes blocks of 32 queries: two such blocks keep a processor busy
_ALL = 1 << 30  # a window that holds all positions: no memory has room for so many
SKINNY = 16
"""Tokens up to which a ternary product reads activations straight from the cache (`ternary.skinny`)."""
TILES = ((4, 6, 2, 2), (4, 4, 2, 2), (2, 2, 2, 2))
"""Shapes of the blocks of `ternary.gemm`, the largest first. The first one that keeps the device busy is taken, else the last."""
GROUPS = ((4, 128), (2, 128), (2, 64))
"""Shapes of the blocks of `ternary_groups.gemm`, the largest first. The first one that keeps the device busy is taken, else none."""


class Cuda:
    """The backend of one GPU.

    processors: multiprocessors of the device; a launch of fewer blocks leaves some of them idle
    free_bytes: bytes of memory that the device has left
    has_warpgroups: whether warpgroups multiply, as on Hopper (compute capability 9.0) and on no other
    """

    device = "cuda"
    exact_only = True
    chunk = CHUNK
    widest_head = WIDEST
    most_positions = 65535 * CHUNK  # attention_split.py has a block for each chunk, along an axis of the grid that ends there

    def __init__(self, processors: int, free_bytes: Callable[[], int], has_warpgroups: bool = False) -> None:
        self.processors = processors
        self.free_bytes = free_bytes
        self.tiles = TILES
        self.groups = GROUPS if has_warpgroups else ()
        # norms with the products that read them; launches of a graph. False measures the gain of each
        self.fused, self.overlap = True, True
        self.at_once = 1  # blocks of such a product on a processor at least; with 2, more launches have room to overlap
        self.stream = cuda.stream()
        self.run = Launcher(self.stream)
        self.arena = Arena()
        self.nothing = self.upload(np.zeros((1, 1), np.float32))  # for arguments that a kernel does not read
        self._arrived = [
            self.upload(np.zeros(1 << 12, np.int32))
        ]  # counters of attention_split.py; captured graphs may hold the smaller ones

    # --- memory ---

    def empty(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> DeviceArray:
        return self.arena.empty(shape, dtype)

    def mark(self, event: str, count: int = 1) -> None:
        """Does nothing, as on the CPU."""

    def wait(self) -> None:
        self.stream.synchronize()

    def storage(self) -> DeviceStorage:
        return DeviceStorage(self)

    def upload(self, array: NDArray) -> DeviceArray:
        """A copy on the device, in memory of its own: weights, tables, caches."""
        array = np.ascontiguousarray(array)
        memory = allocated(array.nbytes)
        out = StoredArray(memory, memory.address, array.shape, array.dtype)
        write(out, array, self.stream)
        return out

    def overwrite(self, array: DeviceArray, values: NDArray) -> None:
        """Replaces the values of an array on the device."""
        write(array, np.ascontiguousarray(values, array.dtype), self.stream)

    def table(self, array: NDArray) -> DeviceTable:
        """A table [N, M] of float32, float16 or the bits of bfloat16, in the device's layout."""
        return DeviceTable(self.upload(floats.in_lanes(array)), floats.kind_of(array), array.shape)

    def ternary(self, weights: Ternary) -> DeviceArray:
        """The codes of a packed matrix [N, M], in the device's layout. Raises UnsupportedError if it has too many columns."""
        if weights.shape[1] > ternary.WIDEST:
            raise UnsupportedError(f"a ternary matrix has {weights.shape[1]:,} columns, on the device expected at most {ternary.WIDEST:,}")
        return self.upload(layout.in_fragments(weights))

    def zeros(self, shape: tuple[int, ...], dtype: DTypeLike = np.float32) -> DeviceArray:
        out = self.empty(shape, dtype)
        self.launch(row_kernels.fill, out.size, view(out, dtype), np.dtype(dtype).type(0))
        return out

    def resident(self, record: Any) -> Any:
        """A record of arrays on the device: all its integer arrays in one transfer, as int64, and its float32 arrays.

        If no slot has several rows, `position` gets an attribute `chunks`, the number of chunks of keys of the longest sequence.
        """
        arrays = {field.name: np.asarray(getattr(record, field.name)) for field in fields(record)}
        parts = {name: self.upload(array) for name, array in arrays.items() if array.dtype == np.float32}
        integers = {name: array.astype(np.int64) for name, array in arrays.items() if name not in parts}
        if integers:
            together = self.upload(np.concatenate(list(integers.values())))
            ends = np.cumsum([array.size for array in integers.values()]).tolist()
            parts |= {name: together[end - array.size : end] for (name, array), end in zip(integers.items(), ends, strict=True)}
        if "slot" in integers and np.unique(integers["slot"]).size == integers["slot"].size:
            parts["position"].chunks = int(integers["position"].max()) // CHUNK + 1
        return replace(record, **parts)

    def to_host(self, array: DeviceArray | Codes) -> NDArray:
        """A copy of a result as a NumPy array."""
        return host(array, self.stream)

    # --- launching ---

    def launch(self, kernel: Any, n: int, *arguments: Any) -> None:
        """Launches a kernel over n single numbers, which works with any grid."""
        self.run(kernel, max(1, min(GRID, -(-n // BLOCK))), BLOCK, *arguments)

    def _flat(self, kernel: Any, *arrays: DeviceArray) -> DeviceArray:
        """The result of a kernel over the single numbers of arrays of one shape."""
        out = self.empty(arrays[0].shape)
        self.launch(kernel, out.size, *(view(now(array), np.float32) for array in arrays), view(out, np.float32))
        return out

    def _later(self, source: str, kernel: Any, a: DeviceArray, b: DeviceArray) -> Deferred:
        """`_flat` at first use: the product before the result or the norm after it may compute it themselves (norms.py)."""
        if isinstance(b, Deferred) and b.source == "product" and b.is_open() and b.inputs[0].is_for(source, a) and a.shape == b.shape:
            return Deferred("ended product", (b.inputs[0], source, a), a.shape, lambda it: it.inputs[0].launched(*it.inputs[1:]))
        return Deferred(source, (now(a), now(b)), a.shape, lambda it: self._flat(kernel, *it.inputs))

    # --- embedding and float matmul ---

    def embed(self, table: DeviceTable, tokens: DeviceArray) -> DeviceArray:
        _check_table(table)
        out = self.empty((tokens.size, table.shape[1]))
        self.launch(floats.embed(table.kind), out.size, table.words, tokens, out)
        return out

    def embed_blocks(self, data: NDArray, kind: TensorType, tokens: DeviceArray) -> DeviceArray:
        raise _not_placed(data)

    def matmul(self, x: DeviceArray, weights: DeviceTable) -> DeviceArray:
        _check_table(weights)
        (present, width), (n, _) = x.shape, weights.shape
        tokens = min(_TOKENS, 1 << (present - 1).bit_length())
        grid = -(-n // (floats.ROWS * _HALVES)), -(-present // tokens)
        out = self.empty((present, n))
        words = view(weights.words, np.uint32)
        flat = view(now(x), np.float32), weights.words.shape[1], width, n, present, view(out, np.float32)
        self.run(floats.matmul(weights.kind, tokens), grid, 16 * _HALVES, words, *flat)
        return out

    def matmul_blocks(self, x: DeviceArray, data: NDArray, kind: TensorType) -> DeviceArray:
        raise _not_placed(data)

    def matmuls_blocks_as_llama_cpp(self, x: DeviceArray, *matrices: tuple[NDArray, TensorType]) -> list[DeviceArray]:
        raise _not_placed(matrices[0][0])

    # --- norms and ternary matmul ---

    def _codes(self, n: int, width: int) -> Codes:
        row_words = layout.row_words(width)
        words = self.empty((-(-n // SKINNY) * SKINNY * row_words,), np.uint32)
        return Codes(words, view(words, np.int8), n, width, row_words)

    def rms_norm(self, x: DeviceArray, gain: DeviceArray, eps: float) -> Deferred:
        """The norm, computed at first use. Ternary products need only its codes; those of a single row compute them themselves."""
        return Deferred("norm", (x, gain, np.float32(eps)), x.shape, self._rms_norm)

    def _rms_norm(self, norm: Deferred) -> DeviceArray:
        (x, gain, eps), (n, width), out = norm.inputs, norm.shape, self.empty(norm.shape)
        (source, *row), threads = self.normed(x), self._threads(n, width)
        if threads:
            rows = (view(array, np.float32) for array in row)
            self.run(norms.rms_norm(source, width, threads), n, threads, *rows, gain, eps, view(out, np.float32))
        else:
            self.run(row_kernels.rms_norm(source), n, LARGE_BLOCK if n <= self.processors else BLOCK, *row, gain, eps, out)
        return out

    def _threads(self, n: int, width: int) -> int:
        """Threads of a block of norms.py for each of n rows: the most where rows are few. 0 if these kernels do not take such rows."""
        candidates = norms.THREADS[-1:] if n <= self.processors else norms.THREADS
        return next((threads for threads in candidates if norms.fits(width, threads)), 0)

    def normed(self, x: DeviceArray) -> tuple[str, DeviceArray, DeviceArray, DeviceArray]:
        """The inputs of a norm of x: the source, its two arrays, and the array for x itself if nothing has read it before."""
        if isinstance(x, Deferred) and x.is_open() and x.source in row_kernels.SOURCES:
            source, (a, b), made = x.source, x.inputs, self.empty(x.shape)
            x.settle(made)
            return source, a, b, made
        return "row", now(x), now(x), now(x)

    def layer_norm(self, x: DeviceArray, gain: DeviceArray, bias: DeviceArray | None, eps: float) -> DeviceArray:
        out = self.empty(x.shape)
        bias = self.zeros((x.shape[1],)) if bias is None else bias
        self.run(row_kernels.layer_norm, len(x), BLOCK, now(x), gain, bias, np.float32(eps), out)
        return out

    def quantize(self, x: DeviceArray) -> tuple[Any, Any]:
        """Codes and scale; those of a norm are computed at first use."""
        if isinstance(x, Deferred) and x.source == "norm":
            later = Deferred("codes", (x,), x.shape, lambda it: self._codes_of(*it.inputs)[0])
            return later, Deferred("scale", (x,), x.shape[:1], lambda it: self._codes_of(*it.inputs)[1])
        x = now(x)
        scale, codes = self.empty(x.shape[:1]), self._codes(*x.shape)
        self.run(row_kernels.quantize, len(x), BLOCK, x, codes.row_words, codes.words, scale)
        return codes, scale

    def _codes_of(self, norm: Deferred) -> tuple[Codes, DeviceArray]:
        """Codes and scale of a norm, without the norm itself if nothing has read it and a kernel takes such rows."""
        (n, width), threads = norm.shape, self._threads(*norm.shape)
        if norm.quantized is None and norm.is_open() and threads:
            codes, scale = norm.quantized = self._codes(n, width), self.empty((n,))
            x, gain, eps = norm.inputs
            source, *row = self.normed(x)
            rows = (view(array, np.float32) for array in row)
            self.run(norms.normed_codes(source, width, threads), n, threads, *rows, gain, eps, codes.words, scale)
        elif norm.quantized is None:
            norm.quantized = self.quantize(norm.array())
        return norm.quantized

    def ternary_matmul(self, q: Any, scale: DeviceArray, codes: DeviceArray, w_scale: np.float32, width: int) -> DeviceArray:
        return self.ternary_matmuls(q, scale, (codes, w_scale, width))[0]

    def ternary_matmuls(self, q: Any, scale: DeviceArray, *matrices: tuple[DeviceArray, np.float32, int]) -> list[DeviceArray]:
        """The products of up to three matrices in one launch: a small one alone leaves the device idle.

        If `q` are the unread codes of a norm of a single row, the launch also computes the norm.
        """
        for codes, _, _ in matrices:
            if not isinstance(q, Codes | Deferred) or codes.dtype != np.uint32:
                raise ShapeError(f"ternary codes have dtype {codes.dtype}, expected the device's layout, uint32: upload the model")
        three = three_of(matrices)
        if isinstance(q, Deferred) and q.is_open() and q.inputs[0].is_open() and q.inputs[0].quantized is None and self.fused:
            together = OneRow(self, q.inputs[0], three)
            if together.is_for("row"):
                return together.results(len(matrices))
        codes, scale = now(q), now(scale)
        n, blocks, out = codes.rows, -(-codes.width // layout.COLUMNS), self.empty((codes.rows * sum(three.widths),))
        tile, rest = self._tile([count for count in three.tiles if count], n), (codes.words, scale, blocks)
        if n == 1:
            warps = _WARPS if blocks <= _WARPS * _DEPTH else 2 * _WARPS
            ends, depth = three.ends(1), min(_DEPTH, -(-blocks // warps))
            self.run(ternary.gemv(warps, depth), ends[-1], 32 * warps, three.words, ends, three.widths, three.factors, *rest, out)
        elif shape := self._groups(three.tiles, n):
            (groups, tokens), warps = shape, shape[0] * 4
            ends, grid_rows = three.ends(warps), -(-n // tokens)
            kernel, matrices_of = ternary_groups.gemm(groups, tokens), (three.words, ends, three.widths, three.factors)
            self.run(kernel, (ends[-1], grid_rows), 32 * warps, *matrices_of, *rest, codes.row_words, out)
        elif tile is None:
            share = min(layout.WARPS, -(-sum(three.tiles) // self.processors))
            warps, groups, ends = layout.WARPS // share, 1 if n <= 8 else 2, three.ends(share)  # groups of 8 tokens
            kernel, grid = ternary.skinny(groups, codes.width, warps, share), (ends[-1], -(-n // (8 * groups)))
            matrices_and_tokens = three.words, ends, three.widths, three.factors, codes.words, scale, codes.row_words
            self.run(kernel, grid, 32 * warps * share, *matrices_and_tokens, out)
        else:
            ends = three.ends(tile[0] * tile[2])
            grid, threads = (ends[-1], -(-n // (tile[1] * tile[3] * 8))), 32 * tile[2] * tile[3]
            self.run(ternary.gemm(*tile), grid, threads, three.words, ends, three.widths, three.factors, *rest, codes.row_words, out)
        return apart(out, n, three.widths[: len(matrices)])

    def _groups(self, tiles: tuple[int, ...], n: int) -> tuple[int, int] | None:
        """The shape of the blocks of `ternary_groups.gemm`; None for other kernels."""
        for groups, tokens in self.groups if n > SKINNY else ():
            if sum(-(-each // (4 * groups)) for each in tiles) * -(-n // tokens) >= self.processors:
                return groups, tokens
        return None

    def _tile(self, tiles: list[int], n: int) -> tuple[int, ...] | None:
        """The shape of the blocks of `ternary.gemm` for n tokens and matrices of so many tiles of rows; None for other kernels."""
        if n <= SKINNY:
            return None
        fitting = [tile for tile in self.tiles if tile[0] <= min(tiles)]
        for tile in fitting:
            if sum(-(-each // (tile[0] * tile[2])) for each in tiles) * -(-n // (tile[1] * tile[3] * 8)) >= self.processors:
                return tile
        return fitting[-1] if fitting else None

    # --- positions and attention ---

    def rotations(self, angle: NDArray[np.float64]) -> tuple[DeviceArray, DeviceArray]:
        """Cosines and sines, computed by the CPU: some bytes for each token, once for all layers."""
        cos, sin = cpu.rotations(angle)
        return self.upload(cos), self.upload(sin)

    def take_rotations(self, all_cos: DeviceArray, all_sin: DeviceArray, position: DeviceArray) -> tuple[DeviceArray, DeviceArray]:
        """Cosines and sines of some positions, from tables of all: [P, J] x 2, [R] -> [R, J] x 2."""
        cos, sin = (self.empty((position.size, all_cos.shape[1])) for _ in range(2))
        self.launch(row_kernels.take_rotations, cos.size, all_cos, all_sin, position, cos, sin)
        return cos, sin

    def rope(self, x: DeviceArray, cos: DeviceArray, sin: DeviceArray) -> Deferred:
        return self._rope(x, cos, sin, cos.shape[1], 1)

    def rope_adjacent(self, x: DeviceArray, cos: DeviceArray, sin: DeviceArray) -> Deferred:
        return self._rope(x, cos, sin, 1, 2)

    def _rope(self, x: DeviceArray, cos: DeviceArray, sin: DeviceArray, distance: int, step: int) -> Deferred:
        return Deferred("rope", (now(x), cos, sin, cos.shape[1], distance, step), x.shape, self._roped)

    def _roped(self, x: Deferred) -> DeviceArray:
        out = self.empty(x.shape)
        self.launch(row_kernels.rope, prod(x.shape), *x.inputs, out)
        return out

    def _rotation(self, x: DeviceArray) -> tuple:
        """The fields of `rows.Heads` for x: numbers, cosines, sines, and the layout of pairs. No pairs if x is rotated already."""
        if isinstance(x, Deferred) and x.is_open():
            return x.inputs
        return now(x), self.nothing, self.nothing, 0, 0, 1

    def attend(
        self,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        slot: DeviceArray,
        position: DeviceArray,
        window: int | None = None,
        scale: np.float32 | None = None,
        cap: np.float32 | None = None,
    ) -> DeviceArray:
        n, heads, _ = q.shape
        shape = self._shape(q, k, heads // k.shape[2] * n, cap)
        if position is not None and position.chunks is not None:
            return self._attend_split(None, q, k, v, slot, position, position.chunks, window, scale, cap)
        out = self.empty(q.shape)
        rows = *self._rotation(q), *self._kept(k, v), slot, position
        scores = *k.shape[1:3], *scale_and_cap(q.shape[2], scale, cap), min(window or _ALL, _ALL)
        self.run(attention.attend(shape), _tiles(shape, n, heads, k.shape[2]), shape.threads, *rows, *scores, out)
        return out

    def attend_halves(
        self,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        slot: DeviceArray,
        position: DeviceArray,
        window: int | None = None,
        scale: np.float32 | None = None,
        cap: np.float32 | None = None,
    ) -> DeviceArray:
        raise UnsupportedError("the device has no attention with probabilities in float16, expected the dialect exact")

    def attend_next(
        self,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        slot: DeviceArray,
        position: DeviceArray,
        kept_k: DeviceArray,
        kept_v: DeviceArray,
        window: int | None = None,
        scale: np.float32 | None = None,
        cap: np.float32 | None = None,
    ) -> DeviceArray:
        """`keep` and then `attend` in one launch: q [R, H, K]; k, v [R, G, K]; kept_k, kept_v [B, S, G, K] -> [R, H, K].

        Each row is the next one of a slot of its own; `position.chunks` is at least the number of chunks of the longest (`resident`).
        """
        return self._attend_split((k, v), q, kept_k, kept_v, slot, position, position.chunks, window, scale, cap)

    def _attend_split(
        self,
        new: tuple[DeviceArray, DeviceArray] | None,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        slot: DeviceArray,
        position: DeviceArray,
        chunks: int,
        window: int | None,
        scale: np.float32 | None,
        cap: np.float32 | None,
    ) -> DeviceArray:
        """Attention of rows that share no keys: a block for each chunk of keys. `chunks` is at least the number of the longest row."""
        (n, heads, width), kv_heads = q.shape, k.shape[2]
        if window:
            chunks = min(chunks, chunks_touched(window))
        shape = self._shape(q, k, min(heads // kv_heads, EIGHT), cap)
        parts, out = self.empty((n * heads * chunks * width,)), self.empty(q.shape)
        largest, weight = self.empty((n, heads, chunks)), self.empty((n, heads, chunks))
        grid = n, kv_heads * -(-(heads // kv_heads) // shape.queries), chunks
        if self._arrived[-1].size < n * grid[1]:
            self._arrived.append(self.upload(np.zeros(n * grid[1], np.int32)))
        rotation = self._rotation(q)
        row = (*self._rotation(new[0]), now(new[1])) if new else (*rotation, rotation[0])  # without `new` these are not read
        arguments = (
            *k.shape[1:3],
            *scale_and_cap(q.shape[2], scale, cap),
            min(window or _ALL, _ALL),
            parts,
            largest,
            weight,
            self._arrived[-1],
        )
        kernel = attention_split.attend_chunk(shape, new is not None)
        self.run(kernel, grid, shape.threads, *row, *rotation, *self._kept(k, v), slot, position, *arguments, out)
        return out

    def attend_masked(
        self,
        q: DeviceArray,
        k: DeviceArray,
        v: DeviceArray,
        slot: DeviceArray,
        position: DeviceArray,
        mask: DeviceArray,
        scale: np.float32 | None = None,
        cap: np.float32 | None = None,
    ) -> DeviceArray:
        (n, heads, _), kv_heads = q.shape, k.shape[2]
        shape, out = self._shape(q, k, heads // kv_heads * n, cap), self.empty(q.shape)
        rows = *self._rotation(q), *self._kept(k, v), slot, position
        arguments = *k.shape[1:3], *scale_and_cap(q.shape[2], scale, cap), view(mask, np.float32), *mask.shape
        self.run(attention.attend_masked(shape), _tiles(shape, n, heads, kv_heads), shape.threads, *rows, *arguments, out)
        return out

    def _shape(self, q: DeviceArray, k: DeviceArray, queries: int, cap: np.float32 | None) -> Shape:
        if q.shape[2] > WIDEST:
            raise UnsupportedError(f"heads are {q.shape[2]} wide, on the device expected at most {WIDEST}")
        many = queries * k.shape[2] >= _MANY * self.processors
        return shape_for(q.shape[2], queries, k.dtype == np.int16, many, cap is not None)

    def _kept(self, *arrays: DeviceArray) -> tuple[DeviceArray, ...]:
        """Keys or values as one axis."""
        return tuple(view(now(array), array.dtype) for array in arrays)

    # --- residuals, gates, rows ---

    def add(self, a: DeviceArray, b: DeviceArray) -> DeviceArray:
        return self._later("sum", row_kernels.add, a, b)

    def add_bias(self, x: DeviceArray, bias: DeviceArray) -> DeviceArray:
        out = self.empty(x.shape)
        self.launch(row_kernels.add_bias, out.size, view(now(x), np.float32), bias, view(out, np.float32))
        return out

    def scaled(self, x: DeviceArray, factor: np.float32) -> DeviceArray:
        out = self.empty(x.shape)
        self.launch(row_kernels.scaled, out.size, view(now(x), np.float32), np.float32(factor), view(out, np.float32))
        return out

    def largest(self, x: DeviceArray, out: DeviceArray) -> None:
        """The place of the largest number of each row, the first of equal ones, or -1: [R, M] -> [R] int64 (see `rows.largest`)."""
        self.run(row_kernels.largest, len(x), LARGE_BLOCK, now(x), out)

    def take(self, x: DeviceArray, rows: DeviceArray) -> DeviceArray:
        x = now(x)
        out = self.empty((rows.size, *x.shape[1:]))
        self.launch(row_kernels.take, out.size, x.reshape(len(x), -1), rows, out.reshape(rows.size, -1))
        return out

    def put(self, x: DeviceArray, rows: DeviceArray, out: DeviceArray) -> None:
        """Copies the rows of x [B, ...] to their places in [R, ...]."""
        slot = self.zeros((rows.size,), np.int64)
        self.launch(row_kernels.spread, x.size, x.reshape(len(x), -1), slot, rows, out.reshape(1, len(out), -1))

    def spread(self, x: DeviceArray, slot: DeviceArray, position: DeviceArray, shape: tuple[int, ...]) -> DeviceArray:
        x, out = now(x), self.zeros((*shape, *x.shape[1:]))
        self.launch(row_kernels.spread, x.size, x.reshape(len(x), -1), slot, position, out.reshape(*shape, -1))
        return out

    def keep(
        self, k: DeviceArray, v: DeviceArray, slot: DeviceArray, position: DeviceArray, k_out: DeviceArray, v_out: DeviceArray
    ) -> None:
        """Copies keys and values [R, G, K] to their places in [B, S, G, K]. Numbers beyond float16 become NaN, which logits show."""
        kernel = row_kernels.keep(k_out.dtype == np.int16)
        _, *how = rotation = self._rotation(k)
        self.launch(kernel, prod(k.shape), rotation[0], now(v), *how, slot, position, k_out, v_out)

    def erase(self, out: DeviceArray, slot: int, start: int, end: int) -> None:
        """Writes zeros to positions start..end of a slot of [L, B, S, G, K]."""
        if end > start:
            flat = _of_positions(out)
            self.launch(row_kernels.erase, flat.shape[0] * (end - start) * flat.shape[3], flat, slot, start, end)

    def carry(self, source: DeviceArray, slot: int, out: DeviceArray, target: int, start: int, end: int) -> None:
        """Copies positions start..end of a slot of [L, B, S, G, K] to another slot, there or in [L, B', S', G, K]."""
        if end > start:
            flat = _of_positions(out)
            count = flat.shape[0] * (end - start) * flat.shape[3]
            self.launch(row_kernels.carry, count, _of_positions(source), slot, flat, target, start, end)

    def relu2_gate(self, gate: DeviceArray, up: DeviceArray) -> DeviceArray:
        return self._later("relu2", row_kernels.relu2_gate, gate, up)

    def silu_gate(self, gate: DeviceArray, up: DeviceArray) -> DeviceArray:
        return self._later("silu", row_kernels.silu_gate, gate, up)

    def gelu(self, x: DeviceArray) -> DeviceArray:
        return self._flat(row_kernels.gelu, x)

    def gelu_tanh(self, x: DeviceArray) -> DeviceArray:
        return self._flat(row_kernels.gelu_tanh, x)

    def gelu_gate(self, gate: DeviceArray, up: DeviceArray) -> DeviceArray:
        return self._flat(row_kernels.gelu_gate, gate, up)

    def soft_cap(self, x: DeviceArray, cap: np.float32) -> DeviceArray:
        out = self.empty(x.shape)
        self.launch(row_kernels.soft_cap, out.size, view(now(x), np.float32), cap, view(out, np.float32))
        return out

    # --- experts, which `device.place` refuses ---

    def top_experts(self, logits: DeviceArray, k: int) -> DeviceArray:
        raise UnsupportedError(NO_EXPERTS)

    def expert_weights(self, logits: DeviceArray, experts: DeviceArray, normalized: bool) -> DeviceArray:
        raise UnsupportedError(NO_EXPERTS)

    def mix(self, y: DeviceArray, weights: DeviceArray) -> DeviceArray:
        raise UnsupportedError(NO_EXPERTS)

    def sigmoid_gate(self, x: DeviceArray, gate: DeviceArray) -> DeviceArray:
        raise UnsupportedError(NO_EXPERTS)

    # --- masks ---

    def fill_mask(
        self,
        out: DeviceArray,
        first: int,
        queries: DeviceArray,
        past: DeviceArray,
        keys: DeviceArray,
        window: int,
        prefix: int,
        block: int,
        sinks: int,
    ) -> None:
        """The mask of kernels/masks.py: 0 and -infinity in float32 [B, Q, K]."""
        hidden = np.float32(-np.inf)
        grid = min(GRID, max(1, out.shape[0] * out.shape[1]))
        pattern = window, prefix, block, sinks
        self.run(row_kernels.fill_mask, grid, BLOCK, first, queries, past, keys, *pattern, np.float32(0), hidden, out)


def _check_table(table: Any) -> None:
    if not isinstance(table, DeviceTable):
        raise _not_placed(table)


def _not_placed(table: Any) -> ShapeError:
    return ShapeError(f"a table is {type(table).__name__}, expected one on the device: upload the model (device.place)")


def _tiles(shape: Shape, n: int, heads: int, kv_heads: int) -> tuple[int, int, int]:
    """The grid of `attention.attend` for n rows."""
    group = heads // kv_heads
    return -(-n // max(1, shape.queries // min(group, shape.queries))), kv_heads, -(-group // shape.queries)


def _of_positions(cache: DeviceArray) -> DeviceArray:
    """[L, B, S, G, K] -> [L, B, S, G * K]."""
    return cache.reshape(*cache.shape[:3], cache.shape[3] * cache.shape[4])
