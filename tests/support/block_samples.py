"""Random matrices in ggml's block types, and the products that llama.cpp recorded of such matrices."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bitnet_np.base.block_formats import FORMATS
from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, BF16, F16, F32, MXFP4, Q4_1, Q5_1, TensorType
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.kernels import cpu
from bitnet_np.kernels.ggml import activations as kernels
from bitnet_np.model.records import Blocks, frozen

LLAMA_CPP = Path(__file__).parents[1] / "data" / "llamacpp"


def random_blocks(rng: np.random.Generator, kind: TensorType, n: int, per_row: int) -> Blocks:
    """Random bytes, but for scales, which are finite and of both signs."""
    data = rng.integers(0, 256, (n, per_row * kind.block_bytes), np.uint8)
    records = data.view(FORMATS[kind.name].layout)
    for half in FORMATS[kind.name].float16_fields:
        records[half] = rng.normal(0, 0.01, records.shape).astype(np.float16).view(np.uint16)
    if kind is MXFP4:
        records["e"] = rng.integers(100, 130, records.shape)
    return frozen(Blocks(data, kind, (n, per_row * kind.block)))


def same_bytes(kind: TensorType, byte: int) -> np.ndarray:
    """3 rows of 512 weights, all bytes of which are alike, but for scales of 1."""
    data = np.full((3, 512 // kind.block * kind.block_bytes), byte, np.uint8)
    records = data.view(FORMATS[kind.name].layout)
    for half in FORMATS[kind.name].float16_fields:
        records[half] = np.float16(1).view(np.uint16)
    if kind is MXFP4:
        records["e"] = 128
    return data


def activations(rng: np.random.Generator, tokens: int, width: int) -> np.ndarray:
    return rng.standard_normal((tokens, width)).astype(np.float32)


def rounded(x: np.ndarray, kind: TensorType) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Codes and scales of activations for a type, and the sums of Q8_1 where they are read."""
    q, scale, sums = kernels.rounded(x, 256 if kind.block == 256 else 32)
    return q, scale, sums if kind in (Q4_1, Q5_1) else None


ROUNDINGS = {
    F32: lambda x: x,
    F16: partial(cpu.round_as, kind="float16"),
    BF16: partial(cpu.round_as, kind="bfloat16"),
    **{kind: kernels.round_as_q8_k if kind.block == 256 else kernels.round_as_q8_0 for kind in ALL_BLOCK_TYPES},
}
"""The type of a matrix -> the rounding of the activations that llama.cpp multiplies it with (on the CPU)."""


def of_code(kind: TensorType, tokens: int, code: int) -> np.ndarray:
    """512 activations of each token whose codes for a type are all alike, with scales of 1. (Q8_K makes the first of the largest -127.)"""
    x = np.full((tokens, 512), code, np.float32)
    if kind.block == 256 and code:
        x[:, ::256] = -127
    return x


MODELS = {
    "bitnet_lq_tq1_0": {"TQ1_0", "Q6_K"},
    "bitnet_tq2_0": {"TQ2_0", "F16"},
    "llama_lq_q4_k_m": {"Q4_K", "Q6_K"},
    "llama_lq_q5_k_pure": {"Q5_K"},
    "llama_q8_0": {"Q8_0"},
}


def recorded(name: str) -> Iterator[tuple[Any, np.ndarray, np.ndarray]]:
    """(matrix, input, output) of the matmuls of which llama.cpp recorded both ends: [17, M], [17, N], or of the first token only."""
    file = open_gguf(LLAMA_CPP / f"{name}.gguf")
    with np.load(LLAMA_CPP / f"{name}.layers_T17.npz") as stored:
        nodes = {key: array.reshape(17, -1) if key != "tokens" else array for key, array in stored.items()}
    bitnet = name.startswith("bitnet")
    for n in range(3):
        x = nodes[f"attn_norm-{n}"]
        yield file.tensors[f"blk.{n}.attn_v.weight"], x, nodes[f"Vcur-{n}"]
        for letter in "QK":  # position 0 is not rotated
            yield file.tensors[f"blk.{n}.attn_{letter.lower()}.weight"], x[:1], nodes[f"{letter}cur-{n}"][:1]
        x = nodes[f"attn_sub_norm-{n}" if bitnet else f"kqv_out-{n}"]
        yield file.tensors[f"blk.{n}.attn_output.weight"], x, nodes[f"attn_out-{n}"]
        if bitnet:
            yield file.tensors[f"blk.{n}.ffn_down.weight"], nodes[f"ffn_sub_norm-{n}"], nodes[f"l_out-{n}"] - nodes[f"ffn_inp-{n}"]
    head = "output.weight" if "output.weight" in file.tensors else "token_embd.weight"
    yield file.tensors[head], nodes["result_norm"], nodes["logits"]


def arm_layout(matrix: np.ndarray) -> np.ndarray:
    """I2_S as bitnet.cpp writes it on ARM, weight by weight: 64 of them in 16 bytes."""
    flat = matrix.reshape(-1) + 1
    out = np.zeros(flat.size // 4, np.uint8)
    for e, code in enumerate(flat):
        out[e // 64 * 16 + e % 16] |= code << (6 - 2 * (e % 64 // 16))
    return out


def four_row_layout(matrix: np.ndarray) -> np.ndarray:
    """I2_S with one column of four rows in a byte."""
    n, m = matrix.shape
    out = np.zeros(n * m // 4, np.uint8)
    for (row, column), weight in np.ndenumerate(matrix):
        out[row // 4 * m + column] |= (weight + 1) << (6 - 2 * (row % 4))
    return out
