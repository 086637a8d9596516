"""bitnet_np: a reference implementation of BitNet b1.58 and Llama-family inference. A model file and token ids in, logits to trust out."""

import sys

from .kernels.float_state import default_state

with default_state():  # constants are rounded when their modules are imported
    from . import contract
    from .base.errors import Error, UnsupportedError
    from .engine import masks
    from .engine.cache import KVCache
    from .engine.dialects import BITNET_CPP, EXACT, LLAMA_CPP, Dialect
    from .engine.forward_pass import compute_logits, feed_forward, forward, forward_full, forward_incremental, forward_layer, prefill
    from .engine.metrics import Metrics
    from .engine.tokens import pad
    from .files.gguf_file import open_gguf
    from .files.load import load
    from .generation.batch import Batch, Completion, Request, forward_batch, generate_batch
    from .generation.generate import generate, stream
    from .generation.sampling import Sampling
    from .hunt.api import hunt
    from .judge.check import check
    from .judge.law.precision import Precision
    from .judge.measures import Judgement, judge
    from .judge.report.report import Report
    from .judge.verdict import Verdict
    from .model.records import Blocks, Config, Expert, Layer, Linear, Model, Ternary

if not getattr(sys, "_is_gil_enabled", lambda: True)():  # asked last: an extension that needs the GIL has turned it on
    raise UnsupportedError("this Python runs without the GIL, with which alone bitnet_np is tested: start it with PYTHON_GIL=1")

__version__ = "0.1.0"

__all__ = [
    "BITNET_CPP",
    "EXACT",
    "LLAMA_CPP",
    "Batch",
    "Blocks",
    "Completion",
    "Config",
    "Dialect",
    "Error",
    "Expert",
    "Judgement",
    "KVCache",
    "Layer",
    "Linear",
    "Metrics",
    "Model",
    "Precision",
    "Report",
    "Request",
    "Sampling",
    "Ternary",
    "Verdict",
    "check",
    "compute_logits",
    "contract",
    "feed_forward",
    "forward",
    "forward_batch",
    "forward_full",
    "forward_incremental",
    "forward_layer",
    "generate",
    "generate_batch",
    "hunt",
    "judge",
    "load",
    "masks",
    "open_gguf",
    "pad",
    "prefill",
    "stream",
]
