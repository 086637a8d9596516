"""Our engine and variants of it, run on a few tokens, for the tests of roundings and of known mistakes."""

import numpy as np
from spec_faults import model, ours, tokens

from bitnet_np import EXACT
from bitnet_np.judge.logits_alone import judge_logits
from bitnet_np.judge.mistakes.hypotheses import in_engine
from bitnet_np.judge.variant import Variant, variant_logits
from bitnet_np.testing.models import random_model


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


def float16_scales(x):
    """The codes and scales [R, 1] of an engine that keeps the scales of int8 activations in float16."""
    scale = (np.float32(127) / np.maximum(np.float32(1e-5), np.abs(x).max(axis=1))).astype(np.float16).astype(np.float32)
    return np.rint(x * scale[:, None]).astype(np.int8), scale


def float16_sums(x, table):
    """The product with a float32 table of an engine that adds up in float16."""
    out = np.zeros((len(x), len(table)), np.float16)
    for terms in (x[:, i, None] * table[:, i] for i in range(x.shape[1])):
        out = (out + terms).astype(np.float16)
    return out.astype(np.float32)


def logits_of(variant, ids):
    """Logits [T, V] of one sequence."""
    return variant_logits(variant, ids[None])[0]


def known_mistakes(base):
    """Our engine with each known mistake of whole engines."""
    return [trial.variant(base) for trial in in_engine(base)]


def judge_by(base, ids, search=True):
    """A function that judges other logits for these tokens by those of our engine `base`. search: whether mistakes are tried."""
    own, known = logits_of(base, ids), {}

    def run(variant):
        if variant.text not in known:  # which no two variants share
            known[variant.text] = logits_of(variant, ids)
        return known[variant.text]

    return lambda theirs: judge_logits(own, theirs, base, run, search=search)


def judged(theirs, n=17, **how):
    """The judgement of logits for the recording's n tokens, by the embedded model. how: arguments of judge_logits."""
    return judge_logits(ours(n), theirs, BASE, lambda variant: logits_of(variant, tokens(n)), **how)
