"""Known bits: digests of numbers whatever their layout, inputs from integers alone, and the cases whose names begin as asked."""

import hashlib

import numpy as np
import pytest

from bitnet_np.kernels import launching
from bitnet_np.testing import selftest


def test_a_digest_is_of_little_endian_bytes_in_c_order():
    x, y = np.arange(6, dtype=np.float32).reshape(2, 3), np.array([-1, 7], np.int8)
    expected = hashlib.sha256(x.astype("<f4").tobytes() + y.tobytes()).hexdigest()
    assert selftest.digest(x, y) == expected
    assert selftest.digest(x.astype(">f4"), y) == expected
    assert selftest.digest(np.asfortranarray(x), y) == expected
    assert selftest.digest(y, x) != expected


@pytest.fixture
def two_kernels(monkeypatch):
    """Two cases instead of all, the bits of one of which are known. Returns the names of those that ran."""
    ran = []

    def case(name):
        return lambda: ran.append(name) or (np.zeros(3),)

    monkeypatch.setattr(selftest, "cases", lambda: {name: case(name) for name in ("rope", "matmul")})
    monkeypatch.setattr(selftest, "known_bits", lambda: {"rope": selftest.digest(np.zeros(3)), "matmul": "0" * 64})
    return ran


def test_a_case_is_fine_where_its_bits_are_known(two_kernels):
    """It runs again with its kernels shared out, unless it has failed already."""
    assert list(selftest.run()) == [("rope", True), ("matmul", False)]
    assert two_kernels == ["rope", "rope", "matmul"]


def test_cases_that_were_not_asked_for_do_not_run(two_kernels):
    assert list(selftest.run("mat")) == [("matmul", False)]
    assert two_kernels == ["matmul"]


def test_a_case_without_a_record_is_not_fine(monkeypatch, two_kernels):
    monkeypatch.setattr(selftest, "known_bits", dict)
    assert dict(selftest.run()) == {"rope": False, "matmul": False}
    assert len(two_kernels) == 2


def test_operations_run_alone_and_shared_out_and_models_alone():
    """The number of steps up to which a kernel stays on the calling thread is what it was afterwards, also after an error."""
    least, seen = launching.SMALL, []

    def compute():
        seen.append(launching.SMALL)
        return (np.zeros(1),)

    assert len(set(selftest.digests("rope", compute))) == 1
    assert len(list(selftest.digests("model, llama", compute))) == 1
    assert [steps > least for steps in seen] == [True, False, True]
    assert seen[1] < 0
    with pytest.raises(ZeroDivisionError):
        list(selftest.digests("rope", lambda: 1 / 0))
    assert least == launching.SMALL
