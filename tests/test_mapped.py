"""Pages of mapped files: they are given back only where nobody could have written to them."""

import numpy as np

from bitnet_np import mapped


def test_pages_that_could_be_written_to_are_not_given_back(tmp_path):
    path = tmp_path / "table"
    path.write_bytes(bytes(1 << 16))
    changed = np.memmap(path, mode="c")
    changed[:] = 1
    changed.flags.writeable = False
    mapped.release(changed)
    assert (changed == 1).all()
