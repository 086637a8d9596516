"""The names that other projects have for the points of a forward pass, in one table with look-ups in both directions.

Where a project has no such stage its name is None. The sources: bitnet.cpp's graph (names with the operation that makes them, as one name
stands for several nodes), BitNet-rs's tracepoints, the stages of aprender's `apr trace --save-tensor`, and the outputs of the modules of
transformers' models, as forward hooks see them.
"""

import re
from typing import NamedTuple

from ..points import Key, key_of


class Stage(NamedTuple):
    """One point by each project's name; {} stands for the layer."""

    ours: str
    ggml: str | None = None  # name.OPERATION
    bitnet_rs: str | None = None
    aprt: str | None = None
    transformers: str | None = None


STAGES = (
    Stage("inp_embd", "inp_embd.GET_ROWS", "embeddings", "embedding", "model.embed_tokens"),
    Stage("inpL", "inpL.ADD"),
    Stage("inp_scaled", "inp_scaled.SCALE"),
    Stage("attn_norm", "attn_norm.MUL", "attn_norm", "attn_norm", "model.layers.{}.input_layernorm"),
    Stage("Qcur", "Qcur.MUL_MAT", "q_proj", None, "model.layers.{}.self_attn.q_proj"),
    Stage("Kcur", "Kcur.MUL_MAT", None, None, "model.layers.{}.self_attn.k_proj"),
    Stage("Vcur", "Vcur.MUL_MAT", None, None, "model.layers.{}.self_attn.v_proj"),
    Stage("Qcur_normed", "Qcur_normed.MUL", None, None, "model.layers.{}.self_attn.q_norm"),
    Stage("Kcur_normed", "Kcur_normed.MUL", None, None, "model.layers.{}.self_attn.k_norm"),
    Stage("Qcur_rope", "Qcur.ROPE", None, "q_post_rope"),
    Stage("Kcur_rope", "Kcur.ROPE", None, "k_post_rope"),
    Stage("kq", "kq.MUL_MAT", None, "attn_scores"),  # ggml's is not yet divided by the root of the head width
    Stage("kq_soft_max", "kq_soft_max_ext.SOFT_MAX", "attn_scores_softmax", "attn_softmax"),
    Stage("kqv_out", "kqv_out.CONT", None, "attention"),
    Stage("attn_sub_norm", "attn_sub_norm.MUL", None, None, "model.layers.{}.self_attn.attn_sub_norm"),
    Stage("attn_o_out", "attn_o_out.MUL_MAT", None, "attn_out", "model.layers.{}.self_attn.o_proj"),
    Stage("attn_post_norm", "attn_post_norm.MUL", None, None, "model.layers.{}.post_self_attn_layernorm"),
    Stage("ffn_inp", "ffn_inp.ADD", None, "post_attn_residual"),
    Stage("ffn_norm", "ffn_norm.MUL", None, "ffn_norm", "model.layers.{}.post_attention_layernorm"),
    Stage("ffn_moe_logits", "ffn_moe_logits.MUL_MAT", None, None, "model.layers.{}.mlp.gate"),
    Stage("ffn_moe_topk", "ffn_moe_topk.VIEW"),
    Stage("ffn_moe_weights", "ffn_moe_weights.GET_ROWS"),
    Stage("ffn_moe_gate", "ffn_moe_gate.MUL_MAT_ID"),
    Stage("ffn_moe_up", "ffn_moe_up.MUL_MAT_ID"),
    Stage("ffn_moe_swiglu", "ffn_moe_swiglu.SWIGLU"),
    Stage("ffn_moe_down", "ffn_moe_down.MUL_MAT_ID"),
    Stage("ffn_moe_out", "ffn_moe_out.ADD", None, None, "model.layers.{}.mlp.experts"),
    Stage("ffn_gate", "ffn_gate.MUL_MAT", None, "ffn_gate", "model.layers.{}.mlp.gate_proj"),
    Stage("ffn_up", "ffn_up.MUL_MAT", None, "ffn_up", "model.layers.{}.mlp.up_proj"),
    Stage("ffn_out", "ffn_out.MUL", None, "ffn_swigl"),
    Stage("ffn_sub_norm", "ffn_sub_norm.MUL", None, None, "model.layers.{}.mlp.ffn_sub_norm"),
    Stage("ffn_down", "ffn_down.MUL_MAT", None, "ffn_out", "model.layers.{}.mlp.down_proj"),
    Stage("ffn_shexp_out", "ffn_shexp_out.MUL"),
    Stage("ffn_post_norm", "ffn_post_norm.MUL", None, None, "model.layers.{}.post_feedforward_layernorm"),
    Stage("l_out", "l_out.ADD", None, "post_ffn_residual", "model.layers.{}"),
    Stage("result_norm", "result_norm.MUL", "all_layers_out", "final_norm", "model.norm"),  # BitNet-rs's layers end with the norm
    Stage("result_embd_pooled", "result_embd_pooled.MUL_MAT"),
    Stage("result_output", "result_output.MUL_MAT", "logits", "lm_head", "lm_head"),
    # norms inside linears, as transformers' quantised linears may have them
    Stage("Qcur_in", transformers="model.layers.{}.self_attn.q_proj.rms_norm"),
    Stage("Kcur_in", transformers="model.layers.{}.self_attn.k_proj.rms_norm"),
    Stage("Vcur_in", transformers="model.layers.{}.self_attn.v_proj.rms_norm"),
    Stage("attn_o_out_in", transformers="model.layers.{}.self_attn.o_proj.rms_norm"),
    Stage("ffn_gate_in", transformers="model.layers.{}.mlp.gate_proj.rms_norm"),
    Stage("ffn_up_in", transformers="model.layers.{}.mlp.up_proj.rms_norm"),
    Stage("ffn_down_in", transformers="model.layers.{}.mlp.down_proj.rms_norm"),
)

_BY_OURS = {stage.ours: stage for stage in STAGES}
_BY_GGML = {stage.ggml: stage.ours for stage in STAGES if stage.ggml}
_BY_GGML["result_embd_pooled.GET_ROWS"] = "result_embd_pooled"  # one token's row; MUL_MAT takes the mean
_BY_BITNET_RS = {stage.bitnet_rs: stage.ours for stage in STAGES if stage.bitnet_rs}
_BY_APRT = {stage.aprt: stage.ours for stage in STAGES if stage.aprt}
_BY_TRANSFORMERS = {stage.transformers: stage.ours for stage in STAGES if stage.transformers}
_MODULE_LAYER = re.compile(r"(?<=^model\.layers\.)(0|[1-9][0-9]{0,5})(?=\.|$)")
_NODE = re.compile(r"s(0|[1-9][0-9]{0,8})\.([A-Za-z_]+)(?:-(0|[1-9][0-9]{0,5}))?\.([A-Z_0-9]+)")


def stage(name: str) -> Stage:
    """The names that other projects have for a point."""
    return _BY_OURS.get(name, Stage(name))


def from_bitnet_rs(name: str) -> str | None:
    """Our name for a BitNet-rs stage; None if we have none."""
    return _BY_BITNET_RS.get(name)


def from_aprt(name: str) -> str | None:
    """Our name for an APRT stage; None if we have none."""
    return _BY_APRT.get(name)


def from_ggml(label: str) -> tuple[int, Key] | None:
    """The call and the point of a graph node `s<call>.<name>[-<layer>].<OPERATION>`; None if it is no node or no point."""
    match = _NODE.fullmatch(label)
    if not match:
        return None
    call, name, layer, operation = match.groups()
    ours = _BY_GGML.get(f"{name}.{operation}")
    key = ours and key_of(ours if layer is None else f"{ours}-{layer}")
    return (int(call), key) if key else None


def is_node(label: str) -> bool:
    """Whether a label is the name of a graph node, of a point or not."""
    return re.match(r"s\d+\.", label) is not None


def from_transformers(module: str) -> Key | None:
    """The point that a transformers module outputs; None if there is none."""
    match = _MODULE_LAYER.search(module)
    name = _BY_TRANSFORMERS.get(_MODULE_LAYER.sub("{}", module))
    return Key(name, int(match[0]) if match else None) if name else None
