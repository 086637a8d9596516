"""llama.cpp's file of log-probabilities: read and written as its description says."""

import struct

import numpy as np
import pytest
from trace_files import LOGITS, write_trace

from bitnet_np.base.errors import FileFormatError, OptionError, ShapeError
from bitnet_np.traces.formats import llama_logits, read_any
from bitnet_np.traces.points import Key


def llama_file(tokens, logits):
    """The layout once more, from its description, one number at a time."""
    chunks, context, vocab = logits.shape
    raw = b"_logits_" + struct.pack("<3i", context, vocab, chunks) + struct.pack(f"<{chunks * context}i", *tokens.ravel())
    for chunk in logits:
        for row in chunk[context // 2 : context - 1].astype(np.float64):
            low, high = max(row.min(), row.max() - 16), row.max()
            step = (high - low) / 65535
            codes = [0 if x <= low else round((x - low) / step) for x in row]
            raw += struct.pack("<2f", step, low - np.log(np.exp(row).sum())) + struct.pack(f"<{vocab}H", *codes) + b"\0\0" * (vocab % 2)
    return raw


def written(path, tokens, logits):
    """The file of these logits, as our writer makes it."""
    write_trace(path, "llama-logits", {LOGITS: np.asarray(logits)}, np.asarray(tokens))
    return path


@pytest.mark.parametrize("vocab", [1, 8, 33])
@pytest.mark.parametrize("context", [3, 4, 9])
def test_log_probabilities_are_those_of_the_logits(tmp_path, vocab, context):
    """Of one chunk that we wrote, and of each of three in a file."""
    rng = np.random.default_rng(vocab)
    logits = rng.normal(0, 3, (3, context, vocab)).astype(np.float32)
    logits[0, context // 2, 0] = -40  # below the range
    tokens = rng.integers(0, vocab, (3, context))
    (tmp_path / "theirs.kld").write_bytes(llama_file(tokens, logits))
    for chunk in range(3):
        ours = written(tmp_path / "ours.kld", tokens[chunk], logits[chunk])
        for trace in (llama_logits.read(ours), llama_logits.read(tmp_path / "theirs.kld", chunk=chunk)):
            np.testing.assert_array_equal(trace.tokens, tokens[chunk])
            np.testing.assert_array_equal(trace.positions, np.arange(context // 2, context - 1))
            x = logits[chunk, trace.positions].astype(np.float64)
            expected = np.maximum(x, x.max(axis=1, keepdims=True) - 16) - np.log(np.exp(x).sum(axis=1, keepdims=True))
            log_probs = trace.points[Key("log_probs", None)]
            assert log_probs.dtype == np.float32
            np.testing.assert_allclose(log_probs, expected, rtol=0, atol=8 / 65535 + 3e-6)
        a, b = ours.read_bytes(), llama_file(tokens[chunk : chunk + 1], logits[chunk : chunk + 1])
        assert len(a) == len(b)
        assert a[: 20 + 4 * context] == b[: 20 + 4 * context]


def test_logits_that_are_all_equal_have_no_step(tmp_path):
    path = written(tmp_path / "t.kld", [0, 1, 2], np.zeros((3, 4), np.float32))
    np.testing.assert_allclose(read_any(path).points[Key("log_probs", None)], np.full((1, 4), -np.log(4)), rtol=1e-6)


def test_logits_the_file_cannot_hold_are_refused(tmp_path):
    good = np.ones((4, 3), np.float32)
    for tokens, logits, error in [
        ([0, 1, 2, 1], good * np.nan, ShapeError),
        ([0, 1, 2, 1], good[:3], ShapeError),
        ([0, 1, 2, 1], good.astype(np.int32), ShapeError),
        ([0, 1], good[:2], ShapeError),
        ([0, 1, 2, -1], good, FileFormatError),
        (None, good, OptionError),
    ]:
        with pytest.raises(error):
            write_trace(tmp_path / "t.kld", "llama-logits", {LOGITS: logits}, tokens)
    assert not list(tmp_path.iterdir())


def test_chunks_and_tokens_that_are_not_there_are_refused(tmp_path):
    path = written(tmp_path / "t.kld", [0, 1, 2, 1], np.eye(4, 3, dtype=np.float32))
    for chunk in (-1, 1):
        with pytest.raises(OptionError, match=f"chunk is {chunk}, expected 0 to 0"):
            llama_logits.read(path, chunk=chunk)
    raw = bytearray(path.read_bytes())
    raw[20] = 3
    path.write_bytes(raw)
    with pytest.raises(FileFormatError, match="token 3 in chunk 0, expected less than n_vocab 3"):
        llama_logits.read(path)
