"""bitnet_np: a reference implementation of BitNet b1.58 and Llama-family inference. A model file and token ids in, logits to trust out."""

import sys

from .kernels.float_state import default_state

with default_state():  # constants are rounded when their modules are imported
    from . import contract
    from .base import errors
    from .base.errors import Error
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
    from .judge.compare_models import compare_models
    from .judge.dump import compare_traces
    from .judge.law.precision import Precision
    from .judge.measures import Judgement, judge
    from .judge.report.report import OperationVerdict, Report
    from .judge.verdict import Verdict
    from .model.records import Blocks, Config, Expert, Layer, Linear, Model, Ternary
    from .traces.formats import read_any
    from .traces.hooks import record_mlx, record_transformers
    from .traces.points import Trace
    from .traces.record import record_trace
    from .training.gradients import loss_and_gradients

if not getattr(sys, "_is_gil_enabled", lambda: True)():  # asked last: an extension that needs the GIL has turned it on
    raise errors.UnsupportedError("this Python runs without the GIL, with which alone bitnet_np is tested: start it with PYTHON_GIL=1")

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
    "OperationVerdict",
    "Precision",
    "Report",
    "Request",
    "Sampling",
    "Ternary",
    "Trace",
    "Verdict",
    "check",
    "compare_models",
    "compare_traces",
    "compute_logits",
    "contract",
    "errors",
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
    "loss_and_gradients",
    "masks",
    "open_gguf",
    "pad",
    "prefill",
    "read_any",
    "record_mlx",
    "record_trace",
    "record_transformers",
    "stream",
]


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
