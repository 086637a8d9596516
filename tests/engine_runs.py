"""Our engine and variants of it, run on a few tokens, for the tests of roundings and of known mistakes."""

import numpy as np
from spec_faults import model, ours, tokens

from bitnet_np import EXACT
from bitnet_np.judge.engine import judge_logits
from bitnet_np.judge.variant import Variant, variant_logits
from bitnet_np.testing import random_model


def deep_model(n_layers):
    """A model in which roundings grow from layer to layer."""
    return random_model(52, n_layers=n_layers, width=128, ffn=256, vocab=256, heads=4, kv_heads=2, head_dim=32)


def llama_of(weights):
    """A Llama of three layers, its matrices in this type."""
    shape = {"n_layers": 3, "width": 256, "ffn": 256, "heads": 8, "kv_heads": 2, "head_dim": 32, "vocab": 300}
    return random_model(6, family="llama", weights=weights, table="float16", **shape)


BASE = Variant("ours", model(), EXACT)
DEEP = deep_model(30)
DEEP_TOKENS = np.random.default_rng(0).integers(0, 256, 12)
TOKENS_OF_300 = np.random.default_rng(1).integers(0, 300, 12)


def logits_of(variant, ids):
    """Logits [T, V] of one sequence."""
    return variant_logits(variant, ids[None])[0]


def judge_by(base, ids):
    """A function that judges other logits for these tokens by those of our engine `base`."""
    own = logits_of(base, ids)
    return lambda theirs: judge_logits(own, theirs, base, lambda variant: logits_of(variant, ids))


def judged(theirs, n=17, **how):
    """The judgement of logits for the recording's n tokens, by the embedded model. how: options of judge_logits."""
    return judge_logits(ours(n), theirs, BASE, lambda variant: logits_of(variant, tokens(n)), **how)
