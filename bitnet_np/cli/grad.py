"""`bitnet-np grad`: the loss of token ids, and its gradient for every parameter."""

import argparse

import numpy as np

from ..base.errors import UnsupportedError
from ..base.tables import table
from ..traces.formats import writer
from ..traces.points import LOSS, Key, gradient_key
from ..training.gradients import loss_and_gradients, parameters_of
from .inputs import opened
from .printing import answer


def run(arguments: argparse.Namespace) -> int:
    """Print the loss and the norms of gradients, write them to --out; returns the exit code."""
    chosen, writer_of = (None, None) if arguments.out is None else writer(arguments.out, arguments.format)
    if writer_of is not None and writer_of.names is not None:
        raise UnsupportedError(f"{arguments.out}: format {chosen} has no gradients, only {', '.join(sorted(writer_of.names))}")
    inputs = opened(arguments)
    ids = inputs.token_ids()
    batch = ids if ids.ndim == 2 else ids[None]
    model = inputs.model()
    loss, gradients = loss_and_gradients(model.config, parameters_of(model), batch, weights="none")
    if writer_of is not None:
        with writer_of(arguments.out, batch[0] if len(batch) == 1 else None) as out:
            out.add(Key(LOSS, None), np.array([loss]))
            for name, gradient in gradients.items():
                key = gradient_key(name)
                assert key is not None, name
                out.add(key, gradient)
    rows = []
    for name, gradient in gradients.items():
        rows.append((name, " x ".join(map(str, gradient.shape)), float(np.sqrt((gradient**2).sum())), float(np.abs(gradient).max())))
    norm = float(np.sqrt(sum(row[2] ** 2 for row in rows)))
    tensors = [{"name": row[0], "shape": list(gradients[row[0]].shape), "norm": row[2], "max": row[3]} for row in rows]
    facts = {"tokens": int(ids.size), "loss": loss, "norm": norm, "out": arguments.out and str(arguments.out), "format": chosen}
    text = f"loss  {loss:.6f} nats a token ({batch.size - len(batch)} predicted)\nnorm  {norm:.6g} of all gradients\n\n"
    text += table(("gradient", "shape", "norm", "largest"), rows)
    text += f"\n\n{arguments.out}: {chosen}, {len(rows)} gradients and the loss" if chosen else ""
    return answer(arguments, facts | {"gradients": tensors}, text)
