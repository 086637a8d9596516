"""Random models, in memory and as GGUF files: for the tests of this package, and for those of other engines."""

import os
from dataclasses import dataclass, fields, replace
from string import ascii_lowercase
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ..base.block_formats import FORMATS
from ..base.errors import OptionError, ShapeError
from ..base.tensor_types import ALL_BLOCK_TYPES, FEW_BITS, GRID_TYPES, IQ4_NL, IQ4_XS, NVFP4, OF_NUMBER_42, TensorType
from ..base.validate import choice, flag, instance, integer, path_of, positive
from ..files.gguf_writer import write_model
from ..kernels.float_state import steady
from ..kernels.ggml import grids
from ..model import packing, widen
from ..model.checks import check_model
from ..model.families import FAMILIES, Family, implied, layer_shapes, windowed_layers
from ..model.records import Blocks, Config, Expert, Layer, Linear, Model, Table, Ternary, Weights, frozen, shapes_of, window_fields
from ..model.rope import rope_fields
from ..text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN
from .noise import Noise

Generator = np.random.Generator | Noise

SHAPE = {
    "vocab": 50,
    "width": 100,
    "n_layers": 2,
    "ffn": 160,
    "heads": 6,
    "kv_heads": 3,
    "head_dim": 20,
    "context": 512,
    "eps": 1e-5,
    "rope_base": 10000.0,
}
"""The default fields of Config in `random_model`."""

NUMBERS = {
    "attention_scale": 0.125,
    "score_cap": 2.0,
    "embedding_scale": 3.0,
    "residual_scale": 0.375,
    "logit_scale": 2.5,
    "logit_cap": 3.0,
}
"""The defaults of fields of Config that few families have."""

WINDOW = 20
"""Keys that layers with a window see, in models of families that always have such layers."""

EXPERTS = {"experts": 5, "experts_used": 2}
"""The same of families whose layers always have experts."""

MOST_GAIN = {"ternary": 1e38, "float32": 1e38, "bfloat16": 1e38}
"""The largest gain with which weights are finite, by their type. Other types have numbers or scales in float16, and take up to 1,000."""

_BLOCKS = {kind.name: kind for kind in ALL_BLOCK_TYPES}


@steady
def random_model(
    seed: int | Generator,
    *,
    family: str = "bitnet-b1.58",
    table: str = "float32",
    weights: str = "",
    tied: bool = True,
    gain: float = 1.0,
    inner_norms: bool = False,
    **shape: Any,
) -> Model:
    """A model of SHAPE, changed by `shape`, in which every part matters.

    No two heads are alike, no row of a matrix is zero, activations have a spread of about 1 in front of every operation, and every
    matrix and norm has a different scale, so that a bug anywhere shows.

    seed: of NumPy's generator, or a generator, or Noise, with which the model is the same everywhere.
    family: an architecture of families.FAMILIES; the model has all biases, scales and RoPE factors that the family allows.
    table: the dtype of embedding and head (float32, float16 or bfloat16), or the name of a block type.
    weights: the same for the layers' matrices, or "ternary"; empty means ternary for a BitNet, else `table`.
    gain: multiplies all matrices of the layers, up to MOST_GAIN. inner_norms: gives each linear an inner norm.
    """
    choice("the family", family, FAMILIES)
    if not isinstance(seed, Generator):
        integer("seed", seed, 0)
    integer("n_layers", shape.get("n_layers", 1), 1, error=ShapeError)
    instance("weights", weights, str)
    for name, value in (("tied", tied), ("inner_norms", inner_norms)):
        flag(name, value)
    if unknown := shape.keys() - {field.name for field in fields(Config)}:
        raise OptionError(f"a Config has no {', '.join(sorted(unknown))}")
    traits = FAMILIES[family]
    config = _config(family, shape)
    weights = weights or ("ternary" if traits.ternary else table)
    if positive("gain", gain) > (most := MOST_GAIN.get(weights, 1e3)):
        raise OptionError(f"gain is {gain}, expected at most {most:g}, with which weights of {weights} are finite")
    rng = seed if isinstance(seed, Noise) else np.random.default_rng(seed)
    return _Drawing(rng, config, traits, table, weights, gain, inner_norms).model(tied)


def _config(family: str, shape: dict[str, Any]) -> Config:
    """The Config of a file with these numbers; those that only some families have are such that they show."""
    traits = FAMILIES[family]
    fields = {**SHAPE, **{name: NUMBERS[name] for name in traits.numbers if name in NUMBERS}, **traits.config}
    if "experts" in traits.required:
        fields |= EXPERTS
    if "shared_ffn" in traits.required:
        fields["shared_ffn"] = shape.get("ffn", SHAPE["ffn"])
    if traits.local_rope_base is not None or "window" in traits.required:  # its files always have a window
        n_layers = shape.get("n_layers", SHAPE["n_layers"])
        layers = windowed_layers(family, n_layers)
        layers = layers[:-1] if len(layers) == n_layers > 1 else layers  # so that there are layers with and without the window
        fields |= window_fields(WINDOW, layers, n_layers)
    if traits.local_rope_base is not None:
        fields["local_rope_base"] = 100.0
    config = Config(family, **{**fields, **shape})
    return replace(config, **{name: value for name, value in implied(config).items() if name not in shape})


@dataclass(frozen=True)
class _Drawing:
    """The parts of a random model. Each call takes the generator's next numbers, so the model of a seed depends on their order."""

    rng: Generator
    config: Config
    family: Family
    table: str
    weights: str
    gain: float
    inner_norms: bool

    def model(self, tied: bool) -> Model:
        c, family = self.config, self.family
        layers = tuple(self.layer() for _ in range(c.n_layers))
        token_embd, output_norm = self.float_table(c.vocab), self.vector(c.width)
        factors = self.rng.uniform(1, 8, c.rope_pairs).astype(np.float32) if family.rope_factors else None
        return frozen(
            Model(
                config=c,
                token_embd=token_embd,
                layers=layers,
                output_norm=output_norm,
                output=None if tied else self.float_table(c.vocab),
                output_bias=self.vector(c.vocab, 0.0) if family.head_bias else None,
                output_norm_bias=self.vector(c.width, 0.0) if c.norm == "layer" else None,
                position_embd=self.float_table(c.context) if family.positions else None,
                **rope_fields(c, factors),
            )
        )

    def layer(self) -> Layer:
        fields: dict[str, Any] = {}
        for name, size in layer_shapes(self.config).items():
            if name == "ffn_gate_inp":  # a spread of 2, so that weights differ
                fields[name] = Linear(random_table(self.rng, "float32", size[0], size[1], 2 / np.sqrt(size[1])))
            elif len(size) == 2:
                fields[name] = self.linear(name, size[0], size[1])
            else:
                fields[name] = self.vector(size[0])
                if self.config.norm == "layer":
                    fields[name + "_bias"] = self.vector(size[0], 0.0)
        up = fields.get("ffn_up")
        if "ffn_up" in self.family.fused and up is not None and isinstance(up.weights, Ternary):  # one tensor has one scale
            fields["ffn_up"] = replace(up, weights=replace(up.weights, scale=fields["ffn_gate"].weights.scale))
        shapes = shapes_of(Expert, self.config).items()
        experts = ({name: Linear(self.matrix(*shape)) for name, shape in shapes} for _ in range(self.config.experts))
        return frozen(Layer(**fields, experts=tuple(Expert(**fields) for fields in experts)))

    def linear(self, name: str, n: int, m: int) -> Linear:
        biased = name in self.family.biases + self.family.optional_biases
        return Linear(
            self.matrix(n, m),
            self.vector(n, 0.0) if biased else None,
            np.float32(self.rng.uniform(0.8, 1.25)) if self.family.scales else None,
            self.vector(m) if self.inner_norms else None,
            1e-6 if self.inner_norms else None,
        )

    def matrix(self, n: int, m: int) -> Weights:
        """A matrix that turns unit rows into about unit rows."""
        rng = self.rng
        if self.weights != "ternary":
            return random_table(rng, self.weights, n, m, self.gain * rng.uniform(0.8, 1.25) / np.sqrt(m))
        codes = rng.choice([-1, 0, 1], (n, m), p=[0.35, 0.3, 0.35])
        codes[np.arange(n), rng.integers(0, m, n)] = rng.choice([-1, 1], n)  # no row is zero
        return packing.pack(codes, self.gain * rng.uniform(0.8, 1.25) / np.sqrt(0.7 * m))

    def vector(self, n: int, mean: float = 1.0) -> NDArray[np.float32]:
        return self.rng.normal(mean, 0.3, n).astype(np.float32)

    def float_table(self, rows: int) -> Table:
        return random_table(self.rng, self.table, rows, self.config.width)


def random_table(rng: Generator, kind: str, n: int, m: int, spread: float = 1.0) -> Table:
    """Normal numbers [n, m] with a standard deviation of `spread`, in a float dtype (bfloat16 is cut) or one of ggml's block types.

    gguf-py cannot quantise to some types, so these are random bytes, with scales that give about the same spread.
    """
    choice("the type of a random table", kind, ("float32", "float16", "bfloat16", *_BLOCKS))
    if kind not in _BLOCKS:
        single = (rng.standard_normal((n, m)) * spread).astype(np.float32)
        return bfloat16_bits(single) if kind == "bfloat16" else single.astype(kind)
    block_type = _BLOCKS[kind]
    if m % block_type.block:
        raise ShapeError(f"rows have {m} numbers, expected whole blocks of {block_type.block}, as {kind} has them")
    if block_type in (*GRID_TYPES, IQ4_NL, IQ4_XS, NVFP4):
        data = _random_codes(rng, block_type, n, m, spread)
    elif kind.endswith("_K") or block_type in FEW_BITS:
        data = _random_blocks(rng, block_type, n, m, spread)
    else:
        data = gguf.quants.quantize((rng.standard_normal((n, m)) * spread).astype(np.float32), gguf.GGMLQuantizationType[kind])
    return frozen(Blocks(data, block_type, (n, m)))


def bfloat16_bits(x: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Numbers cut to bfloat16."""
    return (x.view(np.uint32) >> 16).astype(np.uint16)


def _random_blocks(rng: Generator, kind: TensorType, n: int, m: int, spread: float) -> NDArray[np.uint8]:
    data = rng.integers(0, 256, (n, m // kind.block * kind.block_bytes), np.uint8)
    if kind in OF_NUMBER_42:
        data &= ~(data & 0xAA & data << 1)  # the code 3 becomes 1, so that the mean is 0
    records = data.view(FORMATS[kind.name].layout)
    scale_fields = FORMATS[kind.name].float16_fields

    def weights(*scales: float) -> NDArray[np.float32]:
        for name, scale in zip(scale_fields, scales, strict=True):
            records[name] = np.float16(scale).view(np.uint16)
        return widen.float32(Blocks(data, kind, (n, m)))

    units = np.eye(len(scale_fields))
    means = [float(weights(*unit).mean()) for unit in units]
    balance = (1.0,) if len(scale_fields) == 1 else (1.0, -means[0] / means[1])
    size = spread / float(weights(*balance).std())
    for name, factor in zip(scale_fields, balance, strict=True):
        records[name] = (size * factor * rng.uniform(0.7, 1.3, records.shape)).astype(np.float16).view(np.uint16)
    return data


def _random_codes(rng: Generator, kind: TensorType, n: int, m: int, spread: float) -> NDArray[np.uint8]:
    """Random bytes of a type with one scale to a block, which has a random sign: codes have a mean that is not 0. Of NVFP4 four scales."""
    data = rng.integers(0, 256, (n, m // kind.block * kind.block_bytes), np.uint8)
    blocks = data.reshape(-1, kind.block_bytes)

    def scaled(scales: NDArray[np.float64]) -> NDArray[np.uint8]:
        if kind in GRID_TYPES:
            return grids.with_scales(data, kind, scales[:, 0].astype(np.float16).view(np.uint16))
        table = FORMATS[kind.name].scale.table
        if table:
            blocks[:, : scales.shape[1]] = np.abs(np.array(table) - np.abs(scales)[..., None]).argmin(axis=2)
        else:
            blocks[:, :2] = scales.astype("<f2").view(np.uint8)
        return data

    count = 4 if kind is NVFP4 else 1
    unit = widen.float32(Blocks(scaled(np.ones((len(blocks), count))), kind, (n, m))).std()
    return scaled(spread / unit * rng.uniform(0.7, 1.3, (len(blocks), count)) * rng.choice([-1, 1], (len(blocks), count)))


def vocabulary(size: int) -> dict[str, Any]:
    """The keys of a small SentencePiece tokenizer of `size` tokens: letters, ASCII and words; llama-server loads no file without one."""
    pieces = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<0x0A>", BYTE), *((c, NORMAL) for c in "\u2581" + ascii_lowercase)]
    pieces += [(f"<0x{byte:02X}>", BYTE) for byte in range(128) if byte != 0x0A]  # llama-server holds back halves of characters
    pieces += [(f"\u2581w{i}", NORMAL) for i in range(size - len(pieces))]
    tokens, types = zip(*pieces[:size], strict=True)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": list(tokens),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.scores": -np.arange(size, dtype=np.float32),
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }


_FEWEST_TOKENS = 31
"""Of a vocabulary with the letters."""


def write_gguf(path: str | os.PathLike, model: Model, *, fused: bool | None = None) -> None:
    """Write a model of one of families.FAMILIES as a GGUF file, with a small `vocabulary` if it has the tokens for one.

    Ternary matrices are written as I2_S, whose rows are multiples of 128: random_model(seed, width=128, ffn=256, head_dim=64, heads=2,
    kv_heads=1) fits. fused: whether queries, keys and values are in one tensor, where one can hold them; None: as the family's files
    have it.

    Raises UnsupportedError for a model that GGUF cannot express.
    """
    path = path_of(path)
    check_model(model)
    names = FAMILIES[model.config.architecture].fused
    if fused is not None:
        flag("fused", fused)
        names = tuple({*names, "attn_qkv"} if fused else {*names} - {"attn_qkv"})
    small = model.config.vocab < _FEWEST_TOKENS
    write_model(path, model, {"tokenizer.ggml.model": "none"} if small else vocabulary(model.config.vocab), fused=names)
