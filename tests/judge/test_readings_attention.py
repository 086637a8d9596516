"""What wrong rotations and attention say by themselves, head by head and layer by layer."""

import numpy as np
import pytest
from wrong_tensors import LAYER, LLAMA, POINTS, T, judged, layer_points

from bitnet_np import spec
from bitnet_np.traces.points import Key

C = LLAMA.config


def heads(name, layer=LAYER):
    return POINTS["llama"][Key(name, layer)].astype(np.float64).reshape(T, -1, C.head_dim)


def turned(position):
    """Queries of the layer, each head rotated by its positions, [T, H]."""
    x = layer_points("llama")["Qcur"].reshape(T, C.heads, C.head_dim)
    frequency = LLAMA.rope_frequency.astype(np.float64)
    rotated = [spec.rotate(x[:, [h]], np.multiply.outer(position[:, h], frequency), C.rope) for h in range(C.heads)]
    return np.concatenate(rotated, axis=1).reshape(T, -1)


def attended(k="Kcur_rope", v="Vcur", layers=(LAYER, LAYER), cap=None):
    """Attention of the layer with keys and values of these layers."""
    mask = spec.causal_mask(T, T)
    return spec.attend(heads("Qcur_rope"), heads(k, layers[0]), heads(v, layers[1]), mask, None, cap).reshape(T, -1)


POSITION = np.broadcast_to(np.arange(T)[:, None], (T, C.heads))


@pytest.mark.parametrize(
    ("position", "says"),
    [
        (POSITION * (np.arange(C.heads) == 0), "heads 1 to 3 are not rotated"),
        (POSITION * (np.arange(C.heads) != 2), "head 2 is not rotated"),
        (np.broadcast_to(np.arange(C.heads), (T, C.heads)), "every token is rotated by the number of the head instead of its position"),
        (POSITION + (np.arange(C.heads) == 3), f"positions differ from head to head: those of head 3 are 1 to {T} instead of 0 to {T - 1}"),
    ],
)
def test_heads_that_are_rotated_otherwise_are_named(position, says):
    assert judged("llama", "Qcur_rope", turned(position)) == says


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"layers": (0, 0)}, "keys and values of layer 0 are read: the cache of another layer"),
        ({"layers": (2, LAYER)}, "keys of layer 2 are read: the cache of another layer"),
        ({"layers": (LAYER, 0)}, "values of layer 0 are read: the cache of another layer"),
        ({"cap": 0.7}, "scores are soft-capped at 0.7"),
    ],
)
def test_caches_of_other_layers_and_capped_scores_are_named(options, says):
    assert judged("llama", "kqv_out", attended(**options)) == says


def test_outputs_of_heads_in_other_places_are_named():
    right = layer_points("llama")["kqv_out"].reshape(T, C.heads, C.head_dim)
    assert judged("llama", "kqv_out", right[:, [0, 1, 2, 2]].reshape(T, -1)) == "the output of head 3 is that of head 2"
    said = judged("llama", "kqv_out", right[:, [0, 2, 1, 3]].reshape(T, -1))
    assert said == "the output of head 1 is that of head 2, and 1 more are others'"


def test_a_mask_after_the_softmax_is_named():
    scores = np.einsum("thk,shk->hts", heads("Qcur_rope"), spec.by_query_head(heads("Kcur_rope"), C.heads)) / np.sqrt(C.head_dim)
    p = np.tril(np.ones((T, T))) * spec.softmax(scores)
    wrong = np.einsum("hts,shk->thk", p, spec.by_query_head(heads("Vcur"), C.heads)).reshape(T, -1)
    assert judged("llama", "kqv_out", wrong) == "the mask is applied after the softmax: weights no longer add up to 1"
