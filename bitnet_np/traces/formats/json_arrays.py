"""Arrays by label as JSON, {"logits": [[...]], "l_out-3": [[...]], "tokens": [...]}, as scripts and servers of one's own write them."""

from pathlib import Path
from typing import Any

import numpy as np

from ...base.errors import FileFormatError, shown
from ...files.safetensors_file import json_of
from ..points import Entry
from .arrays import Labelled

_LARGEST = 1 << 28  # bytes of a file


def read(path: Path) -> Labelled:
    """The arrays of a file: float32 where they are no integers. What is no array, as a name or a time, is left out.

    Raises FileFormatError for what is no JSON object, and for lists whose lengths differ.
    """
    value = json_of(path, _LARGEST)
    if not isinstance(value, dict):
        raise FileFormatError(f"{path}: {shown(value)}, expected an object of arrays by label")
    arrays = {label: _array(f"{path}: {shown(label)}", item) for label, item in value.items() if isinstance(item, list)}
    return Labelled(arrays, path, "json", tuple(label for label in value if label not in arrays))


def _array(where: str, values: Any) -> Entry:
    try:
        array = np.asarray(values)
    except ValueError:
        raise FileFormatError(f"{where} has lists of several lengths, expected an array") from None
    if array.dtype.kind not in "fiu":
        raise FileFormatError(f"{where} has other values than numbers, expected an array of them")
    array = array if array.dtype.kind in "iu" else array.astype(np.float32)
    return Entry(array.shape, array.dtype, lambda: array)
