"""Modules of the extras: imported when they are needed, and named with their extra where they are missing."""

import sys

import pytest

from bitnet_np.base.errors import UnsupportedError
from bitnet_np.base.extras import extra


@pytest.mark.parametrize("module", ["tokenizers", "tokenizers.models"])
def test_a_missing_module_is_named_with_its_extra(monkeypatch, module):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    monkeypatch.delitem(sys.modules, "tokenizers.models", raising=False)  # another test may have imported it
    with pytest.raises(UnsupportedError, match=r"^text needs tokenizers: pip install 'bitnet_np\[text\]'$"):
        extra(module)
    with pytest.raises(UnsupportedError, match=r"^a plot needs tokenizers: pip install 'bitnet_np\[plots\]'$"):
        extra(module, "plots", "a plot")
