"""Labels that are not written as ours are, but can mean one point alone: attn_norm_0, layer0.attn_norm, 0/l-out; and layers counted from 1.

A note says which labels are read differently from how they are written, and names the nearest label for those not understood.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import NamedTuple

from ...base.errors import shortened
from ...model.records import Config
from ..labels import MODULES, meanings, split_step
from ..points import LAYER_NAMES, MODEL_NAMES, Key

_AROUND = {"blk", "block", "blocks", "decoder", "h", "l", "layer", "layers", "model", "transformer"}
"""Words that a label may have around its name."""
_NUMBER = re.compile(r"(?<!\d)\d{1,6}(?!\d)", re.ASCII)
_STEP = re.compile(r"[._/-]?(?:step|token|tok|pos)[._-]?(\d{1,9})(?:[._/-]|$)", re.ASCII)
_FROM_ZERO = re.compile(r"hidden_states\.|(?:arr_)?\d+$", re.ASCII)  # labels of a tuple whose first tensor is the embedding
_SHOWN = 60  # characters of a label


def _letters(name: str) -> str:
    return re.sub(r"[^a-z]", "", name.lower())


def _table(points: Iterable[str]) -> dict[str, str]:
    """The letters of each point's name, of its modules' paths, and of their last parts where no other point has them -> the name."""
    names, last = dict[str, str](), dict[str, dict[str, str]]()
    for point in points:
        for name in (*MODULES.get(point, ()), point):
            if name and not re.search(r"\d", name):  # a number is a layer's
                names[_letters(name)] = name
                last.setdefault(_letters(name.rpartition(".")[2]), {}).setdefault(point, name)
    return {text: next(iter(of.values())) for text, of in last.items() if len(of) == 1} | names


_WHOLE, _OF_LAYER = _table(MODEL_NAMES), _table(LAYER_NAMES)


class Read(NamedTuple):
    """How the labels of a dump are read."""

    labels: dict[str, str]  # each as it is to be looked up
    notes: tuple[str, ...]  # what is read differently from how it is written


def read_labels(labels: Iterable[str], config: Config | None, where: str) -> Read:
    """The labels of a dump as they are to be looked up (labels.py).

    A label that means nothing is written as ours are, if that means a point that no other label means. Layers are lowered by one if they
    are 1 to the number of layers of the model, whose config is known, and none is 0. Raises what `meanings` does.
    """
    read = {label: label for label in labels}
    known = meanings(read, config, where)
    taken, loose = {(meaning.key, meaning.step) for meaning in known.values()}, {}
    for label in read:
        clear = _clear(label) if label not in known else None
        meaning = None if clear is None else meanings([clear], config, where).get(clear)
        if clear is not None and meaning is not None and (meaning.key, meaning.step) not in taken:
            taken.add((meaning.key, meaning.step))
            loose[label] = clear
    read |= loose
    notes = []
    if loose:
        label, clear = next(iter(loose.items()))
        notes.append(f"labels are read in our writing: {len(loose)}, such as {_shown(label)} as {clear}")
    lowered = {} if config is None else _lowered([read[label] for label in (*known, *loose)], config.n_layers)
    if lowered:
        label, lower = next(iter(lowered.items()))
        notes.append(f"layers are counted from 1 in the labels: {_shown(label)} is read as {lower}")
    return Read({label: lowered.get(other, other) for label, other in read.items()}, tuple(notes))


def _clear(label: str) -> str | None:
    """A label in our writing, if it can mean one point alone: its name, and one number and words for a layer around it, or none."""
    inner, step = _split_loose_step(label)
    numbers = _NUMBER.findall(inner)
    names = _OF_LAYER if numbers else _WHOLE
    name = next((names[text] for text in _without_words(inner) if text in names), None)
    if name is None or len(re.findall(r"\d+", inner)) > 1:
        return None
    clear = name if not numbers else f"{name}-{int(numbers[0])}" if name in LAYER_NAMES else f"layers.{int(numbers[0])}.{name}"
    return clear if step is None else f"step-{step}/{clear}"


def _split_loose_step(label: str) -> tuple[str, int | None]:
    """A label without its step, and the step, in other writings too: l_out-0_step5, step5_l_out-0, l_out-0.token-5."""
    inner, step = split_step(label)
    match = _STEP.search(inner) if step is None else None
    return (inner, step) if match is None else (inner[: match.start()] + inner[match.end() :], int(match[1]))


def _without_words(label: str) -> Iterator[str]:
    """Yields the letters of a label, then those without one more of the words that may be around its name."""
    words = re.findall(r"[a-z]+", label.lower())
    yield "".join(words)
    for end in (0, -1):
        while words and words[end] in _AROUND:
            del words[end]
            yield "".join(words)


def _lowered(labels: Sequence[str], n_layers: int) -> dict[str, str]:
    """Each label of a layer -> the same label of the layer before it, if layers are counted from 1."""
    numbered: dict[str, tuple[re.Match[str], int | None]] = {}
    for label in labels:
        inner, step = split_step(label)
        if not _FROM_ZERO.match(inner) and (number := _NUMBER.search(inner)) is not None:
            numbered[label] = number, step
    layers = {int(number[0]) for number, _ in numbered.values()}
    if not layers or min(layers) < 1 or max(layers) != n_layers:
        return {}
    lower = {label: f"{n.string[: n.start()]}{int(n[0]) - 1}{n.string[n.end() :]}" for label, (n, _) in numbered.items()}
    return {label: inner if numbered[label][1] is None else f"step-{numbered[label][1]}/{inner}" for label, inner in lower.items()}


def not_understood(labels: Sequence[str]) -> str:
    """The note on labels that stand for no point, with the names that are near to the first of them."""
    pairs = [(label, nearest(label)) for label in labels[:3]]
    named = [f"{_shown(label)}{f' (did you mean {near}?)' if near else ''}" for label, near in pairs]
    count = f"{len(labels)} labels are" if len(labels) > 1 else "a label is"
    return f"{count} not understood: {', '.join(named)}{' and others' * (len(labels) > len(pairs))}"


def nearest(label: str) -> str | None:
    """The label in our writing that one is nearest to; None if it is near to none."""
    label, step = _split_loose_step(label)
    numbers = _NUMBER.findall(label)
    number = next(iter(numbers), None)
    step = int(numbers[1]) if len(numbers) == 2 and step is None else step  # of a layer and a step, most likely
    names = _WHOLE if number is None else _OF_LAYER
    text = list(_without_words(label[:_SHOWN]))[-1]
    near = get_close_matches(text, names, 1)
    if not near:
        return None
    name = names[near[0]]
    whole = name if number is None else str(Key(name, int(number))) if name in LAYER_NAMES else f"layers.{int(number)}.{name}"
    return whole if step is None else f"{whole}.step-{step}"


def _shown(label: str) -> str:
    return shortened(label, _SHOWN)
