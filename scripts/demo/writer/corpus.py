"""The text: an endless stream of documents, each a function of its seed and index, in two splits that share no held-out combination."""

import hashlib
from collections.abc import Callable
from itertools import count

import numpy as np
from numpy.typing import NDArray

from .dice import Dice
from .document import Document
from .facts import facts
from .stories import moves_story, story
from .sums import bare, counting, tale

MIX = ((0.4, story), (0.12, moves_story), (0.26, tale), (0.12, bare), (0.03, counting), (0.07, facts))
"""Share and maker of each kind of document."""

_SPLITS = {"train": 1, "held-out": 2}
FRESH = 1 << 40
"""From this index on, documents of the training split are for evaluation: training never gets that far."""

_HELD_OUT = 9  # one combination of so many is held out


def held_out(combination: str) -> bool:
    """Whether a combination (a hero at a place, two numbers added) is kept out of training."""
    return int.from_bytes(hashlib.sha256(combination.encode()).digest()[:4], "big") % _HELD_OUT == 0


def document(split: str, seed: int, index: int) -> Document:
    """Document `index` of the stream. Those of training have no held-out combination, those held out have at least one."""
    d = Dice(seed << 2 | _SPLITS[split], index)
    while True:
        made = _draw(d)
        is_held_out = any(map(held_out, made.combinations))
        if is_held_out == (split == "held-out"):
            return made


def _draw(d: Dice) -> Document:
    at = d.number(0, 9999) / 10000
    for share, make in MIX:
        at -= share
        if at < 0:
            return make(d)
    return MIX[-1][1](d)


_DOCUMENTS = 64  # at most in a sequence: no document is shorter than 8 tokens


def sequence(split: str, seed: int, index: int, encode: Callable[[str], list[int]], end: int, length: int) -> NDArray[np.int64]:
    """Sequence `index` of the split, [length]: whole documents with `end` before, between and after them, and the last one cut off."""
    ids = [end]
    for i in count(_DOCUMENTS * index):
        ids += [*encode(document(split, seed, i).text), end]
        if len(ids) >= length:
            return np.array(ids[:length])
    raise AssertionError("the stream of documents is endless")
