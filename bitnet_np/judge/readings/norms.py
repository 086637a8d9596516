"""Wrong norms: theirs is input * factor[t] * weight[i], and both tell what was computed.

With x the input, an RMS norm's factor is 1 / sqrt(mean(x^2) + eps). A LayerNorm's input is counted without its mean here.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from ...model.families import NORMS
from ...traces.points import Key
from .. import operations as op
from ..graph import FIELDS, HEAD_NORMS, layer_input, operations
from ..roundings import to_bfloat16, to_float16
from .wrong import FEW, Array, Wrong, runs

AT = (*NORMS, *HEAD_NORMS, *(f"{name}_in" for name in FIELDS), "result_norm")

_LEAST = 4  # positions; two numbers are fitted to their factors
_NARROW = 8  # elements
_CONSTANT = 1e-3  # of a divisor: rows whose divisors differ by less are divided by one number
_APPROXIMATE = 0.05  # the largest relative error of a root that is computed coarsely
_FITTED = 30  # rounds of fitting factors and weights in turn


@dataclass(frozen=True)
class _Norm:
    """A norm's input and output in rows of those elements that are normalised together, [R, W]."""

    wrong: Wrong
    x: Array
    y: Array  # without the bias
    weight: Array  # [W]
    eps: float

    def accounts(self, computed: Array) -> bool:
        """Whether computed rows [R, W] are theirs."""
        return self.wrong.accounts(computed.reshape(self.wrong.theirs.shape) + _bias(self.wrong))

    def factors(self, weight: Array) -> Array:
        """The factor of each row that fits best [R, 1]."""
        x = self.x * weight
        return (self.y * x).sum(axis=1, keepdims=True) / np.maximum((x * x).sum(axis=1, keepdims=True), 1e-300)


def _is_layer_norm(wrong: Wrong) -> bool:
    return wrong.config.norm == "layer" and wrong.key.name in ("attn_norm", "ffn_norm", "result_norm")


def _bias(wrong: Wrong) -> Array:
    bias = None
    if _is_layer_norm(wrong):
        bias = wrong.model.output_norm_bias if wrong.layer is None else getattr(wrong.layer, f"{wrong.key.name}_bias")
    return np.zeros(1) if bias is None else bias.astype(np.float64)


def _centred(x: Array) -> Array:
    return x - x.mean(axis=1, keepdims=True)


def _read(wrong: Wrong) -> _Norm:
    name, layer, eps = wrong.key.name, wrong.layer, wrong.config.eps
    x = _centred(wrong.inputs[0]) if _is_layer_norm(wrong) else wrong.inputs[0]
    y = wrong.theirs - _bias(wrong)
    if layer is None:
        weight = wrong.model.output_norm
    elif name.endswith("_in"):
        linear = getattr(layer, FIELDS[name.removesuffix("_in")])
        weight, eps = linear.norm, linear.norm_eps or eps
    else:
        weight = getattr(layer, HEAD_NORMS.get(name, name))
    width = weight.size
    return _Norm(wrong, x.reshape(-1, width), y.reshape(-1, width), weight.astype(np.float64), eps)


def norm(wrong: Wrong) -> str | None:
    """What a norm was computed of, with which weight, and what its rows were divided by."""
    own = _read(wrong)
    rows, width = own.x.shape
    if rows < _LEAST or width < _NARROW:
        return None
    text = _described(own) or _by_group(own)
    if text is not None:
        return text
    for text, x in _other_inputs(wrong, own):
        other = replace(own, x=x)
        for weight_text, weight in _weights(own):
            if other.accounts(_root(x, own.eps) * x * weight):
                return "; ".join(filter(None, (text, weight_text)))
    return None


def _root(x: Array, eps: float) -> Array:
    return 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + eps)


# --- inputs ---------------------------------------------------------------------------------------------------------------------------


def _other_inputs(wrong: Wrong, own: _Norm) -> Iterator[tuple[str, Array]]:
    """Yields other inputs than the right one, and how each is said."""
    subtracted = "the mean is not subtracted" if _is_layer_norm(wrong) else "the mean is subtracted, as in LayerNorm"
    x = wrong.inputs[0].reshape(own.x.shape)
    yield subtracted, x if _is_layer_norm(wrong) else _centred(x)
    finish = _centred if _is_layer_norm(wrong) else (lambda x: x)
    if wrong.key.name in HEAD_NORMS and wrong.config.rope != "none":
        yield (
            "its input is rotated already: RoPE comes before the norm",
            op.rope(wrong.model, wrong.dialect, x.reshape(wrong.value.shape)).value.reshape(own.x.shape),
        )
    for key, theirs in wrong.beside():
        if key not in wrong.operation.inputs:
            yield f"its input is {key.place} instead of {wrong.operation.inputs[0].place}", finish(theirs.reshape(own.x.shape))
    source = wrong.operation.inputs[0]
    if source.name == "l_out" and source.layer is not None:
        yield f"its input is the output of layer {source.layer} run twice", finish(_run_again(wrong, source.layer))


def _run_again(wrong: Wrong, layer: int) -> Array:
    """The output of a layer that reads its own output."""
    values = {layer_input(wrong.model, layer): wrong.inputs[0]}
    for operation in operations(wrong.model, wrong.dialect):
        if operation.key.layer == layer:
            values[operation.key] = operation.evaluate(*(values[k] for k in operation.inputs)).value
    return values[Key("l_out", layer)]


# --- weights --------------------------------------------------------------------------------------------------------------------------


def _weights(norm: _Norm) -> Iterator[tuple[str, Array]]:
    """Yields weights that it may have, the right one first, and how each is said."""
    wrong, right = norm.wrong, norm.weight
    yield "", right
    yield "the weight is rounded to bfloat16", to_bfloat16(right)
    yield "the weight is rounded to float16", to_float16(right)
    yield "the weight is missing", np.ones_like(right)
    yield "the weight is applied twice", right * right
    yield "1 is added to the weight", 1 + right
    model = wrong.model
    names = (*NORMS, *HEAD_NORMS.values())
    others = [(f"layer {n} {name}", getattr(layer, name)) for n, layer in enumerate(model.layers) for name in names]
    for name, weight in [*others, ("result_norm", model.output_norm)]:
        if weight is not None and weight.shape == right.shape:
            yield f"the weight of {name} is used", weight.astype(np.float64)
    yield "rows are divided by the weight, not multiplied", 1 / np.where(right == 0, 1, right)


def _described(norm: _Norm) -> str | None:
    """The weight and the divisor, if theirs has a factor for each row and one for each column."""
    for text, weight in _weights(norm):
        factors = norm.factors(weight)
        if norm.accounts(factors * norm.x * weight):
            return _divisor(norm, text, weight, factors)
    weight = norm.weight.copy()
    for _ in range(_FITTED):
        x = norm.factors(weight) * norm.x
        weight = (norm.y * x).sum(axis=0) / np.maximum((x * x).sum(axis=0), 1e-300)
    factors = norm.factors(weight)
    if not norm.accounts(factors * norm.x * weight):
        return None
    scale = float(np.median((weight / np.where(norm.weight == 0, 1, norm.weight))[norm.weight != 0])) if norm.weight.any() else 0.0
    if scale == 0:
        return None
    same = np.isclose(weight, scale * norm.weight, rtol=1e-4, atol=0)
    if 2 * same.sum() > same.size:
        off = np.flatnonzero(~same)
        text = f"the weight {'is missing' if np.allclose(weight[off], scale, rtol=1e-4) else 'is wrong'} at {runs('element', off)}"
        return _divisor(norm, text, weight / scale, factors * scale)
    right = _root(norm.x, norm.eps)  # a weight of unknown size tells no divisor
    weight = weight * float(np.median(factors / right))
    source = np.abs(weight[:, None] - norm.weight).argmin(axis=1)
    if norm.accounts(right * norm.x * norm.weight[source]) and np.unique(norm.weight).size > norm.weight.size // 2:
        off = np.flatnonzero(source != np.arange(source.size))
        if np.count_nonzero(np.diff(source) != 1) > 2 * FEW:
            return "the weight's elements are in another order"
        return f"the weight of {runs('element', off)} is that of {runs('element', source[off])}"
    return "the weight is none of this model's norms" if norm.accounts(right * norm.x * weight) else None


# --- divisors -------------------------------------------------------------------------------------------------------------------------


def _divisor(norm: _Norm, weight_text: str, weight: Array, factors: Array) -> str | None:
    """The cause in words, from the factor of each row [R, 1]; weight_text: what is wrong with the weight, if something is."""

    def accounts(computed: Array) -> bool:
        return norm.accounts(computed * norm.x * weight)

    def both(text: str) -> str:
        return "; ".join(filter(None, (weight_text, text)))

    x, right = norm.x, _root(norm.x, norm.eps)
    if accounts(right):
        return weight_text or None
    if accounts(np.ones_like(factors)):
        return (
            "the norm is missing: its input comes out unchanged"
            if (weight == 1).all()
            else both("the norm is missing, only its weight is applied")
        )
    inside = 1 / np.sqrt(np.mean((x * norm.weight) ** 2, axis=1, keepdims=True) + norm.eps)
    if accounts(inside):
        return (
            "the norm is taken twice"
            if weight_text == "the weight is applied twice"
            else both("the weight is applied before the norm: the mean square is that of its products")
        )
    for text, other in (*_lines(norm, factors), *_roots(norm, factors)):
        if accounts(other):
            return both(text)
    ratio = factors / right
    middle = float(np.median(ratio))
    if np.abs(ratio / middle - 1).max() < _APPROXIMATE and abs(middle - 1) < _APPROXIMATE:
        return both(f"the inverse root is an approximation: it is off by up to {np.abs(ratio - 1).max():.2g}")
    return both("each position is divided by a number of its own that is not its root mean square")


def _lines(norm: _Norm, factors: Array) -> Iterator[tuple[str, Array]]:
    """Yields factors whose inverse squares are a line in the mean square: another epsilon, another divisor."""
    x, eps, width = norm.x, norm.eps, norm.x.shape[1]
    square, power = np.mean(x * x, axis=1, keepdims=True), factors**2
    epsilon = float((power * (1 - power * square)).sum() / (power * power).sum())
    if epsilon >= 0:
        yield f"epsilon is about {epsilon:.3g} instead of {eps:.3g}", 1 / np.sqrt(square + epsilon)
    root = np.sqrt(square)
    outside = float((np.abs(factors) * (1 - np.abs(factors) * root)).sum() / (factors**2).sum())
    if outside >= 0:
        yield f"epsilon is outside the root, about {outside:.3g}", 1 / (root + outside)
    slope = float((power * square).sum() / ((power * square) ** 2).sum())
    if slope > 0:
        yield _of_sum(width / slope, width), 1 / np.sqrt(slope * square + eps)
        yield _of_sum(width / slope, width), 1 / np.sqrt(slope * (square + eps))
    (slope, epsilon), *_ = np.linalg.lstsq(np.hstack([power * square, power]), np.ones(len(power)), rcond=None)
    if epsilon >= 0 and slope * np.ptp(square) > _CONSTANT * epsilon:  # else all rows are divided by one number
        yield (
            f"{_of_sum(width / slope, width)}, and epsilon is about {epsilon:.3g} instead of {eps:.3g}",
            1 / np.sqrt(slope * square + epsilon),
        )


def _of_sum(divisor: float, width: int) -> str:
    if abs(divisor - 1) < 1e-3:
        return f"the sum of squares is not divided by the width of {width}"
    return f"the sum of squares is divided by {divisor:.5g} instead of the width of {width}"


def _roots(norm: _Norm, factors: Array) -> Iterator[tuple[str, Array]]:
    """Yields factors of other means, of other elements, or of other rows."""
    x, eps, (rows, width) = norm.x, norm.eps, norm.x.shape
    right = _root(x, eps)
    for parts in (2, 4, 8, 16):
        if width % parts == 0:
            for part, cut in enumerate(np.split(x, parts, axis=1)):
                where = f"elements {part * width // parts} to {(part + 1) * width // parts - 1}"
                half = f", {'the first' if part == 0 else 'the last'} half," if parts == 2 else ""
                yield f"the mean square is of {where}{half} alone", _root(cut, eps)
    for step, text in ((2, "every second element"), (4, "every fourth element")):
        yield f"the mean square is of {text} alone", _root(x[:, ::step], eps)
    for left_out in range(1, min(width // 2, 64)):
        yield f"the mean square is without the last {left_out} elements", _root(x[:, :-left_out], eps)
        yield (
            f"the sum of squares is without the last {left_out} elements",
            1 / np.sqrt((x[:, :-left_out] ** 2).sum(axis=1, keepdims=True) / width + eps),
        )
    yield "it divides by the mean magnitude, not the root mean square", 1 / (np.abs(x).mean(axis=1, keepdims=True) + eps)
    yield "it divides by the largest magnitude, not the root mean square", 1 / np.maximum(np.abs(x).max(axis=1, keepdims=True), 1e-300)
    yield "it divides by the standard deviation: the mean is subtracted in the root alone", _root(_centred(x), eps)
    yield "it divides by the mean square, without the root", right**2
    tokens = len(norm.wrong.theirs)
    if rows != tokens:  # heads
        whole = _root(norm.wrong.inputs[0], eps)
        yield "the mean square is of all heads together, not of each", np.repeat(whole, rows // tokens, axis=0)
    yield "all positions are divided by the same number, that of all together", np.full_like(right, 1 / np.sqrt(np.mean(x * x) + eps))
    for row, text in ((0, "first"), (-1, "last")):
        yield f"all positions are divided by the root mean square of the {text} one", np.broadcast_to(right[row], right.shape)
    yield "all positions are divided by the same number", np.full_like(right, np.median(factors))
    for shift, text in ((1, "previous"), (-1, "next")):
        yield f"each position is divided by the root mean square of the {text} one", _shifted(right, shift, factors)
    logs, roots = np.log(np.maximum(np.abs(factors), 1e-300)), np.log(right)
    power, constant = np.polyfit(roots[:, 0], logs[:, 0], 1) if np.ptp(roots) > 1e-3 else (1.0, 0.0)
    if abs(constant) < 1e-3:
        yield f"the mean square is taken to the power {power / 2:.4g} instead of 0.5", right**power


def _shifted(right: Array, shift: int, factors: Array) -> Array:
    """The factors of the row before or after; the row that has none keeps its own."""
    rolled = np.roll(right, shift, axis=0)
    end = 0 if shift == 1 else -1
    rolled[end] = factors[end]
    return rolled


def _by_group(norm: _Norm) -> str | None:
    """The group of elements that is normalised by itself, if one is."""
    config, width = norm.wrong.config, norm.x.shape[1]
    sizes = {size: f"each {size} elements" for size in (16, 32, 64, 128, 256)} | {width // 2: "each half", config.head_dim: "each head"}
    for size, text in sizes.items():
        if size and width % size == 0 and _NARROW <= size < width:
            x = norm.x.reshape(-1, size)
            for weight_text, weight in _weights(norm):
                if norm.accounts((_root(x, norm.eps) * x).reshape(norm.x.shape) * weight):
                    return "; ".join(filter(None, (weight_text, f"the norm is taken over {text} by itself")))
    return None


# --- norms where none belongs ---------------------------------------------------------------------------------------------------------


def normed(wrong: Wrong) -> str | None:
    """The norm that was applied to the right numbers, with the weight of one of the model's norms or without."""
    if wrong.theirs.shape[1] < _NARROW or len(wrong.theirs) < _LEAST:
        return None
    model, roots = wrong.model, _root(wrong.value, 0.0 if not wrong.value.any(axis=1).all() else wrong.config.eps)
    layers = enumerate(model.layers)
    weights = {f"layer {n} {name}": getattr(layer, name) for n, layer in layers for name in NORMS} | {"result_norm": model.output_norm}
    if wrong.accounts(roots * wrong.value):
        return "a norm is applied to it, without a weight: each position is divided by its root mean square"
    for name, weight in weights.items():
        if weight is not None and weight.size == wrong.theirs.shape[1] and wrong.accounts(roots * wrong.value * weight):
            return f"a norm is applied to it, with the weight of {name}"
    lengths = np.sqrt((wrong.value**2).sum(axis=1, keepdims=True))
    return "each position is divided by its length" if wrong.accounts(wrong.value / np.where(lengths == 0, 1, lengths)) else None
