"""Settings that stand instead of a file's: which may, what they do, and that they are told."""

import re
from dataclasses import replace

import numpy as np
import pytest
from models import assert_same_bits, random_model, random_tokens

from bitnet_np import KVCache, forward, forward_full, generate, load
from bitnet_np.base.errors import ContextLimitError, OptionError
from bitnet_np.cli import main as cli
from bitnet_np.files.overrides import BEYOND, OVERRIDABLE
from bitnet_np.model.records import LONGEST_CONTEXT
from bitnet_np.model.rope import rope_frequencies
from bitnet_np.testing.models import write_gguf

SMALL = {"width": 128, "ffn": 128, "heads": 2, "kv_heads": 1, "head_dim": 64, "vocab": 30, "context": 12}
SMALL |= {"eps": float(np.float32(1e-5))}


@pytest.fixture
def path(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(0, family="llama", **SMALL))
    return tmp_path / "model.gguf"


def test_beyond_its_context_a_model_goes_on_where_that_is_asked_for(path):
    short, long = load(path), load(path, overrides=BEYOND)
    tokens = random_tokens(np.random.default_rng(0), short, 1, 40)
    assert long.config == replace(short.config, context=LONGEST_CONTEXT)
    assert_same_bits(forward_full(short, tokens[:, :12]), forward_full(long, tokens[:, :12]))
    for call in (
        lambda model: forward_full(model, tokens[:, :13]),
        lambda model: forward(model, tokens[:, :13], KVCache(model.config, capacity=40)),
        lambda model: generate(model, [1, 2, 3], 10),
    ):
        call(long)
        with pytest.raises(ContextLimitError, match="the model's context"):
            call(short)


def test_learned_positions_end_where_they_end(tmp_path):
    write_gguf(tmp_path / "model.gguf", random_model(0, family="gpt2", **SMALL | {"kv_heads": 2}))
    with pytest.raises(OptionError, match=f"the model has learned 12 positions, not {LONGEST_CONTEXT}"):
        load(tmp_path / "model.gguf", overrides=BEYOND)
    assert load(tmp_path / "model.gguf", overrides={"context": 5}).config.context == 5


@pytest.mark.parametrize(
    "change", [{"eps": 0.25}, {"rope_base": 500.0}, {"rope_scaling": 4.0}, {"window": 3}, {"context": 10}, {"pooling": "cls"}]
)
def test_an_override_is_as_if_the_file_said_so(tmp_path, path, change):
    model = random_model(0, family="llama", **SMALL)
    config = replace(model.config, **change)
    frequency = rope_frequencies(config.rope_base, 64, model.rope_factors, config.rope_scaling)
    write_gguf(tmp_path / "changed.gguf", replace(model, config=config, rope_frequency=frequency))
    found, expected = load(path, overrides=change), load(tmp_path / "changed.gguf")
    assert found.config == expected.config
    np.testing.assert_array_equal(found.rope_frequency, expected.rope_frequency)
    tokens = random_tokens(np.random.default_rng(0), model, 1, 10)
    assert_same_bits(forward_full(found, tokens), forward_full(expected, tokens))
    assert (not {"context", "pooling"}.isdisjoint(change)) == (forward_full(found, tokens) == forward_full(load(path), tokens)).all()


def test_everything_that_may_be_overridden_is_tried():
    assert set(OVERRIDABLE) == {"eps", "rope_base", "rope_scaling", "window", "context", "pooling"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eps"], "overrides is ['eps'], expected a mapping of some of context, eps"),
        (np.zeros(2), "overrides is array([0., 0.]), expected a mapping"),
        ({"width": 64}, "a name of overrides is 'width', expected one of context, eps, "),
        ({"context": 12.0}, "overrides has context = 12.0, expected int"),
        ({"eps": 1}, "overrides has eps = 1, expected float"),
        ({"eps": float("nan")}, "eps is nan, expected a positive number"),
        ({"context": 0}, "context is 0, expected at least 1"),
        ({"context": LONGEST_CONTEXT + 1}, f"expected at most {LONGEST_CONTEXT}"),
        ({"window": 0}, "window is 0, expected 1 to 1048576"),
        ({"pooling": "max"}, "pooling is 'max', expected one of none, mean, cls, last"),
    ],
)
def test_overrides_that_cannot_be(path, overrides, message):
    with pytest.raises(OptionError, match=re.escape(message)):
        load(path, overrides=overrides)


def run(capsys, *arguments):
    code = cli.main([str(argument) for argument in arguments])
    return code, *capsys.readouterr()


def test_the_command_line_tells_what_it_overrides(path, capsys):
    thirteen = ",".join(["1"] * 13)
    code, _, error = run(capsys, "logits", path, "--tokens", thirteen)
    assert (code, "13 positions, the model's context is 12" in error) == (2, True)
    code, _, error = run(capsys, "logits", path, "--tokens", thirteen, "--allow-beyond-context", "--override", "rope_base=500")
    assert code == 0
    assert "context is 1048576, the file says 12\n" in error
    assert "rope_base is 500.0, the file says 10000.0\n" in error
    code, _, error = run(capsys, "generate", path, "--tokens", "1,2", "-n", "20", "--allow-beyond-context")
    assert (code, "context is 1048576, the file says 12" in error) == (0, True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--override", "width=3"], "--override is 'width=3', expected one of context=int, eps=float"),
        (["--override", "window=x"], "--override is 'window=x'"),
        (["--override", "eps=1", "--override", "eps=2"], "--override eps=2: eps is set already"),
        (["--allow-beyond-context", "--override", "context=9"], "--override context=9: context is set already"),
        (["--override", "window=0"], "window is 0"),
    ],
)
def test_overrides_that_the_command_line_refuses(path, capsys, options, message):
    code, out, error = run(capsys, "logits", path, "--tokens", "1", *options)
    assert (code, out, message in error) == (2, "", True)
