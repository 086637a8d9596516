"""Models that outgrow memory: the files are sound."""

import large_model
import pytest

from bitnet_np import forward_full, load
from bitnet_np.files.gguf_file import open_gguf


@pytest.mark.parametrize("kind", ["Q4_K", "I2_S", "TQ2_0", "Q4_K_M", "Q5_K_M"])
def test_files_hold_models_of_the_shape(tmp_path, kind):
    path = tmp_path / "m.gguf"
    assert large_model.main(["tiny", kind, str(path), "--layers", "3"]) == 0
    model = load(path)
    assert vars(model.config) | large_model.SHAPES["tiny"] | {"n_layers": 3} == vars(model.config)
    assert 0.5 < forward_full(model, [[1, 2, 3]]).std() < 2
    types = {name: tensor.type.name for name, tensor in open_gguf(path).tensors.items()}
    mixed = {types[f"{name}.weight"] for name in ("blk.1.attn_v", "blk.1.ffn_down", "output", "token_embd")}
    others = {types[f"blk.{name}.weight"] for name in ("0.attn_v", "0.ffn_down", "0.ffn_up", "1.ffn_up", "2.ffn_down")}
    if kind.endswith("_M"):  # Q6_K for the tables, and for some matrices of every other layer
        assert (mixed, others) == ({"Q6_K"}, {kind.removesuffix("_M")})
    else:
        assert others == {kind}
