"""What every test gets: the helper modules of tests/, one thread, no deadlines, and kernels compiled from the sources as they are."""

import hashlib
import importlib.util
import os
import sys
from pathlib import Path

TESTS = Path(__file__).parent
sys.path.insert(0, str(TESTS))
sys.path.append(str(TESTS.parent))  # at the end: an installed package is tested as installed

# Numba keeps compiled kernels on disk, and does not notice when a module that a kernel takes its rules from has changed (scalar.py,
# simd.py). So each state of the sources has a cache of its own. These settings are read when Numba and its thread pool are loaded.
_SOURCES = sorted(Path(importlib.util.find_spec("bitnet_np").submodule_search_locations[0], "kernels").glob("*.py"))
_STATE = hashlib.sha256(b"".join(path.read_bytes() for path in _SOURCES)).hexdigest()[:16]
os.environ.setdefault("NUMBA_CACHE_DIR", str(TESTS.parent / ".pytest_cache" / "kernels" / _STATE))
os.environ["NUMBA_NUM_THREADS"] = str(max(4, os.cpu_count() or 1))  # the bits may not depend on how many processors there are
os.environ["OMP_WAIT_POLICY"] = "passive"  # threads that spin for work would keep each other from it there
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")  # NumPy's own threads: they spin too

import numba  # noqa: E402
import pytest  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

settings.register_profile("bitnet_np", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("bitnet_np")


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    """Waking threads costs milliseconds on a busy machine. Tests of threads say how many with `models.threads`.

    Little work stays on the calling thread, as for users, and `models.threads` shares out even that: so kernels run both ways.
    """
    before = numba.get_num_threads()
    numba.set_num_threads(1)
    yield
    numba.set_num_threads(before)
