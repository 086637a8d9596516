"""bitnet_np: a reference implementation of BitNet b1.58 and Llama-family inference. A model file and token ids in, logits to trust out."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import contract as contract
    from .base import errors as errors
    from .base.errors import Error as Error
    from .engine import masks as masks
    from .engine.cache import KVCache as KVCache
    from .engine.dialects import BITNET_CPP as BITNET_CPP
    from .engine.dialects import EXACT as EXACT
    from .engine.dialects import LLAMA_CPP as LLAMA_CPP
    from .engine.dialects import Dialect as Dialect
    from .engine.forward_pass import compute_logits as compute_logits
    from .engine.forward_pass import feed_forward as feed_forward
    from .engine.forward_pass import forward as forward
    from .engine.forward_pass import forward_full as forward_full
    from .engine.forward_pass import forward_incremental as forward_incremental
    from .engine.forward_pass import forward_layer as forward_layer
    from .engine.forward_pass import prefill as prefill
    from .engine.metrics import Metrics as Metrics
    from .engine.tokens import pad as pad
    from .files.gguf_file import open_gguf as open_gguf
    from .files.load import load as load
    from .generation.batch import Batch as Batch
    from .generation.batch import Completion as Completion
    from .generation.batch import Request as Request
    from .generation.batch import forward_batch as forward_batch
    from .generation.batch import generate_batch as generate_batch
    from .generation.generate import generate as generate
    from .generation.generate import stream as stream
    from .generation.sampling import Sampling as Sampling
    from .hunt.api import hunt as hunt
    from .judge.check import check as check
    from .judge.compare_models import compare_models as compare_models
    from .judge.dump import compare_traces as compare_traces
    from .judge.law.precision import Precision as Precision
    from .judge.measures import Judgement as Judgement
    from .judge.measures import judge as judge
    from .judge.report.report import OperationVerdict as OperationVerdict
    from .judge.report.report import Report as Report
    from .judge.verdict import Verdict as Verdict
    from .model.records import Blocks as Blocks
    from .model.records import Config as Config
    from .model.records import Expert as Expert
    from .model.records import Layer as Layer
    from .model.records import Linear as Linear
    from .model.records import Model as Model
    from .model.records import Ternary as Ternary
    from .traces.formats import read_any as read_any
    from .traces.hooks import record_mlx as record_mlx
    from .traces.hooks import record_transformers as record_transformers
    from .traces.points import Trace as Trace
    from .traces.record import record_trace as record_trace
    from .training.gradients import loss_and_gradients as loss_and_gradients

__version__ = "0.1.0"

_NAMES = {
    "contract": "contract",
    "base.errors": "errors Error",
    "engine.masks": "masks",
    "engine.cache": "KVCache",
    "engine.dialects": "BITNET_CPP EXACT LLAMA_CPP Dialect",
    "engine.forward_pass": "compute_logits feed_forward forward forward_full forward_incremental forward_layer prefill",
    "engine.metrics": "Metrics",
    "engine.tokens": "pad",
    "files.gguf_file": "open_gguf",
    "files.load": "load",
    "generation.batch": "Batch Completion Request forward_batch generate_batch",
    "generation.generate": "generate stream",
    "generation.sampling": "Sampling",
    "hunt.api": "hunt",
    "judge.check": "check",
    "judge.compare_models": "compare_models",
    "judge.dump": "compare_traces",
    "judge.law.precision": "Precision",
    "judge.measures": "Judgement judge",
    "judge.report.report": "OperationVerdict Report",
    "judge.verdict": "Verdict",
    "model.records": "Blocks Config Expert Layer Linear Model Ternary",
    "traces.formats": "read_any",
    "traces.hooks": "record_mlx record_transformers",
    "traces.points": "Trace",
    "traces.record": "record_trace",
    "training.gradients": "loss_and_gradients",
}
"""The public names of each module. A name is imported when it is first asked for: kernels and the judge take a second to import."""
_MODULES = {name: module for module, names in _NAMES.items() for name in names.split()}
__all__ = sorted(_MODULES)


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .kernels.float_state import default_state

    with default_state():  # constants are rounded when their modules are imported
        module = import_module(f".{_MODULES[name]}", __name__)
    globals()[name] = value = getattr(module, name, module)
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]


class _Package(ModuleType):
    """This package: `hunt` and `judge` in it are functions, also once the packages of these names are imported."""

    def __setattr__(self, name: str, value: object) -> None:
        if name not in ("hunt", "judge") or not isinstance(value, ModuleType):  # the import system sets a package as such an attribute
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
