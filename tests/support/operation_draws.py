"""Arguments of every operation of a backend, drawn at random: what tests of the contract, of bounds and of memory ask with.

Those of operations on rows are the self-test's, with other numbers and sizes.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from block_samples import random_blocks
from models import as_table, normal

from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, BLOCK_TYPES, GRID_TYPES
from bitnet_np.engine.cache_types import KINDS
from bitnet_np.kernels import cpu
from bitnet_np.model import packing
from bitnet_np.testing import noise, selftest
from bitnet_np.testing.models import random_table

f32 = np.float32
EDGES = np.concatenate([noise.EDGES, noise.EDGES / f32(9)])  # the self-test's are multiplied by 9


@dataclass
class Draw:
    """Random arguments. With `edges`, some numbers are EDGES."""

    rng: np.random.Generator
    edges: bool = False
    sizes: dict[int, int] = field(default_factory=lambda: {1: 1})  # by those that are written in the self-test

    def size(self, *choices: int) -> int:
        return int(self.rng.choice(choices or [1, 2, 3, 7, 16, 17, 40, 64, 65, 130, 257]))

    def numbers(self, *shape: int) -> np.ndarray:
        x = normal(self.rng, *shape) * f32(self.size(1, 1, 4))
        if self.edges:
            where = self.rng.random(shape) < self.rng.choice([0.5, 1 / x.size])
            x = np.where(where, self.rng.choice(EDGES, shape), x)
        return x

    def written(self, seed: int, *shape: int) -> np.ndarray:
        """Numbers in place of those that the self-test has for a seed and a shape."""
        for n in shape:
            self.sizes.setdefault(n, self.size(1, 2, 5, 33) if n < 10 else self.size())
        return self.numbers(*(self.sizes[n] for n in shape))

    def table(self, n: int, m: int) -> np.ndarray:
        return as_table(self.numbers(n, m), self.rng.choice(["float32", "float16", "bfloat16"]))

    def blocks(self) -> tuple:
        kind = ALL_BLOCK_TYPES[self.rng.integers(len(ALL_BLOCK_TYPES))]
        n, width = self.size(1, 5, 40), kind.block * self.size(1, 2, 3)
        if kind in GRID_TYPES:
            return self.numbers(self.size(1, 3), width), random_table(self.rng, kind.name, n, width).data, kind
        return self.numbers(self.size(1, 2, 5), width), random_blocks(self.rng, kind, n, width // kind.block).data, kind

    def ternary(self, rows: int, width: int) -> tuple:
        n = self.size(1, 5, 40)
        weights = packing.pack(self.rng.integers(-1, 2, (n, width)), self.rng.uniform(-1, 2))
        return weights.codes, weights.scale, n

    def codes(self) -> tuple[np.ndarray, np.ndarray]:
        q, scale = self.rng.integers(-127, 128, (self.size(1, 2, 5, 33), self.size())).astype(np.int8), self.numbers(1, 40)[0]
        return q, np.abs(scale[: len(q)])

    def attention(self, halves: bool = True) -> tuple:
        """Sequences in slots of any order, keys and values now and then in float16, if `halves`; NaN where no row may look."""
        group, kv_heads, width = self.size(1, 2, 5, 20), self.size(1, 2), self.size(1, 6, 16, 20, 33, 100)
        firsts = self.rng.choice([0, 3, 60, 63, 64, 65, 127], self.size(1, 2))
        counts = self.rng.choice([1, 2, 9, 70] if group < 20 else [1, 2, 9], len(firsts))
        slots = self.rng.permutation(len(firsts) + 1)[: len(firsts)]
        slot = np.repeat(slots, counts)
        position = np.concatenate([np.arange(first, first + n) for first, n in zip(firsts, counts, strict=True)])
        places = int(position.max()) + 3
        q = self.numbers(len(slot), group * kv_heads, width)
        k, v = (self.numbers(len(firsts) + 1, places, kv_heads, width) for _ in range(2))
        for s, first, n in zip(slots, firsts, counts, strict=True):
            k[s, first + n :] = v[s, first + n :] = np.nan
        if halves and self.rng.random() < 0.3:
            with np.errstate(over="ignore"):
                k, v = (array.astype(np.float16).view(np.int16) for array in (k, v))
        order = self.rng.permutation(len(slot)) if self.rng.random() < 0.3 else slice(None)  # rows need not be neighbours
        return q[order], k, v, slot[order], position[order]

    def scoring(self) -> tuple:
        return [(None, None), (f32(0.3), None), (None, f32(2)), (f32(0.05), f32(0.5))][self.rng.integers(4)]

    def window(self) -> int | None:
        return [None, 1, 5, 63, 64, 65, 1000][self.rng.integers(7)]

    def masked(self) -> tuple:
        q, k, v, slot, position = self.attention(halves=False)
        ends = int(position.max()) + 1
        mask = self.rng.choice(f32([0, 0, 1.5, -np.inf]), (self.size(1, int(slot.max()) + 1), ends, ends))
        mask[:, self.rng.integers(ends)] = -np.inf
        first, end = sorted(self.rng.integers(ends + 1, size=2))  # keys that half of the queries do not see: of whole chunks, too
        mask[:, self.rng.random(ends) < 0.5, first:end] = -np.inf
        return q, k, v, slot, position, mask, *self.scoring()

    def rope(self) -> tuple:
        rows, heads, pairs = self.size(1, 2, 5), self.size(1, 3), self.size(1, 3, 16)
        return self.numbers(rows, heads, 2 * pairs + self.size(0, 1, 6)), self.numbers(rows, pairs), self.numbers(rows, pairs)

    def router(self) -> np.ndarray:
        logits = self.numbers(self.size(1, 5), self.size(1, 5, 37, 128))
        return np.rint(logits) if self.rng.random() < 0.5 else logits


def top_experts(d: Draw) -> tuple:
    logits = d.router()
    return logits, int(d.rng.integers(1, logits.shape[1] + 1))


def expert_weights(d: Draw) -> tuple:
    logits, k = top_experts(d)
    return logits, cpu.top_experts(logits, k), bool(d.rng.integers(2))


def layer_norm(d: Draw) -> tuple:
    x, gain, bias, eps = selftest.ROWS["layer_norm"](d.written)
    return x + f32(d.size(0, 30)), gain, [None, bias][d.rng.integers(2)], eps


def embed(d: Draw) -> tuple:
    return d.table(11, d.size()), d.rng.integers(0, 11, d.size(1, 3, 20))


def embed_blocks(d: Draw) -> tuple:
    _, data, kind = d.blocks()
    return data, kind, d.rng.integers(0, len(data), 4)


def matmul(d: Draw) -> tuple:
    x = d.numbers(d.size(1, 2, 7, 70), d.size())
    return x, d.table(d.size(1, 9, 32, 33, 70), x.shape[1])


def matmuls_blocks_as_llama_cpp(d: Draw) -> tuple:
    """Matrices of up to three types, of one size of a block."""
    x, data, kind = d.blocks()
    others = [other for other in BLOCK_TYPES if other.block == kind.block]
    chosen = [others[i] for i in d.rng.integers(0, len(others), 2)]
    return x, (data, kind), *((random_blocks(d.rng, other, 3, x.shape[1] // other.block).data, other) for other in chosen)


def ternary_matmul(d: Draw) -> tuple:
    q, scale = d.codes()
    return q, scale, *d.ternary(*q.shape)


def ternary_matmuls(d: Draw) -> tuple:
    q, scale = d.codes()
    return q, scale, *(d.ternary(*q.shape) for _ in range(d.size(1, 2, 3)))


def round_as(d: Draw) -> tuple:
    """Ties and several of the largest magnitude among them."""
    x = d.numbers(d.size(1, 2, 5), d.size(1, 3), 32 * d.size(1, 2))
    return np.rint(x) if d.rng.random() < 0.3 else x, KINDS[d.rng.integers(1, len(KINDS))]


CASES = {name: lambda d, arguments=arguments: arguments(d.written) for name, arguments in selftest.ROWS.items()} | {
    "embed": embed,
    "embed_blocks": embed_blocks,
    "matmul": matmul,
    "matmul_blocks": Draw.blocks,
    "matmuls_blocks_as_llama_cpp": matmuls_blocks_as_llama_cpp,
    "layer_norm": layer_norm,
    "ternary_matmul": ternary_matmul,
    "ternary_matmuls": ternary_matmuls,
    "rotations": lambda d: (np.exp(d.rng.uniform(-20, np.log(1.6e6), (d.size(1, 5), d.size()))),),
    "rope": Draw.rope,
    "rope_adjacent": Draw.rope,
    "round_as": round_as,
    "attend": lambda d: (*d.attention(), d.window(), *d.scoring()),
    "attend_float16": lambda d: (*d.attention(), d.window(), *d.scoring()),
    "attend_masked": Draw.masked,
    "take": lambda d: (d.numbers(5, d.size()), np.array([3, 0, 3])),
    "top_experts": top_experts,
    "expert_weights": expert_weights,
}


def same(ours: Any, theirs: Any) -> bool:
    """Whether results are equal to the bit, but for the signs and payloads of NaN."""
    if isinstance(theirs, tuple | list):
        return len(ours) == len(theirs) and all(map(same, ours, theirs))
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    if theirs.dtype.kind != "f":
        return bool((ours == theirs).all())
    number = ~np.isnan(theirs)
    return bool((np.isnan(ours) != number).all()) and ours[number].tobytes() == theirs[number].tobytes()
