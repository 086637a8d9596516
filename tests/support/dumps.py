"""Dumps for the tests of the judge: the embedded model's tensors, and those of engines with a fault of scripts/mutations.py."""

from itertools import takewhile

import numpy as np
from recorder import Recorder

from bitnet_np import EXACT
from bitnet_np.engine.forward_pass import run_whole
from bitnet_np.engine.network import Runtime
from bitnet_np.engine.tokens import check_tokens
from bitnet_np.files import embedded
from bitnet_np.kernels import cpu
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key, Trace
from scripts import mutations

MODEL = mutations.embedded_model()
TOKENS = embedded.recording()["tokens_T17"].astype(np.int64)
LOGITS = Key("result_output", None)
FAULTS = {fault.name: fault for fault in mutations.faults()}


def trace(points, tokens=None, **fields):
    """A dump of these tensors, by key."""
    return Trace(points=points, tokens=tokens, origin="dump", **fields)


def recorded(model=MODEL, tokens=TOKENS, dialect=EXACT, ops=cpu, edit=None):
    """Copies of all tensors of an engine's pass over one sequence, by key: [T, width], scales [T]."""
    points = Recorder()
    run_whole(Runtime(model, dialect, ops, points, edit), check_tokens(model.config, tokens[None]))
    return {Key(*key): array.reshape(len(array), -1) if array.ndim > 1 else array for key, array in points.items()}


def without_codes(points):
    """All tensors but int8 codes and their scales, which many engines do not dump."""
    return {key: array for key, array in points.items() if not key.name.endswith(("_codes", "_scale"))}


def only(dump, *names):
    """A dump of the tensors with these names."""
    return trace({key: value for key, value in dump.items() if key.name in names})


def with_tensor(points, key, value):
    """A dump whose last tensor is another one: those that are computed from it are left out, as they would be wrong too."""
    before = dict(takewhile(lambda item: item[0] != key, points.items()))
    return trace(before | {key: np.asarray(value, np.float32)})


def family_dump(family, **shape):
    """A random model of a family, nine tokens, and the tensors of their forward pass without codes."""
    traits = {"rope_width": 10, "parallel_residual": True} if family == "gptneox" else {}
    model = random_model(4, family=family, n_layers=2, **traits, **shape)
    tokens = np.arange(9) * 5 % model.config.vocab
    return model, tokens, without_codes(recorded(model, tokens))
