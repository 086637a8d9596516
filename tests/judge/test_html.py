"""The report as one HTML file, read as text everywhere, and run in a real browser where there is one."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser

import numpy as np
import pages
import pytest
from browser import document, needs_browser
from dumps import FAULTS, LOGITS, MODEL, TOKENS, only, recorded, trace

import bitnet_np as bn
from bitnet_np.judge.detail import Details
from bitnet_np.judge.dump import compare_traces
from bitnet_np.judge.measures import Judgement
from bitnet_np.judge.report.html import MISTAKES, page
from bitnet_np.judge.report.report import SYMBOLS, OperationVerdict, Report, heat_map, next_step
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.points import GRADIENTS, MODEL_NAMES, RECORDED, Key

EVIL = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\"><!--"
VOID = {"meta", "img", "br", "hr", "input", "link"}


class Page(HTMLParser):
    """What a page consists of. Fails on a tag that is closed out of order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.text, self.data, self.buttons = [], [], [], "", {}
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append((tag, dict(attributes)))
        if tag == "button":
            named = dict(attributes)
            self.buttons |= {named["data-id"]: named} if "data-id" in named else {}
        for name, value in attributes:
            assert not name.startswith("on")
            assert name != "src", value
            assert name != "href" or (tag == "a" and value.startswith(f"{MISTAKES}#:~:text=")), value

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        if self.open and self.open[-1][0] == "script":
            if self.open[-1][1].get("id") == "data":
                self.data = json.loads(data, parse_constant=pytest.fail)
        elif self.open and self.open[-1][0] != "style":
            self.text.append(data)


def judged(dump):
    details = Details()
    return bn.check(MODEL, TOKENS, dump, details=details), details


def compared(dump):
    details = Details()
    return compare_traces(trace(recorded()), trace(dump), True, details), details


@pytest.fixture(scope="module")
def faulty():
    """A report with every kind of tensor, and its page."""
    report, details = judged(trace(FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)[0]))
    return report, details, report.html(details, {"dump": "dump.npz", "SHA-256 of the dump": "0123abcd"})


def test_the_page_says_the_verdict_the_cause_and_where_it_comes_from(faulty):
    report, _, text = faulty
    parsed = Page(text)
    words = " ".join(" ".join(parsed.text).split())
    assert "At layer 1 ffn_out: SiLU(gate) * up instead of relu(gate)^2 * up" in words
    assert "differs by more than rounding explains" in words
    assert "Cause what is different where SiLU(gate) * up instead of relu(gate)^2 * up layer 1 ffn_out" in words
    assert "SHA-256 of the dump 0123abcd" in words
    assert f"Not in the dump: {len(report.missing)} tensors" in words
    assert "Closer to float64, on their own inputs: ours in" in words
    assert "<title>FAIL (WRONG): At layer 1 ffn_out: SiLU(gate)" in text
    assert re.search('<span class="badge v4">FAIL</span> <b>WRONG</b>', text)
    assert "<title>PASS (ROUNDING): " in Report(Verdict.ROUNDING, "fine").html()
    assert len(text) < 40_000 + 2_500 * len(report.operations)


def test_every_tensor_has_a_button_with_its_verdict_and_its_numbers(faulty):
    report, details, text = faulty
    parsed = Page(text)
    assert set(parsed.buttons) == set(parsed.data["tensors"]) == {*(str(o.key) for o in report.operations), "logits"}
    assert parsed.data["start"] == "ffn_out-1"
    for o in report.operations:
        item, button = parsed.data["tensors"][str(o.key)], parsed.buttons[str(o.key)]
        assert (item["verdict"], item["place"]) == (o.verdict.name, o.place)
        assert f": {o.verdict}" in button["title"]
        detail = details.tensors.get(o.key)
        assert (item["detail"] is None) == (detail is None)
        if detail is not None:
            assert [tuple(row[:2]) for row in item["detail"]["worst"]] == [(e.position, e.element) for e in detail.worst]
            np.testing.assert_allclose([row[4] for row in item["detail"]["worst"]], [e.theirs - e.ours for e in detail.worst], rtol=1e-5)


def test_a_known_mistake_is_linked_and_a_next_step_is_said(faulty):
    """The page that is linked has a row for each mistake."""
    report, _, text = faulty
    (link,) = re.findall('<a href="([^"]*)"', text)
    assert link == f"{MISTAKES}#:~:text={report.first_wrong.mistake}"
    assert f"| {report.first_wrong.mistake} |" in (pages.ROOT / "docs" / "mistakes.md").read_text("utf-8")
    assert "<b>Next:</b>" not in text
    unknown = Report(Verdict.WRONG, "NMSE is 1")
    assert f"<p><b>Next:</b> {next_step(unknown)}.</p>" in unknown.html()


def test_each_layer_is_a_row_and_each_tensor_a_button():
    ratios = {n: 0.1 * n for n in range(12)} | {5: 1e35}
    rows = [OperationVerdict(Key("Qcur", n), Verdict.WRONG if n == 5 else Verdict.ROUNDING, bound_ratio=r) for n, r in ratios.items()]
    parsed = Page(Report(Verdict.WRONG, "", tuple(rows), rows[5]).html())
    assert [word for word in parsed.text if word.startswith("layer")] == [f"layer {n}" for n in range(12)]
    assert set(parsed.buttons) == {f"Qcur-{n}" for n in range(12)}
    assert parsed.buttons["Qcur-5"]["title"] == "layer 5 Qcur: WRONG, over 1e+10 of the limit"  # the limit is nearly 0
    assert "largest error / limit" not in dict(parsed.data["tensors"]["Qcur-5"]["numbers"])


def test_nothing_is_fetched_and_no_other_script_may_run(faulty):
    _, _, text = faulty
    parsed = Page(text)
    assert not {"img", "link", "iframe", "object", "embed", "form"} & set(parsed.tags)
    assert parsed.tags.count("script") == 2
    addresses = text.replace(f'<a href="{MISTAKES}#', "")
    assert re.search(r"url\(|@import|https?:(?!//www\.w3\.org/2000/svg)", addresses) is None
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-" in text


@pytest.mark.parametrize("verdict", Verdict)
def test_every_verdict_and_every_tensor_has_its_look(verdict):
    keys = [Key(name, None if name in MODEL_NAMES else 3) for name in (*RECORDED, *GRADIENTS)]
    report = Report(verdict, "", tuple(OperationVerdict(key, verdict) for key in keys), missing=(Key("l_out", 0),) * 100)
    parsed = Page(report.html())
    assert set(parsed.buttons) == set(map(str, keys))
    assert parsed.text.count(SYMBOLS[verdict]) == len(keys) + 1
    assert verdict.text in parsed.text
    assert f".v{int(verdict)} {{" in report.html()
    Page(report._repr_html_())


REPORTS = {
    "logits": lambda: judged(FAULTS["SiLU for relu squared, every layer"].make(MODEL, TOKENS)[0][LOGITS]),
    "right": lambda: judged(trace(recorded())),
    "one tensor": lambda: judged(only(recorded(), "result_norm")),
    "invalid": lambda: judged(recorded()[LOGITS][:, :100]),
    "invalid tensor": lambda: judged({"l_out-0": np.full((17, 256), np.nan)}),
    "other tokens": lambda: (Report(Verdict.INVALID, "dump was made with other token ids"), None),
    "comparison": lambda: compared(FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)[0]),
}


@pytest.mark.parametrize("name", REPORTS)
def test_reports_of_every_kind_have_a_page(name):
    report, details = REPORTS[name]()
    parsed = Page(report.html(details))
    words = " ".join("".join(parsed.text).split())
    assert report.reason.removeprefix("WRONG at ").split("; ")[0] in words
    assert parsed.data["start"] in (parsed.data["tensors"] or [""])
    assert (parsed.data["tensors"].get("logits", {}).get("detail") is not None) == (details is not None and details.logits is not None)


def hostile():
    """A report whose every text is a script, as if it were read from a file."""
    operation = OperationVerdict(
        Key("l_out", 1), Verdict.WRONG, EVIL, (Key("ffn_down", 1), Key("l_out", 1)), hypothesis=EVIL, max_error=np.inf
    )
    return Report(Verdict.WRONG, EVIL, (operation,), operation, notes=(EVIL,), logits=Judgement(Verdict.WRONG, EVIL, explanation=EVIL))


def test_no_text_of_a_file_becomes_markup():
    report = hostile()
    for text in (page(report, None, {EVIL: EVIL}), report._repr_html_()):
        parsed = Page(text)
        assert "img" not in parsed.tags
        assert EVIL in "".join(parsed.text)
        assert "onerror" not in re.sub("&lt;img.*?&lt;!--|u003cimg.*?--", "", text)
    assert Page(page(report)).tags.count("script") == 2


def test_a_notebook_shows_the_headline_and_the_heat_map(faulty):
    report, _, _ = faulty
    text = report._repr_html_()
    assert text.startswith("<p><b>FAIL (WRONG)</b> At layer 1 ffn_out: SiLU(gate)")
    assert unescape(re.search("<pre>(.*)</pre>", text, re.DOTALL)[1]) == heat_map(report)
    assert {"script", "button"}.isdisjoint(Page(text).tags)


# --- in a browser ---------------------------------------------------------------------------------------------------------------------


def panel(text):
    """The words of the panel of a document."""
    return " ".join(re.sub("<[^>]*>", " ", re.search("<article.*?</article>", text, re.DOTALL)[0]).split())


@needs_browser
def test_the_first_wrong_tensor_is_shown_first_and_any_other_by_its_address(faulty, tmp_path):
    _, details, text = faulty
    (tmp_path / "r.html").write_text(text, "utf-8")
    shown = panel(document(tmp_path / "r.html", tmp_path))
    assert shown.startswith("WRONG layer 1 ffn_out relu(gate)^2 * up")
    worst = details.tensors[Key("ffn_out", 1)].worst[0]
    assert f"theirs − ours bound {worst.position} {worst.element} " in shown
    other = document(tmp_path / "r.html", tmp_path, "kqv_out-1")
    assert panel(other).startswith("ROUNDING layer 1 kqv_out output of attention, heads side by side")
    assert re.search('<button[^>]*data-id="kqv_out-1"[^>]*aria-pressed="true"', other)
    drawn = re.search('<svg[^>]*aria-label="Error against position".*?</svg>', other, re.DOTALL)[0]
    assert drawn.count("<circle") == len(TOKENS)
    assert "NaN" not in other
    for fragment in ("kqv_out-1", "logits"):  # Tab stops at one cell of the heat map, whatever is shown
        cells = re.findall('<button[^>]*class="cell[^>]*>', document(tmp_path / "r.html", tmp_path, fragment))
        assert sum('tabindex="0"' in cell for cell in cells) == 1


@needs_browser
def test_tensors_are_chosen_by_clicks_and_by_arrow_keys(faulty, tmp_path):
    """A script of the test presses the keys, so the page's policy against other scripts is taken out of this copy."""
    _, _, text = faulty
    keys = """<script>
    const press = (key) => document.activeElement.dispatchEvent(new KeyboardEvent("keydown", {key, bubbles: true, cancelable: true}));
    document.querySelector('[data-id="logits"]').click();
    const first = document.querySelector("#panel h2").textContent;
    document.querySelector('[data-id="ffn_out-1"]').focus();
    for (const key of ["ArrowLeft", "ArrowUp", "ArrowUp", "ArrowLeft"]) press(key);
    document.title = first + " | " + document.activeElement.dataset.id + " | " + document.querySelector("#panel h2").textContent
      + " | " + [...document.querySelectorAll(".cell")].filter((cell) => cell.tabIndex === 0).length + " | " + location.hash;
    </script></body>"""
    without_policy = re.sub("<meta http-equiv[^>]*>", "", text).replace("</body>", keys)
    (tmp_path / "r.html").write_text(without_policy, "utf-8")
    title = re.search("<title>(.*?)</title>", document(tmp_path / "r.html", tmp_path))[1]
    assert title == "WRONG logits as such | ffn_gate-0 | ROUNDING layer 0 ffn_gate | 1 | #ffn_gate-0"


@needs_browser
def test_a_search_dims_other_tensors_and_chooses_the_first(faulty, tmp_path):
    _, _, text = faulty
    typed = """<script>
    find.value = "FFN_OUT-"; find.dispatchEvent(new Event("input"));
    find.dispatchEvent(new KeyboardEvent("keydown", {key: "Enter"}));
    document.title = [found.textContent, location.hash, ...new Set(named().map((b) => b.className.includes("other")))].join(" | ");
    </script></body>"""
    (tmp_path / "r.html").write_text(re.sub("<meta http-equiv[^>]*>", "", text).replace("</body>", typed), "utf-8")
    title = re.search("<title>(.*?)</title>", document(tmp_path / "r.html", tmp_path))[1]
    assert re.fullmatch(r"3 of \d+ \| #ffn_out-0 \| false", title), title


@needs_browser
def test_the_page_fits_a_phone_and_shows_numbers_beside_the_map_on_a_screen(faulty, tmp_path):
    """With 43 layers. On every width nothing but the map scrolls sideways, and the first wrong cell is seen at once."""
    report, details, _ = faulty
    right = [OperationVerdict(Key(o.key.name, n), Verdict.ROUNDING) for o in report.operations if o.key.layer == 0 for n in range(10, 50)]
    text = replace(report, operations=(*report.operations, *right)).html(details)
    measure = """<script>
    const at = (name) => document.querySelector(name).getBoundingClientRect();
    const cell = at('.cell[aria-pressed="true"]'), label = at(".map tbody th"), frame = at("div:has(> .map)"), numbers = at("#panel");
    parent.postMessage([innerWidth, document.body.scrollWidth <= innerWidth, label.right <= cell.left && cell.right <= frame.right,
      numbers.left >= frame.right && numbers.top < frame.bottom, at(".map").width <= frame.width], "*");
    </script></body>"""
    (tmp_path / "r.html").write_text(re.sub("<meta http-equiv[^>]*>", "", text).replace("</body>", measure), "utf-8")
    frames = "".join(f'<iframe src="r.html" style="width:{width}px;height:800px;border:0"></iframe>' for width in (400, 1000, 1600))
    listen = "<script>onmessage = (event) => { document.title += JSON.stringify(event.data); }</script>"
    (tmp_path / "all.html").write_text(f"<title></title>{listen}{frames}", "utf-8")
    measured = re.findall(r"\[.*?\]", re.search("<title>(.*?)</title>", document(tmp_path / "all.html", tmp_path))[1])
    assert sorted(map(json.loads, measured)) == [[400, True, True, False, False], [1000, *[True] * 4], [1600, *[True] * 4]]


@needs_browser
def test_hostile_text_stays_text_in_the_browser(tmp_path):
    report = hostile()
    (tmp_path / "r.html").write_text(page(report, None, {EVIL: EVIL}), "utf-8")
    text = document(tmp_path / "r.html", tmp_path)
    assert "<title>owned" not in text
    assert "<img" not in text
    assert panel(text).count("document.title='owned'") >= 2  # as words: reason and cause
