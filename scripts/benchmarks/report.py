"""Results for people (aligned tables, bars) and for programs (JSON with every sample)."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bitnet_np.base.tables import table as aligned
from bitnet_np.kernels.fast import amx

from .rounds import Results, summary

SCHEMA = 1


@dataclass
class Table:
    """Rows of text under a title."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def render(table: Table) -> str:
    """A table as text."""
    return "\n".join([table.title, aligned(table.columns, table.rows), *table.notes])


def figure(values: Sequence[float], form: str = ".1f") -> str:
    """The median as text, or a dash where nothing was measured."""
    return f"{summary(values).median:{form}}" if values else "-"


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Median (smallest-largest) as text."""
    if not values:
        return "-"
    short = summary(values)
    return f"{short.median:{form}} ({short.low:{form}}-{short.high:{form}})"


def percent(values: Sequence[float]) -> str:
    return f"{100 * summary(values).median:.0f} %" if values else "-"


def peaks(results: Results) -> Table:
    """The machine's peaks, over all rounds of all benches."""
    table = Table("the machine's peaks", ["threads", "AMX GMAC/s", "int8 GMAC/s", "float32 GMAC/s", "read GB/s", "fastest way to read"])
    merged: dict[int, list[dict[str, float]]] = {}
    for key, samples in results.samples.items():
        if key.bench == "peaks":
            merged.setdefault(key.threads, []).extend(samples)
    for threads, samples in sorted(merged.items()):
        columns = [spread([sample[name] / 1e9 for sample in samples if name in sample]) for name in ("tiles", "int8", "fma", "read")]
        ways = [name for name in samples[0] if name.startswith("read, ")]
        best = max(ways, key=lambda way: summary([sample[way] for sample in samples]).median)
        table.rows.append([str(threads), *columns, best.removeprefix("read, ")])
    single = max((sample["fma"] for sample in merged.get(1, [])), default=0.0)
    for threads, samples in merged.items():
        times = summary([sample["fma"] for sample in samples]).median / single if single else threads
        if times < 0.8 * threads:
            table.notes.append(f"{threads} threads reach {times:.1f} times one thread's arithmetic: the cores are shared with other work")
    table.notes.append("fractions below are medians over the rounds, of the same round's peak")
    if why := amx.why_absent():
        table.notes.append(f"no AMX: {why}")
    if merged and not any("int8" in sample for samples in merged.values() for sample in samples):
        table.notes.append("no byte dot product instruction is used on this machine, so there is no int8 peak")
    return table


def as_json(head: dict[str, Any], results: Results, tables: Sequence[Table]) -> dict[str, Any]:
    """All results. `head` describes machine, model and options; each entry of "results" is one case, side and number of threads."""
    cases = {(case.bench, case.name): case for case in results.cases}
    entries = []
    for key, samples in results.samples.items():
        entry: dict[str, Any] = {**key._asdict(), "samples": samples}
        entry["seconds"] = summary([sample["seconds"] for sample in samples])._asdict()
        if case := cases.get((key.bench, key.case)):
            entry |= {"tokens": case.tokens, "macs": case.macs, "float_macs": case.float_macs, "nbytes": case.nbytes}
            entry["sha256"] = results.digests.get((key.bench, key.case))
        entries.append(entry)
    return {"schema": SCHEMA, **head, "results": entries, "skipped": results.skipped, "tables": [asdict(table) for table in tables]}


def draw(results: Results, title: str, path: Path) -> None:
    """Draw the seconds of every case and side to a picture file: bars for medians, lines for the spread."""
    from matplotlib.figure import Figure  # needed for plots only

    drawn = {key: summary([sample["seconds"] for sample in samples]) for key, samples in results.samples.items() if key.bench != "peaks"}
    labels = [f"{key.bench} {key.case}, {key.side}, {key.threads} thread{'s' * (key.threads > 1)}" for key in drawn]
    medians = [value.median for value in drawn.values()]
    lines = [[value.median - value.low for value in drawn.values()], [value.high - value.median for value in drawn.values()]]
    figure = Figure(figsize=(9, 1.5 + 0.3 * len(drawn)), layout="constrained")
    axis = figure.subplots()
    axis.barh(range(len(drawn)), medians, xerr=lines, color="#4477aa", ecolor="#222222", capsize=2)
    axis.set_yticks(range(len(drawn)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xscale("log")
    axis.set_title(title, fontsize=9, loc="left")
    axis.set_xlabel("seconds", fontsize=8)
    figure.savefig(path, dpi=120)
