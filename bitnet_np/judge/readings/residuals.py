"""Wrong sums of a residual and its branches: which tensors were added, and how often each."""

from collections.abc import Iterator
from itertools import combinations

import numpy as np

from ...traces.points import LAYER_NAMES, Key
from .wrong import Array, Indices, Wrong

AT = ("ffn_inp", "l_out")

_MOST = 4  # terms
_LEAST = 64  # numbers: a few coefficients explain a few numbers
_ROUND = 1e-4  # a coefficient this close to a simple number is one
_OTHERS = 30  # tensors looked at


def terms(wrong: Wrong) -> str | None:
    """The sum of a few tensors that it is, each a number of times."""
    if wrong.theirs.size < _LEAST:
        return None
    known = list(_candidates(wrong))
    size = np.array([max(float(np.sqrt((x * x).sum())), 1e-300) for _, x in known])
    flat = np.stack([x.ravel() for _, x in known]) / size[:, None]
    gram, along, whole = flat @ flat.T, flat @ wrong.theirs.ravel(), float((wrong.theirs**2).sum())
    own = len(wrong.operation.inputs)
    for count in range(1, _MOST + 1):
        always = tuple(range(own)) if count == _MOST else ()  # many terms: only beside the right ones
        parts = [always + more for more in combinations(range(len(always), len(known)), count - len(always))]
        chosen = np.array(parts, int).reshape(-1, count)
        chosen = chosen[np.linalg.cond(gram[chosen[:, :, None], chosen[:, None]]) <= 1e8]
        factors = np.linalg.solve(gram[chosen[:, :, None], chosen[:, None]], along[chosen][..., None])[..., 0]
        close = whole - (factors * along[chosen]).sum(axis=1) < 1e-5 * whole
        fits = [(part, by / size[part]) for part, by in zip(chosen[close], factors[close], strict=True)]
        for part, factors in sorted(fits, key=lambda fit: _oddness(fit[0], fit[1], own)):
            factors = np.array([_simple(f) for f in factors])
            if wrong.accounts(sum(f * known[i][1] for f, i in zip(factors, part, strict=True))):
                right = _said([text for text, _ in known[:own]], np.array([1.0] + [wrong.config.residual_scale] * (own - 1)))
                return f"it is {_said([known[i][0] for i in part], factors)} instead of {right}"
    return None


def _candidates(wrong: Wrong) -> Iterator[tuple[str, Array]]:
    """Yields the tensors that may have been added, the right ones first, and how each is said."""
    names = [key.place if key.layer != wrong.key.layer else key.name for key in wrong.operation.inputs]
    yield from zip(names, wrong.inputs, strict=True)
    yield "1", np.ones_like(wrong.theirs)
    for name, x in zip(names, wrong.inputs, strict=True):
        if len(x) > 2:
            yield f"{name} of the token before", np.roll(x, 1, axis=0)
            yield f"{name} of the token after", np.roll(x, -1, axis=0)
    for name, x in zip(names, wrong.inputs, strict=True):
        yield f"{name} divided by its root mean square", x / np.maximum(np.sqrt((x * x).mean(axis=1, keepdims=True)), 1e-300)
    others = [(key, x) for key, x in wrong.beside() if key not in wrong.operation.inputs and not _is_behind(wrong, key)]
    for key, x in others[:_OTHERS]:
        yield key.place if key.layer != wrong.key.layer else key.name, x


def _is_behind(wrong: Wrong, key: Key) -> bool:
    """Whether a tensor is computed from the wrong one: such as the next norm, or the sum at the end of the layer."""
    if key.layer is None:
        return key.name.startswith("result")
    return key.layer == wrong.key.layer and LAYER_NAMES.index(key.name) > LAYER_NAMES.index(wrong.key.name)


def _oddness(part: Indices, factors: Array, own: int) -> tuple[int, int]:
    """How far a sum is from the right one: of several ways to say the same numbers the least odd is said."""
    missing = len(set(range(own)) - set(part.tolist()))
    return missing, int((np.abs(factors - 1) > _ROUND).sum())


def _simple(factor: float) -> float:
    for simple in (round(factor), round(2 * factor) / 2, round(10 * factor) / 10):
        if simple and abs(factor - simple) <= _ROUND * abs(simple):
            return float(simple)
    return float(factor)


def _said(names: list[str], factors: Array) -> str:
    text = ""
    for name, factor in zip(names, factors, strict=True):
        sign = " - " if factor < 0 else " + " if text else ""
        times = f"{abs(factor):.5g}" if name == "1" else name if abs(factor) == 1 else f"{abs(factor):.5g} {name}"
        text += (sign if text else sign.strip()) + times
    return text
