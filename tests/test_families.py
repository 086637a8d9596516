"""Families: files of every architecture are the models that were written, fused or split, and what is not supported is refused by name."""

import json
import re

import gguf
import numpy as np
import pytest
from family_models import drawn
from models import assert_same_bits

from bitnet_np import packing, spec
from bitnet_np.cli import main as cli
from bitnet_np.dense import dense_view
from bitnet_np.errors import FileFormatError, NonFiniteError, ShapeError, UnsupportedError
from bitnet_np.families import ARCHITECTURES, FAMILIES
from bitnet_np.files.load import load
from bitnet_np.kernels.block_formats import FORMATS
from bitnet_np.model import Blocks, Config, Linear, Ternary
from bitnet_np.rope import rope_frequencies
from bitnet_np.testing import write_gguf
from bitnet_np.transformer import EXACT, LLAMA_CPP, forward_full

TOKENS = [[0, 22, 3, 3, 7, 1]]
TYPES = ["ternary", "float32", "float16", "bfloat16", "Q8_0", "Q4_K", "TQ2_0"]


@pytest.fixture
def written(tmp_path):
    def write(model, fused=False, **keys):
        """A file of a model, with other keys of its architecture; None leaves one out."""
        path = tmp_path / f"{len(list(tmp_path.iterdir()))}.gguf"
        write_gguf(path, model, fused=fused)
        if keys:
            rewrite(path, model.config.architecture, keys)
        return path

    return write


def rewrite(path, architecture, keys):
    reader = gguf.GGUFReader(path)
    writer = gguf.GGUFWriter(path.with_suffix(".new"), architecture)
    kinds = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
    told = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")} | {
        name if name.startswith(("general.", "split.")) else f"{architecture}.{name}": value for name, value in keys.items()
    }
    for name, value in told.items():
        if value is not None and name != "general.architecture":
            kinds[type(value)](name, value)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    for write in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        write()
    path.with_suffix(".new").replace(path)


def assert_refused(path, error, message):
    with pytest.raises(error, match=re.escape(message)) as caught:
        load(path)
    assert type(caught.value) is error
    assert str(caught.value).startswith(f"{path}: ")


# --- sound files ----------------------------------------------------------------------------------------------------------------------


def one_scale(model):
    """With ternary matrices of one scale in each layer's q, k and v, as a fused tensor has it."""
    for layer in model.layers:
        for name in ("attn_k", "attn_v"):
            old = getattr(layer, name)
            weights = packing.pack(packing.unpack(old.weights), layer.attn_q.weights.scale)
            object.__setattr__(layer, name, Linear(weights, old.bias, layer.attn_q.scale, old.norm, old.norm_eps))
    return model


@pytest.mark.parametrize("family", ARCHITECTURES)
@pytest.mark.parametrize("weights", TYPES)
def test_a_file_is_the_model_that_was_written_fused_or_split(written, family, weights):
    if FAMILIES[family].ternary and weights not in ("ternary", "TQ2_0"):
        assert_refused(written(drawn(family, weights)), UnsupportedError, "supported here: I2_S, TQ1_0, TQ2_0")
        return
    model = drawn(family, weights)
    model = one_scale(model) if weights == "ternary" else model
    if FAMILIES[family].scales:
        for layer in model.layers:  # a fused tensor has no scale of its own
            for name in ("attn_q", "attn_k", "attn_v"):
                old = getattr(layer, name)
                object.__setattr__(layer, name, Linear(old.weights, old.bias))
    split, fused = load(written(model)), load(written(model, fused=True))
    assert split.config == fused.config == model.config
    for dialect in (EXACT, LLAMA_CPP):
        expected = forward_full(model, TOKENS, dialect=dialect)
        assert_same_bits(forward_full(split, TOKENS, dialect=dialect), expected)
        assert_same_bits(forward_full(fused, TOKENS, dialect=dialect), expected)


def test_fused_rows_stay_where_they_are_in_the_file(written):
    for weights in ("float16", "Q8_0"):
        layer = load(written(drawn("gpt2", weights), fused=True)).layers[0]
        parts = [getattr(layer, name).weights for name in ("attn_q", "attn_k", "attn_v")]
        arrays = [part.data if isinstance(part, Blocks) else part for part in parts]
        addresses = [array.ctypes.data for array in arrays]
        assert addresses == [addresses[0] + sum(a.nbytes for a in arrays[:i]) for i in range(3)]


def test_biases_and_scales_that_may_be_missing(written):
    model = drawn("llama")
    for layer in model.layers:
        object.__setattr__(layer, "attn_q", Linear(layer.attn_q.weights))
    bare = load(written(model))
    assert bare.layers[0].attn_q.bias is None
    assert bare.layers[0].attn_k.bias is not None
    assert_same_bits(forward_full(bare, TOKENS), forward_full(model, TOKENS))
    model = drawn("bitnet")
    object.__setattr__(model.layers[1], "ffn_down", Linear(model.layers[1].ffn_down.weights))
    assert load(written(model)).layers[1].ffn_down.scale is None


def test_a_scale_multiplies_the_product_before_the_bias():
    model = drawn("llama", "float32", n_layers=1)
    old = model.layers[0].attn_q
    object.__setattr__(model.layers[0], "attn_q", Linear(old.weights, old.bias, np.float32(2)))
    seen = {}
    forward_full(model, TOKENS, record=lambda name, n, array: seen.update({name: array.copy()}))
    expected = seen["attn_norm"].astype(np.float64) @ old.weights.T.astype(np.float64) * 2 + old.bias
    np.testing.assert_allclose(seen["Qcur"], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weights", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_take_int8_activations(written, weights):
    """With scales of their own for each 256 weights they are no I2_S matrix, but BitNet's arithmetic is the same."""
    model = load(written(drawn("bitnet", weights)))
    assert isinstance(model.layers[0].attn_q.weights, Blocks)
    dense = dense_view(model)
    assert dense.layers[0].attn_q.int8
    np.testing.assert_allclose(forward_full(model, TOKENS)[0], spec.forward(dense, TOKENS[0]), atol=3e-5)
    packed = load(written(drawn("bitnet", "ternary"))).layers[0].attn_q.weights
    assert isinstance(packed, Ternary)
    assert packed.blocks is None


# --- settings -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "scaling"),
    [
        ({}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, 1.0),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scale_linear": 2.0}, 2.0),
        ({"rope.scaling.type": "linear"}, 1.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, 1.0),
        ({"rope.scaling.factor": 0.0}, 1.0),
    ],
)
def test_linear_scaling_divides_positions(written, keys, scaling):
    model = drawn("qwen2")
    found = load(written(model, **keys))
    assert found.config.rope_scaling == scaling
    np.testing.assert_array_equal(found.rope_frequency, model.rope_frequency / scaling)


def test_factors_of_frequencies():
    model = drawn("llama")
    assert model.rope_factors.size == 32
    np.testing.assert_array_equal(model.rope_frequency, rope_frequencies(10000.0, 64) / model.rope_factors)
    with pytest.raises(ShapeError, match="3 factors"):
        rope_frequencies(10000.0, 64, np.ones(3, np.float32))


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_factors_are_positive(written, bad):
    model = drawn("llama")
    model.rope_factors.flags.writeable = True
    model.rope_factors[5] = bad
    assert_refused(written(model), FileFormatError, "tensor rope_freqs.weight has the value")
    model.rope_factors[5] = np.nan
    path = written(model)
    assert_refused(path, NonFiniteError, "tensor rope_freqs.weight has NaN")
    with pytest.raises(FileFormatError, match=r"tensor rope_freqs\.weight has the value nan"):
        load(path, allow_nan=True)  # angles must be numbers all the same


@pytest.mark.parametrize("factor", [1e-6, 1e-30])
def test_angles_stay_where_cosines_are_exact(written, factor):
    model = drawn("llama")
    model.rope_factors.flags.writeable = True
    model.rope_factors[0] = factor
    assert_refused(written(model), UnsupportedError, "RoPE's angles reach ")


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "TQ1_0", "TQ2_0"])
def test_nan_in_blocks_is_found_and_may_be_allowed(written, kind):
    model = drawn("llama", kind)
    blocks = model.layers[1].ffn_up.weights
    blocks = blocks.blocks if isinstance(blocks, Ternary) else blocks
    blocks.data.flags.writeable = True
    blocks.data.view(FORMATS[kind].layout)["d"][7, 0] = 0x7E00
    path = written(model)
    assert_refused(path, NonFiniteError, "tensor blk.1.ffn_up.weight has NaN or infinity in it")
    loaded = load(path, allow_nan=True)
    np.testing.assert_array_equal(loaded.layers[1].ffn_up.weights.data, blocks.data)


NEUTRAL = {
    "attention.causal": True,
    "attention.clamp_kqv": 0.0,
    "attention.sliding_window": 0,
    "expert_count": 0,
    "expert_used_count": 0,
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.finetuned": True,
    "rope.scaling.original_context_length": 8192,
    "pooling_type": 3,
    "general.file_type": 7,
    "split.count": 1,
}


def test_keys_that_change_nothing_pass(written):
    model = drawn("qwen3")
    assert_same_bits(forward_full(load(written(model, **NEUTRAL)), TOKENS), forward_full(model, TOKENS))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention.causal", False),
        ("attention.clamp_kqv", 8.0),
        ("expert_count", 8),
        ("expert_used_count", 2),
        ("rope.scaling.attn_factor", 1.2),
        ("attn_logit_softcapping", 50.0),
        ("final_logit_softcapping", 30.0),
        ("attention.scale", 0.1),
        ("logit_scale", 2.0),
        ("embedding_scale", 2.0),
        ("rope.scaling.yarn_log_multiplier", 0.1),
        ("attention.layer_norm_epsilon", 1e-5),
        ("use_parallel_residual", True),
    ],
)
def test_settings_that_are_not_implemented_are_refused_by_name(written, key, value):
    path = written(drawn("llama"), **{key: value})
    shown = repr(float(np.float32(value))) if isinstance(value, float) else repr(value)
    assert_refused(path, UnsupportedError, f"llama.{key} = {shown} is a setting this package does not implement")


@pytest.mark.parametrize("value", [[0], [0, 0], [8]])
def test_an_array_is_no_neutral_number(written, value):
    path = written(drawn("llama"), expert_count=value)
    assert_refused(path, UnsupportedError, f"llama.expert_count = {np.array(value, np.int32)!r} is a setting")


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("layers", [None, (1,)])
def test_windows_are_written_and_read(written, family, layers):
    model = drawn(family, window=3, window_layers=layers)
    found = load(written(model))
    assert (found.config.window, found.config.window_layers) == (3, layers)
    assert_same_bits(forward_full(found, TOKENS), forward_full(model, TOKENS))
    assert (forward_full(found, TOKENS) != forward_full(drawn(family), TOKENS)).any()


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, (None, None)),
        ({"attention.sliding_window": 7}, (7, None)),
        ({"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, True]}, (7, None)),
        ({"attention.sliding_window": 7, "attention.sliding_window_pattern": [True, False]}, (7, (0,))),
        ({"attention.sliding_window": 7, "attention.sliding_window_pattern": [False, False]}, (None, None)),
        ({"attention.sliding_window": 0, "attention.sliding_window_pattern": [False, False]}, (None, None)),
    ],
)
def test_which_layers_a_files_window_is_for(written, keys, expected):
    config = load(written(drawn("llama"), **keys)).config
    assert (config.window, config.window_layers) == expected


@pytest.mark.parametrize(
    ("family", "keys", "error", "message"),
    [
        (
            "llama",
            {"attention.sliding_window_pattern": [True, False]},
            FileFormatError,
            "has layers with a window, but attention.sliding_window is missing",
        ),
        (
            "llama",
            {"attention.sliding_window_pattern": [True]},
            UnsupportedError,
            "sliding_window_pattern is array([ True]), supported are 2",
        ),
        ("llama", {"attention.sliding_window_pattern": [1, 0]}, UnsupportedError, "supported are 2 bools, one for each layer"),
        ("llama", {"attention.sliding_window_pattern": 2}, FileFormatError, "expected ndarray"),
        ("llama", {"attention.sliding_window": [8]}, FileFormatError, "expected int"),
        ("llama", {"attention.sliding_window": (1 << 20) + 1}, ShapeError, "window is 1048577, expected 1 to 1048576"),
        ("gptneox", {"attention.sliding_window": 8}, UnsupportedError, "gptneox.attention.sliding_window = 8 is a setting"),
    ],
)
def test_windows_that_cannot_be(written, family, keys, error, message):
    assert_refused(written(drawn(family), **keys), error, message)


def test_a_window_that_no_file_can_say_is_refused(tmp_path):
    with pytest.raises(UnsupportedError, match=r"window is 3, and a GGUF file of architecture bitnet-b1\.58 has no place for it"):
        write_gguf(tmp_path / "a.gguf", drawn("bitnet-b1.58", window=3))


@pytest.mark.parametrize("kind", ["yarn", "longrope", "dynamic", ""])
def test_other_ways_to_scale_are_refused(written, kind):
    path = written(drawn("qwen2"), **{"rope.scaling.type": kind, "rope.scaling.factor": 4.0})
    if kind:
        assert_refused(path, UnsupportedError, f"qwen2.rope.scaling.type is '{kind}', supported are none and linear")
    else:
        assert load(path).config.rope_scaling == 4.0


def test_a_part_of_a_model_is_refused(written):
    assert_refused(written(drawn("llama"), **{"split.count": 3}), UnsupportedError, "split.count is 3")


@pytest.mark.parametrize(("family", "other"), [("llama", "bitnet"), ("gpt2", "gptneox"), ("qwen2", "llama")])
def test_partial_rotation_is_gptneox_s_only(written, family, other):
    del other
    path = written(drawn(family), **{"rope.dimension_count": 32})
    message = "gpt2.rope.dimension_count = 32 is a setting" if family == "gpt2" else "rope.dimension_count is 32, only the head width 64"
    assert_refused(path, UnsupportedError, message)


@pytest.mark.parametrize("wide", [0, 3, 66, 128])
def test_what_is_rotated_fits_a_head(written, wide):
    assert_refused(written(drawn("gptneox"), **{"rope.dimension_count": wide}), ShapeError, f"{wide} numbers of each head are rotated")


@pytest.mark.parametrize(
    ("family", "tensor"),
    [
        ("gptneox", "blk.1.attn_norm.bias"),
        ("gptneox", "blk.0.ffn_up.bias"),
        ("gptneox", "output_norm.bias"),
        ("qwen2", "blk.1.attn_v.bias"),
        ("qwen3", "blk.0.attn_k_norm.weight"),
        ("gpt2", "position_embd.weight"),
        ("bitnet", "blk.0.ffn_sub_norm.weight"),
        ("llama", "blk.0.ffn_gate.weight"),
    ],
)
def test_what_a_family_needs_must_be_there(tmp_path, family, tensor):
    path, shorter = tmp_path / "whole.gguf", tmp_path / "shorter.gguf"
    write_gguf(path, drawn(family, "TQ2_0" if family == "bitnet" else "float32"))
    reader = gguf.GGUFReader(path)
    assert tensor in {t.name for t in reader.tensors}
    rename = tensor.encode()
    shorter.write_bytes(path.read_bytes().replace(rename, rename[:-1] + b"X"))
    assert_refused(shorter, FileFormatError, f"tensor {tensor} is missing")


def test_no_bias_where_a_family_has_none(tmp_path):
    model = drawn("qwen3")
    old = model.layers[0].attn_q
    object.__setattr__(model.layers[0], "attn_q", Linear(old.weights, np.zeros(256, np.float32)))
    write_gguf(tmp_path / "q.gguf", model)
    assert_refused(tmp_path / "q.gguf", UnsupportedError, "tensor blk.0.attn_q.bias has no place in architecture qwen3")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation": "swish"}, "activation is 'swish'"),
        ({"norm": "batch"}, "norm is 'batch'"),
        ({"rope": "thirds"}, "rope is 'thirds'"),
        ({"rope_width": 3}, "3 numbers of each head"),
        ({"rope_width": 22}, "22 numbers of each head"),
        ({"rope": "none", "rope_width": 2}, "2 numbers of each head"),
        ({"rope_scaling": 0.0}, "rope_scaling is 0.0"),
    ],
)
def test_configs_that_no_model_has(changes, message):
    with pytest.raises((ShapeError, UnsupportedError), match=message):
        Config("llama", 9, 64, 40, 1, 64, 2, 1, 20, 1e-5, 10000.0, **changes)


def test_an_odd_head_needs_no_pairs_where_nothing_is_rotated():
    assert Config("gpt2", 9, 64, 40, 1, 64, 2, 2, 21, 1e-5, 10000.0, rope="none").rope_pairs == 0


# --- the commands ---------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", ["exact", "llama.cpp"])
@pytest.mark.parametrize("family", ARCHITECTURES)
def test_every_command_works_with_every_family(written, tmp_path, capsys, family, dialect):
    path, tokens = str(written(drawn(family))), "1,2,3,4,5"

    def run(*arguments):
        assert cli.main([*arguments]) == 0
        return capsys.readouterr().out

    config = json.loads(run("inspect", path, "--json"))["config"]
    assert (config["architecture"], config["activation"]) == (family, FAMILIES[family].config["activation"])
    assert "supported: yes" in run("inspect", path)
    how = ("--as", dialect)
    parallel, incremental = (
        json.loads(run("logits", path, "--tokens", tokens, "--json", *how, "--mode", mode))["sha256"]
        for mode in ("parallel", "incremental")
    )
    assert parallel == incremental
    new = run("generate", path, "--tokens", tokens, "-n", "3", *how).strip().split(",")
    assert len(new) == 3
    assert "perplexity" in run("nll", path, "--tokens", tokens, *how)
    trace = str(tmp_path / "trace.npz")
    run("trace", path, "--tokens", tokens, "--out", trace, "--scores", *how)
    assert "SAME_BITS" in run("check", path, "--tokens", tokens, "--theirs", trace, *how)
