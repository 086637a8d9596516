"""The tensors of a file: shapes are checked, floats finite and widened or narrowed exactly."""

from math import inf, nan

import numpy as np
import pytest
from family_models import assert_refused
from fuzzing.gguf_bytes import Entry
from gguf_models import FLOAT_NAMES, MATRIX_NAMES, TENSORS, floats, patched, ternary
from models import assert_same_bits

from bitnet_np.base.errors import FileFormatError, NonFiniteError, UnsupportedError
from bitnet_np.base.tensor_types import BF16, F16, F32, F64, I2_S, Q4_0, Q8_0
from bitnet_np.files.load import load
from bitnet_np.model import packing, widen
from bitnet_np.testing.models import bfloat16_bits


def of_type(name, kind):
    return Entry(name, TENSORS.get(name, TENSORS["token_embd.weight"]).shape[::-1], kind)


def with_scale(name, scale):
    return patched(name, slice(-packing.TRAILER, 4 - packing.TRAILER), np.frombuffer(np.float32(scale).tobytes(), np.uint8))


def with_number(name, form, at, value):
    wrong = widen.float32(TENSORS.get(name, TENSORS["token_embd.weight"]))
    wrong.reshape(-1)[wrong.size // 2 if at is None else at] = value
    return form(wrong)


def refused():
    """The name of a tensor, what stands in its place, the error and the end of its message, which starts with the name."""
    for name in [name for name in TENSORS if not name.startswith("token")]:
        yield name, None, FileFormatError, "is missing"
    for name in ("blk.2.attn_norm.weight", "blk.0.attn_q.bias", "blk.0.attn_q.scale", "blk.00.attn_q.weight", "rope_freqs.weight"):
        yield name, floats(4), UnsupportedError, "has no place in architecture bitnet-b1.58"
    yield "output.bias", floats(4), UnsupportedError, "has no place in architecture bitnet-b1.58"
    for name in MATRIX_NAMES[:7]:
        n, m = TENSORS[name].shape
        for shape in ((n + 1, m), (n, m + 128), (n - 1, m)):
            yield name, ternary(*shape), FileFormatError, f"has shape {list(shape)}, expected [{n}, {m}]"
        for kind in (F32.number, F16.number, BF16.number, Q4_0.number, Q8_0.number):
            yield name, of_type(name, kind), UnsupportedError, "has type "
    for name in FLOAT_NAMES[1:6]:
        (n,) = TENSORS[name].shape
        for shape in ((n + 1,), (n - 1,), (1, n), (n, 1)):
            yield name, floats(*shape), FileFormatError, f"has shape {list(shape)}, expected [{n}]"
    for name in FLOAT_NAMES[1:4]:
        for kind in (I2_S, Q4_0, Q8_0):
            yield name, of_type(name, kind.number), UnsupportedError, f"has type {kind.name}"
    for name in ("token_embd.weight", "output.weight"):
        yield name, of_type(name, I2_S.number), UnsupportedError, "has type I2_S, supported here: F32, F16, BF16, F64, Q4_0"
    yield "token_embd.weight", floats(9, 256), FileFormatError, "has shape [9, 256], expected [9, 128]"
    yield "output.weight", floats(10, 128), FileFormatError, "has shape [10, 128], expected [9, 128]"
    yield "blk.0.ffn_down.weight", ternary(256, 128), FileFormatError, "has shape [256, 128], expected [128, 256]"
    deep = Entry("blk.0.ffn_up.weight", (128, 1, 256), I2_S.number)
    yield deep.name, deep, FileFormatError, "has shape [256, 1, 128], expected [256, 128]"
    for name in (MATRIX_NAMES[0], MATRIX_NAMES[-1]):
        last = TENSORS[name].shape[0] * TENSORS[name].shape[1] // 4 - 1
        for at, three in ((0, 3), (31, 3 << 2), (last, 3 << 6)):
            yield name, patched(name, at, packing.to_i2s(TENSORS[name])[at] | three), FileFormatError, "has the ternary code 3"
        for scale in (nan, inf, -inf, -1.0, -1e-45):
            yield name, with_scale(name, scale), NonFiniteError, f"has the scale {np.float32(scale)}, expected a finite number"
    for name in (*FLOAT_NAMES, "output.weight"):
        for form in (np.float32, np.float16, bfloat16_bits):
            for at, value in ((0, nan), (-1, nan), (None, -inf), (-1, inf)):
                yield name, with_number(name, form, at, value), NonFiniteError, "has NaN or infinity in it"


@pytest.mark.parametrize(("name", "value", "error", "message"), list(refused()))
def test_a_tensor_that_cannot_be_is_refused_by_its_name(write, name, value, error, message):
    assert_refused(write(tensors={name: value}), error, f"tensor {name} {message}")


@pytest.mark.parametrize("value", [None, floats(128), floats(1, 9, 128)])
def test_there_must_be_an_embedding(write, value):
    assert_refused(write(tensors={"token_embd.weight": value}), FileFormatError, "no tensor token_embd.weight of two dimensions")


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight"])
def test_float64_is_read_where_float32_holds_it(write, name):
    """Also its smallest and largest numbers, but not one that is a bit finer, smaller or larger."""
    numbers = widen.float32(TENSORS[name]).astype(np.float64)
    numbers.flat[:4] = 2.0**-149, float(np.finfo(np.float32).max), -0.0, 1 + 2.0**-23

    def wide():
        return Entry(name, numbers.shape[::-1], F64.number, data=numbers.tobytes())

    found = getattr(load(write(tensors={name: wide()})), name.removesuffix(".weight"))
    assert_same_bits(found, numbers.astype(np.float32))
    for wrong, error, message in (
        (1 + 2.0**-24, UnsupportedError, f"tensor {name} of type F64 has the number 1.0000000596046448, which float32"),
        (2.0**-150, UnsupportedError, "which float32 cannot hold"),
        (1e39, UnsupportedError, "has the number 1e+39, which float32"),
        (np.nan, NonFiniteError, f"tensor {name} has NaN or infinity in it"),
    ):
        numbers.flat[5] = wrong
        assert_refused(write(tensors={name: wide()}), error, message)
