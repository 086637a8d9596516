"""The tensors of a GGUF file: ternary, in blocks and fused ones, and the layouts of I2_S."""

from dataclasses import replace

import numpy as np
import pytest
from block_samples import arm_layout, four_row_layout
from family_models import assert_refused, drawn
from fuzzing.gguf_bytes import Document, Entry
from gguf_models import MATRIX_NAMES, TENSORS, assert_same_model, written_model

from bitnet_np import spec
from bitnet_np.base.block_formats import FORMATS
from bitnet_np.base.errors import FileFormatError, NonFiniteError, UnsupportedError
from bitnet_np.base.tensor_types import I2_S
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.load import load
from bitnet_np.model import packing
from bitnet_np.model.dense import dense_view
from bitnet_np.model.records import Blocks, Linear, Ternary
from bitnet_np.testing.models import write_gguf

TOKENS = [[0, 22, 3, 3, 7, 1]]


@pytest.mark.parametrize(("layout", "write_codes"), [("64/16", arm_layout), ("4-rows", four_row_layout)], ids=["64/16", "4-rows"])
def test_the_other_layouts_of_i2s_are_read_when_asked_for(write, layout, write_codes):
    tensors = {
        name: Entry(
            name, value.shape[::-1], I2_S.number, data=write_codes(packing.unpack(value)).tobytes() + packing.to_i2s(value)[-32:].tobytes()
        )
        for name, value in TENSORS.items()
        if isinstance(value, Ternary)
    }
    path = write(tensors=tensors)
    assert_same_model(load(path, i2s_layout=layout), written_model())
    tokens = [[0, 8, 3]]
    assert (forward_full(load(path), tokens) != forward_full(written_model(), tokens)).any()


@pytest.mark.parametrize("scale", [0.0, 1e-45, 3e38])
def test_scales_that_are_odd_but_numbers(write, scale):
    name = MATRIX_NAMES[0]
    matrix = packing.pack(packing.unpack(TENSORS[name]), scale)
    assert load(write(tensors={name: matrix})).layers[0].attn_q.weights.scale == np.float32(scale)


@pytest.mark.parametrize("weights", ["float16", "Q8_0"])
@pytest.mark.parametrize(("family", "fields"), [("gpt2", ("attn_q", "attn_k", "attn_v")), ("phi3", ("ffn_gate", "ffn_up"))])
def test_fused_rows_stay_where_they_are_in_the_file(written, family, fields, weights):
    """In this order."""
    layer = load(written(drawn(family, weights))).layers[0]
    parts = [getattr(layer, name).weights for name in fields]
    arrays = [part.data if isinstance(part, Blocks) else part for part in parts]
    addresses = [array.ctypes.data for array in arrays]
    assert addresses == [addresses[0] + sum(a.nbytes for a in arrays[:i]) for i in range(len(fields))]


@pytest.mark.parametrize("weights", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_take_int8_activations(written, weights):
    """With scales of their own for each 256 weights they are no I2_S matrix, but BitNet's arithmetic is the same."""
    model = load(written(drawn("bitnet", weights)))
    assert isinstance(model.layers[0].attn_q.weights, Blocks)
    dense = dense_view(model)
    assert dense.layers[0].attn_q.int8
    np.testing.assert_allclose(forward_full(model, TOKENS)[0], spec.forward(dense, TOKENS[0]), atol=3e-5)
    packed = load(written(drawn("bitnet", "ternary"))).layers[0].attn_q.weights
    assert isinstance(packed, Ternary)
    assert packed.blocks is None


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_factors_are_positive(written, bad):
    model = drawn("llama")
    model.rope_factors.flags.writeable = True
    model.rope_factors[5] = bad
    assert_refused(written(model), FileFormatError, "tensor rope_freqs.weight has the value")
    model.rope_factors[5] = np.nan
    path = written(model)
    assert_refused(path, NonFiniteError, "tensor rope_freqs.weight has NaN")
    with pytest.raises(FileFormatError, match=r"tensor rope_freqs\.weight has the value nan"):
        load(path, allow_nan=True)  # angles must be numbers all the same


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "TQ1_0", "TQ2_0", "MXFP4"])
def test_nan_in_blocks_is_found_and_may_be_allowed(written, kind):
    model = drawn("llama", kind)
    blocks = model.layers[1].ffn_up.weights
    blocks = blocks.blocks if isinstance(blocks, Ternary) else blocks
    blocks.data.flags.writeable = True
    records = blocks.data.view(FORMATS[kind].layout)
    if kind == "MXFP4":  # has no halves, but infinity
        records[7, 0] = (254, [0x77] * 16)
    else:
        records["d"][7, 0] = 0x7E00
    path = written(model)
    assert_refused(path, NonFiniteError, "tensor blk.1.ffn_up.weight has NaN or infinity in it")
    loaded = load(path, allow_nan=True)
    np.testing.assert_array_equal(loaded.layers[1].ffn_up.weights.data, blocks.data)


NEEDED = {"gptneox": ("blk.1.attn_norm.bias", "blk.0.ffn_up.bias", "output_norm.bias"), "qwen2": ("blk.1.attn_v.bias",)}
NEEDED |= {"qwen3": ("blk.0.attn_k_norm.weight",), "gpt2": ("position_embd.weight",), "bitnet": ("blk.0.ffn_sub_norm.weight",)}
NEEDED |= {"llama": ("blk.0.ffn_gate.weight",)}


@pytest.mark.parametrize(("family", "tensor"), [(family, tensor) for family, tensors in NEEDED.items() for tensor in tensors])
def test_what_a_family_needs_must_be_there(written, family, tensor):
    document = Document.read(path := written(drawn(family, "TQ2_0" if family == "bitnet" else "float32")))
    assert tensor in {entry.name for entry in document.entries}
    document.entries = [entry for entry in document.entries if entry.name != tensor]
    path.write_bytes(document.bytes())
    assert_refused(path, FileFormatError, f"tensor {tensor} is missing")


@pytest.mark.parametrize(
    ("weights", "field", "change"),
    [
        ("float32", "ffn_gate", lambda w: Linear(w.weights.astype(np.float16))),
        ("float32", "ffn_up", lambda w: Linear(w.weights, np.ones(len(w.weights), np.float32))),
        ("ternary", "ffn_up", lambda w: Linear(replace(w.weights, scale=np.float32(0.75)))),
    ],
    ids=["types", "biases", "scales"],
)
def test_gate_and_up_that_one_tensor_cannot_hold_are_not_written(tmp_path, weights, field, change):
    model = drawn("phi3", weights, n_layers=1)
    object.__setattr__(model.layers[0], field, change(getattr(model.layers[0], field)))
    with pytest.raises(
        UnsupportedError, match=r"tensor blk\.0\.ffn_up\.weight cannot hold ffn_gate and ffn_up: expected one type, one scale"
    ):
        write_gguf(tmp_path / "m.gguf", model)
