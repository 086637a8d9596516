"""From logits alone to a place: models in which all but one operation is known or off, so that logits show what it gave.

One channel of the residual stream has a known number in every layer: rows of zeros in attn_output and ffn_down leave it what the embedding
has. So the last norm's factor is known, and the head, with more rows than columns, gives the stream back by least squares.
Branches are off by matrices of zeros; an identity in attn_output or ffn_down shows what comes before it; queries and keys of zeros
leave the mask and the values. The first probe that is wrong has an operation in it that those before did not have. What was right so far
stands in a dump as ours, the shown tensor as theirs, and the judge of tensors does the rest.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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

KNOWN = 2.0
"""The number of the first channel of every embedding."""

_GAIN = 8.0  # of an identity: what it shows is large beside the embedding
_WRITTEN = ("float32", "float16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


@dataclass(frozen=True)
class Place:
    """Where the probes found the fault."""

    text: str  # the operations, in words
    report: Report | None = None  # the judge's, on the tensor that the first wrong probe shows
    probes: int = 0  # that were right

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


def why_not(model: Model) -> str:
    """Why a model's family cannot be probed; empty where it can."""
    c, w = model.config, model.layers[0]
    if c.norm != "rms":
        return f"{c.architecture} takes the mean away in its norms"
    if c.experts or w.attn_norm is None or w.post_attention_norm is not None or c.parallel_residual:
        return f"{c.architecture} has another order of operations"
    if model.output is None:
        return "the head is the embedding"
    if type_name(w.attn_output.weights) not in (*_WRITTEN, "ternary"):
        return f"matrices in {type_name(w.attn_output.weights)} cannot be written"
    return "" if c.vocab >= c.width else f"a head of {c.vocab} rows does not show {c.width} channels"


def _with(linear: Linear, matrix: NDArray, bias: NDArray | None = None) -> Linear:
    """A linear of the same type with another matrix: of zeros, of one number, or of the old numbers and zeros."""
    kind = type_name(linear.weights)
    single = np.ascontiguousarray(matrix, np.float32)
    weights: Any
    if kind == "ternary":
        scale = np.float32(np.abs(single).max() or 1.0)
        weights = packing.pack(np.rint(single / scale).astype(np.int8), float(scale))
    elif kind in ("float32", "float16"):
        weights = single.astype(kind)
    else:
        type_ = linear.weights.type  # type: ignore[union-attr]
        weights = frozen(Blocks(gguf.quants.quantize(single, gguf.GGMLQuantizationType[kind]), type_, linear.shape))
    return frozen(replace(linear, weights=weights, bias=None if bias is None else bias.astype(np.float32)))


def _dense(linear: Linear) -> NDArray[np.float32]:
    w = linear.weights
    return packing.unpack(w).astype(np.float32) * w.scale if isinstance(w, Ternary) else widen.float32(w)


def _off(linear: Linear) -> Linear:
    return _with(linear, np.zeros(linear.shape), None if linear.bias is None else np.zeros(linear.shape[0]))


def _without_first_row(linear: Linear) -> Linear:
    matrix, bias = _dense(linear).copy(), None if linear.bias is None else linear.bias.copy()
    matrix[0] = 0
    if bias is not None:
        bias[0] = 0
    return _with(linear, matrix, bias)


def _identity(linear: Linear, gain: float) -> Linear:
    """Channels of the input behind the first one of the stream, as many as there are."""
    n, m = linear.shape
    matrix = np.zeros((n, m))
    some = np.arange(min(n - 1, m))
    matrix[1 + some, some] = gain
    return _with(linear, matrix, None if linear.bias is None else np.zeros(n))


def probes(model: Model) -> Iterator[Probe]:
    """Models of the same shape, from the fewest operations to all. Other layers than the probed one are off."""
    table = widen.float32(model.token_embd).copy()
    table[:, 0] = KNOWN
    layers = [replace(w, attn_output=_without_first_row(w.attn_output), ffn_down=_without_first_row(_down(w))) for w in model.layers]
    kind = np.float16 if getattr(model.token_embd, "dtype", None) == np.float16 else np.float32
    base = replace(model, token_embd=_read_only(table.astype(kind)))

    def only(n: int, **change: Linear) -> Model:
        off = [replace(w, attn_output=_off(w.attn_output), ffn_down=_off(_down(w))) for w in layers]
        off[n] = replace(off[n], **change)  # type: ignore[arg-type]
        return replace(base, layers=tuple(off))

    yield Probe("the embedding, the last norm or the head", only(0))
    ternary = type_name(model.layers[0].attn_output.weights) == "ternary"
    for n, w in enumerate(layers):
        whole = ternary or w.attn_sub_norm is not None or model.config.q_width >= model.config.width  # no identity shows it all
        attended = "attn_o_out" if whole else "kqv_out"
        shown = w.attn_output if whole else _identity(w.attn_output, _GAIN)
        start, gain = (0, 1.0) if attended == "attn_o_out" else (1, _GAIN)
        flat = {"attn_q": _off(w.attn_q), "attn_k": _off(w.attn_k)}
        before = ("kqv_out", "attn_sub_norm") if attended == "attn_o_out" else ()
        where = f"of layer {n}"
        values = f"attn_norm, attn_v, the mask{', the sum of values or attn_output' if whole else ' or the sum of values'} {where}"
        scores = f"queries, keys, rotation, scores or softmax {where}"
        yield Probe(values, only(n, attn_output=shown, **flat), f"{attended}-{n}", ("Vcur", *before), gain, start)
        yield Probe(scores, only(n, attn_output=shown), f"{attended}-{n}", ("Qcur", "Kcur", *before), gain, start)
        if not whole:
            yield Probe(f"attn_output {where}", only(n, attn_output=w.attn_output), f"attn_o_out-{n}")
        inner = w.ffn_sub_norm is not None or ternary or model.config.ffn >= model.config.width
        if not inner:
            down = _identity(_down(w), _GAIN)
            yield Probe(
                f"ffn_norm, gate, up or the activation {where}", only(n, ffn_down=down), f"ffn_out-{n}", ("ffn_gate", "ffn_up"), _GAIN, 1
            )
        what = f"the feed-forward {where}" if inner else f"ffn_down {where}"
        yield Probe(what, only(n, ffn_down=_down(w)), f"ffn_down-{n}", ("ffn_gate", "ffn_up", "ffn_out", "ffn_sub_norm") if inner else ())
        yield Probe(f"both branches together {where}", only(n, attn_output=w.attn_output, ffn_down=_down(w)))
    yield Probe("several layers together", replace(base, layers=tuple(layers)))


def _down(w: Layer) -> Linear:
    assert w.ffn_down is not None
    return w.ffn_down


def _read_only(x: NDArray) -> NDArray:
    x.flags.writeable = False
    return x


def stream(model: Model, logits: NDArray) -> Floats:
    """The residual stream [T, D] behind the last layer, out of logits [T, V], for a last norm and a head that are right."""
    c, x = model.config, np.asarray(logits, np.float64)
    if c.logit_cap is not None:
        x = c.logit_cap * np.arctanh(np.clip(x / c.logit_cap, -1 + 1e-7, 1 - 1e-7))
    x = x * c.logit_scale - (0.0 if model.output_bias is None else model.output_bias)
    normed = np.linalg.lstsq(widen.float32(model.head).astype(np.float64), x.T, rcond=None)[0].T / model.output_norm
    return normed * (KNOWN * c.embedding_scale / normed[:, :1])


def probe(model: Model, call: Call, row: int, run: Run, judge: Judge) -> Place:
    """Probe an engine with models like this one, in this call, for what is wrong in the sequence `row`."""
    if reason := why_not(model):
        return Place(f"not probed: {reason}")
    for right, one in enumerate(probes(model)):
        outcome = run(one.model, call)
        if outcome.kind in ("crash", "refused", "hang", "size"):
            return Place(f"not probed: {outcome.kind} in a probe: {outcome.text}", probes=right)
        if outcome.failed:
            return Place(one.what, _refined(one, call, row, outcome, judge), right)
    return Place("no probe is wrong: it shows in the whole model only", probes=right + 1)


def _refined(one: Probe, call: Call, row: int, outcome: Outcome, judge: Judge) -> Report | None:
    """The judge's report on the tensor that a probe shows, behind ours of all before it."""
    if not one.key or len(outcome.rows) <= row or outcome.kind == "invalid":
        return None
    first, logits = outcome.rows[row]
    ids = call.tokens[row]
    ours: dict[str, NDArray] = {}

    def keep(name: str, n: int | None, x: NDArray) -> None:
        ours[name if n is None else f"{name}-{n}"] = np.array(x)

    forward_full(one.model, [ids], record=keep)
    names = list(ours)
    layer = one.key.rpartition("-")[2]
    hidden = {f"{name}-{layer}" for name in one.unknown}
    hidden |= {name for name in names if name.rpartition("-")[2] == layer and name.startswith(one.unknown) and one.unknown}
    c = one.model.config
    embedding = widen.float32(one.model.token_embd)[ids[first:]].astype(np.float64) * c.embedding_scale
    shown = (stream(one.model, logits) - embedding) / (one.gain * c.residual_scale)
    width = ours[one.key].shape[1]
    dump = {name: ours[name] for name in names[: names.index(one.key)] if name not in hidden and not name.endswith(("_codes", "_scale"))}
    dump = {name: x[first:] for name, x in dump.items() if name.rpartition("-")[0] not in SCORES}
    if shown.shape[1] - one.start < width:
        return None  # the stream is too narrow to show it all
    dump[one.key] = shown[:, one.start : one.start + width].astype(np.float32)
    try:
        report = judge.report(one.model, replace(call, tokens=(ids,), prefix=first), dump, search=True)
    except Error:
        return None
    return report if report.verdict == Verdict.WRONG else None
