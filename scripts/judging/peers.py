"""Engines that people run: transformers, mlx-lm, tinygrad and llama.cpp, where they are installed, in the types that they have.

Each loads a model from a folder in transformers' format or from a GGUF file, and records its tensors.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from bitnet_np import load
from bitnet_np.traces.hooks import record_mlx, record_transformers
from bitnet_np.traces.points import Key, Trace

from .llama_cpp import LlamaCpp, points

Run = Callable[[Path, NDArray[np.int64]], Trace]

_TINYGRAD = ("llama", "qwen2", "qwen3", "qwen3moe")


@dataclass(frozen=True)
class Peer:
    """An engine in one of its types."""

    name: str
    reads: Literal["folder", "gguf"]
    run: Run  # the model's path, tokens [T] -> what the engine computes
    families: tuple[str, ...] = ()  # that it has, where it runs others as if they were these; empty if it refuses others


def installed() -> list[Peer]:
    """The engines that are installed, in each of their types."""
    peers: list[Peer] = []
    if find_spec("torch") and find_spec("transformers"):
        peers += [
            Peer(f"transformers {dtype} {attention}", "folder", partial(_transformers, dtype, attention))
            for dtype in ("float32", "float16", "bfloat16")
            for attention in ("eager", "sdpa")
        ]
        peers.append(Peer("transformers autocast", "folder", partial(_transformers, "float32", "eager", autocast=True)))
        peers.append(Peer("transformers dynamic int8", "folder", partial(_transformers, "float32", "eager", int8=True)))
    if find_spec("mlx_lm"):
        peers += [Peer(f"mlx-lm {dtype}", "folder", partial(_mlx, dtype)) for dtype in ("float32", "float16", "bfloat16")]
    if _has_tinygrad():
        peers.append(Peer("tinygrad", "gguf", partial(_tinygrad, False), _TINYGRAD))
        peers.append(Peer("tinygrad float16 weights", "gguf", partial(_tinygrad, True), _TINYGRAD))
    if find_spec("llama_cpp"):
        peers += [
            Peer("llama.cpp", "gguf", partial(_llama_cpp, "float32", False)),
            Peer("llama.cpp float16 cache", "gguf", partial(_llama_cpp, "float16", False)),
            Peer("llama.cpp float16 cache and flash", "gguf", partial(_llama_cpp, "float16", True)),
            Peer("llama.cpp q8_0 cache and flash", "gguf", partial(_llama_cpp, "q8_0", True)),
        ]
    return peers


def _transformers(dtype: str, attention: str, folder: Path, tokens: NDArray[np.int64], autocast: bool = False, int8: bool = False) -> Trace:
    """autocast: products in bfloat16. int8: products of int8 codes, whose scales are of each call's inputs."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation=attention).eval()
    if int8:
        model = torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=autocast), record_transformers(model) as trace:
        model(torch.tensor(tokens[None]))
    return _loaded(trace)


def _mlx(dtype: str, folder: Path, tokens: NDArray[np.int64]) -> Trace:
    import mlx.core as mx
    from mlx.utils import tree_map
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    model.update(tree_map(lambda x: x.astype(getattr(mx, dtype)), model.parameters()))
    with record_mlx(model) as trace:
        mx.eval(model(mx.array(tokens[None])))
    return _loaded(trace)


def _has_tinygrad() -> bool:
    """Whether tinygrad and its language models are here; the wheel of 0.14.0 lacks a folder of theirs."""
    os.environ.setdefault("DEV", "CPU")  # read when tinygrad is imported
    try:
        import tinygrad.llm.model  # noqa: F401
    except ImportError:
        return False
    return True


def _tinygrad(in_float16: bool, path: Path, tokens: NDArray[np.int64]) -> Trace:
    """tinygrad's Transformer. in_float16: whether it rounds all weights to float16, as it does by default; activations are float32."""
    from tinygrad import Tensor
    from tinygrad.llm import model as llm

    settings = {"HALF": int(in_float16)}
    llm.getenv = lambda name, default=0: settings.get(name, default)
    llm.function = lambda **options: lambda f: f  # blocks run step by step, not as compiled graphs
    model, _ = llm.Transformer.from_gguf(path)
    modules = {"token_embd": model.token_embd, "output_norm": model.output_norm, "output": model.output}
    for n, block in enumerate(model.blk):
        modules[f"blk.{n}"] = block
        modules |= {f"blk.{n}.{name}": part for name, part in vars(block).items() if callable(part)}
    named = SimpleNamespace(named_modules=modules.items)
    with record_mlx(named) as trace:  # Python calls its modules, too
        x = model.token_embd(Tensor(tokens[None].tolist())).float()
        for block in model.blk:
            x = block(x, 0)
        model.output(model.output_norm(x))
    return _loaded(trace)


def _llama_cpp(cache: str, flash: bool, path: Path, tokens: NDArray[np.int64]) -> Trace:
    logits, nodes = LlamaCpp().run(path, tokens, cache, flash)
    tensors = points(load(path).config, nodes, len(tokens))
    return Trace({**tensors, Key("result_output", None): logits}, None, "llama.cpp")


def _loaded(trace: Trace) -> Trace:
    """The trace with its arrays in memory."""
    return Trace({key: np.array(trace.points[key]) for key in trace.points}, None, trace.origin)
