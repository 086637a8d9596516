"""Arrays by label as JSON."""

import json

import numpy as np
import pytest

from bitnet_np.base.errors import FileFormatError
from bitnet_np.traces.formats import detect, read_any
from bitnet_np.traces.points import Key

LOGITS = np.random.default_rng(0).standard_normal((3, 7)).astype(np.float32)


def written(path, value):
    path.write_text(json.dumps(value))
    return path


def test_arrays_come_back_to_the_bit_and_what_is_no_array_is_left_out(tmp_path):
    value = {"model": "tiny", "seconds": 0.5, "tokens": [1, 2, 3], "logits": LOGITS.tolist(), "l_out-0": LOGITS[None].tolist()}
    path = written(tmp_path / "t.json", value)
    assert detect(path) == "json"
    trace = read_any(path)
    assert trace.tokens.tolist() == [1, 2, 3]
    assert set(trace.points) == {Key("result_output", None), Key("l_out", 0)}
    for array in trace.points.values():
        assert (array.dtype, array.tobytes()) == (np.float32, LOGITS.tobytes())
    assert trace.ignored == ("model", "seconds")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"logits": [[1.0, 2.0], [3.0]]}, "'logits' has lists of several lengths"),
        ({"logits": [["1", "2"]]}, "'logits' has other values than numbers"),
        ({"logits": None}, "no point of a forward pass in it"),
        ([], "a file that starts with|expected an object of arrays"),
    ],
)
def test_other_values_are_refused(tmp_path, value, message):
    with pytest.raises(FileFormatError, match=message):
        read_any(written(tmp_path / "t.json", value), format="json")
