"""`bitnet-np trace`: which tensors it writes, and what it says of them."""

from command_line import TINY

from bitnet_np.cli.trace import show_layers
from bitnet_np.traces.formats import read_any


def test_the_command_writes_and_says_what(run, tmp_path):
    path = tmp_path / "t.safetensors"
    out = run("trace", TINY, "--tokens", "1,2,3", "--layers", "0,1-2", "--names", "l_out,attn_norm_codes", "--out", path)
    assert "safetensors, 6 points of 3 tokens, dialect exact" in out
    assert [line.split() for line in out.splitlines()[2:]] == [
        ["name", "layers", "shape", "bytes"],
        ["attn_norm_codes", "0-2", "3", "x", "256", "2,304"],
        ["l_out", "0-2", "3", "x", "256", "9,216"],
        ["all", "11,520"],
    ]
    assert len(read_any(path).points) == 6


def test_the_command_in_json(run, tmp_path):
    path = tmp_path / "t"
    result = run("trace", TINY, "--tokens", "1,2", "--scores", "--layers", "1", "--out", path, "--format", "npy", "--json")
    assert (result["format"], result["tokens"], result["dialect"]) == ("npy", 2, "exact")
    assert {"name": "kq", "layer": 1, "shape": [4, 2, 2], "bytes": 64} in result["points"]
    assert result["bytes"] == sum(point["bytes"] for point in result["points"])
    assert {str(key) for key in read_any(path).points} == {file.stem for file in path.iterdir()} - {"tokens"}


def test_layers_are_shown_in_short():
    assert show_layers([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert show_layers([None]) == "-"
