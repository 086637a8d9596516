"""The table of formats, and the detection of a file's format."""

import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ...errors import FileFormatError, OptionError, UnsupportedError, shown
from ...validate import check_file, integer, path_of
from ..points import Trace, checked_tokens
from . import aprt, bitnet_rs, llama_logits, nodes, npy, npz, raw, stages
from . import safetensors as safetensors_file
from .output import Writer


@dataclass(frozen=True)
class Format:
    """A format, with its reader and its writer; None where it has none."""

    name: str
    summary: str
    suffix: str  # files with this suffix are written in this format by default; "" stands for none
    read: Callable[[Path, NDArray[np.int64] | None], Trace] | None
    writer: type[Writer] | None


_TABLE = (
    Format("npz", "NumPy archive, an array for each label", ".npz", npz.read, npz.NpzWriter),
    Format("npy", "folder of NumPy files, one for each label", "", npy.read_folder, npy.FolderWriter),
    Format("safetensors", "a tensor for each label", ".safetensors", safetensors_file.read, safetensors_file.SafetensorsWriter),
    Format("aprt", "folder of aprender's stage files", "", aprt.read, aprt.AprtWriter),
    Format("nodes", "NumPy archive of a ggml graph's nodes", "", nodes.read, None),
    Format(
        "llama-logits", "llama.cpp's --kl-divergence-base", ".kld", lambda path, _: llama_logits.read(path), llama_logits.LlamaLogitsWriter
    ),
    Format("logits", "one .npy of logits", ".npy", npy.read_logits, npy.LogitsWriter),
    Format("raw", "bare float32 logits, if the name ends in .f32 or the format is given", ".f32", None, raw.RawWriter),
    Format("bitnet-rs", "folder of BitNet-rs's trace records: hashes, no values", "", None, bitnet_rs.FilesWriter),
    Format("bitnet-rs-lines", "BitNet-rs's trace records, one a line", ".jsonl", None, bitnet_rs.LinesWriter),
)

FORMATS = {format.name: format for format in _TABLE}


def read_any(
    path: str | os.PathLike[str],
    format: str | None = None,
    shape: tuple[int, ...] | None = None,
    tokens: ArrayLike | None = None,
) -> Trace:
    """The trace in a file or folder, whose format is detected if it is not given.

    shape: of the logits in a file of bare numbers. tokens: those of the trace, for formats that do not hold them; where a file does, they
    must be the same.

    Raises FileFormatError for a damaged file, UnsupportedError for records that hold no values, OptionError for a format, shape or tokens
    that do not go with it, and OSError if it cannot be opened.
    """
    path = path_of(path)
    name = format or detect(path, shape)
    if name not in FORMATS:
        raise OptionError(f"{path}: format is {shown(name)}, expected one of {', '.join(FORMATS)}")
    ids = None if tokens is None else checked_tokens(np.asarray(tokens), "tokens")
    if name == "raw":
        if shape is None:
            raise OptionError(f"{path}: bare float32 numbers, which need a shape")
        if not isinstance(shape, Sequence):
            raise OptionError(f"{path}: shape is {shown(shape)}, expected a sequence of lengths")
        return raw.read(path, tuple(integer(f"{path}: a length of the shape", n, -(2**63)) for n in shape), ids)
    if shape is not None:
        raise OptionError(f"{path}: format {name} holds shapes, expected none to be given")
    read = FORMATS[name].read
    if read is None:
        raise UnsupportedError(
            f"{path}: records of BitNet-rs hold hashes and no values, read them with bitnet_np.traces.formats.bitnet_rs.read"
        )
    trace = read(path, None if _holds_tokens(name) else ids)
    if trace.tokens is None and ids is not None:
        return replace(trace, tokens=ids)
    if ids is not None and trace.tokens is not None and not np.array_equal(ids, trace.tokens):
        raise FileFormatError(f"{path}: holds the tokens {_start(trace.tokens)}, expected {_start(ids)}")
    return trace


def _start(ids: NDArray[np.int64]) -> str:
    return f"[{', '.join(map(str, ids[:8]))}{', ...' * (len(ids) > 8)}]"


def _holds_tokens(name: str) -> bool:
    """Whether files of this format can hold token ids."""
    return name in ("npz", "npy", "safetensors", "nodes", "llama-logits")


def detect(path: Path, shape: tuple[int, ...] | None = None) -> str:
    """The format of a file by its first bytes, or of a folder by the names in it."""
    check_file(path)
    if path.is_dir():
        names = [entry.name for entry in os.scandir(path)]
        for suffix, name in ((".npy", "npy"), (".bin", "aprt"), (".trace", "bitnet-rs"), (".jsonl", "bitnet-rs")):
            if any(entry.endswith(suffix) for entry in names):
                return name
        if any(entry.startswith("layer-") for entry in names):
            return "aprt"
        raise _unknown(path, f"a folder with {shown(sorted(names)[:5])}")
    with open(path, "rb") as file:
        head = file.read(16)
    if shape is not None:
        return "raw"
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return "nodes" if _has_nodes(path) else "npz"
    if path.suffix == ".f32":
        return "raw"
    for magic, name in ((npy.MAGIC, "logits"), (llama_logits.MAGIC, "llama-logits"), (aprt.MAGIC, "aprt")):
        if head.startswith(magic):
            return name
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return "safetensors"
    if path.suffix in (".jsonl", ".trace"):
        return "bitnet-rs"
    if path.suffix == ".npy":  # its reader reports what is wrong with it
        return "logits"
    raise _unknown(path, f"a file that starts with {shown(head)}")


def _has_nodes(path: Path) -> bool:
    try:
        with zipfile.ZipFile(path) as archive:
            return any(stages.is_node(name) for name in archive.namelist())
    except Exception as error:  # zipfile raises nearly anything for a damaged archive
        raise FileFormatError(f"{path}: no sound .npz: {shown(str(error) or type(error).__name__)}") from None


def _unknown(path: Path, what: str) -> FileFormatError:
    known = "; ".join(f"{format.name}: {format.summary}" for format in _TABLE)
    return FileFormatError(f"{path}: {what}, expected one of the formats: {known}")


def writer(path: str | os.PathLike[str], format: str | None = None) -> tuple[str, type[Writer]]:
    """The format to write a file of this name in, and its writer. Raises OptionError where there is none."""
    path = path_of(path)
    by_suffix = {format.suffix: format.name for format in _TABLE if format.suffix and format.writer}
    name = format or by_suffix.get(path.suffix)
    if name is None:
        raise OptionError(f"{path}: no format is given, expected one, or a name that ends in {', '.join(sorted(by_suffix))}")
    writer_class = FORMATS[name].writer if name in FORMATS else None
    if writer_class is None:
        raise OptionError(f"{path}: format is {shown(name)}, expected one of {', '.join(f.name for f in _TABLE if f.writer)}")
    return name, writer_class
