"""Random models: ours, and files of the same shape that peers can load. Made once and kept in a folder."""

import hashlib
import math
import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import released as released_form
from benchmarks.released import ARCHITECTURES, released, write_released
from bitnet_np import Config, Linear, Model
from bitnet_np.base.errors import OptionError
from bitnet_np.base.tensor_types import TQ2_0
from bitnet_np.files.convert import convert
from bitnet_np.files.load import load, open_model
from bitnet_np.model.records import Layer, Ternary

SHAPES = [name for name in released_form.SHAPES if name != "custom"]


def folder() -> Path:
    """The default folder for models, in the user's cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "bitnet_np" / "bench"


def cached(where: Path, kind: str, config: Config, seed: int, write: Callable[[Path], None]) -> Path:
    """The file, written unless it is there. Its name holds a digest of config, seed and makers: a changed maker makes a new file."""
    makers = b"".join(Path(str(module)).read_bytes() for module in (released_form.__file__, __file__))
    name = hashlib.sha256(f"{config} {seed} ".encode() + makers).hexdigest()[:12]
    path = where / f"{kind}-{name}.gguf"
    if not path.exists():
        where.mkdir(parents=True, exist_ok=True)
        write(path)
    return path


def ours(where: Path, name: str, seed: int) -> Path:
    """The file of a random model as make_model.py writes them."""
    config = released(**released_form.SHAPES[name])
    return cached(where, name, config, seed, lambda path: write_released(path, config, seed))


def for_llama_cpp(where: Path, config: Config, seed: int) -> Path:
    """A file of the same shape that llama.cpp loads: architecture `bitnet`, TQ2_0 matrices, a float16 embedding that is the head."""
    for name in ("width", "ffn", "q_width"):
        if getattr(config, name) % TQ2_0.block:
            raise OptionError(f"--vs llama-cpp: {name} is {getattr(config, name)}, but rows of TQ2_0 are multiples of {TQ2_0.block}")
    config = replace(config, architecture=ARCHITECTURES["silu"], activation="silu")
    source = cached(where, "llama-cpp-i2_s", config, seed, lambda path: write_released(path, config, seed))

    def write(path: Path) -> None:
        convert(load(source), path, open_model(source), matrix=TQ2_0, rounding=True)

    return cached(where, "llama-cpp-tq2_0", config, seed, write)


# --- sizes of models ------------------------------------------------------------------------------------------------------------------


def linears_of(layer: Layer) -> list[Linear]:
    """The matrices of a layer."""
    return [value for value in vars(layer).values() if isinstance(value, Linear)]


def linears(model: Model) -> Iterator[Linear]:
    """Yields the matrices of all layers."""
    for layer in model.layers:
        yield from linears_of(layer)


def ternary_weights(model: Model) -> int:
    """Number of weights of all ternary matrices."""
    return sum(math.prod(linear.shape) for linear in linears(model) if isinstance(linear.weights, Ternary))


def multiplied_weights(model: Model) -> int:
    """Multiply-adds of one token: by ternary matrices alone, if there are any, else by those of all layers (without experts)."""
    return ternary_weights(model) or sum(math.prod(linear.shape) for linear in linears(model))


def weight_bytes(model: Model) -> int:
    """Bytes that decoding one token must read: the matrices of all layers, and the head."""
    return model.head.nbytes + sum(linear.weights.nbytes for linear in linears(model))
