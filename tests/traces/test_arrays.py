"""Arrays of other libraries, read as NumPy's: by stand-ins. scripts/real_engines.py has the real ones."""

import numpy as np
import pytest
from foreign_arrays import Bfloat16, Tensor

from bitnet_np.base.errors import ShapeError
from bitnet_np.traces.arrays import as_numpy

NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3) / 4


def test_arrays_of_numpy_are_not_copied():
    assert as_numpy("x", NUMBERS) is NUMBERS
    assert np.shares_memory(as_numpy("x", Tensor(NUMBERS)), NUMBERS)


@pytest.mark.parametrize("value", [NUMBERS.tolist(), Tensor(NUMBERS), Tensor(NUMBERS, "torch.bfloat16"), memoryview(NUMBERS)])
def test_arrays_of_any_library(value):
    np.testing.assert_array_equal(as_numpy("x", value), NUMBERS)


def test_a_library_with_types_of_its_own():
    np.testing.assert_array_equal(as_numpy("x", Bfloat16(NUMBERS)), NUMBERS)


@pytest.mark.parametrize("value", ["abc", None, object(), [[1], [2, 3]], np.array(["a"]), np.zeros(2, np.complex64)])
def test_what_is_no_array_of_numbers_is_refused(value):
    with pytest.raises(ShapeError, match=r"^dump\['x'\] is of type "):
        as_numpy("dump['x']", value)
