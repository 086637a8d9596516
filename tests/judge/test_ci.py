"""What continuous integration reads holds for any text."""

import json
from xml.etree import ElementTree

from bitnet_np.judge.report.ci import Case, cases_of, github, junit, markdown, tap
from bitnet_np.judge.report.report import OperationVerdict, Report
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.points import Key

EVIL = 'a<b> & "c" # | 100% ` \\ \x1b[2J\n]]> ::error::'
OPERATION = OperationVerdict(Key("l_out", 1), Verdict.WRONG, EVIL)
REPORT = Report(Verdict.WRONG, EVIL, (OPERATION,), OPERATION)


def test_the_whole_comes_first_and_every_part_has_its_outcome():
    one = [Report(verdict, "why") for verdict in Verdict]
    cases = cases_of(Report.of_sequences(one), "dump")
    assert cases[0].name == "dump"
    assert [case.failed for case in cases] == ["failure", "", "", "", "", "failure", "error"]
    assert [case.text for case in cases[1:3]] == ["SAME_BITS: why", "ROUNDING: why"]


def test_no_text_breaks_a_form():
    cases = cases_of(REPORT, EVIL)
    suite = ElementTree.fromstring(junit(EVIL, cases))
    assert [case.get("name") for case in suite] == [cases[0].name, "layer 1 l_out"]
    assert suite[1][0].text == suite[1][0].get("message") == cases[1].text
    lines = tap(EVIL, cases).splitlines()
    assert len(lines) == 2 + 2 * 4
    assert json.loads(lines[8].partition("message: ")[2]) == cases[1].text
    annotation = github("a: b", cases)
    assert annotation.startswith("::error title=a%3A b::WRONG")
    assert "\n" not in annotation
    assert "100%25" in annotation


def test_markdown_lists_what_did_not_pass():
    cases = [Case("a", "", "fine"), Case("b|c", "failure", "<x>"), Case("d", "error", "no file")]
    assert markdown("Sweep", cases).splitlines() == [
        *("# Sweep", "", "1 passed, 1 failure, 1 error", "", "| what | kind | why |", "|---|---|---|"),
        *("| b\\|c | failure | &lt;x&gt; |", "| d | error | no file |"),
    ]
    assert markdown("Sweep", cases[:1]) == "# Sweep\n\n1 passed"
