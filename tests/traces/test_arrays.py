"""Arrays of other libraries, read as NumPy's. The real ones where they are installed, small stand-ins everywhere."""

import sys
from types import ModuleType

import numpy as np
import pytest

from bitnet_np.errors import ShapeError
from bitnet_np.traces.arrays import as_numpy

NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3) / 4


class Tensor:
    """What is used of torch's: bfloat16 has no NumPy, and a tensor with a gradient must be detached."""

    def __init__(self, array, dtype="float32", attached=True):
        self.array, self.dtype, self.attached = array, dtype, attached

    def detach(self):
        return Tensor(self.array, self.dtype, False)

    def cpu(self):
        return self

    def float(self):
        return Tensor(self.array, "float32", self.attached)

    def numpy(self):
        assert not self.attached
        if self.dtype == "bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


class Bfloat16:
    """An array of a library that has bfloat16 and gives it no NumPy, as MLX."""

    dtype = "mlx.core.bfloat16"

    def __array__(self, dtype=None, copy=None):
        raise ValueError("Item size 2 does not match")

    def astype(self, dtype):
        assert dtype == "its own float32"
        return NUMBERS


def test_arrays_of_numpy_are_not_copied():
    assert as_numpy("x", NUMBERS) is NUMBERS
    assert np.shares_memory(as_numpy("x", Tensor(NUMBERS)), NUMBERS)


@pytest.mark.parametrize("value", [NUMBERS.tolist(), Tensor(NUMBERS), Tensor(NUMBERS, "bfloat16"), memoryview(NUMBERS)])
def test_arrays_of_any_library(value):
    np.testing.assert_array_equal(as_numpy("x", value), NUMBERS)


def test_a_library_with_types_of_its_own(monkeypatch):
    library = ModuleType("library")
    library.float32 = "its own float32"
    monkeypatch.setitem(sys.modules, "library", library)
    monkeypatch.setattr(Bfloat16, "__module__", "library")
    np.testing.assert_array_equal(as_numpy("x", Bfloat16()), NUMBERS)


@pytest.mark.parametrize("value", ["abc", None, object(), [[1], [2, 3]], np.array(["a"]), np.zeros(2, np.complex64)])
def test_what_is_no_array_of_numbers_is_refused(value):
    with pytest.raises(ShapeError, match=r"^dump\['x'\] is of type "):
        as_numpy("dump['x']", value)


def test_torch():
    torch = pytest.importorskip("torch")
    tensor = torch.tensor(NUMBERS)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        np.testing.assert_array_equal(as_numpy("x", tensor.to(dtype).requires_grad_()), NUMBERS)
    np.testing.assert_array_equal(as_numpy("x", tensor.T), NUMBERS.T)
    with pytest.raises(ShapeError, match="is of type Tensor"):
        as_numpy("x", tensor.to_sparse())


def test_mlx():
    mx = pytest.importorskip("mlx.core")
    for dtype in (mx.float32, mx.float16, mx.bfloat16):
        np.testing.assert_array_equal(as_numpy("x", mx.array(NUMBERS).astype(dtype)), NUMBERS)
