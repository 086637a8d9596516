"""Values of other types, for arguments that must be integers."""

import numpy as np

NO_INTEGERS = [None, "abc", b"a", 1.5, 2.0, float("nan"), True, np.bool_(True), [1], {}, 1j, np.array([1, 2]), np.float32(1), ...]
