"""The examples run, and say what they are meant to."""

import os
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pages
import pytest

from bitnet_np.traces.formats import read_any
from bitnet_np.traces.points import Key

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_batch_inference(capsys):
    assert runpy.run_path(str(EXAMPLES / "batch_inference.py"))["main"]([]) == 0
    out = capsys.readouterr().out
    assert out.count("goes on [") == 4
    assert "12 forward passes for 24 tokens" in out
    assert "slots hold [3, 4, 5] positions" in out


JUDGING = pages.ROOT / "docs" / "judging.md"

C_ENGINE = """
#include "dump.h"

int main(void) {
    float x[3 * 300];
    int8_t codes[6] = {-128, 127, 0, 1, -1, 5};
    int32_t ids[3] = {5, 0, 511};
    for (int i = 0; i < 3 * 300; i++) x[i] = (float)i / 7;
    if (dump_open("dump") || dump_i32("tokens", -1, ids, 1, 3) || dump_f32("attn_norm", 12, x, 3, 300)) return 1;
    if (dump_f32("result_output", -1, x, 3, 2) || dump_i8("attn_norm_codes", 0, codes, 3, 2)) return 2;
    if (dump_open("steps")) return 3;
    for (int step = 0; step < 3; step++) {
        dump_step(step);
        if (dump_f32("l_out", 0, x + 4 * step, 1, 4)) return 4;
    }
    return dump_open("dump") || dump_f32("no/such/folder", 0, x, 1, 1) != -1;
}
"""
COMPILERS = {
    "c99": ["cc", "-x", "c", "-std=c99"],
    "c++": ["c++", "-x", "c++", "-std=c++11"],
}
STRICT = ["-Wall", "-Wextra", "-Wno-unused-function", "-pedantic", "-Werror", "-O1"]


@pytest.mark.parametrize("language", COMPILERS)
def test_the_c_header_writes_what_is_read(tmp_path, monkeypatch, language):
    compiler, *options = COMPILERS[language]
    if os.name == "nt" or shutil.which(compiler) is None:
        pytest.skip(f"needs {compiler}")
    monkeypatch.chdir(tmp_path)
    Path("engine.c").write_text(C_ENGINE)
    subprocess.run([compiler, *options, *STRICT, "-I", str(EXAMPLES), "engine.c", "-o", "engine"], check=True)
    subprocess.run(["./engine"], check=True)
    x = np.arange(900, dtype=np.float32) / np.float32(7)
    trace = read_any("dump")
    np.testing.assert_array_equal(trace.tokens, [5, 0, 511])
    np.testing.assert_array_equal(trace.points[Key("attn_norm", 12)], x.reshape(3, 300))
    np.testing.assert_array_equal(trace.points[Key("result_output", None)], x[:6].reshape(3, 2))
    np.testing.assert_array_equal(trace.points[Key("attn_norm_codes", 0)], [[-128, 127], [0, 1], [-1, 5]])
    np.testing.assert_array_equal(np.load("dump/attn_norm-12.npy"), x.reshape(3, 300))  # NumPy agrees about the header
    np.testing.assert_array_equal(read_any("steps").points[Key("l_out", 0)], x[:12].reshape(3, 4))


@pytest.mark.skipif(shutil.which("rustc") is None, reason="needs rustc")
def test_the_rust_file_writes_steps_codes_and_ids(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(EXAMPLES / "dump.rs", "dump.rs")
    rows = 'dump(&format!("l_out-0.step-{step}"), &[1, 2], &[step as f32, 0.5]).unwrap()'
    whole = 'dump_i8("attn_norm_codes-0", &[3, 2], &[-128, 127, 0, 1, -1, 5]).unwrap(); dump_i32("tokens", &[3], &[5, 0, 511]).unwrap();'
    Path("engine.rs").write_text(f"mod dump;\nuse dump::*;\nfn main() {{ {whole} for step in 0..3 {{ {rows} }} }}")
    subprocess.run(["rustc", "engine.rs"], check=True)
    subprocess.run([str(tmp_path / "engine")], check=True)
    trace = read_any("dump")
    np.testing.assert_array_equal(trace.tokens, [5, 0, 511])
    np.testing.assert_array_equal(trace.points[Key("attn_norm_codes", 0)], [[-128, 127], [0, 1], [-1, 5]])
    np.testing.assert_array_equal(trace.points[Key("l_out", 0)], [[0, 0.5], [1, 0.5], [2, 0.5]])


def test_recording_transformers_prints_what_the_page_shows(tmp_path, monkeypatch, capsys):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    assert runpy.run_path(str(EXAMPLES / "record_transformers.py"))["main"]() == 0
    said, command = pages.blocks(JUDGING, "text")
    assert capsys.readouterr().out == said.code
    from bitnet_np.cli.main import main

    first, *shown = command.code.splitlines()
    assert main(first.split()[2:]) == 0
    assert capsys.readouterr().out.splitlines()[: len(shown)] == shown


def test_the_page_shows_the_heart_of_the_example():
    (block,) = pages.blocks(JUDGING, "py")
    source = (EXAMPLES / "record_transformers.py").read_text("utf-8")
    assert "".join(f"    {line}\n" for line in block.code.splitlines()) in source


def test_the_example_imports_without_torch(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert "main" in runpy.run_path(str(EXAMPLES / "record_transformers.py"))
