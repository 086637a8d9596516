"""The sound files that are changed: small models of every family and type of tensor, one with a tokenizer, and dumps of every format."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from gguf_bytes import BOOL, INT32, UINT32, number, numbers, text, texts

from bitnet_np.byte_level import BYTE_CHARACTERS
from bitnet_np.families import ARCHITECTURES, FAMILIES
from bitnet_np.interop.formats import FORMATS
from bitnet_np.points import Key
from bitnet_np.tensor_types import BLOCK_TYPES, TERNARY_TYPES
from bitnet_np.testing import random_model, write_gguf
from bitnet_np.vocabulary import BYTE, CONTROL, NORMAL, USER_DEFINED

from .gguf_document import Document

TOKENS = np.array([3, 1, 4, 1, 5])
VOCAB = 6
_FLOATS = ("float32", "float16", "bfloat16")
_DUMPS = {
    "logits": ".npy",
    "llama-logits": ".kld",
    "raw": ".f32",
    "bitnet-rs-lines": ".jsonl",
    "npz": ".npz",
    "safetensors": ".safetensors",
}


def write_models(folder: Path) -> None:
    """<family>-<type of the layers' matrices>.gguf, with one layer or two each."""
    for family in ARCHITECTURES:
        ternary = ("ternary", *(kind.name for kind in TERNARY_TYPES))
        types = ternary if FAMILIES[family].ternary else (*_FLOATS, *(kind.name for kind in BLOCK_TYPES), "ternary")
        for i, weights in enumerate(types):
            wide = weights.endswith("_K") or weights.startswith("TQ")  # 256 weights to a block
            size = 256 if wide else 128 if weights == "ternary" else 64
            model = random_model(
                i,
                family=family,
                weights=weights,
                table=weights if family != "gpt2" and i % 2 and weights != "ternary" and weights not in ternary else _FLOATS[i % 3],
                tied=i % 3 != 1,
                vocab=9,
                context=64,
                n_layers=1 + (not wide and i % 2),
                width=size,
                ffn=size,
                heads=4,
                kv_heads=2,
                head_dim=size // 4,
            )
            write_gguf(folder / f"{family}-{weights}.gguf", model, fused=i % 4 == 2 and weights != "ternary")


def write_tokenizer(folder: Path) -> None:
    """tokenizer.gguf: a model with a byte-level vocabulary, some merges and tokens of every kind."""
    spellings = [*BYTE_CHARACTERS, "he", "ll", "hell", "Ġhe", "<|begin|>", "<|end|>", "<user>", "<0x41>"]
    kinds = [NORMAL] * (len(spellings) - 4) + [CONTROL, CONTROL, USER_DEFINED, BYTE]
    model = random_model(
        0, family="llama", weights="float32", vocab=len(spellings), width=16, ffn=16, heads=2, kv_heads=1, head_dim=8, n_layers=1
    )
    write_gguf(folder / "tokenizer.gguf", model)
    document = Document(folder / "tokenizer.gguf")
    document.keys = [(key, value) for key, value in document.keys if key != b"tokenizer.ggml.model"]
    document.keys += [
        ("tokenizer.ggml.model", text("gpt2")),
        ("tokenizer.ggml.pre", text("llama-bpe")),
        ("tokenizer.ggml.tokens", texts(spellings)),
        ("tokenizer.ggml.token_type", numbers(INT32, kinds)),
        ("tokenizer.ggml.merges", texts(["h e", "l l", "he ll", "Ġ he"])),
        ("tokenizer.ggml.bos_token_id", number(UINT32, len(spellings) - 4)),
        ("tokenizer.ggml.eos_token_id", number(UINT32, len(spellings) - 3)),
        ("tokenizer.ggml.add_bos_token", number(BOOL, 1)),
        ("tokenizer.chat_template", text("{% for message in messages %}{{ message.content }}{% endfor %}")),
    ]
    (folder / "tokenizer.gguf").write_bytes(document.bytes())


def write_dumps(folder: Path) -> None:
    """A file or folder of the name of its format, for each format that is read."""
    rng = np.random.default_rng(0)
    tokens = len(TOKENS)
    shapes = {
        "attn_norm": (tokens, 4),
        "attn_norm_codes": (tokens, 4),
        "attn_norm_scale": (tokens,),
        "kq": (2, tokens, tokens),
        "l_out": (tokens, 4),
    }
    points = {Key(name, 0): rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    points[Key("attn_norm_codes", 0)] = rng.integers(-127, 128, (tokens, 4)).astype(np.int8)
    points[Key("result_output", None)] = rng.standard_normal((tokens, VOCAB)).astype(np.float32)
    for name, format in FORMATS.items():
        if format.writer is None:
            continue
        if name in _DUMPS:
            os.mkdir(folder / name)
        with format.writer(folder / name / f"t{_DUMPS[name]}" if name in _DUMPS else folder / name, TOKENS) as writer:
            for key, array in points.items():
                if writer.names is None or key.name in writer.names:
                    writer.add(key, array)
    os.mkdir(folder / "packed")
    packed: dict[str, Any] = {str(key): array for key, array in points.items()}
    np.savez_compressed(folder / "packed" / "t.npz", tokens=TOKENS, **packed)
    graph = {"s0.attn_norm-0.MUL": (1, 1, tokens, 4), "s0.Qcur-0.ROPE": (1, tokens, 2, 2), "s0.kq-0.MUL_MAT": (1, 2, tokens, 32)}
    os.mkdir(folder / "nodes")
    nodes: dict[str, Any] = {name: np.ones(shape, np.float32) for name, shape in graph.items()}
    np.savez(folder / "nodes" / "t.npz", **nodes)
