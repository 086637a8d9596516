"""Masks and attention against ONNX's operator Attention: its reference implementation in NumPy, and onnxruntime where it knows it.

Neither was written here. The extra `dev` has both; the tests are skipped without them.
"""

import numpy as np
import pytest

from bitnet_np import spec
from bitnet_np.engine import masks
from bitnet_np.engine.masks import Pattern
from bitnet_np.kernels import cpu
from bitnet_np.kernels.cpu import attend_masked

onnx = pytest.importorskip("onnx")
onnx_helper = pytest.importorskip("onnx.helper")
reference = pytest.importorskip("onnx.reference")
pytestmark = pytest.mark.skipif(onnx.defs.onnx_opset_version() < 25, reason="needs an onnx that knows windows in Attention (opset 25)")
runtime = pytest.importorskip("onnxruntime")

HEADS, KV_HEADS, WIDTH = 6, 2, 20
PATTERNS = {
    "causal": Pattern(),
    "window": Pattern(window=5),
    "window of one": Pattern(window=1),
    "prefix": Pattern(prefix=7),
    "blocks": Pattern(block=8),
    "sinks": Pattern(window=4, sinks=2),
    "all of them": Pattern(window=6, prefix=3, block=16, sinks=5),
}


def model(opset, inputs, **attributes):
    """A graph of one Attention, with the inputs named."""
    kinds = {"bool": onnx.TensorProto.BOOL}
    typed = [
        onnx_helper.make_tensor_value_info(name, kinds.get(str(x.dtype), onnx.TensorProto.FLOAT), x.shape) for name, x in inputs.items()
    ]
    order = ("Q", "K", "V", "attn_mask", "past_key", "past_value")
    given = [name if name in inputs else "" for name in order]
    while not given[-1]:
        given.pop()
    kept = [onnx_helper.make_tensor_value_info("Y", onnx.TensorProto.FLOAT, None)]
    extra = ["present_key", "present_value"] if "past_key" in inputs else []
    kept += [onnx_helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None) for name in extra]
    node = onnx_helper.make_node("Attention", given, ["Y", *extra], **attributes)
    graph = onnx_helper.make_graph([node], "attention", typed, kept)
    return onnx_helper.make_model(graph, opset_imports=[onnx_helper.make_opsetid("", opset)], ir_version=10)


def by_reference(inputs, opset=25, **attributes):
    return reference.ReferenceEvaluator(model(opset, inputs, **attributes)).run(None, inputs)[0]


def by_runtime(inputs, opset=23, **attributes):
    session = runtime.InferenceSession(model(opset, inputs, **attributes).SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, inputs)[0]


THEIRS = {"reference": by_reference, "onnxruntime": by_runtime}


def arrays(seed, batch, queries, keys):
    """Q [B, H, Tq, K], K and V [B, G, Tk, K], as ONNX has them."""
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, HEADS, queries, WIDTH), np.float32)
    return {"Q": q} | {name: rng.standard_normal((batch, KV_HEADS, keys, WIDTH), np.float32) for name in ("K", "V")}


def ours(kernel, inputs, past, *arguments):
    """The kernel on the same numbers: rows of all sequences end to end."""
    q, k, v = (inputs[name] for name in ("Q", "K", "V"))
    batch, _, queries, _ = q.shape
    rows = np.ascontiguousarray(q.transpose(0, 2, 1, 3)).reshape(-1, HEADS, WIDTH)
    k, v = (np.ascontiguousarray(x.transpose(0, 2, 1, 3)) for x in (k, v))
    slot, position = np.repeat(np.arange(batch), queries), past + np.tile(np.arange(queries), batch)
    return kernel(rows, k, v, slot, position, *arguments).reshape(batch, queries, HEADS, WIDTH).transpose(0, 2, 1, 3)


def assert_close(a, b):
    np.testing.assert_allclose(a, b, rtol=0, atol=2e-6)


@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("form", ["bool", "additive"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_they_read_our_masks_as_we_do(theirs, form, pattern):
    inputs = arrays(0, 2, 70, 70)
    mask = masks.mask(70, 70, PATTERNS[pattern], form=form)
    expected = ours(attend_masked, inputs, 0, masks.as_additive(mask)[None])
    assert_close(THEIRS[theirs](inputs | {"attn_mask": mask}), expected)
    if pattern in ("causal", "window"):
        assert_close(ours(cpu.attend, inputs, 0, PATTERNS[pattern].window or None), expected)


@pytest.mark.parametrize("theirs", THEIRS)
@pytest.mark.parametrize("past", [0, 1, 63, 64, 100])
def test_their_causal_rule_is_ours(theirs, past):
    """With keys before the first query, given to them as the past, to us as a cache."""
    whole = arrays(1, 2, 9, past + 9)
    inputs = dict(whole)
    if past:
        for name, old in (("K", "past_key"), ("V", "past_value")):
            inputs[old], inputs[name] = whole[name][:, :, :past], whole[name][:, :, past:]
    expected = THEIRS[theirs](inputs, is_causal=1)
    assert_close(ours(cpu.attend, whole, past), expected)
    mask = masks.causal(9, past + 9)
    sequences = zip(*(whole[name].transpose(0, 2, 1, 3).astype(np.float64) for name in ("Q", "K", "V")), strict=True)
    for one, theirs_one in zip(sequences, expected, strict=True):
        assert_close(spec.attend(*one, mask), theirs_one.transpose(1, 0, 2))


@pytest.mark.parametrize("window", [1, 2, 7, 64, 65, 200])
def test_their_window_is_ours(window):
    """Theirs counts the keys before a query's own, ours counts that too."""
    inputs = arrays(2, 1, 130, 130)
    expected = by_reference(inputs, is_causal=1, left_window_size=window - 1, right_window_size=0)
    assert_close(ours(cpu.attend, inputs, 0, window), expected)
    assert_close(by_reference(inputs | {"attn_mask": masks.mask(130, 130, Pattern(window=window), form="bool")}), expected)


@pytest.mark.parametrize("theirs", THEIRS)
def test_rows_that_see_nothing(theirs):
    """Zeros, as ONNX's text says."""
    inputs = arrays(3, 1, 12, 12)
    mask = masks.mask(12, 12, form="bool").copy()
    mask[5] = False
    found = THEIRS[theirs](inputs | {"attn_mask": mask})
    assert not found[:, :, 5].any()
    assert_close(ours(attend_masked, inputs, 0, masks.as_additive(mask)[None]), found)
