"""Dumps of a ggml graph's nodes: bitnet.cpp's own becomes our points."""

import numpy as np
import pytest

from bitnet_np.base.errors import FileFormatError
from bitnet_np.traces.formats import nodes
from bitnet_np.traces.points import Key


def test_calls_are_told_apart(tmp_path):
    arrays = {f"s{call}.l_out-0.ADD": np.full((1, 1, rows, 4), call, np.float32) for call, rows in ((1, 1), (0, 3))}
    np.savez(tmp_path / "t.npz", **arrays)
    for call, rows in ((0, 3), (1, 1)):
        trace = nodes.read(tmp_path / "t.npz", call=call).trace()
        assert trace.points[Key("l_out", 0)].shape == (rows, 4)
        assert trace.ignored == (f"s{1 - call}.l_out-0.ADD",)
    with pytest.raises(FileFormatError, match="no point of a forward pass"):
        nodes.read(tmp_path / "t.npz", call=2).trace()


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Qcur-0.ROPE", (2, 3, 4, 5)),
        ("l_out-0.ADD", (2, 3, 4)),
        ("l_out-0.ADD", (1, 1, 0, 4)),
        ("kq-0.MUL_MAT", (1, 2, 5, 3)),
        ("kq-0.MUL_MAT", (5,)),
    ],
)
def test_nodes_of_other_shapes_are_refused(tmp_path, name, shape):
    arrays = {"s0.Qcur-0.ROPE": np.ones((1, 5, 2, 4), np.float32)} | {f"s0.{name}": np.ones(shape, np.float32)}
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(FileFormatError, match="has shape"):
        nodes.read(tmp_path / "t.npz").trace()
