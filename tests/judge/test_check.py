"""`bitnet_np.check`: an engine's arrays judged in memory, with the verdicts that the same dump has in a file."""

from array import array as buffer
from collections import OrderedDict

import numpy as np
import pytest
from dumps import FAULTS, LOGITS, MODEL, TOKENS, recorded, trace

import bitnet_np as bn
from bitnet_np.base.errors import FileFormatError, OptionError, ShapeError, TokenRangeError
from bitnet_np.judge.detail import Details
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
        ({"model": None}, ShapeError, "model is a NoneType, expected a Model"),
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


class Output(OrderedDict):
    """As transformers' ModelOutput."""


class DLPack:
    """An array of a library that speaks DLPack alone."""

    def __init__(self, array):
        self.array = array

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def test_what_a_model_returned_is_judged_without_its_cache():
    layers = [
        OURS[Key("inp_embd", None)],
        *(OURS[Key("l_out", n)] for n in range(MODEL.config.n_layers - 1)),
        OURS[Key("result_norm", None)],
    ]
    output = Output(loss=None, logits=RIGHT[None], past_key_values=object(), hidden_states=tuple(x[None] for x in layers))
    report = bn.check(MODEL, TOKENS, output)
    assert (report.verdict, len(report.operations)) == (Verdict.SAME_BITS, len(layers) + 1)
    assert report.not_understood == ()


def test_names_are_pairs_of_name_and_layer_as_recorders_have_them():
    points = {}
    bn.forward_full(MODEL, TOKENS[None], record=lambda name, layer, x: points.update({(name, layer): x.copy()}))
    assert bn.check(MODEL, TOKENS, points) == bn.check(MODEL, TOKENS, {Key(*key): x for key, x in points.items()})
    assert bn.check(MODEL, TOKENS, points | {("l_out", 1): -points["l_out", 1]}).first_wrong.key == Key("l_out", 1)
    with pytest.raises(OptionError, match=r"dump has the key \('l_out', '1'\), expected names such as attn_norm-0, or pairs such as"):
        bn.check(MODEL, TOKENS, {("l_out", "1"): RIGHT})


def test_arrays_of_dlpack_and_flat_buffers_are_arrays():
    for dump in (DLPack(RIGHT), buffer("f", RIGHT.ravel()), memoryview(RIGHT)):
        assert bn.check(MODEL, TOKENS, dump).verdict == Verdict.SAME_BITS
    with pytest.raises(ShapeError, match=r"dump is of type bytes, expected numbers: numpy\.frombuffer makes them"):
        bn.check(MODEL, TOKENS, RIGHT.tobytes())


@pytest.mark.parametrize("call", [lambda path: bn.check(path, TOKENS, RIGHT), lambda path: bn.forward_full(path, [[1]])])
def test_a_path_in_place_of_a_model_is_refused_with_what_loads_it(call):
    with pytest.raises(ShapeError, match=r"model is the path 'm\.gguf', expected a Model, as bitnet_np\.load gives of a path"):
        call("m.gguf")


def test_padded_ids_come_with_their_mask_or_lengths():
    ids, rows = np.stack([TOKENS, TOKENS]), np.stack([RIGHT, RIGHT])
    ids[1, 2:] = 0
    mask = np.ones_like(ids)
    mask[1, 2:] = 0
    expected = bn.check(MODEL, [TOKENS, TOKENS[:2]], rows)
    assert expected.verdict == Verdict.SAME_BITS
    for held in ({"attention_mask": mask}, {"lengths": [len(TOKENS), 2]}):
        assert bn.check(MODEL, {"input_ids": ids, **held}, rows) == expected
    with pytest.raises(ShapeError, match=r"tokens: input_ids has shape \[2, \d+\], its mask or lengths \[1, \d+\], expected the same"):
        bn.check(MODEL, {"input_ids": ids, "attention_mask": mask[:1]}, rows)
    with pytest.raises(ShapeError, match=r"tokens has \['ids'\], expected input_ids"):
        bn.check(MODEL, {"ids": ids}, rows)
