"""Recording a trace: the chosen points, in normal form, as soon as they are computed, and no file unless it is whole."""

import numpy as np
import pytest
from models import assert_same_bits, random_model, random_tokens
from recorder import record_all

from bitnet_np import spec
from bitnet_np.base.errors import EmptyInputError, NonFiniteError, OptionError, ShapeError, TokenRangeError
from bitnet_np.engine.dialects import BITNET_CPP, EXACT
from bitnet_np.engine.forward_pass import forward_full, run_whole
from bitnet_np.kernels import cpu
from bitnet_np.traces.formats import read_any
from bitnet_np.traces.points import Key
from bitnet_np.traces.record import record_trace, scores

T = 9


@pytest.fixture(scope="module")
def model():
    return random_model(5, n_layers=3)


@pytest.fixture(scope="module")
def tokens(model):
    return random_tokens(np.random.default_rng(2), model, T)


def test_every_point_is_recorded_and_the_bits_are_those_of_the_pass_without_it(model, tokens, tmp_path):
    written = record_trace(model, tokens, tmp_path / "t.npz")
    points = read_any(tmp_path / "t.npz").points
    assert list(points) == list(record_all(model, tokens)) == list(written)
    assert_same_bits(points[Key("result_output", None)], forward_full(model, tokens[None])[0])


def test_layers_and_names_choose(model, tokens, tmp_path):
    record_trace(model, tokens[None], tmp_path / "t.npz", layers=[2], names=["l_out", "attn_norm_scale", "result_norm"])
    assert list(read_any(tmp_path / "t.npz").points) == [Key("attn_norm_scale", 2), Key("l_out", 2), Key("result_norm", None)]


def test_logits_are_not_computed_for_all_positions_unless_asked_for(model, tokens, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("bitnet_np.traces.record.run_whole", lambda *_, **how: asked.append(how["last_only"]) or run_whole(*_, **how))
    record_trace(model, tokens, tmp_path / "a.npz", names=["l_out"])
    record_trace(model, tokens, tmp_path / "b.npz", names=["result_output"])
    assert asked == [True, False]
    assert read_any(tmp_path / "b.npz").points[Key("result_output", None)].shape == (T, model.config.vocab)


@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP], ids=lambda d: d.name)
def test_scores_are_those_of_the_definition(model, tokens, tmp_path, dialect):
    record_trace(model, tokens, tmp_path / "t.npz", names=["l_out"], scores=True, dialect=dialect)
    points, trace, c = record_all(model, tokens, dialect=dialect), read_any(tmp_path / "t.npz"), model.config
    assert set(trace.points) == {Key(name, n) for n in range(3) for name in ("l_out", "kq", "kq_soft_max")}
    for n in range(3):
        q, k = (dialect.rounded(points[Key(name, n)], cpu).astype(np.float64) for name in ("Qcur_rope", "Kcur_rope"))
        one = np.eye(T)[:, None].repeat(c.kv_heads, axis=1)  # values that show the probabilities
        expected = spec.attend(q, k, one, spec.causal_mask(T, T)).swapaxes(0, 1)
        np.testing.assert_allclose(trace.points[Key("kq_soft_max", n)], expected, rtol=1e-6, atol=1e-12)
        kq = trace.points[Key("kq", n)].astype(np.float64)
        assert not kq[:, ~np.tri(T, dtype=bool)].any()
        masked = np.exp(kq + spec.causal_mask(T, T))
        np.testing.assert_allclose(masked / masked.sum(axis=-1, keepdims=True), expected, rtol=1e-5, atol=1e-12)


def test_scores_survive_large_numbers():
    q = np.full((3, 1, 2), 1e18, np.float32)
    (_, kq), (_, probabilities) = scores(q, q)
    assert np.isfinite(kq).all()
    np.testing.assert_array_equal(probabilities[0], np.tri(3, dtype=np.float32) / np.array([[1], [2], [3]], np.float32))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layers": [3]}, "layer is 3, expected 0 to 2"),
        ({"names": ["l_out", "attn"]}, r"no point is named 'attn', did you mean attn_norm\?$"),
        ({"names": ["l_out", "xyz"]}, "no point is named 'xyz', expected some of attn_norm, "),
        ({"names": ["l_out", 3]}, "no point is named 3, expected some of attn_norm, "),
        ({"names": []}, "no name is chosen"),
        ({"layers": [], "names": ["l_out"]}, "no layer is chosen"),
        ({"format": "nodes"}, "format is 'nodes', expected one of npz, npy, "),
        ({"format": "aprt", "names": ["Qcur", "l_out"]}, "format aprt has no Qcur, only "),
        ({"format": "logits", "scores": True}, "format logits has no kq, kq_soft_max, only result_output"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_computed(model, tokens, tmp_path, how, message):
    with pytest.raises(OptionError, match=message):
        record_trace(model, tokens, tmp_path / ("t" if "format" in how else "t.npz"), **how)
    assert not list(tmp_path.iterdir())


def test_a_name_without_a_known_ending_needs_a_format(model, tokens, tmp_path):
    with pytest.raises(OptionError, match=r"t\.trace: no format is given, expected one, or a name that ends in \.f32, \.jsonl, "):
        record_trace(model, tokens, tmp_path / "t.trace")


@pytest.mark.parametrize(
    ("wrong", "error"),
    [([], EmptyInputError), ([[]], EmptyInputError), ([1, 50], TokenRangeError), ([[1, 2], [3, 4]], OptionError), ([1.5], ShapeError)],
)
def test_tokens_are_checked(model, tmp_path, wrong, error):
    with pytest.raises(error):
        record_trace(model, wrong, tmp_path / "t.npz")
    assert not list(tmp_path.iterdir())


def test_a_model_that_overflows_leaves_no_file(tokens, tmp_path):
    with pytest.raises(NonFiniteError), np.errstate(all="ignore"):
        record_trace(random_model(5, gain=1e30), tokens, tmp_path / "t.npz")
    assert not list(tmp_path.iterdir())
