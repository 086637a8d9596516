"""`bitnet-np trace`: which tensors it writes, and what it says of them."""

import numpy as np
import pytest
from command_line import TINY

from bitnet_np.cli import trace
from bitnet_np.cli.trace import attention_maps, show_layers
from bitnet_np.traces.formats import read_any


def test_the_command_in_json(run, tmp_path):
    path = tmp_path / "t"
    result = run("trace", TINY, "--tokens", "1,2", "--scores", "--layers", "1-1", "--out", path, "--format", "npy", "--json")
    assert (result["format"], result["tokens"], result["dialect"]) == ("npy", 2, "exact")
    assert {"name": "kq", "layer": 1, "shape": [4, 2, 2], "bytes": 64} in result["points"]
    assert result["bytes"] == sum(point["bytes"] for point in result["points"])
    assert {str(key) for key in read_any(path).points} == {file.stem for file in path.iterdir()} - {"tokens"}


def test_layers_are_shown_in_short():
    assert show_layers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert show_layers([None]) == "-"


def test_attention_maps_are_drawn(run, refused, tmp_path, monkeypatch):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    picture, scores = tmp_path / "p.png", ("trace", TINY, "--tokens", "1,2,3", "--out", tmp_path / "t.npz", "--scores", "--plot")
    run(*scores, picture, "--layers", "0,2", "--names", "l_out")
    assert picture.read_bytes().startswith(b"\x89PNG")
    first, last = np.tri(3) * np.arange(1, 3)[:, None, None] / 4, np.tri(3) / 8
    figure = attention_maps({0: first, 2: np.stack([last, last])})
    drawn, axes = figure.axes[0].images[0].get_array().filled(np.nan), figure.axes[0]
    assert drawn.shape == (8, 8)  # two maps of 3 x 3 each way, with a line behind each
    np.testing.assert_array_equal(drawn[4:7, 4:7], np.where(last > 0, last, np.nan))  # head 1 of layer 2: what is not seen is blank
    np.testing.assert_array_equal(drawn[2, :7], [0.25] * 3 + [np.nan] + [0.5] * 3)  # the last query of layer 0
    assert [label.get_text() for label in axes.get_yticklabels()] == ["0", "2"]
    pyplot.close(figure)
    assert "only --scores computes them" in refused(*(x for x in scores if x != "--scores"), picture)
    monkeypatch.setattr(trace, "_MOST_DRAWN", 3 * 4 * 9 - 1)
    assert "choose fewer --layers" in refused(*scores, picture)
