"""mlx-lm's folders with weights quantised in groups, against what mlx-lm computed with them: see data/README.md."""

from pathlib import Path

import numpy as np
import pytest

import bitnet_np as bn
from bitnet_np.judge.verdict import Verdict

DATA = Path(__file__).parents[1] / "data" / "mlx"
MODELS = {name: bn.load(DATA / name) for name in ("llama", "qwen3_moe")}
RECORDED = {name: dict(np.load(DATA / name / "recorded.npz")) for name in MODELS}
MODULES = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output", "gate": "ffn_gate_inp"}
MODULES |= {f"{name}_proj": f"ffn_{name}" for name in ("gate", "up", "down")}


@pytest.mark.parametrize("name", MODELS)
def test_weights_are_those_that_products_take(name):
    """Of 2, 3, 4, 5, 6 and 8 bits, to the bit."""
    model, recorded = MODELS[name], RECORDED[name]
    modules = {path.removeprefix("model.layers.0."): rows for path, rows in recorded.items() if path.startswith("model.layers.0.")}
    assert len(modules) >= 7
    for path, rows in modules.items():
        layer = model.layers[0].experts[0] if "switch_mlp" in path else model.layers[0]
        np.testing.assert_array_equal(getattr(layer, MODULES[path.rpartition(".")[2]]).weights[: len(rows)], rows)
    if "lm_head" in recorded:
        np.testing.assert_array_equal(model.output[: len(recorded["lm_head"])], recorded["lm_head"])


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_the_embedding_are_rounded_as_the_model_is(name):
    np.testing.assert_array_equal(MODELS[name].token_embd[RECORDED[name]["tokens"]], RECORDED[name]["embedding"])


def test_a_tied_head_is_not_rounded():
    """mlx-lm multiplies by the groups themselves."""
    model = MODELS["llama"]
    assert model.output is not None
    assert 0 < np.abs(model.output - model.token_embd).max() < 2**-7 * np.abs(model.output).max()


def test_logits_are_those_of_mlx_lm():
    def judged(name, **options):
        return bn.check(MODELS[name], RECORDED[name]["tokens"], RECORDED[name]["logits"], **options).verdict

    assert judged("qwen3_moe") <= Verdict.ROUNDING
    assert judged("llama", precision="act=bf16,acc=bf16") == Verdict.FLIPS  # recorded on a processor where mlx adds up in bfloat16
