"""Attention: causal, split over chunks, and by a mask array."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np.kernels import cpu, masks
from cuda_checks.common import GPU, check, device, equal_where_finite, normal, rng, same


@dataclass(frozen=True)
class Rows:
    slot: NDArray[np.int64]
    position: NDArray[np.int64]


def attention(
    heads: int,
    kv_heads: int,
    width: int,
    slot: list[int],
    position: list[int],
    window: int | None,
    capacity: int,
    processors: int = 132,
    scores: tuple[np.float32, ...] = (),
    cached: tuple[type, ...] = (np.float32, np.float16),
) -> None:
    """Compares attention in float32, then twice with rotated queries and float16 keys and values: the second run depends on no state.

    A type of keys and values takes kernels of its own, and compiling one takes three seconds: `cached` names one type where both would
    only repeat what other shapes show.
    """
    on, n = device(processors), len(slot)
    q, (k, v) = normal(n, heads, width), (normal(max(slot) + 1, capacity, kv_heads, width, seed=s) for s in (1, 2))
    slots, positions = np.array(slot), np.array(position)
    rows = on.resident(Rows(slots, positions))
    if np.float32 in cached:
        ours = cpu.attend(q, k, v, slots, positions, window, *scores)
        same(on, on.attend(on.upload(q), on.upload(k), on.upload(v), rows.slot, rows.position, window, *scores), ours)
    if scores and window is None:
        mask = np.where(np.tri(capacity, dtype=bool), np.float32(0), np.float32(-np.inf)).reshape(1, capacity, capacity)
        uploaded = [on.upload(array) for array in (q, k, v)]
        same(on, on.attend_masked(*uploaded, rows.slot, rows.position, on.upload(mask), *scores), ours)
    if scores or np.float16 not in cached:
        return
    angle = rng(7).uniform(0, 9, (n, width // 2 - width // 8))
    bits = [array.astype(np.float16).view(np.int16) for array in (k, v)]
    ours = cpu.attend(cpu.rope_adjacent(q, *cpu.rotations(angle)), *bits, slots, positions, window)
    rotated = on.rope_adjacent(on.upload(q), *on.rotations(angle))
    for _ in range(2):
        same(on, on.attend(rotated, *map(on.upload, bits), rows.slot, rows.position, window), ours)


@check
def attend_rows() -> None:
    attention(4, 2, 6, [0, 0, 0, 1, 1], [0, 1, 2, 3, 4], None, 5)  # two runs in one tile
    attention(5, 1, 20, [1, 1], [63, 64], None, 66)  # a group that is more than four queries; across a chunk's edge


@check
def attend_many() -> None:
    """Blocks of 16 and of 32 queries, several and a rest; a window; heads of a kernel's full width, and heads read 16 bytes at a time."""
    attention(8, 2, 64, [0] * 9, list(range(60, 69)), None, 69, processors=1)
    attention(4, 1, 24, [0] * 11 + [1] * 6, [*range(56, 67), *range(1, 7)], 30, 67)
    attention(4, 1, 96, [0] * 17, list(range(50, 67)), None, 67, processors=1, cached=(np.float16,))


@check
def attend_capped() -> None:
    """Another scale than 1 / sqrt(K), and capped scores: runs of rows, and rows that stand alone."""
    scores = np.float32(0.3), np.float32(2)
    attention(4, 2, 6, [0, 0, 0, 1, 1], [0, 1, 2, 3, 4], None, 5, scores=scores)
    attention(8, 2, 64, [0] * 5, list(range(60, 65)), None, 65, processors=1, scores=scores)
    attention(4, 2, 6, [1, 0], [69, 1], 66, 70, scores=scores)


@check
def attend_window() -> None:
    attention(2, 2, 4, [0, 0], [68, 69], 3, 70)  # the first chunk is not seen at all
    attention(2, 2, 4, [0, 1], [69, 64], 6, 70, cached=(np.float16,))
    attention(2, 1, 8, [0, 0], [2, 3], 1 << 40, 4, cached=(np.float32,))


@check
def attend_chunks() -> None:
    attention(4, 2, 6, [1, 0], [69, 1], None, 70)
    attention(2, 1, 6, [0], [577], None, 578, cached=(np.float16,))  # more chunks than a thread asks for at a time when it folds
    attention(20, 1, 6, [0], [2], None, 3, cached=(np.float32,))  # a group larger than a block


@check
def attend_long() -> None:
    if GPU:
        attention(20, 5, 128, [1] * 300 + [0] * 41, [*range(200, 500), *range(41)], None, 500)
        attention(20, 5, 128, [0, 1, 2], [4000, 63, 2047], None, 4096)
        attention(32, 8, 64, [0] * 200, list(range(200)), 100, 200)


@check
def attend_wide() -> None:
    attention(1, 1, 130, [0, 0], [0, 1], None, 2, cached=(np.float16,))


@check
def attend_ring() -> None:
    attention(1, 1, 4, [0, 0], [190, 191], 66, 128)  # two chunks of places, of which the first holds the last keys
    attention(2, 1, 4, [0, 1], [190, 130], 60, 128)


def next_attention(
    heads: int, kv_heads: int, width: int, position: list[int], window: int | None, capacity: int, rope: str, *dtypes: type
) -> None:
    """Compares the cache and the result with `keep` followed by `attend`, on the device and on the CPU."""
    on, n = device(), len(position)
    slots, positions, places = np.arange(n)[::-1].copy(), np.array(position), np.array(position) % capacity
    q, k, v = (normal(n, count, width, seed=seed) for seed, count in ((3, heads), (4, kv_heads), (5, kv_heads)))
    k[0, 0, -1] = v[-1, -1, 0] = 70000  # beyond float16's range
    angles = rng(7).uniform(0, 9, (2, n, width // 2 - width // 8))  # of queries and of keys
    rows = on.resident(Rows(slots, positions))

    def turned(ops: Any, x: Any, what: int) -> Any:
        return x if rope == "none" else getattr(ops, rope)(x, *ops.rotations(angles[what]))

    for dtype in dtypes:
        before = [normal(n, capacity, kv_heads, width, seed=seed) for seed in (1, 2)]
        cached = before if dtype == np.float32 else [array.astype(np.float16).view(np.int16) for array in before]
        together, apart = ([on.upload(array) for array in cached] for _ in range(2))
        uploaded = [on.upload(array) for array in (q, k, v)]
        turned_q, turned_k, new_v = turned(on, uploaded[0], 0), turned(on, uploaded[1], 1), uploaded[2]
        attended = on.attend_next(turned_q, turned_k, new_v, rows.slot, rows.position, *together, window)
        on.keep(turned_k, new_v, rows.slot, rows.position, *apart)
        expected = on.to_host(on.attend(turned_q, *apart, rows.slot, rows.position, window))
        equal_where_finite(on, attended, expected)
        for one, other, old in zip(together, apart, cached, strict=True):
            np.testing.assert_array_equal(on.to_host(one), on.to_host(other))
            assert (on.to_host(one)[slots, places] != old[slots, places]).any(axis=(1, 2)).all()
        ours = cpu.attend(turned(cpu, q, 0), *map(on.to_host, together), slots, positions, window)
        equal_where_finite(on, attended, ours)
        assert np.isnan(ours).any() == (dtype == np.int16)


@check
def attend_next() -> None:
    next_attention(4, 2, 6, [69, 1], None, 70, "rope", np.float32, np.int16)  # two chunks, of which the second has the new key
    next_attention(6, 1, 20, [64], None, 65, "none", np.float32)  # a group that is more than four queries; the new key is a chunk's first
    next_attention(9, 1, 20, [64], None, 65, "none", np.float32)  # a group that two blocks share
    next_attention(2, 1, 4, [190, 63], 60, 128, "rope_adjacent", np.int16)  # a ring, and a chunk's last key


def masked_attention(heads: int, kv_heads: int, width: int, slot: list[int], position: list[int], mask: NDArray, v: NDArray) -> None:
    on, n, t = device(), len(slot), mask.shape[2]
    q, k = normal(n, heads, width), normal(max(slot) + 1, t, kv_heads, width, seed=1)
    slots, positions = np.array(slot), np.array(position)
    rows = on.resident(Rows(slots, positions))
    ours = masks.attend_masked(q, k, v, slots, positions, mask)
    equal_where_finite(on, on.attend_masked(*map(on.upload, (q, k, v)), rows.slot, rows.position, on.upload(mask)), ours)


@check
def attend_masked() -> None:
    """Biases; a chunk and a row that see nothing; padding; and values that are not finite, which hidden keys keep to themselves."""
    mask = np.where(rng(3).random((2, 67, 67)) < 0.5, normal(2, 67, 67, seed=4), np.float32(-np.inf)).astype(np.float32)
    mask[0, 3], mask[0, 4, :64], mask[1, :, 66:] = -np.inf, -np.inf, -np.inf
    v = normal(2, 67, 1, 4, seed=2)
    masked_attention(2, 1, 4, [0, 0, 1], [3, 4, 66], mask, v)
    v[0, 65, 0, 2] = np.inf
    mask[0, 4, 65] = -np.inf
    masked_attention(2, 1, 4, [0, 0, 1], [3, 4, 1], mask[:1], v)
