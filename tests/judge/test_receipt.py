"""BitNet-rs's parity receipt: its fields, and its numbers by their definitions."""

import json

import numpy as np
import pytest

from bitnet_np.base.errors import EmptyInputError, FileFormatError, ShapeError
from bitnet_np.judge import receipt


def test_a_receipt_has_bitnet_rs_fields(tmp_path):
    ours = np.random.default_rng(0).standard_normal((3, 20)).astype(np.float32)
    theirs = ours.copy()
    theirs[1] += np.float32(0.001)
    theirs[2] *= -1
    rows = receipt.positions(ours, theirs)
    value = receipt.receipt(rows, model="m.gguf", backend="bitnet", prompt="p")
    receipt.write(tmp_path / "r.json", value)
    assert json.loads((tmp_path / "r.json").read_text()) == value
    assert " ".join(value) == "version timestamp model backend prompt positions thresholds rows summary"
    assert " ".join(rows[0]) == "pos mse max_abs kl topk_agree top5_rust top5_cpp"
    assert rows[0] | {"kl": 0} == rows[0] | {"mse": 0, "max_abs": 0, "kl": 0, "topk_agree": 1}
    assert rows[0]["top5_cpp"] == np.argsort(-ours[0])[:5].tolist()
    assert rows[1]["kl"] == pytest.approx(0, abs=1e-9)
    assert rows[1]["max_abs"] == pytest.approx(0.001, rel=1e-3)
    assert value["summary"] == {
        "all_passed": False,
        "first_divergence": 2,
        "mean_mse": pytest.approx(np.mean((ours.astype(float) - theirs) ** 2)),
        "mean_kl": pytest.approx(np.mean([row["kl"] for row in rows])),
    }
    assert receipt.receipt(rows[:2], model="m", backend="b", prompt="p")["summary"]["all_passed"]


def test_the_divergence_of_a_receipt_is_of_theirs_from_ours():
    ours, theirs = (np.log(np.array([p])) for p in ([0.5, 0.5], [0.9, 0.1]))
    (row,) = receipt.positions(ours + 3, theirs)
    assert row["kl"] == pytest.approx(0.5 * np.log(0.5 / 0.9) + 0.5 * np.log(0.5 / 0.1))
    assert (row["top5_rust"], row["top5_cpp"], row["topk_agree"]) == ([0, 1], [0, 1], 1)


LENIENT = {"mse": 1e9, "kl": 1e9, "topk": 0.0}


@pytest.mark.parametrize(
    ("threshold", "limit", "ours", "theirs"),
    [
        ("mse", 1e-4, [9, 8, 7, 6, 5, 4], [9.02, 8.02, 7.02, 6.02, 5.02, 4.02]),  # the same probabilities
        ("kl", 0.1, [5, 0.5, -0.2, -0.3, -0.4, -0.5], [0, 0.5, -0.2, -0.3, -0.4, -0.5]),
        ("topk", 0.8, [9, 8, 7, 6, 5, 0.1, 0.2], [9, 8, 0.1, 0.2, 7, 6, 5]),
    ],
)
def test_each_threshold_decides_by_itself(threshold, limit, ours, theirs):
    (row,) = receipt.positions(np.array([ours], np.float64), np.array([theirs], np.float64))
    for limits, passes in ((LENIENT | {threshold: limit}, False), (LENIENT, True)):
        assert receipt.passes(row, receipt.Thresholds(**limits)) is passes, row


def test_a_receipt_of_nan_does_not_pass_and_one_of_nothing_is_refused(tmp_path):
    ours = np.ones((1, 4), np.float32)
    rows = receipt.positions(ours, ours * np.nan)
    value = receipt.receipt(rows, model="m", backend="b", prompt="p")
    assert value["summary"] == {"all_passed": False, "first_divergence": 0, "mean_mse": None}
    receipt.write(tmp_path / "r.json", value)
    with pytest.raises(EmptyInputError):
        receipt.receipt([], model="m", backend="b", prompt="p")
    for a, b in [((2, 3), (2, 4)), ((0, 3), (0, 3)), ((3,), (3,))]:
        with pytest.raises(ShapeError):
            receipt.positions(np.ones(a), np.ones(b))


ROW = {"pos": 0, "mse": 1e-9, "max_abs": 1e-4, "kl": 0.0, "topk_agree": 1.0, "top5_rust": [0], "top5_cpp": [0]}
WRITTEN = receipt.receipt([ROW, ROW | {"pos": 1, "mse": None}], model="m", backend="b", prompt="p")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ("[]", "expected a JSON object"),
        ('{"rows": NaN}', "r.json"),
        ({"thresholds": None}, "thresholds is None, expected a JSON object"),
        ({"thresholds": {"mse": 1, "kl": "0.1", "topk": 1}}, "thresholds: kl is '0.1', expected a finite number"),
        ({"rows": {}}, "rows is {}, expected a JSON array"),
        ({"rows": [ROW]}, "positions is 2, and there are 1 rows"),
        ({"rows": [ROW, ROW]}, "row 1: pos is 0, expected 1"),
        ({"rows": [ROW, ROW | {"pos": 1, "mse": True}]}, "row 1: mse is True, expected a finite number"),
        ({"rows": [ROW, ROW | {"pos": 1, "topk_agree": "1"}]}, "row 1: topk_agree is '1', expected a finite number"),
        ({"rows": [ROW | {"mse": 1}, ROW | {"pos": 1, "kl": None}]}, "no position passed in it"),
        ({"rows": [ROW | {"topk_agree": 0.1}, {"pos": 1}], "thresholds": {"mse": 1e9, "kl": 1, "topk": 0.8}}, "no position passed in it"),
        ({"summary": {"all_passed": True}}, "the mse of position 1 is None, the threshold 0.0001"),
    ],
)
def test_a_file_that_is_no_receipt_is_refused(tmp_path, changes, message):
    path = tmp_path / "r.json"
    path.write_text(changes if isinstance(changes, str) else json.dumps(WRITTEN | changes))
    with pytest.raises(FileFormatError, match=r"r\.json") as error:
        receipt.read(path)
    assert message in str(error.value)


def test_numbers_that_were_not_measured_do_not_count(tmp_path):
    """As in receipts of BitNet-rs's parity-both. null is NaN, which was measured."""
    rows = [{"pos": i, "mse": 1e-9, "max_abs": 1e-4, "top5_rust": [], "top5_cpp": []} | more for i, more in enumerate(({}, {"kl": None}))]
    path = tmp_path / "r.json"
    path.write_text(json.dumps(WRITTEN | {"rows": rows, "tokenizer_authority": {"source": "gguf_embedded"}}))
    limit, read = receipt.read(path)
    assert read == [{"pos": 0, "mse": 1e-9}, {"pos": 1, "mse": 1e-9, "kl": None}]
    assert [receipt.passes(row, limit, row) for row in read] == [True, False]
    assert not receipt.passes(ROW | {"mse": 1e-3}, limit, read[0])
    assert receipt.passes(ROW | {"kl": 9.0, "topk_agree": 0.0}, limit, read[0])
