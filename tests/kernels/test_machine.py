"""What reports and benchmarks say of the machine."""

import numpy as np

from bitnet_np.kernels.machine import describe, facts


def test_the_facts_are_text():
    assert facts().keys() == describe().keys()
    assert facts()["numpy"] == np.__version__
    assert all(isinstance(value, str) and value for name, value in facts().items() if name != "features")
