"""bitnet_np: a reference implementation of BitNet b1.58 inference. A GGUF file and token ids in, logits one can trust out."""

from . import contract, masks
from .batch import Batch, Completion, Request, forward_batch, generate_batch
from .cache import KVCache
from .certified import CertifiedHead, certify
from .dialects import BITNET_CPP, EXACT, LLAMA_CPP, Dialect
from .errors import Error
from .files.gguf_file import open_gguf
from .files.load import load
from .forward_pass import compute_logits, feed_forward, forward, forward_full, forward_incremental, forward_layer, prefill
from .generate import generate, stream
from .judge.check import check
from .judge.logits import Judgement, judge
from .judge.precision import Precision
from .judge.report import Report
from .judge.verdict import Verdict
from .metrics import Metrics
from .model import Blocks, Config, Expert, Layer, Linear, Model, Ternary
from .sampling import Sampling
from .speculation import DraftModel, Speculation, prompt_lookup
from .tokens import pad

__version__ = "0.1.0"

__all__ = [
    "BITNET_CPP",
    "EXACT",
    "LLAMA_CPP",
    "Batch",
    "Blocks",
    "CertifiedHead",
    "Completion",
    "Config",
    "Dialect",
    "DraftModel",
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
    "Speculation",
    "Ternary",
    "Verdict",
    "certify",
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
    "judge",
    "load",
    "masks",
    "open_gguf",
    "pad",
    "prefill",
    "prompt_lookup",
    "stream",
]
