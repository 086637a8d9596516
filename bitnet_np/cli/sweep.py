"""`bitnet-np sweep`: the rows of a plan, in this process or on a cluster."""

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

from ..base.tables import printable, table
from ..sweep.plan import read_plan
from ..sweep.run import SUMMARIES, reason_of, sweep
from ..sweep.tasks import OK, WRONG, DifferentBitsError, Row
from . import progress
from .cluster import connected

LARGEST_TABLE = 20  # rows that are not OK; the rest is only counted


def run(arguments: argparse.Namespace) -> int:
    """Print the outcomes, with --json each row when it is there; returns the exit code."""
    plan = read_plan(arguments.plan)

    def print_row(row: Row) -> None:
        if arguments.json:
            print(json.dumps(row), flush=True)

    try:
        with connected(arguments) as client:
            bar = progress.bar("rows")
            rows = sweep(plan, arguments.out, client, progress=bar, on_row=print_row)
    except DifferentBitsError as error:
        print(f"bitnet-np: {printable(str(error))}", file=sys.stderr)
        return 1
    outcomes = dict(sorted(Counter(row["outcome"] for row in rows).items()))
    bad = [row for row in rows if row["outcome"] != OK]
    if arguments.json:
        machines = {repr(row["machine"]): row["machine"] for row in rows if row["machine"]}
        print(json.dumps({"rows": len(rows), "outcomes": outcomes, "machines": [machines[name] for name in sorted(machines)]}))
    else:
        if bad:
            lines = [
                (row["outcome"], row["operation"], Path(row["model"]).name, row["tokens"], reason_of(row)) for row in bad[:LARGEST_TABLE]
            ]
            print(table(("outcome", "operation", "model", "tokens", "reason"), lines))
            print(f"and {len(bad) - LARGEST_TABLE} more\n" if len(bad) > LARGEST_TABLE else "")
        print(f"{len(rows)} rows: {', '.join(f'{n} {outcome}' for outcome, n in outcomes.items())}")
        print(f"{arguments.out}: rows.jsonl, results.csv, {', '.join(SUMMARIES)}")
    return 1 if WRONG in outcomes else 2 if bad else 0
