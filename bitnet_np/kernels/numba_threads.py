"""The number of threads that Numba shares work among, without its lock.

`numba.get_num_threads` takes a lock at each call, in several steps of Python. A KeyboardInterrupt between two of them may leave the lock
taken; every other thread would then wait for ever at its next kernel. A forked child shares that lock with its parent. Numba is therefore
asked once, on a separate thread that no KeyboardInterrupt reaches. That initialises its threading layer, which is asked from then on.
"""

from collections.abc import Callable
from ctypes import PYFUNCTYPE, c_int, c_void_p, cast
from functools import cache
from threading import Thread

import numba
from numba.np.ufunc import parallel


def get_num_threads() -> int:
    """As numba.get_num_threads: what the calling thread has set, by default NUMBA_NUM_THREADS."""
    return _layers()()


@cache
def _layers() -> Callable[[], int]:
    thread = Thread(target=numba.get_num_threads)
    thread.start()
    thread.join()
    function = getattr(parallel, "_get_num_threads", None)  # a private part, of ctypes
    if function is None:
        return numba.get_num_threads
    return PYFUNCTYPE(c_int)(cast(function, c_void_p).value or 0)  # other threads wait for the nanoseconds that this takes
