"""Programs that run in a process of their own."""

import os
import subprocess
import sys

WITHOUT_NUMBA = """
import importlib, sys, types
for name in ("numba", "llvmlite"):
    sys.modules[name] = None  # an import of it fails
package = types.ModuleType("bitnet_np")
package.__path__ = [sys.argv[1]]  # whose own modules import kernels
sys.modules["bitnet_np"] = package
"""
"""How a program begins that uses modules of the package, whose folder is its first argument, where there is no Numba."""


def run_python(program, *arguments, **environment):
    """What a program prints that is run with these arguments and variables of the environment, and ends well."""
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "NUMBA_NUM_THREADS": "2"} | environment
    command = [sys.executable, "-c", program, *map(str, arguments)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
