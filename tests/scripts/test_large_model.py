"""Models that outgrow memory: the files are sound, and what a process takes is what its limit allows."""

import sys

import large_model
import pytest

from bitnet_np import forward_full, load
from bitnet_np.errors import OptionError
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.selftest import digest


@pytest.mark.parametrize("kind", ["Q4_K", "I2_S", "TQ2_0", "Q4_K_M"])
def test_files_hold_models_of_the_shape(tmp_path, kind):
    path = tmp_path / "m.gguf"
    assert large_model.main(["write", "tiny", kind, str(path), "--layers", "3"]) == 0
    model = load(path)
    assert vars(model.config) | large_model.SHAPES["tiny"] | {"n_layers": 3} == vars(model.config)
    assert 0.5 < forward_full(model, [[1, 2, 3]]).std() < 2


def test_a_mixture_has_both_types_in_every_other_layer(tmp_path):
    path = tmp_path / "m.gguf"
    large_model.main(["write", "tiny", "Q4_K_M", str(path)])
    kinds = {name: tensor.type.name for name, tensor in open_gguf(path).tensors.items()}
    assert [kinds[f"blk.{n}.{part}.weight"] for n in (0, 1) for part in ("attn_v", "ffn_down", "ffn_up")] == 3 * ["Q4_K"] + 2 * ["Q6_K"] + [
        "Q4_K"
    ]
    assert kinds["output.weight"] == kinds["token_embd.weight"] == "Q6_K"


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
