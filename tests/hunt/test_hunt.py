"""The hunt finds faults that hold under a condition only, with the smallest case and the condition, and finds none in a right engine."""

import pickle
import random
import time
from dataclasses import replace
from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hunted_engines import engine_with
from models import random_model
from numba.core import event

import bitnet_np as bn
from bitnet_np import spec
from bitnet_np.hunt import again
from bitnet_np.hunt.contrast import Contrast, conditions, is_alike, meets
from bitnet_np.hunt.draws import Deck
from bitnet_np.hunt.engine import engine_of
from bitnet_np.hunt.facts import FACTS, Atom, Calls, calls_of, in_statements, parts_of
from bitnet_np.hunt.keep import keep
from bitnet_np.hunt.outcome import Judge, Outcome
from bitnet_np.hunt.run import Finding, Runner, _Hunting, _Pursuit, joined
from bitnet_np.hunt.shrink import smallest
from bitnet_np.model.dense import dense_view
from bitnet_np.model.families import FAMILIES
from bitnet_np.testing.space import EDGES, Case, case_like, fitted, in_words, lengths_of, model_of, tokens_of


def hunted(engine, **options):
    return bn.hunt(engine, **{"time": 600, "runs": 75, "like": LIKE} | options)


LIKE = random_model(1, family="qwen3", weights="float32", width=64, ffn=64, heads=2, kv_heads=2, head_dim=32, vocab=64, tied=False)
"""One family and one type, so that few runs do."""

FOUND = {
    "longer than 32": ("the prompt is longer than 32 tokens", {"length": 33}),
    "head width 80": ("the head width is 80", {"head_dim": 80, "length": 1}),
    "batch": ("the sequence is not the first of its batch", {"batch": 2, "length": 1}),
    "chunks of a long prompt": ("the prompt comes in chunks and the prompt is longer than 64 tokens", {"length": 65, "chunk": 1}),
}


@pytest.mark.usual(4)
@pytest.mark.parametrize("condition", FOUND)
def test_a_fault_is_found_with_its_condition_and_its_smallest_case(condition):
    (finding,) = hunted(engine_with(condition), runs=100).findings  # a condition of two statements stands after 80
    where, changed = FOUND[condition]
    assert f"where {where}" in finding.where.replace(", at", "").replace(", in", "")
    plain, _ = case_like(LIKE)
    assert replace(finding.case, seed=0) == replace(plain, **changed)
    assert finding.stands
    assert not finding.report.verdict.exit_code or finding.report.verdict == bn.Verdict.WRONG


def test_nothing_is_found_in_a_right_engine():
    result = hunted(engine_with("none"), runs=60, like=None)
    assert (result.findings, result.exit_code, result.runs >= 60) == ([], 0, True)


def test_nan_and_other_bits_are_findings():
    (nan,) = hunted(engine_with("one key head", lambda y: y * np.nan)).findings
    assert nan.outcome.kind == "invalid"
    assert [str(atom) for atom in nan.condition] == ["the number of key heads is 1"]
    state = np.random.default_rng(1)
    result = hunted(engine_with("always", lambda y: y * np.float32(1 + 1e-6 * state.random())), runs=40)
    assert [finding.outcome.kind for finding in result.findings][:1] == ["bits"]


@pytest.mark.parametrize(("step", "spoil"), [(1e-4, lambda y: rounded(y, 2e-3)), (1.0, lambda y: 3 * y)])
def test_numbers_that_depend_on_the_call_are_a_finding(step, spoil, tmp_path):
    """An engine of few bits passes by the definition, or is wrong everywhere: that threads are wrong shows beside a run alone."""

    def right(model, tokens, threads=1):
        rows = [rounded(spec.forward(dense_view(model), ids), step) for ids in (tokens if isinstance(tokens, list) else [tokens])]
        return rows if isinstance(tokens, list) else rows[0]

    def wrong(model, tokens, threads=1):
        rows = right(model, tokens)
        return rows if threads < 3 else list(map(spoil, rows)) if isinstance(tokens, list) else spoil(rows)

    found = {engine: hunted(engine, runs=70, out=tmp_path / engine.__name__).findings for engine in (right, wrong)}
    by_call = [finding for finding in found[wrong] if finding.outcome.kind == "call"]
    assert [f.outcome.kind for f in found[right]] == [f.outcome.kind for f in found[wrong] if f not in by_call] == ["wrong"] * (step == 1)
    assert [str(atom) for finding in by_call for atom in finding.condition] == ["the number of threads is at least 3"]
    assert by_call[0].where.startswith("other numbers than alone in one prefill where the number of threads is at least 3: ")
    assert [again(by_call[0].folder, engine).kind for engine in (right, wrong)] == ["ok", "call"]


def rounded(y, step):
    """Logits in steps of this part of their spread."""
    return (np.rint(y / (step * y.std())) * (step * y.std())).astype(np.float32)


def test_single_sequences_alone_are_drawn_if_asked():
    """An engine that flattens a batch is wrong in each; what else is wrong shows without batches only."""
    seen = []

    def engine(model, tokens):
        seen.append(isinstance(tokens, list))
        return engine_with("none")(model, tokens)

    assert hunted(engine, runs=25, single=True).findings == []
    assert not any(seen)


def test_what_an_engine_refuses_is_no_finding():
    def engine(model, tokens):
        if isinstance(tokens, list):
            raise NotImplementedError("batches are not supported")
        if model.config.head_dim > 64:
            raise ValueError("head width above 64 is not supported")
        return engine_with("none")(model, tokens)

    result = hunted(engine, runs=40)
    assert result.findings == []
    assert "batch 2" in result.refused


def test_a_crash_is_a_finding_with_its_condition():
    def engine(model, tokens):
        assert model.config.n_layers < 3, "index 3 is out of range"
        return engine_with("none")(model, tokens)

    (finding,) = hunted(engine).findings
    assert finding.outcome.kind == "crash"
    assert "index 3" in finding.outcome.text
    assert finding.where.startswith("crash where the number of layers is at least 3: ")


def first_call_is_wrong(model, tokens, chunk=None, prefix=0):
    """An engine whose first call, if it has five tokens or more, lets each see itself alone. It gives tensors behind the prefix."""
    first, right, dump = min(prefix or len(tokens), chunk or len(tokens)), spec.causal_mask, {}

    def mask(q_len, k_len, past=0, window=None):
        seen = right(q_len, k_len, past, window)
        seen[: first * (first > 4)] = np.where(np.eye(first * (first > 4), k_len), 0, -np.inf)
        return seen

    def keep_rows(name, layer, x):
        dump[name if layer is None else f"{name}-{layer}"] = np.asarray(x, np.float32).reshape(len(tokens), -1)[prefix:]

    with mock.patch.object(spec, "causal_mask", mask):
        spec.forward(dense_view(model), tokens, keep_rows)
    return dump


def hunting_in(engine, **edges):
    """A hunt in an engine, before it draws from these values."""
    hunting = _Hunting(Runner(engine_of(engine), LIKE, Judge()), 90, 0, lambda runs, findings, left: None)
    hunting.plain, _ = case_like(LIKE)
    hunting.deck = Deck({name: (getattr(hunting.plain, name),) for name in EDGES} | edges, hunting.rng)
    return hunting


def test_kernels_that_are_compiled_take_no_time_of_a_hunt():
    def engine(model, tokens):
        if not compiled:
            with event.trigger_event("numba:compiler_lock"):
                compiled.append(time.sleep(0.5))
        return np.array(bn.forward_full(model, [tokens])[0])

    compiled, begin = [], time.perf_counter()
    hunted = bn.hunt(engine, LIKE, runs=2, time=600)
    assert hunted.runs
    assert time.perf_counter() - begin - hunted.seconds > 0.49


@pytest.mark.parametrize(("fault", "count"), [({"layers": 4}, 1), ({"head_dim": 80}, 2)])
def test_a_failure_is_another_one_only_where_no_condition_is_of_both(fault, count):
    """A finding says that 3 layers are wrong. So are 4: its condition was too narrow. A head width of 80 is another mistake, told apart."""

    def engine(model, tokens):
        condition = "third layer" if model.config.n_layers > 2 else "head width 80"
        return engine_with(condition)(model, tokens)

    edges = case_like(LIKE)[1]
    hunting = hunting_in(engine, **edges | {name: edges[name][:1] for name in ("batch", "ragged", "window", *engine_of(engine).knobs)})
    first, other = replace(hunting.plain, layers=3), replace(hunting.plain, **fault)
    outcomes = [hunting.runner.run(case) for case in (hunting.plain, first, other)]
    assert [outcome.failed for outcome in outcomes] == [False, True, True]
    hunting.result.findings.append(Finding(first, outcomes[1], (Atom("layers", 3, 3),), True, 1, 1))
    assert hunting.pursue(other)
    *_, last = findings = hunting.result.findings
    assert (len(findings), {atom.fact for atom in last.condition}) == (count, {*fault}), last.where
    assert _Pursuit(hunting, last.outcome.group, other, [last.condition]).fails([other]) == [False]
    assert _Pursuit(hunting, "crash", other, []).fails([other]) == [False]  # a failure of another kind


def test_findings_of_one_mistake_are_told_as_one():
    def finding(atom, text):
        return Finding(Case(), Outcome("wrong", text), (atom,), True, 3, 9, 1)

    long, other = finding(Atom("length", low=33), "WRONG at layer 0 kqv_out: a mask"), finding(Atom("threads", 2, 2), "NMSE is 2")
    (one,) = joined([long, finding(Atom("threads", 2, 2), "WRONG at layer 1 kqv_out: a mask")])
    both = "the prompt is longer than 32 tokens, or where the number of threads is 2"
    assert one.where == f"WRONG where {both}: 6 of 8 runs; right otherwise: 8 of 8"
    assert joined([long, other, replace(other, case=Case(layers=2))]) == [long, other, replace(other, case=Case(layers=2))]


def test_a_finding_whose_runs_another_one_explains_is_left_out():
    """The number of threads 2 was said first; then all of several threads were found to be wrong."""
    hunting = hunting_in(engine_with("threads"), threads=(1, 3, 4))
    cases = [replace(hunting.plain, threads=threads) for threads in (1, 3, 4)]
    outcomes = [hunting.runner.run(case) for case in cases]
    findings = [
        Finding(cases[1], outcomes[1], (Atom("threads", 3, 3),), True),
        Finding(cases[2], outcomes[2], (Atom("threads", low=2),), True),
    ]
    hunting.result.findings += findings
    hunting.drop_explained()
    assert hunting.result.findings == findings[1:]


def test_an_engine_that_takes_nothing_is_invalid():
    def engine(model, tokens):
        raise NotImplementedError

    result = hunted(engine, like=None)
    assert result.exit_code == 2
    assert "the engine took no model" in result.notes[0]


def test_a_hunt_in_a_test_fails_it_with_the_finding(oracle):
    assert oracle.hunt(engine_with("none"), LIKE, runs=2, time=600).runs >= 2
    with pytest.raises(
        pytest.fail.Exception, match=r"WRONG in \d+ runs?: too few to tell a condition\nsmallest: qwen3, 1 layer, .*\n.*test_hunt.py"
    ):
        oracle.hunt(engine_with("always"), LIKE, runs=2, time=600)


def test_runs_are_spread_over_processes():
    """A pickled copy stands for another process: it knows the engine and what `like` has, not the outcomes."""
    spread = lambda run, cases: list(map(pickle.loads(pickle.dumps(run)), cases))  # noqa: E731
    like = random_model(1, family="qwen2", weights="float32", width=64, heads=2, kv_heads=2, head_dim=16, n_layers=3)
    far, near = (Runner(engine_of(first_call_is_wrong), like, Judge(), 2, spread=some) for some in (spread, None))
    changes = {"length": 4}, {"length": 9}, {"length": 4}, {"head_dim": 80, "tied": True}
    cases = [fitted(replace(case_like(like)[0], **change)) for change in changes]
    outcomes, ours = far.run_all(cases), near.run_all(cases)
    assert [outcome.failed for outcome in outcomes] == [False, True, False, False]
    assert all(a.rows[0][1].tobytes() == b.rows[0][1].tobytes() for a, b in zip(outcomes, ours, strict=True))
    assert (far.run_all(cases[:1])[0], [*far.outcomes][-1]) == (outcomes[0], cases[0])


# --- the parts of a hunt: what each must not do ---------------------------------------------------------------------------------------


def test_every_edge_is_drawn():
    deck = Deck(EDGES, random.Random(1))
    cases = [deck.draw() for _ in range(400)]
    for name, values in EDGES.items():
        drawn = {getattr(case, name) for case in cases}
        if name in ("length", "kv_heads", "chunk", "threads", "vocab", "family", "weights", "head_dim", "layers"):
            assert drawn >= set(values), name
    assert any(case.batch > 1 and case.ragged for case in cases)


@pytest.mark.parametrize("seed", range(6))
def test_a_drawn_case_can_be_made_and_stays_as_it_is(seed):
    deck = Deck(EDGES, random.Random(seed))
    for case in (deck.draw() for _ in range(4)):
        assert fitted(case) == case
        model, tokens = model_of(case), tokens_of(case)
        assert tuple(map(len, tokens)) == lengths_of(case)
        assert all(ids.min() >= 0 and ids.max() < case.vocab for ids in tokens)
        assert model.config.n_layers == case.layers
        assert str(case.length) in in_words(case)


def test_the_smallest_case_fails_as_the_first_one_did():
    """Another failure on the way, a crash of long prompts with few layers, is not taken for the one that is made smaller."""
    first = fitted(Case(layers=4, length=129, head_dim=96, group=3, vocab=257, chunk=33))

    def fails(cases):
        return [case.layers > 2 and case.length >= 40 and not (case.vocab < 65 and case.length > 100) for case in cases]

    kept = [first]
    least = smallest(first, Case(), fails, kept.append)
    assert fails([least]) == [True]
    assert all(fails([case])[0] for case in kept)
    assert least == Case(layers=3, length=40)


def calls_in(case):
    return [end - start for start, end in calls_of(case, case.length)]


BIASED = [name for name, traits in FAMILIES.items() if traits.biases]
TRUTHS = {
    "remainder": (lambda c: c.ffn % 32 != 0, "the feed-forward width is no multiple of 32"),
    "two": (lambda c: c.kv_heads == 1 and c.group > 1, None),
    "family": (lambda c: c.family == "phi3", "the family is phi3"),
    "window": (lambda c: 0 < c.window < c.length, "the number of keys of a call minus the window is at least 1"),
    "any call but the first": (lambda c: c.prefix > 0 or 0 < c.chunk < c.length, "a call sees keys of an earlier one"),
    "any matrix": (lambda c: any(n % 128 for n in (c.width, c.ffn, c.kv_heads * c.group * c.head_dim)), None),
    "a last tile": (lambda c: any(n > 16 and n % 16 for n in calls_in(c)),
        "the length of a call is at least 17 (right at 15) and no multiple of 16"),
    "drafts": (lambda c: any(2 <= n <= 4 for n in calls_in(c)), "the length of a call is 2 to 4"),
    "threads": (lambda c: c.width % c.threads > 0, "a thread's share of the width is no whole number"),
    "a multiple": (lambda c: c.prefix > 0 and c.prefix % 16 == 0, None),
    "two windows": (lambda c: 0 < 2 * c.window < c.length, "the number of whole windows before the last token of a call is at least 2"),
    "one call": (lambda c: any(end - start == 1 and end > 32 for start, end in calls_of(c, c.length)),
        "the prompt is longer than 32 tokens and the length of a call is 1"),  # it is the last one, or all are
    "a border": (lambda c: any(start % 16 and start // 16 < (end - 1) // 16 for start, end in calls_of(c, c.length)),
        "the first position of a call is no multiple of 16 and it crosses a multiple of 16"),
    "biases": (lambda c: c.family in BIASED and c.width > 64, "the width is at least 65 and the model has biases"),
    "pairs": (lambda c: c.experts and any(n * c.experts_used > 32 for n in calls_in(c)),
        "the length of a call times the number of experts that a token takes is at least 33"),
    "no expert's share": (lambda c: any(n * c.experts_used < c.experts for n in calls_in(c)),
        "the number of experts is above the length of a call times the number of experts that a token takes"),
    "behind an id": (lambda c: (tokens_of(c)[0][:-1] == 2).any(), "the number of tokens behind the first id 2 is at least 1"),
    "an id twice": (lambda c: (np.diff(tokens_of(c)[0]) == 0).any(), "two ids next to each other are equal"),
    "a buffer": (lambda c: max(calls_in(c)) > calls_in(c)[0], "the length of a call is above the length of the first call"),
    "a last tile of ids": (lambda c: tokens_of(c)[0].max() >= c.vocab // 64 * 64,
        "an id of the prompt is behind the vocabulary's last whole tile of 64"),
    "behind a prefix": (lambda c: c.prefix > 0 and (c.chunk == 1 or c.length - c.prefix == 1),
        "the length of a call is 1 and it is the first one behind a reused prefix"),
    "a padded prefix": (lambda c: c.chunk > 0 and c.prefix % c.chunk > 0, None),
    "steps are right": (lambda c: any(end - start > 1 and end > 128 for start, end in calls_of(c, c.length)),
        "the length of a call is at least 2 and its number of keys is at least 129"),
    "a last part": (lambda c: any(n > 8 and 1 <= n % 8 <= 4 for n in calls_in(c)),
        "the length of a call is at least 9 (right at 4) and 1 to 4 more than a multiple of 8"),
    "twice as long": (lambda c: any(a == b > 1 for a, b in pairwise(calls_in(c))),
        "the length of a call is at least 2 and its length is equal to the length of the call before"),
    "a window and two tokens": (lambda c: c.window > 0 and any(n > c.window + 1 for n in calls_in(c)),
        "the length of a call minus the window is at least 2"),
}  # fmt: skip


def contrast_of(truth, fails, runs=60, spare=2, seed=3, **edges):
    """A contrast of what `fails` says, which hides some of `truth`, and how far its condition is from the truth in 400 other cases."""
    deck = Deck(dict(EDGES) | {"batch": (1,), "ragged": (False,), "extras": (False,)} | edges, random.Random(seed))
    drawn = [deck.draw() for _ in range(150)]
    failing, passing = [c for c in drawn[:40] if fails(c)], [c for c in drawn[:40] if not fails(c)]
    failing = failing or [next(c for c in drawn if fails(c))]
    least = smallest(failing[0], Case(), lambda some: list(map(fails, some)), failing.append)
    contrast = Contrast(least, failing, passing, lambda case: {}, deck, spare)
    for _ in range(runs):
        for case in () if contrast.stands else contrast.propose(1):
            contrast.add(case, fails(case))
    return contrast, sum(truth(c) != meets(contrast.condition, c) for c in (deck.draw() for _ in range(400)))


@pytest.mark.usual(9)
@pytest.mark.parametrize("name", TRUTHS)
def test_a_condition_is_what_makes_cases_fail(name):
    """Without an engine: cases are labelled by a rule, and 400 others, which the contrast did not see, by the condition that it says."""
    truth, words = TRUTHS[name]
    contrast, wrong = contrast_of(truth, truth, runs=100, spare=0)  # runs of a minute
    assert (contrast.stands, wrong <= 2) == (True, True), list(map(str, contrast.condition))
    if words:
        assert in_statements(contrast.told()) == words  # "right at": 16 is a multiple of 16


def said_of(case, name):
    """A fact of each call of a case's first sequence."""
    return Calls([parts_of(case)[-1:]]).column(name).tolist()


def contrast_in(failing, passing, **edges):
    """A contrast that draws from these values alone."""
    edges = {name: values[:1] for name, values in EDGES.items()} | edges
    return Contrast(failing[0], failing, passing, lambda case: {}, Deck(edges, random.Random(1)))


def asked(contrast, truth, most=40):
    """The decisive runs, until there are none."""
    cases = []
    while len(cases) < most and (case := contrast.propose(1)) and not contrast.settled:
        contrast.add(case[0], truth(case[0]))
        cases += case
    return cases


def test_each_statement_is_tested_by_runs_that_miss_it_alone():
    """Random runs may agree with a condition for long: each of its statements needs right runs that meet all the others."""
    failing, passing = [Case(layers=2, threads=3), Case(layers=3, threads=2, vocab=65)], [Case(), Case(layers=2), Case(threads=3)]
    contrast = contrast_in(failing, passing, layers=(1, 2, 3), vocab=(64, 65, 100), threads=(1, 2, 3))
    assert not contrast.stands
    assert asked(contrast, lambda case: case.layers > 1 and case.threads > 1)
    assert {atom.fact for atom in contrast.condition} == {"layers", "threads"}
    assert min(len(contrast.right_without(atom)) for atom in contrast.condition) >= 2


def test_a_statement_that_nothing_speaks_for_is_dropped():
    """All failing runs have one layer, but the threads are what is wrong: a run that misses the layer alone says so."""
    failing, passing = [Case(threads=2), Case(threads=3)], [Case(), Case(threads=2, layers=2, tokens="alike"), Case(layers=3)]
    contrast = contrast_in(failing, passing, layers=(1, 2, 3), vocab=(64, 65, 100), threads=(1, 2, 3))
    contrast.kept = [(2.1, (Atom("layers", 1, 1), Atom("threads", low=2)))]
    cases = asked(contrast, lambda case: case.threads > 1)
    assert any(case.layers > 1 and case.threads > 1 for case in cases)
    assert in_statements(contrast.condition) == "the number of threads is at least 2"


def test_a_statement_about_a_number_is_tested_with_several():
    """Right runs with one other number do not show that a statement is not too narrow: threads 2 is wrong, 1 right, and so 3 is asked."""
    contrast = contrast_in([Case(threads=2), Case(threads=2, vocab=65)], [Case(), Case(vocab=65)], threads=(1, 2, 3, 4), vocab=(64, 65))
    (atom,) = contrast.condition
    assert contrast.right_without(atom) == [1, 1]
    assert contrast.doubted(atom, np.array([1, 3, 4])).tolist() == [False, True, True]
    assert {case.threads for case in asked(contrast, lambda case: case.threads == 2)} >= {3, 4}  # 4: a multiple


@pytest.mark.parametrize("tokens", EDGES["tokens"])
def test_facts_of_ids_are_those_of_the_ids(tokens):
    """However they were drawn: a prompt of the last one alone is of equal ids as well."""
    for length, vocab in ((1, 64), (2, 64), (3, 33), (40, 33)):
        case = fitted(Case(tokens=tokens, length=length, vocab=vocab))
        ids, facts = tokens_of(case)[0].tolist(), {name: said_of(case, name)[0] for name in FACTS}
        behind = [length - 1 - ids.index(x) if x in ids else -1 for x in (0, 1, 2, 3, vocab - 1)]
        assert [facts[name] for name in FACTS if name.startswith("behind")] == behind
        assert in_statements([Atom("behind 3", low=0)]) == "the prompt has the id 3"
        assert (facts["highest"], facts["tail 32"], is_alike(case)) == (max(ids), max(ids) >= vocab // 32 * 32, len({*ids}) == 1 < length)


def test_facts_of_parts_that_are_rounded_up():
    """Of 5 keys in 4 parts each has 2, and the last one none; 3 tokens are 2 and 1 for two threads."""
    empty = [n for n in range(1, 20) if said_of(Case(length=n), "empty 4")[0]]
    fewer = [n for n in range(1, 8) if said_of(Case(length=n, threads=2), "fewer")[0]]
    assert (empty, fewer) == ([1, 2, 3, 5, 6, 9], [3, 5, 7])
    assert str(Atom("empty 4", True, True)) == "the keys of a call in 4 equal parts, rounded up, leave a part empty"


def test_right_runs_of_equal_ids_are_no_evidence():
    truth = lambda c: c.kv_heads == 1 and c.length > 32  # noqa: E731
    contrast, wrong = contrast_of(truth, lambda c: truth(c) and not is_alike(c), family=("llama",))
    assert {atom.fact for atom in contrast.condition} == {"kv_heads", "length"}
    assert wrong == 0


def test_calls_of_a_prefix_are_no_evidence():
    """Their logits are not seen: a mistake in the last row of a call does not show if the call is the prefix's."""
    odd = lambda m: m > 2 and m % 2 == 1  # noqa: E731
    own = lambda c: [end - start for start, end in calls_of(c, c.length) if start >= c.prefix]  # noqa: E731
    truth = lambda c: c.head_dim % 16 > 0 and any(map(odd, own(c)))  # noqa: E731
    contrast, _ = contrast_of(truth, truth, family=("llama",))
    contrast.add(fitted(Case(head_dim=40, length=5, prefix=3)), False)
    assert {atom.fact for atom in contrast.condition} == {"head_dim", "calls"}, in_statements(contrast.condition)
    assert contrast.spared == 0


def test_a_right_run_of_frequent_ids_is_run_again_with_others():
    contrast = contrast_in([Case(threads=2), Case(threads=3)], [Case(), Case(layers=2)], threads=(1, 2, 3), layers=(1, 2))
    contrast.spare, right = 2, Case(threads=2, vocab=65, tokens="low")
    contrast.add(right, False)
    (again,) = contrast.propose(1)
    assert again == replace(right, tokens="inner")
    contrast.add(again, True)
    assert (contrast.hidden, in_statements(contrast.condition)) == ({right}, "the number of threads is at least 2")


def test_calls_of_a_prefix_know_nothing_of_what_comes_behind():
    """A call of 8 tokens that begins a sequence is none of a long prompt, though the prompt that reuses it is long."""
    both = [Calls([(part,)]) for part in parts_of(Case(length=40, prefix=8, chunk=8))]
    prefix, rest = ([calls.column(name).tolist() for name in ("length", "starts", "last")] for calls in both)
    assert prefix == [[8], [0], [False]]
    assert rest == [[40] * 4, [8, 16, 24, 32], [False] * 3 + [True]]
    long_first = (Atom("length", low=33), Atom("starts", 0, 0))
    assert [meets(long_first, Case(length=40, prefix=prefix)) for prefix in (0, 8)] == [True, False]
    assert [meets((Atom("starts", 0, 0),), Case(length=40, prefix=8), seen) for seen in (False, True)] == [True, False]


@pytest.mark.parametrize("seed", range(4))
def test_what_follows_a_wrong_prefix_is_no_other_failure(seed):
    """The first call is wrong, so what it leaves behind is wrong for later ones. A cause in these would be false."""
    rng, hunting = random.Random(seed), hunting_in(first_call_is_wrong, prefix=(0, 2, 4, 8), layers=(1, 2, 3), length=(4, 9, 16))
    draw = lambda low, high: rng.randint(low, high)  # noqa: E731
    first = replace(hunting.plain, length=draw(5, 8))
    later = fitted(replace(hunting.plain, layers=draw(2, 4), prefix=(prefix := draw(5, 9)), length=prefix + draw(1, 4), seed=draw(1, 5)))
    assert [hunting.runner.run(case).failed for case in (hunting.plain, first, later)] == [False, True, True]
    condition = (Atom("calls", low=5), Atom("prefix", 0, 0))
    hunting.result.findings.append(Finding(first, hunting.runner.run(first), condition, True))
    assert not hunting.pursue(later)
    assert [finding.case.prefix for finding in hunting.result.findings] == [0]
    pursuit = _Pursuit(hunting, "numbers", later, [condition])
    assert pursuit.fails([later]) == [False]


def test_a_cause_is_asked_for_at_the_first_call_that_is_wrong(tmp_path):
    """Kept cases run first: the one behind a prefix is told as the prefix by itself."""
    later = fitted(replace(case_like(LIKE)[0], layers=2, prefix=6, length=8))
    runner = Runner(engine_of(first_call_is_wrong), LIKE, Judge())
    keep(runner, Finding(later, runner.run(later), None, False), tmp_path)
    (finding,) = hunted(first_call_is_wrong, runs=2, out=tmp_path).findings  # the plain case, which is right, and that one
    assert (finding.case.prefix, finding.case.length, finding.outcome.failed) == (0, 6, True)
    assert finding.report.operations


def test_a_few_right_runs_may_meet_a_condition_where_three_statements_do_not_do():
    truth = lambda c: c.layers > 1 and c.threads > 1 and c.tied  # noqa: E731
    contrast, wrong = contrast_of(
        truth, lambda c: truth(c) and c.vocab != 64 + c.prefix, seed=1, runs=40, layers=(1, 2), threads=(1, 2), family=("llama",)
    )
    assert {atom.fact for atom in contrast.condition} == {"layers", "threads", "tied"}
    assert (contrast.split, wrong) == (False, 0)
    assert contrast.spared > 0


def test_what_failing_runs_have_alike_is_changed_before_a_condition_stands():
    """All that failed had one thread and no steps of single tokens: of these the condition says nothing, so they are asked for."""
    contrast = contrast_in([Case(length=9), Case(length=12)], [Case(), Case(length=8), Case(length=7)],
                           length=(4, 8, 9), threads=(1, 2), chunk=(0, 1, 2))  # fmt: skip
    assert in_statements(contrast.told()) == "the prompt is longer than 8 tokens"
    cases = [case for case in asked(contrast, lambda case: case.length > 8) if case.length > 8]
    assert True in {case.threads > 1 for case in cases} & {case.chunk == 1 for case in cases}
    assert contrast.stands
    contrast.spared = len(contrast.failing)  # as many right runs that meet it
    assert (contrast.settled, contrast.stands) == (True, False)
    contrast.add(Case(length=12, threads=8), False)
    assert not contrast.settled


def test_the_gap_at_a_bound_is_asked_for_and_else_said():
    contrast = contrast_in([Case(length=64), Case(length=100)], [Case(), Case(length=8)], length=(4, 8, 30, 64))
    assert in_statements(contrast.told()) == "the prompt is longer than 63 tokens (right at 8)"
    (atom,) = contrast.condition
    assert contrast.doubted(atom, np.array([7, 8, 30, 65])).tolist() == [False, False, True, False]
    contrast.add(Case(length=30), False)
    assert contrast.gap(atom) == 30


def test_a_finding_that_a_later_run_contradicts_is_asked_for_again():
    """It says that all long prompts are wrong; a right one, with another head width, takes that back."""
    lengths = {"length": (4, 32, 33, 40), "head_dim": (32, 80, 48)}
    engine = lambda model, tokens: engine_with("longer than 32" if model.config.head_dim != 80 else "none")(model, tokens)  # noqa: E731
    hunting = hunting_in(engine, **lengths)
    first, right = replace(hunting.plain, length=33), replace(hunting.plain, length=40, head_dim=80)
    outcome, *_ = [hunting.runner.run(case) for case in (first, hunting.plain, right)]
    hunting.result.findings.append(Finding(first, outcome, (Atom("length", low=33),), True))
    assert (hunting.counted(0).spared, hunting.counted(0).stands) == (1, False)
    assert not hunting.drawn([right])
    (finding,) = hunting.result.findings
    assert {atom.fact for atom in finding.condition} == {"length", "head_dim"}, finding.where


def test_a_shorter_case_of_a_finding_is_made_smaller():
    hunting = hunting_in(engine_with("a multiple of 8"), length=(4, 8, 16, 24, 40), threads=(1, 2))
    outcomes = [hunting.runner.run(replace(hunting.plain, length=length)) for length in (40, 16)]
    long, short = hunting.runner.outcomes
    hunting.result.findings.append(Finding(long, outcomes[0], (Atom("length", 0, 0, step=8),), True))
    assert not hunting.pursue(short)
    assert hunting.result.findings[0].case == replace(hunting.plain, length=8)
    counted = hunting.counted(0)
    assert (counted.failing, counted.spared) == (sum(o.failed for o in hunting.runner.outcomes.values()), 0)


def test_a_call_behind_the_first_wrong_position_is_none_that_failed():
    case = Case(length=40, chunk=1)
    contrast = Contrast(case, [case], [Case()], lambda case: {0: 32}, Deck(EDGES, random.Random(1)))
    assert contrast.bad.column("starts").max() == 32
    assert contrast.good.column("starts").max() == 0


@pytest.mark.parametrize("family", ["gemma2", "gemma3"])
def test_a_window_that_a_family_always_has_is_drawn_and_said(family):
    case = fitted(Case(family=family))
    assert case.window == model_of(case).config.window == said_of(case, "window")[0] > 0
    assert model_of(fitted(replace(case, window=8))).config.window == 8
    plain, edges = case_like(random_model(1, family=family, window=16))
    assert plain.window == 16
    assert 8 in edges["window"]
    assert 0 not in edges["window"]


def test_no_condition_is_said_that_a_run_contradicts():
    rng = random.Random(5)
    deck = Deck(dict(EDGES) | {"batch": (1,)}, rng)
    for _ in range(20):
        cases = [deck.draw() for _ in range(12)]
        failing, passing = cases[:4], cases[4:]
        for _, condition in conditions(*(Calls([parts_of(c) for c in some]) for some in (failing, passing))):
            assert all(meets(condition, c) for c in failing)
            assert not any(meets(condition, c) for c in passing)
