"""Traces for the tests of file formats, and files made byte by byte."""

import json
import struct
import tracemalloc

import numpy as np

from bitnet_np.traces.formats import FORMATS, read_any
from bitnet_np.traces.points import LAYER_NAMES, SCORES, Key

TOKENS = np.array([3, 1, 4, 1, 5])
T, V = len(TOKENS), 7
READABLE = [name for name, format in FORMATS.items() if format.writer and format.read]
WHOLE = [name for name in READABLE if FORMATS[name].writer.names is None]  # formats that hold every point
LOGITS = Key("result_output", None)


def all_points(n_layers=2, seed=0):
    """Every point of a forward pass, with NaN, infinities and negative zeros in one of them."""
    rng = np.random.default_rng(seed)
    points = {Key("inp_embd", None): rng.standard_normal((T, 6), np.float32)}
    for n in range(n_layers):
        for name in LAYER_NAMES:
            shape = (2, T, T) if name in SCORES else (T,) if name.endswith("_scale") else (T, 6 if name.startswith("attn") else 9)
            values = rng.integers(-127, 128, shape).astype(np.int8) if name.endswith("_codes") else rng.standard_normal(shape, np.float32)
            points[Key(name, n)] = values
    points[Key("l_out", 0)][1, :3] = [np.nan, -np.inf, -0.0]
    points[Key("result_norm", None)] = rng.standard_normal((T, 6), np.float32)
    points[LOGITS] = rng.standard_normal((T, V), np.float32)
    return points


def write_trace(path, format, points=None, tokens=TOKENS):
    """Writes those of the points, by default of `all_points`, that the format can hold. Returns them."""
    names = FORMATS[format].writer.names
    written = {key: array for key, array in (points or all_points()).items() if names is None or key.name in names}
    with FORMATS[format].writer(path, tokens) as out:
        for key, array in written.items():
            out.add(key, array)
    return written


def read_trace(path, format):
    """The trace in a file of this format, which may lack shape and tokens."""
    return read_any(path, format, shape=(T, V) if format == "raw" else None, tokens=TOKENS)


def load_all(trace):
    """All points of a trace, in memory."""
    return {key: np.array(array) for key, array in trace.points.items()}


def contents(path):
    """Name -> bytes of a folder's files; a single file has an empty name."""
    return {"": path.read_bytes()} if path.is_file() else {str(f.relative_to(path)): f.read_bytes() for f in path.rglob("*") if f.is_file()}


def peak_memory(action):
    """The most bytes that Python's allocator held at once while the action ran."""
    tracemalloc.start()
    try:
        action()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def npy_bytes(header, data=b""):
    """A .npy file with this header, a dictionary or bytes."""
    text = (header if isinstance(header, bytes) else repr(header).encode()) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def npy_of(descr="<i8", shape=(2,), data=bytes(48), fortran_order=False):
    """A .npy file whose header says this; it is sound if the data are as many."""
    return npy_bytes({"descr": descr, "fortran_order": fortran_order, "shape": shape}, data)


NO_NPY = {  # each makes NumPy raise another error, or is no array of numbers, as pickles and archives
    "empty": b"",
    "pickle": b"\x80\x04K\x01.",
    "zip": b"PK\x03\x04" + bytes(100),
    "version 9": b"\x93NUMPY\x09\x00" + bytes(90),
    "open brace": npy_bytes(b"{'descr'"),
    "parentheses": npy_bytes(b"(" * 3000),
    "huge header": npy_bytes(b"{" + b" " * 60_000 + b"'descr': '<i8', 'fortran_order': False, 'shape': (2,)}"),
    "no such dtype": npy_of("foo"),
    "objects": npy_of("|O", (1,), bytes(8)),
    "fields": npy_of([("a", "<f4")], (1, 1), bytes(4)),
    "order": npy_of("<f4", (1, 1), bytes(4), 1),
    "cut data": npy_of(shape=(7,)),
    "too large": npy_of(shape=(2**63 - 1,)),
    "negative": npy_of(shape=(-1, -1)),
    "bool": npy_of(shape=(True, True)),
    "40 axes": npy_of("<f4", (1,) * 40, bytes(4)),
}
NO_LOGITS = {  # sound files
    "text numbers": npy_of("<U1", (2, 2), bytes(16)),
    "complex": npy_of("<c8", (1, 1), bytes(8)),
    "no axis": npy_of("<f4", (), bytes(4)),
    "no numbers": npy_of("<f4", (0, 4), b""),
}


def safetensors_bytes(header, data=b""):
    """A safetensors file with this header, a dictionary or bytes."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data
