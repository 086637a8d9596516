"""Launches that are run again: every kind of argument arrives, and an error ends them. Passes: tests/engine/test_repeats.py."""

from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest

from bitnet_np.kernels.launching import choose, launch, parallel, shared
from bitnet_np.kernels.recording import Recording
from bitnet_np.kernels.workspace import empty


class Pair(NamedTuple):
    numbers: Any
    step: Any


@parallel
def arguments(team, table, column, pair, flag, small, whole, single, double, out):
    for _ in shared(team, 1):
        out[0] = table[1, 2] + column[1]  # strides
        out[1] = pair.numbers[3] * pair.step[0] + pair.step[1]
        out[2] = 1 if flag else 2
        out[3] = small
        out[4] = whole
        out[5] = single
        out[6] = double
        out[7] = table.size + 100 * table.shape[1] + 10000 * pair.numbers.itemsize


@parallel
def allocate(team, size, out):
    for i in shared(team, 1):
        out[i] = np.empty(size[0], np.uint8).size


def test_every_kind_of_argument_arrives():
    def launched(table, numbers):
        out = empty((8,), np.float64)
        launch(arguments, 1, table, table[::-1, 4], Pair(numbers, (7, -3)), True, np.int8(-5), -(1 << 40), np.float32(0.1), 0.1, out)
        return out

    recording = Recording(launched, [np.arange(24, dtype=np.float32).reshape(4, 6), np.arange(5, dtype=np.int16)], [])
    expected = [8 + 16, 3 * 7 - 3, 1, -5, -(1 << 40), float(np.float32(0.1)), 0.1, 24 + 600 + 20000]
    assert (recording.is_whole, recording.result.tolist()) == (True, expected)
    recording.forget()
    assert recording.again([np.ones((4, 6), np.float32), np.full(5, 2, np.int16)]).tolist() == [2, 11, *expected[2:]]


def test_launches_are_run_in_their_order_until_one_has_an_error():
    def launched(first, second):
        out = empty((2,), np.int64)
        for size in (first, second):
            launch(allocate, 1, size, out)
        return out

    recording = Recording(launched, [np.array([1]), np.array([2])], [])
    assert recording.again([np.array([3]), np.array([4])]).tolist()[0] == 4
    with pytest.raises(MemoryError, match="a kernel has no memory for its work"):
        recording.again([np.array([5]), np.array([1 << 62])])
    assert recording._result[0] == 5


@parallel
def multiply(team, x, factor, out):
    for i in shared(team, x.size):
        out[i] = x[i] * factor[0]


@parallel
def add_to(team, x, out):
    for i in shared(team, x.size):
        out[i] += x[i]


FACTORS = np.arange(2, 6, dtype=np.float64)
FACTORS.flags.writeable = False


class Chooser:
    """x[0] times the factors that two numbers choose: branches of two launches, whose results are added."""

    def __init__(self, launches=lambda number: 1):
        self.launches, self.run = launches, []

    def __call__(self, x, numbers):
        out = empty((1,), np.float64)
        launch(multiply, 1, x, FACTORS[:1], out)  # by 2
        for slot in range(2):
            choose(numbers[slot : slot + 1], len(FACTORS), partial(self.branch, x, slot, out))
        return out

    def branch(self, x, slot, out, number):
        self.run.append((slot, number))
        y = empty((1,), np.float64)
        for _ in range(self.launches(number)):
            launch(multiply, 1, x, FACTORS[number : number + 1], y)
        launch(add_to, 1, y, out)


def test_a_branch_runs_in_python_when_a_recording_does_not_know_it():
    function = Chooser()
    recording = Recording(function, [np.ones(1), np.array([0, 3], np.int32)], [])
    for x, first, second in [(1, 0, 3), (10, 3, 0), (100, 3, 3), (3, 1, 2), (7, 2, 1), (5, 1, 1), (9, 0, 2)]:
        recording.forget()
        expected = x * (2 + FACTORS[first] + FACTORS[second])
        assert recording.again([np.array([x]), np.array([first, second], np.int32)]).tolist() == [expected]
    assert recording.is_whole
    again = [(0, 0), (1, 3), (0, 3), (1, 0), (0, 1), (1, 2), (0, 2), (1, 1)]
    assert function.run == [(0, 0), (1, 3), *again]  # as the pass itself, and then each once


def test_branches_of_unequal_launches_end_a_recording():
    recording = Recording(Chooser(lambda number: 1 + number // 3), [np.ones(1), np.array([0, 1], np.int32)], [])
    assert recording.again([np.array([10.0]), np.array([0, 3], np.int32)]).tolist() == [10 * (2 + 2 + 5)]
    assert not recording.is_whole


def test_an_interrupted_branch_is_run_again():
    function = Chooser()
    recording = Recording(function, [np.ones(1), np.array([0, 1], np.int32)], [])
    function.launches = lambda number: 1 / 0
    with pytest.raises(ZeroDivisionError):
        recording.again([np.array([1.0]), np.array([2, 3], np.int32)])
    function.launches = lambda number: 1
    assert recording.again([np.array([1.0]), np.array([2, 3], np.int32)]).tolist() == [2 + 4 + 5]
    assert recording.is_whole


def test_a_choice_by_what_no_launch_computes_is_not_recorded():
    def by_numpy(x, numbers):
        return Chooser()(x, numbers + 1)

    assert not Recording(by_numpy, [np.ones(1), np.array([0, 1], np.int32)], []).is_whole


def test_a_choice_without_launches_is_not_recorded():
    def choosing(x, number):
        out = empty((1,), np.float64)
        launch(multiply, 1, x, FACTORS[:1], out)
        choose(number, 4, lambda chosen: None)
        return out

    assert not Recording(choosing, [np.ones(1), np.array([0], np.int32)], []).is_whole
