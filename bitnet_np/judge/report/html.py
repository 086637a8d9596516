"""The report as one HTML file: verdict and cause in words, a heat map to click through, and what stands behind each tensor's verdict.

The file needs no network and no other file: its only addresses are links to the documentation. Whatever comes from a dump or a model
(names, reasons, paths) is escaped, and a content security policy allows only the script that this module writes.
"""

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from math import log10
from typing import Any
from urllib.parse import quote

from ...base.errors import listed
from ...traces.points import GRADIENTS, LOSS, MODEL_GRADIENTS, Key, meaning
from ..detail import Detail, Details
from ..measures import Judgement
from ..verdict import Verdict
from .report import MEANT, SYMBOLS, OperationVerdict, Report, causes, closer_summary, heat_map, layout, next_step

LOGITS_ID = "logits"
"""The name of the logits as such on the page. result_output is the head's operation."""

FIRST = ("inp_embd", "inpL", "inp_scaled", "grad_token_embd")
"""Tensors of the whole model that stand before the layers; all others of it stand behind."""

MISTAKES = "https://github.com/bitnet-np/bitnet_np/blob/main/docs/mistakes.md"
"""The page of the known mistakes, of which a browser shows the one that the end of a link names."""

_MOST_CAUSES = 12  # rows of causes; those after them are on the panels of their tensors
_NOT_IN_DUMP = 40  # names of missing tensors that are listed; the rest is only counted


def page(report: Report, details: Details | None = None, about: Mapping[str, str] | None = None) -> str:
    """The report as an HTML document.

    details: what the judge collected, for worst numbers and charts. about: facts to show at the end (files, digests, versions).
    """
    style, script = (files("bitnet_np").joinpath("data", name).read_text("utf-8") for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    title = f"{report.verdict.outcome} ({report.verdict}): {_headline(report)}"
    body = "\n".join(_body(report, details or Details(), about or {}))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>\n{style}</style>\n</head>\n<body>\n"
        f"{body}\n<script>{script}</script>\n</body>\n</html>\n"
    )


def fragment(report: Report) -> str:
    """The report for a notebook: the headline and the heat map as text."""
    headline = f"<p><b>{report.verdict.outcome} ({report.verdict})</b> {escape(_headline(report))}</p>"
    return f"{headline}<pre>{escape(heat_map(report))}</pre>" if report.operations else headline


# --- the page, from top to bottom ---


def _body(report: Report, details: Details, about: Mapping[str, str]) -> Iterator[str]:
    tensors = _tensors(report, details)
    yield "<main>\n<header>"
    yield f'<span class="badge v{int(report.verdict)}">{report.verdict.outcome}</span> <b>{report.verdict}</b>'
    headline, *rest = _headline(report).split("; ")
    yield f"<h1>{escape(headline)}</h1>"
    yield "".join(f'<p class="soft">{escape(text)}</p>' for text in (*rest, report.verdict.text))
    if step := next_step(report):
        yield f"<p><b>Next:</b> {escape(step)}.</p>"
    counts = {verdict: sum(o.verdict == verdict for o in report.operations) for verdict in Verdict}
    shown = [f"<li>{_swatch(verdict)}{n} {_plural(n, 'tensor')} {verdict}</li>" for verdict, n in counts.items() if n]
    yield f'<ul class="counts">{"".join(shown)}</ul>' if shown else ""
    yield "</header>"
    if report.sequences:
        rows = [(f"sequence {b}", one.headline) for b, one in enumerate(report.sequences)]
        yield "<h2>Every sequence</h2>" + _table(rows) + f"<p>What follows is on sequence {report.sequence}.</p>"
    yield from _causes(report)
    if report.notes:
        yield "<h2>Notes</h2>" + "".join(f"<p>{escape(note)}</p>" for note in report.notes)
    if report.operations:
        yield '<h2>Every tensor</h2><p class="soft screen">Choose one to see its numbers: by mouse, or with Tab and the arrow keys.</p>'
        yield '<p class="screen"><label>Find: <input type="search" id="find" placeholder="ffn_out-3"></label> '
        yield '<span id="found" role="status"></span></p>'
        yield '<div class="beside"><div>' + "".join(_map(report)) + "</div>"
    yield '<noscript><p class="soft">The numbers of single tensors need JavaScript.</p></noscript>'
    yield '<article class="panel" id="panel" aria-live="polite" hidden></article>' + "</div>" * bool(report.operations)
    if summary := closer_summary(report):
        yield f'<p class="soft">{escape(summary[0].upper() + summary[1:])}.</p>'
    if report.missing:
        yield f"<details><summary>Not in the dump: {len(report.missing)} {_plural(len(report.missing), 'tensor')}</summary>"
        yield f'<p class="mono">{escape(listed(report.missing, _NOT_IN_DUMP))}</p></details>'
    if about:
        yield "<h2>Where this comes from</h2>" + _table(about.items(), mono=True)
    yield "<footer>Written by bitnet_np. An error is judged in units of its limit: above 1 it is more than roundings explain.</footer>"
    yield "</main>"
    data = {"tensors": tensors, "start": _start(report, tensors)}
    yield f'<script type="application/json" id="data">{_json(data)}</script>'


def _headline(report: Report) -> str:
    """The reason without the verdict in front, which stands beside it."""
    reason = report.reason.removeprefix(f"{report.verdict} ") or report.verdict.text
    return f"At {reason[3:]}" if reason.startswith("at ") else reason


def _causes(report: Report) -> Iterator[str]:
    """Every distinct cause with the tensors that show it."""
    rows = [(cause, listed(places, 6)) for cause, places in causes(report.operations).items()]
    if len(rows) > _MOST_CAUSES:
        rows[_MOST_CAUSES:] = [(f"and {len(rows) - _MOST_CAUSES} more", "")]
    if report.logits is not None and report.logits.explanation:
        rows.append((report.logits.explanation, "logits"))
    if rows:
        yield f"<h2>{'Cause' if len(rows) == 1 else 'Causes'}</h2>" + _table(rows, ("what is different", "where"))
    mistakes = dict.fromkeys(o.mistake for o in report.operations if o.mistake)
    links = [f'<a href="{MISTAKES}#:~:text={quote(id)}" rel="noreferrer">{escape(id)}</a>' for id in [*mistakes][:_MOST_CAUSES]]
    if links:
        yield f"<p>Known {_plural(len(links), 'mistake')}: {', '.join(links)}</p>"


def _map(report: Report) -> Iterator[str]:
    """The heat map: tensors outside layers as a row of chips above or below, layers down and operations across."""
    judged = {o.key: o for o in report.operations}
    whole = [(str(o.key), o.key.name, o.verdict, o.bound_ratio) for o in report.operations if o.key.layer is None]
    if report.logits is not None:
        whole.append((LOGITS_ID, "logits as such", report.logits.verdict, None))
    chips = {first: [_button(*item, 'class="chip"') for item in whole if (item[0] in FIRST) == first] for first in (True, False)}
    names, layers = layout(judged)
    yield f'<div class="chips">{"".join(chips[True])}</div>' if chips[True] else ""
    if layers:
        header = "".join(f'<th scope="col"><span>{escape(name)}</span></th>' for name in names)
        yield f'<div class="scroll"><table class="map"><thead><tr><td></td>{header}</tr></thead><tbody>'
        for n in layers:
            cells = "".join(f"<td>{_cell(judged.get(Key(name, n)))}</td>" for name in names)
            yield f'<tr><th scope="row">layer {n}</th>{cells}</tr>'
        yield "</tbody></table></div>"
    yield f'<div class="chips">{"".join(chips[False])}</div>' if chips[False] else ""


def _cell(o: OperationVerdict | None) -> str:
    if o is None:
        return '<span class="empty" title="not in the dump"></span>'
    part = 1.0 if o.bound_ratio is None else (log10(max(o.bound_ratio, 1e-4)) + 4) / 4  # all of the colour at the limit
    look = f'class="cell v{int(o.verdict)}" style="--heat:{30 + 70 * min(1.0, part):.0f}%"'
    return _button(str(o.key), o.place, o.verdict, o.bound_ratio, look, SYMBOLS[o.verdict])


def _button(name: str, text: str, verdict: Verdict, ratio: float | None, look: str, inside: str = "") -> str:
    """What a tensor is chosen by. inside: what stands on it, if that is not its text."""
    said = escape(f"{text}: {verdict}" + ("" if ratio is None else f", {_times(ratio)} of the limit"))
    inside = inside or _swatch(verdict) + escape(text)
    return f'<button type="button" data-id="{escape(name)}" aria-label="{said}" {look} title="{said}">{inside}</button>'


def _swatch(verdict: Verdict) -> str:
    return f'<span class="swatch v{int(verdict)}" aria-hidden="true">{SYMBOLS[verdict]}</span>'


def _table(rows: Iterable[tuple[str, str]], header: tuple[str, ...] = (), mono: bool = False) -> str:
    """A table of texts. mono: whether the second column has digits and paths."""
    head = f"<thead><tr>{''.join(f'<th>{name}</th>' for name in header)}</tr></thead>" * bool(header)
    second = "<td class=mono>" if mono else "<td>"
    body = "".join(f"<tr><td>{escape(a)}</td>{second}{escape(b)}</td></tr>" for a, b in rows)
    return f'<div class="scroll" tabindex="0"><table class="plain">{head}<tbody>{body}</tbody></table></div>'


# --- the numbers behind the map, which the script shows ---


_NUMBERS = {
    "positions": "positions",
    "max_error": "largest error",
    "mean_error": "mean error",
    "of_bound": "largest error / limit",
    "nmse": "NMSE (of logits: at the worst position)",
    "mean_nmse": "mean NMSE",
    "reach": "mean NMSE that roundings reach",
    "scale": "best common factor (of logits: the one farthest from 1)",
    "cosine": "cosine",
    "ulps": "largest error in ulps of the largest value",
    "ours_rms": "our RMS error from float64, in 2^-24 of the RMS",
    "theirs_rms": "their RMS error from float64",
    "kl": "largest KL divergence, nats",
    "top1": "share of positions with the same largest logit",
    "top5": "share of the five largest logits in common",
}
"""What numbers of an OperationVerdict or a Judgement are called."""


def _tensors(report: Report, details: Details) -> dict[str, dict[str, Any]]:
    """What the panel shows of each tensor, by the id of its button."""
    tensors = {}
    for o in report.operations:
        across = f"judged together with {listed(o.across[:-1], 6)}, which the dump does not have" if len(o.across) > 1 else ""
        untried = "" if o.tried else "known mistakes were not tried: too much work for so many operations of so large a model"
        lines = [o.hypothesis, o.reason, across, untried]
        name = o.key.name
        what = "gradient of the loss" if name in (*GRADIENTS, *MODEL_GRADIENTS) else "the loss" if name == LOSS else meaning(name)
        tensors[str(o.key)] = _item(o, o.place, what, lines, details.tensors.get(o.key))
    if (j := report.logits) is not None:
        what = "all positions and tokens, judged by how far roundings reach on this model"
        tensors[LOGITS_ID] = _item(j, "logits as such", what, [j.explanation, j.reason], details.logits)
    return tensors


def _item(
    judged: OperationVerdict | Judgement, place: str, what: str, lines: Sequence[str | None], detail: Detail | None
) -> dict[str, Any]:
    """What the panel shows of a tensor: lines that are not in a later one, and numbers, cut to what is shown."""
    said = [line for line in lines if line]
    numbers = [(name, getattr(judged, field, None)) for field, name in _NUMBERS.items()]
    item = {
        "verdict": str(judged.verdict),
        "level": int(judged.verdict),
        "place": place,
        "meaning": what,
        "lines": [line for i, line in enumerate(said) if not any(line in other for other in said[i + 1 :])],
        "numbers": [(name, f"{value:.4g}") for name, value in numbers if value is not None],
        "detail": None,
    }
    if detail is not None:
        worst = [
            (e.position, e.element, *(float(f"{x:.7g}") for x in (e.ours, e.theirs, e.theirs - e.ours, e.limit))) for e in detail.worst
        ]
        item["detail"] = asdict(detail) | {"worst": worst, "errors": [float(f"{min(x, 1e30):.3g}") for x in detail.errors]}
    return item


def _start(report: Report, tensors: Mapping[str, Any]) -> str:
    """The tensor that is shown first: the first wrong one, or the one nearest to its limit."""
    if report.first_wrong is not None and str(report.first_wrong.key) in tensors:
        return str(report.first_wrong.key)
    if report.logits is not None and (report.logits.verdict == report.verdict or not report.operations):
        return LOGITS_ID
    return str(max(report.operations, key=lambda o: o.bound_ratio or 0.0).key) if report.operations else ""


def _json(value: Any) -> str:
    """JSON that can stand in a script element: no character of it ends the element or begins a comment."""
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


# --- words ---


def _plural(n: int, noun: str) -> str:
    return noun if n == 1 else f"{noun}s"


def _times(ratio: float) -> str:
    if ratio > MEANT:
        return f"over {MEANT:.0e}"
    return f"{ratio:.2g}" if ratio == 0 or -4 < log10(ratio) < 5 else f"{ratio:.0e}"
