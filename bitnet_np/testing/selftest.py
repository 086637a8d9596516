"""Every kernel against known bits, on this very machine.

The arithmetic contract promises the same bits everywhere, so the results of each kernel on fixed inputs have one digest, recorded in
data/known_bits.json. A digest that differs here means a compiler or processor that breaks the contract. Inputs come from integer arithmetic
alone; shapes have tails (widths that fill no whole register), several tiles and several attention chunks. A test makes every kernel wrong
and sees that a digest differs.
"""

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources import files
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.tensor_types import ALL_BLOCK_TYPES, TQ1_0, TQ2_0, TensorType
from ..engine import masks
from ..engine.backend import Backend
from ..engine.cache import new_cache
from ..engine.cache_types import KINDS
from ..engine.dialects import BITNET_CPP, EXACT, Dialect
from ..engine.forward_pass import forward, forward_full
from ..files import embedded
from ..files.load import load
from ..kernels import checks, cpu, launching
from ..kernels.ggml import activations
from ..kernels.packing import from_blocks, from_i2s, from_masters, from_quarters, magnitude_sums
from ..model import packing
from ..model.records import Ternary
from .model_cases import model_cases
from .models import bfloat16_bits, random_table
from .noise import Noise, noise
from .part_cases import COLUMNS, part_cases

Case = Callable[[], tuple[NDArray, ...]]


def digest(*arrays: NDArray) -> str:
    """sha256 over the little-endian bytes of the arrays, in C order."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes())
    return total.hexdigest()


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


ROWS: dict[str, Callable[[Callable[..., NDArray[np.float32]]], tuple]] = {
    "rms_norm": lambda n: (n(8, 5, 2571), n(9, 2571), 1e-5),
    "layer_norm": lambda n: (n(8, 5, 2571), n(9, 2571), n(18, 2571), 1e-5),
    "quantize": lambda n: (9 * n(10, 5, 2571),),
    "rope": lambda n: (n(12, 9, 3, 66), n(13, 9, 33), n(14, 9, 33)),
    "rope_adjacent": lambda n: (n(12, 9, 3, 66), n(13, 9, 33), n(14, 9, 33)),
    "add": lambda n: (n(54, 5, 161), n(55, 5, 161)),
    "add_bias": lambda n: (n(54, 5, 161), n(65, 161)),
    "scaled": lambda n: (n(54, 5, 161), np.float32(0.3)),
    "relu2_gate": lambda n: (n(15, 3, 161), n(16, 3, 161)),
    "silu_gate": lambda n: (9 * n(15, 3, 161), n(16, 3, 161)),
    "gelu_gate": lambda n: (9 * n(15, 3, 1610), n(16, 3, 1610)),
    "gelu": lambda n: (9 * n(15, 3, 1610),),
    "gelu_tanh": lambda n: (9 * n(15, 3, 1610),),
    "soft_cap": lambda n: (9 * n(15, 3, 1610), np.float32(2)),
    "mix": lambda n: (n(40, 5, 3, 161), n(41, 5, 3)),
    "sigmoid_gate": lambda n: (n(42, 5, 161), 9 * n(43, 5, 1)),
}
"""Arguments of operations on rows, from n(seed, *shape): `noise`. Tests draw other numbers, and a size for each size that is written."""


def _tables(n: int, m: int) -> dict[str, NDArray]:
    table = noise(1, n, m)
    return {"float32": table, "float16": table.astype(np.float16), "bfloat16": bfloat16_bits(table)}


def _results(function: Callable[..., Any], *arguments: Any) -> tuple[NDArray, ...]:
    result = function(*arguments)
    return result if isinstance(result, tuple) else (result,)


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


def _ternary_blocks(kind: TensorType) -> tuple[NDArray, ...]:
    """Random codes of TQ1_0 or TQ2_0 packed, of which the last row's first block has the scale 0."""
    data = (np.abs(noise(46, 5, 3 * kind.block_bytes)) * 256).astype(np.uint8)
    scales = data.reshape(-1, kind.block_bytes)[:, -2:]
    scales[:], scales[-3] = 1, 0
    return (from_blocks(data, kind, 1 / float(scales[0].view(np.float16)[0])),)


def _answers(check: Callable[[NDArray], bool], array: NDArray, wrong: Any) -> tuple[NDArray, ...]:
    """What a check says of an array, and of the same with a wrong number in its first, a middle and its last place."""
    answers = [check(array)]
    for place in (0, array.size // 2, array.size - 1):
        changed = array.copy()
        changed.reshape(-1)[place] = wrong
        answers.append(check(changed))
    return (np.array(answers),)


def loading_cases() -> dict[str, Case]:
    """The cases of kernels that prepare weights, by name: packing, checks, and llama.cpp's rounding."""
    named: dict[str, Case] = {}
    for name, wrong in (("float32", np.nan), ("float16", np.inf), ("bfloat16", 0xFF80)):
        named[f"has_non_finite {name}"] = partial(_answers, checks.has_non_finite, _tables(37, 161)[name], wrong)
        named[f"magnitude_sums {name}"] = partial(_results, magnitude_sums, _tables(137, 161)[name])
        named[f"from_masters {name}"] = partial(_results, from_masters, _tables(37, 161)[name], 2.0)

    def quantize_weights() -> tuple[NDArray, ...]:
        packed = from_masters(noise(38, 37, 161), 2.0)
        return packed, packing.unpack(Ternary(packed, np.float32(1), (37, 161))).astype(np.float32) * np.float32(0.37)

    codes = (np.abs(noise(50, 131 * 64)) * 256).astype(np.uint8) & np.uint8(0x55)
    quarters = (np.abs(noise(51, 10, 161)) * 256).astype(np.uint8) & np.uint8(0x55)
    named |= {
        "quantize_weights": quantize_weights,
        "has_code_three": partial(_answers, checks.has_code_three, codes[:-3], 3),
        "from_i2s": lambda: (from_i2s(codes, (131, 161)),),
        "from_quarters": lambda: (packed := from_quarters(quarters, 37), np.asarray(checks.has_code_three(packed))),
        "from_blocks TQ1_0": partial(_ternary_blocks, TQ1_0),
        "from_blocks TQ2_0": partial(_ternary_blocks, TQ2_0),
        "round_rows": lambda: (*activations.rounded(noise(52, 5, 768), 256)[:2], *activations.rounded(noise(53, 5, 96), 32)),
    }
    return named


def _router_logits() -> NDArray[np.float32]:
    """Logits of 5 tokens for 37 experts, with ties."""
    return (np.rint(40 * noise(44, 5, 37)) / np.float32(8)).astype(np.float32)


def _blocks(ops: Backend, kind: TensorType) -> tuple[NDArray, ...]:
    """Rows of a table in blocks, and its products with one row and with several."""
    data = random_table(Noise(2), kind.name, 37, 512).data
    results = [ops.embed_blocks(data, kind, np.array([36, 0, 7]))]
    for rows in (1, 7):
        x = noise(58, rows, 512)
        results += [ops.matmul_blocks(x, data, kind), *ops.matmuls_blocks_as_llama_cpp(x, (data, kind), (data[5:], kind))]
    return tuple(results)


def _blocks_of_many_rows(ops: Backend, kind: TensorType) -> tuple[NDArray, ...]:
    """Products of enough rows for matrix tiles, where the processor has them: whole tiles of rows, and a remainder."""
    x, data = noise(62, 53, 512), random_table(Noise(2), kind.name, 37, 512).data
    return tuple(y for part in (x, x[:48]) for y in ops.matmuls_blocks_as_llama_cpp(part, (data, kind)))


def _attention_in_float16(ops: Backend) -> tuple[NDArray, ...]:
    """Attention whose keys and values are in float16: whole runs, and a single row of many keys."""
    k, v = noise(59, 2, 1, 320, 2, 20).astype(np.float16).view(np.int16)
    whole = ops.attend(4 * noise(60, 130, 6, 20), k, v, np.zeros(130, np.int64), np.arange(130))
    return whole, ops.attend(4 * noise(56, 1, 3, 20), k[:, :, :1].copy(), v[:, :, :1].copy(), np.array([0]), np.array([299]))


def _forward(ops: Backend, dialect: Dialect) -> tuple[NDArray, ...]:
    with embedded.model_path() as path:
        return (forward_full(load(path), embedded.recording()["tokens_T64"][None], dialect=dialect, ops=ops),)


def _token_by_token(ops: Backend) -> tuple[NDArray, ...]:
    """Long enough that passes are recorded and run again (engine/repeats.py)."""
    with embedded.model_path() as path:
        model = load(path)
    cache = new_cache(model.config, 1, 20, ops)
    return tuple(forward(model, [[token]], cache, ops=ops) for token in embedded.recording()["tokens_T64"][:20])


def cases(ops: Any = cpu) -> dict[str, Case]:
    """Every case, by name: a function that computes its results. ops: a backend, which the cases of forward operations call."""
    named: dict[str, Case] = {}
    for name, table in _tables(37, 161).items():
        named[f"embed {name}"] = partial(_results, ops.embed, table, np.array([36, 0, 7]))
        for rows in ("1 row", "7 rows", "131 rows"):
            named[f"matmul {name}, {rows}"] = partial(_results, ops.matmul, noise(7, int(rows.split()[0]), 161), table)
    named |= {name: partial(_results, getattr(ops, name), *arguments(noise)) for name, arguments in ROWS.items()}
    named |= {
        "rms_norm, order": lambda: (ops.rms_norm(rows_that_tell_lanes()[0], noise(9, 1024), 1e-5),),
        "ternary_matmul, 1 row": lambda: _ternary(ops, 1, 2560) + _ternary(ops, 1, 161),
        "ternary_matmul, 7 rows": lambda: _ternary(ops, 7, 2560) + _ternary(ops, 7, 161),
        "rotations": lambda: ops.rotations(np.abs(np.float64(1 << 20) * noise(11, 9, 33).astype(np.float64))),
        "attend": lambda: _attention(ops.attend),
        "attend, window": lambda: _attention(ops.attend, 70),
        "attend, scale and cap": lambda: _attention(ops.attend, 70, np.float32(0.3), np.float32(2)),
        "attend, keys in float16": partial(_attention_in_float16, ops),
        "attend_float16": lambda: _attention(ops.attend_float16),
        "attend_masked": partial(_masked, ops),
        "rope, part of a head": lambda: (ops.rope(noise(12, 9, 3, 66), noise(13, 9, 10), noise(14, 9, 10)),),
        "top_experts": lambda: (ops.top_experts(_router_logits(), 3),),
        "expert_weights": lambda: tuple(
            ops.expert_weights(_router_logits(), ops.top_experts(_router_logits(), 3), n) for n in (True, False)
        ),
        "forward, exact": partial(_forward, ops, EXACT),
        "forward, bitnet.cpp": partial(_forward, ops, BITNET_CPP),
        "token by token": partial(_token_by_token, ops),
        "attend, 1 row": lambda: (ops.attend(4 * noise(56, 1, 3, 20), *noise(57, 2, 1, 320, 1, 20), np.array([0]), np.array([299])),),
    }
    named |= {f"round_as {kind}": partial(_results, ops.round_as, 9 * noise(66, 5, 3, 96), kind) for kind in KINDS[1:]}
    named |= {f"blocks {kind.name}": partial(_blocks, ops, kind) for kind in ALL_BLOCK_TYPES}
    named |= {f"blocks {kind.name}, many rows": partial(_blocks_of_many_rows, ops, kind) for kind in ALL_BLOCK_TYPES}
    named |= part_cases(ops, _tables(COLUMNS, 1100)) | cases_of_kernels() | model_cases(ops)
    return {name: named[name] for name in (*known_bits(), *named) if name in named}  # in the order of the records


def cases_of_kernels() -> dict[str, Case]:
    """The cases that no backend computes but the kernels alone."""
    exponential: dict[str, Case] = {"exponential": lambda: (cpu.exponential(110 * noise(17, 4096)),)}
    return exponential | loading_cases()


@contextmanager
def on_one_thread(alone: bool) -> Iterator[None]:
    """Let every kernel run on the calling thread alone, or let threads share every kernel, however small it is."""
    before = launching.SMALL
    launching.SMALL = sys.maxsize if alone else -1
    try:
        yield
    finally:
        launching.SMALL = before


def known_bits() -> dict[str, str]:
    """The recorded digests."""
    return json.loads((files("bitnet_np") / "data" / "known_bits.json").read_text("utf-8"))


def run(beginning: str = "") -> Iterator[tuple[str, bool]]:
    """The name of each case and whether it gives the known bits. Only cases whose names start with `beginning` are compiled and run.

    Each runs on this thread alone. Cases of operations run again with every kernel shared out. Whole models and parts do not: they call the
    same kernels some thousand times, and threads that are woken as often take seconds on a busy machine.
    """
    known = known_bits()
    for name, compute in cases().items():
        if name.startswith(beginning):
            yield name, all(computed == known.get(name) for computed in digests(name, compute))


def digests(name: str, compute: Case) -> Iterator[str]:
    """The digests of a case, one for each of its ways."""
    ways = (True,) if name.startswith(("model", "parts")) else (True, False)
    for alone in ways:
        with on_one_thread(alone):
            yield digest(*compute())


def against(other: Backend) -> Iterator[tuple[str, bool]]:
    """The name of each case that a backend computes, and whether another backend has the bits of the kernels."""
    by_kernels, theirs = cases_of_kernels(), cases(other)
    for name, ours in cases().items():
        if name not in by_kernels:
            yield name, digest(*ours()) == digest(*theirs[name]())
