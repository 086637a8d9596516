"""Sums of rows, as of softmaxes, means and root mean squares: of some numbers alone, in parts, along another axis, or in fewer bits."""

from collections.abc import Iterator
from functools import partial

import numpy as np

from ..law.expression import Array, Node, nodes
from ..law.functions import Function
from ..law.roundings import cut_to_digits, to_digits
from .wrong import Wrong

_TERMS: dict[str, Function] = {"mean square": np.square, "mean": lambda x: x, "sum": lambda x: x}
_SIZES = tuple(2**k for k in range(10))
_TYPES = {8: "bfloat16", 11: "float16"}  # by significant bits


@np.errstate(all="ignore")
def wrong_sums(wrong: Wrong) -> str | None:
    """The law of a sum of each row, if an operation is right but for that: of all laws the one that leaves least."""
    text, least = None, np.inf
    for node, _ in nodes(wrong.operation.tree):
        what = {"softmax sum": "sum", "reduction": node.what}.get(node.kind)
        for words, numbers in _laws(wrong.steps[node.inputs[0]], what, _largest(wrong, node)) if what in _TERMS else ():
            computed = wrong.with_step(node, np.where(numbers == 0, 1, numbers))
            left = float(((computed - wrong.theirs) ** 2).sum())
            if left < least and wrong.accounts(computed):
                text, least = f"{node.noun} {words}", left
    return text


def _largest(wrong: Wrong, node: Node) -> Array | float:
    """The number that is subtracted from each row before its exponentials are summed; 0 of other sums."""
    return wrong.steps[node.inputs[0].inputs[0].inputs[1]] if node.inputs[0].kind == "exponential" else 0.0


def _laws(x: Array, what: str, largest: Array | float) -> Iterator[tuple[str, Array]]:
    """Yields sums, or means, of numbers [.., n], or of their squares, by other laws in words, [.., 1] or [.., n]. largest: see _largest."""
    terms, width, mean = _TERMS[what](x), x.shape[-1], what != "sum"
    whole = width if mean else 1
    i, sizes = np.arange(width), [n for n in _SIZES if n < width]
    scale = np.exp(largest - np.max(largest))
    yield "is taken along the other axis", (terms * scale).sum(axis=-2, keepdims=True) / scale / (terms.shape[-2] if mean else 1)
    for w in dict.fromkeys((*(-(-width // n) * n for n in (*_SIZES, 3, 6, 12, 24, 48, 96, 192)), 1)):
        if mean and w != width:
            yield f"is divided by {w} instead of {width}" if w > 1 else "is not divided by the width", terms.sum(-1, keepdims=True) / w
    for n in sizes:
        for words, part in (
            (f"each {n} numbers", i // n),
            (f"each of {n} lanes, of the numbers i % {n},", i % n),
            *[(f"each half of every {2 * n} numbers", i // n % 2)] * (1 < n < width / 2),
        ):
            member = (part[:, None] == np.arange(part.max() + 1)).astype(np.float64)  # [n, parts]
            yield f"is that of {words} by itself", (terms @ member / (member.sum(axis=0) if mean else 1))[..., part]
        for words, some in (
            (f"every {n}th number alone", i % n == 0),
            (f"the first {n} numbers alone", i < n),
            *((f"all but the last {rest}", i < width - rest) for rest in {n, width % n} if rest),
            *((f"all but numbers {k * n} to {k * n + n - 1}", i // n != k) for k in range(width // n) if width <= 8 * n),
        ):
            for how, count in (("", whole), (", and divided by their count", some.sum()))[: 1 + mean]:
                yield f"is of {words}{how}", terms @ some[:, None] / count
        for rest in {n, width % n} - {0} if what == "mean square" else ():
            both = np.append(terms[..., : width - rest], x[..., width - rest :], axis=-1)
            yield f"has the last {rest} numbers themselves, and not their squares", both.mean(axis=-1, keepdims=True)
        for digits, kind in _TYPES.items():
            for how, to in (("rounded", to_digits), ("cut", cut_to_digits)):
                yield f"is kept in {kind}, {how} behind each {n} that are added", _kept(terms, n, partial(to, digits=digits)) / whole
        if not mean:
            yield from _divided(terms, n)


def _kept(terms: Array, n: int, to: Function) -> Array:
    """The sum [.., 1] of terms, n at a time, whose type is narrow."""
    total = np.zeros((*terms.shape[:-1], 1))
    for begin in range(0, terms.shape[-1], n):
        total = to(total + terms[..., begin : begin + n].sum(axis=-1, keepdims=True))
    return total


def _divided(e: Array, n: int) -> Iterator[tuple[str, Array]]:
    """Yields what exponentials are divided by where the sum so far is divided out behind each n keys: of all keys, or of visible ones."""
    parts = np.stack([e[..., begin : begin + n].sum(axis=-1) for begin in range(0, e.shape[-1], n)], axis=-1)
    most = np.maximum.accumulate(np.stack([e[..., b : b + n].max(axis=-1) for b in range(0, e.shape[-1], n)], axis=-1), axis=-1)
    total = np.where(most > 0, parts.cumsum(axis=-1) / most, 1)
    for which, each in (("", total), (" that are seen", np.where(parts > 0, total, 1))):
        later = np.multiply.accumulate(each[..., ::-1], axis=-1)[..., ::-1].astype(np.float64)
        yield f"is divided out behind each {n} keys{which}, not once at the end", later[..., np.arange(e.shape[-1]) // n]
