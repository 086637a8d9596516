"""Engines with a fault under a condition, for the hunt: functions of a Model and token ids."""

import numpy as np

from bitnet_np import spec
from bitnet_np.model.dense import dense_view

CONDITIONS = {
    "none": lambda c, t, **call: False,
    "always": lambda c, t, **call: True,
    "longer than 32": lambda c, t, **call: t > 32,
    "a multiple of 8": lambda c, t, **call: t % 8 == 0,
    "head width 80": lambda c, t, **call: c.head_dim == 80,
    "one key head": lambda c, t, **call: c.kv_heads == 1,
    "threads": lambda c, t, **call: call["threads"] >= 3,
    "batch": lambda c, t, **call: call["row"] > 0,
    "third layer": lambda c, t, **call: c.n_layers > 2,
    "chunks of a long prompt": lambda c, t, **call: t > 64 and call["chunk"] is not None and call["chunk"] < t - call["prefix"],
}


def engine_with(condition, spoil=lambda y: y * np.float32(1.02)):
    """An engine in float64 whose logits are spoilt where a condition holds."""

    def engine(model, tokens, chunk=None, prefix=0, threads=1):
        rows = []
        for row, ids in enumerate(tokens if isinstance(tokens, list) else [tokens]):
            y = spec.forward(dense_view(model), ids).astype(np.float32)
            wrong = CONDITIONS[condition](model.config, len(ids), chunk=chunk, prefix=prefix, threads=threads, row=row)
            rows.append((spoil(y) if wrong else y)[prefix:])
        return rows if isinstance(tokens, list) else rows[0]

    return engine
