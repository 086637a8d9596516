"""BitNet-rs's trace records: a BLAKE3 hash and a root mean square of each tensor, no values.

Writing them and comparing hashes needs the extra `interop`.

BitNet-rs computes token by token, so a record is of one token: `seq` is its position, its shape is [1, 1, width], and [1, H, 1, t + 1] for
attention. `layer` is -1 for embeddings and logits, and -2 for the output of all layers. Points that it has no name for have ours.
Its files hold one indented record each, named `<name with / replaced by _>.trace`; they are read, but not written: its trace_diff.py reads
line by line, so it needs the form with a record on each line. Its own dumps number all tokens of the layers 0 and keep the last.
"""

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import FileFormatError, shown
from ...base.extras import extra
from ...files.safetensors_file import strict_json
from ..points import LAYER_NAMES, MODEL_NAMES, SCORES, Key, ours_of
from .output import Put, Writer

WHOLE_MODEL, ALL_LAYERS = -1, -2
_MAX_RECORD = 1 << 23  # bytes: a record may hold the first 262,144 values, which are not read
_MAX_RECORDS = 1 << 20
_OURS = ours_of("bitnet_rs")
_THEIRS = {ours: theirs for theirs, ours in _OURS.items()}


@dataclass(frozen=True)
class Fingerprint:
    """One record: the hash and the root mean square of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # before it became float32
    blake3: str  # hexadecimal, of the float32 numbers in little-endian bytes
    rms: float  # NaN where the record has none
    num_elements: int
    seq: int | None = None  # position of the token
    layer: int | None = None
    stage: str | None = None

    @property
    def key(self) -> Key | None:
        """The point of the record; None if it is none of ours."""
        name = _OURS.get(self.stage or "", self.stage)
        if name in MODEL_NAMES and self.layer in (WHOLE_MODEL, ALL_LAYERS):
            return Key(name, None)
        if name in LAYER_NAMES and self.layer is not None and self.layer >= 0:
            return Key(name, self.layer)
        return None


def fingerprints(key: Key, array: NDArray) -> Iterator[Fingerprint]:
    """The records of a point in normal form, one for each token."""
    stage, scores = _THEIRS.get(key.name, key.name), key.name in SCORES
    layer = key.layer if key.layer is not None else ALL_LAYERS if stage == "all_layers_out" else WHOLE_MODEL
    place = stage if key.layer is None else f"blk{key.layer}/{stage}"
    for t in range(array.shape[1] if scores else len(array)):
        numbers = np.ascontiguousarray(array[:, t, : t + 1] if scores else array[t], "<f4")
        with np.errstate(over="ignore", invalid="ignore"):
            rms = math.sqrt(np.square(numbers, dtype=np.float64).mean())
        shape = (1, len(numbers), 1, t + 1) if scores else (1, 1, numbers.size)
        yield Fingerprint(f"t{t}/{place}", shape, "F32", hash_of(numbers), rms, numbers.size, t, layer, stage)


def hash_of(values: NDArray) -> str:
    """The hash of a record: BLAKE3 of float32 numbers in little-endian bytes. Raises UnsupportedError without the extra `interop`."""
    return _blake3()(np.ascontiguousarray(values, "<f4").tobytes()).hexdigest()


def _blake3() -> Any:
    return extra("blake3", "interop", "a record of BitNet-rs").blake3


def read(path: str | os.PathLike[str]) -> list[Fingerprint]:
    """The records of a folder of .trace and .jsonl files, or of one such file."""
    path = Path(path)
    if path.is_file():
        files = [path]
    else:
        files = sorted(Path(entry) for entry in os.scandir(path) if entry.name.endswith((".trace", ".jsonl")) and entry.is_file())
    records = []
    for file in files:
        lines = file.suffix == ".jsonl"  # a record on each; else one in the file
        with open(file, "rb") as stream:
            for number, text in enumerate(iter(partial(stream.readline if lines else stream.read, _MAX_RECORD + 1), b""), 1):
                where = f"{file}:{number}" if lines else str(file)
                if len(text) > _MAX_RECORD:
                    raise FileFormatError(f"{where}: a record of more than {_MAX_RECORD} bytes")
                if text.strip():
                    records.append(_record(strict_json(text, where), where))
                if len(records) > _MAX_RECORDS:
                    raise FileFormatError(f"{path}: more than {_MAX_RECORDS} records")
    if not records:
        raise FileFormatError(f"{path}: no records in it, expected .trace or .jsonl files of BitNet-rs")
    return records


_NEEDED = {"name": (str,), "shape": (list,), "dtype": (str,), "blake3": (str,), "num_elements": (int,)}
_OPTIONAL = {"rms": (float, int), "seq": (int,), "layer": (int,), "stage": (str,)}


def _record(value: Any, where: str) -> Fingerprint:
    if not isinstance(value, dict):
        raise FileFormatError(f"{where}: {shown(value)}, expected an object")
    fields: dict[str, Any] = {name: value.get(name) for name in (*_NEEDED, *_OPTIONAL)}
    for name, kinds in (_NEEDED | _OPTIONAL).items():
        if type(fields[name]) not in kinds and not (fields[name] is None and name in _OPTIONAL):
            raise FileFormatError(f"{where}: {name} is {shown(fields[name])}, expected {' or '.join(kind.__name__ for kind in kinds)}")
    shape, count, digest = fields["shape"], fields["num_elements"], fields["blake3"]
    if len(shape) > 8 or not all(type(n) is int and 0 <= n < 2**63 for n in shape) or math.prod(shape) != count:
        raise FileFormatError(f"{where}: shape is {shown(shape)} and num_elements {shown(count)}, expected one to be the other's product")
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise FileFormatError(f"{where}: blake3 is {shown(digest)}, expected 64 hexadecimal digits")
    for name in ("seq", "layer"):
        if not -(2**31) <= (fields[name] or 0) < 2**31:
            raise FileFormatError(f"{where}: {name} is {shown(fields[name])}, expected a number of 32 bits")
    try:
        rms = math.nan if fields["rms"] is None else float(fields["rms"])
    except OverflowError:
        raise FileFormatError(f"{where}: rms is {shown(fields['rms'])}, expected a float") from None
    return Fingerprint(**fields | {"shape": tuple(shape), "rms": rms})


def as_json(record: Fingerprint) -> str:
    """A record as BitNet-rs writes it: unknown fields are left out, and a number that is not finite is null."""
    fields = {name: value for name, value in asdict(record).items() if value is not None}
    return json.dumps(fields | {"rms": record.rms if math.isfinite(record.rms) else None})


def write(out: Writer) -> Iterator[Put]:
    """All records in one file, one on each line: what trace_diff.py reads."""
    _blake3()
    with open(out.part, "x", encoding="utf-8", newline="\n") as file:
        yield lambda key, array: file.writelines(as_json(record) + "\n" for record in fingerprints(key, array))
