"""A sweep: the rows of a plan, each computed once, whatever stops it in between."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.progress import Progress, silent
from . import rows
from .cluster import results
from .lock import held
from .rows import Row
from .table import write_table
from .tasks import OK, WRONG, Outcome, Task, perform

ROWS = "rows.jsonl"


@dataclass(frozen=True)
class Summary:
    """What a sweep found."""

    rows: tuple[Row, ...]  # in the plan's order
    machines: tuple[dict[str, Any], ...]  # each machine once

    @property
    def outcomes(self) -> dict[str, int]:
        """Number of rows by outcome."""
        return dict(sorted(Counter(row["outcome"] for row in self.rows).items()))

    @property
    def exit_code(self) -> int:
        """1 if a row is WRONG, 2 if one has another outcome than OK, else 0."""
        return 1 if WRONG in self.outcomes else 2 if set(self.outcomes) - {OK} else 0

    def as_dict(self) -> dict[str, Any]:
        """The counts and the machines, for JSON."""
        return {"rows": len(self.rows), "outcomes": self.outcomes, "machines": list(self.machines)}


def sweep(
    plan: Sequence[Task],
    out: Path,
    client: Any = None,
    *,
    retry_failed: bool = False,
    progress: Progress = silent,
    on_row: Callable[[Row], None] = lambda row: None,
) -> Summary:
    """Compute the rows of a plan that the folder `out` does not have, and write a table of all of them there.

    client: Dask's, of `cluster.connected`; None computes in this process. retry_failed: compute rows again whose outcome is neither a
    verdict nor a value. on_row: called with each new row when it is on disk.

    Raises OptionError while another sweep writes to `out`, DifferentBitsError when a machine fails its selftest, ServerError when the
    scheduler is lost; rows that were done before stay.
    """
    out.mkdir(parents=True, exist_ok=True)
    with held(out):
        path = out / ROWS
        done = {key: row for key, row in rows.read(path).items() if not retry_failed or row["outcome"] in rows.FINAL}
        left = [task for task in plan if task.key not in done]
        before = len(plan) - len(left)
        progress(before, len(plan))
        here: Iterator[tuple[Task, Outcome]] = ((task, perform(task)) for task in left)
        for n, (task, outcome) in enumerate(here if client is None else results(client, left), before + 1):
            row = rows.row_of(task, outcome)
            rows.append(path, row)
            done[task.key] = row
            on_row(row)
            progress(n, len(plan))
        ordered = tuple(done[task.key] for task in plan)
        machines = {repr(m): dict(m) for m in (row["machine"] for row in ordered) if m}
        summary = Summary(ordered, tuple(machines[name] for name in sorted(machines)))
        write_table(out, summary.rows)
        return summary
