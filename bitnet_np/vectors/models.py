"""The cases of whole models: small GGUF files of every family and type of matrices, token ids, calls, and what each tensor should be.

Expected tensors are the contract's. How far an honest engine may be from them is measured as `check` measures it: engines that round to
float16 in other places are run on the same tokens (judge/honest_engines.py), and their distances have the margins of `measures.limits`.
"""

import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .. import contract
from ..base.tensor_types import ALL_BLOCK_TYPES
from ..engine.dialects import EXACT, LLAMA_CPP, Dialect
from ..files.hf_model_types import MODEL_TYPES
from ..files.load import load
from ..judge.bounds import position_errors
from ..judge.honest_engines import FLOOR, other_choices, reach_of, roundings
from ..judge.law.graph import LOGITS
from ..judge.measures import Reach
from ..judge.variant import Variant
from ..model.families import FAMILIES
from ..model.records import Model
from ..testing.hf_files import folder_files, folder_model, folder_tensors
from ..testing.model_cases import TABLES
from ..testing.models import random_model, write_gguf
from ..testing.noise import Noise
from ..testing.space import case_like, fitted, model_of, type_name
from ..traces.points import Key
from .pack import SHAPES, Case, Output, across

NAMES = ("model", "model_as_llama_cpp")
"""The operations of whole models."""
_SOURCE = "bitnet_np/spec.py, to the bit bitnet_np/contract; limits: bitnet_np/judge/honest_engines.py and measures.py"
_TOKENS = np.array([3, 17, 60, 5, 5, 42, 0, 63, 21, 9, 33, 12], np.int32)
_OTHER = np.array([3, 17, 60, 5, 8, 1, 50], np.int32)  # begins as the first does
_PREFIX = 4
_SMALL: dict[str, Any] = {"vocab": 64, "n_layers": 2, "heads": 4, "kv_heads": 2, "context": 64}
_BLOCKS = {kind.name: kind.block for kind in ALL_BLOCK_TYPES}

Tensors = dict[Key, NDArray]


def _run(variant: Variant, tokens: NDArray[np.int32]) -> Tensors:
    """Every float tensor [T, width] of a forward pass, with the logits. What depends on the order of a token's experts is left out."""
    tensors: Tensors = {}

    def record(name: str, layer: int | None, array: NDArray) -> None:
        of_slots = name.startswith("ffn_moe_") and name not in ("ffn_moe_logits", "ffn_moe_out")
        if array.dtype == np.float32 and len(array) == len(tokens) and not of_slots and not name.endswith(("_scale", "_codes")):
            tensors[Key(name, layer)] = array.reshape(len(tokens), -1).copy()

    variant.run(tokens[None].astype(np.int64), record)
    return tensors


def _outputs(
    model: Model, tokens: NDArray[np.int32], all_tensors: bool = False, first: int = 0, dialect: Dialect = EXACT
) -> dict[str, Output]:
    """The rules of the logits, or of every tensor, of the positions from the first on."""
    base = Variant("ours", model, dialect, contract)
    right, runs, other = _run(base, tokens), [_run(variant, tokens) for variant in roundings(base)], other_choices(base)
    choices = None if other is None else _run(other, tokens)
    outputs = {}
    for key, value in right.items():
        if key == LOGITS:
            reach = reach_of(value, [run[key] for run in runs], base, choices=None if choices is None else choices[key])
        elif all_tensors:
            nmse = np.array([position_errors(value.astype(np.float64), run[key].astype(np.float64)) for run in runs])
            of_choices = None if choices is None else position_errors(value.astype(np.float64), choices[key].astype(np.float64))
            reach = Reach(max(float(nmse.mean(axis=1).max()), FLOOR), nmse.max(axis=0), choices=of_choices)
        else:
            continue
        output = across(value, reach, key == LOGITS)
        arrays = {name: array[first:] for name, array in output.arrays.items()} if first else output.arrays
        outputs["logits" if key == LOGITS else str(key)] = Output(output.rule, arrays, output.numbers)
    return outputs


def _gguf(model: Model) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        write_gguf(Path(folder) / "model.gguf", model)
        return (Path(folder) / "model.gguf").read_bytes()


def _folder(kind: str, seed: int) -> tuple[Model, dict[str, bytes]]:
    """A Hugging Face folder of a model_type, as it is read, and its files."""
    config = SHAPES["folders"][kind]
    contents = folder_files(config, folder_tensors(config, folder_model(config, Noise(seed)), "BF16"))
    with tempfile.TemporaryDirectory() as folder:
        for name, content in contents.items():
            (Path(folder) / name).write_bytes(content)
        return load(folder), contents


def _calls(name: str, model: Model, file: dict[str, str], contents: dict[str, bytes], every_way: bool = False) -> Iterator[Case]:
    """The cases of a model: the whole sequence, and the same in other calls, which give the same numbers. file: its path, by its kind."""
    tokens = _TOKENS if every_way else _TOKENS[:5]
    whole = _outputs(model, tokens, all_tensors=True)
    logits, count = {"logits": whole["logits"]}, len(tokens)
    weights = model.layers[0].attn_q.weights
    stored = getattr(weights, "blocks", None) or weights  # a ternary matrix as the file has it
    words = file | {"type": type_name(stored)}

    def case(way: str, what: str, outputs: dict[str, Output], **inputs: Any) -> Case:
        arrays = {"tokens": tokens} | {key: np.array(value, np.int32) for key, value in inputs.items()}
        return Case(f"model-{name}-{way}", "model", what, _SOURCE, arrays, outputs, words, f"models/{name}.bin", contents)

    yield case("whole", f"{count} tokens in one call: every tensor", whole)
    yield case("steps", "the same tokens, one in each call", logits, chunks=[1] * count)
    if words["type"] != "ternary":  # llama.cpp knows no I2_S
        rounded = _outputs(model, tokens, dialect=LLAMA_CPP)
        what = "the same tokens, where the input of each matrix is rounded for its type, as llama.cpp's CPU backend rounds it"
        yield replace(case("as-llama-cpp", what, rounded), operation="model_as_llama_cpp")
    if every_way:
        yield case("chunks", "the same tokens, some in each call", logits, chunks=[5, 1, 6])
        other = _outputs(model, _OTHER)
        yield case("batch", "two sequences in one batch", logits | {"logits_2": other["logits"]}, tokens_2=_OTHER)
        what = f"tokens_2 behind the keys and values that tokens left of their first {_PREFIX}, which are the same: logits of the rest"
        yield case("prefix", what, _outputs(model, _OTHER, first=_PREFIX), tokens_2=_OTHER, prefix=[_PREFIX])


def small_like(model: Model) -> Model:
    """A small model of the family, types, ties, biases, scalings, window and shared heads of another one."""
    c, plain = model.config, case_like(model)[0]
    group, block = c.heads // c.kv_heads, _BLOCKS.get(plain.weights, 128 if plain.weights == "ternary" else 8)
    head_dim = next(n for n in range(8, 257, 8) if 2 * group * n % block == 0)
    rotated = 2 * round(head_dim * c.rope_pairs / c.head_dim) if c.rope_width else 0
    sizes: dict[str, Any] = {"layers": 2, "width": 32, "ffn": 48, "group": group, "head_dim": head_dim, "rope_width": rotated}
    sizes["experts"] = c.experts
    return model_of(fitted(replace(plain, window=5 if c.window else 0, **sizes)), model, Noise(300))


def cases(families: Sequence[str], types: Sequence[str], folders: bool, like: Model | None = None) -> Iterator[Case]:
    """Every case of these families, as GGUF files and if asked as Hugging Face folders, of these types of matrices in a Llama, and of a
    small model like another one."""
    if like is not None:
        model = small_like(like)
        yield from _calls("like", model, {"gguf": "models/like.gguf"}, {"models/like.gguf": _gguf(model)}, every_way=True)
    for n, name in enumerate(FAMILIES):
        if name in families:
            sizes = {"width": 128, "ffn": 128, "head_dim": 32} if FAMILIES[name].ternary else {"width": 32, "ffn": 48, "head_dim": 8}
            model, file = random_model(Noise(1 + n), family=name, table="float16", **_SMALL | sizes), f"models/{name}.gguf"
            yield from _calls(name, model, {"gguf": file}, {file: _gguf(model)}, every_way=True)
    for n, kind in enumerate(SHAPES["folders"]):
        if folders and {*MODEL_TYPES[kind].architectures.values()} & {*families}:
            model, contents = _folder(kind, 200 + n)
            paths = {f"models/hf-{kind}/{name}": content for name, content in contents.items()}
            yield from _calls(f"hf-{kind}", model, {"folder": f"models/hf-{kind}"}, paths)
    for n, kind in enumerate(TABLES):
        if kind in types:
            width = 128 if kind == "ternary" else max(32, _BLOCKS.get(kind, 32))
            sizes = {"width": width, "ffn": width, "head_dim": width // 4, "n_layers": 1, "kv_heads": 1}
            table = "float16" if kind == "ternary" else kind
            model, file = random_model(Noise(100 + n), family="llama", weights=kind, table=table, **_SMALL | sizes), f"models/{kind}.gguf"
            yield from _calls(kind, model, {"gguf": file}, {file: _gguf(model)})
