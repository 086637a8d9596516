"""Helpers for tests of sweeps: plans as text, and what a worker does before it starts."""

import json
import sys

from command_line import TINY

PLAN = f"""
repeat = 3
[models]
tiny = {json.dumps(TINY)}
[tokens]
short = {{ ids = [1, 2, 3] }}
random = {{ random = 20, seed = 5, count = 6 }}
[[run]]
do = "logits"
[[run]]
do = "nll"
as = "bitnet.cpp"
tokens = ["random"]
"""


def engine_run(program, *arguments, more=""):
    """An entry of a plan that runs a program of Python."""
    command = [sys.executable, "-c", program, *arguments]
    return f'\n[[run]]\ndo = "engine"\ntokens = ["short"]\ncommand = {json.dumps(command)}\n{more}\n'


def written(folder, text):
    """A plan in a file. Returns its path."""
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def dask_setup(worker):
    """Dask calls this in each worker of the tests: the selftest is of one kernel, because all of them compile for a minute."""
    from functools import partial

    from bitnet_np.testing import selftest

    selftest.run = partial(selftest.run, "rms_norm")
