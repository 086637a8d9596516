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
    """A clock, and the processor time of all threads: kernels of 10 ms that get so much of it in a second, shared or alone."""

    def __init__(self, worked=1.9, alone=1.0):
        self.now = self.processor = 0.0
        self.worked, self.alone, self.threads = worked, alone, []

    def kernel(self):
        self.now += 0.01
        self.processor += 0.01 * (self.worked if self.threads[-1] > 1 else self.alone)

    def sharing(self):
        return Sharing(lambda: self.now, lambda: self.processor)

    def run(self, sharing, times, kernel=None, kernels=1):
        for _ in range(times):
            self.threads.append(sharing.members())
            sharing.call(self.threads[-1], kernels, kernel or self.kernel)


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


def test_threads_share_where_one_alone_gets_less_than_a_core():
    """Beside two processes on two cores it gets two thirds of one, and two threads get two halves."""
    machine = Machine(1.0, alone=0.67)
    sharing = machine.sharing()
    machine.run(sharing, 1100)
    first, second = machine.threads[:55], machine.threads[55:1100]
    assert first[5:] == [1] * 50  # until it is known
    assert second[:440] == [2] * 440  # 5 s from then on
    assert 45 <= second.count(1) <= 150  # and again
    machine.alone = 1.0
    machine.run(sharing, 1500)
    assert machine.threads[1600:].count(1) >= 850


def test_threads_do_not_share_short_kernels_there():
    machine = Machine(1.0, alone=0.67)
    machine.run(machine.sharing(), 1000, kernels=100)
    assert machine.threads.count(1) >= 850


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
