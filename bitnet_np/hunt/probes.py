"""From logits alone to a place: models in which all but one operation is known or off, so that logits show what it gave.

Two channels of the residual stream are known in every layer: rows of zeros in the matrices that write to it leave them what the embedding
has. So the last norm's mean and factor are known, and the head, with more rows than columns, gives the stream back by least squares.
Branches are off by matrices of zeros; an identity in attn_output or ffn_down shows what comes before it; queries and keys of zeros
leave the mask and the values; equal experts leave no choice. The first probe that is wrong has an operation in it that those before did not
have. What was right so far stands in a dump as ours, the shown tensor as theirs, and the judge of tensors does the rest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ..base.errors import Error
from ..engine.forward_pass import forward_full
from ..judge.report.report import Report
from ..judge.verdict import Verdict
from ..model import packing, widen
from ..model.records import Blocks, Layer, Linear, Model, Ternary, frozen
from ..testing.space import type_name
from ..traces.points import SCORES
from .engine import Call
from .outcome import Judge, Outcome

Floats = NDArray[np.float64]
Run = Callable[[Model, Call], Outcome]
"""What the engine gives for a model."""

_KNOWN = 2  # channels of the stream that nothing writes to
_GAIN = 8.0  # of an identity: what it shows is large beside the embedding
_WRITTEN = ("float32", "float16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")
"""Types that a matrix can be written in that shows its input."""


@dataclass(frozen=True)
class Place:
    """Where the probes found the fault."""

    text: str  # the operations, in words
    report: Report | None = None  # the judge's, on the tensor that the first wrong probe shows
    wrong: bool = False  # whether one was wrong

    @property
    def cause(self) -> str | None:
        """What the judge says of that tensor, if it knows more than that it is wrong."""
        first = None if self.report is None else self.report.first_wrong
        return None if first is None or first.hypothesis is None else f"layer {first.key.layer}, {first.hypothesis.removeprefix('at ')}"


@dataclass(frozen=True)
class Probe:
    """A model, and the tensor of one layer that its logits show."""

    what: str  # the operations that it has and earlier ones had not, in words
    model: Model
    key: str = ""  # the tensor
    unknown: tuple[str, ...] = ()  # tensors before it that no probe has shown to be right
    gain: float = 1.0  # of the tensor in the stream
    start: int = 0  # the channel where it begins


def _cut(linear: Linear, rows: slice = slice(None)) -> Linear:
    """A linear of the same type with zeros in some rows, and in their biases."""
    w = linear.weights
    if isinstance(w, Ternary) and w.blocks is None:
        codes = packing.unpack(w)
        codes[rows] = 0
        weights: Any = packing.pack(codes, float(w.scale))
    else:
        blocks = w.blocks if isinstance(w, Ternary) else w
        data = np.array(blocks.data if isinstance(blocks, Blocks) else blocks)
        data[rows] = 0  # of blocks, too: their scales are 0
        weights = replace(blocks, data=data) if isinstance(blocks, Blocks) else data
    bias = None if linear.bias is None else linear.bias.copy()
    if bias is not None:
        bias[rows] = 0
    return frozen(replace(linear, weights=weights, bias=bias))


def _identity(linear: Linear) -> Linear:
    """A linear of the same type that shows its input, in the channels behind the known ones."""
    (n, m), kind = linear.shape, type_name(linear.weights)
    matrix = _GAIN * np.eye(n, m, -_KNOWN, np.float32)
    weights: Any = matrix
    if isinstance(linear.weights, Blocks):
        weights = replace(linear.weights, data=gguf.quants.quantize(matrix, gguf.GGMLQuantizationType[kind]))
    return frozen(replace(_cut(linear), weights=weights if isinstance(weights, Blocks) else matrix.astype(kind)))


def _shows(linear: Linear) -> bool:
    """Whether an identity in place of it shows all its input."""
    n, m = linear.shape
    return type_name(linear.weights) in _WRITTEN and m <= n - _KNOWN and linear.norm is None and linear.scale is None


def _downs(w: Layer, change: Callable[[Linear], Linear]) -> Layer:
    """A layer with other matrices at the end of its feed-forwards."""
    experts = tuple(replace(one, ffn_down=change(one.ffn_down)) for one in w.experts)
    return replace(w, experts=experts, ffn_down=None if w.ffn_down is None else change(w.ffn_down))


def probes(model: Model) -> Iterator[Probe]:
    """Models of the same shape, from the fewest operations to all. Other layers than the probed one are off."""
    table = widen.float32(model.token_embd).copy()
    table[:, 0], table[:, 1] = 2, -1 - np.abs(table[:, 1])
    positions = None if model.position_embd is None else widen.float32(model.position_embd) * (np.arange(table.shape[1]) >= _KNOWN)
    half = getattr(model.token_embd, "dtype", None) == np.float16
    base = frozen(replace(model, token_embd=table.astype(np.float16 if half else np.float32), position_embd=positions))
    known = lambda linear: _cut(linear, slice(_KNOWN))  # noqa: E731
    layers = [_downs(replace(w, attn_output=known(w.attn_output)), known) for w in model.layers]
    off = [_downs(replace(w, attn_output=_cut(w.attn_output)), _cut) for w in layers]

    def only(n: int, **change: Any) -> Model:
        return replace(base, layers=(*off[:n], replace(off[n], **change), *off[n + 1 :]))

    ends = "the embedding, the residual stream, the last norm or the head"
    yield Probe(ends, replace(only(0), token_embd=model.token_embd, position_embd=model.position_embd))  # in the table's own type
    yield Probe(ends, only(0))
    for n, w in enumerate(layers):
        yield from _of_attention(partial(only, n), w, n)
        yield from _of_feed_forward(partial(only, n), w, n)
        both = only(n, attn_output=w.attn_output, ffn_down=w.ffn_down, experts=w.experts)
        yield Probe(f"both branches together of layer {n}", both)
    yield Probe("several layers together", replace(base, layers=tuple(layers)))


def _of_attention(only: Callable[..., Model], w: Layer, n: int) -> Iterator[Probe]:
    """The values, then the scores; and the output matrix by itself, where an identity in its place shows what comes before."""
    apart = _shows(w.attn_output) and w.attn_sub_norm is None and w.post_attention_norm is None
    shown, gain, start = (_identity(w.attn_output), _GAIN, _KNOWN) if apart else (w.attn_output, 1.0, 0)
    last = f"{'attn_o_out' if w.post_attention_norm is None else 'attn_post_norm'}-{n}"
    key, flat = f"kqv_out-{n}" if apart else last, {"attn_q": _cut(w.attn_q), "attn_k": _cut(w.attn_k)}
    later = ("kqv_out", "attn_sub_norm", "attn_o_out")
    norms = "attn_norm" if w.post_attention_norm is None else "norms"
    values = f"{norms}, attn_v, the mask{' or the sum of values' if apart else ', the sum of values or attn_output'} of layer {n}"
    yield Probe(values, only(attn_output=shown, **flat), key, ("attn_norm", "Vcur", *later), gain, start)
    scores = f"queries, keys, rotation, scores or softmax of layer {n}"
    yield Probe(scores, only(attn_output=shown), key, ("Qcur", "Kcur", *later), gain, start)
    if apart:
        yield Probe(f"attn_output of layer {n}", only(attn_output=w.attn_output), last)


def _of_feed_forward(only: Callable[..., Model], w: Layer, n: int) -> Iterator[Probe]:
    """Experts that are equal, then as they are; what every token takes; and its output matrix by itself, as attention's."""
    hidden = ("ffn_norm", "ffn_moe", "ffn_gate", "ffn_up", "ffn_out", "ffn_sub_norm", "ffn_down")
    if w.experts:
        alike = only(experts=w.experts[:1] * len(w.experts))
        yield Probe(f"ffn_norm, the matrices of experts or their activation of layer {n}", alike, f"ffn_moe_out-{n}", hidden)
        choice = f"the router, the shares of experts or whose matrices are taken of layer {n}"
        yield Probe(choice, only(experts=w.experts), f"ffn_moe_out-{n}", hidden)
    if w.ffn_down is None:
        return
    apart = _shows(w.ffn_down) and not w.experts and w.ffn_sub_norm is None and w.post_ffw_norm is None
    if apart:
        shown = only(ffn_down=_identity(w.ffn_down))
        yield Probe(f"ffn_norm, gate, up or the activation of layer {n}", shown, f"ffn_out-{n}", hidden, _GAIN, _KNOWN)
    last = "ffn_post_norm" if w.post_ffw_norm is not None else "ffn_shexp_out" if w.ffn_gate_inp_shexp is not None else "ffn_down"
    norms = "ffn_norm" if w.post_ffw_norm is None else "norms"
    what = "ffn_down" if apart else "the shared expert" if w.experts else f"{norms} or the feed-forward"
    yield Probe(f"{what} of layer {n}", only(ffn_down=w.ffn_down), f"{last}-{n}", () if apart else hidden)


def stream(model: Model, logits: NDArray, known: NDArray) -> Floats:
    """The residual stream [T, D] behind the last layer, out of logits [T, V], for a last norm and a head that are right.

    known: its first channels, [T, 2].
    """
    c, x = model.config, np.asarray(logits, np.float64)
    if c.logit_cap is not None:
        x = c.logit_cap * np.arctanh(np.clip(x / c.logit_cap, -1 + 1e-7, 1 - 1e-7))
    x = x * c.logit_scale - (0.0 if model.output_bias is None else model.output_bias)
    normed = np.linalg.lstsq(widen.float32(model.head).astype(np.float64), x.T, rcond=None)[0].T
    normed = (normed - (0.0 if model.output_norm_bias is None else model.output_norm_bias)) / model.output_norm
    middle = lambda x: x.mean(axis=1, keepdims=True) * (c.norm == "layer")  # noqa: E731
    seen = normed[:, :_KNOWN]
    a, b = seen - middle(seen), known - middle(known)
    factor = (a * b).sum(axis=1, keepdims=True) / (a * a).sum(axis=1, keepdims=True)
    return factor * normed + middle(known - factor * seen)


def probe(model: Model, call: Call, row: int, run: Run, judge: Judge) -> Place:
    """Probe an engine with models like this one, in this call, for what is wrong in the sequence `row`."""
    if (c := model.config).vocab < c.width:
        return Place(f"not probed: a head of {c.vocab} rows does not show {c.width} channels")
    for one in probes(model):
        outcome = run(one.model, call)
        if outcome.kind in ("crash", "refused", "hang", "size"):
            return Place(f"not probed: {outcome.kind} in a probe: {outcome.text}")
        if outcome.failed:
            return Place(one.what, _refined(one, call, row, outcome, judge), wrong=True)
    return Place("no probe is wrong: it shows in the whole model only")


def _refined(one: Probe, call: Call, row: int, outcome: Outcome, judge: Judge) -> Report | None:
    """The judge's report on the tensor that a probe shows, behind ours of all before it."""
    if not one.key or len(outcome.rows) <= row or outcome.kind == "invalid":
        return None
    (first, logits), ids, ours = outcome.rows[row], call.tokens[row], dict[str, NDArray]()

    def keep(name: str, n: int | None, x: NDArray) -> None:
        ours[name if n is None else f"{name}-{n}"] = np.array(x)

    forward_full(one.model, [ids], record=keep)
    layer, width = one.key.rpartition("-")[2], ours[one.key].shape[1]
    before = [name for name in list(ours)[: list(ours).index(one.key)] if not name.endswith(("_codes", "_scale"))]
    embedding = [ours[name] for name in before if "-" not in name][-1][first:].astype(np.float64)
    hidden = [name for name in before if name.rpartition("-")[2] == layer and name.startswith(one.unknown or ("?",))]
    shown = (stream(one.model, logits, embedding[:, :_KNOWN]) - embedding) / (one.gain * one.model.config.residual_scale)
    dump = {name: ours[name][first:] for name in before if name not in hidden and name.rpartition("-")[0] not in SCORES}
    dump[one.key] = shown[:, one.start : one.start + width].astype(np.float32)
    try:
        report = judge.report(one.model, replace(call, tokens=(ids,), prefix=first), dump, search=True)
    except Error:
        return None
    return report if report.verdict == Verdict.WRONG else None
