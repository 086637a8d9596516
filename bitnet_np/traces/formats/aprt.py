"""Stage files of aprender's `apr trace --save-tensor` and `apr parity --per-op`, read; those of `apr trace`, written too.

A file is b"APRT", uint32 layer (0xFFFFFFFF: the whole model), uint32 count, and count float32, all little-endian. A folder of them holds
layer-<N>/<stage>.bin, and final_norm.bin and lm_head.bin for the whole model; the embedding is in layer-0. Values are flat, all tokens
one after another, but lm_head and the stages of experts have those of the last token only. Scores are [H, T, T], zero where a query does
not see a key. `apr parity --per-op --out ROOT` writes such a folder for each position: ROOT/cpu/pos-<NNNN> and ROOT/gpu/pos-<NNNN>.

Three of 23 stages are none of our points: qkv_matmul, which is three products before their biases, qkv_bias, and ffn_silu. In a model
with a shared expert moe_ffn_out would be none either: it has that expert's part in it.
"""

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...base.errors import FileFormatError, OptionError, shown
from ..normal_form import checked_tokens
from ..points import MODEL_NAMES, SCORES, Entry, Key, ours_of
from .arrays import MAX_POINTS, Header, Labelled, check_size, files_in, head_of
from .npy import MAX_FILES
from .output import Put, Writer

MAGIC = b"APRT"
WHOLE_MODEL = 0xFFFFFFFF
_HEADER = 12
_FLOAT32 = np.dtype("<f4")
_OURS = ours_of("aprt")
_OF_LAST_TOKEN = tuple(ours for ours in _OURS.values() if ours.startswith("ffn_moe_"))
THEIRS = {ours: theirs for theirs, ours in _OURS.items() if ours not in _OF_LAST_TOKEN}
"""Our points -> the stages that are written."""
_LAYER = re.compile(r"layer-(0|[1-9][0-9]{0,5})")
_POSITION = re.compile(r"pos-([0-9]{4,9})")


def read(path: Path, tokens: NDArray | None = None) -> Labelled:
    """The arrays of a folder of stage files, of one such folder for each position, or of one file.

    Without positions the files do not say how many tokens there are: `tokens` must be given.
    """
    folders = {} if path.is_file() else {entry.name: Path(entry) for entry in os.scandir(path) if entry.is_dir()}
    if folders.keys() == {"cpu", "gpu"}:
        raise OptionError(f"{path}: two dumps of apr parity --per-op, expected one of them: {path / 'cpu'} or {path / 'gpu'}")
    steps = {int(match[1]): folder for name, folder in folders.items() if (match := _POSITION.fullmatch(name))}
    if not steps:
        if tokens is None:
            raise OptionError(f"{path}: the values in APRT files are flat, give the tokens they are of")
        files = {path.name: path} if path.is_file() else files_in(path, ".bin", _LAYER, MAX_POINTS)
        return _stages(path, files, len(checked_tokens(tokens, "tokens")))
    arrays, ignored = dict[str, Entry](), list[str]()
    for step, folder in sorted(steps.items()):
        stages = _stages(folder, files_in(folder, ".bin", _LAYER, MAX_POINTS), 1)
        arrays |= {f"step-{step}/{label}": entry for label, entry in stages.arrays.items()}
        ignored += [f"{folder.name}/{label}" for label in stages.ignored]
        if len(arrays) + len(ignored) > MAX_FILES:
            raise FileFormatError(f"{path}: more than {MAX_FILES} files in the folders of positions, expected fewer")
    return Labelled(arrays, path, "APRT by position", tuple(ignored))


def _stages(path: Path, files: dict[str, Path], tokens: int) -> Labelled:
    """The arrays of a folder's files, or of one file, with `tokens` tokens."""
    arrays, ignored = dict[str, Entry](), []
    for label, file in files.items():
        head, size = head_of(file, _HEADER)
        if head[:4] != MAGIC:
            raise FileFormatError(f"{file}: starts with {shown(head[:4])}, expected {MAGIC!r}")
        layer, count = (int.from_bytes(head[at : at + 4], "little") for at in (4, 8))
        check_size(file, size, _HEADER + 4 * count, f"{count} numbers")
        folder = _LAYER.fullmatch(file.parent.name)
        if path.is_dir() and layer != (int(folder[1]) if folder and file.parent != path else WHOLE_MODEL):
            raise FileFormatError(f"{file}: its header says layer {layer}, expected that of its folder")
        name = _OURS.get(file.stem, "")
        whole = layer == WHOLE_MODEL or (name == "inp_embd" and layer == 0)
        if not name or whole != (name in MODEL_NAMES) or (name in _OF_LAST_TOKEN and tokens > 1):
            ignored.append(label)
            continue
        key = str(Key(name, None if whole else layer))
        if key in arrays:
            raise FileFormatError(f"{file}: {key} is there twice, expected each point once")
        rows = 1 if name == "result_output" else tokens
        unit = rows * rows if name in SCORES else rows
        if count == 0 or count % unit:
            raise FileFormatError(f"{file}: {count} numbers, expected a multiple of {unit} for {rows} tokens")
        shape = (count // unit, rows, rows) if name in SCORES else (rows, count // rows)
        arrays[key] = Header(shape, _FLOAT32, False, _HEADER).entry(file)
    return Labelled(arrays, path, "APRT", tuple(ignored))


def write(out: Writer) -> Iterator[Put]:
    """A folder of stage files. Of the logits it keeps the last token's, as aprender does."""

    def put(key: Key, array: NDArray) -> None:
        layer = 0 if key.name == "inp_embd" else WHOLE_MODEL if key.layer is None else key.layer
        numbers = (array[-1] if key.name == "result_output" else array).astype(_FLOAT32, copy=False)
        if numbers.size >= 1 << 32:
            raise OptionError(f"{out.path}: {key} has {numbers.size} numbers, an APRT file holds less than 2**32")
        folder = out.part if layer == WHOLE_MODEL else out.part / f"layer-{layer}"
        folder.mkdir(exist_ok=True)
        with open(folder / f"{THEIRS[key.name]}.bin", "xb") as file:
            file.write(MAGIC + layer.to_bytes(4, "little") + numbers.size.to_bytes(4, "little"))
            numbers.tofile(file)

    yield put
