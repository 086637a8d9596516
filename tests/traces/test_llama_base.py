"""A model against llama.cpp's base of log-probabilities: the numbers by the tool's rules, one at a time, and files that are not trusted.

The layout of the file is for formats/test_llama_logits.py.
"""

import math
import struct

import numpy as np
import pytest
from models import random_model

from bitnet_np import BITNET_CPP, EXACT, forward_full
from bitnet_np.base.errors import ContextLimitError, FileFormatError, OptionError, ShapeError, TokenRangeError
from bitnet_np.traces.llama_base import divergence, save_base

VOCAB = 33
MODEL, OTHER = (random_model(seed, vocab=VOCAB, context=300, gain=gain) for seed, gain in ((3, 1.0), (3, 1.02)))
TEXT = np.random.default_rng(1).integers(0, VOCAB, 50)


def logits_of(model, chunk, bos, dialect=EXACT):
    ids = chunk.copy()
    ids[0] = ids[0] if bos is None else bos
    return forward_full(model, ids[None], dialect=dialect)[0].astype(np.float64)


def log_softmax(row):
    return row - row.max() - math.log(np.exp(row - row.max()).sum())


@pytest.mark.parametrize(("context", "bos"), [(3, None), (8, 5), (17, None), (50, 0)])
@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP], ids=lambda dialect: dialect.name)
def test_numbers_are_those_of_the_definition(tmp_path, context, bos, dialect):
    """The text is written by one model, and the other is compared with it; both by a loop over positions."""
    path = tmp_path / "base.kld"
    values = save_base(MODEL, TEXT, path, context=context, bos=bos, dialect=dialect)
    found = divergence(OTHER, path, bos=bos, dialect=dialect)
    chunks = TEXT[: 50 // context * context].reshape(-1, context)
    assert path.read_bytes()[: 20 + 4 * chunks.size] == b"_logits_" + struct.pack(
        f"<3i{chunks.size}i", context, VOCAB, len(chunks), *chunks.ravel()
    )
    n = 0
    for chunk in chunks:
        ours, theirs = (logits_of(model, chunk, bos, dialect) for model in (MODEL, OTHER))
        for t in range(context // 2, context - 1):
            p, q = log_softmax(ours[t]), log_softmax(theirs[t])
            kl = sum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True) if a > -16)
            assert values[n] == pytest.approx(-p[chunk[t + 1]], rel=1e-6)
            assert found.nll[n] == pytest.approx(-q[chunk[t + 1]], rel=1e-6)
            assert found.base_nll[n] == pytest.approx(min(-p[chunk[t + 1]], 16 - p.max()), abs=2e-4)  # what a step of the file rounds
            assert found.kl[n] == pytest.approx(kl, abs=3e-4)
            assert found.same_top[n] == (ours[t].argmax() == theirs[t].argmax())
            n += 1
    assert n == len(values) == len(found.kl) == len(chunks) * (context - 1 - context // 2)
    assert found.kl.max() > 0


def test_a_model_is_its_own_base(tmp_path):
    """Whatever the number of tokens that go through it at a time: a chunk's second half is longer than that."""
    ids = np.random.default_rng(2).integers(0, VOCAB, 300)
    values = save_base(MODEL, ids, tmp_path / "base.kld")  # one chunk, of the model's context
    found = divergence(MODEL, tmp_path / "base.kld")
    assert len(values) == 149
    np.testing.assert_array_equal(found.nll, values)
    assert np.abs(found.kl).max() < 2e-4
    assert found.same_top.mean() > 0.99  # two logits within a step are a tie in the file


def test_what_cannot_be_written_leaves_no_file(tmp_path):
    for ids, how, error in [
        (TEXT[:7], {"context": 8}, ShapeError),
        (TEXT, {"context": 2}, OptionError),
        (TEXT[:2], {}, ShapeError),
        ([*TEXT, VOCAB], {}, TokenRangeError),
        (TEXT, {"bos": VOCAB}, TokenRangeError),
        (np.zeros(301, int), {"context": 301}, ContextLimitError),
    ]:
        with pytest.raises(error):
            save_base(MODEL, ids, tmp_path / "t.kld", **how)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("offset", "value", "message"),
    [
        (20 + 4 * 8, struct.pack("<f", math.nan), r"t\.kld: chunk 0, position 4: its probabilities add up to nan, expected about 1"),
        (20 + 4 * 8, struct.pack("<f", 1e38), r"position 4: its probabilities add up to (inf|nan), expected about 1"),
        (20 + 4 * 8 + 4, struct.pack("<f", -1.0), r"position 4: its probabilities add up to .*, expected about 1"),
        (20 + 4 * 8 + 4, struct.pack("<f", -1e3), r"position 4: its probabilities add up to 0, expected about 1"),
    ],
)
def test_a_file_that_is_no_base_is_refused(tmp_path, offset, value, message):
    path = tmp_path / "t.kld"
    save_base(MODEL, TEXT[:8], path)
    raw = bytearray(path.read_bytes())
    raw[offset : offset + len(value)] = value
    path.write_bytes(raw)
    with pytest.raises(FileFormatError, match=message):
        divergence(MODEL, path)


def test_a_base_of_another_vocabulary_or_beyond_the_context_is_refused(tmp_path):
    save_base(MODEL, TEXT, tmp_path / "t.kld", context=20)
    with pytest.raises(ShapeError, match="has a vocabulary of 33 tokens, the model has 34, expected the same"):
        divergence(random_model(0, vocab=34), tmp_path / "t.kld")
    with pytest.raises(ContextLimitError):
        divergence(random_model(0, vocab=VOCAB, context=19), tmp_path / "t.kld")
