"""Stand-ins for the arrays of torch and MLX, which may not be installed: what is asked of them, and what they refuse."""

import numpy as np


class Tensor:
    """What is asked of torch's: bfloat16 has no NumPy, and a tensor with a gradient must be detached."""

    def __init__(self, array, dtype="torch.float32", detached=False):
        self.array, self.dtype, self.detached = array, dtype, detached

    @property
    def shape(self):
        return self.array.shape

    def detach(self):
        return Tensor(self.array, self.dtype, True)

    def float(self):
        return Tensor(self.array.astype(np.float32, copy=False), "torch.float32", self.detached)

    def cpu(self):
        return self

    def numpy(self):
        assert self.detached
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


float32 = "this library's own float32"


class Bfloat16:
    """An array of MLX that NumPy cannot read; `astype` takes a dtype of the module of its class."""

    dtype = "mlx.core.bfloat16"

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        raise ValueError("Item size 2 does not match")

    def astype(self, dtype):
        assert dtype is float32
        return self.array
