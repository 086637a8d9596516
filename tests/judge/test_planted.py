"""Every text of the catalogue of mistakes is what the judge says of a dump with that mistake, planted at one operation of a small model.

The catalogue's own function plants it, so these tests show that a mistake changes something, that the judge finds it, and that nothing
tried before hides its text. Whether a function does what its text says is for test_mistakes.py, test_across.py and the engines of
scripts/mutations.py, which share no code with it.
"""

import re
from dataclasses import replace
from functools import cache, partial

import numpy as np
import pytest
import said_texts
from dumps import recorded, trace
from models import random_model

from bitnet_np import EXACT
from bitnet_np.engine.dialects import BITNET_CPP
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.law.graph import TOKENS, Operation, operations
from bitnet_np.judge.law.precision import FLOAT32
from bitnet_np.judge.mistakes.catalogue import CATALOGUE, HIDDEN, at_operation
from bitnet_np.judge.mistakes.search import fitted
from bitnet_np.model.records import Yarn
from bitnet_np.traces.points import Key

IDS = np.random.default_rng(0).permutation(300)[:9]
NUMBERS = (0.3, 2.5)  # of mistakes whose number is sought
TRIES = 4  # places of a model where a text is tried that is not said at the first
SHAPE = {"n_layers": 3, "width": 48, "ffn": 48, "heads": 6, "kv_heads": 3, "head_dim": 8, "vocab": 300, "tied": False}
BLOCKS = {"width": 256, "ffn": 256, "heads": 2, "kv_heads": 1, "head_dim": 128}


def with_epsilon(eps, model):
    """The model with an epsilon so large that its place shows."""
    return replace(model, config=replace(model.config, eps=eps))


MODELS = {
    "bitnet": lambda: random_model(3, inner_norms=True, **SHAPE | {"ffn": 128}),
    "blocks": lambda: random_model(
        0, family="qwen3", weights="Q8_0", yarn=Yarn(4.0, 16), rope_magnitude=1.2, **SHAPE | {"width": 96, "ffn": 64, "head_dim": 16}
    ),
    "ternary llama": lambda: with_epsilon(0.05, random_model(1, family="llama", weights="ternary", rope_scaling=2.0, **SHAPE)),
    "biases": lambda: random_model(2, family="gpt2", activation="gelu", **SHAPE | {"kv_heads": 6}),
    "parallel": lambda: random_model(2, family="gptneox", parallel_residual=True, **SHAPE | {"kv_heads": 6}),
    "windows": lambda: random_model(1, family="gemma3", rope_scaling=4.0, window=4, **SHAPE),
    "experts": lambda: random_model(2, family="qwen3moe", experts=12, **SHAPE),
    "shared expert": lambda: random_model(4, family="qwen2moe", **SHAPE),
    "caps": lambda: random_model(2, family="gemma2", **SHAPE),
    "scales": lambda: random_model(3, family="granite", **SHAPE),
    **{type: partial(random_model, 0, family="llama", weights=type, **SHAPE | BLOCKS) for type in ("Q5_K", "Q6_K", "IQ4_NL")},
}


class Planter:
    """Plants mistakes in dumps of one model."""

    def __init__(self, model):
        self.model, self.points = model, recorded(model, IDS)
        self.values = {key: x.reshape(len(IDS), -1).astype(np.float64) for key, x in self.points.items()} | {TOKENS: IDS}
        graph = [o for o in operations(model, EXACT) if not o.key.name.endswith("_codes")]
        self.places = [o for o in graph if o.key.layer in (None, 1)]
        self.reader = {key: o for o in reversed(graph) for key in o.inputs}

    def wrong(self, operation, compute):
        """The output of an operation with a mistake; None if that changes nothing, or gives no tensor like it."""
        with np.errstate(all="ignore"):
            try:
                wrong = compute(self.values)
            except KeyError:  # a tensor of a step that this model has not
                return None
        right = self.values[operation.key]
        changed = wrong.shape == right.shape and np.isfinite(wrong).all() and np.abs(wrong - right).max() > 1e-4 * np.abs(right).max()
        return wrong if changed else None

    def dumps(self, operation, wrong):
        """Yields dumps in which one operation is wrong, and the tensor to look at: its own output, or that of its reader without it."""
        yield operation.key, self.dump(operation, wrong)
        reader = self.reader.get(operation.key)
        if reader is not None and all(key in self.values for key in reader.inputs):
            values = self.values | {operation.key: wrong}
            output = reader.evaluate(*(values[k] for k in reader.inputs)).value
            yield reader.key, self.dump(operation) | self.dump(reader, output, lacks=operation)

    def dump(self, operation: Operation, output=None, lacks: Operation | None = None):
        """The inputs of an operation, what the layer before it put out, and its output, all of which `lacks` may not put out."""
        keys = {*operation.inputs, Key(operation.key.name, 0)} - {operation.key} - ({lacks.key} if lacks else set())
        inputs = {key: self.points[key] for key in keys & self.points.keys()}
        return inputs if output is None else inputs | {operation.key: output.astype(np.float32)}

    def attempts(self, operation):
        """Yields all mistakes that an operation can make, with what it puts out then."""
        for trial in at_operation(replace(operation, length=len(IDS)), (*CATALOGUE, *HIDDEN)):
            for one in map(trial.with_number, NUMBERS) if trial.grid else (trial,):
                yield one, one.computes[operation.key]
        value = self.values[operation.key]
        for cause, array in fitted(value, value):
            yield cause, lambda values, array=array: array


def said_of(model, points, key):
    """What the judge says of one tensor of a dump."""
    report = judge_trace(model, trace(points), IDS, precision=FLOAT32)
    return next(o.hypothesis or "" for o in report.operations if o.key == key)


def test_each_mistake_is_said_of_a_dump_with_it():
    """Each id, and each text of more words."""
    patterns = said_texts.patterns(*said_texts.MISTAKES) | {m.id: re.compile(rf"^{re.escape(m.id)}: ") for m in (*CATALOGUE, *HIDDEN)}
    unsaid, instead = set(patterns), {}

    @cache
    def places_of(named):
        return {place for place, pattern in patterns.items() if pattern.search(named)}

    for name, make in MODELS.items():
        planter, tried = Planter(make()), dict.fromkeys(unsaid, 0)
        for operation in planter.places:
            for cause, compute in planter.attempts(operation):
                text, named = cause.text, f"{cause.id}: {cause.text}"
                new = [place for place in places_of(named) & unsaid if tried[place] < TRIES]
                wrong = planter.wrong(operation, compute) if new else None
                if wrong is None:
                    continue
                for key, dump in planter.dumps(operation, wrong):
                    said = said_of(planter.model, dump, key)
                    if text in said:
                        unsaid -= places_of(named)
                        break
                    instead |= dict.fromkeys(new, f"{name}, {key}: {said!r} is said of {text!r}")
                for place in new:
                    tried[place] += 1
    assert not {place: instead[place] for place in unsaid if place in instead}
    assert {mistake.id for mistake in (*CATALOGUE, *HIDDEN) if mistake.at and mistake.id in unsaid} <= {
        "dialect.angles",  # see below
        "pooling.other_rows",  # see judging/pooling.py
        "pooling.unit",
    }


@pytest.mark.parametrize(
    ("declared", "theirs", "says"),
    [
        (EXACT, BITNET_CPP, "angles are stepped in float32, as ggml does: declare the dialect bitnet.cpp (--as bitnet.cpp)"),
        (BITNET_CPP, EXACT, "angles are not stepped in float32: declare the dialect exact (--as exact)"),
    ],
)
def test_how_angles_are_made_is_named(declared, theirs, says):
    model = random_model(0, **SHAPE | {"n_layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 32, "context": 1500})
    ids = np.arange(1500) % 300
    points = {key: x for key, x in recorded(model, ids, dialect=theirs).items() if key.name in ("Kcur", "Kcur_rope")}
    report = judge_trace(model, trace(points), ids, declared, precision=FLOAT32)
    assert report.operations[-1].hypothesis == says
