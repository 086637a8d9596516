"""Links between pages lead somewhere, files that pages name are there, and the first page stays short."""

import re

import pages
import pytest

README = pages.ROOT / "README.md"
FOLDERS = ("bitnet_np", "scripts", "tests", "docs", "examples", ".ci")


def broken(page, target):
    """What is wrong with a link, or None."""
    if re.match(r"https?:", target):
        return None
    path, _, anchor = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    if not file.exists():
        return f"{path} is not there"
    if not file.is_relative_to(pages.ROOT):
        return f"{path} is outside of the repository"
    if anchor and (file.suffix != ".md" or anchor not in pages.anchors(file)):
        return f"{path or 'the page'} has no heading #{anchor}"
    return None


def named_files(page):
    """Paths within the repository that the page names in code, also with a `*` or with braces."""
    for span in pages.spans(page):
        for word in span.split():
            if word.split("/")[0] in FOLDERS and "/" in word:
                yield word


@pytest.mark.parametrize("page", pages.PAGES, ids=pages.name)
def test_every_link_leads_somewhere_and_every_file_that_is_named_is_there(page):
    assert [problem for target in pages.links(page) if (problem := broken(page, target))] == []
    assert [path for path in named_files(page) if not (pages.ROOT / path).exists()] == []


def test_every_page_can_be_reached_from_the_first():
    reached, waiting = set(), [README]
    while waiting:
        page = waiting.pop()
        if page in reached:
            continue
        reached.add(page)
        files = ((page.parent / target.partition("#")[0]).resolve() for target in pages.links(page) if not target.startswith("#"))
        waiting += [file for file in files if file.suffix == ".md"]
    assert [pages.name(page) for page in pages.PAGES if page not in reached] == []


def test_the_first_page_is_short_with_a_small_picture():
    pictures = [README.parent / path for path in re.findall(r"!\[[^]]+\]\(([^)]+)\)", pages.text(README))]
    assert len(README.read_bytes()) <= 10_240
    assert [picture.name for picture in pictures if picture.stat().st_size < 100_000] == ["report.png"]


def test_a_verdict_that_names_a_bug_is_on_the_first_screen():
    assert "WRONG at layer 3 ffn_out: SiLU(gate) * up instead of relu(gate)^2 * up" in "\n".join(pages.text(README).splitlines()[:30])


def test_the_two_commands_are_found_as_ci_finds_them():
    """.ci/run takes them from the first page."""
    found = [line for line in pages.text(README).splitlines() if line.startswith("pip install")]
    assert found == ["pip install . && bitnet-np check", "pip install '.[test]' && pytest"]


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("docs/verdicts.md#what-a-verdict-means", None),
        ("#start", None),
        ("docs/verdicts.md#no-such-heading", "docs/verdicts.md has no heading #no-such-heading"),
        ("docs/nothing.md", "docs/nothing.md is not there"),
        ("../elsewhere", "../elsewhere is not there"),
        ("https://example.org", None),
    ],
)
def test_broken_links_are_noticed(target, problem):
    assert broken(README, target) == problem
