"""Products on one thread: within, nested, in several Python threads, and no longer."""

import threading

import numpy as np
import pytest
from models import random_model

import bitnet_np as bn
from bitnet_np.base.blas import one_thread, openblas
from bitnet_np.judge import sequences
from bitnet_np.judge.dump import judge_dump

BLAS = openblas()
pytestmark = pytest.mark.skipif(BLAS is None, reason="NumPy multiplies by another library")


@pytest.fixture(autouse=True)
def _two_threads():
    before = BLAS.in_use()
    BLAS.set(2)
    yield
    BLAS.set(before)


def test_one_thread_within_and_as_many_as_before_behind():
    with one_thread():
        with one_thread():
            assert BLAS.in_use() == 1
        assert BLAS.in_use() == 1
    assert BLAS.in_use() == 2


def test_an_error_gives_them_back():
    with pytest.raises(KeyError), one_thread():
        raise KeyError
    assert BLAS.in_use() == 2


def test_the_last_of_several_python_threads_gives_them_back():
    inside, leave = threading.Event(), threading.Event()

    def judge():
        with one_thread():
            inside.set()
            leave.wait()

    other = threading.Thread(target=judge)
    with one_thread():
        other.start()
        inside.wait()
    assert BLAS.in_use() == 1
    leave.set()
    other.join()
    assert BLAS.in_use() == 2


@pytest.mark.parametrize(("small", "threads"), [(10**8, 1), (0, 2)])
def test_a_small_model_is_judged_on_one_thread(monkeypatch, small, threads):
    model, seen = random_model(0), []
    monkeypatch.setattr(sequences, "_SMALL", small)
    monkeypatch.setattr(sequences, "judge_dump", lambda *args, **_: seen.append(BLAS.in_use()) or judge_dump(*args))
    assert bn.check(model, [1, 2, 3], np.asarray(bn.forward_full(model, [[1, 2, 3]])[0])).verdict == bn.Verdict.SAME_BITS
    assert seen == [threads]
    assert BLAS.in_use() == 2
