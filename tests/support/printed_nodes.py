"""Text as llama-eval-callback prints it, of tensors given here."""

import numpy as np

LLAMA = {"inp_embd": "inp_embd.GET_ROWS", "Qcur_rope": "Qcur.ROPE", "Kcur_rope": "Kcur.ROPE", "kqv_out": "kqv_out.CONT"}
LLAMA |= {name: f"{name}.MUL_MAT" for name in ("Qcur", "Kcur", "Vcur", "ffn_gate", "ffn_up", "result_output")}
LLAMA |= {name: f"{name}.MUL" for name in ("attn_norm", "ffn_norm", "result_norm")}
LLAMA |= {"ffn_inp": "ffn_inp.ADD", "l_out": "l_out.ADD"}
LLAMA |= {"attn_o_out": "attn_out.MUL_MAT", "ffn_out": "ffn_swiglu.SWIGLU", "ffn_down": "ffn_out.MUL_MAT"}
"""Our points -> nodes of llama.cpp's graph of a Llama."""


def edges(n):
    """The places of an axis that are printed, None where some are left out."""
    return [0, 1, 2, None, n - 3, n - 2, n - 1] if n > 6 else [*range(n)]


def printed(name, operation, array, function="ggml_debug", kind="f32"):
    """A node: array is [.., width], the slowest axis first."""
    array = array.reshape((1,) * (4 - array.ndim) + array.shape)
    lengths = ", ".join(map(str, reversed(array.shape)))
    lines = [f"{function}: {name:>24} = ({kind}) {operation:>10}(a{{2, 1, 1, 1}}, b{{2, 1, 1, 1}}}}) = {{{lengths}}}"]
    for i3 in range(array.shape[0]):
        lines.append("    [")
        for i2 in edges(array.shape[1]):
            if i2 is None:
                lines.append("        ..., ")
                continue
            lines.append("        [")
            for i1 in edges(array.shape[2]):
                row = () if i1 is None else ["..." if i0 is None else f"{array[i3, i2, i1, i0]:12.4f}" for i0 in edges(array.shape[3])]
                lines.append(f"            [{', '.join(row)}  ]," if row else "            ..., ")
            lines.append("        ],")
        lines += ["    ]", f"    sum = {array.sum(dtype=np.float32):f}"]
    return "\n".join(lines) + "\n"


def printed_trace(points, heads, function="ggml_debug"):
    """All nodes of a Llama's points {(name, layer): [T, width]}, with lines of a log and nodes of other names between them."""
    text = ["build: 1 (abc) with cc\n", "llama_context: n_ctx = 64\n"]
    for (name, layer), array in points.items():
        if name not in LLAMA:
            continue
        node, operation = LLAMA[name].split(".")
        array = array.reshape(len(array), -1)
        if name.endswith("_rope"):
            array = array.reshape(len(array), heads[name[0]], -1)
        text.append(printed(f"norm-{layer or 0}", "RMS_NORM", array[:, :2], function))
        text.append(printed(node if layer is None else f"{node}-{layer}", operation, array, function))
    return "".join(text)
