"""The law for one operation on given inputs: its expected output, and how far float32 may be from it.

An engine's dump is judged operation by operation (graph.py lists them): each is evaluated here in float64 from the engine's own inputs,
so an early error neither hides nor fakes a later one. The rules are spec.py's, which is the law for whole models; roundings.py adds where
other engines round. products.py has the products with matrices. Nothing here is shared with the kernels.
tests/judge/test_operations.py ties the two laws together.

HOW FAR. The unit of an element is u = 2^-24 times the result of the same operation on absolute values: for a dot product
sum |a_i b_i|. An honest float32 implementation that adds `steps` rounded terms, in any order, stays within

    |error| <= reach of flips + u * unit * min(steps, 6 sqrt(steps))            for each element
    mean of (error / (u * unit))^2 / steps <= 0.4                               over a tensor
    |sum error * value / sum value^2| <= u * common + 4 standard deviations     over a tensor: no common factor

The first is the worst case (Higham, Accuracy and Stability, 3.1) or, for long sums, the probabilistic bound with lambda = 6
(Higham and Mary, SIAM J. Sci. Comput. 41, 2019). The second is the variance test of TOSA's conformance rules for dot products,
which catches small errors that sit everywhere. The third catches small wrong factors: `common` counts the roundings that all
elements of a tensor may share, such as that of a scale. Sums of integers are exact, but engines
that multiply dequantised numbers round there too, so a ternary matmul counts as a dot product.

FLIPS. A code, or a float16, is ambiguous if the number before rounding is nearer to a rounding boundary than float32 can tell;
the reach of flips is the change that all ambiguous ones together can make.
"""

import numpy as np
from numpy.typing import NDArray

from .. import spec
from ..engine.dialects import EXACT, Dialect
from ..model import widen
from ..model.records import Config, Model, Pooling
from . import roundings
from .expected import WIDE, Array, Expected, Storage, U, half_steps, kept
from .precision import ROUNDOFF
from .roundings import to_float16

# --- sums and norms -------------------------------------------------------------------------------------------------------------------


def embed(model: Model, tokens: NDArray[np.int64], *, types: Storage = WIDE) -> Expected:
    value = widen.take(model.token_embd, tokens).astype(np.float64)
    return Expected(value, np.abs(value), 0).stored(types)


def add_positions(model: Model, x: Array, *, types: Storage = WIDE) -> Expected:
    assert model.position_embd is not None
    rows = widen.take(model.position_embd, np.arange(len(x))).astype(np.float64)
    return add(x, rows, types=types._replace(inputs=(*types.inputs, types.output)))


def add(h: Array, *branches: Array, factor: float = 1.0, types: Storage = WIDE) -> Expected:
    """The residual stream and outputs of branches, times their scale, which is rounded too where it is not 1.

    Terms of a float64 engine, dumped as float32, are rounded as well as the result, which may be much smaller: a rounding each, and one. In
    narrow types a sum of three terms has one in between.
    """
    branches = branches if factor == 1 else tuple(branch * factor for branch in branches)
    terms = (h, *branches)
    value, unit = np.sum(terms, axis=0), np.sum(np.abs(terms), axis=0)
    sums = (unit,) if len(terms) > 2 else ()
    if factor == 1:
        return Expected(value, unit, len(terms)).stored(types, *terms, inside=sums)
    expected = Expected(value, unit, len(terms) + 2).stored(types, *terms, inside=(*branches, *sums))
    return expected if types.is_wide else expected.with_factor(kept(types.output, np.sum(branches, axis=0)))


def scaled_embedding(c: Config, x: Array, *, types: Storage = WIDE) -> Expected:
    """A product with a factor that is rounded itself, in some engines to the result's type."""
    value = x * c.embedding_scale
    expected = Expected(value, np.abs(value), 2)
    return expected if types.is_wide else expected.stored(types).with_factor(kept(types.output, value))


def rms_norm(x: Array, gain: NDArray[np.float32], eps: float, *, types: Storage = WIDE) -> Expected:
    """RMSNorm, of as many numbers each as there are weights: a sum of D squares under a root (which halves its relative error), then six
    roundings."""
    width = gain.size
    value = spec.rms_norm(x.reshape(-1, width), gain.astype(np.float64), eps).reshape(x.shape)
    return _normed(Expected(value, np.abs(value), width / 4 + 6, common=6 + width**0.5 / 2), types)


def layer_norm(x: Array, gain: NDArray[np.float32], bias: NDArray[np.float32] | None, eps: float, *, types: Storage = WIDE) -> Expected:
    """LayerNorm: a mean and a sum of D squares. The mean is wrong by roundings of the numbers' own size, which all differences share."""
    width = x.shape[1]
    shift = 0.0 if bias is None else bias.astype(np.float64)
    value = spec.layer_norm(x, gain.astype(np.float64), shift, eps)
    centred = x - x.mean(axis=1, keepdims=True)
    root = np.sqrt((centred**2).mean(axis=1, keepdims=True) + eps)
    size = (np.abs(centred) + np.abs(x).mean(axis=1, keepdims=True)) / root * np.abs(gain) + np.abs(shift)
    return _normed(Expected(value, size, width / 4 + 8, common=8 + width**0.5 / 2), types)


def _normed(expected: Expected, types: Storage) -> Expected:
    """A norm's roundings: of the normed numbers and of the weight, which all rows share. Numbers that lose a mean have errors of their own
    size."""
    size = np.maximum(np.abs(expected.value), expected.unit)
    narrow = expected.stored(types, size, inside=(size, size))
    return expected if types.is_wide else narrow._replace(shared=len(size))


def pool(pooling: Pooling, x: Array, *, types: Storage = WIDE) -> Expected:
    """The pooled output [1, D]: the mean of all rows, a sum and a factor; or a row, with room for the rounding of one factor.

    In narrow types the rows, the sums on the way and the result are rounded.
    """
    unit = spec.pool(np.abs(x), pooling)
    expected = Expected(spec.pool(x, pooling), unit, len(x) + 2 if pooling == "mean" else 1)
    return expected if types.is_wide else expected.stored(types, more=((ROUNDOFF[types.inputs[0]] + ROUNDOFF[types.output]) * unit,))


# --- rotations ------------------------------------------------------------------------------------------------------------------------


def pair_slices(config: Config) -> tuple[slice, slice]:
    """The slices of a head that hold the first and the second numbers of its rotated pairs."""
    j = config.rope_pairs
    return (slice(0, j), slice(j, 2 * j)) if config.rope == "halves" else (slice(0, 2 * j, 2), slice(1, 2 * j, 2))


def complex_pairs(config: Config, x: NDArray) -> NDArray[np.complex128]:
    """The rotated pairs of heads [n, heads * K] as complex numbers, [n, heads, J]: a rotation multiplies them."""
    heads = x.reshape(len(x), -1, config.head_dim).astype(np.float64)
    first, second = pair_slices(config)
    return heads[..., first] + 1j * heads[..., second]


def rope(model: Model, dialect: Dialect, x: Array, start: int = 0, *, types: Storage = WIDE) -> Expected:
    """RoPE of positions from `start` on: two products, and those of cosine and sine with the magnitude, which is itself a few roundings.

    In most engines the angle is a float32, wrong by a rounding or two of its own size, which all heads share. In narrow types inputs,
    cosines and sines, products and their sum are rounded.
    """
    c = model.config
    heads, angle = x.reshape(len(x), -1, c.head_dim), roundings.angles(model, dialect, len(x), start)
    pairs = pair_slices(c)

    def of_both(size: Array, otherwise: Array, factor: Array | float = 1.0) -> Array:
        """The sum over both numbers of each pair, in the place of either; elsewhere something else."""
        out = otherwise.copy()
        out[..., pairs[0]] = out[..., pairs[1]] = (size[..., pairs[0]] + size[..., pairs[1]]) * factor
        return out

    size = np.abs(heads)
    unit = of_both(size, size, 1 + angle[:, None, :])
    unit[..., : 2 * c.rope_pairs] *= c.rope_magnitude
    value = spec.rotate(heads, angle, c.rope, c.rope_magnitude).reshape(x.shape)
    expected = Expected(value, unit.reshape(x.shape), 4 if c.rope_magnitude == 1 else 12)
    if types.is_wide:
        return expected
    u, v, result = ROUNDOFF[types.output], ROUNDOFF[types.inputs[0]], kept(types.output, value)
    both, squares = c.rope_magnitude * of_both(size, 0 * size), c.rope_magnitude**2 * of_both(size**2, 0 * size)
    worst, square = (2 * u + v) * both.reshape(x.shape) + result, (2 * u**2 + v**2) * squares.reshape(x.shape) + result**2
    return expected._replace(worst=worst, square=square, shared=heads.shape[1])


# --- attention ------------------------------------------------------------------------------------------------------------------------


def score_scale(c: Config) -> float:
    """The factor of q . k."""
    return c.head_dim**-0.5 if c.attention_scale is None else c.attention_scale


def by_query(x: Array) -> Array:
    """[H, T, S] -> [T, H * S]."""
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def by_head(x: Array) -> Array:
    """[T, H * T] -> [H, T, T]."""
    return x.reshape(len(x), -1, len(x)).transpose(1, 0, 2)


def _scores(c: Config, q: Array, k: Array) -> Array:
    """Dot products of every query with every key, [H, T, S], scaled."""
    q, k = q.reshape(len(q), c.heads, c.head_dim), k.reshape(len(k), c.kv_heads, c.head_dim)
    return np.einsum("thk,shk->hts", q, spec.by_query_head(k, c.heads)) * score_scale(c)


def _score_errors(types: Storage, c: Config, q: Array, k: Array, s: Array) -> tuple[Array, Array]:
    """The effects of roundings on scores [H, T, S], and their squares: queries, keys (also in the cache), product, factor and mask."""
    kv, u = types.precision.kv, ROUNDOFF[types.output]
    of_q, of_k = (ROUNDOFF[kind] * np.abs(x) for kind, x in zip(types.inputs, (q, k), strict=False))
    of_k = of_k + half_steps(k.reshape(len(k), -1, c.head_dim), kv).reshape(k.shape)
    if kv != "float32":  # the dot product takes queries of the keys' type, of 8 bits where they have 4
        of_q = of_q + half_steps(q.reshape(len(q), -1, c.head_dim), "q8_0" if kv == "q4_0" else kv).reshape(q.shape)
    steps = 3 if c.score_cap is None else 6  # a cap divides, takes tanh and multiplies; its slope is at most 1
    off = _scores(c, of_q, np.abs(k)) + _scores(c, np.abs(q), of_k) + steps * u * np.abs(s)
    squares = (_scores(c, of_q**2, k**2) + _scores(c, q**2, of_k**2)) * score_scale(c)
    return off, squares + steps * (u * s) ** 2


def _sees(model: Model, layer: int, length: int) -> NDArray[np.bool_]:
    """Whether a query sees a key, [T, T]."""
    return spec.causal_mask(length, length, window=model.config.window_of(layer)) == 0


def visible_scores(model: Model, dialect: Dialect, layer: int, q: Array, k: Array, *, types: Storage = WIDE) -> Expected:
    """Scores as they are dumped, [T, H * T]: 0 where a query does not see the key. In narrow types those of a query share its errors."""
    c = model.config
    if dialect.in_float16:
        q, k = to_float16(q), to_float16(k)
    sees, s = _sees(model, layer, len(q)), _scores(c, q, k)
    value, unit = (by_query(np.where(sees, x, 0)) for x in (spec.soft_cap(s, c.score_cap), _scores(c, np.abs(q), np.abs(k))))
    expected = Expected(value, unit, c.head_dim + (2 if c.score_cap is None else 10))  # a cap divides, takes tanh and multiplies
    if types.is_wide:
        return expected
    off, squares = map(by_query, _score_errors(types, c, q, k, s))
    return expected._replace(worst=off, square=squares, shared=len(q))


def probabilities(model: Model, layer: int, scores: Array, *, types: Storage = WIDE) -> Expected:
    """The softmax of scores [T, H * T]. An error of a score changes its probability by as much, relatively, and the others by their sum.

    The exponent is rounded four times at most: the difference from the largest score, its product with log2(e), that constant, and the
    reduction of its range. Each is relative to the difference, so it grows with it, unlike roundings of a sum, which partly cancel. In
    narrow types scores are rounded, three steps inside (exponential, sum, quotient) and the result.
    """
    sees, s = _sees(model, layer, len(scores)), by_head(scores)
    p = spec.softmax(np.where(sees, s, -np.inf))

    def of_scores(off: Array) -> tuple[Array, Array]:
        """The effect of these errors of scores, and its square but for p's."""
        total, square = ((p**n * off**n).sum(axis=-1, keepdims=True) for n in (1, 2))
        return off + total, off**2 + square

    if types.is_wide:
        away, square = of_scores(np.where(sees, np.where(sees, s, -np.inf).max(axis=-1, keepdims=True) - s, 0))
        worst, squares = 4 * U * p * away, 4 * (U * p) ** 2 * square
    else:
        off, square = of_scores(ROUNDOFF[types.inputs[0]] * np.abs(s))
        worst, squares = p * off + 4 * kept(types.output, p), p**2 * square + 4 * kept(types.output, p) ** 2
    steps = np.broadcast_to(np.minimum(sees.sum(axis=-1), 36)[:, None] + 8, p.shape)
    expected = Expected(by_query(p), by_query(p), by_query(steps), worst=by_query(worst), square=by_query(squares))
    return expected if types.is_wide else expected._replace(shared=len(scores))


def attend(model: Model, dialect: Dialect, layer: int, q: Array, k: Array, v: Array, *, types: Storage = WIDE) -> Expected:
    """Attention of the layer with this number, with its window.

    A wrong score changes its probability by as much, relatively, and the others through their sum: twice the worst score error.
    With float16 probabilities each is rounded as the engine rounds it, and ambiguous if float32 cannot tell to which side.
    """
    c, t = model.config, len(q)
    if dialect.in_float16:
        q, k, v = to_float16(q), to_float16(k), to_float16(v)
    values = spec.by_query_head(v.reshape(t, c.kv_heads, c.head_dim), c.heads)
    sees, products, unit = _sees(model, layer, t), _scores(c, q, k), _scores(c, np.abs(q), np.abs(k))
    s = np.where(sees, spec.soft_cap(products, c.score_cap), -np.inf)
    p, largest = spec.softmax(s), s.max(axis=-1, keepdims=True)
    wrong_score = np.where(sees, unit * min(c.head_dim, 6 * c.head_dim**0.5) + 2 * np.abs(np.where(sees, s - largest, 0)), 0)
    if c.score_cap is not None:
        wrong_score = wrong_score + 8 * np.abs(np.where(sees, s, 0))  # division, tanh and product, each relative
    steps = np.maximum(2 * wrong_score.max(axis=-1), 0) + np.minimum(sees.sum(axis=-1), 36) + 8  # [H, T]
    reach: float | Array = 0.0
    weights = p
    if dialect.in_float16:
        spacing = np.spacing(p.astype(np.float16)).astype(np.float64)
        weights = to_float16(p)
        doubt = sees & (np.abs(np.abs(p - weights) - spacing / 2) <= p * U * steps[..., None])
        reach = _summed(doubt * spacing, np.abs(values))
    value, size = _summed(weights, values), _summed(weights, np.abs(values))
    expected = Expected(value, size, np.repeat(steps.T, c.head_dim, axis=1), reach)
    if types.is_wide:
        return expected
    off, squares = _score_errors(types, c, q, k, products)
    return _attended(expected, types, c, v, p, sees, off, squares)


def _summed(weights: Array, values: Array) -> Array:
    """Weights [H, T, S] times values [S, H, K], added up -> [T, H*K]."""
    return np.einsum("hts,shk->thk", weights, values).reshape(weights.shape[1], -1)


def _attended(
    expected: Expected, types: Storage, c: Config, v: Array, p: Array, sees: NDArray[np.bool_], off: Array, squares: Array
) -> Expected:
    """Attention with its roundings to narrow types. With a score wrong by d, relative to the others, its probability p is wrong by p d, and
    the output o by p d (v - o).

    Roundings: queries, keys (also in the cache), scores three times (product, factor, mask), whose effects are `off` and `squares`,
    probabilities, values (also in the cache), sums, and the result. Elements of a head share the errors of its scores.
    """
    precision, u, out = types.precision, ROUNDOFF[types.output], expected.value
    fine, acc = ROUNDOFF[precision.probs] or u, ROUNDOFF[precision.attn_acc]
    heads = v.reshape(len(v), -1, c.head_dim)
    deltas = ROUNDOFF[types.inputs[2]] * np.abs(heads) + half_steps(heads, precision.kv)
    values, value_errors = (spec.by_query_head(x, c.heads) for x in (heads, deltas))
    largest = np.where(sees, np.minimum(off, 6 * np.sqrt(squares)), 0).max(axis=-1, keepdims=True)  # [H, T, 1]
    growth = np.expm1(np.clip(2 * largest, 1e-12, 60)) / np.clip(2 * largest, 1e-12, 60)  # beyond the first order
    off, squares = p * off * growth, p**2 * squares * growth**2
    total, total_square = (np.repeat(x.sum(axis=-1).T, c.head_dim, axis=1) for x in (off, squares))
    size = _summed(p, np.abs(values))
    worst = _summed(off, np.abs(values)) + np.abs(out) * total
    square = np.maximum(_summed(squares, values**2) - 2 * out * _summed(squares, values) + out**2 * total_square, 0)
    worst = worst + fine * size + _summed(p, value_errors)
    square = square + fine**2 * _summed(p**2, values**2) + _summed(p**2, value_errors**2)
    if acc:
        seen = sees.sum(axis=-1)[:, None]
        worst, square = worst + acc * seen * size, square + seen * (acc * size) ** 2
    result = kept(types.output, out)
    return expected._replace(worst=worst + result, square=square + result**2, shared=c.head_dim)


# --- gates ----------------------------------------------------------------------------------------------------------------------------


def relu2_gate(gate: Array, up: Array, *, types: Storage = WIDE) -> Expected:
    """relu(gate)^2 * up: a square and a product; and the inputs' own roundings, that of the gate twice, in a float64 engine's dump."""
    value = spec.relu2_gate(gate, up)
    return _gated(Expected(value, np.abs(value), 5), types)


def silu_gate(gate: Array, up: Array, *, types: Storage = WIDE) -> Expected:
    """SiLU(gate) * up: an exponential (2 roundings, in some engines of a rounded argument), a sum, a division, a product.

    Compilers such as XLA take sigmoid(x) from tanh: (1 + tanh(x / 2)) / 2, which is as wrong as 1 is, also where it is small.
    """
    value = spec.silu_gate(gate, up)
    return _gated(Expected(value, np.abs(value) * (1 + np.abs(gate)) + np.abs(gate * up) / 2, 6), types)


def gelu_gate(gate: Array, up: Array, dialect: Dialect = EXACT, *, types: Storage = WIDE) -> Expected:
    """GELU by tanh of the gate, times up."""
    one = gelu_tanh(gate, dialect)
    size = np.abs(up)
    return _gated(Expected(one.value * up, one.unit * size, one.steps + 2, one.reach * size), types)


def _gated(expected: Expected, types: Storage) -> Expected:
    """A gate's roundings to narrow types: both inputs (an activation's slope times its input is at most twice itself, and SiLU's 1 + |x|
    times), and two steps inside."""
    value = np.abs(expected.value)
    return expected.stored(types, np.maximum(2 * value, expected.unit), value, inside=(value, value))


def gelu(x: Array, *, types: Storage = WIDE) -> Expected:
    """GELU, whose slope is at most 1.13. Engines compute 1 + erf, so that the error is that of numbers as large as x."""
    return Expected(spec.gelu(x), np.abs(x), 8).stored(types, 1.13 * x, inside=(x,))


def gelu_tanh(x: Array, dialect: Dialect = EXACT, *, types: Storage = WIDE) -> Expected:
    """GELU by tanh. ggml's float16 table may give the neighbour of the right entry, and an ambiguous input the neighbouring entry."""
    value, size = spec.gelu_tanh(x), np.abs(x)
    if not dialect.ggml_activations:
        return Expected(value, size, 8).stored(types, 1.13 * x, inside=(x,))

    def spacing(y: Array) -> Array:
        return np.spacing(np.abs(y).astype(np.float16)).astype(np.float64)

    inside = size < 10
    small = np.where(inside, x, 0)
    rounded = to_float16(small)
    entry = to_float16(spec.gelu_tanh(rounded))
    doubt = np.abs(np.abs(small - rounded) - spacing(rounded) / 2) <= 4 * U * np.abs(small)
    reach = np.where(inside, spacing(entry) + doubt * 2 * spacing(rounded), 0)
    expected = Expected(np.where(inside, entry, value), np.abs(value) + np.abs(small), 8, reach)
    return expected.stored(types, 1.13 * x, inside=(x,))


# --- experts --------------------------------------------------------------------------------------------------------------------------

_NO_CHANCE = 80.0  # e^-80 is near the smallest normal float32


def top_experts(k: int, logits: Array, *, types: Storage = WIDE) -> Expected:
    """The numbers of each token's experts, slot by slot. Those are discrete, as codes are.

    Engines compare probabilities, so an expert whose logit is within a few roundings of another's, or whose probability is hardly above
    0, may have that one's slot.
    """
    value = spec.top_experts(logits, k)
    behind = np.minimum(logits.max(axis=1, keepdims=True) - logits, _NO_CHANCE)
    own = np.take_along_axis(behind, value, axis=1)[:, :, None]

    def reach(error: float) -> Array:
        """How far numbers may be off by errors of logits, relative to 1 and to the distance from the largest."""
        near = np.abs(own - behind[:, None, :]) <= error * (1 + own)
        return np.where(near, np.abs(np.arange(logits.shape[1]) - value[:, :, None]), 0).max(axis=2).astype(np.float64)

    expected = Expected(value.astype(np.float64), np.zeros(value.shape), 0, reach(8 * U))
    if types.is_wide:
        return expected
    narrow = reach(4 * max(ROUNDOFF[types.inputs[0]], ROUNDOFF[types.output]) * (1 + float(np.abs(logits).max())) + 8 * U)
    return expected._replace(worst=narrow, square=narrow**2)


def next_experts(logits: NDArray, k: int, error: Array | float) -> NDArray[np.intp]:
    """The numbers of each token's experts, the last of which is the next best one where that is no farther away than `error`."""
    experts = spec.top_experts(logits, k + 1)
    last, following = (np.take_along_axis(logits, experts[:, [slot]], axis=1)[:, 0] for slot in (k - 1, k))
    near = last - following <= error
    experts[near, k - 1] = experts[near, k]
    return np.ascontiguousarray(experts[:, :k])


def expert_weights(normalized: bool, logits: Array, experts: Array, *, types: Storage = WIDE) -> Expected:
    """The softmax of the logits at a token's experts: exponentials of rounded differences, their sum, and quotients.

    Of rounded logits each probability is wrong by its own share of that, and by the sum's.
    """
    value = spec.expert_weights(logits, experts.astype(np.intp), normalized)
    behind = logits.max(axis=1, keepdims=True) - np.take_along_axis(logits, experts.astype(np.intp), axis=1)
    expected = Expected(value, value * (1 + behind), min(logits.shape[1], 36) + 8)
    if types.is_wide:
        return expected
    off = 2 * ROUNDOFF[types.inputs[0]] * np.abs(logits).max(axis=1, keepdims=True)
    return expected.stored(types, inside=(value, value), more=(value * np.expm1(off),))._replace(shared=value.shape[1])


def mix(y: Array, weights: Array, *, types: Storage = WIDE) -> Expected:
    """The sum of weights times the results of a token's experts. In narrow types all of these are rounded, and partial sums."""
    slots = y.reshape(*weights.shape, -1)
    expected = Expected(spec.mix(slots, weights), spec.mix(np.abs(slots), np.abs(weights)), 2 * weights.shape[1] + 1)
    if types.is_wide:
        return expected
    u = sum(ROUNDOFF[kind] for kind in (*types.inputs, types.output, types.output))
    squares, result = ((slots * weights[..., None]) ** 2).sum(axis=1), kept(types.output, expected.value)
    return expected._replace(worst=u * expected.unit + result, square=u**2 * squares + result**2, shared=slots.shape[2])


def shared_expert(gain: NDArray[np.float32], y: Array, x: Array, *, types: Storage = WIDE) -> Expected:
    """The shared expert's result times the sigmoid of its gate, whose error a row shares; in narrow types of a rounded product."""
    wide = gain.astype(np.float64)
    factor, size = spec.sigmoid(x @ wide)[:, None], (np.abs(x) @ np.abs(wide))[:, None]
    value = y * factor
    expected = Expected(value, np.abs(value) * (1 + (1 - factor) * (1 + size)), x.shape[1] + 8, shared=float(y.shape[1]))
    if types.is_wide:
        return expected
    u, v = ROUNDOFF[types.inputs[1]], ROUNDOFF[types.output]
    return expected.stored(types, value, more=(np.abs(value) * ((u + v) * size + 3 * v),))
