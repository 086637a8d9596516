"""A Llama of a GGUF file as an ONNX graph with onnxruntime's GroupQueryAttention: ids and a cache in, logits and the longer cache out."""

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT, INT, INT64 = TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64


def graph_of(of, w):
    """The graph's bytes, the names of its keys and values, and their heads and width. of, w: keys and matrices of the file."""
    heads, kv_heads, k = of("attention.head_count"), of("attention.head_count_kv"), of("attention.key_length")
    angles = np.multiply.outer(np.arange(512), of("rope.freq_base") ** (-np.arange(k // 2) * 2 / k))
    known = {name: x.T.copy() if x.ndim > 1 and name != "token_embd.weight" else x for name, x in w.items()}
    known.setdefault("output.weight", w["token_embd.weight"].T.copy())
    known |= {"cos": np.cos(angles).astype(np.float32), "sin": np.sin(angles).astype(np.float32)}
    nodes, layers = [], range(of("block_count"))

    def node(kind, inputs, more=(), domain="", **attributes):
        nodes.append(helper.make_node(kind, inputs, [f"x{len(nodes)}", *more], domain=domain, **attributes))
        return nodes[-1].output[0]

    product = lambda x, name: node("MatMul", [x, f"{name}.weight"])  # noqa: E731
    eps = {"epsilon": of("attention.layer_norm_rms_epsilon"), "axis": -1, "stash_type": 1}
    norm = lambda x, name: node("SimplifiedLayerNormalization", [x, f"{name}.weight"], **eps)  # noqa: E731
    x = node("Gather", ["token_embd.weight", "ids"])
    for n in layers:
        h, rotary = norm(x, f"blk.{n}.attn_norm"), {"do_rotary": 1, "rotary_interleaved": 1}
        given = [*(product(h, f"blk.{n}.attn_{name}") for name in "qkv"), f"k{n}", f"v{n}", "last", "total", "cos", "sin"]
        y = node("GroupQueryAttention", given, [f"k{n}_", f"v{n}_"], "com.microsoft", num_heads=heads, kv_num_heads=kv_heads, **rotary)
        x = node("Add", [x, product(y, f"blk.{n}.attn_output")])
        h = norm(x, f"blk.{n}.ffn_norm")
        gate, up = (product(h, f"blk.{n}.ffn_{name}") for name in ("gate", "up"))
        x = node("Add", [x, product(node("Mul", [node("Mul", [gate, node("Sigmoid", [gate])]), up]), f"blk.{n}.ffn_down")])
    logits, of_cache = product(norm(x, "output_norm"), "output"), [f"{name}{n}" for n in layers for name in "kv"]
    typed = lambda names, kind, shape: [helper.make_tensor_value_info(name, kind, shape) for name in names]  # noqa: E731
    inputs = [
        *typed(["ids"], INT64, [1, "t"]),
        *typed(["last"], INT, [1]),
        *typed(["total"], INT, []),
        *typed(of_cache, FLOAT, [1, kv_heads, "p", k]),
    ]
    outputs = typed([logits], FLOAT, [1, "t", "v"]) + typed([f"{name}_" for name in of_cache], FLOAT, [1, kv_heads, "q", k])
    graph = helper.make_graph(nodes, "llama", inputs, outputs, [numpy_helper.from_array(x, name) for name, x in known.items()])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    made = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    return made.SerializeToString(), of_cache, (kv_heads, k)
