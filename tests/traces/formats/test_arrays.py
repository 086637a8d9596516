"""Arrays by their labels: steps of decoding are joined, and a tensor that has two labels must have one value."""

import numpy as np
import pytest
from models import random_model
from trace_files import V

from bitnet_np.base.errors import FileFormatError
from bitnet_np.traces.formats import read_any
from bitnet_np.traces.points import Key

ROWS = np.random.default_rng(0).standard_normal((6, 8)).astype(np.float32)
QUERIES = np.random.default_rng(1).standard_normal((6, 2, 4)).astype(np.float32)
STEPS = {8: slice(0, 4), 9: slice(4, 5), 10: slice(5, 6)}  # a prompt of four tokens, and two that were decoded: in order by number
IDS = np.array([5, 1, 4, 0, 2, 3])


def save(folder, name, array):
    path = folder / f"{name}.npy"
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array)


def save_steps(folder, style, steps=STEPS):
    """A folder with tokens, a layer's output [1, T, D] and its queries [1, H, T, K], by steps."""
    for step, rows in steps.items():
        for label, array in (("tokens", IDS[rows]), ("l_out-3", ROWS[None, rows]), ("Qcur-3", QUERIES[rows].swapaxes(0, 1)[None])):
            save(folder, style.format(label, step), array)
    return folder


STYLES = ["{0}.step-{1}", "step-{1}/{0}", "step-{1:05}/{0}", "{0}.step-{1:02}"]


def test_token_ids_tell_the_heads_of_a_step_from_its_tokens(tmp_path):
    save_steps(tmp_path, "{0}.step-{1}")
    for step in STEPS:
        (tmp_path / f"l_out-3.step-{step}.npy").unlink()
    np.testing.assert_array_equal(read_any(tmp_path).points[Key("Qcur", 3)], QUERIES.reshape(6, 8))


@pytest.mark.parametrize("style", STYLES)
def test_rows_of_steps_are_joined_in_their_order(tmp_path, style):
    trace = read_any(save_steps(tmp_path / "t", style))
    assert set(trace.points) == {Key("l_out", 3), Key("Qcur", 3)}
    np.testing.assert_array_equal(trace.points[Key("l_out", 3)], ROWS)
    np.testing.assert_array_equal(trace.points[Key("Qcur", 3)], QUERIES.reshape(6, 8))
    np.testing.assert_array_equal(trace.tokens, IDS)
    assert trace.points.entries[Key("Qcur", 3)].shape == (6, 8)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda f: (f / "l_out-3.step-9.npy").unlink(), "l_out-3 has no step 9, expected each from 8 to 10"),
        (lambda f: (f / "Qcur-3.step-8.npy").unlink(), "Qcur-3 has no step 8"),
        (lambda f: (f / "tokens.step-9.npy").unlink(), "tokens has no step 9"),
        (lambda f: save(f, "l_out-3.step-09", ROWS[:1]), "l_out-3 of step 9 is there twice"),
        (lambda f: save(f, "l_out-3", ROWS), "l_out-3 is there as a whole and by steps"),
        (lambda f: save(f, "tokens", IDS), "tokens is there as a whole and by steps"),
        (
            lambda f: save(f, "l_out-3.step-9", ROWS[:1, :5]),
            r"the steps of l_out-3 are .*float32 \[1, 5\].*, expected one dtype and one width",
        ),
        (lambda f: save(f, "l_out-3.step-9", ROWS[:1].astype(np.float16)), r"the steps of l_out-3 are .*float16 \[1, 8\]"),
        (lambda f: save(f, "l_out-3.step-9", np.ones((2, 3, 8))), "expected .tokens, width.: one sequence"),
        (lambda f: save(f, "l_out-3.step-9", np.array([["a"] * 8])), "'l_out-3' has dtype <U1"),
    ],
)
def test_steps_that_do_not_go_together_are_refused(tmp_path, edit, message):
    edit(save_steps(tmp_path, "{0}.step-{1}"))
    with pytest.raises(FileFormatError, match=message):
        read_any(tmp_path)


def test_scores_by_steps_are_ignored(tmp_path):
    save_steps(tmp_path, "{0}.step-{1}")
    for step, rows in STEPS.items():
        save(tmp_path, f"kq-3.step-{step}", np.ones((2, rows.stop - rows.start, rows.stop)))
    assert read_any(tmp_path).ignored == ("kq-3.step-10", "kq-3.step-8", "kq-3.step-9")


@pytest.mark.parametrize("equal", [True, False])
def test_two_labels_of_one_tensor_must_agree(tmp_path, equal):
    rows = ROWS.copy()
    rows[1, 2] = np.nan
    again = rows[None] if equal else rows + 1
    np.savez(
        tmp_path / "t.npz", **{"model.layers.0": rows, "model.layers.1.input": again, "hidden_states.1": rows, "hidden_states.0": ROWS}
    )
    if equal:
        config = random_model(0, n_layers=2).config
        assert set(read_any(tmp_path / "t.npz", config=config).points) == {Key("l_out", 0), Key("inp_embd", None)}
    else:
        with pytest.raises(FileFormatError, match=r"'model\.layers\.1\.input' is l_out-0 again, with other numbers"):
            read_any(tmp_path / "t.npz", config=random_model(0, n_layers=2).config)


def test_heads_are_told_from_tokens_by_the_model(tmp_path):
    """Nothing in this file says how many tokens there are."""
    config = random_model(0, heads=2, kv_heads=1).config
    np.savez(tmp_path / "t.npz", **{"Qcur-0": QUERIES.swapaxes(0, 1)})
    np.testing.assert_array_equal(read_any(tmp_path / "t.npz", config=config).points[Key("Qcur", 0)], QUERIES.reshape(6, 8))


def test_a_single_array_without_a_name_is_logits(tmp_path):
    logits = np.ones((2, V), np.float32)
    np.savez(tmp_path / "t.npz", logits)
    assert list(read_any(tmp_path / "t.npz").points) == [Key("result_output", None)]
    np.savez(tmp_path / "u.npz", logits, logits)
    with pytest.raises(FileFormatError, match="it has 'arr_0', 'arr_1'"):
        read_any(tmp_path / "u.npz")


@pytest.mark.parametrize("batch", [(), (1,)])
def test_a_stack_of_hidden_states_is_taken_apart(tmp_path, batch):
    """np.save of all that a forward pass with output_hidden_states gave."""
    config = random_model(0, n_layers=2).config
    stack = np.random.default_rng(2).standard_normal((3, *batch, 5, config.width), np.float32)
    np.save(tmp_path / "t.npy", stack)
    points = read_any(tmp_path / "t.npy", config=config).points
    assert list(map(str, points)) == ["inp_embd", "l_out-0", "result_norm"]
    np.testing.assert_array_equal(points[Key("l_out", 0)], stack[1].reshape(5, -1))
    with pytest.raises(FileFormatError, match="'result_output' has shape"):
        read_any(tmp_path / "t.npy", config=random_model(0, n_layers=3).config)
