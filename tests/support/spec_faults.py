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


ROOT = "np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps)"
Q = "linear(c, x, w.attn_q)"
GATE = "np.maximum(gate, 0) ** 2 * up"
ATTEND_NORM, FFN_NORM = "rms_norm(x, w.attn_sub_norm, c.eps)", "rms_norm(y, w.ffn_sub_norm, c.eps)"
OUT = "linear(c, x, w.attn_output)"
HEADS = "np.repeat(kv, heads // kv.shape[1], axis=1)"

# The replaced text, its replacement, and NMSE of the worst position for 1, 17 and 64 tokens; 0 where the fault does not show.
FAULTS = {
    "SiLU for squared ReLU": (GATE, "gate / (1 + np.exp(-gate)) * up", (1.2e-1, 1.6e-1, 1.7e-1)),
    "ReLU not squared": (GATE, "np.maximum(gate, 0) * up", (1.6e-1, 1.8e-1, 2.0e-1)),
    "gate and up swapped": ("(*inner)", "(*inner[::-1])", (7.7e-1, 1.2, 1.0)),
    "no attention sub-norm": (ATTEND_NORM, "x", (1.6e-1, 6.4e-1, 1.6)),
    "no FFN sub-norm": (FFN_NORM, "y", (1.8e-1, 5.0e-1, 5.1e-1)),
    "FFN sub-norm without its gain": (FFN_NORM, "rms_norm(y, 1.0, c.eps)", (3.8e-2, 7.2e-2, 1.3e-1)),
    "output norm without its gain": ("norm(c, h, model.output_norm,", "norm(c, h, 1.0,", (6.0e-2, 1.1e-1, 1.3e-1)),
    "means removed in norms": (f"return x / {ROOT}", f"x = x - x.mean(-1, keepdims=True)\n    return x / {ROOT}", (6.4e-2, 9.9e-2, 1.5e-1)),
    "RoPE base 10000": ("base ** (-np", "1e4 ** (-np", (0, 3.1e-1, 9.6e-1)),
    "RoPE of neighbours": ('pairs == "halves"', 'pairs != "halves"', (0, 6.6e-1, 1.2)),
    "RoPE backwards": ("np.multiply.outer(position,", "-np.multiply.outer(position,", (0, 5.4e-1, 9.5e-1)),
    "no RoPE": ("np.multiply.outer(position,", "0 * np.multiply.outer(position,", (0, 6.7e-1, 1.1)),
    "queries one position late": ("rotated(model, n, q)", "rotated(model, n, np.concatenate([q[:1], q]))[1:]", (0, 2.5e-1, 2.0e-1)),
    "keys one position late": ("rotated(model, n, k)", "rotated(model, n, np.concatenate([k[:1], k]))[1:]", (0, 2.3e-1, 1.4e-1)),
    "scores not divided": ("q.shape[2] ** -0.5 if", "1.0 if", (0, 1.2, 1.6)),
    "no causal mask": ("(k <= q) &", "(k <= q + 64) &", (0, 2.0, 2.1)),
    "one key too many": ("(k <= q) &", "(k <= q + 1) &", (0, 4.8e-1, 1.7)),
    "no key of one's own": ("(k <= q) &", "((k < q) | (k == 0)) &", (0, 8.9e-1, 8.0e-1)),
    "query heads take turns": (HEADS, "np.tile(kv, (1, heads // kv.shape[1], 1))", (1.5, 1.5, 2.0)),
    "all query heads read the first": (HEADS, "np.repeat(kv[:, :1], heads, axis=1)", (1.4, 1.6, 2.0)),
    "no scale in attn_q": (Q, f"{Q} / w.attn_q.scale", (0, 1.2, 1.7)),
    "no scale in attn_k": ("linear(c, x, w.attn_k)", "linear(c, x, w.attn_k) / w.attn_k.scale", (0, 1.2, 1.7)),
    "no scale in attn_output": (OUT, f"{OUT} / w.attn_output.scale", (7.3e-1, 8.7e-1, 9.4e-1)),
    "no scale in ffn_down": ("linear(c, y, w.ffn_down)", "linear(c, y, w.ffn_down) / w.ffn_down.scale", (1.1, 1.6, 1.8)),
    "first layer left out": ("range(c.n_layers)", "range(1, c.n_layers)", (1.5, 1.9, 2.5)),
    "last layer left out": ("range(c.n_layers)", "range(c.n_layers - 1)", (2.8e-1, 4.3e-1, 4.2e-1)),
    "no residual around the FFN": ("h = h + feed_forward(", "h = feed_forward(", (1.5, 2.2, 2.5)),
    "activations of 4 bits": ("127 / np.max", "7 / np.max", (1.5e-1, 3.9e-1, 4.5e-1)),
    "127 wraps to -128": ("np.rint(x * scale)", "np.where(np.rint(x * scale) >= 127, -128, np.rint(x * scale))", (4.5e-1, 1.1, 1.1)),
    "another first token": ("embed(model.token_embd, tokens)", "embed(model.token_embd, [0, *tokens[1:]])", (2.1, 2.1, 2.1)),
}  # fmt: skip

# A slightly wrong quantiser moves as many codes as float16 does. The verdict is FLIPS without a model; test_engine.py has one.
# Scales of attn_v, ffn_gate and ffn_up are left out: a norm follows them, so they change only the share of its epsilon.
SMALL_FAULTS = {
    "activations of 7 bits": ("127 / np.max", "63 / np.max", (2.7e-3, 6.4e-3, 9.4e-3)),
    "absmax to 126": ("127 / np.max", "126 / np.max", (1.1e-3, 2.2e-3, 2.9e-3)),
    "truncated, not rounded": ("np.rint(x * scale)", "np.trunc(x * scale)", (2.4e-3, 6.8e-3, 6.8e-3)),
    "not quantised": ("np.rint(x * scale)", "(x * scale)", (7.3e-4, 1.5e-3, 1.5e-3)),
    "one scale for all tokens": ("np.abs(x).max(axis=-1, keepdims=True)", "np.abs(x).max()", (0, 3.4e-3, 5.8e-3)),
    "ffn_down's scale 5 % too large": ("linear(c, y, w.ffn_down)", "linear(c, y, w.ffn_down) * 1.05", (1.1e-3, 2.4e-3, 2.8e-3)),
    "attn_q with the scale of attn_k": (Q, f"{Q} / w.attn_q.scale * w.attn_k.scale", (0, 2.3e-3, 5.0e-3)),
    "epsilon outside the root": (ROOT, "(np.sqrt(np.mean(x * x, axis=-1, keepdims=True)) + eps)", (0, 8.2e-4, 8.2e-4)),
}  # fmt: skip
