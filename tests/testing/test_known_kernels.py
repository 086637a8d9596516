"""The self-test runs every kernel that Python may call, and finds each of them wrong."""

import kernel_calls
import pytest

from bitnet_np.kernels.cache import disk_cache
from bitnet_np.testing import selftest

pytestmark = pytest.mark.skipif(not disk_cache.is_known(), reason="another version of Numba, whose calls cannot be watched")


@pytest.fixture(scope="module")
def found():
    return kernel_calls.seen(selftest.cases())


def test_every_kernel_is_run_both_ways(found):
    """None is left out but those that this machine has no instructions for. Of 111 kernels at least 105 are run on any machine."""
    expected = {name for name in kernel_calls.outermost() if name.removesuffix("_alone") not in kernel_calls.MACHINE_HAS_NOT}
    assert {name for name, _ in found.callers} == expected
    assert len(expected) >= 105


def test_the_cases_give_the_known_bits_with_every_call_watched(found):
    assert found.digests == selftest.known_bits()


def test_every_kernel_is_found_wrong(found):
    """One mistake in one compiled form of each; `python tests/support/kernel_calls.py` makes all of them."""
    sample = {}
    for n, (signature, parameter, place) in enumerate(kernel_calls.mutants(found)):
        sample.setdefault((signature[0], parameter), []).append((n, signature, place))
    missed = []
    for (name, parameter), choices in sample.items():
        n, signature, place = choices[sum(map(ord, name)) % len(choices)]
        if not kernel_calls.finds(selftest.cases(), found, signature, parameter, place):
            missed.append((name, parameter, place))
    assert missed == []
