"""`vectors`: what it writes, chooses and refuses."""

import json

from command_line import TINY
from models import random_model

from bitnet_np import load
from bitnet_np.testing import write_gguf


def cases(folder):
    return json.loads((folder / "manifest.json").read_text("utf-8"))["cases"]


def test_a_pack_of_some_operations(run, tmp_path):
    out = run("vectors", tmp_path / "pack", "--size", "small", "--operations", "rms_norm,mask")
    assert f"{tmp_path / 'pack'}: version " in out
    assert {case["operation"] for case in cases(tmp_path / "pack")} == {"rms_norm", "mask"}
    facts = run("vectors", tmp_path / "again", "--size", "small", "--operations", "rms_norm,mask", "--json")
    assert facts["cases"] == len(cases(tmp_path / "pack"))
    assert facts["version"] in out
    assert facts["bytes"] == sum(path.stat().st_size for path in (tmp_path / "again").rglob("*") if path.is_file())


def test_like_a_model(run, tmp_path):
    """Its family, and the types of its tensors."""
    run("vectors", tmp_path / "pack", "--size", "small", "--like", TINY, "--operations", "model,matmul,ternary_matmul")
    ids = {case["id"] for case in cases(tmp_path / "pack")}
    assert {"model-bitnet-b1.58-whole", "model-ternary-whole", "ternary_matmul-33"} <= ids
    assert not any("Q4_0" in case or "llama" in case for case in ids)


def test_like_a_model_of_other_settings(run, tmp_path):
    """Ties, biases, scalings, window and shared heads, in a small model; not the sizes."""
    sizes = {"width": 192, "ffn": 192, "heads": 6, "kv_heads": 2, "head_dim": 32, "n_layers": 3, "vocab": 90}
    settings = {"window": 40, "rope_scaling": 4.0, "rope_base": 5000.0, "eps": 2.0**-10}
    model = random_model(1, family="qwen2", table="float16", weights="Q8_0", tied=True, **sizes, **settings)
    write_gguf(tmp_path / "m.gguf", model)
    run("vectors", tmp_path / "pack", "--size", "small", "--like", tmp_path / "m.gguf", "--operations", "model,model_as_llama_cpp")
    found = {case["id"]: case["options"] for case in cases(tmp_path / "pack") if case["id"].startswith("model-like")}
    assert set(found) == {f"model-like-{way}" for way in ("whole", "steps", "as-llama-cpp", "chunks", "batch", "prefix")}
    small = load(tmp_path / "pack" / found["model-like-whole"]["gguf"])
    c, w = small.config, small.layers[0]
    assert (c.architecture, c.eps, c.rope_base, c.rope_scaling, c.heads // c.kv_heads) == ("qwen2", model.config.eps, 5000.0, 4.0, 3)
    assert (w.attn_q.weights.type.name, w.attn_q.bias is not None, w.attn_output.bias, small.output) == ("Q8_0", True, None, None)
    assert c.window == 5
    assert c.n_layers == 2


def test_what_is_refused(refused, tmp_path):
    assert "--operations has 'rmsnorm', expected some of" in refused("vectors", tmp_path / "a", "--operations", "rmsnorm")
    assert "did you mean rms_norm" in refused("vectors", tmp_path / "a", "--operations", "rmsnorm")
    assert "--types has 'Q9'" in refused("vectors", tmp_path / "a", "--types", "Q9")
    assert "--families has ''" in refused("vectors", tmp_path / "a", "--families", "")
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_text("")
    assert "b is there, expected a new folder or an empty one" in refused("vectors", tmp_path / "b")
