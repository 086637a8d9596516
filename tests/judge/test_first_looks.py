"""What a dump is in place of what it should be is said at once: no mistake is sought."""

import numpy as np
import pytest

from bitnet_np import Verdict, check, forward_full
from bitnet_np.generation.nll import log_probabilities
from bitnet_np.judge.first_looks import normalised, other_shape
from bitnet_np.judge.mistakes.search import Search
from bitnet_np.testing.models import random_model

MODEL = random_model(13, family="llama", n_layers=3, vocab=60)
IDS = np.array([1, 20, 3, 41, 5, 7, 7, 30, 2, 11])


def tensors(ids):
    """Every tensor of our engine for some token ids."""
    found = {}
    keep = lambda name, n, x: found.update({name if n is None else f"{name}-{n}": x.reshape(len(ids), -1).copy()})  # noqa: E731
    forward_full(MODEL, ids[None], record=keep)
    return found


RIGHT = tensors(IDS)
LOGITS = RIGHT["result_output"]
LOG_PROBS = log_probabilities(LOGITS).astype(np.float32)
PADDED = np.concatenate([np.zeros(4, np.int64), IDS])
BEHIND = np.concatenate([IDS, np.zeros(4, np.int64)])


@pytest.fixture(autouse=True)
def _no_search(monkeypatch):
    for name in ("named", "unnamed"):
        monkeypatch.setattr(Search, name, lambda *_: pytest.fail("mistakes are sought"))


def with_rows(rows, shown):
    """Some rows, and others that are no tensor's."""
    noise = np.random.default_rng(0).normal(0, 1, (len(shown), rows.shape[1])).astype(np.float32)
    noise[shown] = rows
    return noise


INVALID = {
    "constant": (IDS, 0 * LOGITS + 3, "their logits of position 0 are all 3.0"),
    "transposed": (IDS, LOGITS.T, "it is transposed"),
    "a BOS more": (IDS, tensors(np.concatenate([[59], IDS]))["result_output"], "as if a BOS token had been put in front"),
    "a BOS twice": (IDS, tensors(np.concatenate([IDS[:1], IDS]))["result_output"], "right with the first token id, 1, twice"),
    "no BOS": (IDS, tensors(IDS[1:])["result_output"], "right without the first token id, 1: the engine had no BOS in front"),
    "no BOS, tensors": (IDS, {"l_out-0": tensors(IDS[1:])["l_out-0"]}, "right without the first token id, 1"),
    "a prefix": (IDS, LOGITS[4:], "the rows of the last 6 tokens, behind a prefix: say --prefix 4"),
    "a prefix, tensors": (IDS, {"l_out-0": RIGHT["l_out-0"][4:]}, "say --prefix 4"),
    "an end": (BEHIND, LOGITS, "the rows of the first 10 tokens"),
    "rows of padding": (IDS, tensors(BEHIND)["result_output"], "the first 10 are right, and the others of padding"),
    "padding behind": (BEHIND, with_rows(LOGITS, np.arange(14) < 10), "right without the last 4 token ids, each 0"),
    "padding in front": (PADDED, with_rows(LOGITS, np.arange(14) > 3), "right without the first token id, 0, which is there 4 times"),
    "padded tensors": (PADDED, {"l_out-1": with_rows(RIGHT["l_out-1"], np.arange(14) > 3)}, "are the token ids padded in front?"),
    "layers from 1": (IDS, {"l_out-1": RIGHT["l_out-0"], "l_out-2": RIGHT["l_out-1"]}, "every tensor is right one layer lower"),
}


@pytest.mark.parametrize("name", INVALID)
def test_what_cannot_be_compared_is_said(name):
    ids, dump, says = INVALID[name]
    report = check(MODEL, ids, dump)
    assert report.verdict is Verdict.INVALID, report
    assert says in report.reason


@pytest.mark.parametrize(
    ("shift", "says"),
    [
        (0.5, "every logit is 0.5 too large, and right otherwise"),
        (-np.arange(1, 11)[:, None], "all logits of a position are off by the same, those of position 0 1 too small, and right otherwise"),
        (-LOGITS.max(axis=1, keepdims=True), "the largest logit of each position is subtracted: dump the logits before that"),
    ],
)
def test_a_constant_is_said(shift, says):
    report = check(MODEL, IDS, (LOGITS + shift).astype(np.float32))
    assert (report.verdict, report.logits.explanation) == (Verdict.WRONG, says)


PASSES = {
    "log-probabilities": (LOG_PROBS, "result_output are log-probabilities"),
    "log-probabilities among others": ({"result_output": LOG_PROBS, "l_out-0": RIGHT["l_out-0"]}, "result_output are log-probabilities"),
    "logits as log-probabilities": ({"log_probs": LOGITS}, "log_probs are logits"),
    "flat logits": (LOGITS.reshape(-1), "result_output is flat, 600 numbers: taken as 10 rows of 60"),
    "flat tensors": ({"l_out-0": RIGHT["l_out-0"].reshape(-1), "l_out-1": RIGHT["l_out-1"]}, "flat, and taken as rows of tokens: l_out-0"),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_is_read_as_something_else_is_judged_as_such(name):
    dump, says = PASSES[name]
    report = check(MODEL, IDS, dump)
    assert report.verdict <= Verdict.ROUNDING, report
    assert any(says in note for note in report.notes), report.notes


def test_probabilities_are_said():
    report = check(MODEL, IDS, np.exp(LOG_PROBS))
    assert report.verdict is Verdict.WRONG
    assert report.logits.explanation.startswith("they are probabilities, whose sum is 1 at each position")


def test_narrow_types_are_normalised_but_for_their_roundings():
    rng = np.random.default_rng(1)
    probabilities = rng.dirichlet(np.ones(300), 5).astype(np.float32)
    for kind in (np.float32, np.float16):
        assert normalised(probabilities.astype(kind)) == "probabilities"
        assert normalised(np.log(probabilities).astype(kind)) == "log-probabilities"
    assert normalised(1.1 * probabilities) is None
    assert normalised(np.log(probabilities) + np.float32(0.1)) is None
    assert normalised(rng.normal(0, 1, (5, 300)).astype(np.float32)) is None


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        ((50, 7), "transposed"),
        ((8, 50), "BOS"),
        ((7, 64), "last 14 columns are padding"),
        ((7, 49), ""),
        ((6, 50), "say --prefix 1"),
        ((7, 1, 50), ""),
    ],
)
def test_shapes_say_what_engines_do(theirs, says):
    rng = np.random.default_rng(0)
    hint = other_shape(rng.normal(size=theirs), rng.normal(size=(7, 50)))
    assert says in hint
    assert bool(hint) == bool(says)
