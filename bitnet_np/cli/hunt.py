"""`bitnet-np hunt`: run an engine on random models and calls, and say under which condition it fails."""

import argparse
import sys
from contextlib import nullcontext
from functools import partial

from ..base.errors import listed
from ..base.tables import printable
from ..base.validate import integer, positive
from ..files.load import load
from ..hunt.api import hunt
from ..hunt.keep import again
from ..hunt.outcome import Judge
from ..hunt.run import Finding, Hunt
from ..judge.options import Options
from ..sweep import cluster
from ..testing.space import in_words
from . import progress
from .arguments import profile_of
from .printing import answer, fitted, outcome, width


def run(arguments: argparse.Namespace) -> int:
    """Print the findings; returns the exit code."""
    profile = profile_of(arguments)
    judge = Judge(profile.dialect, Options(profile.precision))
    if arguments.case is not None:
        run_again = again(arguments.case, None, judge)
        text = outcome(not run_again.failed, f" ({run_again.kind}){': ' if run_again.text else ''}{printable(run_again.text)}")
        return answer(arguments, {"kind": run_again.kind, "text": run_again.text}, text, int(run_again.failed))

    def progress_of(runs: int, findings: int, left: float) -> None:
        spent = arguments.time - left
        label = f"hunting, {runs} runs, {findings} findings"
        progress.bar(label)(min(int(spent), int(arguments.time)), int(arguments.time) + 1)

    with nullcontext() if arguments.scheduler is None else cluster.connected(arguments.scheduler, None) as client:
        result = hunt(
            arguments.engine,
            None if arguments.model is None else load(arguments.model),
            time=positive("--time", arguments.time),
            runs=arguments.runs,
            workers=integer("--workers", arguments.workers, 1, 1024),
            seed=integer("--seed", arguments.seed, 0),
            limit=positive("--run-time", arguments.run_time),
            out=arguments.out,
            single=arguments.single,
            judge=judge,
            spread=None if client is None else partial(cluster.in_order, client),
            progress=progress_of,
        )
    progress.clear()
    for note in result.notes:
        print(f"bitnet-np: {printable(note)}", file=sys.stderr)
    return answer(arguments, result.as_dict(), _printed(result), result.exit_code)


def _printed(result: Hunt) -> str:
    findings = result.findings
    first = f": {len(findings)} finding{'s' * (len(findings) != 1)} in {result.runs} runs, {result.seconds:.0f} s"
    parts = [outcome(result.passed, first), *map(_finding, findings)]
    if result.refused:
        parts.append(f"not taken by the engine, and no failure: {listed(list(result.refused), 12)}")
    return fitted("\n\n".join(parts), width())


def _finding(finding: Finding) -> str:
    lines = [printable(finding.where), f"smallest: {in_words(finding.case)}", printable(finding.outcome.text)]
    if finding.report is not None and finding.report.reason != finding.outcome.text:
        lines.append(f"check: {printable(finding.report.headline)}")
    if finding.place is not None:
        lines.append(f"probes: {printable(finding.place.cause or finding.place.text)}")
    if finding.folder is not None:
        lines.append(f"case: {finding.folder}; bitnet-np hunt --case {finding.folder} runs it again")
    return "\n".join(lines)
