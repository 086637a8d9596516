"""Threads share kernels as long as that gains something, and try again after a while."""

import numba
import pytest
from models import threads

from bitnet_np.kernels.sharing import Sharing

pytestmark = pytest.mark.skipif(numba.config.NUMBA_NUM_THREADS < 2, reason="needs threads")


@pytest.fixture(autouse=True)
def several():
    """Tests have one thread by themselves, which shares nothing."""
    with threads(2):
        yield


class Machine:
    """A clock, and the processor time of all threads: kernels of 10 ms that get so much of it in a second where threads share them."""

    def __init__(self, worked=1.9):
        self.now = self.processor = 0.0
        self.worked, self.threads = worked, []

    def kernel(self):
        self.now += 0.01
        self.processor += 0.01 * (self.worked if self.threads[-1] > 1 else 1)

    def sharing(self):
        return Sharing(lambda: self.now, lambda: self.processor)

    def run(self, sharing, times, kernel=None):
        for _ in range(times):
            self.threads.append(sharing.members())
            sharing.call(self.threads[-1], kernel or self.kernel)


@pytest.mark.parametrize(("worked", "shares"), [(1.9, True), (1.2, True), (1.05, False), (0.6, False)])
def test_one_thread_works_where_the_others_gain_nothing(worked, shares):
    machine = Machine(worked)
    sharing = machine.sharing()
    machine.run(sharing, 60)
    assert machine.threads[:5] == [2] * 5  # 0.05 s
    assert machine.threads[6:54] == [2 if shares else 1] * 48  # 0.5 s


def test_threads_share_again_after_a_while():
    machine = Machine(0.9)
    sharing = machine.sharing()
    machine.run(sharing, 100)
    machine.worked = 1.9
    machine.run(sharing, 100)
    assert machine.threads[:100].count(1) >= 85
    assert machine.threads[115:] == [2] * 85


def test_a_kernel_that_is_compiled_meanwhile_says_nothing():
    """One thread compiles."""
    machine = Machine(0.5)
    sharing = machine.sharing()

    def compile_and_run():
        machine.kernel()
        compile_and_run.overloads[machine.now] = None

    compile_and_run.overloads = {}
    machine.run(sharing, 60, compile_and_run)
    assert machine.threads == [2] * 60


def test_a_caller_with_one_thread_says_nothing_about_several():
    machine = Machine(1.0)
    sharing = machine.sharing()
    with threads(1):
        machine.run(sharing, 20)
    machine.worked = 1.9
    machine.run(sharing, 20)
    assert machine.threads == [1] * 20 + [2] * 20
