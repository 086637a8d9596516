"""Dumps of the nodes of a ggml graph: an .npz with arrays named `s<call>.<name>[-<layer>].<OPERATION>`, such as s0.Qcur-1.ROPE.

Axes are in row-major order, four or fewer. The operation is needed, as Qcur before and after RoPE have one name. Scores are unscaled in
the graph, and padded with keys that do not exist; both are undone here.
"""

import re
from dataclasses import replace
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ...base.errors import FileFormatError
from ..labels import TOKENS
from ..normal_form import without_leading_ones
from ..points import SCORES, Entry, Key, key_of, ours_of
from .arrays import Labelled
from .npy import read_archive

_OURS = ours_of("ggml")
_NODE = re.compile(r"s(0|[1-9][0-9]{0,8})\.([A-Za-z_]+)(?:-(0|[1-9][0-9]{0,5}))?\.([A-Z_0-9]+)")


def node_of(label: str) -> tuple[int, Key] | None:
    """The call and the point of a node `s<call>.<name>[-<layer>].<OPERATION>`; None if it is no node or no point."""
    match = _NODE.fullmatch(label)
    if not match:
        return None
    call, name, layer, operation = match.groups()
    ours = _OURS.get(f"{name}.{operation}")
    key = ours and key_of(ours if layer is None else f"{ours}-{layer}")
    return (int(call), key) if key else None


def is_node(label: str) -> bool:
    """Whether a label is the name of a graph node, of a point or not."""
    return re.match(r"s\d+\.", label) is not None


def read(path: Path, tokens: NDArray | None = None, call: int = 0) -> Labelled:
    """The arrays of one call of the engine, counted from 0: of its prefill, if that is the first. They say how many tokens there are."""
    arrays, ignored, members = dict[str, Entry](), [], read_archive(path)
    nodes = {label: node[1] for label in members if (node := node_of(label)) and node[0] == call}
    widths = {key.layer: members[label].shape[-1] for label, key in nodes.items() if key.name == "Qcur_rope"}  # of heads
    for label, entry in members.items():
        key = nodes.get(label)
        if label == TOKENS:
            arrays[label] = entry
        elif key is None or str(key) in arrays or (key.name in SCORES and key.layer not in widths):
            ignored.append(label)
        elif key.name in SCORES:
            arrays[str(key)] = _scores(key, entry, widths[key.layer], path)
        else:
            axes = 3 if key.name.endswith("_rope") else 2  # [1, T, heads, head width], or [1, 1, T, width]
            left = without_leading_ones(entry.shape, axes)
            arrays[str(key)] = replace(entry, shape=(left[0], prod(left[1:]))) if len(left) == axes else entry
    return Labelled(arrays, path, "nodes", tuple(ignored))


def _scores(key: Key, entry: Entry, width: int, path: Path) -> Entry:
    shape = without_leading_ones(entry.shape, 3)
    if len(shape) != 3 or 0 in shape or shape[2] < shape[1] or width < 1:
        raise FileFormatError(f"{path}: {key} has shape {list(entry.shape)}, expected [heads, tokens, keys], as many keys as tokens")
    heads, rows, _ = shape
    scale = np.float32(1 / np.sqrt(width)) if key.name == "kq" else None

    def trimmed() -> NDArray:
        scores = entry.load().reshape(shape)[:, :, :rows]
        return scores if scale is None else scores * scale

    return Entry((heads, rows, rows), entry.dtype, trimmed)
