"""GGUF files that are written: complete or not there, and a model that no such file can say is refused."""

import gguf
import pytest
from family_models import drawn
from models import assert_same_bits

from bitnet_np.base.errors import FileFormatError, UnsupportedError
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.gguf_writer import write_model
from bitnet_np.files.load import load
from bitnet_np.model.records import LongRope, Yarn
from bitnet_np.testing.models import write_gguf

TOKENS = [[0, 22, 3, 3, 7, 1]]


def test_the_models_own_keys_win_over_others(tmp_path):
    """And the type of the matrices over the general.file_type that is given, where it says one."""
    metadata = {"tokenizer.ggml.model": "none", "llama.context_length": 7, "general.file_type": 9, "general.name": "a name"}
    metadata["tokenizer.ggml.merges"] = []  # of no type, and left out
    for weights, expected in (("float32", 0), ("Q8_0", 9)):
        write_model(tmp_path / "a.gguf", drawn("llama", weights), metadata)
        fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
        found = [fields[key].contents() for key in ("llama.context_length", "general.file_type", "general.name")]
        assert found == [40, expected, "a name"]
        assert "tokenizer.ggml.merges" not in fields


def test_a_check_that_fails_leaves_no_file(tmp_path):
    def check(path):
        load(path)
        raise FileFormatError("checked")

    with pytest.raises(FileFormatError, match="checked"):
        write_model(tmp_path / "a.gguf", drawn("llama"), {"tokenizer.ggml.model": "none"}, check=check)
    assert not list(tmp_path.iterdir())


def test_a_qwen3_may_have_norms_inside_its_linears(written):
    """As bitnet.cpp's embedding models have them; in another architecture test_published_folders.py has them refused."""
    model = drawn("qwen3", "ternary", inner_norms=True, eps=1e-6, pooling="mean")
    path = written(model)
    assert open_gguf(path).tensors["blk.1.ffn_down_norm_in.weight"].shape == (256,)
    assert_same_bits(forward_full(load(path), TOKENS), forward_full(model, TOKENS))
    assert (forward_full(load(path), TOKENS) != forward_full(drawn("qwen3", "ternary", eps=1e-6), TOKENS)).any()


@pytest.mark.parametrize("family", ["gptneox", "gpt2"])
@pytest.mark.parametrize(("weights", "together"), [("float16", True), ("Q8_0", True), ("TQ2_0", True), ("ternary", False)])
def test_queries_keys_and_values_are_one_tensor_where_the_family_has_it(written, family, weights, together):
    """llama.cpp reads no other files of these families. I2_S has one scale for a tensor, so matrices of three scales stay apart.

    That they are read as what was written, model/test_families.py says.
    """
    model = drawn(family, weights, n_layers=1)
    path = written(model)
    names = {name: tensor.shape for name, tensor in open_gguf(path).tensors.items() if "attn_" in name and "output" not in name}
    c, norm = model.config, {"blk.0.attn_norm.weight": (256,), "blk.0.attn_norm.bias": (256,)}
    rows = {"qkv": c.q_width + 2 * c.kv_width} if together else {"q": c.q_width, "k": c.kv_width, "v": c.kv_width}
    parts = {f"blk.0.attn_{part}.weight": (n, c.width) for part, n in rows.items()}
    assert names == norm | parts | {f"blk.0.attn_{part}.bias": (n,) for part, n in rows.items()}


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("llama", {"rope": "halves"}, "rope is halves, but a GGUF file of architecture llama would say adjacent"),
        (
            "qwen2",
            {"longrope": LongRope(16, (1.0,) * 32, (2.0,) * 32)},
            "qwen2.rope.scaling.type is 'longrope', supported are none, linear",
        ),
        ("qwen2", {"local_rope_base": 100.0}, r"local_rope_base is 100\.0, but a GGUF file of architecture qwen2 would say None"),
        ("gemma3", {"local_layers": ()}, r"local_layers is \(\), but a GGUF file of architecture gemma3 would say \(0,\)"),
        ("bitnet-b1.58", {"window": 3}, r"window is 3, but a GGUF file of architecture bitnet-b1\.58 would say None"),
        ("qwen2", {"yarn": Yarn(4.0, 16, truncate=False)}, "yarn is .*truncate=False.*, but a GGUF file of architecture qwen2 would say"),
        ("qwen2", {"rope_magnitude": 1.5}, r"rope_magnitude is 1\.5, but a GGUF file of architecture qwen2 would say 1\.0"),
        ("smollm3", {"rope_layers": (1,)}, r"rope_layers is \(1,\), but a GGUF file of architecture smollm3 would say \(0, 1\)"),
        ("llama", {"inner_norms": True}, "layer 0 ffn_down has a norm inside the linear"),
        ("qwen3", {"inner_norms": True}, "layer 0 ffn_down has a norm inside the linear with epsilon 1e-06, and GGUF has only"),
        ("qwen2", {"rope_base": 1e6 + 1 / 64}, r"rope_base is 1000000\.015625, but .* would say 1000000\.0"),
    ],
)
def test_a_model_that_no_file_can_say_is_refused(tmp_path, family, changes, message):
    with pytest.raises(UnsupportedError, match=message):
        write_gguf(tmp_path / "a.gguf", drawn(family, **changes))
