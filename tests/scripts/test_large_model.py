"""Models that outgrow memory: the files are sound, and what a process takes is what its limit allows."""

import sys

import large_model
import pytest

from bitnet_np import forward_full, load
from bitnet_np.base.errors import OptionError
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.testing.selftest import digest


@pytest.mark.parametrize("kind", ["Q4_K", "I2_S", "TQ2_0", "Q4_K_M"])
def test_files_hold_models_of_the_shape(tmp_path, kind):
    path = tmp_path / "m.gguf"
    assert large_model.main(["write", "tiny", kind, str(path), "--layers", "3"]) == 0
    model = load(path)
    assert vars(model.config) | large_model.SHAPES["tiny"] | {"n_layers": 3} == vars(model.config)
    assert 0.5 < forward_full(model, [[1, 2, 3]]).std() < 2
    types = {name: tensor.type.name for name, tensor in open_gguf(path).tensors.items()}
    mixed = {types[f"{name}.weight"] for name in ("blk.1.attn_v", "blk.1.ffn_down", "output", "token_embd")}
    others = {types[f"blk.{name}.weight"] for name in ("0.attn_v", "0.ffn_down", "0.ffn_up", "1.ffn_up", "2.ffn_down")}
    if kind == "Q4_K_M":  # Q6_K for the tables, and for some matrices of every other layer
        assert (mixed, others) == ({"Q6_K"}, {"Q4_K"})
    else:
        assert others == {kind}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_is_watched_and_limited(tmp_path, capsys):
    path = tmp_path / "m.gguf"
    assert large_model.main(["write", "tiny", "Q4_K", str(path)]) == 0
    usage, said = large_model.run(path, 3, 4 * 10**9, 1)
    assert digest(forward_full(load(path), [[1, 2, 3]])[0]) in said
    assert usage.seconds > 0
    assert 10**7 < usage.private < 10**9
    with pytest.raises(OptionError, match="ended with exit code"):
        large_model.run(path, 3, 10**7, 1)
