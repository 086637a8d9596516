"""What is published: the wheel and the sdist, and what they say of themselves."""

import importlib.util
import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email import message_from_bytes

import pages
import pytest

from bitnet_np import __version__

TOOLS = [name for name in ("hatchling", "hatch_fancy_pypi_readme", "twine", "mypy") if importlib.util.find_spec(name) is None]
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
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {"pytest_bitnet_np.py", "bitnet_np/py.typed", "bitnet_np/data/demo.gguf", "bitnet_np/data/known_bits.json"} <= {*names}
    assert {name.split("/")[0].split("-")[0] for name in names} == {"bitnet_np", "pytest_bitnet_np.py"}
    with tarfile.open(sdist) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"pyproject.toml", "LICENSE", "CHANGELOG.md", "CITATION.cff", "docs/judging.md", "bitnet_np/py.typed"} <= {*names}
    assert [name for name in names if name.startswith("tests")] == []
    assert sdist.stat().st_size < LARGEST


def test_links_of_the_description_lead_out_of_the_index(published):
    with zipfile.ZipFile(published[0]) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith("/METADATA"))
        metadata = message_from_bytes(archive.read(name))
    home = dict(entry.split(", ") for entry in metadata.get_all("Project-URL"))["Homepage"]
    targets = re.findall(r"\]\(([^)]+)\)", metadata.get_payload())
    assert f"{home}/blob/main/docs/judging.md" in targets
    assert f"{home.replace('github.com', 'raw.githubusercontent.com')}/main/docs/report.png" in targets  # /blob/ is a page about it
    assert [target for target in targets if not target.startswith("https://")] == []


def test_mypy_sees_the_types_of_an_installed_package(published, tmp_path):
    venv.create(tmp_path / "env")
    folders = {name: sysconfig.get_path(name, "venv", {"base": tmp_path / "env"}) for name in ("purelib", "scripts")}
    with zipfile.ZipFile(published[0]) as archive:
        archive.extractall(folders["purelib"])
    (tmp_path / "user.py").write_text('import bitnet_np\n\nreveal_type(bitnet_np.load("model.gguf"))\n')
    command = [sys.executable, "-m", "mypy", "--python-executable", f"{folders['scripts']}/python", "user.py"]
    out = subprocess.run(command, cwd=tmp_path, env=os.environ | {"MYPYPATH": ""}, capture_output=True, text=True, check=False).stdout
    assert 'Revealed type is "bitnet_np.model.records.Model"' in out


def test_the_changes_and_the_citation_are_of_this_version():
    headings = re.findall(r"^## (\d.*)$", pages.text(pages.ROOT / "CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == __version__
    assert f"\nversion: {__version__}\n" in (pages.ROOT / "CITATION.cff").read_text("utf-8")
