"""Traces in the .safetensors format of Hugging Face: mapped arrays, and a writer of one array at a time.

Arrays are written from the widest numbers to the narrowest, so each is aligned.
"""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

import numpy as np
from numpy.typing import NDArray

from ...base.tensor_types import BF16
from ...files.safetensors_file import DTYPES, NAMES, header, open_safetensors
from ...model import widen
from ..points import Entry, Key
from .arrays import Labelled
from .output import Put, Writer


def read(path: Path) -> Labelled:
    """The arrays of a .safetensors file whose tensors are named by label, such as attn_norm-0. Bfloat16 is widened to float32: exact."""
    arrays = {}
    for name, tensor in open_safetensors(path).items():
        array = tensor.data.view(DTYPES[tensor.type.name]).reshape(tensor.shape)
        if tensor.type is BF16:
            arrays[name] = Entry(tensor.shape, np.dtype(np.float32), partial(widen.float32, array))
        else:
            arrays[name] = Entry(tensor.shape, array.dtype, partial(np.asarray, array))
    return Labelled(arrays, path, "safetensors")


def write(out: Writer) -> Iterator[Put]:
    """A .safetensors file. Its header comes first but is known last, so data wait in one file for each width of number."""
    table: list[tuple[Key, NDArray]] = []  # arrays without their numbers
    data: dict[int, IO[bytes]] = {}
    with ExitStack() as stack:

        def put(key: Key, array: NDArray) -> None:
            if array.itemsize not in data:
                data[array.itemsize] = stack.enter_context(TemporaryFile(dir=out.part.parent))
            array.tofile(data[array.itemsize])
            table.append((key, np.broadcast_to(np.zeros((), array.dtype), array.shape)))

        yield put
        table.sort(key=lambda item: -item[1].itemsize)
        with open(out.part, "xb") as file:
            file.write(header((str(key), NAMES[array.dtype], array.shape) for key, array in table))
            for width in sorted(data, reverse=True):
                data[width].seek(0)
                shutil.copyfileobj(data[width], file, 1 << 20)
