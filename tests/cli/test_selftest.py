"""`bitnet-np selftest`: what it prints of each kernel, and its exit code."""

import re

import numba
import pytest

from bitnet_np import contract
from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.kernels import cpu
from bitnet_np.kernels.launching import serial
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.testing import selftest
from bitnet_np.testing.model_cases import TABLES

FEW = ("rms_norm", "layer_norm", "attend, window", "forward, exact", "model, gpt2", "model, llama")


@pytest.fixture
def few_cases(monkeypatch):
    """Some of the cases in place of all. Returns their names."""
    cases = selftest.cases
    monkeypatch.setattr(selftest, "cases", lambda ops=cpu: {name: cases(ops)[name] for name in FEW})
    return FEW


def test_selftest(run, few_cases):
    """Some cases, both ways; tests/testing/test_known_kernels.py has all of them."""
    out = run("selftest", "--threads", "2")
    assert [line.removesuffix("as known").rstrip() for line in out.splitlines() if line.endswith("  as known")] == [*few_cases]
    assert re.search(r"\nthreads +2\n", out)
    assert re.search(r"^PASS: all as known, [\d.]+ s\n", out)
    result = run("selftest", "--json")
    assert (result["fine"], result["kernels"]) == (True, dict.fromkeys(few_cases, True))


@pytest.mark.parametrize("name", ["rms_norm", "attend, window", "forward, exact"])
def test_selftest_names_the_kernel_that_differs(run, monkeypatch, few_cases, name):
    tampered = selftest.known_bits() | {name: "0" * 64}
    monkeypatch.setattr(selftest, "known_bits", lambda: tampered)
    out = run("selftest", code=1)
    assert [line.split("  ")[0] for line in out.splitlines() if line.endswith("DIFFER")] == [name]
    assert out.startswith("FAIL: ")
    result = run("selftest", "--json", code=1)
    assert result["fine"] is False
    assert [kernel for kernel, fine in result["kernels"].items() if not fine] == [name]


def test_selftest_against_the_contract(run, monkeypatch):
    """Every case of a backend, and every model: none is left out but what no backend computes. They compute nothing here, because
    tests/test_contract.py compares every operation and family, and tests/kernels/test_block_products.py every type of blocks.
    """
    every = selftest.cases()
    monkeypatch.setattr(selftest, "cases", lambda ops=cpu: dict.fromkeys(every, tuple))
    out = run("selftest", "--against", "contract")
    same = [line.removesuffix("the same").rstrip() for line in out.splitlines() if line.endswith("  the same")]
    assert same == [name for name in every if name not in selftest.cases_of_kernels()]
    named = (*ARCHITECTURES, *TABLES, *DIALECTS, *(kind.name for kind in ALL_BLOCK_TYPES))
    assert {f"model, {name}" for name in named} < set(same)
    assert re.search(r"^PASS: all the same, [\d.]+ s\n", out)


def test_selftest_names_what_differs_from_the_contract(run, monkeypatch, few_cases):
    """One operation, and the models that have it."""
    monkeypatch.setattr(contract, "layer_norm", lambda x, gain, bias, eps: cpu.layer_norm(x, gain, bias, 2 * eps))
    out = run("selftest", "--against", "contract", code=1)
    assert [line.split("  ")[0] for line in out.splitlines() if line.endswith("DIFFER")] == ["layer_norm", "model, gpt2"]
    assert out.startswith("FAIL: ")
    result = run("selftest", "--against", "contract", "--json", code=1)
    assert (result["fine"], result["against"]) == (False, "contract")
    assert result["kernels"] == {name: name not in ("layer_norm", "model, gpt2") for name in few_cases}


def plus_three(x):
    return x + 3


def test_selftest_clears_the_cache(run, tmp_path, monkeypatch):
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    serial(plus_three)(1)
    (entry,) = tmp_path.rglob("*.kernel")
    nbytes, folder = entry.stat().st_size, str(entry.parents[1])
    assert run("selftest", "--clear-cache", "--json") == {"folder": folder, "files": 1, "bytes": nbytes}
    assert not entry.parent.exists()
    assert re.fullmatch(r".*: 0 compiled kernels deleted, 0.0 MB\n", run("selftest", "--clear-cache"))
    monkeypatch.setattr(selftest, "run", lambda: [("embed float32", True)])
    assert run("selftest", "--json")["compiled_kernels"] == folder
