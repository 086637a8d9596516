"""`bitnet-np selftest`: what it prints of each kernel, and its exit code."""

import re

import pytest

from bitnet_np import selftest


def test_selftest(run):
    out = run("selftest", "--threads", "2")
    names = list(selftest.cases())
    assert set(names) == set(selftest.known_bits())
    assert [line.removesuffix("as known").rstrip() for line in out.splitlines() if line.endswith("  as known")] == names
    assert re.search(r"\nthreads +2\n", out)
    assert re.search(r"\n\nall as known, [\d.]+ s\n$", out)


def test_selftest_in_json(run):
    result = run("selftest", "--json")
    names = "machine python numpy numba threads instruction_path features fine kernels seconds"
    assert set(result) == set(names.split())
    assert result["fine"] is True
    assert result["kernels"] == dict.fromkeys(selftest.cases(), True)
    assert isinstance(result["features"], list)


@pytest.mark.parametrize("name", ["rms_norm", "attend, window", "forward, exact"])
def test_selftest_names_the_kernel_that_differs(run, monkeypatch, name):
    tampered = selftest.known_bits() | {name: "0" * 64}
    monkeypatch.setattr(selftest, "known_bits", lambda: tampered)
    out = run("selftest", code=1)
    assert [line.split("  ")[0] for line in out.splitlines() if line.endswith("DIFFER")] == [name]
    assert "NOT FINE" in out
    result = run("selftest", "--json", code=1)
    assert result["fine"] is False
    assert [kernel for kernel, fine in result["kernels"].items() if not fine] == [name]
