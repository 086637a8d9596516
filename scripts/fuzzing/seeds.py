"""The sound files that are changed: small models of every family and tensor type, Hugging Face folders, tokenizers, and dumps of every
format.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, BLOCK_TYPES, GRID_TYPES, I2_S, LOOKED_UP, TERNARY_TYPES
from bitnet_np.files.convert import convert
from bitnet_np.files.load import load, open_model
from bitnet_np.model.families import ARCHITECTURES, FAMILIES
from bitnet_np.model.records import LongRope, Yarn
from bitnet_np.testing.hf_files import FLOATS, write_hf
from bitnet_np.testing.models import random_model, write_gguf
from bitnet_np.text.byte_level import BYTE_CHARACTERS
from bitnet_np.text.spm import SPACE
from bitnet_np.traces.formats.registry import FORMATS
from bitnet_np.traces.points import Key
from fuzzing.gguf_bytes import Document

TOKENS = np.array([3, 1, 4, 1, 5])
VOCAB = 6
_MERGED = ["he", "ll", "hell", "Ġhe"]
_MERGES = ["h e", "l l", "he ll", "Ġ he"]
_PIECES = [SPACE, *"helo", SPACE + "h", "el", "ll", "ello", "he", SPACE + "hello", "llo"]
_FLOATS = ("float32", "float16", "bfloat16")
_PRINTED = """log: a line
ggml_debug:                  l_out-0 = (f32)        ADD(a{8, 2, 1, 1}, b{8, 2, 1, 1}}) = {8, 2, 1, 1}
    [
        [
            [      1.0000,      -1.5000,       0.0000, ...,       2.2500,       3.0000,      -4.0000  ],
            [      0.1000,       0.2000,       0.3000, ...,       0.4000,       0.5000,       0.6000  ],
        ],
    ]
    sum = 2.850000
"""
"""A node as llama-eval-callback prints it."""
_SMALL: dict[str, Any] = {"vocab": 9, "context": 64, "width": 64, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "n_layers": 1}
_BLOCKS = {kind.name: kind.block for kind in ALL_BLOCK_TYPES} | {"ternary": I2_S.block}


def write_seeds(folder: Path) -> Path:
    """Write all sound files to a new folder, and an empty one for calls (cases.py). Returns it."""
    for write in (write_models, write_parts, write_folders, write_dumps):
        write(_made(folder))
    (folder / "arguments").mkdir()
    return folder


def write_models(folder: Path) -> None:
    """Write <family>-<type of the layers' matrices>.gguf, each a model of one or two layers."""
    for family in ARCHITECTURES:
        ternary = ("ternary", *(kind.name for kind in TERNARY_TYPES))
        blocks = (kind.name for kind in BLOCK_TYPES if kind not in LOOKED_UP)
        rare = (kind.name for kind in (*LOOKED_UP, *GRID_TYPES) if family == "llama")
        types = ternary if FAMILIES[family].ternary else (*_FLOATS, *blocks, "ternary", *rare)
        for i, weights in enumerate(types):
            size = max(64, _BLOCKS.get(weights, 1))
            wide = size == 256
            model = random_model(
                i,
                family=family,
                weights=weights,
                table=weights if family != "gpt2" and i % 2 and weights != "ternary" and weights not in ternary else _FLOATS[i % 3],
                tied=i % 3 != 1,
                **_SMALL | {"n_layers": 1 + (not wide and i % 2), "width": size, "ffn": size, "head_dim": size // 4},
            )
            write_gguf(folder / f"{family}-{weights}.gguf", model, fused=True if i % 4 == 2 else None)
    more: dict[str, dict[str, Any]] = {
        "mixtral-float16": {"family": "llama", "experts": 3, "experts_used": 2},
        "mixtral-Q8_0": {"family": "llama", "experts": 3, "experts_used": 2},
        "yarn-Q8_0": {"family": "qwen3", "yarn": Yarn(4.0, 16, fast=4.0), "rope_magnitude": 1.25},
        "longrope-Q8_0": {"family": "phi3", "longrope": LongRope(16, (2.0,) * 8, (2.0,) * 8)},
        "embedding-float16": {"family": "qwen3", "inner_norms": True, "pooling": "mean", "eps": 1e-6},
    }
    for name, how in more.items():
        write_gguf(folder / f"{name}.gguf", random_model(9, weights=name.partition("-")[2], **_SMALL | how))


def write_parts(folder: Path) -> None:
    """Write parts/t-00001-of-00002.gguf and the second file of that model, which has every other tensor."""
    whole = _made(folder / "parts") / "whole"
    write_gguf(whole, random_model(0, family="llama", weights="Q8_0", **_SMALL))
    document = Document.read(whole)
    whole.unlink()
    for no in range(2):
        part = Document(document.keys if no == 0 else [], document.entries[no::2])
        part.put({"split.no": no, "split.count": 2, "split.tensors.count": len(document.entries)})
        (folder / "parts" / f"t-{no + 1:05}-of-00002.gguf").write_bytes(part.bytes())


_PLAIN = {"special": False, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
_SPECIAL = ["<s>", "</s>", "<user>"]
_TOKENIZER = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "chat_template": "{% for message in messages %}{{ message.content }}{% endfor %}",
}
_DATA = Path(__file__).parents[2] / "tests" / "data"
CONFIGS = json.loads((_DATA / "hf_families" / "configs.json").read_text("utf-8"))
_SIZES: dict[str, Any] = {"vocab_size": 9, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
_SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": 64, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "hidden_act": "silu"}
_LONGROPE = {"rope_type": "longrope", "short_factor": [2.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 16}
_VISION = {"model_type": "gemma3", "text_config": CONFIGS["gemma3"], "vision_config": {}}


def _bitnet(**quantization: Any) -> dict[str, Any]:
    settings = {"quant_method": "bitnet"} | quantization
    return _SIZES | {"model_type": "bitnet", "hidden_act": "relu2", "tie_word_embeddings": True, "quantization_config": settings}


_FOLDERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    **{
        name: (config, {"floats": FLOATS[i % 3], "shards": 1 + i % 2})
        for i, (name, config) in enumerate(CONFIGS.items())
        if name != "phi3_longrope"
    },  # whose context has to be declared
    "multiplied": (_bitnet(linear_class="autobitlinear", quantization_mode="offline"), {}),
    "divided": (_bitnet(linear_class="bitlinear"), {"floats": "F32"}),
    "online": (_bitnet(linear_class="autobitlinear", quantization_mode="online"), {"shards": 2}),
    "inner-norms": (
        _SIZES | {"model_type": "llama", "quantization_config": {"quant_method": "bitnet", "use_rms_norm": True}},
        {"floats": "F16"},
    ),
    "masters": (
        _SIZES | {"model_type": "llama", "architectures": ["BitnetForCausalLM"], "weight_bits": 1, "input_bits": 8},
        {"floats": "F16"},
    ),
    "minicpm": (
        _SIZES | {"model_type": "minicpm", "scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16, "rope_scaling": _LONGROPE},
        {"floats": "F16"},
    ),
    "gemma3-vision": (_VISION, {"shards": 2}),
    "tokenizer-bytes": (_SIZES | {"model_type": "qwen2", "vocab_size": 260 + len(_MERGED)}, {}),
    "tokenizer-scores": (_SIZES | {"model_type": "llama", "vocab_size": 261 + len(_PIECES)}, {}),
}


def write_folders(folder: Path) -> None:
    """Write hf-<name>: Hugging Face folders of every model type and form of ternary matrices; two with a tokenizer, as GGUF files too."""
    for name, (config, how) in _FOLDERS.items():
        write_hf(folder / f"hf-{name}", config, **how)
    for path in sorted((_DATA / "mlx").iterdir()):
        shutil.copytree(path, folder / f"hf-mlx-{path.name}", ignore=shutil.ignore_patterns("*.npz"))
    for name in ("bytes", "scores"):
        path = folder / f"hf-tokenizer-{name}"
        for file, value in (("tokenizer", _tokenizer(name == "scores")), ("tokenizer_config", _TOKENIZER)):
            (path / f"{file}.json").write_text(json.dumps(value))
        convert(load(path), folder / f"tokenizer-{name}.gguf", open_model(path))


def _tokenizer(scored: bool) -> dict[str, Any]:
    """A tokenizer.json with some merges and tokens of every type."""
    first = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *_PIECES] if scored else [*BYTE_CHARACTERS, *_MERGED]
    ids = {spelling: i for i, spelling in enumerate([*first, *_SPECIAL])}
    told: dict[str, Any] = {
        "added_tokens": [_PLAIN | {"id": ids[name], "content": name, "special": name != "<user>"} for name in _SPECIAL],
        "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]},
        "model": {"type": "BPE", "vocab": ids, "merges": _MERGES},
    }
    if scored:
        splits = [[piece[:i], piece[i:]] for piece in _PIECES for i in range(1, len(piece)) if {piece[:i], piece[i:]} <= {*_PIECES}]
        told["model"] |= {"unk_token": "<unk>", "byte_fallback": True, "merges": splits}
        return told | {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}}
    cuts = [{"type": "Digits", "individual_digits": True}, {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]
    return told | {"normalizer": {"type": "NFC"}, "pre_tokenizer": {"type": "Sequence", "pretokenizers": cuts}}


def write_dumps(folder: Path) -> None:
    """Write a file or folder named after its format, for each format that has a reader."""
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
        path = folder / name / f"t{format.suffix}" if format.suffix else folder / name
        path.parent.mkdir(exist_ok=True)
        with format.writer(path, TOKENS) as writer:
            for key, array in points.items():
                if format.writer.names is None or key.name in format.writer.names:
                    writer.add(key, array)
    packed: dict[str, Any] = {str(key): array for key, array in points.items()}
    np.savez_compressed(_made(folder / "packed") / "t.npz", tokens=TOKENS, **packed)
    for name, step in (("steps", "step-{}/l_out-0.npy"), ("steps-in-names", "l_out-0.step-{}.npy")):
        for n in range(3):
            path = folder / name / step.format(n)
            np.save(_made(path.parent) / path.name, points[Key("l_out", 0)][n : n + 1])
    modules: dict[str, Any] = {f"hidden_states.{n}": np.ones((1, tokens, 4), np.float32) for n in range(3)}
    modules |= {
        "model.layers.0.self_attn.q_proj": np.ones((1, 2, tokens, 2), np.float32),
        "model.layers.1.input.0": modules["hidden_states.1"],
    }
    np.savez(_made(folder / "modules") / "t.npz", **modules)
    np.savetxt(_made(folder / "text") / "t.txt", points[Key("result_output", None)])
    (_made(folder / "eval-callback") / "t.txt").write_text(_PRINTED)
    steps = [{"step": i, "chosen_id": 2, "top_logits": [{"token_id": 2, "logit": 1.5}, {"token_id": 0, "logit": -1.0}]} for i in range(2)]
    (_made(folder / "bitnet-rs-logits") / "t.json").write_text(json.dumps({"logits_dump": steps}))
    (_made(folder / "json") / "t.json").write_text(json.dumps({"tokens": TOKENS.tolist(), "logits": modules["hidden_states.0"].tolist()}))
    answer = {
        "tokens_evaluated": tokens,
        "tokens": [2],
        "completion_probabilities": [{"id": 2, "top_logprobs": [{"id": 2, "logprob": -1.0}]}],
    }
    (_made(folder / "server-answer") / "t.json").write_text(json.dumps(answer))
    graph = {"s0.attn_norm-0.MUL": (1, 1, tokens, 4), "s0.Qcur-0.ROPE": (1, tokens, 2, 2), "s0.kq-0.MUL_MAT": (1, 2, tokens, 32)}
    nodes: dict[str, Any] = {name: np.ones(shape, np.float32) for name, shape in graph.items()}
    np.savez(_made(folder / "nodes") / "t.npz", **nodes)


def _made(folder: Path) -> Path:
    """The folder, which is there now."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder
