"""Operations that were computed from another layer's tensor, an earlier chunk's, or one read at an offset."""

import numpy as np
import pytest
from wrong_tensors import IDS, LAYER, LLAMA, POINTS, T, judged, layer_points

from bitnet_np import EXACT
from bitnet_np.judge import graph
from bitnet_np.traces.points import Key

BEGIN = 9


def computed(name, **changed):
    """The tensor of the operation, some of its inputs changed by functions."""
    operation = next(o for o in graph.operations(LLAMA, EXACT) if o.key == Key(name, LAYER))
    points = layer_points("llama") | {"l_out": POINTS["llama"][Key("l_out", LAYER - 1)].astype(np.float64)}
    return operation.evaluate(*(changed.get(key.name, lambda x: x)(points[key.name]) for key in operation.inputs)).value


def late(by, flat):
    """Elements from `by` places on, and zeros at the end: of the tensor, or of each row."""

    def moved(x):
        rows = x.reshape(1, -1) if flat else x
        return np.concatenate([rows[:, by:], np.zeros((len(rows), by))], axis=1).reshape(x.shape)

    return moved


def early(x):
    return np.concatenate([[0.0, 0.0], x.ravel()[:-2]]).reshape(x.shape)


def chunk(x):
    return np.concatenate([x[:BEGIN], x[: T - BEGIN]])


def before(name):
    return lambda _: POINTS["llama"][Key(name, LAYER - 1)].astype(np.float64)


@pytest.mark.parametrize(
    ("name", "changed", "says"),
    [
        ("ffn_out", {"ffn_gate": before("ffn_gate")}, "ffn_gate of layer 0 is read instead of ffn_gate"),
        (
            "ffn_inp",
            {"l_out": chunk},
            f"the residual, l_out, is from position {BEGIN} on that of position 0 on: the rows of an earlier chunk",
        ),
        ("Vcur", {"attn_norm": late(1, flat=True)}, "attn_norm is read 1 element too late"),
        ("ffn_up", {"ffn_norm": early}, "ffn_norm is read 2 elements too early"),
        ("Vcur", {"attn_norm": late(4, flat=False)}, "attn_norm is read 4 elements too late, with zeros at the end of a row"),
    ],
)
def test_the_input_that_was_read_is_named(name, changed, says):
    assert judged("llama", name, computed(name, **changed)) == says


def test_the_right_input_is_not_called_another():
    assert IDS["llama"].size == T
    noise = np.random.default_rng(0).standard_normal(computed("ffn_inp").shape)
    assert "chunk" not in judged("llama", "ffn_inp", computed("ffn_inp") + noise)
