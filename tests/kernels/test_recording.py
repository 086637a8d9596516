"""Launches that are run again: every kind of argument arrives, and an error ends them. Passes: tests/engine/test_repeats.py."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from bitnet_np.kernels.launching import launch, parallel, shared
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
