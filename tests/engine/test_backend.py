"""The vocabulary of a backend: the CPU has all of it, and a wrapped backend is another one but for the operations that it replaces."""

import numpy as np
import pytest

from bitnet_np.engine.backend import OPERATIONS, Wrapped
from bitnet_np.kernels import cpu


def test_what_is_not_replaced_is_the_backends_own():
    def add(a, b):
        return a - b

    wrapped = Wrapped(cpu, add=add)
    assert wrapped.add is add
    assert all(getattr(wrapped, name) is getattr(cpu, name) for name in OPERATIONS if name != "add")
    assert (wrapped.device, wrapped.exact_only, wrapped.splits_rows) == (cpu.device, cpu.exact_only, False)
    again = Wrapped(wrapped, scaled=add)
    assert again.add is again.scaled is add
    assert again.rope is cpu.rope


def test_only_operations_can_be_replaced():
    with pytest.raises(AssertionError, match=r"no operations of a backend: {'sub'}"):
        Wrapped(cpu, sub=np.subtract)
    with pytest.raises(AttributeError, match="sub"):
        Wrapped(cpu).sub  # noqa: B018
