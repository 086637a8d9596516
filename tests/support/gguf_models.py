"""A small BitNet as a GGUF file, byte by byte, so that keys and tensors can be wrong, and the same model without a file."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from fuzzing.gguf_bytes import FLOAT32, UINT32, Entry, number, text
from fuzzing.gguf_bytes import gguf as build
from models import assert_same_bits, random_model

from bitnet_np.base.tensor_types import BF16, F16, F32, I2_S
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.model import packing
from bitnet_np.model.families import NORMS, layer_shapes
from bitnet_np.model.records import MATRICES, Linear, Model, Ternary

SIZES = {"vocab": 9, "context": 64, "width": 128, "n_layers": 2, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 32}
MODEL = random_model(11, table="float16", eps=float(np.float32(1e-5)), **SIZES)
CONFIG = MODEL.config
A = "bitnet-b1.58."
KEYS = {
    "general.architecture": text("bitnet-b1.58"),
    A + "context_length": number(UINT32, CONFIG.context),
    A + "embedding_length": number(UINT32, CONFIG.width),
    A + "block_count": number(UINT32, CONFIG.n_layers),
    A + "feed_forward_length": number(UINT32, CONFIG.ffn),
    A + "attention.head_count": number(UINT32, CONFIG.heads),
    A + "attention.head_count_kv": number(UINT32, CONFIG.kv_heads),
    A + "attention.layer_norm_rms_epsilon": number(FLOAT32, CONFIG.eps),
    A + "rope.freq_base": number(FLOAT32, CONFIG.rope_base),
}
HEADS = ("rope.dimension_count", "attention.key_length", "attention.value_length")
OPTIONAL = {A + "vocab_size": number(UINT32, CONFIG.vocab), **{A + key: number(UINT32, CONFIG.head_dim) for key in HEADS}}
RNG = np.random.default_rng(11)


def floats(*shape):
    return RNG.normal(1, 0.3, shape).astype(np.float32)


def ternary(n, m):
    return packing.pack(RNG.integers(-1, 2, (n, m)), RNG.uniform(0.05, 0.15))


TENSORS = {"token_embd.weight": MODEL.token_embd, "output_norm.weight": MODEL.output_norm} | {
    f"blk.{n}.{field}.weight": value.weights if isinstance(value := getattr(layer, field), Linear) else value
    for n, layer in enumerate(MODEL.layers)
    for field in layer_shapes(CONFIG)
}
MATRIX_NAMES = [name for name, value in TENSORS.items() if isinstance(value, Ternary)]
FLOAT_NAMES = [name for name in TENSORS if name not in MATRIX_NAMES]
TYPES = {np.dtype(np.float32): F32, np.dtype(np.float16): F16, np.dtype(np.uint16): BF16}


def entry(name, value):
    if isinstance(value, Ternary):
        return Entry(name, value.shape[::-1], I2_S.number, data=packing.to_i2s(value).tobytes())
    return Entry(name, value.shape[::-1], TYPES[value.dtype].number, data=value.tobytes())


def patched(name, at, value):
    """The matrix of that name with some bytes of its tensor changed."""
    data = packing.to_i2s(TENSORS[name])
    data[at] = value
    return Entry(name, TENSORS[name].shape[::-1], I2_S.number, data=data.tobytes())


def writer(folder: Path) -> Callable[..., Path]:
    """A function that writes the file to the folder, with changed keys and tensors; None leaves one out."""

    def written(keys=(), tensors=()) -> Path:
        entries = {name: value for name, value in (TENSORS | dict(tensors)).items() if value is not None}
        raw = build(
            [(key, value) for key, value in (KEYS | dict(keys)).items() if value is not None],
            [value if isinstance(value, Entry) else entry(name, value) for name, value in entries.items()],
        )
        path = folder / f"{len(list(folder.iterdir()))}.gguf"
        path.write_bytes(raw)
        return path

    return written


def written_model(**changes) -> Model:
    """The model of TENSORS, put together without a file."""
    return replace(MODEL, **changes)


def assert_same_model(loaded, expected):
    assert loaded.config == expected.config
    for name in ("token_embd", "output_norm", "rope_frequency", "output"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(expected, name))
    for a, b in zip(loaded.layers, expected.layers, strict=True):
        for field in NORMS:
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
        for field in MATRICES:
            x, y = getattr(a, field).weights, getattr(b, field).weights
            assert (x.shape, x.scale) == (y.shape, y.scale)
            np.testing.assert_array_equal(packing.unpack(x), packing.unpack(y))
    tokens = [[0, 8, 3, 3, 5]]
    assert_same_bits(forward_full(loaded, tokens), forward_full(expected, tokens))
