"""Fixtures of tests of generation."""

import pytest

from bitnet_np.engine import forward_pass


@pytest.fixture
def passes(monkeypatch):
    """The lengths of the sequences in each forward pass that generation makes."""
    seen, run_cached = [], forward_pass.run_cached

    def counted(runtime, tokens, *rest, **options):
        assert options["last_only"]
        seen.append(tuple(tokens.lengths.tolist()))
        return run_cached(runtime, tokens, *rest, **options)

    monkeypatch.setattr(forward_pass, "run_cached", counted)
    return seen
