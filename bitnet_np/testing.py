"""Random models for property tests, ours and those of other engines."""

import numpy as np
from numpy.typing import NDArray

from . import packing
from .families import rope_frequencies
from .model import Config, Layer, Linear, Model

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


def random_model(seed: int, *, table: str = "float32", tied: bool = True, gain: float = 1.0, **shape: float) -> Model:
    """A model of SHAPE, but for what `shape` says, in which every part matters.

    No two heads are alike, no row of a matrix is zero, activations have a spread of about 1 in front of every operation, and every
    matrix and norm has a scale of its own: a bug anywhere shows. `table` is the dtype of embedding and head: float32, float16 or
    bfloat16. `gain` multiplies the scales of all ternary matrices.
    """
    rng = np.random.default_rng(seed)
    config = Config("bitnet-b1.58", **{**SHAPE, **shape})  # type: ignore[arg-type]
    width, ffn, q_width, kv_width = config.width, config.ffn, config.q_width, config.kv_width

    def matrix(n: int, m: int) -> Linear:
        weights = rng.choice([-1, 0, 1], (n, m), p=[0.35, 0.3, 0.35])
        weights[np.arange(n), rng.integers(0, m, n)] = rng.choice([-1, 1], n)  # no row is zero
        return Linear(packing.pack(weights, gain * rng.uniform(0.8, 1.25) / np.sqrt(0.7 * m)))  # unit rows in, about unit rows out

    def norm(n: int) -> NDArray[np.float32]:
        return rng.normal(1, 0.3, n).astype(np.float32)

    def float_table() -> NDArray:
        values = rng.standard_normal((config.vocab, width)).astype(np.float32)
        return (values.view(np.uint32) >> 16).astype(np.uint16) if table == "bfloat16" else values.astype(table)

    layers = tuple(
        packing.frozen(
            Layer(
                attn_norm=norm(width),
                attn_q=matrix(q_width, width),
                attn_k=matrix(kv_width, width),
                attn_v=matrix(kv_width, width),
                attn_sub_norm=norm(q_width),
                attn_output=matrix(width, q_width),
                ffn_norm=norm(width),
                ffn_gate=matrix(ffn, width),
                ffn_up=matrix(ffn, width),
                ffn_sub_norm=norm(ffn),
                ffn_down=matrix(width, ffn),
            )
        )
        for _ in range(config.n_layers)
    )
    frequencies = rope_frequencies(config.rope_base, config.head_dim)
    return packing.frozen(Model(config, float_table(), layers, norm(width), frequencies, None if tied else float_table()))
