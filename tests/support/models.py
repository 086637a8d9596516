"""Random models and tokens for the tests, and the comparison of bits.

Hypothesis draws the shape and the seed; NumPy fills the arrays (bitnet_np.testing).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import numba
import numpy as np
from hypothesis import strategies as st
from numpy.random import Generator
from numpy.typing import NDArray

from bitnet_np.engine.cache_types import BLOCK, KINDS
from bitnet_np.engine.dialects import DIALECTS, Dialect
from bitnet_np.kernels import launching
from bitnet_np.model.families import ARCHITECTURES, FAMILIES
from bitnet_np.model.records import LongRope, Model, Yarn
from bitnet_np.testing.models import SHAPE, bfloat16_bits, random_model

__all__ = ["SHAPE", "random_model"]


@st.composite
def shapes(draw: st.DrawFn) -> dict:
    """Keyword arguments of `random_model`: all kinds of head sharing, odd widths, all dtypes of tables."""
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return {
        "width": draw(st.sampled_from([20, 33, 64, 100, 160, 256])),
        "heads": kv_heads * draw(st.sampled_from([1, 2, 5])),  # MHA, GQA, and MQA with one key-value head
        "kv_heads": kv_heads,
        "head_dim": draw(st.sampled_from([2, 6, 20, 32, 64])),
        "ffn": draw(st.sampled_from([36, 45, 160, 384])),
        "n_layers": draw(st.integers(1, 3)),
        "vocab": draw(st.sampled_from([5, 33, 64, 150])),
        "table": draw(st.sampled_from(["float32", "float16", "bfloat16"])),
        "tied": draw(st.booleans()),
        **draw(windows()),
    }


@st.composite
def windows(draw: st.DrawFn) -> dict:
    """The window of attention, if any, and the layers that have it."""
    window = draw(st.sampled_from([None, None, 1, 3, 64, 65, 100]))
    return {} if window is None else {"window": window, "window_layers": draw(st.sampled_from([None, (), (0,)]))}


def family_shapes() -> st.SearchStrategy[dict]:
    """Like `shapes`, but of any family: ternary and float matrices, norms inside linears, partial rotation, both kinds of residual.

    Within one example all strategies of a test that read the shape get the same.
    """
    return st.shared(_family_shapes(), key="family_shapes")


@st.composite
def _family_shapes(draw: st.DrawFn) -> dict:
    shape, family = draw(shapes()), draw(st.sampled_from(ARCHITECTURES))
    family_traits = FAMILIES[family]
    shape |= {
        "family": family,
        "weights": "ternary" if family_traits.ternary else draw(st.sampled_from(["ternary", "float32", "float16", "bfloat16"])),
    }
    shape["inner_norms"] = draw(st.booleans())
    if "experts" in family_traits.required or (family == "llama" and draw(st.booleans())):  # llama's are Mixtral's
        shape |= {"experts": 5, "experts_used": draw(st.sampled_from([1, 2, 5])), "normalized_experts": draw(st.booleans())}
    if family_traits.rope_period:
        shape["rope_layers"] = draw(st.sampled_from([None, (), (0,)]))
    if family_traits.partial_rope:
        shape["rope_width"] = 2 * draw(st.integers(1, shape["head_dim"] // 2))
    if family_traits.chooses_residual:
        shape["parallel_residual"] = draw(st.booleans())
    if family_traits.scaling:
        shape["rope_scaling"] = draw(st.sampled_from([1.0, 4.0]))
        if family_traits.config["rope"] != "none" and family_traits.local_rope_base is None and draw(st.booleans()):
            shape |= {"rope_scaling": 1.0, "yarn": Yarn(4.0, 16, fast=4.0), "rope_magnitude": 1.2}
    if family_traits.longrope and "yarn" not in shape and draw(st.booleans()):
        pairs = shape.get("rope_width", shape["head_dim"]) // 2
        shape |= {"rope_scaling": 1.0, "longrope": LongRope(64, (1.5,) * pairs, (2.5,) * pairs), "rope_magnitude": 1.2}
    return shape


@st.composite
def dialects(draw: st.DrawFn) -> Dialect:
    """Where an engine rounds, with a KV cache of any type whose blocks fit a head of `family_shapes`."""
    head_dim = draw(family_shapes())["head_dim"]
    kinds = ["float32", "float32", *(kind for kind in KINDS if kind not in ("q8_0", "q4_0") or head_dim % BLOCK == 0)]
    return draw(st.sampled_from(list(DIALECTS.values()))).with_cache(draw(st.sampled_from(kinds)))


seeds = st.integers(0, 2**32 - 1)
"""Seeds of NumPy's generator, which fills the arrays."""

lengths = st.integers(1, 12) | st.sampled_from([63, 64, 65, 127, 128, 129, 130]) | st.integers(13, 140)
"""Lengths of sequences: short ones, those around multiples of the 64 keys of a chunk, and any others."""


def random_tokens(rng: Generator, model: Model, *shape: int) -> NDArray[np.int64]:
    return rng.integers(0, model.config.vocab, shape)


def padded(rng: Generator, sequences: list[NDArray[np.int64]], extra: int = 0) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sequences as tokens [B, T] and lengths [B]. Padding is arbitrary, as the public API allows."""
    counts = np.array([len(sequence) for sequence in sequences])
    tokens = rng.integers(-(2**40), 2**40, (len(sequences), counts.max() + extra))
    for row, sequence in zip(tokens, sequences, strict=True):
        row[: len(sequence)] = sequence
    return tokens, counts


def assert_same_bits(a: NDArray[np.float32], b: NDArray[np.float32]) -> None:
    """Assert that arrays are equal, with the signs of zeros."""
    assert a.dtype == b.dtype == np.float32
    np.testing.assert_array_equal(np.ascontiguousarray(a).view(np.uint32), np.ascontiguousarray(b).view(np.uint32))


@contextmanager
def threads(n: int) -> Iterator[None]:
    """Run kernels on n threads, however small they are."""
    before = numba.get_num_threads()
    numba.set_num_threads(n)
    try:
        with mock.patch.object(launching, "SMALL", 0):
            yield
    finally:
        numba.set_num_threads(before)


def as_table(values: NDArray, dtype: str = "float32") -> NDArray:
    """Numbers as a read-only table of that dtype, bfloat16 as its bits."""
    values = np.asarray(values, np.float32)
    table = bfloat16_bits(values) if dtype == "bfloat16" else values.astype(dtype)
    table.flags.writeable = False
    return table


def normal(rng, *shape):
    """Rows of very different sizes, so that a scale of a wrong row shows."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, (shape[0], *[1] * (len(shape) - 1))))
    return x.astype(np.float32)
