"""Marks that skip tests of the GPU's code where something they need is missing."""

from importlib.util import find_spec

import pytest

from bitnet_np.base.errors import OptionError
from bitnet_np.gpu.device import open_cuda


def has_gpu() -> bool:
    """Whether there is a GPU that the backend supports."""
    try:
        open_cuda()
    except OptionError:
        return False
    return True


needs_package = pytest.mark.skipif(find_spec("numba_cuda") is None, reason="numba-cuda is not installed (extra `cuda`)")
needs_gpu = pytest.mark.skipif(not has_gpu(), reason="no GPU here")
needs_no_gpu = pytest.mark.skipif(has_gpu(), reason="there is a GPU here")
