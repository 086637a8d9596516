"""Names of GGUF's keys and tensors: gguf-py's, for every field of the records and every architecture."""

from dataclasses import fields

import gguf
import pytest
from family_models import drawn

from bitnet_np.files.gguf_names import FACTORS, KEYS, NEUTRAL, REQUIRED, YARN, keys_of, matrix_name, tensor_name
from bitnet_np.model.families import ARCHITECTURES, FAMILIES
from bitnet_np.model.records import Config, Layer, Model

NO_FIELDS = {"value_dim", "scaling_type", "old_rope_scaling", "expert_ffn", *YARN}


def theirs(*groups):
    """The keys of gguf-py's tables, without the architecture."""
    return {value.removeprefix("{arch}.") for group in groups for value in vars(group).values() if isinstance(value, str)}


def test_keys_are_those_of_gguf():
    known = theirs(gguf.Keys.LLM, gguf.Keys.Attention, gguf.Keys.Rope)
    known |= {"rope.scale_linear"}  # of files from before rope.scaling.factor; llama.cpp reads it still
    names = {key.name for family in FAMILIES.values() for key in keys_of(family).values()}
    assert {key.name for key in KEYS.values()} | {"attention.layer_norm_epsilon"} == names
    assert names | NEUTRAL.keys() <= known


def test_keys_are_of_fields_of_the_config():
    assert KEYS.keys() - {field.name for field in fields(Config)} == NO_FIELDS
    assert len({key.name for key in KEYS.values()}) == len(KEYS)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_a_file_must_say_it_may_say(architecture):
    family = FAMILIES[architecture]
    assert {*REQUIRED, *family.required} <= keys_of(family).keys()


def test_experts_are_named_as_in_gguf():
    """In one tensor for all, beside the shared one; in older files one by one."""
    known, c = set(gguf.TENSOR_NAMES.values()), drawn("qwen2moe").config
    names = [f"{matrix_name(c, field, 7)}{end}" for field in ("ffn_gate", "ffn_up", "ffn_down") for end in ("", "_exps")]
    assert names[0] == "blk.7.ffn_gate_shexp"
    assert {name.replace("_shexp_exps", "_exps").replace("blk.7", "blk.{bid}") for name in names} < known
    assert matrix_name(drawn("qwen3").config, "ffn_gate", 7) == "blk.7.ffn_gate"


NO_TENSORS = "config", "layers", "rope_frequency", "local_rope_frequency", "rope_factors", "experts", "stated_dtype", "norm_offset"


def test_tensors_are_named_as_in_gguf():
    """gguf-py has the biases of a tensor under its name. A field that ends in _bias is a bias."""
    assert tensor_name("attn_q", 7) == "blk.7.attn_q.weight"
    assert tensor_name("output_norm_bias") == "output_norm.bias"
    assert tensor_name("attn_norm_bias", 0) == "blk.0.attn_norm.bias"
    known = set(gguf.TENSOR_NAMES.values())
    assert FACTORS.removesuffix(".weight") in known
    for record in (Layer, Model):
        for field in fields(record):
            if field.name not in NO_TENSORS:
                plain = tensor_name(field.name, 0 if record is Layer else None).rpartition(".")[0].replace("blk.0.", "blk.{bid}.")
                assert plain in known, field.name
