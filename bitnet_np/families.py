"""Model families: which GGUF architectures are supported, and what their keys and tensors are called."""

from decimal import Decimal, localcontext
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .errors import FileFormatError, UnsupportedError
from .gguf_file import GGUFFile
from .model import Config

# `bitnet-25` is the name an earlier upload of the same model used.
ARCHITECTURES = ("bitnet-b1.58", "bitnet-25")

# field of model.Layer -> middle of the tensor's name, blk.<n>.<middle>.weight
NORMS = ("attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm")
MATRICES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")

_REQUIRED = {
    "context_length": int,
    "embedding_length": int,
    "block_count": int,
    "feed_forward_length": int,
    "attention.head_count": int,
    "attention.head_count_kv": int,
    "attention.layer_norm_rms_epsilon": float,
    "rope.freq_base": float,
}
_OPTIONAL = {"vocab_size": int, "rope.dimension_count": int, "attention.key_length": int, "attention.value_length": int}


def architecture(file: GGUFFile) -> str:
    """The file's architecture, if it is one of ours."""
    name = file.require("general.architecture", str)
    if name not in ARCHITECTURES:
        raise UnsupportedError(f"{file.path}: general.architecture is {name!r}, supported are {', '.join(ARCHITECTURES)}")
    return name


def read_config(file: GGUFFile) -> Config:
    """The model's numbers. A key of the architecture that we do not know could change the arithmetic, so it is refused by name."""
    name = architecture(file)
    prefix = name + "."
    known = _REQUIRED | _OPTIONAL
    for key in file.metadata:
        if key.startswith(prefix) and key[len(prefix) :] not in known:
            raise UnsupportedError(f"{file.path}: {key} = {file.metadata[key]!r} is a setting this package does not implement")
    value: dict[str, Any] = {key: file.require(prefix + key, kind) for key, kind in _REQUIRED.items()}
    value |= {key: file.get(prefix + key, kind, None) for key, kind in _OPTIONAL.items()}

    heads, width = value["attention.head_count"], value["embedding_length"]
    head_dim = value["attention.key_length"]
    if head_dim is None:
        if heads < 1 or width % heads:
            raise FileFormatError(
                f"{file.path}: {width} = {prefix}embedding_length is no multiple of {heads} = {prefix}attention.head_count"
            )
        head_dim = width // heads
    for key in ("rope.dimension_count", "attention.value_length"):
        if value[key] not in (None, head_dim):
            raise UnsupportedError(f"{file.path}: {prefix}{key} is {value[key]}, only the head width {head_dim} is supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise FileFormatError(f"{file.path}: no tensor token_embd.weight of two dimensions")
    if value["vocab_size"] not in (None, embedding.shape[0]):
        raise FileFormatError(f"{file.path}: {prefix}vocab_size is {value['vocab_size']}, token_embd.weight has {embedding.shape[0]} rows")
    try:
        return Config(
            architecture=name,
            vocab=embedding.shape[0],
            context=value["context_length"],
            width=width,
            n_layers=value["block_count"],
            ffn=value["feed_forward_length"],
            heads=heads,
            kv_heads=value["attention.head_count_kv"],
            head_dim=head_dim,
            eps=value["attention.layer_norm_rms_epsilon"],
            rope_base=value["rope.freq_base"],
        )
    except ValueError as error:
        raise type(error)(f"{file.path}: {error}") from None


def layer_shapes(c: Config) -> dict[str, tuple[int, ...]]:
    """Field of model.Layer -> the shape its tensor must have."""
    return {
        "attn_norm": (c.width,),
        "attn_q": (c.q_width, c.width),
        "attn_k": (c.kv_width, c.width),
        "attn_v": (c.kv_width, c.width),
        "attn_sub_norm": (c.q_width,),
        "attn_output": (c.width, c.q_width),
        "ffn_norm": (c.width,),
        "ffn_gate": (c.ffn, c.width),
        "ffn_up": (c.ffn, c.width),
        "ffn_sub_norm": (c.ffn,),
        "ffn_down": (c.width, c.ffn),
    }


def rope_frequencies(base: float, head_dim: int) -> NDArray[np.float64]:
    """base^(-2i / K) for i < K/2, radians per position, correctly rounded: powers of a math library differ between machines."""
    with localcontext(prec=40):
        powers = [Decimal(base) ** (Decimal(-2 * i) / Decimal(head_dim)) for i in range(head_dim // 2)]
    return np.array([float(power) for power in powers])
