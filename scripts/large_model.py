"""Write a model that outgrows memory: a GGUF file of architecture `llama` in the shape of Llama 3 1B, 8B or 70B, of random weights.

Its layers repeat one random layer and its matrices some random rows, so that 40 GB are written as fast as the disk takes them. Every tensor
has its own pages.

    python scripts/large_model.py 70b Q4_K 70b.gguf
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np import Config
from bitnet_np.base.errors import Error
from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, F16, F32, I2_S, Q4_K, Q5_K, Q6_K, TERNARY_TYPES, TensorType
from bitnet_np.cli.progress import bar
from bitnet_np.files.gguf_names import tensor_name
from bitnet_np.files.gguf_writer import FILE_TYPES, write_file
from bitnet_np.model import packing
from bitnet_np.model.families import layer_shapes
from bitnet_np.model.records import Blocks
from bitnet_np.testing.models import random_table

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab": 512, "width": 256, "n_layers": 2, "ffn": 512, "heads": 4, "kv_heads": 2, "head_dim": 64},
    "1b": {"vocab": 128256, "width": 2048, "n_layers": 16, "ffn": 8192, "heads": 32, "kv_heads": 8, "head_dim": 64},
    "8b": {"vocab": 128256, "width": 4096, "n_layers": 32, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128},
    "70b": {"vocab": 128256, "width": 8192, "n_layers": 80, "ffn": 28672, "heads": 64, "kv_heads": 8, "head_dim": 128},
}
_ROWS = 512
TYPES = {kind.name: kind for kind in (I2_S, *ALL_BLOCK_TYPES)}
MIXTURES = {"Q4_K_M": Q4_K, "Q5_K_M": Q5_K}
"""llama.cpp's usual choices: a type, but Q6_K for embedding and head, and for values and ffn_down of every other layer."""


def config_of(shape: str, layers: int | None = None) -> Config:
    """The Config of a shape, with fewer or more layers if that is asked for."""
    numbers = SHAPES[shape] | ({"n_layers": layers} if layers else {})
    return Config("llama", context=8192, eps=1e-5, rope="adjacent", rope_base=500000.0, activation="silu", **numbers)


def write(path: Path, config: Config, name: str, seed: int) -> None:
    """Write the model. Matrices have the type of this name or those of a mixture; embedding and head are float16 where that is ternary."""
    rng = np.random.default_rng(seed)
    kind = MIXTURES.get(name) or TYPES[name]
    table_type = F16 if kind in (I2_S, *TERNARY_TYPES) else Q6_K if name in MIXTURES else kind
    shapes = layer_shapes(config)
    mixed = [field for field in shapes if name in MIXTURES and field in ("attn_v", "ffn_down")]
    layer = {field: _random(rng, kind, shape) for field, shape in shapes.items()}
    other = layer | {field: _random(rng, Q6_K, shapes[field]) for field in mixed}
    tables = {"token_embd": (config.vocab, config.width), "output_norm": (config.width,), "output": (config.vocab, config.width)}

    def entries() -> Iterator[tuple[str, TensorType, tuple[int, ...]]]:
        for n in range(config.n_layers):
            for field, shape in shapes.items():
                of_matrix = Q6_K if field in mixed and n % 2 else kind
                yield tensor_name(field, n), of_matrix if len(shape) == 2 else F32, shape
        for field, shape in tables.items():
            yield tensor_name(field), table_type if len(shape) == 2 else F32, shape

    def contents() -> Iterator[NDArray]:
        for n in range(config.n_layers):
            yield from (other if n % 2 else layer).values()
        for shape in tables.values():
            yield _random(rng, table_type, shape)

    metadata = {"tokenizer.ggml.model": "none", "general.name": f"random, seed {seed}", "general.file_type": FILE_TYPES.get(kind)}
    write_file(path, config, metadata, list(entries()), contents(), progress=bar(path.name))


def _random(rng: np.random.Generator, kind: TensorType, shape: tuple[int, ...]) -> NDArray:
    """A tensor with which activations keep their size. A matrix has at most _ROWS different rows."""
    if len(shape) == 1:
        return rng.normal(1, 0.1, shape).astype(np.float32)
    n, m = shape
    order, spread = rng.integers(0, _ROWS, n), m**-0.5
    if kind is I2_S:
        packed = packing.to_i2s(packing.pack(rng.integers(-1, 2, (_ROWS, m), np.int8), spread))
        return np.concatenate([packed[: -I2_S.trailer].reshape(_ROWS, -1)[order].reshape(-1), packed[-I2_S.trailer :]])
    table = random_table(rng, "float16" if kind is F16 else kind.name, _ROWS, m, spread)
    return (table.data if isinstance(table, Blocks) else table)[order]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("type", choices=(*TYPES, *MIXTURES), metavar="TYPE", help=f"of the matrices: {', '.join([*MIXTURES, *TYPES])}")
    parser.add_argument("path", type=Path, metavar="OUT.gguf")
    parser.add_argument("--layers", type=int, metavar="N", help="instead of the shape's own number")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        write(options.path, config_of(options.shape, options.layers), options.type, options.seed)
    except (Error, OSError) as error:
        print(f"large_model.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
