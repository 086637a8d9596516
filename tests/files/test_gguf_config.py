"""The keys of a GGUF file: each has its type and a value that a model may have, and one that is not known is refused by name."""

from dataclasses import replace

import numpy as np
import pytest
from family_models import assert_refused, drawn
from fuzzing.gguf_bytes import FLOAT32, UINT32, UINT64, number, numbers, text
from gguf_models import KEYS, OPTIONAL, A
from models import assert_same_bits

from bitnet_np.base.errors import FileFormatError, ShapeError, UnsupportedError
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.load import load
from bitnet_np.model.families import ARCHITECTURES
from bitnet_np.model.records import LongRope, Yarn
from bitnet_np.model.rope import rope_frequencies
from bitnet_np.testing.models import write_gguf

TOKENS = [[0, 22, 3, 3, 7, 1]]


@pytest.mark.parametrize("name", ["mamba", "LLAMA", "bitnet-b1.58 ", "BITNET-B1.58", ""])
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


@pytest.mark.parametrize(
    ("key", "value", "error", "message"),
    [
        ("vocab_size", number(UINT32, 10), FileFormatError, "vocab_size is 10, token_embd.weight has 9 rows"),
        ("rope.dimension_count", number(UINT32, 16), UnsupportedError, "rope.dimension_count is 16, only the head width 32 is supported"),
        ("rope.dimension_count", number(UINT32, 0), UnsupportedError, "rope.dimension_count is 0"),
        ("attention.value_length", number(UINT32, 64), UnsupportedError, "attention.value_length is 64"),
        ("attention.key_length", number(UINT32, 64), FileFormatError, "attn_sub_norm.weight has shape [128], expected [256]"),
        ("attention.key_length", number(UINT32, 33), ShapeError, "head width 33 is odd"),
        ("attention.head_count", number(UINT32, 0), FileFormatError, "is no multiple of 0 = "),
        ("attention.head_count", number(UINT32, 3), FileFormatError, "128 = bitnet-b1.58.embedding_length is no multiple of 3"),
        ("attention.head_count_kv", number(UINT32, 3), ShapeError, "4 query heads cannot share 3 key-value heads evenly"),
        ("rope.freq_base", number(FLOAT32, 0), UnsupportedError, "rope_base is 0.0"),
        ("block_count", number(UINT32, 0), ShapeError, "n_layers is 0"),
        ("block_count", number(UINT64, 2**64 - 1), UnsupportedError, "n_layers is 18446744073709551615, expected at most 4096"),
        ("feed_forward_length", number(UINT32, 2**19), FileFormatError, "expected [524288]"),
        ("embedding_length", number(UINT32, 2**19 + 128), UnsupportedError, "width is 524416, expected at most 524288"),
    ],
)
def test_settings_that_no_model_has(write, key, value, error, message):
    assert_refused(write({A + key: value}), error, message)


def test_many_wide_heads_are_too_wide_together(write):
    keys = {A + "attention.head_count": number(UINT32, 256), A + "attention.key_length": number(UINT32, 4096)}
    assert_refused(write(keys), UnsupportedError, "q_width is 1048576, expected at most 524288")


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
        ({"rope.scaling.type": "", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 0.0}, 1.0),
    ],
)
def test_linear_scaling_divides_positions(written, keys, scaling):
    model = drawn("qwen2")
    found = load(written(model, **keys))
    assert found.config.rope_scaling == scaling
    np.testing.assert_array_equal(found.rope_frequency, model.rope_frequency / scaling)


NEUTRAL = {"attention.causal": True, "attention.clamp_kqv": 0.0, "attention.sliding_window": 0, "use_parallel_residual": True}
NEUTRAL |= {"expert_count": 0, "expert_used_count": 0, "expert_gating_func": 1, "pooling_type": 3}
NEUTRAL |= {"rope.scaling.attn_factor": 1.0, "rope.scaling.finetuned": True, "rope.scaling.original_context_length": 8192}
NEUTRAL |= {"general.file_type": 7, "split.count": 1}


def test_keys_that_change_nothing_pass(written):
    model = drawn("qwen3")
    assert_same_bits(forward_full(load(written(model, **NEUTRAL)), TOKENS), forward_full(model, TOKENS))


@pytest.mark.parametrize(("number", "pooling"), [(0, "none"), (1, "mean"), (2, "cls"), (3, "last")])
def test_pooling_is_kept(written, number, pooling):
    """By llama.cpp's numbers. It changes no logits."""
    model = drawn("qwen3")
    found = load(written(model, pooling_type=number))
    assert found.config == replace(model.config, pooling=pooling)
    again = written(found)
    assert load(again).config == found.config
    assert open_gguf(again).metadata.get("qwen3.pooling_type") == (number or None)


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
    found = load(written(drawn("llama"), **keys))
    assert (found.config.window, found.config.window_layers) == expected
    assert load(written(found)).config == found.config


@pytest.mark.parametrize("family", ["gemma2", "gemma3", "olmo2"])
@pytest.mark.parametrize(("period", "without"), [(2, (1, 3)), (3, (2,)), (4, (3,)), (9, ()), (0, ())])
def test_a_number_says_how_many_layers_there_are_to_one_without_the_window(written, family, period, without):
    """As llama.cpp reads it, of 5 layers; written again, the file says the same."""
    keys = {"attention.sliding_window": 7, "attention.sliding_window_pattern": period}
    found = load(written(drawn(family, n_layers=5), **keys))
    layers = tuple(n for n in range(5) if n not in without)
    assert (found.config.window, found.config.window_layers) == (7, layers if without else None)
    assert found.config.local_layers == (() if family == "gemma2" else layers)
    assert load(written(found)).config == found.config


@pytest.mark.parametrize(
    ("keys", "yarn", "magnitude"),
    [
        ({}, Yarn(4.0, 64), 1.138629436111989),
        ({"original_context_length": 16, "attn_factor": 1.5}, Yarn(4.0, 16), 1.5 * 1.138629436111989),
        ({"original_context_length": 16, "yarn_beta_fast": 8.0, "yarn_beta_slow": 2.0}, Yarn(4.0, 16, 8.0, 2.0), 1.138629436111989),
        ({"yarn_log_multiplier": 1.0}, Yarn(4.0, 64), 1.0),
        ({"yarn_attn_factor": 1.5}, Yarn(4.0, 64), 1.138629436111989),
    ],
)
def test_yarn(written, tmp_path, keys, yarn, magnitude):
    """Written again, the file says the same."""
    path = written(
        drawn("qwen3", context=64), **{f"rope.scaling.{key}": value for key, value in ({"type": "yarn", "factor": 4.0} | keys).items()}
    )
    model = load(path)
    assert (model.config.yarn, model.config.rope_magnitude) == (yarn, magnitude)
    write_gguf(tmp_path / "again.gguf", model)
    again = load(tmp_path / "again.gguf")
    assert again.config.yarn == yarn
    assert np.float32(again.config.rope_magnitude) == np.float32(magnitude)
    np.testing.assert_array_equal(again.rope_frequency, model.rope_frequency)


def test_longrope(tmp_path):
    """The context chooses the list, and must be declared; written again, the file says the same."""
    drawn_lists = LongRope(16, (1.0, 1.5, 2.0), (2.0, 4.0, 8.0))
    for path, model in ((tmp_path / "a", drawn("phi3", rope_width=6, longrope=drawn_lists, rope_magnitude=1.25)), (tmp_path / "b", None)):
        if model is None:
            model = load(tmp_path / "a", overrides={"context": 17})
        write_gguf(path, model)
        assert_refused(
            path, UnsupportedError, "RoPE is scaled by longrope, whose frequencies are others in contexts of more than 16 tokens"
        )
        for context, factors in ((16, drawn_lists.short), (17, drawn_lists.long)):
            c = (found := load(path, overrides={"context": context})).config
            assert (c.longrope, c.rope_magnitude, tuple(found.rope_factors)) == (drawn_lists, 1.25, factors)
            np.testing.assert_array_equal(found.rope_frequency, rope_frequencies(c.rope_base, 6, found.rope_factors))
    same = LongRope(16, drawn_lists.long, drawn_lists.long)
    write_gguf(tmp_path / "same", drawn("phi3", rope_width=6, longrope=same))
    assert load(tmp_path / "same").config.longrope == same


OTHERS = {"attention.causal": False, "attention.clamp_kqv": 8.0, "attention.scale": 0.5, "attention.layer_norm_epsilon": 0.25}
OTHERS |= {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.0, "embedding_scale": 2.0, "logit_scale": 2.0}
OTHERS |= {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope.scaling.attn_factor": 1.5, "": 2}
OTHERS |= {"rope.scaling.yarn_log_multiplier": 0.5}


SCALING = "rope.scaling.type"
WINDOW, PATTERN, ROTATED = "attention.sliding_window", "attention.sliding_window_pattern", "rope.dimension_count"
YARN = {SCALING: "yarn", "rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("family", "keys", "error", "message"),
    [
        ("qwen3", {"expert_count": [0]}, UnsupportedError, f"qwen3.expert_count = {np.array([0], np.int32)!r} is a setting"),
        ("qwen3", {"expert_count": [0, 0]}, UnsupportedError, f"qwen3.expert_count = {np.array([0, 0], np.int32)!r} is a setting"),
        ("qwen3", {"pooling_type": 4}, UnsupportedError, "qwen3.pooling_type is 4, supported are 0 (none), 1 (mean), 2 (cls), 3 (last)"),
        ("gemma3", {PATTERN: 1}, UnsupportedError, "is 1, supported are numbers from 2 on, 0 "),
        ("llama", {PATTERN: [True, False]}, FileFormatError, "has layers with a window, but attention.sliding_window is missing"),
        ("llama", {PATTERN: [True]}, UnsupportedError, "sliding_window_pattern is array([ True]), supported are 2"),
        ("llama", {PATTERN: [1, 0]}, UnsupportedError, "supported are 2 bools, one for each layer"),
        ("llama", {PATTERN: 2}, FileFormatError, "expected ndarray"),
        ("llama", {WINDOW: [8]}, FileFormatError, "expected int"),
        ("llama", {WINDOW: (1 << 20) + 1}, ShapeError, "window is 1048577, expected 1 to 1048576"),
        ("gptneox", {WINDOW: 8}, UnsupportedError, "gptneox.attention.sliding_window = 8 is a setting"),
        ("qwen2", {SCALING: "longrope"}, UnsupportedError, "qwen2.rope.scaling.type is 'longrope', supported are none, linear and yarn"),
        ("qwen2", {SCALING: "dynamic"}, UnsupportedError, "qwen2.rope.scaling.type is 'dynamic', supported are none, linear and yarn"),
        ("phi3", {SCALING: "longrope"}, UnsupportedError, "with tensors rope_factors_short.weight and rope_factors_long.weight, longrope"),
        ("qwen3", YARN | {"rope.scaling.yarn_log_multiplier": -10.0}, UnsupportedError, "magnitude is"),
        ("llama", {"split.count": 3}, FileFormatError, "key 'split.no' is missing"),
        # a list of all layers with a window would take more memory than there is
        ("gemma2", {WINDOW: 4, "block_count": 2**32 - 1}, UnsupportedError, "n_layers is 4294967295, expected at most 4096"),
        ("llama", {ROTATED: 32}, UnsupportedError, "rope.dimension_count is 32, only the head width 64"),
        ("gpt2", {ROTATED: 32}, UnsupportedError, "gpt2.rope.dimension_count = 32 is a setting"),
        *(("llama", {key: value}, UnsupportedError, f"llama.{key} = {value} is a setting this package") for key, value in OTHERS.items()),
        *(("gptneox", {ROTATED: wide}, ShapeError, f"{wide} numbers of each head are rotated") for wide in (0, 3, 66, 128)),
    ],
)
def test_settings_of_a_family_that_cannot_be(written, family, keys, error, message):
    assert_refused(written(drawn(family), **keys), error, message)
