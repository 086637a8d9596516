"""Loading: a sound file is the model that was written, without a copy; a file with a tensor too few or too many is refused."""

from math import nan

import numpy as np
import pytest
import resident
from benchmarks.released import released, write_released
from family_models import assert_refused
from fuzzing.gguf_bytes import UINT32, UINT64, Entry, number
from gguf_models import CONFIG, MATRIX_NAMES, OPTIONAL, TENSORS, A, assert_same_model, floats, written_model

from bitnet_np.base.errors import FileFormatError, NonFiniteError, OptionError
from bitnet_np.base.tensor_types import F16, Q8_0
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.load import load, model_from, open_model
from bitnet_np.model import packing
from bitnet_np.model.records import Ternary


@pytest.mark.parametrize("keys", [{}, OPTIONAL, {A + "block_count": number(UINT64, 2)}, {"llama.rope.scaling": number(UINT32, 2)}])
def test_a_sound_file_is_the_model_that_was_written(write, keys):
    assert_same_model(load(str(write(keys))), written_model())


def test_tables_may_be_transposed(write):
    """As [D, V]: of another engine's loader. A square table is [V, D]."""
    head = floats(CONFIG.vocab, CONFIG.width)
    turned = {"token_embd.weight": np.ascontiguousarray(TENSORS["token_embd.weight"].T), "output.weight": np.ascontiguousarray(head.T)}
    for keys in ({}, OPTIONAL):
        assert_same_model(load(write(keys, turned)), written_model(output=head))
    wrong = Entry("token_embd.weight", (CONFIG.vocab, CONFIG.width + 64), F16.number)
    assert_refused(write(tensors={"token_embd.weight": wrong}), FileFormatError, "token_embd.weight has shape [192, 9]")
    blocks = Entry("output.weight", (32, CONFIG.width), Q8_0.number)
    table = {"token_embd.weight": floats(32, CONFIG.width), "output.weight": blocks}
    message = "tensor output.weight has shape [128, 32], expected [32, 128], as only floats may be transposed, and its type is Q8_0"
    assert_refused(write(tensors=table), FileFormatError, message)


def test_progress_is_told_after_each_layer(write):
    calls = []
    load(write(), lambda done, total: calls.append((done, total)))
    assert calls == [(1, 2), (2, 2)]


def test_tables_stay_where_they_are_in_the_file(write):
    file = open_model(write(tensors={"output.weight": floats(CONFIG.vocab, CONFIG.width)}))
    model = model_from(file)
    assert np.shares_memory(model.token_embd, file.tensors["token_embd.weight"].data)
    assert np.shares_memory(model.output, file.tensors["output.weight"].data)
    arrays = [
        model.token_embd,
        model.output,
        model.output_norm,
        model.rope_frequency,
        model.layers[0].attn_norm,
        model.layers[0].attn_q.weights.codes,
    ]
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


@pytest.mark.skipif(not resident.STATM.exists(), reason="needs Linux to say how much memory is the process's own")
def test_loading_takes_no_more_memory_than_the_file(tmp_path):
    """Matrices are packed anew, and their pages of the file given back."""
    path = tmp_path / "larger.gguf"
    write_released(path, released(vocab=300, width=1024, n_layers=6, ffn=4096, heads=8, kv_heads=4, head_dim=128), seed=1)
    small = tmp_path / "small.gguf"
    write_released(small, released(vocab=300, width=512, n_layers=1, ffn=2048, heads=4, kv_heads=4, head_dim=128), seed=1)
    load(small)  # compiles what loading needs, for threads to share
    before = resident.of_process()
    model = load(path)
    assert path.stat().st_size > 20 << 20
    assert resident.of_process() - before < path.stat().st_size + (4 << 20)
    assert model.config.n_layers == 6


def test_no_other_layout_is_known(write):
    with pytest.raises(OptionError, match="i2s_layout is '32/8', expected one of 128/32, 64/16, 4-rows"):
        load(write(), i2s_layout="32/8")


@pytest.mark.parametrize("name", ["token_embd.weight", "blk.0.ffn_norm.weight", MATRIX_NAMES[0]])
def test_nan_may_be_allowed(write, name):
    if isinstance(TENSORS[name], Ternary):
        wrong = packing.pack(packing.unpack(TENSORS[name]), nan)
    else:
        wrong = TENSORS[name].copy()
        wrong.reshape(-1)[-1] = nan
    path = write(tensors={name: wrong})
    with pytest.raises(NonFiniteError, match=f"tensor {name} has "):
        load(path)
    model = load(path, allow_nan=True)
    found = {"token_embd.weight": model.token_embd, "blk.0.ffn_norm.weight": model.layers[0].ffn_norm}
    assert np.isnan(model.layers[0].attn_q.weights.scale if isinstance(wrong, Ternary) else found[name].reshape(-1)[-1])
    with pytest.raises(NonFiniteError, match="logits of sequence 0"):
        forward_full(model, [[8]])


def test_what_is_no_number_is_not_allowed_with_nan(write):
    name = MATRIX_NAMES[0]
    with pytest.raises(NonFiniteError, match=r"scale -1\.0"):
        load(write(tensors={name: packing.pack(packing.unpack(TENSORS[name]), -1.0)}), allow_nan=True)
