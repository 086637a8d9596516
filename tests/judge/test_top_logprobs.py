"""A server's log-probabilities: honest servers are right, planted differences are found, and what is no log-probability is refused."""

from dataclasses import replace

import numpy as np
import pytest
from completions import completions_by, engine

from bitnet_np import BITNET_CPP, EXACT, LLAMA_CPP
from bitnet_np.base.errors import TokenRangeError
from bitnet_np.judge.top_logprobs import check_completions
from bitnet_np.judge.variant import Variant, scaled
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.rope import rope_frequencies
from bitnet_np.servers.completions import TopLogprobs
from bitnet_np.testing.models import random_model

SHAPE = {"width": 128, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 32, "vocab": 200, "tied": False}
LLAMA, BITNET = random_model(3, family="llama", n_layers=3, **SHAPE), random_model(4, n_layers=3, **SHAPE)
IDS = np.random.default_rng(5).integers(0, 200, 12)
OURS = engine(Variant("", LLAMA, EXACT))
HONEST = completions_by(OURS, IDS)


def judged(completions, model=LLAMA, dialect=EXACT, search=True):
    return check_completions(model, completions, dialect, search=search)


def noisy(name, n, x):
    """Float16's precision after each operation, rounded at random: roundings that no run of ours has."""
    if name in ("inp_embd", "inpL", "ffn_inp", "l_out", "result_output"):
        return x
    noise = np.random.default_rng([n or 0, len(name)]).uniform(-0.5, 0.5, x.shape)
    return (x * (1 + 2.0**-10 * noise)).astype(np.float32)


def added_in_float16(name, n, x):
    """What adding up values in float16 does to the result of attention: the error of 1 to T roundings."""
    if name != "kqv_out":
        return x
    rng, rows = np.random.default_rng(n), np.arange(1, len(x) + 1)[:, None]
    return (x + rng.normal(0, 0.29 * 2.0**-11, x.shape) * np.sqrt(rows) * x.std(axis=1, keepdims=True)).astype(np.float32)


# --- honest ---------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 11])
def test_our_own_numbers_are_right(first):
    """Also with a number added to all logits of a position, which changes no probability."""
    report = judged(completions_by(lambda ids: OURS(ids) + np.arange(len(ids))[:, None].astype(np.float32) / 4, IDS, first=first))
    assert report.verdict <= Verdict.ROUNDING
    assert report.logits.compared == tuple(range(first, 19))
    assert report.notes[-1].startswith(f"{20 * (19 - first)} log-probabilities of positions {first} to 18 are judged")


@pytest.mark.usual(2)
@pytest.mark.parametrize("k", [5, 20])
@pytest.mark.parametrize("model", [LLAMA, BITNET], ids=["llama", "bitnet"])
def test_honest_servers_are_no_alarm(model, k):
    for theirs in (Variant("", model, LLAMA_CPP), Variant("", model, BITNET_CPP), Variant("", model, EXACT, edit=noisy)):
        completions = completions_by(engine(theirs), IDS, k=k)
        for few in (1, 3, 8):
            report = judged(replace(completions, top=completions.top[:few]), model)
            assert report.verdict <= Verdict.FLIPS, report.reason


def test_attention_in_float16_is_no_alarm():
    """llama.cpp's default. Its error grows with the tokens, and no dialect has it."""
    long = np.random.default_rng(6).integers(0, 200, 500)
    completions = completions_by(engine(Variant("", LLAMA, BITNET_CPP, edit=added_in_float16)), long, predict=4)
    report = judged(completions, search=False)  # for causes, which would take as long as it may
    assert report.verdict is Verdict.FLIPS, report.reason
    assert report.logits.mean_nmse > report.logits.reach / 10


def test_lists_of_unequal_length_are_measured_by_what_they_list():
    """The NMSE of a position is that of its own numbers: what fills the table changes nothing."""
    noise, nmse, short = np.random.default_rng(1).normal(0, 0.01, (8, 20)), [], []
    for row, n in zip(HONEST.top, range(5, 13), strict=True):
        error = np.abs(noise[n - 5, :n])
        short.append(replace(row, ids=row.ids[:n], logprobs=row.logprobs[:n] - error))
        nmse.append((error**2).mean() / row.logprobs[:n].var())
    report = judged(replace(HONEST, k=5, top=tuple(short)))
    np.testing.assert_allclose([report.logits.mean_nmse, report.logits.nmse], [np.mean(nmse), max(nmse)], rtol=1e-4)


def test_the_least_log_probabilities_and_the_shortest_lists_are_left_out():
    """Servers send any number where float32 has no probability left."""
    low = [replace(row, logprobs=np.where(np.arange(20) < 10, row.logprobs, -3.4e38)) for row in HONEST.top]
    worse = [replace(row, logprobs=np.where(np.arange(20) < 4, row.logprobs, -9999)) for row in HONEST.top]
    report = judged(replace(HONEST, k=10, top=(*low[:4], *worse[4:])))
    assert report.verdict <= Verdict.ROUNDING, report.reason
    assert report.logits.compared == (11, 12, 13, 14)
    assert report.notes[-1].startswith("40 log-probabilities of positions 11 to 14")


# --- differences ----------------------------------------------------------------------------------------------------------------------


FLAT = replace(LLAMA, output=LLAMA.output * np.float32(0.2))  # so that tokens that are not listed have a part of the probability
OF_FLAT = completions_by(engine(Variant("", FLAT, EXACT)), IDS, k=10)
PLANTED = {
    "the frequency base is 500000 instead of 10000": lambda v: v.with_model(
        rope_frequency=rope_frequencies(500000.0, 32, v.model.rope_factors)
    ),
    "the norm's weight is missing": lambda v: v.with_field("ffn_norm", np.ones_like),
    "scale of ffn_down": lambda v: scaled(v, "ffn_down", 1.05),
    "last layer skipped": lambda v: v.with_model(layers=v.model.layers[:-1]).with_config(n_layers=2),
}


def with_logprobs(change, honest=HONEST):
    """The honest completion with other numbers."""
    return replace(honest, top=tuple(replace(row, logprobs=change(row.logprobs)) for row in honest.top))


def biased(ids):
    """Logits of which one at each position is wrong, and too low to be listed."""
    logits = OURS(ids).copy()
    logits[np.arange(len(logits)), np.argsort(logits, axis=1)[:, -8]] -= 50
    return logits


@pytest.mark.parametrize(
    ("theirs", "model", "says"),
    [
        *[
            (completions_by(engine(change(Variant("", LLAMA, base))), IDS), LLAMA, name * name.startswith("the "))
            for name, change in PLANTED.items()
            for base in (EXACT, BITNET_CPP)
        ],
        (completions_by(lambda ids: OURS(ids) / np.float32(0.8), IDS), LLAMA, "logits are 1.25 times ours, as with a temperature of 0.8"),
        (with_logprobs(lambda x: x - np.log(np.exp(x).sum()), OF_FLAT), FLAT, "are normalised over only the listed tokens"),
        (with_logprobs(lambda x: x - 0.5, OF_FLAT), FLAT, "are normalised over other numbers than all logits"),
        (completions_by(OURS, IDS, choose=lambda x: np.argsort(x)[-2]), LLAMA, "after position 11 the server chose token"),
        (completions_by(biased, IDS), LLAMA, "is not listed, though its log-probability is"),
    ],
)
def test_planted_differences_are_found(theirs, model, says):
    report = judged(theirs, model)
    assert report.verdict is Verdict.WRONG
    assert says in report.reason
    assert not says.startswith("the ") or says in report.logits.explanation


def test_of_two_tokens_that_are_as_probable_either_may_be_chosen():
    row = HONEST.top[0]
    tied = replace(row, logprobs=np.array([row.logprobs[0] + 1e-6, *row.logprobs[1:]]))
    assert judged(replace(HONEST, top=(tied, *HONEST.top[1:]))).verdict <= Verdict.ROUNDING


# --- nothing to compare ---------------------------------------------------------------------------------------------------------------


def with_row(**changes):
    return replace(HONEST, top=(HONEST.top[0], replace(HONEST.top[1], **changes), *HONEST.top[2:]))


ROW = HONEST.top[1]
INVALID = [
    (replace(HONEST, top=()), "no position with 5 numbers, of log-probabilities above -80"),
    (with_row(logprobs=np.append(ROW.logprobs[:-1], np.nan)), "at position 12 their log-probability of token"),
    (with_row(ids=np.append(ROW.ids[:-1], 200)), "have token 200, which is not an id of the vocabulary, 0..199: is it another model?"),
    (with_row(logprobs=ROW.logprobs + 20), "expected at most 0: are these logits?"),
    (with_logprobs(lambda x: x / np.log(10)), "probabilities sum to"),
    (with_row(logprobs=np.full(20, -4.0)), "at position 12 the 20 largest are all -4"),
    (with_row(ids=HONEST.top[0].ids, logprobs=HONEST.top[0].logprobs), "positions 11 and 12 have the same numbers"),
]


@pytest.mark.parametrize(("completions", "said"), INVALID, ids=range(len(INVALID)))
def test_what_cannot_be_compared_is_invalid(completions, said):
    report = judged(completions)
    assert report.verdict is Verdict.INVALID
    assert said in report.reason


def test_a_generated_token_outside_of_the_vocabulary_is_an_error():
    tokens = HONEST.tokens.copy()
    tokens[-1] = 200
    with pytest.raises(TokenRangeError, match="token 200 at position 19"):
        judged(replace(HONEST, tokens=tokens))


def test_log_probabilities_that_are_no_number_never_raise():
    rng = np.random.default_rng(0)
    odd = [np.nan, np.inf, -np.inf, 1e300, -1e300, 0.0, -0.0, 1e-300, 5.0]
    for _ in range(40):
        rows = []
        for row in HONEST.top:
            values = np.where(rng.random(20) < 0.1, rng.choice(odd, 20), row.logprobs)
            order = np.argsort(-values, kind="stable")
            rows.append(TopLogprobs(row.position, row.ids[order], values[order]))
        assert judged(replace(HONEST, top=tuple(rows))).verdict in Verdict
