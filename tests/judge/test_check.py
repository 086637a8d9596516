"""`bitnet_np.check`: an engine's arrays judged in memory, with the verdicts that the same dump has in a file."""

import numpy as np
import pytest
from dumps import FAULTS, LOGITS, MODEL, TOKENS, recorded, trace

import bitnet_np as bn
from bitnet_np.base.errors import FileFormatError, OptionError, ShapeError, TokenRangeError
from bitnet_np.judge.report.detail import Details
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.formats import read_any
from bitnet_np.traces.points import Key

OURS = recorded()
RIGHT = OURS[LOGITS]


def by_label(points):
    return {str(key): array for key, array in points.items()}


@pytest.fixture(scope="module")
def faulty():
    """The tensors of an engine with a fault, by label."""
    return by_label(FAULTS["SiLU for relu squared"].make(MODEL, TOKENS)[0])


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[None], TOKENS.tolist(), [TOKENS.tolist()]], ids=["[T]", "[1, T]", "list", "lists"])
@pytest.mark.parametrize("shape", [RIGHT.shape, (1, *RIGHT.shape), RIGHT.shape[1:], (1, RIGHT.shape[1]), (1, 1, RIGHT.shape[1])])
def test_logits_in_every_shape_are_the_same_logits(tokens, shape):
    logits = RIGHT if len(TOKENS) in shape else RIGHT[-1]
    for dump in (logits.reshape(shape), {"logits": logits.reshape(shape)}, {"result_output": logits.reshape(shape)}):
        report = bn.check(MODEL, tokens, dump)
        assert (report.verdict, report.logits.positions) == (Verdict.SAME_BITS, logits.size // RIGHT.shape[1])


def test_tensors_have_the_verdicts_of_a_file(faulty, tmp_path):
    np.savez(tmp_path / "dump.npz", tokens=TOKENS, **faulty)
    expected = bn.check(MODEL, TOKENS, read_any(tmp_path / "dump.npz"))
    assert expected.verdict == Verdict.WRONG
    for dump in (faulty, {name: array[None] for name, array in faulty.items()}, faulty | {"tokens": TOKENS}):
        assert bn.check(MODEL, TOKENS, dump) == expected
    assert bn.check(MODEL, TOKENS, tmp_path / "dump.npz") == bn.check(MODEL, TOKENS, str(tmp_path / "dump.npz")) == expected
    assert bn.check(MODEL, TOKENS, trace(dict(read_any(tmp_path / "dump.npz").points.items()))) == expected


def test_other_tokens_are_noticed(faulty):
    report = bn.check(MODEL, TOKENS, faulty | {"tokens": TOKENS[::-1]})
    assert (report.verdict, report.reason.partition(":")[0]) == (Verdict.INVALID, "dump (arrays in memory) was made with other token ids")


def test_the_dialect_is_a_dialect_or_its_name():
    theirs = bn.compute_logits(MODEL, TOKENS[None], dialect=bn.BITNET_CPP)[0]
    assert bn.check(MODEL, TOKENS, theirs).verdict == Verdict.FLIPS
    for dialect in ("bitnet.cpp", bn.BITNET_CPP):
        assert bn.check(MODEL, TOKENS, theirs, dialect).verdict == Verdict.SAME_BITS


def test_details_of_several_sequences_are_those_of_the_worst(faulty):
    """What is said of each, and of all, is for test_sequences.py."""
    ours = by_label(OURS)
    both = {name: np.stack([ours[name], faulty[name].reshape(ours[name].shape)]) for name in faulty}
    details = Details()
    bn.check(MODEL, np.stack([TOKENS, TOKENS]), both, details=details)
    assert Key("ffn_out", 1) in details.tensors
    for shape, said in (((17, 256), "[17, 256]"), ((0, 512), "[0, 512]"), ((3, 17, 512), "[3, 17, 512]"), ((), "[]")):
        report = bn.check(MODEL, np.stack([TOKENS, TOKENS]), {"l_out-0": np.zeros(shape, np.float32)})
        expected = f"dump: 'l_out-0' has shape {said}, expected 2 sequences, [2, 17, width], or 34 rows"
        assert (report.verdict, report.reason) == (Verdict.INVALID, expected)


@pytest.mark.parametrize(
    ("dump", "error", "message"),
    [
        ({"x": RIGHT}, FileFormatError, "no point of a forward pass in it, expected labels such as attn_norm-0; it has 'x'"),
        ({3: RIGHT}, OptionError, "dump has the key 3, expected names such as attn_norm-0"),
        ({"logits": RIGHT, "result_output": RIGHT}, OptionError, "expected logits once"),
        ({"l_out-0": "abc"}, ShapeError, r"dump\['l_out-0'\] is of type str"),
        ({}, FileFormatError, "no point of a forward pass"),
        (object(), ShapeError, "^dump is of type object"),
    ],
)
def test_what_is_no_dump_is_refused(dump, error, message):
    with pytest.raises(error, match=message):
        bn.check(MODEL, TOKENS, dump)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": None}, OptionError, "model is None, expected a Model"),
        ({"dialect": "numpy"}, OptionError, "dialect is 'numpy', expected one of exact, "),
        ({"strict": "no"}, OptionError, "strict is 'no', expected True or False"),
        ({"precision": 3}, OptionError, "precision is 3, expected a Precision, text such as"),
        ({"tokens": TOKENS[None, None]}, ShapeError, "tokens has shape"),
        ({"tokens": [512]}, TokenRangeError, "token 512"),
        ({"tokens": np.stack([TOKENS, TOKENS]), "dump": trace(OURS)}, ShapeError, "a Trace, which holds one sequence, and there are 2"),
    ],
)
def test_arguments_are_checked(arguments, error, message):
    with pytest.raises(error, match=message):
        bn.check(**{"model": MODEL, "tokens": TOKENS, "dump": RIGHT} | arguments)
