"""The kernels of the backward pass, beside cpu.py's of the forward pass: float32 arrays and scalars in, arrays out.

The arithmetic contract (contract/) goes on here. Sums over the numbers of a row go by its lanes. Every other sum is a fold of chains: the
summed axis is cut into parts (`cuts`, first indices and the end), each part is one chain of fused multiply-adds in order that starts at +0,
and the parts' chains are added in order. Where rows are summed (gradients of weights), parts are sequences, so that a batch's gradient
is, to the bit, the sum of its sequences' in order. Elsewhere parts are PART numbers long. Nothing depends on threads or tiles.
"""

import numpy as np
from numpy.typing import NDArray

from .attention import NO_WINDOW, inverse_root
from .attention_chunk import chunk_scores, exponentials, hide, maxima, visible, weighted_values
from .fast.simd import fma
from .launching import Floats, Kernel, launch, parallel, read_only, rule, serial, shared, variant
from .scalar import CHUNK, WIDE_LANES, exp, first_chunk
from .sums import wide_dot
from .tiles import SPAN, TOKENS
from .workspace import empty

PART = 256  # numbers of a row, or rows of a matrix, in one chain of a sum

_BLOCK = 128  # rows of a result that one step of a parallel loop owns; it owns SPAN columns


def parts(n: int) -> NDArray[np.int64]:
    """The first indices of chains over n numbers, and the end."""
    return np.append(np.arange(0, n, PART), n)


# --- products -------------------------------------------------------------------------------------------------------------------------


@serial
def _panel(source, first, end, column, width, target):
    """target[k] = source[first + k, column : column + width], then zeros."""
    for k in range(end - first):
        row = source[first + k, column : column + width]
        for i in range(row.size):
            target[k, i] = row[i]
        for i in range(target.shape[1] - row.size):
            target[k, row.size + i] = 0


@serial
def _fold(edge, rows, columns, fresh, out, row, column):
    for i in range(rows):
        target = out[row + i, column : column + columns]
        if fresh:
            for j in range(target.size):
                target[j] = edge[i, j]
        else:
            for j in range(target.size):
                target[j] += edge[i, j]


@parallel
def _product(team, a, b, cuts, transposed, fresh, out):
    longest = np.max(cuts[1:] - cuts[:-1])
    right, edge, ends = np.empty((longest, SPAN), np.float32), np.empty((_BLOCK, SPAN), np.float32), np.empty(_BLOCK // TOKENS, np.int64)
    left = np.empty((longest, _BLOCK) if transposed else (_BLOCK, longest), np.float32)
    across, along = (1, _BLOCK) if transposed else (longest, 1)
    down = -(-out.shape[0] // _BLOCK)
    for item in shared(team, down * -(-out.shape[1] // SPAN)):
        row, column = item % down * _BLOCK, item // down * SPAN
        rows, columns = min(_BLOCK, out.shape[0] - row), min(SPAN, out.shape[1] - column)
        for part in range(cuts.size - 1):
            first, end = cuts[part], cuts[part + 1]
            _panel(b, first, end, column, columns, right)
            if transposed:
                _panel(a, first, end, row, rows, left)
            else:
                _panel(a, row, row + rows, first, end - first, left)
            ends[:] = end - first
            weighted_values(left, rows, across, along, ends, right, 0, SPAN, SPAN, edge)
            _fold(edge, rows, columns, fresh and part == 0, out, row, column)


def product(a: Floats, b: Floats, into: Floats | None = None) -> Floats:  # [I, K], [K, J] -> [I, J]
    """a b, in parts of PART numbers of K. The parts are added to `into`, one after another, if that is given."""
    out = empty((a.shape[0], b.shape[1])) if into is None else into
    launch(_product, a.shape[0] * b.size // 8, read_only(a), read_only(b), parts(len(b)), False, into is None, out)
    return out


def transposed_product(
    a: Floats, b: Floats, cuts: NDArray[np.int64], into: Floats | None = None
) -> Floats:  # [K, I], [K, J] over cuts of K -> [I, J]
    """a^T b, in the parts of K that `cuts` says. They are added to `into`, one after another, if that is given."""
    out = empty((a.shape[1], b.shape[1])) if into is None else into
    launch(_product, a.shape[1] * b.size // 8, read_only(a), read_only(b), cuts, True, into is None, out)
    return out


def dequantize(codes: NDArray[np.int8], scale: Floats) -> Floats:  # [R, M], [R] -> [R, M]
    """The numbers that codes stand for: code / scale."""
    return codes.astype(np.float32) / scale[:, None]


# --- norms ----------------------------------------------------------------------------------------------------------------------------


@parallel
def _rms_norm_back(team, x, gain, eps, dy, dx, factors):
    lanes = np.empty(WIDE_LANES, np.float64)
    for r in shared(team, x.shape[0]):
        row, above, out = x[r], dy[r], dx[r]
        factor = np.float32(1.0) / np.sqrt(np.float32(wide_dot(row, row, lanes) / row.size) + eps)
        for i in range(row.size):
            out[i] = above[i] * gain[i]
        along = np.float32(np.float32(factor * factor) * np.float32(wide_dot(out, row, lanes) / row.size))
        for i in range(row.size):
            out[i] = np.float32(fma(-row[i], along, out[i]) * factor)
        factors[r] = factor


@parallel
def _gain_back(team, x, dy, factors, cuts, out):
    for panel in shared(team, (x.shape[1] + SPAN - 1) // SPAN):
        first, end = panel * SPAN, min(panel * SPAN + SPAN, x.shape[1])
        for part in range(cuts.size - 1):
            chain = np.zeros(end - first, np.float32)
            for row in range(cuts[part], cuts[part + 1]):
                values, above, factor = x[row, first:end], dy[row, first:end], factors[row]
                for i in range(chain.size):
                    chain[i] = fma(above[i], np.float32(values[i] * factor), chain[i])
            out[first:end] += chain


def rms_norm_back(x: Floats, gain: Floats, eps: float, dy: Floats, cuts: NDArray[np.int64]) -> tuple[Floats, Floats]:
    # [R, D], [D], [R, D], cuts of R -> [R, D], [D]
    """The gradients of cpu.rms_norm. With f = 1 / root and g = dy gain: dx = (g - x f^2 mean(g x)) f, dgain = sum of dy x f.

    The mean is taken in float64.
    """
    dx, factors, dgain = empty(x.shape), np.empty(len(x), np.float32), np.zeros(x.shape[1], np.float32)
    launch(_rms_norm_back, 2 * x.size, x, read_only(gain), np.float32(eps), dy, dx, factors)
    launch(_gain_back, x.size, x, dy, factors, cuts, dgain)
    return dx, dgain


# --- gates ----------------------------------------------------------------------------------------------------------------------------


@rule
def _relu2_slope(x):
    """max(x, 0)^2 and its slope; NaN stays NaN."""
    positive = np.float32(0.0) if x < 0 else x
    return np.float32(positive * positive), np.float32(positive + positive)


@rule
def _silu_slope(x):
    """x / (1 + e^-x) and its slope."""
    one, e = np.float32(1.0), exp(-x)
    sigmoid = one / np.float32(one + e)
    rest = np.float32(e * sigmoid) if x > 0 else np.float32(one - sigmoid)  # 1 - sigmoid, where it does not cancel
    return np.float32(x * sigmoid), np.float32(sigmoid * fma(x, rest, one))


def slope_of(x):
    """In place of one of these: see launching.variant."""


def _gate_back(team, gate, up, dy, dgate, dup):
    for r in shared(team, gate.shape[0]):
        for i in range(gate.shape[1]):
            value, slope = slope_of(gate[r, i])
            dgate[r, i], dup[r, i] = np.float32(dy[r, i] * up[r, i]) * slope, dy[r, i] * value


_relu2_gate_back = variant(_gate_back, "_relu2_gate_back", slope_of=_relu2_slope)
_silu_gate_back = variant(_gate_back, "_silu_gate_back", slope_of=_silu_slope)


def relu2_gate_back(gate: Floats, up: Floats, dy: Floats) -> tuple[Floats, Floats]:  # [R, F] x 3 -> [R, F] x 2
    """The gradients of relu2_gate: dy up 2 max(gate, 0), and dy max(gate, 0)^2."""
    return _both(_relu2_gate_back, 1, gate, up, dy)


def silu_gate_back(gate: Floats, up: Floats, dy: Floats) -> tuple[Floats, Floats]:  # [R, F] x 3 -> [R, F] x 2
    """The gradients of silu_gate: dy up s (1 + gate (1 - s)), and dy gate s, where s = 1 / (1 + e^-gate)."""
    return _both(_silu_gate_back, 16, gate, up, dy)


def _both(kernel: Kernel, steps: int, gate: Floats, up: Floats, dy: Floats) -> tuple[Floats, Floats]:
    """The two gradients by a kernel of so many elementary steps for each number."""
    dgate, dup = empty(gate.shape), empty(gate.shape)
    launch(kernel, steps * gate.size, gate, up, dy, dgate, dup)
    return dgate, dup


# --- attention ------------------------------------------------------------------------------------------------------------------------


@parallel
def _attend_back(team, q, k, v, attended, dy, cuts, scale, window, dq, dk, dv):
    """An item is a sequence and the query heads that read one key-value head g. q, dy and gradients are [R, heads * K]."""
    groups, width, group = k.shape[1], k.shape[2], attended.shape[1] // k.shape[1]
    queries, above = np.zeros((CHUNK, width), np.float32), np.zeros((CHUNK, width), np.float32)
    part, ds = np.empty((CHUNK, -(-width // SPAN) * SPAN), np.float32), np.zeros((CHUNK, CHUNK), np.float32)
    wide_lanes, along, ends = np.empty(WIDE_LANES, np.float64), np.empty(CHUNK, np.float32), np.empty(CHUNK // TOKENS, np.int64)
    largest, weight, here = np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32), np.empty(CHUNK, np.float32)
    for item in shared(team, (cuts.size - 1) * groups):
        first, length, g = cuts[item // groups], cuts[item // groups + 1] - cuts[item // groups], item % groups
        keys, values = k[first : first + length, g].copy(), v[first : first + length, g].copy()
        chunks = (length + CHUNK - 1) // CHUNK
        p = np.zeros((chunks, CHUNK, CHUNK), np.float32)
        for step in range(group * chunks):
            h, block = g * group + step // chunks, step % chunks
            n = min(CHUNK, length - block * CHUNK)
            row = first + block * CHUNK
            _panel(q, row, row + n, h * width, width, queries)
            _panel(dy, row, row + n, h * width, width, above)
            padded = -(-n // TOKENS) * TOKENS
            for i in range(n):
                along[i] = wide_dot(above[i], attended[row + i, h], wide_lanes)
                largest[i], weight[i] = -np.inf, 0
            earliest = first_chunk(block * CHUNK, window)
            for chunk in range(earliest, block + 1):
                n_keys = min(CHUNK, length - chunk * CHUNK)
                ends[:] = n_keys
                chunk_scores(queries[:padded], width, keys, values, chunk * CHUNK * width, width, ends, scale, p[chunk])
                for i in range(n):
                    low, high = visible(block * CHUNK + i, window, chunk * CHUNK)
                    hide(p[chunk], i, low, high)
                maxima(p[chunk], here)
                for i in range(n):
                    largest[i] = max(largest[i], here[i])
            for chunk in range(earliest, block + 1):
                exponentials(p[chunk], largest[:n], here)
                for i in range(n):
                    weight[i] += here[i]
            for chunk in range(earliest, block + 1):
                n_keys, key = min(CHUNK, length - chunk * CHUNK), first + chunk * CHUNK
                ends[:] = n_keys
                chunk_scores(above[:padded], width, values, keys, chunk * CHUNK * width, width, ends, np.float32(1.0), ds)
                for i in range(n):
                    probability, slope = p[chunk, i], ds[i]
                    for j in range(CHUNK):
                        probability[j] = probability[j] / weight[i]
                        difference = np.float32(slope[j] - along[i])
                        slope[j] = np.float32(np.float32(probability[j] * difference) * scale) if j < n_keys else np.float32(0.0)
                weighted_values(ds, padded, CHUNK, 1, ends, keys, chunk * CHUNK * width, width, width, part)
                _fold(part, n, width, False, dq, row, h * width)
                ends[:] = n
                weighted_values(ds, CHUNK, 1, CHUNK, ends, queries, 0, width, width, part)
                _fold(part, n_keys, width, False, dk, key, g * width)
                weighted_values(p[chunk], CHUNK, 1, CHUNK, ends, above, 0, width, width, part)
                _fold(part, n_keys, width, False, dv, key, g * width)


def attend_back(
    q: Floats, k: Floats, v: Floats, attended: Floats, dy: Floats, cuts: NDArray[np.int64], window: int | None = None
) -> tuple[Floats, Floats, Floats]:  # [R, H, K], [R, G, K] x 2, [R, H, K] x 2, first rows of sequences -> [R, H, K], [R, G, K] x 2
    """The gradients of cpu.attend within each sequence, where `attended` is its result. Each thread takes O(T) memory.

    Probabilities p are recomputed: exp(score - row's largest), divided by the row's sum, chunk after chunk. With dp = dy . v and
    ds = p (dp - dy . attended) scale: dq sums ds k over chunks of CHUNK keys; dk and dv sum ds q and p dy over the query heads of the
    key-value head in order, and in each over blocks of CHUNK queries.
    """
    dq, dk, dv = np.zeros(q.shape, np.float32), np.zeros(k.shape, np.float32), np.zeros(v.shape, np.float32)
    work = int((np.diff(cuts) ** 2).sum()) * q.shape[1] * q.shape[2] // 8
    flat_q, flat_dy, *flat = (x.reshape(len(x), -1) for x in (q, dy, dq, dk, dv))
    launch(_attend_back, work, flat_q, k, v, attended, flat_dy, cuts, inverse_root(q.shape[2]), window or NO_WINDOW, *flat)
    return dq, dk, dv


# --- loss and embedding ---------------------------------------------------------------------------------------------------------------


@parallel
def _cross_entropy(team, logits, ones, targets, factor, losses, largests):
    lanes = np.empty(WIDE_LANES, np.float64)
    for r in shared(team, logits.shape[0]):
        row = logits[r]
        largest = np.float32(-np.inf)
        for i in range(row.size):
            largest = row[i] if row[i] > largest else largest
        target = row[targets[r]]
        for i in range(row.size):
            row[i] = exp(np.float32(row[i] - largest))
        total = wide_dot(row, ones, lanes)
        losses[r], largests[r] = total, np.float64(largest) - np.float64(target)
        share = np.float32(np.float64(factor) / total)
        for i in range(row.size):
            row[i] = row[i] * share
        row[targets[r]] -= factor


def cross_entropy_in_place(logits: Floats, targets: NDArray[np.int64], factor: float) -> NDArray[np.float64]:  # [R, V], [R] -> [R]
    """-ln p(target) of each row. The logits become the gradient of `factor` times the sum of these: (p - [target]) factor.

    exp is the contract's, its sum is in float64; p = exp(logit - largest) * float32(factor / sum). The logarithm is the math library's.
    """
    sums, offset = np.empty(len(logits)), np.empty(len(logits))
    ones = np.ones(logits.shape[1], np.float32)
    launch(_cross_entropy, 16 * logits.size, logits, ones, targets, np.float32(factor), sums, offset)
    return np.log(sums) + offset


@parallel
def _add_rows(team, out, x, order, runs, tokens):
    room = np.empty(SPAN, np.float32)
    for panel in shared(team, (x.shape[1] + SPAN - 1) // SPAN):
        first, end = panel * SPAN, min(panel * SPAN + SPAN, x.shape[1])
        total = room[: end - first]
        for run in range(runs.size - 1):
            for i in range(total.size):
                total[i] = 0
            for n in range(runs[run + 1] - runs[run]):
                row = x[order[runs[run] + n], first:end]
                for i in range(total.size):
                    total[i] += row[i]
            target = out[tokens[order[runs[run]]], first:end]
            for i in range(total.size):
                target[i] += total[i]


def add_rows(out: Floats, x: Floats, tokens: NDArray[np.int64], cuts: NDArray[np.int64]) -> None:  # [V, D], [R, D], [R], cuts of R
    """out[token] += the rows of x that have this token. Rows of a sequence are summed in order, and sequences one after another."""
    sequence = np.repeat(np.arange(len(cuts) - 1), np.diff(cuts))
    order = np.lexsort((tokens, sequence))  # stable: rows of a token stay in order
    changes = (np.diff(tokens[order]) != 0) | (np.diff(sequence[order]) != 0)
    runs = np.concatenate([[0], np.flatnonzero(changes) + 1, [len(tokens)]])
    launch(_add_rows, x.size, out, x, order, runs, tokens)


def column_sums(x: Floats, cuts: NDArray[np.int64]) -> Floats:  # [R, N], cuts of R -> [N]
    """The sum of the rows. Rows of a sequence are summed in order, and sequences one after another."""
    out = np.zeros((1, x.shape[1]), np.float32)
    add_rows(out, x, np.zeros(len(x), np.int64), cuts)
    return out[0]
