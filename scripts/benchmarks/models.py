"""Random models of a shape: ours, and files of the same shape that peers can load. Made once and kept in a folder."""

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path

import make_model
import numpy as np
from make_model import Shape
from numpy.typing import NDArray

from bitnet_np import Linear, Model
from bitnet_np.errors import OptionError
from bitnet_np.files.gguf_writer import FILE_TYPES, write_file
from bitnet_np.model import Layer, Ternary
from bitnet_np.tensor_types import I2_S, TQ2_0

SMALL = Shape(vocab=4096, context=4096, width=512, layers=6, ffn=1536, heads=8, kv_heads=2)
SHAPES = {**{name: shape for name, shape in make_model.SHAPES.items() if name != "custom"}, "small": SMALL}


def folder() -> Path:
    """The default folder for models, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitnet_np" / "bench"


def cached(where: Path, kind: str, shape: Shape, seed: int, write: Callable[[Path], None]) -> Path:
    """The file, written unless it is there. Its name holds a digest of shape, seed and makers: a changed maker makes a new file."""
    makers = b"".join(Path(str(module)).read_bytes() for module in (make_model.__file__, __file__))
    name = hashlib.sha256(f"{shape} {seed} ".encode() + makers).hexdigest()[:12]
    path = where / f"{kind}-{name}.gguf"
    if not path.exists():
        where.mkdir(parents=True, exist_ok=True)
        write(path)
    return path


def ours(where: Path, name: str, seed: int) -> Path:
    """The file of a random model as make_model.py writes them."""
    shape = SHAPES[name]
    return cached(where, name, shape, seed, lambda path: make_model.write_model(path, shape, seed))


def for_llama_cpp(where: Path, shape: Shape, seed: int) -> Path:
    """A file of the same shape that llama.cpp loads: architecture `bitnet`, TQ2_0 matrices, a float16 embedding that is the head."""
    for name in ("width", "ffn", "q_width"):
        if getattr(shape, name) % TQ2_0.block:
            raise OptionError(f"--vs llama-cpp: {name} is {getattr(shape, name)}, but rows of TQ2_0 are multiples of {TQ2_0.block}")
    return cached(where, "llama-cpp-tq2_0", shape, seed, lambda path: _write_tq2_0(path, shape, seed))


def _write_tq2_0(path: Path, shape: Shape, seed: int) -> None:
    table = make_model.tensor_table(shape)
    shape = replace(shape, activation="silu")  # which makes it architecture `bitnet`
    write_file(
        path,
        "bitnet",
        lambda writer: make_model.write_metadata(writer, shape, f"random, seed {seed}, TQ2_0", FILE_TYPES[TQ2_0]),
        [(tensor.name, TQ2_0 if tensor.kind is I2_S else tensor.kind, tensor.dims) for tensor in table],
        (_tq2_0(data) if tensor.kind is I2_S else data for tensor, data in zip(table, make_model.weights(shape, seed), strict=True)),
    )


def _tq2_0(data: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Bytes of I2_S -> blocks of TQ2_0 with the same scale. Codes stay where they are in each 64 bytes, so the matrix is another one."""
    trailer = I2_S.trailer
    codes = data[:-trailer].reshape(-1, TQ2_0.block // 4)
    scale = np.frombuffer(data[-trailer:][:4].tobytes(), "<f4").astype("<f2").view(np.uint8)
    return np.concatenate([codes, np.broadcast_to(scale, (len(codes), 2))], axis=1)


# --- sizes of models ------------------------------------------------------------------------------------------------------------------


def shape_of(model: Model) -> Shape:
    """The shape of a loaded model, for a peer of the same shape."""
    c = model.config
    return Shape(c.vocab, c.context, c.width, c.n_layers, c.ffn, c.heads, c.kv_heads, c.head_dim, c.eps, c.rope_base)


def linears(layer: Layer) -> Iterator[tuple[str, Linear]]:
    """Yields names and records of a layer's matrices."""
    for part in fields(layer):
        value = getattr(layer, part.name)
        if isinstance(value, Linear):
            yield part.name, value


def matrices(layer: Layer) -> Iterator[tuple[str, Ternary]]:
    """Yields names and records of a layer's ternary matrices."""
    for name, linear in linears(layer):
        if isinstance(linear.weights, Ternary):
            yield name, linear.weights


def ternary_weights(model: Model) -> int:
    """Number of weights of all ternary matrices: multiply-adds of one token."""
    return sum(matrix.shape[0] * matrix.shape[1] for layer in model.layers for _, matrix in matrices(layer))


def matrix_weights(model: Model) -> int:
    """Number of weights of all layers' matrices, of every kind: multiply-adds of one token where there are no experts."""
    return sum(math.prod(linear.weights.shape) for layer in model.layers for _, linear in linears(layer))


def weight_bytes(model: Model) -> int:
    """Bytes that decoding one token must read: the matrices of all layers, and the head."""
    return model.head.nbytes + sum(linear.weights.nbytes for layer in model.layers for _, linear in linears(layer))


def transformers_config(shape: Shape) -> dict[str, int]:
    """A shape as keywords of BitNetConfig."""
    return {
        "vocab_size": shape.vocab,
        "hidden_size": shape.width,
        "num_hidden_layers": shape.layers,
        "intermediate_size": shape.ffn,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": shape.context,
    }


def check_memory(shape: Shape, itemsize: int) -> None:
    """Raises OptionError if dense weights of `itemsize` bytes each would not fit the memory that is free."""
    weights = sum(tensor.elements for tensor in make_model.tensor_table(shape))
    needed = int(1.2 * weights * itemsize)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    free = next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), needed)
    if needed > free:
        raise OptionError(f"--vs transformers: {weights:,} dense weights need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")
