"""The setting of every test: the helper modules of tests/, one thread, no deadlines, and a cache of compiled kernels.

The cache, and what the judge's readings said, are checked when all tests are done.
"""

import faulthandler
import gc
import math
import os
import signal
import sys
from pathlib import Path

TESTS = Path(__file__).parent
sys.path[:0] = [str(TESTS), str(TESTS / "support")]
sys.path.append(str(TESTS.parent))  # at the end: an installed package is tested as installed

# These settings are read when Numba and its thread pool are loaded.
os.environ.setdefault("NUMBA_CACHE_DIR", str(TESTS.parent / ".pytest_cache" / "kernels"))
os.environ["NUMBA_NUM_THREADS"] = str(max(4, os.cpu_count() or 1))  # the bits may not depend on how many processors there are
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin for work would keep each other from it
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's own threads: they spin too
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # dozens of processes import the same modules: half a second each, if they are compiled

# A shell has what it starts in the background ignore interrupts. Tests interrupt this process, and children, which inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A compilation makes millions of small objects that live on. Python looks through all of them each time it has some hundred new ones: an
# eighth of the time of compiling.
gc.set_threshold(100_000, 20, 20)

import depth  # noqa: E402
import numba  # noqa: E402
import pytest  # noqa: E402
import said_texts  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

# 40 examples: faults that so few do not show are found by more draws (README.md), not by a hundred
settings.register_profile("bitnet_np", max_examples=40, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bitnet_np")

NEVER_SAID = pytest.StashKey[list[str]]()


@pytest.fixture(autouse=True)
def one_thread():
    """One thread, because waking others costs milliseconds on a busy machine. Tests of threads set their number with `models.threads`.

    Small kernels stay on the calling thread, as for users; `models.threads` shares out even these. So kernels run both ways. It is set for
    each test, because a command's --threads holds for the whole process.
    """
    numba.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def one_thread_of_products():
    """NumPy's products have one thread. The variable above comes too late without xdist: pytest's own options have NumPy loaded by then."""
    from bitnet_np.base.blas import openblas

    if (blas := openblas()) is not None:
        blas.set(1)


@pytest.fixture(autouse=True, scope="session")
def no_lines_of_progress():
    """Commands print no line every ten seconds, however slow the machine: tests compare what they print. tests/cli/test_progress.py
    sets the interval."""
    from bitnet_np.cli import progress

    before, progress.INTERVAL = progress.INTERVAL, math.inf
    yield
    progress.INTERVAL = before


@pytest.fixture(autouse=True, scope="session")
def slow_clock():
    """Searches for causes have several times their seconds: a busy or slow machine must not decide what they say."""
    from bitnet_np.judge.mistakes import search

    clock, search.thread_time = search.thread_time, lambda: clock() / 4
    yield
    search.thread_time = clock


@pytest.fixture
def is_thorough(request):
    """Whether this run is thorough, for programs that run many checks in one process."""
    return request.config.getoption("thorough")


@pytest.fixture
def write(tmp_path):
    """A function that writes gguf_models' file, with other keys and tensors."""
    from gguf_models import writer

    return writer(tmp_path)


@pytest.fixture
def written(tmp_path):
    """A function that writes the file of any model, with other keys."""
    from family_models import writer

    return writer(tmp_path)


def pytest_addoption(parser):
    parser.addoption("--thorough", action="store_true", help="all cases and draws of every test, for a night or a release: an hour")


def pytest_collection_modifyitems(config, items):
    """Leave to a thorough run what is not usual. EXAMPLES=20 gives each property twenty times its examples, for the draws that are rare."""
    is_thorough = config.getoption("thorough")
    depth.draw(items, float(os.environ.get("EXAMPLES", 1 if is_thorough else 1 / depth.SHARE)))
    if not is_thorough and not any("[" in argument for argument in config.args):
        kept = set(depth.usual(items))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.hookimpl(trylast=True)
def pytest_configure(config):
    """A worker of xdist that crashes leaves its stack in a file: standard error is often lost."""
    if hasattr(config, "workerinput"):
        faulthandler.enable(_stack(config.workerinput["workerid"]).open("w"))


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Take over what a worker of xdist has seen; print the stack of one that crashed."""
    said_texts.SAID.update(getattr(node, "workeroutput", {}).get("said", ()))
    print(_stack(node.gateway.id).read_text(), end="")


def _stack(worker):
    folder = TESTS.parent / ".pytest_cache"
    folder.mkdir(exist_ok=True)
    return folder / f"stack-of-{worker}.txt"


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session):
    """Fail unless every text of the judge's readings was said in some test, if all of them ran.

    xdist's controller checks when its workers are done.
    """
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["said"] = sorted(said_texts.SAID)
        return
    if said_texts.all_tests_ran(session) and (texts := said_texts.never_said(said_texts.SAID)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED
        session.config.stash[NEVER_SAID] = texts


def pytest_terminal_summary(terminalreporter, config):
    """Say what failed besides tests, where a reader looks for it: the last line counts tests alone."""
    for text in config.stash.get(NEVER_SAID, ()):
        terminalreporter.write_line(f"FAILED {text}: no test plants the fault that this text names", red=True)
