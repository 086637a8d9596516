"""Helpers for tests of sweeps: plans as text, and what a worker does before it starts."""

import json
import os
import signal

from command_line import TINY

PLAN = f"""
# a comment
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


def written(folder, text):
    """A plan in a file. Returns its path."""
    path = folder / "plan.toml"
    path.write_text(text)
    return path


def dask_setup(worker):
    """Dask calls this in each worker of the tests.

    The selftest is of one kernel, because all of them compile for a minute. Logits of the tokens "deadly" end the process.
    """
    from functools import partial

    from bitnet_np.sweep import tasks
    from bitnet_np.testing import selftest

    selftest.run, compute = partial(selftest.run, "rms_norm"), tasks.OPERATIONS["logits"]

    def logits(task):
        return os.kill(os.getpid(), signal.SIGKILL) if task.tokens == "deadly" else compute(task)

    tasks.OPERATIONS["logits"] = logits
