"""Random models in the exact form of the released BitNet b1.58 2B file: its keys, tensor names, types and order.

A float16 embedding, ternary I2_S matrices with one float32 scale each, and float32 norms. Nothing is learned, but every part matters: no
two tensors or scales agree, and activations keep a sane size in all layers.

The same config and seed give the same bytes with every version of NumPy. Only the raw stream of PCG64 is used, which NEP 19 promises to
keep stable, and 16 bits of it are the index of each value in a table. That is also fast: 6 s and 0.7 GB of memory for the 2B file.
"""

from collections.abc import Iterator
from itertools import count, islice, product
from math import prod, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np.base.errors import OptionError
from bitnet_np.base.progress import Progress, silent
from bitnet_np.base.tensor_types import F16, F32, I2_S, TensorType
from bitnet_np.files.gguf_names import tensor_name
from bitnet_np.files.gguf_writer import FILE_TYPES, RELEASED, write_file
from bitnet_np.model.families import layer_shapes
from bitnet_np.model.records import Activation, Config
from bitnet_np.text.byte_level import BYTE_CHARACTERS
from bitnet_np.text.vocabulary import CONTROL, NORMAL

ARCHITECTURES: dict[Activation, str] = {"relu2": "bitnet-b1.58", "silu": "bitnet"}
"""The gate's activation has no key: it follows from the architecture."""

TINY: dict[str, Any] = {"vocab": 512, "context": 512, "width": 256, "n_layers": 3, "ffn": 768, "heads": 4, "kv_heads": 2, "head_dim": 64}
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": TINY,
    "small": {"vocab": 4096, "context": 4096, "width": 512, "n_layers": 6, "ffn": 1536, "heads": 8, "kv_heads": 2, "head_dim": 64},
    "2b": {"vocab": 128256, "context": 4096, "width": 2560, "n_layers": 30, "ffn": 6912, "heads": 20, "kv_heads": 5, "head_dim": 128},
    "custom": TINY,
}
"""The sizes of models, as fields of Config."""


def released(activation: Activation = "relu2", eps: float = 1e-5, rope_base: float = 500000.0, **sizes: Any) -> Config:
    """The Config of a model of the sizes of TINY, changed by `sizes`. Raises OptionError for sizes that the format cannot hold."""
    config = Config(ARCHITECTURES[activation], eps=eps, rope_base=rope_base, activation=activation, **{**TINY, **sizes})
    for name in ("width", "ffn", "q_width"):
        value = getattr(config, name)
        if value % I2_S.block:
            raise OptionError(f"{name} is {value}, but rows of I2_S are whole blocks: it must be a multiple of {I2_S.block}")
    if config.vocab < 3:
        raise OptionError(f"vocab is {config.vocab}, but two tokens are special and one must be text: it must be at least 3")
    return config


def tensor_table(c: Config) -> list[tuple[str, TensorType, tuple[int, ...]]]:
    """Name, type and shape of the tensors, in the order of the released file."""
    shapes = layer_shapes(c)
    layer = [(field, I2_S if len(shapes[field]) == 2 else F32, shapes[field]) for field in RELEASED if field in shapes]
    blocks = [(tensor_name(field, n), kind, shape) for n in range(c.n_layers) for field, kind, shape in layer]
    return [("token_embd.weight", F16, (c.vocab, c.width)), *blocks, ("output_norm.weight", F32, (c.width,))]


FOUR_CODES = np.array([a << 6 | b << 4 | c << 2 | d for a, b, c, d in product(range(3), repeat=4)], np.uint8)
"""The bytes of four codes from 0 to 2. Code 3 is invalid and is never written."""

# 65536 entries each, so that 16 random bits are an index
TERNARY_BYTES = np.resize(FOUR_CODES, 1 << 16)
GAINS = ((np.arange(1 << 16) + 0.5) / (1 << 16) + 0.5).astype(np.float32)  # 0.5 to 1.5


def normal_table(deviation: float) -> NDArray[np.float16]:
    """The 65536 equally likely quantiles of a normal distribution."""
    normal = NormalDist(0.0, deviation)
    return np.array([normal.inv_cdf((i + 0.5) / (1 << 16)) for i in range(1 << 16)], np.float16)


def draw(bits: np.random.PCG64, table: NDArray[Any], number: int) -> NDArray[Any]:
    """`number` random entries of `table`, in pieces that stay in the cache."""
    out = np.empty(number, table.dtype)
    for piece in np.split(out, range(1 << 18, number, 1 << 18)):
        raw = bits.random_raw(-(-piece.size // 4)).astype("<u8").view("<u2")
        np.take(table, raw[: piece.size], out=piece, mode="wrap")  # any index is in range; "wrap" only saves a copy
    return out


def weights(c: Config, seed: int) -> Iterator[NDArray[Any]]:
    """The data of each tensor, in the order of the table.

    Rows of ternary values scaled by 1/sqrt(length * 2/3) keep unit variance. The scales differ from that by up to 10 %, along multiples of
    the golden ratio, which never meet. Embeddings of deviation 3/sqrt(width) give logits of deviation 3.
    """
    bits = np.random.PCG64(seed)
    phase = int(bits.random_raw()) / 2**64
    embedding = normal_table(3 / sqrt(c.width))
    for index, (_, kind, shape) in enumerate(tensor_table(c)):
        if kind is I2_S:
            jitter = 0.9 + 0.2 * ((phase + index * (sqrt(5) - 1) / 2) % 1.0)
            trailer = np.zeros(I2_S.trailer // 4, np.float32)
            trailer[0] = jitter / sqrt(shape[1] * 2 / 3)
            yield np.concatenate([draw(bits, TERNARY_BYTES, prod(shape) // 4), trailer.view(np.uint8)])
        else:
            yield draw(bits, embedding if kind is F16 else GAINS, prod(shape))


MOST_MERGES = 280_147  # the length of Llama 3's list, whose 127,744 merged tokens also split in several ways
LETTERS = "etaoinshrdlcumwfgypbvkjxqz"
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


def special_tokens(number: int) -> list[str]:
    """Llama 3's special tokens: begin, end, then reserved ones with those of chats among them."""
    chat = {6: "<|start_header_id|>", 7: "<|end_header_id|>", 9: "<|eot_id|>"}
    reserved = (f"<|reserved_special_token_{n}|>" for n in count())
    return ["<|begin_of_text|>", "<|end_of_text|>", *(chat.get(i) or next(reserved) for i in range(2, number))]


def words() -> Iterator[str]:
    """All strings of letters, shortest first, with or without a space (Ġ) before them: each part of a word is an earlier word or a byte."""
    for length in count(2):
        yield from map("".join, product("Ġ" + LETTERS, *[LETTERS] * (length - 1)))


def vocabulary(size: int) -> tuple[list[str], list[str], int]:
    """Tokens, merges and the number of special tokens (the last ones) of a byte-level BPE of `size` tokens.

    Merges lead to every token: each token has the merge by which BPE itself arrives at it. Merges of its other splits follow as long as the
    list has room. Below 259 tokens there are no merges, below 258 not even all bytes.
    """
    special = special_tokens(min(256, max(2, (size - len(BYTE_CHARACTERS)) // 4)))
    ordinary = sorted(BYTE_CHARACTERS)[: size - len(special)]  # the order of GPT-2 and Llama 3, printable ones first
    merged = list(islice(words(), max(0, size - len(ordinary) - len(special))))
    ranks: dict[tuple[str, str], int] = {}
    room = MOST_MERGES - len(merged)
    for word in merged:
        own = bpe(word, ranks)
        others = [split for i in range(1, len(word)) if (split := (word[:i], word[i:])) != own][: max(0, room)]
        room -= len(others)
        for split in (own, *others):
            ranks[split] = len(ranks)
    return [*ordinary, *merged, *special], [f"{left} {right}" for left, right in ranks], len(special)


def bpe(word: str, ranks: dict[tuple[str, str], int]) -> tuple[str, str]:
    """Merge the pair of lowest rank until two parts are left."""
    parts = list(word)
    while len(parts) > 2:
        i = min(range(len(parts) - 1), key=lambda i: ranks.get((parts[i], parts[i + 1]), len(ranks)))
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    return parts[0], parts[1]


def _metadata(c: Config, name: str) -> dict[str, Any]:
    """The 24 keys of the released file, in its order (23 without merges; 26 where head_dim is not width / heads)."""
    tokens, merges, special = vocabulary(c.vocab)
    bos = c.vocab - special
    return {
        "general.name": name,
        "general.file_type": FILE_TYPES[I2_S],
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * len(tokens),
        "tokenizer.ggml.token_type": [NORMAL] * bos + [CONTROL] * special,
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": bos,
        "tokenizer.ggml.eos_token_id": bos + 1,
        "tokenizer.ggml.padding_token_id": bos + 1,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def write_released(path: Path, c: Config, seed: int, *, progress: Progress = silent) -> None:
    """Write the file of a Config of `released`. `path` appears only when it is complete."""
    if seed < 0:
        raise OptionError(f"seed is {seed}, but must not be negative")
    write_file(path, c, _metadata(c, f"random, seed {seed}"), tensor_table(c), weights(c, seed), progress=progress)
