"""The tensors of a file: shapes are checked, floats finite and widened or narrowed exactly."""

from math import inf, nan

import numpy as np
import pytest
from family_models import assert_refused
from gguf_models import CONFIG, FLOAT_NAMES, MATRIX_NAMES, TENSORS, bfloat16, floats, ternary
from models import assert_same_bits

from bitnet_np import widen
from bitnet_np.errors import FileFormatError, NonFiniteError, UnsupportedError
from bitnet_np.files.load import load
from bitnet_np.forward_pass import forward_full
from bitnet_np.tensor_types import F64, I2_S
from bitnet_np.testing_gguf import Entry


@pytest.mark.parametrize("name", MATRIX_NAMES[:7])
@pytest.mark.parametrize("change", [lambda n, m: (n + 1, m), lambda n, m: (n, m + 128), lambda n, m: (n - 1, m)])
def test_matrices_of_another_shape(write, name, change):
    n, m = TENSORS[name].shape
    shape = change(n, m)
    message = f"tensor {name} has shape [{shape[0]}, {shape[1]}], expected [{n}, {m}]"
    assert_refused(write(tensors={name: ternary(*shape)}), FileFormatError, message)


@pytest.mark.parametrize("name", FLOAT_NAMES[1:6])
@pytest.mark.parametrize("shape", [lambda d: (d + 1,), lambda d: (d - 1,), lambda d: (1, d), lambda d: (d, 1)])
def test_norms_of_another_shape(write, name, shape):
    message = f"tensor {name} has shape {list(shape(*TENSORS[name].shape))}"
    assert_refused(write(tensors={name: floats(*shape(*TENSORS[name].shape))}), FileFormatError, message)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("token_embd.weight", floats(128), "no tensor token_embd.weight of two dimensions"),
        ("token_embd.weight", floats(1, 9, 128), "no tensor token_embd.weight of two dimensions"),
        ("token_embd.weight", floats(9, 256), "tensor token_embd.weight has shape [9, 256], expected [9, 128]"),
        ("output.weight", floats(10, 128), "tensor output.weight has shape [10, 128], expected [9, 128]"),
        ("blk.0.ffn_down.weight", ternary(256, 128), "has shape [256, 128], expected [128, 256]"),
        ("blk.0.ffn_up.weight", Entry("blk.0.ffn_up.weight", (128, 1, 256), I2_S.number), "has shape [256, 1, 128], expected [256, 128]"),
    ],
)
def test_other_shapes(write, name, value, message):
    assert_refused(write(tensors={name: value}), FileFormatError, message)


Q4_0, Q8_0 = 2, 8


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in FLOAT_NAMES[1:4] for kind in (I2_S.number, Q4_0, Q8_0)])
def test_norms_are_floats(write, name, kind):
    shape = TENSORS.get(name, TENSORS["token_embd.weight"]).shape
    message = f"tensor {name} has type {'I2_S' if kind == I2_S.number else ''}"
    assert_refused(write(tensors={name: Entry(name, shape[::-1], kind)}), UnsupportedError, message)


@pytest.mark.parametrize("form", [np.float32, np.float16, bfloat16])
def test_tables_of_every_float_type(write, form):
    table, head = (form(floats(CONFIG.vocab, CONFIG.width)) for _ in range(2))
    norm = form(floats(CONFIG.width))
    loaded = load(write(tensors={"token_embd.weight": table, "output.weight": head, "blk.1.attn_norm.weight": norm}))
    assert loaded.token_embd.dtype == loaded.output.dtype == table.dtype
    np.testing.assert_array_equal(loaded.token_embd, table)
    np.testing.assert_array_equal(loaded.output, head)
    np.testing.assert_array_equal(loaded.layers[1].attn_norm, widen.float32(norm))
    logits = forward_full(loaded, [[1, 2]])
    assert (logits != forward_full(load(write(tensors={"token_embd.weight": table})), [[1, 2]])).any()


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


@pytest.mark.parametrize("name", [*FLOAT_NAMES, "output.weight"])
@pytest.mark.parametrize("form", [np.float32, np.float16, bfloat16])
def test_floats_are_finite_to_the_last(write, name, form):
    sound = widen.float32(TENSORS.get(name, TENSORS["token_embd.weight"]))
    for at, value in ((0, nan), (-1, nan), (sound.size // 2, -inf), (-1, inf)):
        wrong = sound.copy()
        wrong.reshape(-1)[at] = value
        assert_refused(write(tensors={name: form(wrong)}), NonFiniteError, f"tensor {name} has NaN or infinity in it")
