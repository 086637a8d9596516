"""The documentation as a site, and the tutorial as a notebook."""

import json
import runpy
import subprocess
import sys

import pages
import pytest

import bitnet_np as bn

NOTEBOOK = pages.ROOT / "examples" / "tested_engine" / "tutorial.ipynb"


def test_the_site_is_built_without_a_warning(tmp_path):
    """With every page and link: .mkdocs.yml is strict."""
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "-f", ".mkdocs.yml", "-d", str(tmp_path)]
    built = subprocess.run(command, cwd=pages.ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert {page.stem for page in (pages.ROOT / "docs").glob("*.md")} <= {folder.name for folder in tmp_path.iterdir()}
    assert "Logits of whole sequences" in (tmp_path / "api" / "index.html").read_text("utf-8")
    api = (tmp_path / "api" / "index.html").read_text("utf-8")
    for field in ("positions the model was trained for", "the same bits", "tensors of the forward pass that the dump does not have"):
        assert field in api, "a comment behind a field of Config, Verdict or Report"
    assert " at 0x" not in api
    assert (tmp_path / "changelog" / "index.html").exists()
    found = json.loads((tmp_path / "search" / "search_index.json").read_text("utf-8"))["docs"]
    assert {entry.get("boost") for entry in found if entry["location"].startswith("api/")} == {4}
    assert any(entry["location"].startswith("tutorial/") and "squared ReLU" in entry["text"] for entry in found)


def test_every_public_name_is_on_the_page_once_with_an_example():
    site = pytest.importorskip("docs_site", exc_type=ImportError)
    named = [name for names in site.GROUPS.values() for name in names.split()]
    assert sorted(named) == sorted(bn.__all__)
    links = site.examples(pages.text(pages.ROOT / "docs" / "library.md"))
    assert [name for name in named if name not in links] == []
    anchors = pages.anchors(pages.ROOT / "docs" / "library.md")
    assert {link.partition("#")[2] for link in links.values()} <= anchors


def test_the_package_shows_public_names_alone():
    assert set(dir(bn)) == {*bn.__all__, "__version__"}


def test_the_notebook_is_the_tutorial(tmp_path, monkeypatch):
    written = tmp_path / "tutorial.ipynb"
    monkeypatch.setattr(sys, "argv", ["tutorial_notebook.py", "--out", str(written)])
    assert runpy.run_path(str(pages.ROOT / "scripts" / "recorders" / "tutorial_notebook.py"))["main"]() == 0
    assert written.read_text("utf-8") == NOTEBOOK.read_text("utf-8"), "run scripts/recorders/tutorial_notebook.py"
    cells = json.loads(written.read_text("utf-8"))["cells"]
    assert [cell["cell_type"] for cell in cells].count("code") == len(pages.blocks(pages.ROOT / "docs" / "tutorial.md", "python")) > 4
