"""`bitnet-np convert`: what is written is the same model to the bit, or nothing is written."""

import json
from dataclasses import replace
from pathlib import Path

import gguf
import hf_models
import numpy as np
import pytest
from family_models import drawn, half_scales
from models import assert_same_bits

import bitnet_np
from bitnet_np.cli import main as cli
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.gguf_writer import write_model
from bitnet_np.files.load import load
from bitnet_np.model import widen
from bitnet_np.model.families import ARCHITECTURES, FAMILIES
from bitnet_np.model.records import MATRICES, Blocks
from bitnet_np.testing.models import write_gguf

DATA = Path(__file__).parents[1] / "data"
PACKAGED = Path(bitnet_np.__file__).parent / "data" / "tiny.gguf"  # a file of the released form
TERNARY = ("I2_S", "TQ1_0", "TQ2_0")


@pytest.fixture
def run(capsys):
    """Runs a command that must end with `code`. Returns what it says."""

    def run(*arguments, code=0):
        assert cli.main([str(argument) for argument in arguments]) == code
        return "".join(capsys.readouterr())

    return run


def tensor_bytes(path):
    return {name: tensor.data.tobytes() for name, tensor in open_gguf(path).tensors.items()}


@pytest.fixture
def digest(run):
    return lambda path: json.loads(run("logits", path, "--tokens", "1,2,3,4,5", "--json"))["sha256"]


def test_the_released_form_is_kept_to_the_byte(run, tmp_path):
    """Keys, their types and order, tensors, their order, alignment and padding."""
    assert run("convert", PACKAGED, tmp_path / "out.gguf") == f"{tmp_path}/out.gguf: 886,720 bytes, bitnet-b1.58\n"
    assert (tmp_path / "out.gguf").read_bytes() == PACKAGED.read_bytes()
    said = json.loads(run("convert", PACKAGED, tmp_path / "out.gguf", "--force", "--json"))
    assert said == {"out": f"{tmp_path}/out.gguf", "bytes": 886720, "architecture": "bitnet-b1.58", "permuted": False}


@pytest.mark.parametrize(
    ("architecture", "kind"),
    [
        (name, kind)
        for name in ARCHITECTURES
        for kind in ((*TERNARY, "F16", "F32") if name in ("bitnet-b1.58", "llama", "qwen3moe") else ("TQ1_0", "F16"))
        if kind in TERNARY or not FAMILIES[name].ternary
    ],
)
def test_converted_and_loaded_gives_the_same_bits(run, digest, tmp_path, architecture, kind):
    ternary = kind in TERNARY
    weights = "ternary" if ternary else "float16" if kind == "F16" else "bfloat16"
    source, out = tmp_path / "in.gguf", tmp_path / "out.gguf"
    write_gguf(source, half_scales(drawn(architecture, weights)))
    run("convert", source, out, "--type", kind)
    found = open_gguf(out)
    assert {t.type.name for name, t in found.tensors.items() if len(t.shape) > 1 and name.startswith("blk.") and "_inp." not in name} == {
        kind
    }
    assert digest(out) == digest(source)
    before, after = load(source).config, load(out).config
    assert after == before
    # and back again
    if ternary:
        run("convert", out, tmp_path / "back.gguf", "--type", "I2_S")
        assert tensor_bytes(tmp_path / "back.gguf") == tensor_bytes(source)


@pytest.mark.parametrize("name", ["llama_q8_0", "llama_lq_q4_k_m"])
def test_blocks_as_float32_give_the_same_bits(run, digest, tmp_path, name):
    source = DATA / "llamacpp" / f"{name}.gguf"
    for options in (["--type", "F32"], ["--type", "F32", "--head", "F32"], []):
        run("convert", source, tmp_path / "out.gguf", *options, "--force")
        assert digest(tmp_path / "out.gguf") == digest(source)


@pytest.mark.parametrize("name", ["qwen2_linear", "qwen3_wide_heads", "gpt2", "qwen2_moe", "qwen3_moe"])
def test_folders_give_the_same_bits(run, digest, tmp_path, name):
    folder = hf_models.write_folder(tmp_path / "in", *hf_models.recorded_folder(name))
    run("convert", folder, tmp_path / "out.gguf")
    assert digest(tmp_path / "out.gguf") == digest(folder)
    # Their norm's epsilon is the nearest float32 there. The recorded file was made otherwise.
    assert tensor_bytes(tmp_path / "out.gguf") == tensor_bytes(DATA / "hf_families" / f"{name}.gguf")


@pytest.mark.parametrize("kind", [None, *TERNARY])
def test_a_bitnet_folder_becomes_a_file_of_the_released_form(run, digest, tmp_path, kind):
    folder, drawn_model = hf_models.bitnet_folder(tmp_path / "in")
    assert_same_bits(forward_full(load(folder), [[1, 2, 3]]), forward_full(drawn_model, [[1, 2, 3]]))
    out = tmp_path / "out.gguf"
    run("convert", folder, out, *(["--type", kind] if kind else []), "--head", "F16", "--allow-rounding")
    again = open_gguf(out)
    released = [(name, t.type.name) for name, t in open_gguf(PACKAGED).tensors.items() if "blk.2." not in name]
    told = [(name, t.type.name.replace(kind or "I2_S", "I2_S")) for name, t in again.tensors.items()]
    assert told == released
    assert again.metadata["general.file_type"] == {"TQ1_0": 36, "TQ2_0": 37}.get(kind, 40)
    run("convert", folder, out, *(["--type", kind] if kind else []), "--force")
    assert digest(out) == digest(folder)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_a_scale_becomes_the_nearest_float16_where_that_is_allowed(run, tmp_path, kind):
    out = tmp_path / "out.gguf"
    said = run("convert", PACKAGED, out, "--type", kind, code=2)
    assert "those of TQ" in said
    assert "float16 numbers above 0: --allow-rounding lets it change" in said
    said = run("convert", PACKAGED, out, "--type", kind, "--allow-rounding")
    assert "logits of 32 random tokens move by at most 0.255 (NMSE 0.0005), and at 97% of the positions the same token stays first" in said
    before, after = load(PACKAGED), load(out)
    for one, other in zip(before.layers, after.layers, strict=True):
        for name in MATRICES:
            exact, rounded = getattr(one, name).weights, getattr(other, name).weights
            assert rounded.scale == np.float32(np.float16(exact.scale)) != exact.scale
            np.testing.assert_array_equal(rounded.codes, exact.codes)
    moved = json.loads(run("convert", PACKAGED, out, "--type", kind, "--allow-rounding", "--force", "--json"))["rounding"]
    ids = np.random.default_rng(0).integers(0, before.config.vocab, (1, 32))
    assert moved["max_error"] == np.abs(forward_full(before, ids) - forward_full(after, ids)).max() > 0
    assert "rounding changed no bit of the logits" in run("convert", out, tmp_path / "again.gguf", "--allow-rounding")


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_a_scale_that_no_float16_is_near_stays_refused(run, tmp_path, scale):
    model = drawn("bitnet", "ternary")
    layer = model.layers[0]
    weights = replace(layer.ffn_up.weights, scale=np.float32(scale))
    changed = replace(layer, ffn_up=replace(layer.ffn_up, weights=weights))
    write_gguf(tmp_path / "in.gguf", replace(model, layers=(changed, *model.layers[1:])))
    said = run("convert", tmp_path / "in.gguf", tmp_path / "out.gguf", "--type", "TQ2_0", "--allow-rounding", code=2)
    assert f"tensor blk.0.ffn_up.weight has the scale {np.float32(scale)}, and those of TQ2_0 are float16 numbers above 0\n" in said


@pytest.mark.parametrize(("kind", "other"), [("TQ1_0", "TQ2_0"), ("TQ2_0", "TQ1_0")])
def test_ternary_blocks_of_several_scales_keep_them(run, digest, tmp_path, kind, other):
    write_gguf(tmp_path / "in.gguf", drawn("llama", kind))
    assert all(isinstance(layer.attn_q.weights, Blocks) for layer in load(tmp_path / "in.gguf").layers)
    run("convert", tmp_path / "in.gguf", tmp_path / "out.gguf", "--type", other)
    assert {layer.attn_q.weights.type.name for layer in load(tmp_path / "out.gguf").layers} == {other}
    assert digest(tmp_path / "out.gguf") == digest(tmp_path / "in.gguf")
    said = run("convert", tmp_path / "in.gguf", tmp_path / "i2s.gguf", "--type", "I2_S", "--allow-rounding", code=2)
    assert "it cannot be I2_S without loss" in said


def test_llamas_halves_become_adjacent(run, tmp_path):
    """Every weight is the recorded file's; sums of q . k are in another order, so logits agree to rounding."""
    folder = hf_models.write_folder(tmp_path / "in", *hf_models.recorded_folder("llama_llama3_biases"))
    assert "rows of queries and keys are permuted" in run("convert", folder, tmp_path / "out.gguf")
    assert tensor_bytes(tmp_path / "out.gguf") == tensor_bytes(DATA / "hf_families" / "llama_llama3_biases.gguf")
    a, b = (forward_full(load(path), [[1, 2, 3]]) for path in (folder, tmp_path / "out.gguf"))
    np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)
    run("convert", DATA / "hf" / "llama_plain_gqa_untied", tmp_path / "plain.gguf")


@pytest.mark.parametrize(
    ("source", "options", "message"),
    [
        ("bitnet_plain_mha_tied", [], "blk.0.ffn_down.weight is not ternary, but all matrices of a GGUF file of architecture bitnet-b1.58"),
        ("bitnet_autooff_gqa_tied", [], "blk.0.ffn_down.weight has rows of 160 weights, and those of I2_S are multiples of 128"),
        ("bitnet_autooff_gqa_tied", ["--type", "TQ1_0"], "rows of 160 weights, and those of TQ1_0 are multiples of 256"),
        ("bitnet_autooff_gqa_tied", ["--type", "F32"], "is ternary and takes int8 activations: as F32 it would be another model"),
        ("llama_bitlinear_rms_untied", [], "layer 0 ffn_down has a norm inside the linear"),
        ("llama_plain_gqa_untied", ["--type", "I2_S"], "is not -1, 0, +1 times one scale: it cannot be I2_S without loss"),
        ("llama_plain_gqa_untied", ["--type", "F16"], "which is none of F16's: --allow-rounding lets it change"),
    ],
)
def test_what_cannot_be_said_is_refused_and_nothing_is_written(run, tmp_path, source, options, message):
    said = run("convert", DATA / "hf" / source, tmp_path / "out.gguf", *options, code=2)
    assert message in said
    assert source in said
    assert not list(tmp_path.iterdir())


def test_rounding_is_to_nearest_and_must_be_allowed(run, tmp_path):
    source, out = DATA / "hf" / "llama_plain_gqa_untied", tmp_path / "out.gguf"
    run("convert", source, out, "--type", "F16", "--allow-rounding")
    a, b = load(source), load(out)
    wide = widen.float32(a.layers[0].ffn_up.weights)
    np.testing.assert_array_equal(b.layers[0].ffn_up.weights, wide.astype(np.float16))
    write_gguf(tmp_path / "f32.gguf", drawn("llama", "float32"))
    run("convert", tmp_path / "f32.gguf", out, "--head", "BF16", "--force", code=2)
    run("convert", tmp_path / "f32.gguf", out, "--head", "BF16", "--allow-rounding", "--force")
    exact, rounded = load(tmp_path / "f32.gguf").token_embd, widen.float32(load(out).token_embd)
    step = 2.0 ** (np.floor(np.log2(np.abs(exact))) - 7)
    assert (np.abs(rounded - exact) <= step / 2).all()
    assert (rounded != exact).any()


@pytest.mark.parametrize(("bits", "kind", "number"), [(0x47C35000, "F16", "100000.0"), (0x7FFFFFFF, "BF16", "nan")])
def test_numbers_that_a_narrower_type_has_not(run, tmp_path, bits, kind, number):
    """One is too large. The other is a NaN whose rounding to nearest carries into the sign, where it would be read as -0."""
    model = drawn("llama", "float32")
    model.token_embd.flags.writeable = True
    model.token_embd.view(np.uint32)[3, 3] = bits
    write_gguf(tmp_path / "in.gguf", model)
    options = "--head", kind, "--allow-rounding", "--allow-nan"
    said = run("convert", tmp_path / "in.gguf", tmp_path / "out.gguf", *options, code=2)
    assert f"token_embd.weight has the number {number}, which is none of {kind}'s that a model may have" in said


def test_a_file_that_is_there_stays_unless_forced(run, tmp_path):
    out = tmp_path / "out.gguf"
    out.write_text("mine")
    assert f"{out} is there, --force replaces it" in run("convert", PACKAGED, out, code=2)
    run("convert", DATA / "hf" / "bitnet_plain_mha_tied", out, "--force", code=2)
    assert out.read_text() == "mine"
    run("convert", PACKAGED, out, "--force")
    run("convert", out, out, "--force")
    assert out.read_bytes() == PACKAGED.read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]
    run("convert", PACKAGED, tmp_path / "no" / "out.gguf", code=2)
    run("convert", PACKAGED, tmp_path, "--force", code=2)


def test_other_keys_of_general_and_tokenizer_are_carried_over(run, tmp_path):
    """Each number in the narrowest type that holds it."""
    numbers = {"small": 7, "low": -(2**63), "negative": -3, "large": 2**64 - 1, "float": 0.5, "huge": 1e300, "yes": True, "license": "mit"}
    tokenizer = {"model": "llama", "precompiled_charsmap": np.array([1, 2, 255], np.uint8)}
    tokenizer |= {"scores": np.array([0.5, -1.0], np.float32), "tokens": ["a", "é"]}
    metadata = {f"general.{name}": number for name, number in numbers.items()}
    metadata |= {f"tokenizer.ggml.{name}": value for name, value in tokenizer.items()}
    write_model(tmp_path / "in.gguf", drawn("llama", "float32"), metadata)
    run("convert", tmp_path / "in.gguf", tmp_path / "out.gguf")
    before, after = (open_gguf(tmp_path / name).metadata for name in ("in.gguf", "out.gguf"))
    for key in metadata:
        one, other = before[key], after[key]
        assert type(one) is type(other)
        assert one == other if isinstance(one, str | int | float) else list(one) == list(other)
        assert getattr(one, "dtype", None) == getattr(other, "dtype", None)
    fields = gguf.GGUFReader(tmp_path / "out.gguf").fields
    kinds = [fields[f"general.{name}"].types[0].name for name in numbers]
    assert kinds == ["UINT32", "INT64", "INT32", "UINT64", "FLOAT32", "FLOAT64", "BOOL", "STRING"]
