"""Files of PyTorch's torch.save (.pt, .pth, .bin): read by torch itself, which must be installed, with weights_only=True.

Nothing in a file is run. Tensors are mapped, not read, and none can be larger than the bytes it has in the file. What a model of
transformers returned can also be read: classes of transformers have stand-ins here, and nothing of transformers is imported.
"""

import re
import warnings
import zipfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from ...base.errors import FileFormatError, UnsupportedError, shown
from ...base.extras import extra
from ..arrays import as_numpy
from ..labels import returned
from ..normal_form import without_leading_ones
from ..points import Entry, Key
from .arrays import MAX_POINTS, Labelled, damaged, head_of

PICKLE = "data.pkl"
"""The member of the archive that names the tensors."""

_FIRST = (2, 6)  # older ones can be made to run code in spite of weights_only: CVE-2025-32434
_DEEPEST = 8  # containers within containers
_ZIP = b"PK\x03\x04"
_MAX_PICKLE = 1 << 24  # bytes
_OUTPUT = re.compile(r"transformers\.[\w.]+\.\w*Output\w*")  # a subclass of OrderedDict
_CACHE = re.compile(r"transformers\.cache_utils\.Dynamic(?:Cache|Layer)")  # these hold the keys and values of all tokens
_ALLOWING = Lock()
"""torch has one list of allowed names for all threads."""


def read(path: Path) -> Labelled:
    """The arrays of a file with tensors in dictionaries, lists and tuples, whose keys and numbers make a label, joined by dots.

    One tensor alone is taken for logits. bfloat16 is widened to float32, which is exact. Raises FileFormatError for a damaged file, for one
    that holds more than tensors, and for what transformers' generate returned; UnsupportedError if torch is missing, or older than 2.6.
    """
    _check_archive(path)
    torch = extra("torch", "torch", "a file of torch.save")
    version = tuple(int(part) for part in str(torch.__version__).split("+")[0].split(".")[:2])
    if version < _FIRST:
        raise UnsupportedError(f"{path}: torch is {torch.__version__}, expected 2.6 or later: older ones may run what a file says")
    try:
        with _ALLOWING, warnings.catch_warnings(action="ignore"):  # of a damaged file: it is an error, or its tensors are checked
            named = [name for name in torch.serialization.get_unsafe_globals_in_checkpoint(path) if name.startswith("transformers.")]
            with torch.serialization.safe_globals([(_stand_in(name), name) for name in named]):
                content = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises nearly anything for a damaged file
        reason = shown((str(error) or type(error).__name__).splitlines()[0])
        raise FileFormatError(f"{path}: no file of tensors alone, as a dictionary of names and tensors: {reason}") from None
    arrays: dict[str, Entry] = {}
    for label, tensor in _tensors(content, torch.Tensor, path):
        if label in arrays:
            raise FileFormatError(f"{path}: tensor {shown(label)} is there twice, expected each name once")
        arrays[label] = _entry(tensor, f"{path}: tensor {shown(label)}", returned(label, None))
    if "sequences" in arrays:
        raise FileFormatError(f"{path}: what `generate` returned, step by step, expected what one call of the model returned")
    if set(arrays) == {""}:
        arrays = {"logits": arrays[""]}
    return Labelled(arrays, path, "torch")


class _Unread:
    """Stands for an object of transformers whose content is passed over."""

    def __setstate__(self, state: object) -> None:
        """Leave the object's state out."""


def _output(*fields: object) -> OrderedDict:
    """Stands for the class of what a model returns: its fields come again as the items that follow."""
    return OrderedDict()


def _stand_in(name: str) -> Any:
    """What torch is to make in place of the class of transformers of this name."""
    return _output if _OUTPUT.fullmatch(name) else OrderedDict if _CACHE.fullmatch(name) else _Unread


def _check_archive(path: Path) -> None:
    """Raises FileFormatError for what torch would read without looking at sizes: compressed archives, and files older than torch 1.6."""
    head, size = head_of(path, 4)
    if head != _ZIP:
        raise FileFormatError(f"{path}: starts with {shown(head)}, expected a zip archive, as torch.save writes from torch 1.6 on")
    with damaged(f"{path}: no sound archive"), zipfile.ZipFile(path) as archive:
        infos = archive.infolist()
    if len(infos) > 2 * MAX_POINTS:
        raise FileFormatError(f"{path}: {len(infos)} members, expected {2 * MAX_POINTS} at most")
    for info in infos:
        if info.compress_type != zipfile.ZIP_STORED or info.flag_bits & 1 or info.file_size > size:
            raise FileFormatError(f"{path}: member {shown(info.filename)} is compressed, encrypted or cut short, expected neither")
        if info.filename.endswith(f"/{PICKLE}") and info.file_size > _MAX_PICKLE:
            raise FileFormatError(f"{path}: member {shown(info.filename)} has {info.file_size} bytes, expected {_MAX_PICKLE} at most")


def _tensors(content: Any, kind: Any, path: Path) -> Iterator[tuple[str, Any]]:
    """Yields the tensors of nested containers by their labels; numbers, text and None are passed over."""
    values: list[tuple[str, Any, int]] = [("", content, 0)]
    for label, value, depth in values:  # which grows by what is in a container
        if isinstance(value, kind) and value.dim():  # else it is a number, as a loss is
            yield label, value
        elif isinstance(value, dict | list | tuple):
            if len(values) + len(value) > 2 * MAX_POINTS or depth == _DEEPEST:
                most = f"more than {2 * MAX_POINTS} values or {_DEEPEST} containers deep"
                raise FileFormatError(f"{path}: {most}, expected a dictionary of tensors")
            items: Iterable[tuple[Any, Any]] = enumerate(value)
            if isinstance(value, dict):  # and of a stand-in the fields, which may have the names of methods
                items = (getattr(value, "__dict__", {}) | dict(dict.items(value))).items()
            values += [(f"{label}.{name}" if label else str(name), item, depth + 1) for name, item in items if isinstance(name, str | int)]


def _entry(tensor: Any, where: str, key: Key | None) -> Entry:
    """Shape and dtype of a tensor, and a function that gives its numbers. Raises FileFormatError if it claims more than the file has.

    key: the point, if a model returned it: a cache's keys or values [B, G, T, K] become [B, T, GK], or [T, GK].
    """
    dtype = _DTYPES.get(str(tensor.dtype))
    if dtype is None or str(tensor.layout) != "torch.strided" or str(tensor.device) != "cpu":
        expected = ", ".join(name.removeprefix("torch.") for name in _DTYPES)
        raise FileFormatError(f"{where} is {tensor.dtype}, {tensor.layout}, on {tensor.device}, expected dense numbers: {expected}")
    held = tensor.untyped_storage().nbytes()
    if tensor.numel() * tensor.element_size() > held:
        raise FileFormatError(f"{where} has shape {list(tensor.shape)}, but {held} bytes in the file, fewer than its numbers take")

    shape = tuple(tensor.shape)
    if key is not None and key.name in ("Kcur_rope", "Vcur") and len(shape) == 4:
        tensor = tensor.transpose(1, 2)
        shape = without_leading_ones((shape[0], shape[2], shape[1] * shape[3]), 2)

    return Entry(shape, dtype, lambda: np.array(as_numpy(where, tensor)).reshape(shape))


_DTYPES: dict[str, np.dtype] = {
    f"torch.{name}": np.dtype(name)
    for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "uint16", "uint32", "uint64")
} | {"torch.bfloat16": np.dtype(np.float32)}
