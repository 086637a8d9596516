"""What the pages say in tables is what the code says: commands and options, tensor names, formats, architectures, types, faults."""

import re

import bench
import pages
import pytest

from bitnet_np.base.tensor_types import READABLE
from bitnet_np.cli.main import build_parser
from bitnet_np.files.hf_model_types import MODEL_TYPES
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.model.packing import I2S_DEFAULT, I2S_LAYOUTS
from bitnet_np.traces.formats import FORMATS
from bitnet_np.traces.points import LAYER_NAMES, MEANINGS, RECORDED, SCORES, meaning
from scripts import mutations

DOCS = pages.ROOT / "docs"
VERDICTS, VALIDATION, MODELS, COMMANDS, JUDGING = (
    DOCS / f"{name}.md" for name in ("verdicts", "validation", "models", "commands", "judging")
)


PARSERS = build_parser().commands


def options_of(command):
    return [max(action.option_strings, key=len) for action in command._actions if action.option_strings]


def test_every_section_of_figures_names_its_command():
    for section in re.split(r"\n## ", pages.text(DOCS / "performance.md"))[1:]:
        assert re.search(r"scripts/\w+\.py |bitnet-np ", section), section.partition("\n")[0]


def test_every_bench_on_a_page_is_there():
    words = re.findall(r"bench\.py((?: [a-z]+)+)", "\n".join(map(pages.text, pages.PAGES)))
    named = {word for several in words for word in several.split()}
    assert named >= {"batch", "masks", "prefill"}
    assert named <= set(bench.BENCHES)


def test_every_option_is_on_some_page():
    everything = "\n".join(map(pages.text, pages.PAGES))
    options = {(name, option) for name, command in PARSERS.items() for option in options_of(command)}
    assert ("logits", "--chunk") in options
    assert {option for _, option in options if not re.search(rf"(?<![\w-]){option}(?![\w-])", everything)} <= {"--help", "--version"}


@pytest.mark.parametrize("name", PARSERS)
def test_every_command_has_a_row_and_every_argument_a_help(name):
    assert [row[0] for row in pages.table(COMMANDS, "command") if row[0].startswith(f"`bitnet-np {name}")] != []
    assert [action.dest for action in PARSERS[name]._actions if not action.help] == []


def test_the_exit_codes_of_verdicts():
    codes = {name: int(row[-1]) for row in pages.table(VERDICTS, "verdict") for name in re.findall("`(\\w+)`", row[0])}
    assert codes == {verdict.name: verdict.exit_code for verdict in Verdict}
    assert [row[0] for row in pages.table(COMMANDS, "code")] == ["0", "1", "2", "129, 143", "130", "141"]


def test_the_table_of_names_is_that_of_the_points():
    rows = {name.strip("`"): (axes.strip("[]").replace(",", ""), text) for name, axes, text in pages.table(VERDICTS, "name")}
    assert rows == {f"{name}{'-N' * (name in LAYER_NAMES)}": said for name, said in MEANINGS.items()}
    assert all(meaning(name) for name in (*RECORDED, *SCORES, "log_probs"))


def test_the_table_of_formats_is_that_of_the_registry():
    rows = {name.strip("`"): (judged, written) for name, _, judged, written in pages.table(VERDICTS, "format")}
    said = {True: "yes", False: "no"}
    expected = {name: (said[bool(f.read)], said[f.writer is not None]) for name, f in FORMATS.items()}
    in_part = {
        "eval-callback": "no",
        "bitnet-rs": "no",
        "bitnet-rs-lines": "yes",
        "bitnet-rs-logits": "no",
        "server-answer": "no",
    }  # they hold no whole tensors
    assert rows == expected | {name: ("in part", written) for name, written in in_part.items()}


def test_what_people_bring_is_every_format_and_has_been_tried():
    """Of each row a test is named; that the files are there test_links.py says."""
    rows = pages.table(JUDGING, "what you bring")
    assert set(FORMATS) <= set(re.findall("`([\\w-]+)`", " ".join(row[0] for row in rows)))
    assert [row[0] for row in rows if not re.search(r"\(\.\./tests/[\w/]+/test_\w+\.py\)", row[2])] == []


def test_the_architectures_and_types_are_those_of_the_code():
    assert set(re.findall("`([\\w.-]+)`", " ".join(row[0] for row in pages.table(MODELS, "architecture")))) == set(ARCHITECTURES)
    types = set(re.findall(r"\b[A-Z]+\d\w*\b", " ".join(row[0] for row in pages.table(MODELS, "type"))))
    assert types == {kind.name for kind in READABLE}
    assert all(f"`{kind}`" in pages.text(MODELS) for kind in MODEL_TYPES)
    assert f"`{I2S_DEFAULT}` (default)" in pages.text(MODELS)
    assert all(f"`{layout}`" in pages.text(MODELS) for layout in I2S_LAYOUTS)
    refused = set(re.findall("`(\\w+)`", " ".join(row[0] for row in pages.table(MODELS, "refused"))))
    assert len(refused) == 7
    assert refused.isdisjoint({*ARCHITECTURES, *MODEL_TYPES})


def test_the_table_of_faults_has_every_fault():
    """tests/judge/test_faults.py compares the other columns, where each fault is judged."""
    every = [*mutations.faults(), *(fault for _, fault in mutations.others())]
    assert [row[0] for row in pages.table(VALIDATION, "fault")] == [fault.name for fault in every]


def test_the_table_of_known_mistakes_is_the_catalogue():
    rows = [tuple(row) for row in pages.table(DOCS / "mistakes.md", "mistake")]
    assert rows == [tuple(column.replace("\\|", "|") for column in row) for row in mutations.catalogue()]


def test_the_page_of_the_tests_begins_with_the_test_that_matters_most():
    page = pages.ROOT / "tests" / "README.md"
    assert pages.blocks(page, "py")[0].code in (page.parent / "properties" / "test_same_bits.py").read_text("utf-8")
