"""Recording a trace: the right points, in normal form, as soon as they are there, and no file unless it is whole."""

import argparse
import json
import re
from pathlib import Path

import numpy as np
import pytest
from models import assert_same_bits, random_model, random_tokens

from bitnet_np import spec
from bitnet_np.cli import trace as trace_command
from bitnet_np.dialects import BITNET_CPP, EXACT
from bitnet_np.embedded import model_path
from bitnet_np.errors import EmptyInputError, NonFiniteError, OptionError, ShapeError, TokenRangeError
from bitnet_np.families import FAMILIES
from bitnet_np.files.load import load
from bitnet_np.forward_pass import forward_full
from bitnet_np.traces.formats import read_any
from bitnet_np.traces.points import LAYER_NAMES, RECORDED, Key, Trace, key_of, normal_shape
from bitnet_np.traces.record import NAMES, Recorder, record_trace, scores

DATA = Path(__file__).parents[1] / "data"
T = 9


@pytest.fixture(scope="module")
def model():
    return random_model(5, n_layers=3)


@pytest.fixture(scope="module")
def tokens(model):
    return random_tokens(np.random.default_rng(2), model, T)


@pytest.fixture(scope="module")
def tiny():
    with model_path() as path:
        return load(path)


@pytest.fixture
def collected():
    """What a forward pass records, copied."""
    points = {}

    def run(model, tokens, **how):
        forward_full(model, np.asarray(tokens)[None], record=lambda name, n, array: points.update({Key(name, n): array.copy()}), **how)
        return points

    return run


# --- points ---------------------------------------------------------------------------------------------------------------------------


def test_every_point_a_forward_pass_records_has_a_name_here(model, tokens, collected):
    assert {key.name for key in collected(model, tokens)} < set(RECORDED)
    seen = {key.name for family in FAMILIES for inner in (False, True) for key in every_point(family, inner)}
    assert seen == set(RECORDED)


def every_point(family, inner):
    """What two models of a family record: as it is, and with a norm in each linear."""
    seen = {}
    small = random_model(0, family=family, inner_norms=inner, weights="ternary", n_layers=1)
    forward_full(small, [[1, 2]], record=lambda name, n, array: seen.update({Key(name, n): array}))
    return seen


@pytest.mark.parametrize("name", LAYER_NAMES)
def test_labels_name_points(name):
    assert str(Key(name, 12)) == f"{name}-12"
    assert key_of(f"{name}-12") == Key(name, 12)
    assert key_of(name) is None


@pytest.mark.parametrize(
    "label", ["", "result_output-0", "attn_norm-01", "attn_norm--1", "attn_norm-٣", "../attn_norm-0", "l_out-0\n", "kqv-0"]
)
def test_other_labels_do_not(label):
    assert key_of(label) is None


@pytest.mark.parametrize(
    ("name", "shape", "rows", "expected"),
    [
        ("attn_norm", (17, 256), None, (17, 256)),
        ("attn_norm", (1, 17, 256), None, (17, 256)),
        ("attn_norm", (1, 1, 17, 256), None, (17, 256)),
        ("Qcur", (17, 4, 64), None, (17, 256)),
        ("Qcur", (1, 17, 4, 64), None, (17, 256)),
        ("Qcur", (1, 17, 256), 17, (17, 256)),
        ("Qcur", (1, 4, 64), 1, (1, 256)),
        ("Qcur", (1, 4, 64), None, (1, 256)),
        ("result_output", (512,), None, (1, 512)),
        ("kq", (1, 4, 17, 17), None, (4, 17, 17)),
        ("attn_norm_scale", (17, 1), None, (17,)),
        ("attn_norm_scale", (1, 1), None, (1,)),
    ],
)
def test_shapes_of_files_become_normal(name, shape, rows, expected):
    assert normal_shape(Key(name, 0), shape, rows, "f") == expected


@pytest.mark.parametrize("shape", [(), (0, 4), (2, 17, 256), (2, 1, 17, 4)])
def test_shapes_a_point_cannot_have_are_refused(shape):
    with pytest.raises(ValueError, match=r"f: 'attn_norm-0' has shape \["):
        normal_shape(Key("attn_norm", 0), shape, None, "f")


# --- recording ------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP], ids=lambda d: d.name)
def test_a_trace_holds_what_the_forward_pass_computes(model, tokens, collected, tmp_path, dialect):
    written = record_trace(model, tokens, tmp_path / "t.npz", dialect=dialect)
    expected, trace = collected(model, tokens, dialect=dialect), read_any(tmp_path / "t.npz")
    assert isinstance(trace, Trace)
    assert list(trace.points) == list(expected) == list(written)
    np.testing.assert_array_equal(trace.tokens, tokens)
    for key, array in expected.items():
        point = trace.points[key]
        assert point.dtype == array.dtype
        assert point.tobytes() == array.tobytes()
        assert point.shape == written[key][0] == (array.shape if array.ndim < 3 else (T, array.shape[1] * array.shape[2]))
        assert point.nbytes == written[key][1]


def test_layers_and_names_choose(model, tokens, tmp_path):
    record_trace(model, tokens[None], tmp_path / "t.npz", layers=[2], names=["l_out", "attn_norm_scale", "result_norm"])
    assert list(read_any(tmp_path / "t.npz").points) == [Key("attn_norm_scale", 2), Key("l_out", 2), Key("result_norm", None)]


def test_logits_are_not_computed_for_all_positions_unless_asked_for(model, tokens, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("bitnet_np.traces.record.forward_full", lambda *_, **how: asked.append(how["last_only"]) or forward_full(*_, **how))
    record_trace(model, tokens, tmp_path / "a.npz", names=["l_out"])
    record_trace(model, tokens, tmp_path / "b.npz", names=["result_output"])
    assert asked == [True, False]
    assert read_any(tmp_path / "b.npz").points[Key("result_output", None)].shape == (T, model.config.vocab)


@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP], ids=lambda d: d.name)
def test_scores_are_those_of_the_definition(model, tokens, collected, tmp_path, dialect):
    record_trace(model, tokens, tmp_path / "t.npz", names=["l_out"], scores=True, dialect=dialect)
    points, trace, c = collected(model, tokens, dialect=dialect), read_any(tmp_path / "t.npz"), model.config
    assert set(trace.points) == {Key(name, n) for n in range(3) for name in ("l_out", "kq", "kq_soft_max")}
    for n in range(3):
        q, k = (dialect.rounded(points[Key(name, n)]).astype(np.float64) for name in ("Qcur_rope", "Kcur_rope"))
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


def test_bitnet_cpps_own_graph_is_ours_in_its_dialect(tiny, tmp_path):
    """All points that it names and we do, its scores too, to 1e-5: the names mean the same."""
    ids = np.load(DATA / "bitnet_cpp_tiny.npz")["tokens_T17"]
    record_trace(tiny, ids, tmp_path / "t.npz", scores=True, dialect=BITNET_CPP)
    ours, theirs = read_any(tmp_path / "t.npz"), read_any(DATA / "bitnet_cpp_tiny_trace.npz", tokens=ids)
    quantised = {key for key in ours.points if key.name.endswith(("_codes", "_scale"))}
    assert set(theirs.points) == set(ours.points) - quantised
    assert len(theirs.points) == 3 * 19 + 3
    for key, point in theirs.points.items():
        assert point.shape == ours.points[key].shape
        seen = np.tri(17, dtype=bool) if key.name == "kq" else True
        np.testing.assert_allclose(np.where(seen, point, 0), ours.points[key], rtol=0, atol=1e-5, err_msg=str(key))


# --- refusals -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"layers": [3]}, "layer 3 is not there, the model has layers 0 to 2"),
        ({"layers": [-1]}, "layer -1 is not there"),
        ({"names": ["l_out", "attn"]}, "no point is named 'attn', expected some of attn_norm, "),
        ({"names": []}, "no name is chosen"),
        ({"layers": [], "names": ["l_out"]}, "no layer is chosen"),
        ({"format": "nodes"}, "format is 'nodes', expected one of npz, npy, "),
        ({"format": "aprt", "names": ["Qcur", "l_out"]}, "format aprt has no Qcur, only "),
        ({"format": "logits", "scores": True}, "format logits has no kq, kq_soft_max, only result_output"),
    ],
)
def test_what_is_not_there_is_refused_before_anything_is_computed(model, tokens, tmp_path, how, message):
    with pytest.raises(OptionError, match=message):
        record_trace(model, tokens, tmp_path / "t.npz", **how)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", ["npz", "npy", "safetensors", "llama-logits"])
def test_the_folder_to_write_into_must_be_there(model, tokens, tmp_path, format):
    """And is named, not the file beside it that is written first."""
    out = tmp_path / "no" / "t"
    with pytest.raises(OptionError, match=re.escape(f"{out}: there is no folder {out.parent}")):
        record_trace(model, tokens, out, format=format)


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


def test_the_names_a_recorder_knows_are_those_it_can_give(model):
    assert Recorder(lambda key, array: None, model.config, names=NAMES).names == set(NAMES)


@pytest.mark.parametrize("format", ["npz", "npy", "safetensors", "aprt"])
def test_a_model_that_overflows_leaves_no_file(tokens, tmp_path, format):
    with pytest.raises(NonFiniteError), np.errstate(all="ignore"):
        record_trace(random_model(5, gain=1e30), tokens, tmp_path / "t", format=format)
    assert not list(tmp_path.iterdir())


# --- the command ----------------------------------------------------------------------------------------------------------------------


def command(*arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", action="store_true")
    trace_command.add_arguments(parser)
    with model_path() as path:
        return trace_command.run(parser.parse_args([str(path), *map(str, arguments)]))


def test_the_command_writes_and_says_what(tmp_path, capsys):
    assert command("--tokens", "1,2,3", "--layers", "0,1-2", "--names", "l_out,attn_norm_codes", "--out", tmp_path / "t.safetensors") == 0
    out = capsys.readouterr().out
    assert "safetensors, 6 points of 3 tokens, dialect exact" in out
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["name", "layers", "shape", "bytes"],
        ["attn_norm_codes", "0-2", "3", "x", "256", "2,304"],
        ["l_out", "0-2", "3", "x", "256", "9,216"],
        ["all", "11,520"],
    ]
    assert len(read_any(tmp_path / "t.safetensors").points) == 6


def test_the_command_in_json(tmp_path, capsys):
    assert command("--tokens", "1,2", "--scores", "--layers", "1", "--out", tmp_path / "t", "--format", "npy", "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["tokens"], found["dialect"]) == ("npy", 2, "exact")
    assert {"name": "kq", "layer": 1, "shape": [4, 2, 2], "bytes": 64} in found["points"]
    assert found["bytes"] == sum(point["bytes"] for point in found["points"])
    assert {str(key) for key in read_any(tmp_path / "t").points} == {path.stem for path in (tmp_path / "t").iterdir()} - {"tokens"}


@pytest.mark.parametrize("layers", ["", "a", "1-", "-1", "3-1", "0,,1", "0-99999999", "٣"])
def test_the_command_refuses_layers_that_are_none(tmp_path, layers):
    with pytest.raises(OptionError, match="--layers"):
        command("--tokens", "1", f"--layers={layers}", "--out", tmp_path / "t.npz")


def test_layers_are_shown_in_short():
    assert trace_command.show_layers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert trace_command.show_layers([None]) == "-"


def test_the_bits_are_those_of_the_pass_without_recording(model, tokens, tmp_path):
    record_trace(model, tokens, tmp_path / "t.npy")
    assert_same_bits(np.load(tmp_path / "t.npy"), forward_full(model, tokens[None])[0])
