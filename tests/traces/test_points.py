"""The points of a forward pass: their names, their labels in files, and their shapes."""

import numpy as np
import pytest
from models import random_model
from recorder import record_all

from bitnet_np.base.errors import FileFormatError
from bitnet_np.model.families import FAMILIES
from bitnet_np.traces import labels
from bitnet_np.traces.formats.nodes import node_of
from bitnet_np.traces.normal_form import heads_of, normal_form
from bitnet_np.traces.points import POINTS, RECORDED, Entry, Key, Points, Trace, key_of, meaning, ours_of


def recorded_names(**shape):
    """The names of what a random model records."""
    return {name for name, _ in record_all(random_model(0, **shape), [1, 2])}


def test_every_point_a_forward_pass_records_has_a_name_here():
    assert recorded_names() < set(RECORDED)
    models = [
        {"family": family, "inner_norms": inner, "weights": "ternary", "n_layers": 1} for family in FAMILIES for inner in (False, True)
    ]
    models.append({"pooling": "last", "n_layers": 1})
    assert set().union(*(recorded_names(**shape) for shape in models)) == set(RECORDED)


@pytest.mark.parametrize(
    "label", ["", "attn_norm", "result_output-0", "attn_norm-01", "attn_norm--1", "attn_norm-٣", "../attn_norm-0", "l_out-0\n", "kqv-0"]
)
def test_other_labels_do_not(label):
    assert key_of(label) is None


@pytest.mark.parametrize(
    ("name", "shape", "rows", "expected"),
    [
        ("attn_norm", (17, 256), None, (17, 256)),
        ("attn_norm", (1, 17, 256), None, (17, 256)),
        ("Qcur", (17, 4, 64), None, (17, 256)),
        ("Qcur", (1, 17, 256), 17, (17, 256)),
        ("Qcur", (1, 4, 64), 1, (1, 256)),
        ("result_output", (512,), None, (1, 512)),
        ("kq", (1, 4, 17, 17), None, (4, 17, 17)),
        ("attn_norm_scale", (17, 1), None, (17,)),
        ("attn_norm_scale", (1, 1), None, (1,)),
    ],
)
def test_shapes_of_files_become_normal(name, shape, rows, expected):
    assert normal_form(Key(name, 0), shape, rows, "f").shape == expected


@pytest.mark.parametrize("shape", [(), (0, 4), (2, 17, 256), (2, 1, 17, 4)])
def test_shapes_a_point_cannot_have_are_refused(shape):
    with pytest.raises(ValueError, match=r"f: 'attn_norm-0' has shape \["):
        normal_form(Key("attn_norm", 0), shape, None, "f")


@pytest.mark.parametrize(
    ("shape", "rows", "heads", "tokens_first"),
    [
        ((1, 4, 17, 8), 17, None, False),
        ((17, 4, 8), 17, 4, True),
        ((4, 17, 8), 17, 4, False),
        ((17, 4, 8), None, 4, True),
        ((4, 17, 8), None, 4, False),
        ((1, 4, 1, 8), 1, None, False),  # a token that was decoded
        ((1, 1, 4, 8), 1, None, True),
        ((1, 1, 1, 8), 1, 1, True),
        ((4, 4, 8), None, 4, True),  # nothing says how many tokens there are
    ],
)
@pytest.mark.parametrize("name", ["Qcur", "Kcur_rope", "Vcur", "kqv_out"])
def test_heads_are_put_side_by_side_whichever_axis_is_theirs(name, shape, rows, heads, tokens_first):
    array = np.arange(np.prod(shape)).reshape(shape)
    left = array.reshape(shape[-3:])
    left = left if tokens_first else left.swapaxes(0, 1)
    form = normal_form(Key(name, 0), shape, rows, "f", heads)
    assert form.shape == (len(left), left[0].size)
    np.testing.assert_array_equal(form.of(array), left.reshape(form.shape))


@pytest.mark.parametrize("shape", [(4, 4, 8), (1, 4, 4, 8)])
def test_as_many_tokens_as_heads_are_refused_where_both_may_come_first(shape):
    with pytest.raises(FileFormatError, match=r"with 4 tokens and 4 heads either could be the first axis"):
        normal_form(Key("Qcur", 0), shape, 4, "f", 4)
    assert normal_form(Key("Qcur", 0), (1, 4, 32), 4, "f", 4).shape == (4, 32)


def test_a_batch_is_not_taken_for_heads():
    with pytest.raises(FileFormatError, match="4 heads: one sequence"):
        normal_form(Key("Qcur", 0), (2, 17, 32), 17, "f", 4)


def test_heads_of_a_model():
    config = random_model(0, heads=4, kv_heads=2).config
    names = ("Qcur", "Qcur_rope", "kqv_out", "Kcur", "Vcur", "attn_norm")
    assert [heads_of(Key(name, 0), config) for name in names] == [4, 4, 4, 2, 2, None]
    assert heads_of(Key("Qcur", 0), None) is None


def test_every_recorded_point_has_a_meaning():
    assert all(meaning(name) for name in RECORDED)
    assert meaning("Kcur_rope") == "keys after RoPE"
    assert meaning("attn_norm_codes") == "attn_norm as int8 codes"
    assert meaning("Qcur_in") == "the norm inside the matrix that gives Qcur"


def test_every_point_has_its_names_in_other_projects_and_no_name_stands_for_two():
    """Nodes, modules and stages are read as the points that they are; norms inside matrices and scores come of no module alone."""
    for column in ("ggml", "llama_cpp", "module", "around", "bitnet_rs", "aprt"):
        names = [name for point in POINTS for name in getattr(point, column).split()]
        assert len(names) == len(set(names)) == len(ours_of(column))
    for point in POINTS:
        key = Key(point.name, None if point.whole else 3)
        for node in point.ggml.split():
            name, operation = node.split(".")
            assert node_of(f"s2.{name}{'' if point.whole else '-3'}.{operation}") == (2, key)
        for module in labels.MODULES.get(point.name, ()):
            assert labels.direct(module if point.whole else f"model.layers.3.{module}".strip(".")) == key
    without = [point.name for point in POINTS if not point.ggml]
    assert without == ["attn_inp", "log_probs"]  # the output of the layer before, and what is computed of logits


@pytest.mark.parametrize(
    "label", ["attn_norm-0.MUL", "s0.attn_norm.MUL", "s0.l_out-0.MUL", "s0.result_norm-1.MUL", "s0.kqv-0.MUL_MAT", "s0.", "s-1.l_out-0.ADD"]
)
def test_other_nodes_are_none_of_ours(label):
    assert node_of(label) is None


def test_a_point_is_left_out_without_being_read():
    def never():
        raise AssertionError("read")

    keys = [Key("l_out", 0), Key("result_output", None)]
    in_a_file = Points({key: Entry((2, 3), np.dtype(np.float32), never) for key in keys})
    for points in (in_a_file, dict.fromkeys(keys, np.ones((2, 3)))):
        trace = Trace(points, np.array([1, 2]), "a file")
        shorter = trace.without(keys[1])
        assert (list(shorter.points), list(trace.points)) == (keys[:1], keys)
        assert (shorter.tokens is trace.tokens, shorter.origin) == (True, "a file")
    assert keys[0] in in_a_file
    assert len(in_a_file) == 2
