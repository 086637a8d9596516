"""The records that are the model: flat arrays, a shape beside each. Behaviour is elsewhere.

Letters used in every shape comment of this package:
    B sequences   T tokens of one call   R rows (tokens of all sequences, end to end)   S positions a cache holds
    L layers      D model width          F feed-forward width                           V vocabulary
    H query heads G key-value heads      K head width                                   M, N a matrix's input and output width
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .errors import ShapeError, UnsupportedError
from .tensor_types import TensorType


@dataclass(frozen=True)
class Config:
    """What the numbers of a model file mean. Names follow GGUF's keys where those are short enough."""

    architecture: str
    vocab: int  # V
    context: int  # positions the model was trained for
    width: int  # D
    n_layers: int  # L
    ffn: int  # F
    heads: int  # H
    kv_heads: int  # G, divides H
    head_dim: int  # K, even
    eps: float  # inside the root of every norm
    rope_base: float

    def __post_init__(self) -> None:
        for name in ("vocab", "context", "width", "n_layers", "ffn", "heads", "kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ShapeError(f"{name} is {getattr(self, name)}, expected at least 1")
        if self.heads % self.kv_heads:
            raise ShapeError(f"{self.heads} query heads cannot share {self.kv_heads} key-value heads evenly")
        if self.head_dim % 2:
            raise ShapeError(f"head width {self.head_dim} is odd, but RoPE rotates pairs")
        for name in ("eps", "rope_base"):
            if not 0 < getattr(self, name) < np.inf:
                raise UnsupportedError(f"{name} is {getattr(self, name)}, expected a positive number")

    @property
    def q_width(self) -> int:
        """H * K: width of all query heads of a token."""
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        """G * K: width of all keys, or of all values, of a token."""
        return self.kv_heads * self.head_dim


@dataclass(frozen=True, eq=False)
class Ternary:
    """A matrix of -1, 0, +1 times one scale, in I2_S's bytes (see packing.py)."""

    codes: NDArray[np.uint8]  # [N * row_bytes + 32], read-only
    scale: np.float32
    shape: tuple[int, int]  # (N, M)


@dataclass(frozen=True, eq=False)
class Blocks:
    """A matrix in one of ggml's block types, as it lies in the file."""

    data: NDArray[np.uint8]  # [N, bytes of a row], read-only
    type: TensorType
    shape: tuple[int, int]  # (N, M)


@dataclass(frozen=True, eq=False)
class Layer:
    """One transformer block."""

    attn_norm: NDArray[np.float32]  # [D]
    attn_q: Ternary  # [H*K, D]
    attn_k: Ternary  # [G*K, D]
    attn_v: Ternary  # [G*K, D]
    attn_sub_norm: NDArray[np.float32]  # [H*K]
    attn_output: Ternary  # [D, H*K]
    ffn_norm: NDArray[np.float32]  # [D]
    ffn_gate: Ternary  # [F, D]
    ffn_up: Ternary  # [F, D]
    ffn_sub_norm: NDArray[np.float32]  # [F]
    ffn_down: Ternary  # [D, F]


@dataclass(frozen=True, eq=False)
class Model:
    """Everything a forward pass reads. Float tables are float32, float16, or bfloat16 as its uint16 bits."""

    config: Config
    token_embd: NDArray  # [V, D]
    layers: tuple[Layer, ...]
    output_norm: NDArray[np.float32]  # [D]
    rope_frequency: NDArray[np.float64]  # [K/2] radians per position
    output: NDArray | None = None  # [V, D]; None: the head is token_embd
