"""The self-test runs every kernel that Python may call, and finds each of them wrong."""

import kernel_calls
import pytest

from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, Q4_K, Q8_0
from bitnet_np.testing import selftest


@pytest.fixture(scope="module")
def found():
    return kernel_calls.seen(selftest.cases())


def test_every_kernel_is_run(found):
    """None is left out but those that this machine has no instructions for."""
    expected = {name for name in kernel_calls.called_from_python() if name not in kernel_calls.MACHINE_HAS_NOT}
    assert {name for name, _ in found.callers} == expected
    assert len(expected) >= 35


def test_the_cases_give_the_known_bits_with_every_call_watched(found):
    assert found.digests == selftest.known_bits()


def test_what_threads_share_gives_the_known_bits():
    """Of ggml's types one of each size of a block: rows are shared out alike, whatever their type."""
    others = {f"blocks {kind.name}" for kind in ALL_BLOCK_TYPES if kind not in (Q4_K, Q8_0)}
    known = selftest.known_bits()
    with selftest.on_one_thread(False):
        for name, compute in selftest.cases().items():
            if name.removesuffix(", many rows") not in others and not name.startswith("model"):  # whole models run alone
                assert selftest.digest(*compute()) == known[name], name


def test_every_kernel_is_found_wrong(found):
    """Every compiled form of each, in one number of each row, the last of each row, and the last row of each array that it writes."""
    cases, mutants = selftest.cases(), list(kernel_calls.mutants(found))
    assert len(mutants) > 450  # more where the processor has matrix tiles
    assert [mutant for mutant in mutants if not kernel_calls.finds(cases, found, *mutant)] == []
