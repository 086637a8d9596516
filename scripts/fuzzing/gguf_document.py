"""A GGUF file taken apart, so that it can be put together with one rule broken and all others kept."""

import random
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bitnet_np.base.errors import Error
from bitnet_np.base.tensor_types import BY_NUMBER
from bitnet_np.files.gguf_config import read_config
from bitnet_np.files.gguf_file import GGUFFile, open_gguf
from bitnet_np.files.gguf_names import KEYS, NEUTRAL, SIZES
from bitnet_np.model import families
from bitnet_np.model.records import Config, Expert, shapes_of
from bitnet_np.testing.gguf_bytes import (
    BOOL,
    FLOAT32,
    FLOAT64,
    FORMATS,
    INT8,
    INT32,
    INT64,
    STRING,
    UINT8,
    UINT32,
    UINT64,
    Entry,
    gguf,
    number,
    numbers,
    text,
    texts,
    u32,
)

from .edits import FLOAT_VALUES, NUMBERS, damage, edit_bytes

_SIZES = [1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 64, 65, 96, 127, 128, 129, 256, 257, 384, 512]
_MORE_KEYS = ("experts", "experts_used", "expert_ffn", "shared_ffn", "window", "window_layers", "pooling")
_KNOWN_KEYS = [*(KEYS[field].name for field in (*SIZES, *_MORE_KEYS)), *NEUTRAL]
_KNOWN_KEYS += ["rope.scaling.type", "use_parallel_residual", "attention.layer_norm_rms_epsilon"]
_TAME = bytes(byte & 0x2A for byte in range(256))  # no NaN in any type, and no ternary code 3
_LARGEST = 1 << 19  # bytes at most of a tensor that is fitted to other sizes


@dataclass
class Document:
    """Keys with the bytes of their values, tensors, and the config."""

    keys: list[tuple[str | bytes, bytes]]
    entries: list[Entry]
    config: Config | None

    @classmethod
    def read(cls, path: Path) -> "Document":
        """The document of a sound file."""
        file = open_gguf(path)
        entries = [Entry(name, tensor.shape[::-1], tensor.type.number, data=tensor.data.tobytes()) for name, tensor in file.tensors.items()]
        return cls(_keys(path.read_bytes(), len(file.metadata)), entries, _config(file))

    def bytes(self, **header: Any) -> bytes:
        return gguf(self.keys, self.entries, **header)


def _config(file: GGUFFile) -> Config | None:
    try:
        return read_config(file)
    except Error:  # a file that holds no model can be a seed, too
        return None


def _keys(raw: bytes, count: int) -> list[tuple[str | bytes, bytes]]:
    """The keys of a sound file, and their values after their types."""
    keys: list[tuple[str | bytes, bytes]] = []
    at = 24
    for _ in range(count):
        size = struct.unpack_from("<Q", raw, at)[0]
        key, at = raw[at + 8 : at + 8 + size], at + 8 + size
        start, kind, at = at, struct.unpack_from("<I", raw, at)[0], at + 4
        items = 1
        if kind == 9:
            kind, items = struct.unpack_from("<IQ", raw, at)
            at += 12
        for _ in range(items if kind == STRING else 0):
            at += 8 + struct.unpack_from("<Q", raw, at)[0]
        if kind != STRING:
            at += items * struct.calcsize("<" + FORMATS[kind])
        keys.append((key, raw[start:at]))
    return keys


def changed(source: Document, draw: random.Random) -> bytes:
    """The bytes of a file with one to three changes; in two of five cases the sizes change, in agreement with each other."""
    document = Document(list(source.keys), list(source.entries), source.config)
    resized = draw.random() < 0.4 and _resize(document, draw)
    header: dict[str, Any] = {}
    for _ in range(draw.randint(0, 2) if resized else draw.randint(1, 3)):
        draw.choice((_edit_key, _edit_key, _edit_entry, _edit_entry, _edit_data, _edit_data, _edit_header))(document, header, draw)
    raw = bytearray(document.bytes(**header))
    if draw.random() < 0.05:
        edit_bytes(raw, draw)
    return bytes(raw)


# --- one thing ------------------------------------------------------------------------------------------------------------------------


def _value(draw: random.Random) -> bytes:
    kind = draw.choice([UINT8, INT8, UINT32, UINT32, UINT32, INT32, UINT64, INT64, FLOAT32, FLOAT32, FLOAT64, BOOL, STRING, 9])
    if kind == STRING:
        return text(draw.choice([b"", b"linear", b"yarn", b"none", b"llama", b"bitnet", b"\xff\xfe", b"x" * 300]))
    if kind == 9:
        return draw.choice([texts(["a", ""]), texts([]), numbers(INT32, [1, 2, 3]), numbers(FLOAT32, [])])
    if kind in (FLOAT32, FLOAT64):
        return number(kind, draw.choice(FLOAT_VALUES))
    return u32(kind) + (draw.choice(NUMBERS) % (1 << 64)).to_bytes(8, "little")[: struct.calcsize(FORMATS[kind])]


def _edit_key(document: Document, header: dict[str, Any], draw: random.Random) -> None:
    """Change a value, mostly its number and not its type; or delete, add, repeat or rename a key."""
    keys = document.keys
    if not keys:
        return
    i = draw.randrange(len(keys))
    (key, value), change = keys[i], draw.random()
    if change < 0.45 and value[0] in FORMATS:
        size = len(value) - 4
        if value[0] in (FLOAT32, FLOAT64):
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
        keys.append((f"{_architecture(document)}.{draw.choice(_KNOWN_KEYS)}", _value(draw)))
    elif change < 0.96:
        keys[i] = draw.choice(keys)[0], value
    else:
        keys[i] = "general.architecture", text(draw.choice(families.ARCHITECTURES))


def _architecture(document: Document) -> str:
    return document.config.architecture if document.config else "llama"


def _edit_entry(document: Document, header: dict[str, Any], draw: random.Random) -> None:
    """Change the dimensions, type, offset or name of a tensor, or delete or repeat it."""
    entries = document.entries
    if not entries:
        return
    i = draw.randrange(len(entries))
    entry, dims, change = entries[i], list(entries[i].dims) or [1], draw.random()  # an earlier change may have left none
    if change < 0.2:
        dims[draw.randrange(len(dims))] = draw.choice([*_SIZES, *NUMBERS]) % (1 << 64)
        entries[i] = replace(entry, dims=dims, data=_fitted(entry, dims, entry.type) if draw.random() < 0.6 else entry.data)
    elif change < 0.3:
        dims = draw.choice([dims[::-1], [*dims, 1], [1, *dims], dims[:-1], [dims[0] * dims[-1] % (1 << 64)]])
        entries[i] = replace(entry, dims=dims)
    elif change < 0.5:
        kind = draw.choice(list(BY_NUMBER))
        entries[i] = replace(entry, type=kind, data=_fitted(entry, dims, kind) if draw.random() < 0.8 else entry.data)
    elif change < 0.6:
        entries[i] = replace(entry, offset=draw.choice([0, 8, 32, 64, *NUMBERS]) % (1 << 64))
    elif change < 0.65:
        entries[i] = replace(entry, n_dims=draw.choice([0, 3, 4, 5, (1 << 32) - 1]))
    elif change < 0.75:
        del entries[i]
    elif change < 0.8:
        entries.append(entry)
    else:
        j = draw.randrange(len(entries))
        entries[i], entries[j] = replace(entry, name=entries[j].name), replace(entries[j], name=entry.name)


def _edit_data(document: Document, header: dict[str, Any], draw: random.Random) -> None:
    """Damage some bytes of a tensor, or cut it."""
    if not document.entries:
        return
    i = draw.randrange(len(document.entries))
    data = damage(bytearray(document.entries[i].content()), draw)
    if draw.random() < 0.1:
        del data[draw.randint(0, len(data)) :]
    document.entries[i] = replace(document.entries[i], data=bytes(data))


def _edit_header(document: Document, header: dict[str, Any], draw: random.Random) -> None:
    change = draw.choice(["key_count", "tensor_count", "version", "magic", "alignment", "tail"])
    if change == "magic":
        header[change] = draw.choice([b"GGUF", b"GGML", b"FUGG"])
    elif change == "tail":
        header[change] = draw.randbytes(draw.choice([1, 32, 100]))
    elif change == "alignment":
        header[change] = draw.choice([8, 16, 64, 1024])
        if draw.random() < 0.7:
            document.keys.append(("general.alignment", number(UINT32, header[change])))
    else:
        counts = {"key_count": len(document.keys), "tensor_count": len(document.entries), "version": 3}
        header[change] = draw.choice([counts[change] + draw.choice([-1, 1]), *NUMBERS]) % (1 << 32 if change == "version" else 1 << 64)


# --- sizes that agree -----------------------------------------------------------------------------------------------------------------


def _fitted(entry: Entry, dims: list[int], kind: int) -> bytes | None:
    """The bytes of a tensor repeated or cut to another size, or unchanged if that is too large. For another type: no NaN and no code 3."""
    elements = 1
    for dim in dims:
        elements *= dim
    known, data = BY_NUMBER.get(kind), entry.content() or b"\0"
    size = known.nbytes(elements) if known and elements < 1 << 40 else 0
    if not 0 < size <= _LARGEST:
        return entry.data
    if kind != entry.type:
        data = data.translate(_TAME)
    if BY_NUMBER[entry.type].trailer and kind == entry.type:
        trailer = BY_NUMBER[kind].trailer
        return (data * (size // len(data) + 1))[: size - trailer] + data[-trailer:]
    return (data * (size // len(data) + 1))[:size]


def _matrices(shapes: dict[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
    return [shape for shape in shapes.values() if len(shape) == 2]


_FACTORS = ("rope_freqs", "rope_factors_short", "rope_factors_long")


def _resize(document: Document, draw: random.Random) -> bool:
    """Give the model other sizes, in keys and tensors alike, and perhaps all matrices another type. Returns whether it could."""
    if document.config is None:
        return False
    names = draw.sample(["vocab", "context", "width", "ffn", "heads", "kv_heads", "head_dim", "rope_width"], draw.randint(1, 3))
    values: dict[str, Any] = {name: draw.choice(_SIZES) for name in names}
    if "heads" in values and draw.random() < 0.7:
        values["kv_heads"] = draw.choice([n for n in (1, 2, 3, 4, values["heads"]) if values["heads"] % n == 0])
    try:
        config = replace(document.config, **values)
    except Error:
        return False
    shapes = families.layer_shapes(config)
    shapes |= {"token_embd": (config.vocab, config.width), "output": (config.vocab, config.width), "output_norm": (config.width,)}
    shapes |= {"position_embd": (config.context, config.width), **dict.fromkeys(_FACTORS, (max(1, config.rope_pairs),))}
    if "attn_q" in shapes:
        shapes["attn_qkv"] = (config.q_width + 2 * config.kv_width, config.width)
    shapes |= {f"{name}_norm_in": shape[1:] for name, shape in shapes.items() if len(shape) == 2}
    if config.experts:
        shapes |= {f"{name}_shexp": shapes.pop(name) for name in ("ffn_gate", "ffn_up", "ffn_down") if name in shapes}
        own = shapes_of(Expert, config)
        shapes |= own | {f"{name}_exps": (config.experts, *shape) for name, shape in own.items()}
    fitting = [
        kind.number for kind in BY_NUMBER.values() if kind.readable and all(shape[-1] % kind.block == 0 for shape in _matrices(shapes))
    ]
    other = draw.choice(fitting) if draw.random() < 0.4 else None
    for i, entry in enumerate(document.entries):
        *_, field, role = (part for part in str(entry.name).split(".") if not part.isdigit())
        dims = [1] if role == "scale" else list((shapes[field][:1] if role == "bias" else shapes[field])[::-1])
        kind = other if other is not None and len(dims) == 2 else entry.type
        if dims[0] % BY_NUMBER[kind].block:
            kind = draw.choice(fitting)
        document.entries[i] = replace(entry, dims=dims, type=kind, data=_fitted(entry, dims, kind))
    sizes = {field: config.head_dim if field == "value_dim" else getattr(config, field) for field in SIZES}
    sizes |= {"expert_ffn": config.ffn, "shared_ffn": config.shared_ffn}
    sized = {f"{config.architecture}.{KEYS[field].name}": size for field, size in (sizes | {"rope_width": 2 * config.rope_pairs}).items()}
    for i, (key, _) in enumerate(document.keys):
        name = key.decode() if isinstance(key, bytes) else key
        if name in sized:
            document.keys[i] = key, number(UINT32, sized[name])
    document.config = config
    return True
