"""Labels of dumps: our names, modules of other engines with their inputs and outputs, hidden states, and steps."""

from dataclasses import replace

import pytest
from models import random_model

from bitnet_np.base.errors import FileFormatError
from bitnet_np.files.hf_model_types import MODEL_TYPES, OTHER_CLASSES
from bitnet_np.traces import labels
from bitnet_np.traces.points import POINT


def meaning(label, *others, config=None):
    """The point and the step of a label among others, in text."""
    meant = labels.meanings([label, *others], config, "f").get(label)
    return meant and (None if meant.key is None else str(meant.key), meant.step, meant.second)


OUTPUTS = {
    "model.layers.12": "l_out-12",
    "model.layers.12.0": "l_out-12",  # the first of a tuple
    "model.layers.12.output": "l_out-12",
    "model.layers.12.output.0": "l_out-12",
    "base_model.model.model.layers.2.input_layernorm": "attn_norm-2",
    "model.language_model.layers.2.self_attn.q_norm": "Qcur_normed-2",
    "layers.1.attention.wq": "Qcur-1",
    "tok_embeddings": "inp_embd",
    "output": "result_output",
    "blk.3.ffn_up": "ffn_up-3",
    "transformer.h.1.attn.c_proj": "attn_o_out-1",
    "gpt_neox.layers.1.attention.dense": "attn_o_out-1",
    "model.layers.1.self_attn.q_proj.rms_norm": "Qcur_in-1",
}
SECOND = {
    "logits": "result_output",
    "model.layers.1.self_attn": "attn_o_out-1",
    "model.layers.1.self_attn.0": "attn_o_out-1",
    "model.layers.1.mlp": "ffn_down-1",
    "model.layers.0.input": "inp_embd",
    "model.layers.2.input": "l_out-1",
    "model.layers.2.input_layernorm.input": "l_out-1",
    "model.layers.1.self_attn.v_proj.input": "attn_norm-1",
    "model.layers.1.self_attn.o_proj.input": "kqv_out-1",
    "model.layers.1.self_attn.attn_sub_norm.input": "kqv_out-1",
    "model.layers.1.post_attention_layernorm.input": "ffn_inp-1",
    "model.layers.1.mlp.down_proj.input": "ffn_out-1",
    "lm_head.input": "result_norm",
    # what models of transformers return for each layer
    "attentions.1": "kq_soft_max-1",
    "router_logits.0": "ffn_moe_logits-0",
    "model.layers.3.mlp.gate.1": "ffn_moe_weights-3",
    "model.layers.3.block_sparse_moe.gate.output.2": "ffn_moe_topk-3",
    **dict.fromkeys(("cache.layers.2.keys", "past_key_values.key_cache.2", "past_key_values.2.0"), "Kcur_rope-2"),
    **dict.fromkeys(("past_key_values.layers.2.values", "past_key_values.value_cache.2", "past_key_values.2.1"), "Vcur-2"),
}
NOTHING = [
    *("", "model", "layers", "layers.0x", "model.layers.01", "model.layers.0.", "model.layers.1000000", "layers.1.norm", "self_attn"),
    *("norm.input", "lm_head.weight", "model.layers.0.mlp.act_fn", "vision.layers.0", "hidden_states", "embed_tokens.input"),
    *("model.layers.0.logits", "step-1/l_out-3.step-1", "l_out-3.step--1", "step-1", "step-1/"),
    *("blk.0.token_embd.weight", "blk.01.attn_q.weight", "blk.0.attn_q.scale", "attn_q.weight"),
]


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ("l_out-3", ("l_out-3", None, False)),
        ("blk.12.attn_norm.weight", ("grad_attn_norm-12", None, False)),
        ("blk.0.attn_q.bias", ("grad_attn_q_bias-0", None, False)),
        ("output.weight", ("grad_output", None, False)),
        # outputs of modules; test_points.py has all names in the table, and the loader's are below
        *((label, (point, None, False)) for label, point in OUTPUTS.items()),
        # what a dump may have under two names
        *((label, (point, None, True)) for label, point in SECOND.items()),
        # steps
        ("l_out-3.step-17", ("l_out-3", 17, False)),
        ("step-17/l_out-3", ("l_out-3", 17, False)),
        ("step-0017/model.layers.3", ("l_out-3", 17, False)),
        ("tokens.step-2", (None, 2, False)),
        ("tokens", (None, None, False)),
        *((label, None) for label in NOTHING),
    ],
)
def test_what_a_label_stands_for(label, expected):
    assert meaning(label) == expected


@pytest.mark.parametrize("kind", [*MODEL_TYPES.values(), *OTHER_CLASSES.values()], ids=lambda kind: kind.causal_lm)
def test_the_modules_of_every_supported_type_are_known(kind):
    """By the loader's table of transformers' names; matrices that are one tensor give no point, and a shared expert's gate is none."""
    modules = [kind.layer.format(2) + module for module in kind.modules.values()]
    meant = labels.meanings(modules, None, "f")
    for field, module in zip(kind.modules, modules, strict=True):
        if modules.count(module) > 1 or field == "ffn_gate_inp_shexp":
            assert module not in meant
        else:
            key = meant[module].key
            assert (POINT[key.name].weight, key.layer) == (field, 2)
    for module, name in ((kind.embedding, "inp_embd"), (kind.norm, "result_norm"), (kind.file_head or "lm_head", "result_output")):
        assert meaning(module) == (name, None, False)


def test_cached_keys_of_layers_that_do_not_rotate_are_plain():
    config = replace(random_model(0, family="smollm3").config, rope_layers=(0,))
    assert [meaning(f"past_key_values.{n}.0", config=config)[0] for n in range(2)] == ["Kcur_rope-0", "Kcur-1"]


def test_inputs_behind_sub_norms():
    """The last matrix of a branch takes the sub-norm in a BitNet: known by the model, or because the dump has the norm."""
    bitnet, llama = (random_model(0, family=family).config for family in ("bitnet-b1.58", "llama"))
    for module, plain, norm in (("self_attn.o_proj", "kqv_out-1", "attn_sub_norm-1"), ("mlp.down_proj", "ffn_out-1", "ffn_sub_norm-1")):
        label = f"model.layers.1.{module}.input"
        assert meaning(label, config=bitnet)[0] == norm
        assert meaning(label, config=llama)[0] == plain
        assert meaning(label, norm)[0] == norm
        assert meaning(label, "attn_sub_norm-0", "ffn_sub_norm-0")[0] == plain


def test_hidden_states():
    states = [f"hidden_states.{n}" for n in range(4)]
    expected = ["inp_embd", "l_out-0", "l_out-1", "result_norm"]
    assert [meaning(label, *states)[0] for label in states] == expected
    config = random_model(0, n_layers=3).config
    assert [meaning(label, config=config)[0] for label in states] == expected
    for alone in ("{}", "arr_{}", "layer_{}"):  # a tuple in a file of its own
        names = [alone.format(n) for n in range(4)]
        assert [meaning(name, *names, config=config)[0] for name in names] == expected
    assert [meaning(f"layer_{n}", config=config)[0] for n in range(3)] == ["l_out-0", "l_out-1", "l_out-2"]
    assert meaning("hidden_states.0", config=random_model(0, family="gpt2", n_layers=3).config)[0] == "inpL"
    with pytest.raises(FileFormatError, match=r"f: hidden_states \[0, 2\], expected all from 0 on"):
        meaning("hidden_states.0", "hidden_states.2")
    with pytest.raises(FileFormatError, match=r"hidden_states\.4 for 3 layers, expected at most hidden_states\.3"):
        meaning("hidden_states.4", config=config)
