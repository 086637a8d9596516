"""Hugging Face folders with random weights, for any config.json that the package reads: `hf_files.py --config config.json FOLDER`.

Tensors are drawn and written one by one, so a folder may be larger than memory.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from make_model import FOUR_CODES
from numpy.typing import NDArray

from bitnet_np import families
from bitnet_np.errors import Error
from bitnet_np.files.hf_config import Recipe, read_recipe
from bitnet_np.files.safetensors_file import DTYPES
from bitnet_np.model import Expert, shapes_of

FLOATS = ("BF16", "F32", "F16")


class Entry(NamedTuple):
    """One tensor: its dtype and shape in the file, and the kind of its numbers."""

    dtype: str
    shape: tuple[int, ...]
    kind: str  # "matrix", "vector" (about 1), "packed" (ternary) or "scale"


def tensor_table(config: Mapping[str, Any], floats: str) -> dict[str, Entry]:
    """The tensors of a folder by name. `floats` is the dtype of all but packed ternary matrices."""
    recipe = read_recipe(config, Path("config.json"))
    c, kind = recipe.config, recipe.kind
    family = families.FAMILIES[c.architecture]
    biased = c.norm == "layer"
    table = {kind.embedding + ".weight": Entry(floats, (c.vocab, c.width), "matrix")}
    if kind.positions:
        table[kind.positions + ".weight"] = Entry(floats, (c.context, c.width), "matrix")
    table |= _vector(kind.norm, c.width, floats, biased)
    if not recipe.tied:
        table["lm_head.weight"] = Entry(floats, (c.vocab, c.width), "matrix")
    shapes = families.layer_shapes(c)
    for n in range(c.n_layers):
        path = kind.layer.format(n)
        for name in (*family.norms, *family.head_norms):
            table |= _vector(path + kind.modules[name], shapes[name][0], floats, biased)
        matrices = families.layer_matrices(c)
        for module in dict.fromkeys(kind.modules[name] for name in matrices):
            parts = [name for name in matrices if kind.modules[name] == module]
            rows = sum(shapes[name][0] for name in parts)
            table |= _linear(recipe, path + module, rows, shapes[parts[0]][1], floats)
            if parts[0] in recipe.biases:
                table[f"{path}{module}.bias"] = Entry(floats, (rows,), "vector")
        if c.shared_ffn:
            table[f"{path}{kind.modules['ffn_gate_inp_shexp']}.weight"] = Entry(floats, (1, c.width), "matrix")
        for i in range(c.experts):
            for name, (rows, width) in shapes_of(Expert, c).items():
                table |= _linear(recipe, path + kind.experts[name].format(i), rows, width, floats)
    if recipe.part is None:
        return table
    prefixes = {inner: outer for outer, inner in reversed([*recipe.part.prefixes.items()])}  # the first of them, as published
    return {next(prefixes[s] + name.removeprefix(s) for s in prefixes if name.startswith(s)): entry for name, entry in table.items()}


def _vector(module: str, size: int, floats: str, biased: bool) -> dict[str, Entry]:
    return {f"{module}.{part}": Entry(floats, (size,), "vector") for part in (("weight", "bias") if biased else ("weight",))}


def _linear(recipe: Recipe, module: str, n: int, m: int, floats: str) -> dict[str, Entry]:
    quantization = recipe.quantization
    if quantization is None or not quantization.converts(module):
        return {module + ".weight": Entry(floats, (m, n) if recipe.kind.transposed else (n, m), "matrix")}
    tensors = {module + ".weight": Entry(floats, (n, m), "matrix")}
    if quantization.packed:
        tensors = {
            module + ".weight": Entry("U8", (-(-n // 4), m), "packed"),
            module + ".weight_scale": Entry(floats, (1,), "scale"),
        }
    return tensors | (_vector(module + ".rms_norm", m, floats, False) if quantization.inner_norms else {})


def folder_bytes(config: Mapping[str, Any], *, seed: int = 0, floats: str = "BF16", shards: int = 1) -> Iterator[tuple[str, bytes]]:
    """File names and their bytes, piece by piece: config.json, and the tensors in one file, or in several with an index."""
    yield "config.json", json.dumps(config, indent=1).encode()
    table = tensor_table(config, floats)
    names = {name: "model.safetensors" if shards == 1 else f"model-{i % shards}.safetensors" for i, name in enumerate(table)}
    if shards > 1:
        yield "model.safetensors.index.json", json.dumps({"metadata": {}, "weight_map": names}).encode()
    rng = np.random.default_rng(seed)
    for file in dict.fromkeys(names.values()):
        part = {name: entry for name, entry in table.items() if names[name] == file}
        yield file, header({name: (entry.dtype, entry.shape) for name, entry in part.items()})
        for entry in part.values():
            yield file, _drawn(rng, entry).tobytes()


def write_folder(folder: Path, config: Mapping[str, Any], **how: Any) -> None:
    """Write the files of `folder_bytes` to a folder that is new or empty."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in folder_bytes(config, **how):
        with open(folder / name, "ab") as out:
            out.write(raw)


def header(tensors: Mapping[str, tuple[str, tuple[int, ...]]]) -> bytes:
    """The header of a safetensors file of tensors with these dtypes and shapes, one after the other."""
    table, at = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = at + prod(shape) * DTYPES[dtype].itemsize
        table[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = json.dumps(table).encode()
    raw += b" " * (-len(raw) % 8)  # aligns the numbers
    return len(raw).to_bytes(8, "little") + raw


def _drawn(rng: np.random.Generator, entry: Entry) -> NDArray:
    if entry.kind == "packed":
        return FOUR_CODES[rng.integers(0, len(FOUR_CODES), entry.shape, np.uint8)]
    if entry.kind == "scale":
        numbers = np.full(entry.shape, rng.uniform(0.5, 2), np.float32)
    else:
        numbers = rng.standard_normal(entry.shape, np.float32)
        numbers *= np.float32(0.1 if entry.kind == "vector" else entry.shape[-1] ** -0.5)
        numbers += np.float32(entry.kind == "vector")
    if entry.dtype == "BF16":
        return (numbers.view(np.uint32) >> 16).astype(np.uint16)
    return numbers.astype(DTYPES[entry.dtype])


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Write a Hugging Face folder with random weights.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--config", type=Path, required=True, metavar="config.json")
    parser.add_argument("--floats", choices=FLOATS, default="BF16", help="dtype of all but packed ternary matrices (default %(default)s)")
    parser.add_argument("--shards", type=int, default=1, metavar="N", help="number of files (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    try:
        if options.folder.exists() and any(options.folder.iterdir()):
            raise FileExistsError(f"{options.folder} is not empty")
        config = json.loads(options.config.read_text())
        write_folder(options.folder, config, seed=options.seed, floats=options.floats, shards=options.shards)
    except (Error, OSError, ValueError) as error:
        print(f"hf_files.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
