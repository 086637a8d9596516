"""The pytest plugin, in test suites of others: the fixture, its assertions, its reports. Each suite here runs in a pytest of its own."""

import json
import shutil
import subprocess
import sys
import tomllib

import numba
import pages
import pytest
from command_line import TINY

import bitnet_np  # noqa: F401 - loaded before the inner runs, which would load it each

pytest_plugins = ["pytester"]

SUITE = f"""
    import numpy as np
    import pytest

    import bitnet_np as bn

    MODEL = {TINY!r}
    TOKENS = [1, 2, 3, 4, 5]

    @pytest.fixture
    def logits():
        return bn.compute_logits(bn.load(MODEL), [TOKENS])[0]
"""


@pytest.fixture(scope="module")
def numba_is_loaded():
    """Numba imports modules when it first compiles. A run within this process would forget them, and they cannot be loaded twice."""
    numba.njit(lambda: 0)()


@pytest.fixture
def run(numba_is_loaded, pytester):
    """Runs a suite of these tests in a pytest of its own, with these options."""

    def run_suite(tests, *options):
        pytester.makeini("[pytest]")  # of its own, not one of a folder above
        pytester.makepyfile(test_engine=SUITE + tests)
        return pytester.runpytest_inprocess("-p", "pytest_bitnet_np", "-p", "no:cacheprovider", "-p", "no:xdist", "--tb=short", *options)

    return run_suite


def test_a_right_engine_passes_numbers_that_are_none_fail_and_wrong_arguments_are_the_librarys_errors(run):
    result = run("""
    def test_paths_and_models(oracle, logits):
        report = oracle.assert_engine(MODEL, TOKENS, logits)
        assert report.verdict == bn.Verdict.SAME_BITS
        assert oracle.model(MODEL) is oracle.model(MODEL)
        oracle.assert_engine(oracle.model(MODEL), [TOKENS], {"logits": logits[None]})

    def test_a_file_and_a_dialect(oracle, tmp_path):
        logits = bn.compute_logits(oracle.model(MODEL), [TOKENS], dialect=bn.BITNET_CPP)[0]
        np.save(tmp_path / "x.npy", logits)
        assert oracle.assert_engine(MODEL, TOKENS, tmp_path / "x.npy", dialect="bitnet.cpp").verdict == bn.Verdict.SAME_BITS

    def test_what_cannot_be_compared(oracle, logits):
        oracle.assert_engine(MODEL, TOKENS, logits * np.nan)

    def test_arguments(oracle, logits):
        with pytest.raises(bn.Error, match="token 600"):
            oracle.assert_engine(MODEL, [600], logits)
        with pytest.raises(bn.Error, match="dialect is 'x'"):
            oracle.assert_engine(MODEL, TOKENS, logits, dialect="x")
    """)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(
        ["INVALID: their logit at 0, 0 is nan; 2560 in all are not finite", "FAILED *test_what_cannot_be_compared*"]
    )


def test_a_failure_shows_the_operation_and_the_cause_and_no_arrays(run):
    result = run("""
    def test_engine(oracle):
        points = {}
        def record(name, layer, array):
            points[name if layer is None else f"{name}-{layer}"] = array.reshape(len(TOKENS), -1).copy()
        def edit(name, layer, array):
            return np.maximum(array, 0) if name == "ffn_out" and layer == 1 else array
        from bitnet_np.engine.network import Runtime
        from bitnet_np.engine.forward_pass import run_whole
        from bitnet_np.engine.tokens import check_tokens
        model = oracle.model(MODEL)
        run_whole(Runtime(model, record=record, edit=edit).checked(), check_tokens(model.config, [TOKENS]))
        oracle.assert_engine(model, TOKENS, {k: v for k, v in points.items() if not k.partition("-")[0].endswith(("_codes", "_scale"))})
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["WRONG at layer 1 ffn_out: *", "logits: *", "*test_engine.py:*", "FAILED test_engine.py::test_engine*"])
    said = result.stdout.str()
    assert "array(" not in said
    assert "Traceback" not in said
    assert len(said) < 2000


def test_reports_are_written_for_right_and_for_wrong_assertions(run, pytester):
    result = run(
        """
    @pytest.mark.parametrize("factor", [1, 2], ids=["<b>/..", "two"])
    def test_engine(oracle, logits, factor):
        oracle.assert_engine(MODEL, TOKENS, logits)
        oracle.assert_engine(MODEL, TOKENS, logits * np.float32(factor))
    """,
        "--oracle-report",
        "some/reports",
    )
    result.assert_outcomes(passed=1, failed=1)
    folder = pytester.path / "some" / "reports"
    plain = [json.loads(path.read_text("utf-8")) for path in sorted(folder.glob("*.json"))]
    verdicts = [(report["test"].partition("[")[2], report["verdict"]) for report in plain]
    assert sorted(verdicts) == [("<b>/..]", "SAME_BITS")] * 2 + [("two]", "SAME_BITS"), ("two]", "WRONG")]
    names = {path.stem for path in folder.glob("*.html")}
    assert names == {path.stem for path in folder.glob("*.json")}
    assert len(names) == 4
    assert all(path.parent == folder for path in pytester.path.rglob("*.html"))
    (wrong,) = folder.glob("*two*-2.html")
    assert "times ours at position" in wrong.read_text("utf-8")
    result.stdout.fnmatch_lines([f"report: *{wrong.name}"])


def test_without_the_fixture_nothing_of_the_library_is_imported(pytester):
    """pytest imports the plugin in every run of every project."""
    pytester.makepyfile("""
    import sys

    def test_nothing():
        assert "pytest_bitnet_np" in sys.modules
        assert not {"numpy", "numba", "bitnet_np"} & set(sys.modules)
    """)
    result = pytester.runpytest_subprocess(
        "-p", "pytest_bitnet_np", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:hypothesispytest"
    )
    result.assert_outcomes(passed=1)
    assert "oracle" in pytester.runpytest_inprocess("-p", "pytest_bitnet_np", "--fixtures", "-p", "no:xdist").stdout.str()


def test_the_example_project_passes_its_own_tests(tmp_path):
    """A right engine, and one with a bug whose test is expected to fail: with --runxfail it does, and says why."""
    project = shutil.copytree(pages.ROOT / "examples" / "tested_engine", tmp_path / "elsewhere")

    def run_tests(*options):
        command = [sys.executable, "-m", "pytest", "-p", "pytest_bitnet_np", "-p", "no:cacheprovider", "-p", "no:xdist", *options]
        return subprocess.run(command, cwd=project, capture_output=True, encoding="utf-8")

    fine = run_tests(f"--oracle-report={tmp_path / 'reports'}")
    assert "2 passed, 1 xfailed" in fine.stdout, fine.stdout + fine.stderr
    assert len(list(tmp_path.glob("reports/*.html"))) == len(list(tmp_path.glob("reports/*.json"))) == 3
    failing = run_tests("--runxfail")
    assert "1 failed, 2 passed" in failing.stdout
    assert "\nWRONG at layer 3 ffn_out: SiLU(gate) * up instead of relu(gate)^2 * up\n" in failing.stdout


def test_the_entry_point_is_the_module():
    """One name for both, so that `-p pytest_bitnet_np` and an installed package do not load it twice."""
    project = tomllib.loads((pages.ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["entry-points"]["pytest11"] == {"pytest_bitnet_np": "pytest_bitnet_np"}


def test_a_missing_model_fails_in_one_line(run):
    result = run("""
    def test_it(oracle, logits):
        oracle.assert_engine("none.gguf", TOKENS, logits)
    """)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["no model: none.gguf: no such file or folder"])
    assert "Traceback" not in result.stdout.str()
    assert "pytest_bitnet_np.py:" not in result.stdout.str()
