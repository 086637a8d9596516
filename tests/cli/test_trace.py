"""`bitnet-np trace`: which tensors it writes, and what it says of them."""

from command_line import TINY

from bitnet_np.judge.report.text import show_layers
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
