"""Calls of compiled kernels from a list: every kind of argument arrives, and an error ends the list."""

from typing import Any, NamedTuple

import numpy as np
import pytest
from numba import types
from numba.core.registry import cpu_target

from bitnet_np.kernels.fast.calls import Calls, UnknownArgumentError, words_of
from bitnet_np.kernels.launching import serial


class Pair(NamedTuple):
    numbers: Any
    step: Any


@serial
def _arguments(table, column, pair, flag, small, whole, single, double, out):
    out[0] = table[1, 2] + column[1]  # strides
    out[1] = pair.numbers[3] * pair.step[0] + pair.step[1]
    out[2] = 1 if flag else 2
    out[3] = small
    out[4] = whole
    out[5] = single
    out[6] = double
    out[7] = table.size + 100 * table.shape[1] + 10000 * pair.numbers.itemsize


@serial
def _count(out):
    out[0] += 1


@serial
def _ask_for_memory(size, out):
    out[0] = np.zeros(size, np.uint8).size


def test_every_kind_of_argument_arrives():
    numbers = np.arange(24, dtype=np.float32).reshape(4, 6)
    out = np.zeros(8)
    pair = Pair(np.arange(5, dtype=np.int16), (7, -3))
    arguments = numbers, numbers[::-1, 4], pair, True, np.int8(-5), -(1 << 40), np.float32(0.1), 0.1, out
    _arguments(*arguments)
    expected = out.copy()
    assert expected.tolist() == [8 + 16, 3 * 7 - 3, 1, -5, -(1 << 40), float(np.float32(0.1)), 0.1, 24 + 600 + 20000]
    out[:] = 0
    calls = Calls()
    calls.add(_arguments, arguments)
    calls.close()
    calls.run()
    assert out.tobytes() == expected.tobytes()


def test_calls_are_made_in_their_order_until_one_has_an_error():
    out, much = np.zeros(1), np.zeros(1)
    calls = Calls()
    for kernel, arguments in ((_count, (out,)), (_ask_for_memory, (1234, much)), (_count, (out,))):
        kernel(*arguments)
        calls.add(kernel, arguments)
    calls.close()
    calls.run()
    assert (out[0], much[0]) == (4, 1234)
    calls._words[calls._words == 1234] = 1 << 62  # bytes
    with pytest.raises(MemoryError):
        calls.run()
    assert out[0] == 5


def test_what_is_not_passed_on_is_refused():
    with pytest.raises(UnknownArgumentError, match="unicode"):
        words_of("a", types.unicode_type)
    with pytest.raises(UnknownArgumentError, match="compiled for"):
        Calls().add(_count, (np.zeros((2, 2)),))


def test_code_is_made_once_for_a_type_of_kernel(monkeypatch):
    out = np.zeros(1)
    _count(out)
    for attempt in range(2):
        calls = Calls()
        calls.add(_count, (out,))
        if attempt:
            monkeypatch.setattr(cpu_target.target_context, "codegen", None)
        calls.close()
        calls.run()
    assert out[0] == 3
