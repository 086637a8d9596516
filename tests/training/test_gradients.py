"""Training's gradients: spec_grad.py against finite differences and torch, the kernels against it, and what may not change a bit."""

import json
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import contract
import gradient_bounds
import numpy as np
import pytest
from bounds import assert_within
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from models import assert_same_bits, random_model, seeds, threads

from bitnet_np import packing, spec, spec_grad, ternarize
from bitnet_np.cli import main as cli
from bitnet_np.embedded import model_path
from bitnet_np.errors import ContextLimitError, EmptyInputError, NonFiniteError, OptionError, ShapeError, TokenRangeError, UnsupportedError
from bitnet_np.families import FAMILIES, layer_shapes
from bitnet_np.files.load import load
from bitnet_np.kernels import backward, cpu
from bitnet_np.model import Config
from bitnet_np.nll import token_nll
from bitnet_np.testing import write_gguf
from bitnet_np.traces.formats import read_any
from bitnet_np.traces.points import Key, gradient_key
from bitnet_np.training.gradients import loss_and_gradients, parameter_shapes, parameters_of, quantize

DATA = Path(__file__).parents[1] / "data" / "hf_gradients"
SHAPE = {"vocab": 11, "width": 12, "n_layers": 2, "ffn": 10, "heads": 4, "kv_heads": 2, "head_dim": 4, "context": 300}
FAMILY = st.sampled_from(["bitnet-b1.58", "bitnet", "llama", "qwen2"])
WINDOW = st.sampled_from([None, 1, 3, 70])
SMOOTH = {"activations": spec_grad.smooth, "weights": spec_grad.smooth}


def config_of(family, **shape):
    told = {"eps": 1e-5, "rope_base": 100.0, **SHAPE, **FAMILIES[family].config}
    return Config(family, **{**told, **shape})


def random_parameters(rng, config, tied, dtype=np.float32):
    """Norms around 1 and rows of about unit length, so that every part matters; biases where the family may have them."""

    def draw(shape):
        return rng.normal(1, 0.3, shape) if len(shape) == 1 else rng.normal(size=shape) / shape[1] ** 0.5

    found = {name: draw(shape).astype(dtype) for name, shape in parameter_shapes(config, tied).items()}
    told = FAMILIES[config.architecture]
    for n in range(config.n_layers):
        for field in told.biases + told.optional_biases:
            found[f"blk.{n}.{field}.bias"] = rng.normal(0, 0.3, layer_shapes(config)[field][0]).astype(dtype)
    found["token_embd.weight"] *= 3
    return found


def wide(parameters):
    return {name: value.astype(np.float64) for name, value in parameters.items()}


def summed(config, parameters, sequences, **how):
    """spec_grad's loss and gradients of a batch."""
    divisor = sum(len(sequence) - 1 for sequence in sequences)
    parts = [spec_grad.loss_and_gradients(config, wide(parameters), sequence, divisor=divisor, **how) for sequence in sequences]
    return sum(loss for loss, _ in parts), {name: sum(gradients[name] for _, gradients in parts) for name in parameters}


def assert_near(ours, theirs):
    """Each gradient's error is a small part of its own size, as on the few models that are fixed here."""
    assert list(ours) == list(theirs)
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name] - gradient) <= 2e-5 * np.linalg.norm(gradient), name


@contextmanager
def rounded_backward(rng, part):
    """What the definition gives back through norms and attention, off by `part` of what float32 may be there, up or down.

    These are differences, which may nearly cancel: a row of one number has a norm whose gradient is 0 but for eps.
    """

    def off(bounded, shape):
        expected, bound = bounded
        return (expected + part * bound * rng.choice([-1, 1], bound.shape)).reshape(shape)

    def rms_norm(x, gain, eps):
        def back(dy):
            return tuple(map(off, gradient_bounds.rms_norm_back(x, gain, eps, dy, np.array([0, len(x)])), (x.shape, gain.shape)))

        return spec.rms_norm(x, gain, eps), back

    def attend(q, k, v, mask):
        def back(dy):
            return tuple(map(off, gradient_bounds.attend_back(q, k, v, dy, mask), (q.shape, k.shape, v.shape)))

        return spec.attend(q, k, v, mask), back

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spec_grad, "rms_norm", rms_norm)
        patch.setattr(spec_grad, "attend", attend)
        yield


def reached(rng, config, parameters, sequences, theirs, **how):
    """How far each gradient moves, by its norm, when every parameter changes by a part 2^-20 up or down, and what norms and attention give
    back by an eighth of what float32 may be off there at worst: 2.5 times the root mean square.

    Random models differ: where a sub-norm divides by nearly nothing, roundings go a hundred times as far. What is measured is a change by
    2^-30, which float64 resolves and which flips no code, times 2^10. Float32's roundings, all together, stay below a change by 2^-20.
    A gradient that moves in one direction only has draws near 0, so that few of them say little about the next: hence sixteen.
    """
    draws = 16
    squares = dict.fromkeys(theirs, 0.0)
    for _ in range(draws):
        moved = {name: value * (1 + 2.0**-30 * rng.choice([-1, 1], value.shape)) for name, value in wide(parameters).items()}
        with rounded_backward(rng, 2.0**-13):
            _, gradients = summed(config, moved, sequences, **how)
        squares = {name: total + np.sum((gradients[name] - theirs[name]) ** 2) for name, total in squares.items()}
    return {name: 2.5 * 2.0**10 * (total / draws) ** 0.5 for name, total in squares.items()}


def assert_within_reach(ours, theirs, reach):
    assert list(ours) == list(theirs)
    for name, gradient in theirs.items():
        assert np.linalg.norm(ours[name] - gradient) <= reach[name], name


# --- the definition -------------------------------------------------------------------------------------------------------------------


def slope(run, parameters, name, direction, step):
    """The derivative of the loss along a direction of one parameter, by the central difference of order four."""
    values = [run({**parameters, name: parameters[name] + n * step * direction}) for n in (-2, -1, 1, 2)]
    return (values[0] - values[3] + 8 * (values[2] - values[1])) / (12 * step)


@settings(max_examples=20)
@given(
    seed=seeds,
    family=FAMILY,
    tied=st.booleans(),
    kv_heads=st.sampled_from([1, 2, 4]),
    length=st.integers(2, 9),
    window=WINDOW,
    pairs=st.sampled_from(["halves", "adjacent"]),
)
def test_the_definition_agrees_with_finite_differences(seed, family, tied, kv_heads, length, window, pairs):
    """In a random direction of each parameter. Losses of about 10 have 2e-15 of rounding, which a step of 3e-4 makes 1e-11."""
    rng = np.random.default_rng(seed)
    config = config_of(family, kv_heads=kv_heads, window=window, rope=pairs)
    parameters = random_parameters(rng, config, tied, np.float64)
    tokens = rng.integers(0, config.vocab, length)
    _, gradients = spec_grad.loss_and_gradients(config, parameters, tokens, **SMOOTH)
    for name, value in parameters.items():
        direction = rng.normal(size=value.shape)
        direction /= np.linalg.norm(direction)
        found = slope(lambda p: spec_grad.loss_and_gradients(config, p, tokens, **SMOOTH)[0], parameters, name, direction, 3e-4)
        assert abs(found - np.sum(gradients[name] * direction)) <= 1e-7 * np.linalg.norm(gradients[name]) + 1e-9, name


@given(seed=seeds, n=st.integers(1, 5), m=st.integers(1, 7))
def test_the_differentiated_scale_agrees_with_finite_differences(seed, n, m):
    """Of s clip(w / s, -1, 1), where no weight is at the clamp or at 0."""
    rng = np.random.default_rng(seed)
    w, dy, direction = rng.normal(size=(3, n, m))
    scale = spec_grad.absmean(w)
    assume(np.abs(np.abs(w) / scale - 1).min() > 1e-3 and np.abs(w).min() > 1e-3)
    value, back = spec_grad.ternary_differentiated(w, rint=lambda x: x)
    np.testing.assert_array_equal(value, np.clip(w / scale, -1, 1) * scale)

    def run(p):
        return np.sum(spec_grad.ternary_differentiated(p["w"], rint=lambda x: x)[0] * dy)

    size = np.linalg.norm(dy) * np.linalg.norm(direction)
    assert abs(slope(run, {"w": w}, "w", direction, 1e-5) - np.sum(back(dy) * direction)) <= 1e-8 * size
    np.testing.assert_array_equal(spec_grad.ternary_differentiated(w)[0], spec_grad.ternary(w)[0])


def test_quantisers_pass_gradients_straight_through():
    rng = np.random.default_rng(0)
    x, dy = rng.normal(size=(2, 5, 7))
    for quantizer in (spec_grad.int8, spec_grad.ternary):
        value, back = quantizer(x)
        assert np.abs(value - x).max() > 1e-3
        np.testing.assert_array_equal(back(dy), dy)


@pytest.fixture(scope="module", params=["relu2_tied", "silu_untied"])
def recorded(request):
    return np.load(DATA / f"{request.param}.npz")


def parts_of(recorded, kind):
    return {name.removeprefix(kind): recorded[name] for name in recorded if name.startswith(kind)}


def test_the_definition_agrees_with_torch(recorded):
    """No code flips between two programs in float64, so every gradient agrees."""
    config = Config(**json.loads(str(recorded["config"])))
    loss, gradients = spec_grad.loss_and_gradients(config, wide(parts_of(recorded, "parameters/")), recorded["tokens"])
    assert loss == pytest.approx(float(recorded["loss"]), rel=1e-13)
    theirs = parts_of(recorded, "gradients/")
    assert set(theirs) == set(gradients)
    for name, gradient in theirs.items():
        np.testing.assert_allclose(gradients[name], gradient, rtol=0, atol=1e-10 * np.abs(gradient).max())


def test_the_kernels_agree_with_torch(recorded):
    config = Config(**json.loads(str(recorded["config"])))
    loss, gradients = loss_and_gradients(config, parts_of(recorded, "parameters/"), recorded["tokens"][None])
    assert loss == pytest.approx(float(recorded["loss"]), rel=1e-6)
    assert_near(gradients, {name: recorded[f"gradients/{name}"] for name in gradients})


# --- kernels --------------------------------------------------------------------------------------------------------------------------

cuts = st.lists(st.integers(1, 5) | st.sampled_from([63, 64, 65, 130]), min_size=1, max_size=4).map(lambda rows: np.cumsum([0, *rows]))
widths = st.integers(1, 20) | st.sampled_from([63, 64, 65, 130])


def normal(rng, *shape):
    """Rows of very different sizes, so that a number of a wrong row shows."""
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-4, 5, (shape[0], *[1] * (len(shape) - 1))))).astype(np.float32)


def folded(a, b, cuts):
    """The contract's sum over the first axis of both: a chain for each part, parts added in order."""
    total = None
    for first, end in pairwise(cuts):
        chain = np.zeros((a.shape[1], b.shape[1]), np.float32)
        for k in range(first, end):
            chain = contract.fma(a[k][:, None], b[k], chain)
        total = chain if total is None else total + chain
    return total


@given(seed=seeds, cuts=cuts, n=widths, m=widths)
def test_transposed_product(seed, cuts, n, m):
    rng = np.random.default_rng(seed)
    a, b = normal(rng, cuts[-1], n), normal(rng, cuts[-1], m)
    out = backward.transposed_product(a, b, cuts)
    assert_same_bits(out, folded(a, b, cuts))
    assert_within(out, *gradient_bounds.transposed_product(a, b, cuts))
    more = normal(rng, n, m)
    both = backward.transposed_product(a, b, cuts[:2], more.copy())
    assert_same_bits(both, more + folded(a, b, cuts[:2]))


@given(seed=seeds, rows=widths, n=widths | st.sampled_from([256, 257, 600]), m=widths)
def test_product(seed, rows, n, m):
    rng = np.random.default_rng(seed)
    a, b = normal(rng, rows, n), normal(rng, n, m)
    out = backward.product(a, b)
    cuts = backward.parts(n)
    assert np.diff(cuts).max() <= backward.PART
    assert_same_bits(out, folded(a.T, b, cuts))
    assert_within(out, *gradient_bounds.transposed_product(a.T, b, cuts))


@given(seed=seeds, n=widths, m=widths)
def test_dense(seed, n, m):
    codes = np.random.default_rng(seed).integers(-1, 2, (n, m)).astype(np.int8)
    found = backward.dense(packing.pack(codes, 0.75).codes, np.float32(0.75), (n, m))
    np.testing.assert_array_equal(found, codes * np.float32(0.75))


@given(seed=seeds, n=widths, m=widths)
def test_quantize_is_what_loading_a_folder_does(seed, n, m):
    w = normal(np.random.default_rng(seed), n, m)
    found, mean = quantize(w), max(ternarize.mean_magnitude(w), 1e-5)
    assert found.scale == np.float32(1 / (1 / mean))  # what divides is the inverse, as in transformers
    np.testing.assert_array_equal(packing.unpack(found), np.clip(np.rint(w * (1 / mean)), -1, 1))
    np.testing.assert_allclose(packing.unpack(found) * float(found.scale), spec_grad.ternary(w.astype(np.float64))[0], rtol=1e-7)


@given(seed=seeds, cuts=cuts, width=widths)
def test_rms_norm_back(seed, cuts, width):
    rng = np.random.default_rng(seed)
    x, dy, gain = normal(rng, cuts[-1], width), normal(rng, cuts[-1], width), normal(rng, 1, width)[0]
    dx, dgain = backward.rms_norm_back(x, gain, 1e-5, dy, cuts)
    for actual, bounded in zip((dx, dgain), gradient_bounds.rms_norm_back(x, gain, 1e-5, dy, cuts), strict=True):
        assert_within(actual, *bounded)


@pytest.mark.parametrize("name", ["relu2_gate_back", "silu_gate_back"])
@given(seed=seeds, rows=st.integers(1, 5), width=widths)
def test_gates_back(name, seed, rows, width):
    rng = np.random.default_rng(seed)
    gate, up, dy = (normal(rng, rows, width) for _ in range(3))
    found = getattr(backward, name)(gate, up, dy)
    for actual, bounded in zip(found, getattr(gradient_bounds, name)(gate, up, dy), strict=True):
        assert_within(actual, *bounded)


@given(seed=seeds, rows=st.integers(1, 5), width=widths, factor=st.sampled_from([1.0, 0.125, 1 / 2047]))
def test_cross_entropy(seed, rows, width, factor):
    rng = np.random.default_rng(seed)
    logits, targets = normal(rng, rows, width), rng.integers(0, width, rows)
    gradient = logits.copy()
    losses = backward.cross_entropy_in_place(gradient, targets, factor)
    expected_losses, expected_gradient = gradient_bounds.cross_entropy(logits, targets, float(np.float32(factor)))
    assert_within(losses, *expected_losses)
    assert_within(gradient, *expected_gradient)


@settings(max_examples=25)
@given(
    seed=seeds,
    cuts=cuts,
    kv_heads=st.sampled_from([1, 2]),
    group=st.sampled_from([1, 3]),
    width=st.sampled_from([2, 20, 64, 80]),
    window=WINDOW,
)
def test_attend_back(seed, cuts, kv_heads, group, width, window):
    """Each sequence by itself. Rows of about one size: scores of hundreds make probabilities of one key only."""
    rng = np.random.default_rng(seed)
    q, dy = rng.normal(size=(2, cuts[-1], kv_heads * group, width)).astype(np.float32)
    k, v = rng.normal(size=(2, cuts[-1], kv_heads, width)).astype(np.float32)
    k *= 3
    attended = np.concatenate(
        [cpu.attend(q[i:j], k[None, i:j], v[None, i:j], np.zeros(j - i, np.int64), np.arange(j - i), window) for i, j in pairwise(cuts)]
    )
    found = backward.attend_back(q, k, v, attended, dy, cuts, window)
    for i, j in pairwise(cuts):
        expected = gradient_bounds.attend_back(q[i:j], k[i:j], v[i:j], dy[i:j], spec.causal_mask(j - i, j - i, window=window))
        for actual, bounded in zip(found, expected, strict=True):
            assert_within(actual[i:j], *bounded)


@given(seed=seeds, cuts=cuts, width=widths, vocab=st.sampled_from([1, 2, 40]))
def test_add_rows_and_column_sums(seed, cuts, width, vocab):
    rng = np.random.default_rng(seed)
    x, tokens, before = normal(rng, cuts[-1], width), rng.integers(0, vocab, cuts[-1]), normal(rng, vocab, width)
    out = before.copy()
    backward.add_rows(out, x, tokens, cuts)
    assert_within(out, *gradient_bounds.add_rows(before, x, tokens))
    total = before.copy()
    for i, j in pairwise(cuts):
        for token in range(vocab):
            rows = x[i:j][tokens[i:j] == token]
            if len(rows):
                total[token] += np.add.accumulate(rows)[-1]
    np.testing.assert_array_equal(out, total)
    sums = backward.column_sums(x, cuts)
    assert_within(sums[None], *gradient_bounds.add_rows(np.zeros((1, width)), x, np.zeros(len(x), np.int64)))


# --- the whole pass -------------------------------------------------------------------------------------------------------------------


@settings(max_examples=12)
@given(
    seed=seeds,
    family=FAMILY,
    tied=st.booleans(),
    length=st.sampled_from([3, 9, 64, 65, 66, 130]),
    width=st.sampled_from([12, 33, 80]),
    window=WINDOW,
)
def test_float_gradients_are_the_definitions(seed, family, tied, length, width, window):
    """Two sequences. With a window of one key scores have no gradient at all, only roundings: not asked for here."""
    rng = np.random.default_rng(seed)
    window = None if window == 1 else window
    config = config_of(family, width=width, window=window, head_dim=int(rng.choice([2, 20, 64])), ffn=int(rng.choice([10, 70])))
    parameters = random_parameters(rng, config, tied)
    tokens = rng.integers(0, config.vocab, (2, length))
    loss, gradients = loss_and_gradients(config, parameters, tokens, weights="none")
    expected, theirs = summed(config, parameters, tokens, **SMOOTH)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_within_reach(gradients, theirs, reached(rng, config, parameters, tokens, theirs, **SMOOTH))


@settings(max_examples=20)
@given(seed=seeds, family=st.sampled_from(["bitnet-b1.58", "bitnet", "llama"]), tied=st.booleans(), length=st.sampled_from([3, 5, 9]))
def test_ternary_gradients_are_the_definitions_where_no_code_flips(seed, family, tied, length):
    """Float32 decides an activation's code as float64 does if it is 3e-4 steps from where the code changes."""
    rng = np.random.default_rng(seed)
    config = config_of(family)
    parameters = random_parameters(rng, config, tied)
    tokens = rng.integers(0, config.vocab, length)
    margins = []

    def watched(x):
        q, scale = spec.quantize(x)
        margins.append(0.5 - np.abs(x * scale - q).max())
        return spec_grad.int8(x)

    expected, theirs = summed(config, parameters, [tokens], activations=watched)
    assume(min(margins) > 3e-4)
    loss, gradients = loss_and_gradients(config, parameters, tokens[None])
    assert loss == pytest.approx(expected, rel=1e-6)
    assert_within_reach(gradients, theirs, reached(rng, config, parameters, [tokens], theirs))


@pytest.mark.parametrize("family", ["bitnet-b1.58", "bitnet", "llama"])
def test_nothing_changes_a_bit(family):
    """Threads, recomputation, quantising beforehand, a mask for padding; and a ragged batch of a model with a head of its own is the sum of
    its sequences in order.
    """
    rng = np.random.default_rng(1)
    config = config_of(family, width=80, ffn=150, head_dim=20, vocab=70)
    parameters = random_parameters(rng, config, False)
    lengths = np.array([9, 2, 130, 64])
    tokens = rng.integers(0, config.vocab, (4, 131))
    loss, gradients = loss_and_gradients(config, parameters, tokens, lengths)
    tokens[np.arange(131) >= lengths[:, None]] = -1
    with threads(4):
        again = loss_and_gradients(config, parameters, tokens, lengths)
    recomputed = loss_and_gradients(config, parameters, tokens, lengths, recompute=True)
    ternary = {name: quantize(value) if value.ndim == 2 and name.startswith("blk.") else value for name, value in parameters.items()}
    quantised = loss_and_gradients(config, ternary, tokens, lengths, weights="none")
    for other_loss, other in (again, recomputed, quantised):
        assert other_loss == loss
        for name in gradients:
            assert_same_bits(other[name], gradients[name])
    total, total_loss = {}, 0.0
    for row, length in zip(tokens, lengths, strict=True):
        alone_loss, alone = loss_and_gradients(config, parameters, row[None, :length], divisor=float(lengths.sum() - 4))
        total = {name: total[name] + alone[name] if total else alone[name] for name in alone}
        total_loss += alone_loss
    assert total_loss == pytest.approx(loss, rel=1e-14)
    for name in gradients:
        np.testing.assert_array_equal(gradients[name], total[name])


def test_the_head_takes_some_sequences_at_a_time(monkeypatch):
    rng = np.random.default_rng(2)
    config = config_of("bitnet-b1.58")
    parameters = random_parameters(rng, config, True)
    tokens = rng.integers(0, config.vocab, (5, 8))
    loss, gradients = loss_and_gradients(config, parameters, tokens)
    for rows in (1, 14, 15):
        monkeypatch.setattr("bitnet_np.training.gradients._LOGITS", rows * config.vocab)
        again, parts = loss_and_gradients(config, parameters, tokens)
        assert again == loss
        for name in gradients:
            assert_same_bits(parts[name], gradients[name])


def test_the_loss_is_that_of_inference():
    """token_nll of a model that has these quantised weights."""
    with model_path() as path:
        model = load(path)
    tokens = np.random.default_rng(3).integers(0, model.config.vocab, 40)
    loss, _ = loss_and_gradients(model.config, parameters_of(model), tokens[None], weights="none")
    assert loss == pytest.approx(token_nll(model, tokens).mean(), rel=1e-6)


def test_ropes_factors_are_no_parameters():
    model = random_model(4, family="llama", tied=False, table="float16")
    tokens = np.random.default_rng(4).integers(0, model.config.vocab, 20)
    parameters = parameters_of(model)
    loss, gradients = loss_and_gradients(model.config, parameters, tokens[None], weights="none")
    assert set(parameters) - set(gradients) == {"rope_freqs.weight"}
    assert loss == pytest.approx(token_nll(model, tokens).mean(), rel=1e-6)
    told = {name: value.astype(np.float64) for name, value in parameters.items() if name in gradients}
    _, theirs = spec_grad.loss_and_gradients(model.config, told, tokens, factors=model.rope_factors, **SMOOTH)
    assert_near(gradients, {name: theirs[name] for name in gradients})


# --- the border -----------------------------------------------------------------------------------------------------------------------


def call(config=None, drop=None, lengths=None, tokens=((1, 2, 3), (4, 5, 6)), change=(), **how):
    config = config or config_of("bitnet-b1.58")
    parameters = random_parameters(np.random.default_rng(5), config, True)
    parameters.pop(drop, None)
    return loss_and_gradients(config, {**parameters, **dict(change)}, tokens, lengths, **how)


@pytest.mark.parametrize(
    ("how", "error", "said"),
    [
        ({"weights": "int4"}, OptionError, "weights is 'int4', expected one of ternary, none"),
        ({"divisor": 0.0}, OptionError, "divisor is 0.0"),
        ({"divisor": float("nan")}, OptionError, "divisor is nan"),
        ({"drop": "blk.1.attn_q.weight"}, ShapeError, r"blk.1.attn_q.weight is missing, expected float32 \[16, 12\]"),
        ({"change": {"blk.2.attn_q.weight": np.zeros((16, 12), np.float32)}}, ShapeError, "'blk.2.attn_q.weight' has no place"),
        ({"change": {"blk.1.attn_q.bias": np.zeros(16, np.float32)}}, ShapeError, "'blk.1.attn_q.bias' has no place"),
        ({"change": {"output_norm.weight": np.zeros(12)}}, ShapeError, r"output_norm.weight is float64 \[12\], expected float32 \[12\]"),
        ({"change": {"output_norm.weight": np.zeros(13, np.float32)}}, ShapeError, r"float32 \[13\], expected float32 \[12\]"),
        ({"change": {"token_embd.weight": packing.pack(np.ones((11, 12)), 1.0)}}, ShapeError, "token_embd.weight is Ternary"),
        ({"change": {"blk.0.attn_q.weight": packing.pack(np.ones((16, 12)), 1.0)}, "weights": "none"}, UnsupportedError, "ternary and not"),
        ({"lengths": [3, 1]}, ShapeError, "sequence 1 has 1 token, expected at least 2"),
        ({"lengths": [3, 0]}, EmptyInputError, "sequence 1"),
        ({"lengths": [3, 4]}, ShapeError, r"lengths\[1\] is 4"),
        ({"tokens": [[1, 11]]}, TokenRangeError, "token 11"),
        ({"tokens": np.zeros((1, 301), np.int64)}, ContextLimitError, "sequence 0 has 301 tokens, the model's context is 300"),
        ({"config": config_of("qwen2"), "drop": "blk.0.attn_k.bias"}, ShapeError, "blk.0.attn_k.bias is missing"),
        ({"change": {"blk.0.attn_q.weight": np.full((16, 12), np.nan, np.float32)}}, NonFiniteError, "blk.0.attn_q.weight has NaN"),
        ({"change": {"output_norm.weight": np.full(12, 3e38, np.float32)}}, NonFiniteError, "leaves float32's range"),
    ],
)
def test_mistakes_are_named(how, error, said):
    with pytest.raises(error, match=said):
        call(**how)


@pytest.mark.parametrize("family", ["qwen3", "gptneox", "gpt2"])
def test_other_families_are_refused(family):
    with pytest.raises(UnsupportedError, match=f"architecture is '{family}'"):
        loss_and_gradients(config_of(family), {}, [[1, 2]])


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (random_model(1, family="bitnet"), "blk.0.attn_q has a factor"),
        (random_model(1, inner_norms=True), "blk.0.attn_q has a norm inside"),
        (random_model(1, family="qwen2"), "output.bias"),
        (random_model(1, family="llama", weights="TQ2_0", width=256, ffn=256, head_dim=64, heads=4, kv_heads=2), "TQ2_0 of several scales"),
    ],
)
def test_parameters_that_have_no_gradient_are_refused(model, said):
    with pytest.raises(UnsupportedError, match=said):
        parameters_of(model)


# --- the command ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def model_file(tmp_path):
    path = tmp_path / "model.gguf"
    write_gguf(path, random_model(6, table="float16", width=128, ffn=128, heads=4, kv_heads=2, head_dim=32))
    return path


def test_the_command_says_norms_and_writes_gradients(model_file, tmp_path, capsys):
    out = tmp_path / "ours.npz"
    assert cli.main(["grad", str(model_file), "--tokens", "1,2,3,4,5", "--json", "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    model = load(model_file)
    loss, gradients = loss_and_gradients(model.config, parameters_of(model), [[1, 2, 3, 4, 5]], weights="none")
    assert told["loss"] == loss
    assert {row["name"]: row["shape"] for row in told["gradients"]} == {name: list(g.shape) for name, g in gradients.items()}
    for row in told["gradients"]:
        assert row["norm"] == pytest.approx(np.linalg.norm(gradients[row["name"]].astype(np.float64)), rel=1e-12)
        assert row["max"] == np.abs(gradients[row["name"]]).max()
    trace = read_any(out)
    assert trace.tokens.tolist() == [1, 2, 3, 4, 5]
    assert trace.points[Key("loss", None)].tolist() == [[loss]]
    assert len(trace.points) == len(gradients) + 1
    for name, gradient in gradients.items():
        assert_same_bits(trace.points[gradient_key(name)].reshape(gradient.shape), gradient)
    assert cli.main(["grad", str(model_file), "--tokens", "1,2,3,4,5", "--recompute"]) == 0
    text = capsys.readouterr().out
    assert f"loss  {loss:.6f} nats a token (4 predicted)" in text
    assert "blk.1.ffn_down.weight" in text


def test_gradients_of_another_engine_are_judged(model_file, tmp_path, capsys):
    """By GGUF's names: the same, rounded, one matrix wrong, or one row of it."""
    out, theirs = tmp_path / "ours.npz", tmp_path / "theirs.npz"
    assert cli.main(["grad", str(model_file), "--tokens", "1,2,3,4,5", "--out", str(out)]) == 0
    model = load(model_file)
    _, gradients = loss_and_gradients(model.config, parameters_of(model), [[1, 2, 3, 4, 5]], weights="none")

    def verdict(**changed):
        np.savez(theirs, tokens=[1, 2, 3, 4, 5], **{**gradients, **changed})
        capsys.readouterr()
        code = cli.main(["compare", str(out), str(theirs), "--partial", "--json"])
        told = json.loads(capsys.readouterr().out)
        return code, told["verdict"], (told["first_wrong"] or {}).get("tensor")

    assert verdict() == (0, "SAME_BITS", None)
    name = "blk.1.attn_k.weight"
    assert verdict(**{name: gradients[name] * np.float32(1 + 2**-20)}) == (0, "ROUNDING", None)
    assert verdict(**{name: gradients[name] * np.float32(1.2)}) == (1, "WRONG", "grad_attn_k")
    assert verdict(**{name: -gradients[name]}) == (1, "WRONG", "grad_attn_k")
    assert verdict(**{name: gradients[name] * np.nan})[:2] == (2, "INVALID")
    table = gradients["token_embd.weight"].copy()
    table[3] = table[4]
    assert verdict(**{"token_embd.weight": table}) == (1, "WRONG", "grad_token_embd")
    table[3] = 0
    assert verdict(**{"token_embd.weight": table})[:2] == (2, "INVALID")
    assert cli.main(["check", str(model_file), "--tokens", "1,2,3,4,5", "--theirs", str(out)]) == 2  # no tensor of a forward pass


def test_a_format_without_gradients_is_refused(model_file, tmp_path, capsys):
    assert cli.main(["grad", str(model_file), "--tokens", "1,2", "--out", str(tmp_path / "g.kld")]) == 2
    assert "has no gradients" in capsys.readouterr().err
    assert not (tmp_path / "g.kld").exists()
