"""Random models for property tests, ours and those of other engines."""

import os
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from . import packing, widen
from .errors import UnsupportedError
from .families import FAMILIES, QKV, layer_shapes
from .files.gguf_writer import present, write_model
from .kernels.block_formats import FORMATS
from .model import Blocks, Config, Layer, Linear, Model, Table, Ternary, Weights, frozen
from .rope import rope_frequencies
from .tensor_types import BLOCK_TYPES, TensorType

SHAPE = {
    "vocab": 50,
    "width": 100,
    "n_layers": 2,
    "ffn": 160,
    "heads": 6,
    "kv_heads": 3,
    "head_dim": 20,
    "context": 512,
    "eps": 1e-5,
    "rope_base": 10000.0,
}

_BLOCKS = {kind.name: kind for kind in BLOCK_TYPES}


def random_model(
    seed: int,
    *,
    family: str = "bitnet-b1.58",
    table: str = "float32",
    weights: str = "",
    tied: bool = True,
    gain: float = 1.0,
    inner_norms: bool = False,
    **shape: Any,
) -> Model:
    """A model of SHAPE, but for what `shape` says, in which every part matters.

    No two heads are alike, no row of a matrix is zero, activations have a spread of about 1 in front of every operation, and every
    matrix and norm has a scale of its own: a bug anywhere shows. `family` is an architecture of families.py; it may have biases, scales
    and factors of RoPE's frequencies, and then has them. `table` is the dtype of embedding and head: float32, float16 or bfloat16, or
    the name of a block type; `weights` is that of the layers' matrices, or "ternary", which a BitNet's are if nothing is said.
    `inner_norms` puts a norm into each linear. `gain` multiplies the scales of all ternary matrices.
    """
    rng = np.random.default_rng(seed)
    told = FAMILIES[family]
    config = Config(family, **{**SHAPE, **told.config, **shape})
    weights = weights or ("ternary" if told.ternary else table)

    def matrix(n: int, m: int) -> Weights:
        if weights == "ternary":
            codes = rng.choice([-1, 0, 1], (n, m), p=[0.35, 0.3, 0.35])
            codes[np.arange(n), rng.integers(0, m, n)] = rng.choice([-1, 1], n)  # no row is zero
            return packing.pack(codes, gain * rng.uniform(0.8, 1.25) / np.sqrt(0.7 * m))  # unit rows in, about unit rows out
        return random_table(rng, weights, n, m, gain * rng.uniform(0.8, 1.25) / np.sqrt(m))

    def vector(n: int, mean: float = 1.0) -> NDArray[np.float32]:
        return rng.normal(mean, 0.3, n).astype(np.float32)

    def linear(name: str, n: int, m: int) -> Linear:
        biased = name in told.biases + told.optional_biases
        return Linear(
            matrix(n, m),
            vector(n, 0.0) if biased else None,
            np.float32(rng.uniform(0.8, 1.25)) if told.scales else None,
            vector(m) if inner_norms else None,
            1e-6 if inner_norms else None,
        )

    def float_table(rows: int) -> Table:
        return random_table(rng, table, rows, config.width)

    def layer() -> Layer:
        fields: dict[str, Any] = {}
        for name, size in layer_shapes(config).items():
            if name in told.matrices:
                fields[name] = linear(name, size[0], size[1])
            else:
                fields[name] = vector(size[0])
                if config.norm == "layer":
                    fields[name + "_bias"] = vector(size[0], 0.0)
        return frozen(Layer(**fields))

    layers = tuple(layer() for _ in range(config.n_layers))
    token_embd, output_norm = float_table(config.vocab), vector(config.width)
    factors = rng.uniform(1, 8, config.rope_pairs).astype(np.float32) if told.rope_factors else None
    return frozen(
        Model(
            config=config,
            token_embd=token_embd,
            layers=layers,
            output_norm=output_norm,
            rope_frequency=rope_frequencies(config.rope_base, 2 * config.rope_pairs, factors, config.rope_scaling),
            output=None if tied else float_table(config.vocab),
            output_bias=vector(config.vocab, 0.0) if told.head_bias else None,
            output_norm_bias=vector(config.width, 0.0) if config.norm == "layer" else None,
            position_embd=float_table(config.context) if told.positions else None,
            rope_factors=factors,
        )
    )


def random_table(rng: np.random.Generator, kind: str, n: int, m: int, spread: float = 1.0) -> Table:
    """Normal numbers [n, m] of a standard deviation of `spread`, in a float dtype (bfloat16 is cut) or one of ggml's block types.

    What gguf-py cannot quantise, the K-quants, is made of random bytes, with scales that give about the same.
    """
    if kind not in _BLOCKS:
        single = (rng.standard_normal((n, m)) * spread).astype(np.float32)
        return (single.view(np.uint32) >> 16).astype(np.uint16) if kind == "bfloat16" else single.astype(kind)
    found = _BLOCKS[kind]
    if kind.endswith("_K"):
        data = _random_blocks(rng, found, n, m, spread)
    else:
        data = gguf.quants.quantize((rng.standard_normal((n, m)) * spread).astype(np.float32), gguf.GGMLQuantizationType[kind])
    return frozen(Blocks(data, found, (n, m)))


def _random_blocks(rng: np.random.Generator, kind: TensorType, n: int, m: int, spread: float) -> NDArray[np.uint8]:
    data = rng.integers(0, 256, (n, m // kind.block * kind.block_bytes), np.uint8)
    records = data.view(FORMATS[kind.name].layout)
    halves = FORMATS[kind.name].halves

    def weights(*scales: float) -> NDArray[np.float32]:
        for half, scale in zip(halves, scales, strict=True):
            records[half] = np.float16(scale).view(np.uint16)
        return widen.float32(Blocks(data, kind, (n, m)))

    units = np.eye(len(halves))
    means = [float(weights(*unit).mean()) for unit in units]
    balance = (1.0,) if len(halves) == 1 else (1.0, -means[0] / means[1])
    size = spread / float(weights(*balance).std())
    for half, factor in zip(halves, balance, strict=True):
        records[half] = (size * factor * rng.uniform(0.7, 1.3, records.shape)).astype(np.float16).view(np.uint16)
    return data


def write_gguf(path: str | os.PathLike, model: Model, *, fused: bool = False) -> None:
    """Write a model of a family of families.py as a GGUF file without a tokenizer; `fused`: queries, keys and values in one tensor.

    Raises UnsupportedError for what such a file cannot say.
    """
    write_model(path, model, {"tokenizer.ggml.model": "none"}, fields=_fused if fused else present)


def _fused(layer: Layer) -> dict[str, Any]:
    named = present(layer)
    q, k, v = (named.pop(name) for name in QKV)
    return named | {"attn_qkv": Linear(_joined(q.weights, k.weights, v.weights), _concatenated(q.bias, k.bias, v.bias))}


def _joined(*parts: Weights) -> Weights:
    """Matrices of one type, one above the other."""
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    if isinstance(parts[0], Ternary):
        matrices, scales = zip(*((packing.unpack(part), part.scale) for part in parts if isinstance(part, Ternary)), strict=True)
        if len(set(scales)) > 1:
            raise UnsupportedError(f"ternary matrices of scales {', '.join(map(str, scales))} cannot share a tensor")
        return packing.pack(np.concatenate(matrices), scales[0])
    if isinstance(parts[0], Blocks):
        return Blocks(np.concatenate([part.data for part in parts if isinstance(part, Blocks)]), parts[0].type, shape)
    return np.concatenate([part for part in parts if isinstance(part, np.ndarray)])


def _concatenated(*parts: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    there = [part for part in parts if part is not None]
    return np.concatenate(there) if there else None
