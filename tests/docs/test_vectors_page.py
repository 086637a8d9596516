"""The page of test vectors: its commands run, its examples compile, pass, and fail where they have a bug."""

import re
import shutil
import subprocess

import pages
import pytest
from checkers import STRICT, c_program, rust_program

from bitnet_np.cli.main import main

PAGE = pages.ROOT / "docs" / "vectors.md"
EXAMPLES = pages.ROOT / "examples" / "vectors"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A project with the pack that the page writes."""
    folder = tmp_path_factory.mktemp("project")
    (command,) = pages.blocks(PAGE, "console")
    _, *words = command.code.splitlines()[0].removeprefix("$ ").split()
    words[1] = str(folder / "vectors")
    assert main(words) == 0
    return folder


def test_the_small_pack_is_as_large_as_the_page_says(folder):
    (command,) = pages.blocks(PAGE, "console")
    shown = re.search(r"(\d+) cases in (\d+) files, ([\d.]+) MB", command.code)
    files = [path for path in (folder / "vectors").rglob("*") if path.is_file()]
    nbytes = sum(path.stat().st_size for path in files)
    assert (int(shown[2]), float(shown[3])) == (len(files), round(nbytes / 1e6, 2))
    assert nbytes < 1e6


def _words(text):
    """A text without its numbers: compilers fuse products and sums, so that the last digits differ."""
    return re.sub(r"\d+(\.\d+)?(e[-+]\d+)?", "N", text).replace("-N", "N")


def _ran(program, folder, *arguments):
    done = subprocess.run([program, *arguments], cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout


def test_the_c_example_passes_and_fails_with_its_bug(folder):
    program = c_program(folder, (EXAMPLES / "engine.c").read_text())
    code, text = _ran(program, folder)
    assert code == 0, text
    assert re.search("# 0 of [1-9] failed", text)
    failing, passing = (block.code.splitlines() for block in pages.blocks(PAGE, "text"))
    assert _words(passing[0]) in _words(text)
    code, text = _ran(program, folder, "bug")
    assert code == 1
    assert _words("\n".join(failing)) in _words(text)
    assert "not ok" not in "".join(line for line in text.splitlines() if "rms_norm" not in line)


def test_the_rust_example_passes_and_fails_with_its_bug(folder, tmp_path):
    program = rust_program(tmp_path, (EXAMPLES / "engine.rs").read_text())
    code, text = _ran(program, folder)
    assert code == 0, text
    assert re.search("# 0 of [1-9] failed", text)
    code, text = _ran(program, folder, "bug")
    assert code == 1
    assert "not ok" in text


def test_the_page_shows_a_program_that_compiles(folder):
    """With the norm that it calls."""
    (shown,) = pages.blocks(PAGE, "c")
    norm = "static void my_rms_norm(float *y, const float *x, const float *gain, double eps, size_t rows, size_t width) {\n"
    norm += "    for (size_t i = 0; i < rows * width; i++) y[i] = x[i] * gain[i % width] * (float)eps;\n}\n"
    source = shown.code.replace('#include "vectors.h"\n', f'#include "vectors.h"\n{norm}')
    program = c_program(folder, source.replace("void *user) {", "void *user) {\n    (void)user;"), name="shown.c")
    code, text = _ran(program, folder)
    assert code == 1
    assert "not ok" in text


def test_the_header_is_short_and_compiles_as_c_and_as_cpp(tmp_path):
    header = pages.ROOT / "bitnet_np" / "vectors" / "vectors.h"
    assert len(header.read_text().splitlines()) <= 400
    c_program(tmp_path, '#include "vectors.h"\nint main(void) { return 0; }')
    if shutil.which("c++"):
        (tmp_path / "both.cpp").write_text('#include "vectors.h"\nint main() { return 0; }')
        strict = [option for option in STRICT if option != "-std=c99"]
        subprocess.run(["c++", "-std=c++11", *strict, "-I", header.parent, "both.cpp", "-o", "both"], cwd=tmp_path, check=True)
