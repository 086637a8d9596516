"""The definition with one piece of its text replaced: an engine with one fault in every layer."""

from functools import cache
from pathlib import Path
from types import ModuleType

import numpy as np

from bitnet_np import load, spec
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files import embedded
from bitnet_np.model.dense import dense_view

SOURCE = Path(spec.__file__).read_text("utf-8")


@cache
def model():
    with embedded.model_path() as path:
        return load(path)


@cache
def dense():
    return dense_view(model())


@cache
def tokens(n):
    return embedded.recording()[f"tokens_T{n}"]


@cache
def ours(n):
    return forward_full(model(), tokens(n)[None])[0]


def definition(ids, old="", new=""):
    """Logits by spec.py, with one piece of its text replaced."""
    assert not old or SOURCE.count(old) == 1
    module = ModuleType("faulty")
    exec(compile(SOURCE.replace(old, new) if old else SOURCE, "spec.py", "exec"), module.__dict__)
    with np.errstate(all="ignore"):
        return module.forward(dense(), ids).astype(np.float32)


ROOT = "np.sqrt(mean_square + eps)"
Q = "linear(c, x, w.attn_q)"

# The replaced text and its replacement. Each moves about as many codes as float16 does: the verdict is FLIPS where there is no model.
# Scales of attn_v, ffn_gate and ffn_up are left out: a norm follows them, so they change only the share of its epsilon.
SMALL_FAULTS = {
    "activations of 7 bits": ("127 / np.max", "63 / np.max"),
    "absmax to 126": ("127 / np.max", "126 / np.max"),
    "truncated, not rounded": ("np.rint(x * scale)", "np.trunc(x * scale)"),
    "not quantised": ("np.rint(x * scale)", "(x * scale)"),
    "one scale for all tokens": ("magnitude.max(axis=-1, keepdims=True)", "magnitude.max()"),
    "ffn_down's scale 5 % too large": ("linear(c, y, w.ffn_down)", "linear(c, y, w.ffn_down) * 1.05"),
    "attn_q with the scale of attn_k": (Q, f"{Q} / w.attn_q.scale * w.attn_k.scale"),
    "epsilon outside the root": (ROOT, "(np.sqrt(mean_square) + eps)"),
}
