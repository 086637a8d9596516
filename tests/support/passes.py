"""Small forward passes of every family, type of numbers, dialect and cache, of 1 to 300 tokens: a digest of each one's bits. A program.

    python tests/support/passes.py THREADS

Whole passes of many lengths, and pieces through a cache, are compared with the longest pass.
"""

import hashlib
import json
import sys
from unittest import mock

import numba
import numpy as np

from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.cache_types import KINDS
from bitnet_np.engine.dialects import DIALECTS, EXACT, LLAMA_CPP, Dialect
from bitnet_np.engine.forward_pass import forward, forward_full
from bitnet_np.kernels import launching
from bitnet_np.kernels.fast import amx
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.model.records import Model
from bitnet_np.testing.model_cases import TABLES
from bitnet_np.testing.models import random_model
from bitnet_np.testing.noise import Noise

OWN_MAPPINGS = {"MALLOC_MMAP_THRESHOLD_": "1", "MALLOC_MMAP_MAX_": "100000000"}
"""The environment in which glibc gives each array a mapping of its own: a kernel that uses an array after it was freed dies of it."""

MOST = 300  # tokens: several chunks of keys, and of rows of float products
LENGTHS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 33, 63, 64, 65, 66, 95, 127, 129, 255, 257, 299]
_WIDE = {"family": "llama", "width": 256, "ffn": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "n_layers": 1}
_NARROW = {"family": "llama", "table": "float16", "width": 40, "ffn": 72, "heads": 4, "kv_heads": 2, "head_dim": 32, "n_layers": 1}


def cases() -> dict[str, tuple]:
    """By name: what kind of model, in which dialect, and with which type of cache."""
    named: dict[str, tuple] = {f"family {family}": ({"family": family}, EXACT, np.float32) for family in ARCHITECTURES}
    for table in TABLES:
        kind = _WIDE | {"weights": table, "table": "float32" if table == "ternary" else table}
        named |= {f"{table}, {dialect.name}": (kind, dialect, np.float32) for dialect in (EXACT, LLAMA_CPP)}
    for dialect in (*DIALECTS.values(), *map(EXACT.with_cache, KINDS)):
        named[f"dialect {dialect.name}"] = _NARROW, dialect, np.float32
    return named | {"cache of float16": (_NARROW, EXACT.with_cache("float16"), np.float16)}


def passes(model: Model, dialect: Dialect, dtype: type, lengths: list[int]) -> str:
    """The digest of MOST tokens' logits. Whole passes of these lengths, and a prefill of such a piece and a step, have the same bits."""
    tokens = np.arange(MOST)[None] * 7 % model.config.vocab
    whole = forward_full(model, tokens, dialect=dialect)
    for length in lengths:
        cache = KVCache(model.config, 1, MOST, dtype)
        parts = [forward(model, tokens[:, begin:end], cache, dialect=dialect) for begin, end in ((0, length), (length, length + 1))]
        for result in (forward_full(model, tokens[:, :length], dialect=dialect), np.concatenate(parts, axis=1)):
            assert result.tobytes() == whole[:, : result.shape[1]].tobytes(), (length, dialect)
    return hashlib.sha256(whole.tobytes()).hexdigest()


def run(threads: int, beginnings: tuple[str, ...] = ("",)) -> dict[str, str]:
    """The digests of the cases whose names begin so, on one thread, or on some that share every kernel, however small it is.

    Those of which each length of up to a tile has another kernel take all lengths.
    """
    numba.set_num_threads(threads)
    digests = {}
    with mock.patch.object(launching, "SMALL", launching.SMALL if threads == 1 else 0):
        for number, (name, (kind, dialect, dtype)) in enumerate(cases().items()):
            if name.startswith(beginnings):
                model = random_model(Noise(1), **{"n_layers": 2, "vocab": 37, "context": MOST} | kind)
                is_ternary = name.startswith("family bitnet-b1.58")
                lengths = LENGTHS if is_ternary or name in ("Q4_K, llama.cpp", "Q8_0, llama.cpp") else [LENGTHS[number % len(LENGTHS)]]
                digests[name] = passes(model, dialect, dtype, lengths)
                if is_ternary and amx.unit() is not None:
                    with mock.patch.multiple(amx, unit=lambda: None):  # without matrix tiles
                        passes(model, dialect, dtype, lengths)
    return digests


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]))))
