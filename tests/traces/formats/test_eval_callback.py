"""llama-eval-callback's text: which numbers of which tensors it has, and what is refused."""

import time

import numpy as np
import pytest
from models import random_model
from printed_nodes import LLAMA, printed, printed_trace
from recorder import record_all

from bitnet_np.base.errors import FileFormatError, UnsupportedError
from bitnet_np.traces.formats import detect, eval_callback, read_any
from bitnet_np.traces.points import Key

MODEL = random_model(0, family="llama", weights="float32", n_layers=2, heads=4, kv_heads=2)
IDS = [7, 3, 11, 3, 0, 5, 1, 2]
POINTS = {key: array.reshape(len(IDS), -1) for key, array in record_all(MODEL, IDS).items()}
HEADS = {"Q": 4, "K": 2}


@pytest.fixture
def write(tmp_path):
    def write(text):
        (tmp_path / "t.txt").write_text(text)
        return tmp_path / "t.txt"

    return write


@pytest.mark.parametrize("function", ["ggml_debug", "common_debug_cb_eval"])
def test_every_printed_number_is_at_its_place(write, function):
    path = write(printed_trace(POINTS, HEADS, function))
    assert detect(path) == "eval-callback"
    trace = eval_callback.read(path)
    assert {(t.key.name, t.key.layer) for t in trace.tensors} == {key for key in POINTS if key[0] in LLAMA}
    assert trace.ignored == ("norm-0", "norm-1")
    for tensor in trace.tensors:
        ours = POINTS[tensor.key]
        assert tensor.shape == ours.shape
        assert len(np.unique(tensor.index, axis=0)) == len(tensor.values) > 0
        np.testing.assert_allclose(tensor.values, ours[tuple(tensor.index.T)], rtol=0, atol=eval_callback.PRINTED * 1.001)
        assert tensor.sum == pytest.approx(ours.sum(dtype=np.float64), abs=1e-3)
    by_key = {t.key: t for t in trace.tensors}
    assert len(by_key[Key("l_out", 0)].values) == 36  # three from each end of both axes


def test_a_bias_replaces_what_it_is_added_to_and_a_second_call_is_not_read(write):
    rows = np.arange(16.0).reshape(2, 8)
    text = printed("inp_embd", "GET_ROWS", rows) + printed("Qcur-0", "MUL_MAT", rows) + printed("Qcur-0", "ADD", rows + 1)
    trace = eval_callback.read(write(text + printed("inp_embd", "GET_ROWS", rows[:1]) + printed("l_out-0", "ADD", rows[:1])))
    assert [str(t.key) for t in trace.tensors] == ["inp_embd", "Qcur-0"]
    np.testing.assert_array_equal(trace.tensors[1].values, [1, 2, 3, 6, 7, 8, 9, 10, 11, 14, 15, 16])


def test_it_is_no_whole_trace(write):
    with pytest.raises(
        UnsupportedError, match=r"some numbers of each tensor only, read them with bitnet_np\.traces\.formats\.eval_callback\.read"
    ):
        read_any(write(printed_trace(POINTS, HEADS)))


L_OUT = printed("l_out-0", "ADD", np.ones((2, 8)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (L_OUT.replace("1.0000,", "1.0000, 2.0000,", 1), "has 1[0-9] numbers and no sum, expected 12 and a sum"),
        (L_OUT.replace("1.0000,", "", 1), "has 11 numbers and a sum, expected 12"),
        (L_OUT.partition("sum")[0], "has 12 numbers and no sum"),
        (L_OUT.replace("{8, 2, 1, 1}", "{8, 2, 1, 0}"), r"has the lengths \[8, 2, 1, 0\], expected width and tokens"),
        (L_OUT.replace("{8, 2, 1, 1}", "{8, 2, 3, 1}"), r"has the lengths \[8, 2, 3, 1\]"),
        (L_OUT.replace("{8, 2, 1, 1}", "{999999999999, 999999999999, 1, 1}"), "has 12 numbers and a sum, expected 36"),
        (L_OUT.replace("l_out-0", "other-0"), "no node that is a point of a forward pass, .* it has 'other-0'"),
    ],
)
def test_damaged_text_is_refused(write, text, message):
    with pytest.raises(FileFormatError, match=message):
        eval_callback.read(write(text))


def test_long_lines_are_read_in_time(write):
    line = "a: " + "x = (f32) ADD(" * 20_000
    start = time.process_time()
    with pytest.raises(FileFormatError):
        eval_callback.read(write((line + "\n") * 5))
    assert time.process_time() - start < 2
