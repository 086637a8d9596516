"""Small files of every format, to be damaged."""

import json

import numpy as np
import pytest
from printed_nodes import printed
from trace_files import LOGITS, READABLE, RECORD, TOKENS, T, all_points, contents, write_trace

from bitnet_np.traces.points import Key


@pytest.fixture(scope="session")
def samples(tmp_path_factory):
    """The `contents` of a small trace in every format that is read; "packed" is a compressed npz."""
    folder, files = tmp_path_factory.mktemp("samples"), {}
    points = all_points()
    small = {Key(name, 0): points[Key(name, 0)] for name in ("attn_norm", "attn_norm_codes", "attn_norm_scale", "kq", "l_out")}
    small[LOGITS] = points[LOGITS]
    for format in READABLE:
        write_trace(folder / format, format, small)
        files[format] = contents(folder / format)
    np.savez_compressed(folder / "packed", tokens=TOKENS, **{str(key): array for key, array in small.items()})
    files["packed"] = contents(folder / "packed.npz")
    graph = {"s0.attn_norm-0.MUL": (1, 1, T, 4), "s0.Qcur-0.ROPE": (1, T, 2, 2), "s0.kq-0.MUL_MAT": (1, 2, T, 32), "s0.norm.RMS_NORM": (4,)}
    np.savez(folder / "nodes", **{name: np.ones(shape, np.float32) for name, shape in graph.items()})
    files["nodes"] = contents(folder / "nodes.npz")
    files["bitnet-rs"] = {"": json.dumps(RECORD | {"seq": 3, "layer": -1, "stage": "logits"}).encode()}
    nodes = printed("l_out-0", "ADD", np.ones((2, 8))) + printed("Qcur-0", "ROPE", np.ones((2, 3, 8)))
    files["eval-callback"] = {"": nodes.encode()}
    return files
