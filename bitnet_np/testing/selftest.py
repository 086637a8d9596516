"""Every kernel against known bits, on this very machine.

The arithmetic contract promises the same bits everywhere, so the results of each kernel on fixed inputs have one digest, recorded in
data/known_bits.json. A digest that differs here means a compiler or processor that breaks the contract. Inputs come from integer arithmetic
alone; shapes have tails (widths that fill no whole register), several tiles and several attention chunks.
"""

import hashlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import IQ4_XS, NVFP4, Q2_K, Q4_K, Q5_1, Q6_K, Q8_0, TQ2_0
from ..engine import masks
from ..engine.backend import Backend
from ..engine.dialects import BITNET_CPP, EXACT, LLAMA_CPP, Dialect
from ..engine.forward_pass import forward_full, forward_incremental
from ..files import embedded
from ..files.load import load
from ..kernels import backward, cpu
from ..kernels.packing import from_masters
from ..kernels.sampling import drawn
from ..model import packing
from ..model.families import ARCHITECTURES
from .models import random_model

Case = Callable[[], tuple[NDArray, ...]]


def digest(*arrays: NDArray) -> str:
    """sha256 over the little-endian bytes of the arrays, in C order."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return total.hexdigest()


def noise(seed: int, *shape: int) -> NDArray[np.float32]:
    """Numbers in [-1, 1) with 24 bits each: splitmix64 of the index, so no library's generator is involved."""
    with np.errstate(over="ignore"):
        x = (np.arange(int(np.prod(shape)), dtype=np.uint64) + np.uint64(seed << 32)) * np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        x ^= x >> np.uint64(31)
    return ((x >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1).astype(np.float32).reshape(shape)


def rows_that_tell_lanes() -> tuple[NDArray[np.float32], NDArray[np.bool_]]:  # -> [R, 1024], [R]
    """Rows of squares whose order of addition in float64 shows in float32, and True for each whose sum exceeds a tie of float32.

    1.5^2 + 2^-23 is the tie, in lane 0. Two squares of 0.75 * 2^-52 break it if they are added to each other before they reach lane 0: in
    one lane, or in two lanes of the upper half of a fold. Added to lane 0 one by one, they are lost.
    """
    pairs = [(64, 192), (32, 96), (16, 48), (8, 24), (4, 12), (2, 6), (1, 3), (128, 384)]  # the last two are in lane 0 themselves
    x = np.zeros((len(pairs), 1024), np.float32)
    x[:, 0], x[:, [256, 512]] = 1.5, 2**-12
    for row, pair in zip(x, pairs, strict=True):
        row[list(pair)] = 0.75**0.5 * 2**-26
    return x, np.arange(len(pairs)) < len(pairs) - 1


def _tables(n: int, m: int) -> dict[str, NDArray]:
    table = noise(1, n, m)
    return {"float32": table, "float16": table.astype(np.float16), "bfloat16": (table.view(np.uint32) >> 16).astype(np.uint16)}


def _embed(ops: Backend, table: NDArray) -> tuple[NDArray, ...]:
    return (ops.embed(table, np.array([36, 0, 7])),)


def _matmul(ops: Backend, table: NDArray, rows: int) -> tuple[NDArray, ...]:
    return (ops.matmul(noise(7, rows, 161), table),)


def _ternary(ops: Backend, rows: int, width: int) -> tuple[NDArray, ...]:
    q, scale = ops.quantize(3 * noise(2, rows, width))
    weights = packing.pack(np.rint(noise(3, 37, width)).astype(np.int8), 0.37)
    return (ops.ternary_matmul(q, scale, weights.codes, weights.scale, 37),)


def _attention(kernel: Callable, *options: Any) -> tuple[NDArray, ...]:
    q, k, v = 4 * noise(4, 137, 6, 20), noise(5, 2, 150, 2, 20), noise(6, 2, 150, 2, 20)
    slot, position = np.repeat([1, 0], [130, 7]), np.concatenate([np.arange(130), np.arange(143, 150)])
    return (kernel(q, k, v, slot, position, *options),)


def _masked(ops: Backend) -> tuple[NDArray, ...]:
    """Attention with a window, sinks and biases; one row sees no key, and some rows do not see some chunks."""
    mask = masks.mask(130, 130, masks.Pattern(window=70, sinks=3)) + noise(19, 130, 130)
    mask[99] = -np.inf
    q, (k, v) = 4 * noise(4, 130, 6, 20), noise(5, 2, 1, 130, 2, 20)
    return (ops.attend_masked(q, k, v, np.zeros(130, np.int64), np.arange(130), mask[None]),)


def _filled(ops: Backend) -> tuple[NDArray, ...]:
    """The mask of 3 sequences of 5, 0 and 70 queries."""
    out, queries, past = np.empty((3, 70, 70), np.float32), np.array([5, 0, 70]), np.array([9, 1, 0])
    ops.fill_mask(out, 0, queries, past, past + queries, *masks.Pattern(7, 2, 16, 1).numbers)
    return (out,)


def backward_cases() -> dict[str, Case]:
    """The cases of the backward pass, by name: two sequences, of 130 rows and of 7."""
    cuts = np.array([0, 130, 137])

    def attend_back() -> tuple[NDArray, ...]:
        q, attended, dy = (4 * noise(seed, 137, 6, 20) for seed in (20, 21, 22))
        return backward.attend_back(q, noise(23, 137, 2, 20), noise(24, 137, 2, 20), attended, dy, cuts, 70)

    def cross_entropy() -> tuple[NDArray, ...]:
        """The gradient alone: losses take a logarithm, whose bits depend on the math library."""
        logits = 9 * noise(25, 5, 161)
        backward.cross_entropy_in_place(logits, np.array([160, 0, 7, 7, 99]), 0.01)
        return (logits,)

    def add_rows() -> tuple[NDArray, ...]:
        out = noise(26, 3, 70)
        backward.add_rows(out, noise(27, 137, 70), np.arange(137) % 3, cuts)
        return (out,)

    def quantize_weights() -> tuple[NDArray, ...]:
        packed = from_masters(noise(38, 37, 161), 2.0)
        return packed, backward.dense(packed, np.float32(0.37), (37, 161))

    gate, up, dy = 9 * noise(28, 3, 161), noise(29, 3, 161), noise(30, 3, 161)
    return {
        "product": lambda: (backward.product(noise(31, 37, 300), noise(32, 300, 70)),),
        "transposed_product": lambda: (backward.transposed_product(noise(33, 137, 37), noise(34, 137, 70), cuts),),
        "rms_norm_back": lambda: backward.rms_norm_back(noise(35, 137, 161), noise(36, 161), 1e-5, noise(37, 137, 161), cuts),
        "relu2_gate_back": lambda: backward.relu2_gate_back(gate, up, dy),
        "silu_gate_back": lambda: backward.silu_gate_back(gate, up, dy),
        "attend_back": attend_back,
        "cross_entropy_in_place": cross_entropy,
        "add_rows": add_rows,
        "quantize_weights": quantize_weights,
        "dequantize": lambda: (backward.dequantize(*cpu.quantize(noise(39, 5, 161))),),
    }


def _router_logits() -> NDArray[np.float32]:
    """Logits of 5 tokens for 37 experts, with ties."""
    return (np.rint(40 * noise(44, 5, 37)) / np.float32(8)).astype(np.float32)


def _draws() -> tuple[NDArray, ...]:
    """Tokens drawn from 4,096 logits, with ties."""
    logits = (np.rint(200 * noise(45, 4096)) / np.float32(32)).astype(np.float32)
    probabilities = cpu.exponential(logits - logits.max())
    return (np.array([drawn(logits, probabilities, top_p, n / 64) for top_p in (1.0, 0.9) for n in range(64)]),)


def _forward(ops: Backend, dialect: Dialect) -> tuple[NDArray, ...]:
    with embedded.model_path() as path:
        return (forward_full(load(path), embedded.recording()["tokens_T64"][None], dialect=dialect, ops=ops),)


def cases(ops: Any = cpu) -> dict[str, Case]:
    """Every case, by name: a function that computes its results. ops: a backend, which the cases of forward operations call."""
    named: dict[str, Case] = {}
    for name, table in _tables(37, 161).items():
        named[f"embed {name}"] = partial(_embed, ops, table)
        named[f"matmul {name}, 1 row"] = partial(_matmul, ops, table, 1)
        named[f"matmul {name}, 7 rows"] = partial(_matmul, ops, table, 7)
    named |= {
        "rms_norm": lambda: (ops.rms_norm(noise(8, 5, 2571), noise(9, 2571), 1e-5),),
        "rms_norm, order": lambda: (ops.rms_norm(rows_that_tell_lanes()[0], noise(9, 1024), 1e-5),),
        "quantize": lambda: ops.quantize(9 * noise(10, 5, 2571)),
        "ternary_matmul, 1 row": lambda: _ternary(ops, 1, 2560) + _ternary(ops, 1, 161),
        "ternary_matmul, 7 rows": lambda: _ternary(ops, 7, 2560) + _ternary(ops, 7, 161),
        "rotations": lambda: ops.rotations(np.abs(np.float64(1 << 20) * noise(11, 9, 33).astype(np.float64))),
        "rope": lambda: (ops.rope(noise(12, 9, 3, 66), noise(13, 9, 33), noise(14, 9, 33)),),
        "attend": lambda: _attention(ops.attend),
        "attend, window": lambda: _attention(ops.attend, 70),
        "attend, scale and cap": lambda: _attention(ops.attend, 70, np.float32(0.3), np.float32(2)),
        "attend_float16": lambda: _attention(ops.attend_float16),
        "attend_masked": partial(_masked, ops),
        "fill_mask": partial(_filled, ops),
        "rope, part of a head": lambda: (ops.rope(noise(12, 9, 3, 66), noise(13, 9, 10), noise(14, 9, 10)),),
        "rope_adjacent": lambda: (ops.rope_adjacent(noise(12, 9, 3, 66), noise(13, 9, 33), noise(14, 9, 33)),),
        "layer_norm": lambda: (ops.layer_norm(noise(8, 5, 2571), noise(9, 2571), noise(18, 2571), 1e-5),),
        "silu_gate": lambda: (ops.silu_gate(9 * noise(15, 3, 161), noise(16, 3, 161)),),
        "gelu": lambda: (ops.gelu(9 * noise(15, 3, 1610)),),
        "gelu_gate": lambda: (ops.gelu_gate(9 * noise(15, 3, 1610), noise(16, 3, 1610)),),
        "soft_cap": lambda: (ops.soft_cap(9 * noise(15, 3, 1610), np.float32(2)),),
        "top_experts": lambda: (ops.top_experts(_router_logits(), 3),),
        "expert_weights": lambda: tuple(
            ops.expert_weights(_router_logits(), ops.top_experts(_router_logits(), 3), n) for n in (True, False)
        ),
        "mix": lambda: (ops.mix(noise(40, 5, 3, 161), noise(41, 5, 3)),),
        "sigmoid_gate": lambda: (ops.sigmoid_gate(noise(42, 5, 161), 9 * noise(43, 5, 1)),),
        "gelu_tanh": lambda: (ops.gelu_tanh(9 * noise(15, 3, 1610)),),
        "relu2_gate": lambda: (ops.relu2_gate(noise(15, 3, 161), noise(16, 3, 161)),),
        "forward, exact": partial(_forward, ops, EXACT),
        "forward, bitnet.cpp": partial(_forward, ops, BITNET_CPP),
        "exponential": lambda: (cpu.exponential(110 * noise(17, 4096)),),
        "sampling": _draws,
    }
    return named | backward_cases()


_BLOCKS = (Q5_1, Q8_0, Q2_K, Q4_K, Q6_K, TQ2_0, IQ4_XS, NVFP4)
"""Block types of every kind: with and without small scales, either kind of minimum, tables, and every size of a unit."""


def model_cases(ops: Backend) -> dict[str, Case]:
    """Logits of a small model of every architecture, and of some block types: whole and token by token, exact and as llama.cpp rounds."""
    tokens = np.arange(9).reshape(1, 9)

    def logits(**shape: Any) -> tuple[NDArray, ...]:
        model, ways = random_model(0, n_layers=2, **shape), (forward_full, forward_incremental)
        return tuple(way(model, tokens, dialect=dialect, ops=ops) for way in ways for dialect in (EXACT, LLAMA_CPP))

    wide = {"family": "llama", "width": 256, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 64}
    named: dict[str, Case] = {f"model, {family}": partial(logits, family=family) for family in ARCHITECTURES}
    return named | {f"model, {kind.name}": partial(logits, weights=kind.name, table=kind.name, **wide) for kind in _BLOCKS}


def known_bits() -> dict[str, str]:
    """The recorded digests."""
    return json.loads((files("bitnet_np") / "data" / "known_bits.json").read_text("utf-8"))


def run(beginning: str = "") -> Iterator[tuple[str, bool]]:
    """The name of each case and whether it gives the known bits. Only cases whose names start with `beginning` are compiled and run."""
    known = known_bits()
    for name, compute in cases().items():
        if name.startswith(beginning):
            yield name, digest(*compute()) == known.get(name)


def against(other: Backend) -> Iterator[tuple[str, bool]]:
    """The name of each case of a backend's operations and of whole models, and whether another backend has the bits of the kernels."""
    by_kernels = {"exponential", "sampling", *backward_cases()}  # whatever the backend
    ours, theirs = (cases(ops) | model_cases(ops) for ops in (cpu, other))
    for name in ours:
        if name not in by_kernels:
            yield name, digest(*ours[name]()) == digest(*theirs[name]())
