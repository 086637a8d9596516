"""What vectors.h and vectors.rs decide is what the judge decides: on planted faults, roundings of each kind, and honest engines."""

import re
from contextlib import suppress
from xml.etree import ElementTree

import numpy as np
import pytest
from checkers import BUILDERS, FOLDER, passed

from bitnet_np import EXACT, LLAMA_CPP, load
from bitnet_np.engine.network import Runtime
from bitnet_np.engine.tokens import check_tokens, pad
from bitnet_np.judge import bounds, measures
from bitnet_np.judge.bounds import close, invalid_tensor, within
from bitnet_np.judge.check import content_of
from bitnet_np.judge.law.expected import WIDE
from bitnet_np.judge.law.graph import TOKENS, operations
from bitnet_np.judge.law.roundings import to_bfloat16, to_digits, to_float16
from bitnet_np.judge.options import Options
from bitnet_np.judge.sequences import judge_sequences
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.points import Key
from bitnet_np.vectors import models, pack
from bitnet_np.vectors import operations as of_operations
from bitnet_np.vectors.choose import cases
from scripts import mutations
from scripts.judging.engine import Engine, accumulate, precise

f32 = np.float32


@pytest.fixture(scope="session", params=BUILDERS)
def program(request, tmp_path_factory):
    """A checker of each language that replays an engine's numbers."""
    return BUILDERS[request.param](tmp_path_factory.mktemp(request.param))


def given(folder, outputs):
    """The folder with an engine's numbers, by the ids of cases and the names of outputs."""
    folder.mkdir()
    for (case, name), numbers in outputs.items():
        with np.errstate(over="ignore"):
            np.asarray(numbers).astype("<f4").tofile(folder / f"{case}.{name}")
    return folder


# --- faults and honest engines ----------------------------------------------------------------------------------------------------------


class Dumps:
    """A pack of the operations of dumps, the numbers that the dumps have, and the judge's verdicts."""

    def __init__(self):
        self.cases, self.numbers, self.right = [], {}, {}

    def add(self, name, model, ids, dump, keys):
        """Operations of a dump whose inputs it has."""
        inputs = {key: x.reshape(len(x), -1).astype(np.float64) for key, x in dump.items()} | {TOKENS: ids}
        for site in operations(model, EXACT):
            if site.key not in keys or site.key not in dump or any(key not in inputs for key in site.inputs):
                continue
            expected = site.expected(WIDE, *(inputs[key] for key in site.inputs))
            theirs = inputs[site.key]
            if theirs.shape != expected.value.shape:
                continue  # the checker gives an engine room for as many numbers as there are
            case = f"{name}-{site.key}"
            self.cases.append(pack.Case(case, "dump", "", "", {}, {"y": pack.bounded(expected, expected.value.shape)}))
            self.numbers[case, "y"] = theirs
            with np.errstate(all="ignore"):
                judged = within(expected, theirs.astype(np.float64))[0]
            self.right[case] = not invalid_tensor(theirs.astype(f32), expected.value) and judged != Verdict.WRONG


class _Done(Exception):
    """An engine has computed the tensor that is looked at."""


@pytest.fixture(scope="module")
def of_dumps(tmp_path_factory):
    """The tensor that each fault of scripts/mutations.py spoils, and all tensors of honest engines."""
    folder, dumps, patch = tmp_path_factory.mktemp("dumps"), Dumps(), pytest.MonkeyPatch()
    run, step, blamed = Engine.run, Engine.step, Key("", None)

    def partly(engine):
        with suppress(_Done):
            run(engine)
        return engine.t

    def until_blamed(engine, name, layer, compute):
        step(engine, name, layer, compute)
        if Key(name, layer) == blamed:
            raise _Done

    patch.setattr(Engine, "run", partly)
    patch.setattr(Engine, "step", until_blamed)  # what comes behind the fault takes most of the time
    for n, (model, ids, fault) in enumerate(mutations.every_fault()):
        blamed = Key(fault.blamed, fault.layer)
        dump, ids = fault.make(model, ids)
        dumps.add(f"fault{n}", model, ids, dump, {blamed})
    patch.undo()
    model, tokens = mutations.embedded_case()
    for n, dot in enumerate((lambda x, w: x @ w.T, accumulate(1), precise)):
        dump = Engine(model, tokens, dot=dot).run()
        dumps.add(f"honest{n}", model, tokens, dump, {*dump})
    patch.setattr(pack, "MOST_BYTES", 1 << 30)
    pack.write(folder / "pack", dumps.cases, "0")
    patch.undo()
    return dumps, folder / "pack", given(folder / "numbers", dumps.numbers)


def test_faults_in_whole_operations_are_found_and_honest_engines_pass(program, of_dumps):
    """79 of the 89 faults spoil an operation. The others, such as a short vocabulary, are of dumps as a whole."""
    dumps, folder, numbers = of_dumps
    verdicts, text = passed(program, folder, numbers)
    assert verdicts == dumps.right, text
    found = [fine for case, fine in verdicts.items() if case.startswith("fault")]
    assert (len(found), sum(found)) == (79, 0)
    honest = [fine for case, fine in verdicts.items() if case.startswith("honest")]
    assert len(honest) > 150
    assert all(honest)


# --- roundings and mistakes in every case ------------------------------------------------------------------------------------------------


def _noisy(share):
    def change(value, limit):
        signs = np.random.default_rng(0).uniform(-1, 1, value.shape)
        return value + share * np.where(np.isfinite(limit), limit, 0) * signs

    return change


def _one(share):
    def change(value, limit):
        x = value.copy()
        x.flat[x.size // 2] += share * np.where(np.isfinite(limit), limit, 0).flat[x.size // 2]
        return x

    return change


def _row(share):
    def change(value, limit):
        x = value.copy()
        x[-1] += share * np.where(np.isfinite(limit), limit, 0)[-1] * np.random.default_rng(0).choice([-1, 1], x[-1].shape)
        return x

    return change


def _put(number):
    def change(value, limit):
        x = value.copy()
        x.flat[-1] = number
        return x

    return change


CHANGES = {
    "right": lambda value, limit: value,
    "a factor": lambda value, limit: value * (1 + 2e-6),
    "a factor within": lambda value, limit: value * (1 + 8e-7),
    "a small factor": lambda value, limit: value * (1 + 2e-7),
    "noise within": _noisy(0.2),
    "noise everywhere": _noisy(0.98),
    "noise beyond": _noisy(3),
    "one number within": _one(0.5),
    "one number beyond": _one(1.5),
    "one number far": _one(1e6),
    "one row beyond": _row(1.2),
    "float16": lambda value, limit: to_float16(value),
    "bfloat16": lambda value, limit: to_bfloat16(value),
    "TF32": lambda value, limit: to_digits(value, 11),
    "20 bits": lambda value, limit: to_digits(value, 20),
    "zeros": lambda value, limit: 0 * value,
    "signs": lambda value, limit: -value,
    "shifted": lambda value, limit: np.roll(value, 1),
    "a constant": lambda value, limit: value + 1e-3 * np.abs(value[np.isfinite(value)]).max(initial=0),
    "NaN": _put(np.nan),
    "infinity": _put(-np.inf),
    "ten percent": lambda value, limit: value * 1.1,
}


def _judged(rule, theirs):
    """The judge's verdict on an output, by what its rule was made of."""
    name, made = rule
    if name == "bounds":
        expected, rows, open_ended = made
        parts = (np.broadcast_to(np.asarray(x, np.float64), expected.value.shape)[rows] for x in expected[:4])
        value, worst, square, reach = (part.reshape(len(part), -1).copy() for part in parts)
        y, any_number = theirs.astype(np.float64).reshape(value.shape), open_ended.reshape(value.shape)
        value[any_number] = y[any_number] = square[any_number] = 0
        within_bounds = within(expected._replace(value=value, worst=worst, square=square, reach=reach), y)[0] != Verdict.WRONG
        return bool(np.isfinite(y).all()) and within_bounds
    value, reach, first = made
    if not np.isfinite(theirs).all():
        return False
    if name == "logits" and not first:
        return measures.judge(value, theirs.astype(f32), reach).verdict not in (Verdict.WRONG, Verdict.INVALID)
    return close(value.astype(np.float64), theirs.astype(np.float64), reach)[0] != Verdict.WRONG


@pytest.fixture(scope="module")
def of_cases(tmp_path_factory):
    """A small pack, and by the identity of outputs' numbers what the judge has made their rules of."""
    folder, rules, patch = tmp_path_factory.mktemp("cases"), {}, pytest.MonkeyPatch()
    bounded, across = pack.bounded, pack.across

    def noted_bounds(expected, shape, bits=None, rows=slice(None)):
        output = bounded(expected, shape, bits, rows)
        rules[id(output.arrays["value"])] = ("bounds", (expected, rows, np.isinf(output.arrays["limit"])))
        return output

    def noted_across(value, reach, is_logits):
        output = across(value, reach, is_logits)
        rules[id(output.arrays["value"])] = (output.rule, (value, reach, 0))
        return output

    patch.setattr(of_operations, "bounded", noted_bounds)
    patch.setattr(models, "across", noted_across)
    made = list(cases("small", types=("float32", "ternary", "Q4_0", "Q4_K"), families=("llama", "qwen3moe")))
    patch.undo()
    pack.write(folder / "pack", made, "0")
    return folder, made, rules


@pytest.mark.parametrize("change", CHANGES)
def test_roundings_and_mistakes_are_judged_as_the_judge_does(program, of_cases, tmp_path, change):
    folder, made, rules = of_cases
    numbers, right = {}, {}
    for case in made:
        for name, output in case.outputs.items():
            value = output.arrays.get("bits", output.arrays["value"]).astype(np.float64)
            limit = output.arrays.get("limit", np.zeros(value.shape))
            if output.rule in ("tensor", "logits"):
                limit = np.sqrt(output.arrays["most"][:, None] * np.square(value).mean(axis=1, keepdims=True)) + 0 * value
            with np.errstate(all="ignore"):
                theirs = numbers[case.id, name] = CHANGES[change](value, limit).astype(f32)
            rule = rules.get(id(output.arrays["value"]))
            if output.rule == "equal":
                fine = bool(np.array_equal(theirs, output.arrays["value"], equal_nan=True))
            elif rule is None:  # some rows of a tensor
                continue
            else:
                with np.errstate(all="ignore"):
                    fine = _judged(rule, theirs)
            right[case.id] = right.get(case.id, True) and fine
    verdicts, text = passed(program, folder / "pack", given(tmp_path / "numbers", numbers))
    assert {case: verdicts[case] for case in right} == right, text
    assert "times what it should be" in text or change != "a factor within"
    of_one = [fine for case, fine in right.items() if not case.startswith("model")]
    assert all(of_one) == (change in ("right", "noise within")) or change in ("a small factor", "one number within")


KNOWN_TO_CHECK = {"bfloat16", "a constant", "one row beyond"}
"""Changes of logits that `check` tells more of than their distance: numbers of bfloat16, a sum that is left, the type of the weights."""


@pytest.mark.parametrize("way", ["model-llama-whole", "model-qwen3moe-whole", "model-llama-as-llama-cpp"])
def test_limits_of_models_are_those_of_check(way, of_cases, tmp_path):
    """`check --strict` without its search for causes."""
    _, made, rules = of_cases
    case = next(case for case in made if case.id == way)
    (tmp_path / "model.gguf").write_bytes(case.files[case.words["gguf"]])
    runtime = Runtime(load(tmp_path / "model.gguf"), LLAMA_CPP if way.endswith("llama-cpp") else EXACT).checked()
    tokens = check_tokens(runtime.model.config, *pad([case.inputs["tokens"].astype(np.int64)]))
    output = case.outputs["logits"]
    value = output.arrays["value"].astype(np.float64)
    limit = np.sqrt(output.arrays["most"][:, None] * np.square(value).mean(axis=1, keepdims=True)) + 0 * value
    found = {}
    for name, change in CHANGES.items():
        with np.errstate(all="ignore"):
            theirs = change(value, limit).astype(f32)
            ours = _judged(rules[id(output.arrays["value"])], theirs)
        content = content_of(theirs, tokens, runtime.model.config, 0)
        found[name] = ours, judge_sequences(runtime, tokens, content, Options(strict=True), search=False).verdict <= Verdict.FLIPS
    assert {name for name, (ours, theirs) in found.items() if ours != theirs} <= KNOWN_TO_CHECK
    assert {ours for ours, _ in found.values()} == {True, False}


# --- what is printed ----------------------------------------------------------------------------------------------------------------------


def test_tap_and_junit_say_the_same(program, of_cases, tmp_path):
    """A failing case names the place, the worst number and its limit; cases that are not supported are skipped."""
    folder, made, _ = of_cases
    case = next(case for case in made if case.id == "rms_norm-33")
    wrong = case.outputs["y"].arrays["bits"].copy()
    wrong[1, 5] += f32(0.25)
    numbers = given(
        tmp_path / "numbers",
        {("rms_norm-33", "y"): wrong, ("add-33", "y"): next(c for c in made if c.id == "add-33").outputs["y"].arrays["bits"]},
    )
    verdicts, text = passed(program, folder / "pack", numbers, tmp_path / "junit.xml")
    assert verdicts == {"rms_norm-33": False, "add-33": True}
    lines = text.splitlines()
    assert lines[0] == "TAP version 13"
    assert f"1..{len(made)}" in lines
    assert f"# 1 of 2 failed, {len(made) - 2} skipped" in lines
    failure = lines[lines.index(next(line for line in lines if line.startswith("not ok"))) + 1]
    assert "y[1, 5] is " in failure
    assert "expected" in failure
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert [test.get("name") for test in suite.iter("testcase")] == [case.id for case in made]
    assert len(suite.findall(".//skipped")) == len(made) - 2
    (message,) = (node.get("message") for node in suite.iter("failure"))
    assert message in failure


def test_a_run_of_nothing_is_no_pass(program, of_cases, tmp_path):
    folder, _, _ = of_cases
    with pytest.raises(AssertionError, match="Bail out! no case ran"):
        passed(program, folder / "pack", given(tmp_path / "numbers", {}))


def test_limits_are_the_judges_own():
    """The constants that the checkers repeat."""
    tenth = measures.ROUNDING_LIMIT / 10
    for name in ("vectors.h", "vectors.rs"):
        numbers = {float(word) for word in re.findall(r"\d+\.\d+(?:e-?\d+)?|\d+e-?\d+", (FOLDER / name).read_text("utf-8"))}
        assert {bounds.TINY, bounds.U, bounds.ROUNDING_ACROSS, measures.ROUNDING_LIMIT, tenth, measures.SYSTEMATIC, 0.4} <= numbers
