"""Changes to a GGUF file taken apart, so that it is put together with one rule broken and all others kept."""

import random
import struct
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from bitnet_np.base.errors import Error
from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, BY_NUMBER, I2_S
from bitnet_np.files.gguf_config import read_config
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.gguf_names import KEYS, NEUTRAL, SIZES
from bitnet_np.model import families
from bitnet_np.testing.models import random_model, write_gguf
from fuzzing import gguf_bytes as gguf
from fuzzing.gguf_bytes import Document, number, numbers, text, texts, u32

from .edits import FLOAT_VALUES, NUMBERS, SHAPES, edit_bytes, edit_tensors

_MORE_KEYS = ("experts", "experts_used", "expert_ffn", "shared_ffn", "window", "window_layers", "pooling")
_KNOWN_KEYS = [*(KEYS[field].name for field in (*SIZES, *_MORE_KEYS)), *NEUTRAL]
_KNOWN_KEYS += ["rope.scaling.type", "use_parallel_residual", "attention.layer_norm_rms_epsilon"]
_WIDEST = 2048  # of a random model, which takes time to draw
_TYPES = {kind: known.nbytes for kind, known in BY_NUMBER.items()}
_BLOCKS = (
    dict.fromkeys(("float32", "float16", "bfloat16"), 1) | {"ternary": I2_S.block} | {kind.name: kind.block for kind in ALL_BLOCK_TYPES}
)


def changed(source: Document, draw: random.Random) -> bytes:
    """The bytes of a file with one to three changes; in two of five cases the sizes change, in agreement with each other."""
    resized = _resized(source, draw) if draw.random() < 0.4 else None
    document = resized or Document(list(source.keys), list(source.entries))
    header: dict[str, Any] = {}
    for _ in range(draw.randint(0, 2) if resized else draw.randint(1, 3)):
        draw.choice((_edit_key, _edit_key, _edit_tensors, _edit_tensors, _edit_tensors, _edit_header))(document, header, draw)
    raw = bytearray(document.bytes(**header))
    if draw.random() < 0.05:
        edit_bytes(raw, draw)
    return bytes(raw)


def _resized(source: Document, draw: random.Random) -> Document | None:
    """A random model with other sizes, and perhaps matrices of another type, in the source's keys. None where there is no such model."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "t.gguf"
        path.write_bytes(source.bytes())
        try:
            config = read_config(open_gguf(path))
            names = draw.sample(["vocab", "context", "width", "ffn", "heads", "kv_heads", "head_dim", "rope_width"], draw.randint(1, 3))
            values: dict[str, Any] = {name: draw.choice(SHAPES) for name in names}
            if "heads" in values and draw.random() < 0.7:
                values["kv_heads"] = draw.choice([n for n in (1, 2, 3, 4, values["heads"]) if values["heads"] % n == 0])
            config = replace(config, **values)
            if max(config.q_width, config.experts * config.ffn) > _WIDEST:
                return None
            fitting = [kind for kind, block in _BLOCKS.items() if not any(n % block for n in (config.width, config.ffn, config.q_width))]
            own = {name: value for name, value in vars(config).items() if name != "architecture"}
            weights = draw.choice(fitting) if draw.random() < 0.4 else fitting[-1]
            write_gguf(path, random_model(draw.randrange(9), family=config.architecture, weights=weights, **own))
        except Error:
            return None
        document = Document.read(path)
        keys = dict(document.keys)
        document.keys += [(key, value) for key, value in source.keys if key not in keys]
        return document


def _value(draw: random.Random) -> bytes:
    kind = draw.choice([*gguf.FORMATS, gguf.UINT32, gguf.UINT32, gguf.FLOAT32, gguf.STRING, gguf.ARRAY])
    if kind == gguf.STRING:
        return text(draw.choice([b"", b"linear", b"yarn", b"none", b"llama", b"bitnet", b"\xff\xfe", b"x" * 300]))
    if kind == gguf.ARRAY:
        return draw.choice([texts(["a", ""]), texts([]), numbers(gguf.INT32, [1, 2, 3]), numbers(gguf.FLOAT32, [])])
    if kind in (gguf.FLOAT32, gguf.FLOAT64):
        return number(kind, draw.choice(FLOAT_VALUES))
    return u32(kind) + (draw.choice(NUMBERS) % (1 << 64)).to_bytes(8, "little")[: struct.calcsize(gguf.FORMATS[kind])]


def _edit_key(document: Document, header: dict[str, Any], draw: random.Random) -> None:
    """Change a value, mostly its number and not its type; or delete, add, repeat or rename a key."""
    keys = document.keys
    if not keys:
        return
    i = draw.randrange(len(keys))
    (key, value), change = keys[i], draw.random()
    if change < 0.45 and value[0] in gguf.FORMATS:
        size = len(value) - 4
        if value[0] in (gguf.FLOAT32, gguf.FLOAT64):
            keys[i] = key, number(value[0], draw.choice(FLOAT_VALUES))
        else:
            keys[i] = key, value[:4] + (draw.choice(NUMBERS) % (1 << 8 * size)).to_bytes(size, "little")
    elif change < 0.65:
        keys[i] = key, _value(draw)
    elif change < 0.72:
        del keys[i]
    elif change < 0.76:
        keys.append(keys[i])
    elif change < 0.92:
        architecture = dict(keys).get("general.architecture", text("llama"))[12:].decode(errors="replace")
        keys.append((f"{architecture}.{draw.choice(_KNOWN_KEYS)}", _value(draw)))
    elif change < 0.96:
        keys[i] = draw.choice(keys)[0], value
    else:
        keys[i] = "general.architecture", text(draw.choice(families.ARCHITECTURES))


def _edit_tensors(document: Document, header: dict[str, Any], draw: random.Random) -> None:
    """Change the offset or number of dimensions of a tensor, or what tensors of any file have."""
    entries, change = document.entries, draw.random()
    if not entries or change > 0.15:
        edit_tensors(entries, draw, _TYPES)
        return
    i = draw.randrange(len(entries))
    if change < 0.1:
        entries[i] = replace(entries[i], offset=draw.choice([0, 8, 32, 64, *NUMBERS]) % (1 << 64))
    else:
        entries[i] = replace(entries[i], n_dims=draw.choice([0, 3, 4, 5, (1 << 32) - 1]))


def _edit_header(document: Document, header: dict[str, Any], draw: random.Random) -> None:
    change = draw.choice(["key_count", "tensor_count", "version", "magic", "alignment", "tail"])
    if change == "magic":
        header[change] = draw.choice([b"GGUF", b"GGML", b"FUGG"])
    elif change == "tail":
        header[change] = draw.randbytes(draw.choice([1, 32, 100]))
    elif change == "alignment":
        header[change] = draw.choice([8, 16, 64, 1024])
        if draw.random() < 0.7:
            document.keys.append(("general.alignment", number(gguf.UINT32, header[change])))
    else:
        counts = {"key_count": len(document.keys), "tensor_count": len(document.entries), "version": 3}
        header[change] = draw.choice([counts[change] + draw.choice([-1, 1]), *NUMBERS]) % (1 << 32 if change == "version" else 1 << 64)
