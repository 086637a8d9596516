"""Loading: a sound file is the model that was written, without a copy; every other file is refused by its name and what is wrong in it."""

import re
from fractions import Fraction
from math import inf, nan
from pathlib import Path

import numpy as np
import pytest
from gguf_bytes import FLOAT32, FLOAT64, INT32, UINT32, UINT64, Entry, number, numbers, text
from gguf_bytes import gguf as build
from hypothesis import given, settings
from hypothesis import strategies as st
from models import assert_same_bits

from bitnet_np import packing, widen
from bitnet_np.dense import dense_view
from bitnet_np.errors import Error, FileFormatError, NonFiniteError, OptionError, ShapeError, UnsupportedError
from bitnet_np.families import ARCHITECTURES, MATRICES, NORMS, layer_shapes
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.load import load, model_from, open_model
from bitnet_np.forward_pass import forward_full
from bitnet_np.kernels import cpu
from bitnet_np.kernels.scalar import cos_sin
from bitnet_np.model import Config, Layer, Linear, Model, Ternary
from bitnet_np.rope import LARGEST_ANGLE, rope_frequencies
from bitnet_np.tensor_types import BF16, F16, F32, F64, I2_S
from scripts.make_model import Shape, write_model

CONFIG = Config("bitnet-b1.58", 9, 64, 128, 2, 256, 4, 2, 32, float(np.float32(1e-5)), 10000.0)
A = "bitnet-b1.58."
KEYS = {
    "general.architecture": text("bitnet-b1.58"),
    A + "context_length": number(UINT32, CONFIG.context),
    A + "embedding_length": number(UINT32, CONFIG.width),
    A + "block_count": number(UINT32, CONFIG.n_layers),
    A + "feed_forward_length": number(UINT32, CONFIG.ffn),
    A + "attention.head_count": number(UINT32, CONFIG.heads),
    A + "attention.head_count_kv": number(UINT32, CONFIG.kv_heads),
    A + "attention.layer_norm_rms_epsilon": number(FLOAT32, CONFIG.eps),
    A + "rope.freq_base": number(FLOAT32, CONFIG.rope_base),
}
OPTIONAL = {
    A + "vocab_size": number(UINT32, CONFIG.vocab),
    A + "rope.dimension_count": number(UINT32, CONFIG.head_dim),
    A + "attention.key_length": number(UINT32, CONFIG.head_dim),
    A + "attention.value_length": number(UINT32, CONFIG.head_dim),
}
RNG = np.random.default_rng(11)


def floats(*shape):
    return RNG.normal(1, 0.3, shape).astype(np.float32)


def ternary(n, m):
    return packing.pack(RNG.integers(-1, 2, (n, m)), RNG.uniform(0.05, 0.15))


def bfloat16(table):
    return (table.view(np.uint32) >> 16).astype(np.uint16)


TENSORS = {
    "token_embd.weight": floats(CONFIG.vocab, CONFIG.width).astype(np.float16),
    "output_norm.weight": floats(CONFIG.width),
} | {
    f"blk.{n}.{field}.weight": ternary(*shape) if field in MATRICES else floats(*shape)
    for n in range(CONFIG.n_layers)
    for field, shape in layer_shapes(CONFIG).items()
}
MATRIX_NAMES = [name for name, value in TENSORS.items() if isinstance(value, Ternary)]
FLOAT_NAMES = [name for name in TENSORS if name not in MATRIX_NAMES]
TYPES = {np.dtype(np.float32): F32, np.dtype(np.float16): F16, np.dtype(np.uint16): BF16}


def i2s_as_arm_writes_it(matrix):
    """64 weights in 16 bytes, element e in byte e % 16 at bits 6 - 2 * (e // 16)."""
    codes = (matrix + 1).astype(np.uint8).reshape(-1, 4, 16)
    return (codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]).tobytes()


def i2s_as_four_rows(matrix):
    """One column of four rows in a byte."""
    codes = (matrix + 1).astype(np.uint8).reshape(len(matrix) // 4, 4, -1)
    return (codes[:, 0] << 6 | codes[:, 1] << 4 | codes[:, 2] << 2 | codes[:, 3]).tobytes()


def entry(name, value):
    if isinstance(value, Ternary):
        return Entry(name, value.shape[::-1], I2_S.number, data=packing.to_i2s(value).tobytes())
    return Entry(name, value.shape[::-1], TYPES[value.dtype].number, data=value.tobytes())


@pytest.fixture
def write(tmp_path):
    """Write the file above, with other keys and tensors; None leaves one out."""

    def written(keys=(), tensors=()) -> Path:
        entries = {name: value for name, value in (TENSORS | dict(tensors)).items() if value is not None}
        raw = build(
            [(key, value) for key, value in (KEYS | dict(keys)).items() if value is not None],
            [value if isinstance(value, Entry) else entry(name, value) for name, value in entries.items()],
        )
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        path.write_bytes(raw)
        return path

    return written


def assert_refused(path, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert type(caught.value) is error


# --- sound files ----------------------------------------------------------------------------------------------------------------------


def written_model(**changes) -> Model:
    """The model of TENSORS, put together without a file."""
    layers = [
        Layer(**{f: Linear(t) if isinstance(t := TENSORS[f"blk.{n}.{f}.weight"], Ternary) else t for f in layer_shapes(CONFIG)})
        for n in range(CONFIG.n_layers)
    ]
    parts = {"token_embd": TENSORS["token_embd.weight"], "output": None} | changes
    frequencies = rope_frequencies(CONFIG.rope_base, CONFIG.head_dim)
    return Model(CONFIG, layers=tuple(layers), output_norm=TENSORS["output_norm.weight"], rope_frequency=frequencies, **parts)


def assert_same_model(loaded, expected):
    assert loaded.config == expected.config
    for name in ("token_embd", "output_norm", "rope_frequency", "output"):
        np.testing.assert_array_equal(getattr(loaded, name), getattr(expected, name))
    for a, b in zip(loaded.layers, expected.layers, strict=True):
        for field in NORMS:
            np.testing.assert_array_equal(getattr(a, field), getattr(b, field))
        for field in MATRICES:
            x, y = getattr(a, field).weights, getattr(b, field).weights
            assert (x.shape, x.scale) == (y.shape, y.scale)
            np.testing.assert_array_equal(packing.unpack(x), packing.unpack(y))
    tokens = [[0, 8, 3, 3, 5]]
    assert_same_bits(forward_full(loaded, tokens), forward_full(expected, tokens))


@pytest.mark.parametrize("keys", [{}, OPTIONAL, {A + "block_count": number(UINT64, 2)}, {"llama.rope.scaling": number(UINT32, 2)}])
def test_a_sound_file_is_the_model_that_was_written(write, keys):
    assert_same_model(load(write(keys)), written_model())


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


def test_a_head_of_its_own_makes_the_logits(write):
    head = floats(CONFIG.vocab, CONFIG.width)
    assert_same_model(load(write(tensors={"output.weight": head})), written_model(output=head))
    tied = TENSORS["token_embd.weight"]
    assert_same_bits(forward_full(load(write(tensors={"output.weight": tied})), [[1, 2]]), forward_full(load(write()), [[1, 2]]))


def test_the_architectures_older_name(write):
    renamed = {key.replace(A, "bitnet-25."): value for key, value in (KEYS | OPTIONAL).items()} | {
        "general.architecture": text("bitnet-25")
    }
    loaded = load(write(dict.fromkeys(KEYS) | renamed))
    assert loaded.config.architecture == "bitnet-25"
    assert_same_bits(forward_full(loaded, [[1, 2, 3]]), forward_full(load(write()), [[1, 2, 3]]))
    assert_refused(write({"general.architecture": text("bitnet-25")}), FileFormatError, "'bitnet-25.context_length' is missing")


def test_heads_may_be_wider_than_the_model(tmp_path):
    path = tmp_path / "wide.gguf"
    write_model(path, Shape(vocab=40, width=128, layers=2, ffn=256, heads=6, kv_heads=3, head_dim=64), seed=5)
    model = load(path)
    assert (model.config.head_dim, model.config.q_width, model.config.width) == (64, 384, 128)
    assert model.layers[0].attn_q.shape == (384, 128)
    assert forward_full(model, [[1, 2, 3]]).shape == (1, 3, 40)


def test_progress_is_told_after_each_layer(write):
    calls = []
    load(write(), lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]


def test_a_path_may_be_a_string(write):
    assert_same_model(load(str(write())), written_model())


# --- no copies ------------------------------------------------------------------------------------------------------------------------


def test_tables_stay_where_they_are_in_the_file(write):
    file = open_model(write(tensors={"output.weight": floats(CONFIG.vocab, CONFIG.width)}))
    model = model_from(file)
    assert np.shares_memory(model.token_embd, file.tensors["token_embd.weight"].data)
    assert np.shares_memory(model.output, file.tensors["output.weight"].data)
    arrays = [
        model.token_embd,
        model.output,
        model.output_norm,
        model.rope_frequency,
        model.layers[0].attn_norm,
        model.layers[0].attn_q.weights.codes,
    ]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux to say how much memory is the process's own")
def test_loading_takes_no_more_memory_than_the_file(tmp_path):
    """Matrices are packed anew, and their pages of the file given back."""

    def resident():
        return 1024 * int(re.search(r"VmRSS:\s*(\d+)", Path("/proc/self/status").read_text())[1])

    path = tmp_path / "larger.gguf"
    write_model(path, Shape(vocab=300, width=1024, layers=6, ffn=4096, heads=8, kv_heads=4, head_dim=128), seed=1)
    small = tmp_path / "small.gguf"
    write_model(small, Shape(vocab=300, width=512, layers=1, ffn=2048, heads=4, kv_heads=4, head_dim=128), seed=1)
    load(small)  # compiles what loading needs, for threads to share
    before = resident()
    model = load(path)
    assert path.stat().st_size > 20 << 20
    assert resident() - before < path.stat().st_size + (4 << 20)
    assert model.config.n_layers == 6


# --- files that are refused -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(TENSORS))
def test_every_tensor_must_be_there(write, name):
    message = "no tensor token_embd.weight" if name.startswith("token") else f"tensor {name} is missing"
    assert_refused(write(tensors={name: None}), FileFormatError, message)


@pytest.mark.parametrize(
    "name",
    ["blk.2.attn_norm.weight", "blk.0.attn_q.bias", "blk.0.attn_q.scale", "blk.00.attn_q.weight", "rope_freqs.weight", "output.bias"],
)
def test_no_tensor_may_be_left_over(write, name):
    assert_refused(write(tensors={name: floats(4)}), UnsupportedError, f"tensor {name} has no place in architecture bitnet-b1.58")


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
        ("token_embd.weight", floats(128, 9), "tensor token_embd.weight has shape [128, 9], expected [128, 128]"),
        ("output.weight", floats(10, 128), "tensor output.weight has shape [10, 128], expected [9, 128]"),
        ("blk.0.ffn_down.weight", ternary(256, 128), "has shape [256, 128], expected [128, 256]"),
        ("blk.0.ffn_up.weight", Entry("blk.0.ffn_up.weight", (128, 1, 256), I2_S.number), "has shape [256, 1, 128], expected [256, 128]"),
    ],
)
def test_other_shapes(write, name, value, message):
    assert_refused(write(tensors={name: value}), FileFormatError, message)


Q4_0, Q8_0 = 2, 8


@pytest.mark.parametrize("kind", [F32.number, F16.number, BF16.number, Q4_0, Q8_0])
@pytest.mark.parametrize("name", MATRIX_NAMES[:7])
def test_matrices_are_ternary(write, name, kind):
    wrong = Entry(name, TENSORS[name].shape[::-1], kind)
    assert_refused(write(tensors={name: wrong}), UnsupportedError, f"tensor {name} has type ")


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name in FLOAT_NAMES[1:4] for kind in (I2_S.number, Q4_0, Q8_0)])
def test_norms_are_floats(write, name, kind):
    shape = TENSORS.get(name, TENSORS["token_embd.weight"]).shape
    message = f"tensor {name} has type {'I2_S' if kind == I2_S.number else ''}"
    assert_refused(write(tensors={name: Entry(name, shape[::-1], kind)}), UnsupportedError, message)


@pytest.mark.parametrize("name", ["token_embd.weight", "output.weight"])
def test_tables_are_floats_or_blocks(write, name):
    wrong = Entry(name, TENSORS["token_embd.weight"].shape[::-1], I2_S.number)
    message = f"tensor {name} has type I2_S, supported here: F32, F16, BF16, F64, Q4_0"
    assert_refused(write(tensors={name: wrong}), UnsupportedError, message)


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


def patched(name, at, value):
    """The matrix of that name with some bytes of its tensor changed."""
    data = packing.to_i2s(TENSORS[name])
    data[at] = value
    return Entry(name, TENSORS[name].shape[::-1], I2_S.number, data=data.tobytes())


@settings(max_examples=150)
@given(data=st.data())
def test_no_code_is_three(tmp_path_factory, data):
    """On the bytes of the file, so that every place of every matrix can be hit."""
    path = tmp_path_factory.mktemp("codes") / "model.gguf"
    path.write_bytes(raw := build(KEYS.items(), [entry(*item) for item in TENSORS.items()]))
    tensor = open_gguf(path).tensors[data.draw(st.sampled_from(MATRIX_NAMES))]
    last = tensor.data.size - packing.TRAILER - 1
    at = tensor.offset + data.draw(st.sampled_from([0, 1, 31, 32, 63, 64, last - 1, last]) | st.integers(0, last))
    three = 3 << data.draw(st.sampled_from([0, 2, 4, 6]))
    path.unlink()  # a file that is still mapped must not change
    path.write_bytes(raw[:at] + bytes([raw[at] | three]) + raw[at + 1 :])
    assert_refused(path, FileFormatError, f"tensor {tensor.name} has the ternary code 3")


@pytest.mark.parametrize(
    ("layout", "write_codes"), [("64/16", i2s_as_arm_writes_it), ("4-rows", i2s_as_four_rows)], ids=["64/16", "4-rows"]
)
def test_the_other_layouts_of_i2s_are_read_when_asked_for(write, layout, write_codes):
    tensors = {
        name: Entry(name, value.shape[::-1], I2_S.number, data=write_codes(packing.unpack(value)) + packing.to_i2s(value)[-32:].tobytes())
        for name, value in TENSORS.items()
        if isinstance(value, Ternary)
    }
    path = write(tensors=tensors)
    assert_same_model(load(path, i2s_layout=layout), written_model())
    tokens = [[0, 8, 3]]
    assert (forward_full(load(path), tokens) != forward_full(written_model(), tokens)).any()


def test_no_other_layout_is_known(write):
    with pytest.raises(OptionError, match="i2s_layout is '32/8', expected one of 128/32, 64/16, 4-rows"):
        load(write(), i2s_layout="32/8")


def test_what_follows_the_scale_is_padding(write):
    name = MATRIX_NAMES[0]
    padding = slice(4 - packing.TRAILER, None)
    assert_same_model(load(write(tensors={name: patched(name, padding, 0xFF)})), written_model())


@pytest.mark.parametrize("name", [MATRIX_NAMES[0], MATRIX_NAMES[-1]])
@pytest.mark.parametrize("scale", [nan, inf, -inf, -1.0, -1e-45])
def test_scales_are_finite_and_not_negative(write, name, scale):
    at = slice(-packing.TRAILER, 4 - packing.TRAILER)
    wrong = patched(name, at, np.frombuffer(np.float32(scale).tobytes(), np.uint8))
    assert_refused(
        write(tensors={name: wrong}), NonFiniteError, f"tensor {name} has the scale {np.float32(scale)}, expected a finite number"
    )


@pytest.mark.parametrize("scale", [0.0, 1e-45, 3e38])
def test_scales_that_are_odd_but_numbers(write, scale):
    name = MATRIX_NAMES[0]
    matrix = packing.pack(packing.unpack(TENSORS[name]), scale)
    assert load(write(tensors={name: matrix})).layers[0].attn_q.weights.scale == np.float32(scale)


@pytest.mark.parametrize("name", [*FLOAT_NAMES, "output.weight"])
@pytest.mark.parametrize("form", [np.float32, np.float16, bfloat16])
def test_floats_are_finite_to_the_last(write, name, form):
    sound = widen.float32(TENSORS.get(name, TENSORS["token_embd.weight"]))
    for at, value in ((0, nan), (-1, nan), (sound.size // 2, -inf), (-1, inf)):
        wrong = sound.copy()
        wrong.reshape(-1)[at] = value
        assert_refused(write(tensors={name: form(wrong)}), NonFiniteError, f"tensor {name} has NaN or infinity in it")


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_norm.weight", MATRIX_NAMES[0]])
def test_nan_may_be_allowed(write, name):
    if isinstance(TENSORS[name], Ternary):
        wrong = packing.pack(packing.unpack(TENSORS[name]), nan)
    else:
        wrong = TENSORS[name].copy()
        wrong.reshape(-1)[-1] = nan
    path = write(tensors={name: wrong})
    with pytest.raises(NonFiniteError, match=f"tensor {name} has "):
        load(path)
    model = load(path, allow_nan=True)
    found = {"token_embd.weight": model.token_embd, "blk.0.ffn_norm.weight": model.layers[0].ffn_norm}
    assert np.isnan(model.layers[0].attn_q.weights.scale if isinstance(wrong, Ternary) else found[name].reshape(-1)[-1])
    with pytest.raises(NonFiniteError, match="logits of sequence 0"):
        forward_full(model, [[8]])


def test_what_is_no_number_is_not_allowed_with_nan(write):
    name = MATRIX_NAMES[0]
    with pytest.raises(NonFiniteError, match=r"scale -1\.0"):
        load(write(tensors={name: packing.pack(packing.unpack(TENSORS[name]), -1.0)}), allow_nan=True)


@pytest.mark.parametrize("name", ["gemma", "LLAMA", "bitnet-b1.58 ", "BITNET-B1.58", ""])
def test_other_architectures(write, name):
    message = f"general.architecture is {name!r}, supported are {', '.join(ARCHITECTURES)}"
    assert_refused(write({"general.architecture": text(name)}), UnsupportedError, message)


@pytest.mark.parametrize("key", list(KEYS))
def test_every_key_must_be_there_and_of_its_type(write, key):
    assert_refused(write({key: None}), FileFormatError, f"key {key!r} is missing")
    wrong = [text("2"), numbers(UINT32, [2])]
    wrong += [number(UINT32, 1)] if key.endswith(("epsilon", "freq_base")) else [number(FLOAT32, 2), number(7, 1)]
    for value in wrong[key == "general.architecture" :]:
        assert_refused(write({key: value}), FileFormatError, f"key {key!r} is ")


@pytest.mark.parametrize("key", list(OPTIONAL))
def test_optional_keys_have_their_type_too(write, key):
    assert_refused(write({key: text("32")}), FileFormatError, f"key {key!r} is '32', a str; expected int")


@pytest.mark.parametrize("key", ["rope.scaling.type", "rope.scaling.factor", "attention.sliding_window", "expert_count", "logit_scale", ""])
def test_a_setting_that_is_not_known_is_not_ignored(write, key):
    message = f"{A}{key} = 2 is a setting this package does not implement"
    assert_refused(write({A + key: number(UINT32, 2)}), UnsupportedError, message)


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("vocab_size", number(UINT32, 10), FileFormatError, "vocab_size is 10, token_embd.weight has 9 rows"),
        ("vocab_size", number(UINT32, 0), FileFormatError, "vocab_size is 0"),
        ("rope.dimension_count", number(UINT32, 16), UnsupportedError, "rope.dimension_count is 16, only the head width 32 is supported"),
        ("rope.dimension_count", number(UINT32, 0), UnsupportedError, "rope.dimension_count is 0"),
        ("attention.value_length", number(UINT32, 64), UnsupportedError, "attention.value_length is 64"),
        ("attention.key_length", number(UINT32, 64), FileFormatError, "attn_sub_norm.weight has shape [128], expected [256]"),
        ("attention.key_length", number(UINT32, 33), ShapeError, "head width 33 is odd"),
        ("attention.key_length", number(UINT32, 0), ShapeError, "head_dim is 0"),
        ("attention.head_count", number(UINT32, 0), FileFormatError, "is no multiple of 0 = "),
        ("attention.head_count", number(UINT32, 3), FileFormatError, "128 = bitnet-b1.58.embedding_length is no multiple of 3"),
        ("attention.head_count", number(UINT32, 128), ShapeError, "head width 1 is odd"),
        ("attention.head_count", number(UINT32, 8), FileFormatError, "has shape"),
        ("attention.head_count_kv", number(UINT32, 3), ShapeError, "4 query heads cannot share 3 key-value heads evenly"),
        ("attention.head_count_kv", number(UINT32, 0), ShapeError, "kv_heads is 0, expected at least 1"),
        ("attention.head_count_kv", number(UINT32, 8), ShapeError, "4 query heads cannot share 8"),
        ("attention.head_count_kv", number(INT32, -2), ShapeError, "kv_heads is -2"),
        ("attention.head_count_kv", number(UINT32, 4), FileFormatError, "has shape [64, 128], expected [128, 128]"),
        ("attention.layer_norm_rms_epsilon", number(FLOAT32, 0), UnsupportedError, "eps is 0.0, expected a positive number"),
        ("attention.layer_norm_rms_epsilon", number(FLOAT32, nan), UnsupportedError, "eps is nan"),
        ("attention.layer_norm_rms_epsilon", number(FLOAT64, inf), UnsupportedError, "eps is inf"),
        ("attention.layer_norm_rms_epsilon", number(FLOAT32, -1e-5), UnsupportedError, "eps is -"),
        ("rope.freq_base", number(FLOAT32, 0), UnsupportedError, "rope_base is 0.0"),
        ("rope.freq_base", number(FLOAT32, nan), UnsupportedError, "rope_base is nan"),
        ("rope.freq_base", number(FLOAT32, -inf), UnsupportedError, "rope_base is -inf"),
        ("context_length", number(UINT32, 0), ShapeError, "context is 0"),
        ("block_count", number(UINT32, 0), ShapeError, "n_layers is 0"),
        ("block_count", number(INT32, -1), ShapeError, "n_layers is -1"),
        ("block_count", number(UINT32, 1), UnsupportedError, "tensor blk.1.attn_norm.weight has no place"),
        ("block_count", number(UINT32, 3), FileFormatError, "tensor blk.2.attn_norm.weight is missing"),
        ("block_count", number(UINT32, 4096), FileFormatError, "tensor blk.2.attn_norm.weight is missing"),
        ("block_count", number(UINT64, 2**64 - 1), UnsupportedError, "n_layers is 18446744073709551615, expected at most 4096"),
        ("embedding_length", number(UINT32, 256), FileFormatError, "has shape [9, 128], expected [9, 256]"),
        ("embedding_length", number(UINT32, 0), ShapeError, "width is 0"),
        ("feed_forward_length", number(UINT32, 128), FileFormatError, "tensor blk.0.ffn_sub_norm.weight has shape [256], expected [128]"),
        ("feed_forward_length", number(UINT64, 2**63), UnsupportedError, "ffn is 9223372036854775808, expected at most 524288"),
        ("feed_forward_length", number(UINT32, 2**19), FileFormatError, "expected [524288]"),
        ("feed_forward_length", number(UINT32, 2**19 + 1), UnsupportedError, "ffn is 524289, expected at most 524288"),
        ("embedding_length", number(UINT32, 2**19 + 128), UnsupportedError, "width is 524416, expected at most 524288"),
        ("attention.key_length", number(UINT32, 4098), UnsupportedError, "head_dim is 4098, expected at most 4096"),
        ("attention.head_count", number(UINT64, 2**60), FileFormatError, "is no multiple of 1152921504606846976"),
        ("context_length", number(UINT32, 2**20 + 1), UnsupportedError, "context is 1048577, expected at most 1048576"),
        ("context_length", number(UINT64, 2**64 - 1), UnsupportedError, "context is 18446744073709551615"),
        ("rope.freq_base", number(FLOAT32, 1e-9), UnsupportedError, "RoPE's angles reach "),
    ],
)
def test_settings_that_no_model_has(write, key, value, error, message):
    assert_refused(write({A + key: value}), error, message)


def test_many_wide_heads_are_too_wide_together(write):
    keys = {A + "attention.head_count": number(UINT32, 256), A + "attention.key_length": number(UINT32, 4096)}
    assert_refused(write(keys), UnsupportedError, "q_width is 1048576, expected at most 524288")


def test_the_longest_context_that_is_allowed(write):
    model = load(write({A + "context_length": number(UINT32, 2**20)}))
    assert model.config.context * model.rope_frequency.max() <= LARGEST_ANGLE
    angle = np.array([np.nextafter(LARGEST_ANGLE, 0.0), 2.0**20])
    cos, sin = np.array([cos_sin(a) for a in angle]).T
    np.testing.assert_allclose(cos, np.cos(angle), rtol=0, atol=2e-15)
    np.testing.assert_allclose(sin, np.sin(angle), rtol=0, atol=2e-15)


@pytest.mark.parametrize("sign", [1, -1])
def test_the_widest_ternary_matrix_does_not_overflow(sign):
    width, value = 2**19, np.int8(127 * sign)
    weights = packing.from_i2s(np.full(2 * width // 4, 0b10101010, np.uint8), 1.0, (2, width))  # nothing but +1
    for tokens in (1, 2, 3):
        q = np.full((tokens, width), value)
        out = cpu.ternary_matmul(q, np.ones(tokens, np.float32), weights.codes, np.float32(1), 2)
        np.testing.assert_array_equal(out, np.float32(width) * value)


def test_every_message_is_of_the_one_family(write):
    with pytest.raises(Error, match="supported"):
        load(write({"general.architecture": text("falcon")}))
    with pytest.raises(FileNotFoundError):
        load("not there.gguf")


# --- RoPE's frequencies and the ternary layout ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("base", [10000.0, 500000.0, 1e6, 1.0, 2.0, 0.5, float(np.float32(123.456))])
@pytest.mark.parametrize("width", [2, 6, 64, 128, 130, 256])
def test_rope_frequencies_are_powers_of_the_base(base, width):
    found = rope_frequencies(base, width)
    powers = base ** (-np.arange(0, width, 2) / width)
    assert found.dtype == np.float64
    assert found.shape == (width // 2,)
    assert found[0] == 1
    assert (np.abs(found - powers) <= np.spacing(powers) * (1 + abs(np.log(base)))).all()  # the exponent is rounded, too
    for i in range(0, width // 2, 7):  # f^K * base^2i is 1, to the roundings of f
        assert abs(Fraction(found[i]) ** width * Fraction(base) ** (2 * i) - 1) <= width * Fraction(1, 2**53) * Fraction(1001, 1000)


matrices = st.tuples(
    st.integers(1, 5) | st.sampled_from([15, 16, 17, 33]),
    st.integers(1, 400) | st.sampled_from([127, 128, 129, 255, 256, 257]),
    st.integers(0, 2**32 - 1),
)


@given(shape=matrices, scale=st.floats(0, 100, width=32))
def test_packed_is_the_released_layout(shape, scale):
    n, m, seed = shape
    matrix = np.random.default_rng(seed).integers(-1, 2, (n, m)).astype(np.int8)
    packed = packing.pack(matrix, scale)
    np.testing.assert_array_equal(packing.unpack(packed), matrix)
    assert packing.unpack(packed).dtype == np.int8
    assert (packed.shape, packed.scale) == ((n, m), np.float32(scale))
    blocks = -(-m // 128)
    assert packing.i2s_row_bytes(m) == 32 * blocks
    i2s = packing.to_i2s(packed)
    assert i2s.size == 32 * blocks * n + 32
    assert i2s[-32:-28].view("<f4")[0] == np.float32(scale)
    row, column = np.divmod(np.arange(n * blocks * 128), blocks * 128)
    element = column % 128
    byte = i2s[row * blocks * 32 + column // 128 * 32 + element % 32]
    codes = (byte >> (6 - 2 * (element // 32)) & 3).reshape(n, -1)
    np.testing.assert_array_equal(codes[:, :m], matrix + 1)
    assert (codes[:, m:] == 1).all()  # zero weights fill the last block
    again = packing.from_i2s(i2s, scale, (n, m))
    assert (again.shape, again.scale) == (packed.shape, packed.scale)
    np.testing.assert_array_equal(again.codes, packed.codes)


@given(shape=matrices)
def test_packed_rows_are_side_by_side(shape):
    """16 columns of 16 rows in 64 bytes: column c in byte 4 * row + c % 4 at bits 6 - 2 * (c // 4), and zero weights around the matrix."""
    n, m, seed = shape
    matrix = np.random.default_rng(seed).integers(-1, 2, (n, m)).astype(np.int8)
    codes = packing.pack(matrix, 1.0).codes
    groups, steps = -(-n // 16), -(-m // 16)
    row, column = np.divmod(np.arange(groups * 16 * steps * 16), steps * 16)
    byte = codes[(row // 16 * steps + column // 16) * 64 + row % 16 * 4 + column % 4]
    whole = np.zeros((groups * 16, steps * 16), np.int8)
    whole[:n, :m] = matrix
    np.testing.assert_array_equal((byte >> (6 - 2 * (column % 16 // 4)) & 3).reshape(whole.shape), whole + 1)
    assert codes.size == groups * steps * 64


def test_too_few_bytes_are_refused():
    with pytest.raises(ShapeError, match=r"shape \(2, 130\) has 127 bytes of I2_S codes, expected 128"):
        packing.from_i2s(np.zeros(127, np.uint8), 1.0, (2, 130))


def test_a_block_byte_by_byte():
    matrix = np.zeros((1, 128), np.int8)
    matrix[0, [0, 32, 64, 96]] = [1, -1, 1, -1]
    matrix[0, 31] = -1
    codes = packing.to_i2s(packing.pack(matrix, 1.0))
    assert codes[0] == 0b10_00_10_00
    assert codes[31] == 0b00_01_01_01
    assert (codes[1:31] == 0b01_01_01_01).all()
    assert codes[32:].tobytes() == np.float32(1).tobytes() + bytes(28)


@pytest.mark.parametrize(
    "matrix", [[[2]], [[-2, 0]], [[0.5]], [[nan]], [[1, 0], [0, 3]], [1, 0], 1, [[]], np.zeros((0, 4)), np.zeros((1, 1, 1))]
)
def test_only_ternary_matrices_can_be_packed(matrix):
    with pytest.raises(ShapeError, match="a ternary matrix has"):
        packing.pack(np.array(matrix), 1.0)


def test_packed_matrices_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        packing.pack(np.ones((1, 1)), 1.0).codes[0] = 0


def test_the_dense_form_is_what_the_file_says(write):
    model = dense_view(load(write(tensors={"token_embd.weight": bfloat16(table := floats(9, 128))})))
    assert model.token_embd.dtype == model.output_norm.dtype == np.float64
    np.testing.assert_array_equal(model.token_embd, widen.float32(bfloat16(table)))
    np.testing.assert_array_equal(model.layers[1].ffn_down.matrix, packing.unpack(TENSORS["blk.1.ffn_down.weight"]))
    assert model.layers[1].ffn_down.scale == float(TENSORS["blk.1.ffn_down.weight"].scale)
    assert model.config == CONFIG
