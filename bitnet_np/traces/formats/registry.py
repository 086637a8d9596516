"""The table of formats, and the detection of a file's format."""

import mmap
import os
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

from numpy.typing import ArrayLike

from ...base.errors import FileFormatError, OptionError, UnsupportedError, shown
from ...base.validate import check_file, instance, integer, path_of
from ...model.records import Config
from ..arrays import as_numpy
from ..normal_form import checked_tokens
from ..points import Trace
from . import (
    aprt,
    bitnet_rs,
    bitnet_rs_logits,
    eval_callback,
    json_arrays,
    llama_logits,
    nodes,
    npy,
    safetensors,
    server_answer,
    text,
    torch_file,
)
from .arrays import Labelled, damaged
from .output import Output


@dataclass(frozen=True)
class Format:
    """A format, with its reader and its writer; None where it has none."""

    name: str
    suffix: str  # files with this suffix are written in this format by default; "" stands for none
    read: Callable[..., Any] | None  # of a path, and of what it needs: Labelled, and a Trace where it needs tokens
    writer: Output | None
    needs: Literal["", "tokens", "shape"] = ""  # the tokens of its one sequence, or the shape of its one array
    partial: str = ""  # why it holds no trace


_IN_JSON = {b'"logits_dump"': "bitnet-rs-logits"} | dict.fromkeys(server_answer.NAMES, "server-answer")
"""Names that only JSON of these formats has."""

_START = 1 << 18
"""Bytes from the start of a file that show its format; a log has other lines before the first node."""


_SOME, _HASHES = "llama-eval-callback prints some numbers of each tensor only", "records of BitNet-rs hold hashes and no values"
_TOP = "its JSON holds the largest logits or log-probabilities only"
_LOGITS = frozenset({"result_output"})
_TABLE = (
    Format("npz", ".npz", npy.read_npz, Output(npy.write_npz, holds_tokens=True)),
    Format("npy", "", npy.read_folder, Output(npy.write_folder, folder=True, holds_tokens=True)),
    Format("safetensors", ".safetensors", safetensors.read, Output(safetensors.write, holds_tokens=True)),
    Format("torch", "", torch_file.read, None),
    Format("aprt", "", aprt.read, Output(aprt.write, frozenset(aprt.THEIRS), folder=True), "tokens"),
    Format("nodes", "", nodes.read, None, "tokens"),
    Format("llama-logits", ".kld", llama_logits.read, Output(llama_logits.write, _LOGITS), "tokens"),
    Format("logits", ".npy", npy.read_logits, Output(npy.write_logits, _LOGITS)),
    Format("raw", ".f32", npy.read_bare, Output(npy.write_bare, _LOGITS), "shape"),
    Format("text", "", text.read, None, "shape"),
    Format("json", "", json_arrays.read, None),
    Format("eval-callback", "", None, None, partial=_SOME),
    Format("bitnet-rs", "", None, None, partial=_HASHES),
    Format("bitnet-rs-lines", ".jsonl", None, Output(bitnet_rs.write), partial=_HASHES),
    Format("bitnet-rs-logits", "", None, None, partial=_TOP),
    Format("server-answer", "", None, None, partial=_TOP),
)

COMPLETIONS = {"bitnet-rs-logits": bitnet_rs_logits.read, "server-answer": server_answer.read}
"""The readers of formats that hold the largest logits or log-probabilities: of a path and the prompt's tokens, they give Completions."""

FORMATS = {format.name: format for format in _TABLE}


def read_any(
    path: str | os.PathLike[str],
    format: str | None = None,
    shape: tuple[int, ...] | None = None,
    tokens: ArrayLike | None = None,
    config: Config | None = None,
) -> Trace:
    """The trace in a file or folder, whose format is detected if it is not given.

    shape: of the logits in a file of bare numbers; a first length of -1 stands for as many rows as there are. tokens: those of the trace,
    for formats that do not hold them; where a file does, they must be the same. config: of the model, if it is known; it tells tokens from
    heads, and which module's input is which point.

    Raises FileFormatError for a damaged file, UnsupportedError for records that hold no values, OptionError for a format, shape or tokens
    that do not go with it, MissingFileError for none, and OSError if it cannot be opened.
    """
    path = path_of(path)
    name = _format_of(path, format, shape)
    ids = None if tokens is None else checked_tokens(as_numpy("tokens", tokens), "tokens")
    if config is not None:
        instance("config", config, Config)
    if name in FORMATS and FORMATS[name].needs == "tokens" and shape is None:
        content = cast(Callable[..., Labelled | Trace], FORMATS[name].read)(path, ids)
    else:
        content = _arrays(path, name, shape)
    return content.trace(ids, config) if isinstance(content, Labelled) else content


def read_arrays(path: str | os.PathLike[str], format: str | None = None, shape: tuple[int, ...] | None = None) -> Labelled:
    """The arrays in a file or folder by their labels, of one sequence or of several; raises what `read_any` does."""
    path = path_of(path)
    return _arrays(path, _format_of(path, format, shape), shape)


def _arrays(path: Path, name: str, shape: tuple[int, ...] | None) -> Labelled:
    """`read_arrays` of a path that is checked, in the format of this name."""
    known = FORMATS[name]
    if known.read is not None and known.needs == "shape":
        if shape is not None and not isinstance(shape, Sequence):
            raise OptionError(f"{path}: shape is {shown(shape)}, expected a sequence of lengths")
        shape = shape and tuple(integer(f"{path}: a length of the shape", n, -(2**63)) for n in shape)
        return cast(Labelled, known.read(path, shape))
    if shape is not None:
        raise OptionError(f"{path}: format {name} holds shapes, expected none to be given")
    if known.needs == "tokens":
        raise OptionError(f"{path}: format {name} holds one sequence, expected a format of arrays by label")
    if known.read is None:
        module = name.removesuffix("-lines").replace("-", "_")
        raise UnsupportedError(f"{path}: {known.partial}, read them with bitnet_np.traces.formats.{module}.read")
    return cast(Labelled, known.read(path))


def _format_of(path: Path, format: str | None, shape: tuple[int, ...] | None) -> str:
    """The format that is given, or the file's. Raises OptionError for a name that is none."""
    if format is None:
        return detect(path, shape)
    check_file(path)
    if not (isinstance(format, str) and format in FORMATS):
        raise OptionError(f"{path}: format is {shown(format)}, expected one of {', '.join(FORMATS)}")
    return format


def detect(path: Path, shape: tuple[int, ...] | None = None) -> str:
    """The format of a file by its first bytes, or of a folder by the names in it."""
    check_file(path)
    if path.is_dir():
        return _of_folder(path)
    with open(path, "rb") as file:
        head = file.read(_START)
    if shape is not None and not text.is_numbers(head):
        return "raw"
    if head[:4] in (b"PK\x03\x04", b"PK\x05\x06"):
        return _of_archive(path)
    if path.suffix == ".f32":
        return "raw"
    if name := next((name for magic, name in _MAGICS.items() if head.startswith(magic)), None):
        return name
    if head.startswith(b"{") and b"\0" not in head[:8]:  # where safetensors has a length
        return "bitnet-rs" if path.suffix in (".jsonl", ".trace") else _of_json(path)
    if head[8:9] == b"{":
        return "safetensors"
    if path.suffix in _BY_SUFFIX:
        return _BY_SUFFIX[path.suffix]
    if eval_callback.HEADER.search(head):
        return "eval-callback"
    if path.suffix in (".txt", ".csv") or text.is_numbers(head):
        return "text"
    raise _unknown(path, "a GGUF file, which is a model" if head[:4] == b"GGUF" else f"a file that starts with {shown(head[:16])}")


_MAGICS = {npy.MAGIC: "logits", llama_logits.MAGIC: "llama-logits", aprt.MAGIC: "aprt"}
_BY_SUFFIX = {".safetensors": "safetensors", ".jsonl": "bitnet-rs", ".trace": "bitnet-rs", ".npy": "logits"}
"""The formats of files whose content says nothing: their readers report what is wrong with it."""
_IN_FOLDERS = {".npy": "npy", ".bin": "aprt", ".trace": "bitnet-rs", ".jsonl": "bitnet-rs"}


def _of_folder(path: Path) -> str:
    """The format of a folder, by the names in it."""
    names = [entry.name for entry in os.scandir(path)]
    if "config.json" in names:
        raise _unknown(path, "a Hugging Face folder, which is a model")
    for suffix, format in _IN_FOLDERS.items():
        if any(name.endswith(suffix) for name in names):
            return format
    if any(npy.STEP_FOLDER.fullmatch(name) for name in names):
        return "npy"
    if any(name.startswith(("layer-", "pos-")) for name in names) or set(names) == {"cpu", "gpu"}:
        return "aprt"
    raise _unknown(path, f"a folder with {shown(sorted(names)[:5])}")


def _of_archive(path: Path) -> str:
    """The format of a zip file, by the names in it."""
    with damaged(f"{path}: no sound .npz"), zipfile.ZipFile(path) as archive:
        names = archive.namelist()
    if any(name.endswith(f"/{torch_file.PICKLE}") for name in names):
        return "torch"
    return "nodes" if any(nodes.is_node(name) for name in names) else "npz"


def _of_json(path: Path) -> str:
    """The format of a JSON object, by the names in it."""
    with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return next((format for name, format in _IN_JSON.items() if content.find(name) >= 0), "json")


def _unknown(path: Path, what: str) -> FileFormatError:
    return FileFormatError(f"{path}: {what}, expected a dump in one of the formats {', '.join(FORMATS)}; bare float32 needs a name in .f32")


def writer(path: str | os.PathLike[str], format: str | None = None) -> tuple[str, Output]:
    """The format to write a file of this name in, and its writer. Raises OptionError where there is none."""
    path = path_of(path)
    by_suffix = {format.suffix: format.name for format in _TABLE if format.suffix and format.writer}
    named = by_suffix.get(path.suffix)
    name = named if format is None else format
    if name is None:
        raise OptionError(f"{path}: no format is given, expected one, or a name that ends in {', '.join(sorted(by_suffix))}")
    output = FORMATS[name].writer if isinstance(name, str) and name in FORMATS else None
    if output is None:
        raise OptionError(f"{path}: format is {shown(name)}, expected one of {', '.join(f.name for f in _TABLE if f.writer)}")
    if named not in (None, name):
        raise OptionError(f"{path}: format is {name}, but the name ends as those of {named} do; expected the same of both")
    return name, output
