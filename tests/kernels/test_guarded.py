"""No kernel reads or writes past the end of an array: a protected page follows each (tests/support/guarded.py)."""

import os
import subprocess
import sys

import guarded
import pytest

pytestmark = pytest.mark.skipif(sys.platform not in ("linux", "darwin"), reason="protects pages by mprotect")


def run(program: str, **variables: str) -> subprocess.CompletedProcess:
    path = os.pathsep.join([os.path.dirname(guarded.__file__), *sys.path])
    environment = os.environ | variables | {"PYTHONPATH": path, "NUMBA_NUM_THREADS": "2"}
    command = [sys.executable, "-c", program]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)


def test_kernels_stay_within_their_arrays():
    done = run("import guarded; guarded.run(20); print('done')")
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr[-2000:]


@pytest.mark.usual(0)  # compiles every kernel
def test_kernels_stay_within_the_arrays_that_they_make(tmp_path):
    """Compiled anew, for the program has another way to make them."""
    done = run("import runpy; runpy.run_module('guarded_inside', run_name='__main__')", NUMBA_CACHE_DIR=str(tmp_path))
    assert done.returncode == 0, done.stderr[-2000:]


def test_a_program_that_writes_past_an_end_dies_of_it():
    assert run("import ctypes, guarded; ctypes.memset(guarded.empty(3).ctypes.data, 0, 13)").returncode < 0
