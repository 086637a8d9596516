"""The hunt: draws, the smallest case of each failure, its condition, until the time is over."""

import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import ShapeError, UnsupportedError
from ..judge.report.report import Report
from ..judge.verdict import Judged
from ..model.records import Model
from ..testing.models import write_gguf
from ..testing.space import CALL, EDGES, Case, case_like, fitted, in_words, model_of, tokens_of, with_fields
from .contrast import Condition, Contrast, is_alike, meets
from .draws import Deck
from .engine import Call, Command, Engine
from .facts import in_statements, prefix_of
from .outcome import Judge, Outcome, definition
from .probes import Place
from .shrink import changed, smallest

BASES = (
    *({"family": "llama", "weights": kind} for kind in ("float32", "float16", "Q8_0", "Q4_0")),
    *({"family": "bitnet-b1.58", "weights": kind} for kind in ("ternary", "TQ2_0", "TQ1_0")),
    *({"family": family} for family in EDGES["family"] if family not in ("llama", "bitnet-b1.58")),
)
"""The plainest cases that are tried until the engine takes one."""

GIVEN = ("weights", "table", "tied", "extras", "family")
"""What a file says beside sizes: an engine may not take all of it, or compute some of it in fewer bits."""

_TWICE = 6  # one of so many runs that pass is run again
_FIRST_PART = 0.25  # of the time, for the question which families and types the engine takes
_KEPT = 24  # models at a time
_HANG = 3.0, 5.0  # a failure that is a hang: seconds, and times of the slowest run, after which another run is one


_KINDS = {"bits": "other bits when run twice", "uneven": "farther off than other cases", "hang": "no end", "size": "writes too much",
          "crash": "crash", "call": "other numbers than alone in one prefill"}  # fmt: skip


@dataclass(frozen=True)
class Finding:
    """A failure: the smallest case of it, and the condition under which it happens."""

    case: Case
    outcome: Outcome
    condition: Condition | None  # None: no statement fits all runs
    stands: bool  # whether runs that could refute the condition confirmed it
    failing: int = 0  # runs that met the condition, and failed
    passing: int = 0  # runs that did not meet it, and passed
    spared: int = 0  # runs that met it, and passed nevertheless
    report: Report | None = None
    place: Place | None = None  # where probes of an engine that gives logits alone found the fault
    folder: Path | None = None
    others: tuple[Condition, ...] = ()  # under which it happens as well: no condition of three statements is of all

    @property
    def mistake(self) -> str:
        """What is known of the mistake, whatever it depends on: a sentence about an operation, without its numbers. Empty where none is."""
        text, place = self.outcome.text, self.place
        if place is not None and place.report is not None:
            text = f"WRONG at {place.cause or place.text}"
        return "".join(c for c in text if not c.isdigit()) * text.startswith("WRONG at")

    @property
    def what(self) -> str:
        return _KINDS.get(self.outcome.kind, self.outcome.kind.upper())

    @property
    def where(self) -> str:
        """The condition in words."""
        if self.condition is None:
            return f"no condition of three statements fits all runs; {self.failing} failed"
        right = "as alone" if self.outcome.kind == "call" else "right"
        counts = f"{self.failing} of {self.failing + self.spared} runs; {right} otherwise: {self.passing} of {self.passing}"
        if self.failing < 3 and not self.stands:  # nearly any statement fits
            return f"{self.what} in {self.failing} run{'s' * (self.failing > 1)}: too few to tell a condition"
        if not self.condition:
            return f"{self.what} in all {self.failing} runs"
        more = "" if self.stands else ", not yet tested"
        return f"{self.what} where {', or where '.join(map(in_statements, (self.condition, *self.others)))}: {counts}{more}"

    def as_dict(self) -> dict[str, Any]:
        """The finding, for JSON."""
        return {name: getattr(self, name) for name in ("where", "stands", "failing", "passing", "spared")} | {
            "kind": self.outcome.kind,
            "text": self.outcome.text,
            "condition": None if self.condition is None else [str(atom) for atom in self.condition],
            "others": [[str(atom) for atom in condition] for condition in self.others],
            "smallest": vars(self.case),
            "words": in_words(self.case),
            "report": None if self.report is None else self.report.as_dict(),
            "place": self.place and self.place.text,
            "cause": self.place and self.place.cause,
            "folder": self.folder and str(self.folder),
        }


@dataclass
class Hunt(Judged):
    """The result of a hunt, which is true if the engine ran and nothing failed."""

    findings: list[Finding] = field(default_factory=list)
    runs: int = 0
    refused: dict[str, str] = field(default_factory=dict)  # what the engine does not take, and what it says
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def exit_code(self) -> int:
        """As `check`'s: 1 for a failure, 2 where nothing could be compared."""
        kinds = {finding.outcome.kind for finding in self.findings}
        return (2 if kinds <= {"invalid"} else 1) if kinds else 0 if self.runs else 2

    @property
    def passed(self) -> bool:
        """Whether the engine ran and nothing failed."""
        return self.exit_code == 0

    @property
    def failure(self) -> str:
        """Each finding with its smallest case; without one, why the engine did not run."""
        lines = [f"{finding.where}; smallest: {in_words(finding.case)}" for finding in self.findings]
        return "\n".join(lines or self.notes or ["the engine was not run"])

    def as_dict(self) -> dict[str, Any]:
        """The result, for JSON."""
        fields = {"runs": self.runs, "seconds": round(self.seconds, 1), "refused": self.refused, "notes": self.notes}
        return {"findings": [finding.as_dict() for finding in self.findings]} | fields


Spread = Callable[[Callable[[Case], Outcome], Sequence[Case]], Iterable[Outcome]]
"""Maps the function over the cases, in their order."""

Runs = Callable[[int, int, float], None]  # called with the runs so far, the findings, and the seconds that are left


class Runner:
    """Runs cases, each in a private folder, and keeps the outcomes. spread: maps a function over some cases, in place of threads."""

    def __init__(
        self,
        engine: Engine,
        like: Model | None,
        judge: Judge,
        workers: int = 1,
        seconds: float = float("inf"),
        spread: Spread | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.engine, self.like, self.judge, self.workers = engine, like, judge, workers
        self.outcomes = self.all_runs = dict[Case, Outcome]()
        self.exact: dict[tuple[str, Any], bool] = {}  # by field and value: whether the plainest run had float32's rounding alone
        self.pool = ThreadPoolExecutor(workers)
        self.spread = spread or self.pool.map
        self.now = clock
        self.begin = clock()
        self.deadline = self.begin + seconds
        self.made = lru_cache(_KEPT)(lambda case: model_of(case, like))

    def __reduce__(self) -> tuple[Any, ...]:
        """For another process: what runs need. `like` may be large, and a small model like it has the same traits."""
        like = self.like
        if like is not None:
            own = {"head_dim": like.config.head_dim, "rope_width": like.config.rope_width or 0}
            like = self.model(fitted(with_fields(case_like(like)[0], own)))
        return Runner, (self.engine, like, self.judge), {"exact": self.exact}

    def model(self, case: Case) -> Model:
        """The model of a case."""
        return self.made(replace(case, **{name: getattr(Case(), name) for name in CALL}))

    def run(self, case: Case, engine: Engine | None = None) -> Outcome:
        """The outcome of one run, or of one that is known."""
        if case not in self.outcomes:
            try:
                outcome = self.run_model(self.model(case), call_of(case), self.even(case), engine)
            except (ShapeError, UnsupportedError) as error:  # as GGUF has no name for
                outcome = Outcome("refused", str(error))
            self.outcomes[case] = outcome
        return self.outcomes[case]

    def run_model(self, model: Model, call: Call, even: bool, engine: Engine | None = None) -> Outcome:
        """The outcome of a run of a model, which is in a file where the engine takes one."""
        engine, ours = engine or self.engine, definition(model, call)
        with tempfile.TemporaryDirectory(prefix="bitnet-np-hunt-", ignore_cleanup_errors=True) as name:
            path, inside = Path(name) / "model.gguf", Path(name) / "run"
            inside.mkdir()
            if engine.takes_path:
                write_gguf(path, model)
            begin = time.monotonic()
            ran = engine.run(path if engine.takes_path else model, model.config, call, inside)
            seconds = time.monotonic() - begin
            outcome = replace(self.judge.outcome(ran, model, call, ours, even), seconds=seconds)
            if isinstance(outcome.dump, Path):
                outcome = replace(outcome, dump=None, rows=tuple((first, np.array(x)) for first, x in outcome.rows))
        return outcome

    def even(self, case: Case) -> bool:
        """Whether the engine's plainest runs of the same family and types were exact but for float32's rounding."""
        return not case.experts and all(self.exact.get((name, getattr(case, name)), False) for name in GIVEN)

    def origin(self, case: Case) -> Case:
        """The reused prefix as a case, if it fails by itself: what comes behind it follows from it, and is no other failure."""
        return prefix if case.prefix and self.run(prefix := prefix_of(case)).failed else case

    def run_all(self, cases: Sequence[Case]) -> list[Outcome]:
        """Their outcomes, some at a time. Raises TimeoutError where the time is over before they begin."""
        if self.now() > self.deadline:
            raise TimeoutError
        new = [case for case in dict.fromkeys(cases) if case not in self.outcomes]
        self.outcomes.update(zip(new, self.spread(self.run, new), strict=True))
        for case in cases:  # in one order, whichever was first: the next draws depend on it
            self.outcomes[case] = self.outcomes.pop(case)
        return [self.outcomes[case] for case in cases]

    def twice(self, case: Case) -> Outcome:
        """The outcome of a second run, where its bits are others than the first one's; else the first."""
        first = self.outcomes.pop(case)
        second = self.run(case)
        pairs = zip(first.rows, second.rows, strict=False)
        if first.kind == second.kind == "ok" and any(a[1].tobytes() != b[1].tobytes() for a, b in pairs):
            second = replace(second, kind="bits", text="the same call gave other bits")
        elif first.kind == "ok" != second.kind:
            second = replace(second, text=f"{second.text}; another run of the same call was right")
        self.outcomes[case] = second
        return second


Explain = Callable[[Runner, Finding], Finding]


def call_of(case: Case) -> Call:
    return Call(tokens_of(case), case.chunk, case.threads, case.prefix)


def hunt_engine(
    runners: Sequence[Runner], most: int | None, seed: int, single: bool, first: Sequence[Case], progress: Runs, explain: Explain
) -> Hunt:
    """Hunt for failures of an engine. runners: of runs, and of the same beside what their tokens give alone. most: runs at most. single:
    whether calls have one sequence. first: cases that are run before others are drawn. explain: completes a finding."""
    runner, calls = runners[0], _Hunting(runners[1], most, seed, progress)
    hunt = _Hunting(runner, most, seed, progress, calls)
    result = hunt.result

    def complete() -> None:
        runner.deadline = float("inf")
        for one in (hunt, calls):
            one.drop_explained()
            for n in range(len(one.result.findings)):
                one.result.findings[n] = explain(one.runner, one.counted(n))

    for step in (lambda: hunt.all(first, single), complete):
        try:
            with suppress(TimeoutError):
                step()
        except KeyboardInterrupt:
            result.notes.append("ended by Ctrl-C")
    runner.pool.shutdown(cancel_futures=True)
    result.findings[:] = [*joined(result.findings), *calls.result.findings]
    result.runs, result.seconds = len(runner.all_runs), runner.now() - runner.begin
    return result


def joined(findings: Sequence[Finding]) -> list[Finding]:
    """Findings of one mistake as one, which has several conditions."""
    kept: dict[Any, Finding] = {}
    for n, finding in enumerate(findings):
        key = finding.mistake if finding.mistake and finding.condition else n
        if (first := kept.setdefault(key, finding)) is not finding and finding.condition:
            others = tuple(dict.fromkeys((*first.others, finding.condition)))
            first = replace(first, others=others, stands=first.stands and finding.stands, passing=first.passing - finding.spared)
            kept[key] = replace(first, failing=first.failing + finding.failing, spared=first.spared + finding.spared)
    return [*kept.values()]


class _Hunting:
    """A hunt in the outcomes of a runner. calls: the hunt for numbers that depend on the call, in the same cases."""

    def __init__(self, runner: Runner, most: int | None, seed: int, progress: Runs, calls: "_Hunting | None" = None) -> None:
        self.runner, self.most, self.progress, self.calls = runner, most, progress, calls
        self.rng, self.result, self.plain = random.Random(seed), Hunt(), Case()
        self.refusals: Counter[tuple[str, Any]] = Counter()

    @property
    def over(self) -> bool:
        done, left = len(self.runner.all_runs), self.runner.deadline - self.runner.now()
        self.progress(done, len(self.result.findings), left)
        return left < 0 or (self.most is not None and done >= self.most)

    def all(self, first: Sequence[Case], single: bool) -> None:
        """Ask what the engine takes, then draw cases until the time is over."""
        like, engine = self.runner.like, self.runner.engine
        self.plain, edges = case_like(like) if like else (fitted(Case()), dict(EDGES))
        fixed = {"chunk", "threads", "prefix"} - {*engine.knobs} | ({"batch", "ragged"} if single else set())
        edges |= {name: edges[name][:1] for name in fixed}
        if not self.base(like is None):
            return
        edges |= {name: tuple(dict.fromkeys([getattr(self.plain, name), *edges[name]])) for name in ("family", "weights")}
        self.deck = Deck(edges, self.rng)
        self.rng.seed(self.rng.random())
        for case in (self.plain, *first):
            self.drawn([case])
        self.learn_limits()
        passed = 0
        while not self.over:
            cases = [self.deck.draw() for _ in range(self.runner.workers)]
            if self.drawn(cases):
                continue
            passed += len(cases)
            due = passed // _TWICE > (passed - len(cases)) // _TWICE and self.runner.outcomes[cases[0]].kind == "ok"
            if due and self.runner.twice(cases[0]).failed:
                self.pursue(cases[0])
            elif self.calls is not None and not self.runner.even(cases[0]):  # where it has roundings alone, the definition tells more
                self.calls.deck, self.calls.plain = self.deck, self.plain
                self.calls.drawn(cases[:1])

    def base(self, free: bool) -> bool:
        """Find a plainest case that the engine takes, and the kind of file that it takes tokens from."""
        runner, text, bad = self.runner, "", None
        for change in BASES if free else ({},):
            case = fitted(replace(self.plain, **change))
            for engine in runner.engine.variants():
                runner.outcomes.pop(case, None)
                outcome = runner.run(case, engine)
                if outcome.kind in ("ok", "wrong"):
                    self.plain, runner.engine = case, engine
                    runner.exact = {(name, getattr(case, name)): _exact(outcome, case) for name in GIVEN}
                    return True
                text = text or f"{outcome.kind}: {outcome.text}"
                bad = bad or ((case, engine, outcome) if outcome.kind in ("invalid", "hang", "size") else None)
            if self.over or outcome.kind in ("hang", "size"):
                break
        runner.outcomes.clear()
        if bad is not None:
            self.plain, runner.engine, runner.outcomes[bad[0]] = bad
            return True
        self.result.notes.append(f"the engine took no model: {text}")
        return False

    def learn_limits(self) -> None:
        """Which families, types and batches the engine takes: each alone, in the plainest case. Numbers that are wrong are a failure."""
        runner, edges, until = self.runner, self.deck.edges, self.runner.begin + _FIRST_PART * (self.runner.deadline - self.runner.begin)
        if not runner.engine.batches[1]:
            self.deck.without("ragged", True)
        several = replace(self.plain, batch=2, length=8)
        changes: list[tuple[str, Any]] = [(name, 2) for name in ("batch", *runner.engine.knobs) if len(edges[name]) > 1]
        changes += [(name, x) for name in ("ragged", "window", "experts", "rope_width") for x in edges[name][1:2]]
        changes += [(name, x) for name in GIVEN for x in edges[name][1:]]
        cases = [changed(several if name == "ragged" else self.plain, name, x) for name, x in changes]
        trials = [(name, x, case) for (name, x), case in zip(changes, cases, strict=True) if case != self.plain]
        wrong: list[Case] = []
        while trials and not (self.over or (runner.now() > until and trials[0][0] in GIVEN)):
            some, trials = trials[: runner.workers], trials[runner.workers :]
            for (name, value, case), outcome in zip(some, runner.run_all([case for *_, case in some]), strict=True):
                limit = outcome.kind == "crash" and not outcome.text.startswith("SIG")
                if outcome.kind == "refused" or limit or (name in ("batch", "ragged") and outcome.kind == "invalid"):
                    self.leave_out(name, value, outcome)
                elif outcome.failed:
                    wrong.append(case)
                if name in GIVEN:
                    runner.exact[name, value] = _exact(outcome, case)
        for value in [value for name, value, _ in trials if name == "family"]:
            self.deck.without("family", value)
        for case in wrong:  # now that it is known what can be drawn
            self.pursue(case)

    def drawn(self, cases: Sequence[Case]) -> bool:
        """Run some cases; True where one failed."""
        for case, outcome in zip(cases, self.runner.run_all(cases), strict=True):
            if outcome.kind == "refused":
                self.refuse(case, outcome)
            if outcome.failed and self.pursue(case):
                return True
            if outcome.kind == "ok":
                self.doubt(case)
        return False

    def refuse(self, case: Case, outcome: Outcome) -> None:
        """A value that was never taken is drawn no more, where it is the only such value of a case, or of many."""
        taken = [c for c, o in self.runner.outcomes.items() if o.kind != "refused"]
        values = {(name, getattr(case, name)) for name, known in self.deck.edges.items() if getattr(case, name) != known[0]}
        suspects = [(name, value) for name, value in values if all(getattr(c, name) != value for c in taken)]
        self.refusals.update(suspects)
        for suspect in suspects:
            if len(suspects) == 1 or self.refusals[suspect] >= 5:
                self.leave_out(*suspect, outcome)

    def leave_out(self, name: str, value: Any, outcome: Outcome) -> None:
        """Draw a value no more, and no other one where the engine does not know what the field is."""
        self.result.refused[f"{name} {value}"] = outcome.text
        self.deck.without(name, value)
        if name in ("batch", "window", "experts", "rope_width", "chunk", "prefix"):
            self.deck.edges[name] = self.deck.edges[name][:1]

    def pursue(self, case: Case) -> bool:
        """Make a finding of a case that failed, unless one explains it, or does with a wider condition. False where one does as it is."""
        case = self.runner.origin(case)
        group, findings, engine = self.runner.outcomes[case].group, self.result.findings, self.runner.engine
        known = {n: one.condition for n, one in enumerate(findings) if one.outcome.group == group and one.condition is not None}
        for n, condition in known.items():
            if meets(condition, case):
                self.shorten(n)
                return False
        if group == "hang" and isinstance(engine, Command):
            slowest = max((o.seconds for o in self.runner.outcomes.values() if o.kind == "ok"), default=0.0)
            self.runner.engine = replace(engine, limit=min(engine.limit, max(_HANG[0], _HANG[1] * slowest)))
        for n in known:
            wider = self.pursuit(n).finding(spare=0)
            if wider.condition is not None and meets(wider.condition, case):
                findings[n] = wider
                self.shorten(n)
                break
        else:
            pursuit = _Pursuit(self, group, case, [*known.values()])
            with suppress(TimeoutError):
                pursuit.shrink()
            findings.append(pursuit.finding())
            self.shorten(len(findings) - 1)
        self.runner.engine = engine
        return True

    def pursuit(self, n: int) -> "_Pursuit":
        """Of a finding, beside the others."""
        others = [one for i, one in enumerate(self.result.findings) if i != n]
        finding, group = self.result.findings[n], self.result.findings[n].outcome.group
        explained = [one.condition for one in others if one.outcome.group == group and one.condition is not None]
        return _Pursuit(self, group, finding.case, explained)

    def shorten(self, n: int) -> None:
        """Take the shortest case of a finding: ids, a window or threads may have kept its smallest one long."""
        finding, pursuit, known = self.result.findings[n], self.pursuit(n), {*self.runner.outcomes}
        shorter = [c for c in pursuit.runs()[0] if c.length < finding.case.length and meets(finding.condition or (), c)]
        if not shorter:
            return
        pursuit.smallest = min(shorter, key=lambda case: case.length)
        call = {name: getattr(pursuit.smallest, name) for name in (*CALL, "vocab", "seed")}
        if pursuit.fails([plainer := fitted(replace(finding.case, **call))])[0]:  # with the plain model already
            pursuit.smallest = plainer
        try:
            pursuit.shrink()
        finally:
            finding, case = self.result.findings[n], pursuit.smallest
            self.result.findings[n] = replace(finding, case=case, outcome=self.runner.outcomes[case])
        for case in [case for case in pursuit.runs()[1] if case not in known]:  # in the order of the runs
            self.doubt(case)

    def doubt(self, case: Case) -> None:
        """Ask again for the condition of a finding that a run contradicts, which is right."""
        for n, finding in enumerate(self.result.findings):
            certain = finding.stands and finding.condition and not finding.spared and not is_alike(case)
            if certain and meets(finding.condition or (), case, seen=True):
                self.result.findings[n] = self.pursuit(n).finding()

    def drop_explained(self) -> None:
        """Drop findings of which the conditions of others explain all runs."""
        for n in reversed(range(len(self.result.findings))):
            if not self.counted(n).failing:
                del self.result.findings[n]

    def counted(self, n: int) -> Finding:
        """A finding with the runs of the whole hunt."""
        finding, (failing, passing) = self.result.findings[n], self.pursuit(n).runs()
        met = [c for c in failing if finding.condition is None or meets(finding.condition, c)]
        spared = [c for c in passing if finding.condition and meets(finding.condition, c, seen=True)]
        stands = finding.stands and 10 * sum(not is_alike(case) for case in spared) <= len(met)
        return replace(finding, stands=stands, failing=len(met), passing=len(passing) - len(spared), spared=len(spared))


@dataclass
class _Pursuit:
    """One failure, followed from the case that showed it to its smallest case and its condition."""

    hunt: _Hunting
    group: str  # of the outcomes that are this failure
    smallest: Case
    explained: list[Condition]  # of other failures of the group

    def shrink(self) -> None:
        """Find the smallest case. Raises TimeoutError where the time is over before."""
        runner = self.hunt.runner
        bad = runner.outcomes[self.smallest].bad
        hint = 1 + min(p for _, p in bad) if bad else None
        smallest(self.smallest, self.hunt.plain, self.fails, partial(setattr, self, "smallest"), hint, runner.workers)

    def finding(self, spare: int = 2) -> Finding:
        """What is known of it when nothing is left to ask, or the time is over. spare: kinds of right runs that may meet the condition; 0:
        only a condition of all failing cases is looked for, and no longer than there may be one."""
        runner = self.hunt.runner
        wrong_rows = lambda case: dict(sorted(runner.outcomes[case].bad, reverse=True))  # noqa: E731 - the first position of each
        contrast = Contrast(self.smallest, *self.runs(), wrong_rows, self.hunt.deck, spare)
        with suppress(TimeoutError):
            while not (self.hunt.over or (contrast.split and not spare)) and (cases := contrast.propose(runner.workers)):
                for case, outcome in zip(cases, self.run(cases), strict=True):
                    if outcome.kind == "refused":
                        self.hunt.refuse(case, outcome)
                    elif outcome.kind == "ok" or self.is_same(case, outcome):
                        contrast.add(case, outcome.failed)
        condition = contrast.told() if spare or not contrast.split else None
        return Finding(self.smallest, runner.outcomes[self.smallest], condition, contrast.stands, spared=contrast.spared)

    def is_same(self, case: Case, outcome: Outcome) -> bool:
        """Whether a run is this failure: no other one explains it, or its reused prefix, if that fails by itself."""
        if not outcome.failed or outcome.group != self.group or any(meets(condition, case) for condition in self.explained):
            return False
        origin = self.hunt.runner.origin(case) if self.explained else case
        return origin == case or self.is_same(origin, self.hunt.runner.outcomes[origin])

    def run(self, cases: Sequence[Case]) -> list[Outcome]:
        """Their outcomes; of two runs each where the failure is that these differ."""
        runner, outcomes = self.hunt.runner, self.hunt.runner.run_all(cases)
        return [runner.twice(c) if self.group == "bits" and o.kind == "ok" else o for c, o in zip(cases, outcomes, strict=True)]

    def fails(self, cases: Sequence[Case]) -> list[bool]:
        if self.hunt.over and self.hunt.most is not None:
            raise TimeoutError
        return [self.is_same(*pair) for pair in zip(cases, self.run(cases), strict=True)]

    def runs(self) -> tuple[list[Case], list[Case]]:
        """This failure's cases, and all that pass."""
        outcomes = [*self.hunt.runner.outcomes.items()]  # asking for the origin of one adds others
        return [c for c, o in outcomes if self.is_same(c, o)], [c for c, o in outcomes if o.kind == "ok"]


def _exact(outcome: Outcome, case: Case) -> bool:
    """Whether a run that passed had float32's own rounding alone. Codes of activations may flip where they are rounded to int8."""
    return outcome.kind == "ok" and outcome.far < 1e-10 and case.weights not in ("ternary", "TQ1_0", "TQ2_0")
