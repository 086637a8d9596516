"""Recorded forward passes in which one tensor is wrong, for the tests of what is read off it."""

import numpy as np
from dumps import MODEL, TOKENS, recorded, with_tensor, without_codes

from bitnet_np import EXACT, spec
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.law import graph
from bitnet_np.judge.law.precision import FLOAT32
from bitnet_np.judge.readings.table import cause_of
from bitnet_np.judge.readings.wrong import Wrong
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

LAYER = 1
LLAMA = random_model(7, family="llama", table="float16", n_layers=3, vocab=90, width=96, heads=4, kv_heads=2, head_dim=24, ffn=120)
QWEN3 = random_model(8, family="qwen3", n_layers=2, vocab=90, width=96, heads=4, kv_heads=2, head_dim=24, ffn=120)
MODELS = {"bitnet": MODEL, "llama": LLAMA}
EVERY = MODELS | {"qwen3": QWEN3}
T = 17
IDS = {name: TOKENS if name == "bitnet" else np.random.default_rng(0).permutation(90)[:T] for name in EVERY}
POINTS = {name: without_codes(recorded(EVERY[name], IDS[name])) for name in EVERY}


C = LLAMA.config
QUERY, KEY = np.arange(T)[:, None], np.arange(T)


def key_of(name):
    """The tensor of the layer that a mistake is made in, or of the whole model."""
    return Key(name, None if name in ("result_output", "result_norm", "inp_embd") else LAYER)


def judged(family, name, wrong, dialect=EXACT):
    """What the judge says of a dump in which one tensor is `wrong`, with noise as the sums of another engine have it."""
    key = key_of(name)
    noise = 1 + 1e-7 * np.random.default_rng(1).standard_normal(wrong.shape)
    report = judge_trace(EVERY[family], with_tensor(POINTS[family], key, wrong * noise), IDS[family], dialect, precision=FLOAT32)
    assert report.verdict == Verdict.WRONG
    assert report.first_wrong.key == key
    return report.first_wrong.hypothesis or ""


def layer_points(family):
    """The tensors of the layer that a mistake is made in, and the model's own, by name in float64."""
    return {key.name: x.astype(np.float64) for key, x in POINTS[family].items() if key.layer in (LAYER, None)}


def read(family, name, wrong):
    """What is read off a wrong tensor of a family's dump."""
    return read_off(EVERY[family], IDS[family], POINTS[family], key_of(name), wrong)


def read_off(model, ids, points, key, wrong):
    """What is read off a wrong tensor without the known mistakes, with the noise that another engine's sums have; "" for nothing."""
    operation = next(o for o in graph.operations(model, EXACT) if o.key == key)
    tensors = {k: x.astype(np.float64) for k, x in points.items()} | {graph.TOKENS: ids}
    inputs = [tensors[k] for k in operation.inputs]
    value = operation.evaluate(*inputs).value
    theirs = wrong * (1 + 1e-7 * np.random.default_rng(1).standard_normal(wrong.shape))
    places = np.abs(theirs - value) > 1e-6 * np.abs(value).max()
    cause = cause_of(Wrong(operation, inputs, value, theirs, places, 0.0, tensors))
    return "" if cause is None else cause.text


# --- the Llama's attention, step by step ----------------------------------------------------------------------------------------------


def heads(name, layer=LAYER):
    """A tensor of the Llama, [T, H, K] in float64."""
    return POINTS["llama"][Key(name, layer)].astype(np.float64).reshape(T, -1, C.head_dim)


def turned(position):
    """Its queries rotated by positions, [T, 1] or [T, H]."""
    angle = np.multiply.outer(np.broadcast_to(position, (T, C.heads)), LLAMA.rope_frequency.astype(np.float64))
    x = heads("Qcur")
    return np.concatenate([spec.rotate(x[:, [h]], angle[:, h], C.rope) for h in range(C.heads)], axis=1).reshape(T, -1)


def scores_of(q=None, k=None):
    """Scores [H, T, T] of queries and keys, by default its own."""
    q, k = heads("Qcur_rope") if q is None else q, heads("Kcur_rope") if k is None else k
    return np.einsum("thk,shk->hts", q, spec.by_query_head(k, C.heads)) / np.sqrt(C.head_dim)


def softmax(scores, visible=QUERY >= KEY):
    """The probabilities of scores where `visible`."""
    return spec.softmax(np.where(visible, scores, -np.inf))


def by_weights(weights, v=None):
    """Attention's outputs by weights [H, T, T] and values, by default its own."""
    return np.einsum("hts,shk->thk", weights, spec.by_query_head(heads("Vcur") if v is None else v, C.heads)).reshape(T, -1)
