"""What is published: the wheel and the sdist, and what they say of themselves."""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes

import pages
import pytest

from bitnet_np import __version__

TOOLS = [name for name in ("hatchling", "hatch_fancy_pypi_readme", "twine") if importlib.util.find_spec(name) is None]
LARGEST = 5 << 20  # bytes of an sdist


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The wheel and the sdist, built from the checkout."""
    if TOOLS:
        pytest.skip(f"needs {', '.join(TOOLS)}")
    folder = tmp_path_factory.mktemp("published")
    subprocess.run([sys.executable, "-m", "hatchling", "build", "-d", folder], cwd=pages.ROOT, check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return wheel, sdist


def test_an_index_accepts_them(published):
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", *published], check=True)


def test_they_hold_what_belongs_in_them_and_no_recordings(published):
    wheel, sdist = published
    package = {path.relative_to(pages.ROOT).as_posix() for path in (pages.ROOT / "bitnet_np").rglob("*.*") if path.suffix != ".pyc"}
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert package | {"pytest_bitnet_np.py", "bitnet_np/py.typed", "bitnet_np/data/known_bits.json"} <= {*names}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"bitnet_np", "pytest_bitnet_np.py"}
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert package | {"pyproject.toml", "LICENSE", "CHANGELOG.md", "CITATION.cff", "docs/judging.md"} <= {*names}
    assert [name for name in names if name.startswith("tests")] == ["tests/data/bitnet_cpp_tiny_trace.npz"]
    assert sdist.stat().st_size < LARGEST


def test_the_examples_run_from_the_sdist(published, tmp_path):
    """With the package of the checkout, whose kernels are compiled: it is the same, as the test above sees."""
    with tarfile.open(published[1]) as archive:
        archive.extractall(tmp_path, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))  # older patches of 3.11 have none
    (unpacked,) = tmp_path.iterdir()
    programs = ("files.py", "batch_inference.py", "tested_engine/faulty_engine.py")
    for program in programs:
        subprocess.run(
            [sys.executable, unpacked / "examples" / program], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(pages.ROOT)}, check=True
        )
    assert {"model.gguf", "nodes.npz", "dump"} <= {path.name for path in tmp_path.iterdir()}


def test_links_of_the_description_lead_out_of_the_index(published):
    with zipfile.ZipFile(published[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    home = dict(entry.split(", ") for entry in metadata.get_all("Project-URL"))["Homepage"]
    targets = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert f"{home}/blob/main/docs/judging.md" in targets
    assert f"{home.replace('github.com', 'raw.githubusercontent.com')}/main/docs/report.png" in targets  # /blob/ is a page about it
    assert [target for target in targets if not target.startswith("https://")] == []


def test_the_changes_and_the_citation_are_of_this_version():
    headings = re.findall(r"^## (\d.*)$", pages.text(pages.ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == __version__
    assert f"\nversion: {__version__}\n" in (pages.ROOT / "CITATION.cff").read_text("utf-8")
