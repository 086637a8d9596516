"""A recorder that keeps everything, and the names of the tensors that a layer of BitNet b1.58 records."""

import numpy as np

from bitnet_np.engine.forward_pass import forward_full

LAYER = ["attn_norm", "Qcur", "Kcur", "Vcur", "Qcur_rope", "Kcur_rope", "kqv_out", "attn_sub_norm", "attn_o_out", "ffn_inp"]
LAYER += ["ffn_norm", "ffn_gate", "ffn_up", "ffn_out", "ffn_sub_norm", "ffn_down", "l_out"]
QUANTISED = ["attn_norm", "attn_sub_norm", "ffn_norm", "ffn_sub_norm"]  # the inputs of ternary matrices
WITH_CODES = [name + part for name in LAYER for part in (["", "_codes", "_scale"] if name in QUANTISED else [""])]


class Recorder(dict):
    """Keeps a copy of every recorded tensor under (name, layer), in order. Each may come once."""

    def __call__(self, name, layer, array):
        assert (name, layer) not in self
        self[name, layer] = array.copy()


def record_all(model, tokens, **how):
    """All tensors of a forward pass over one sequence. how: options of forward_full."""
    seen = Recorder()
    forward_full(model, np.asarray(tokens)[None], record=seen, **how)
    return seen
