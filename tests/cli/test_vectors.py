"""`vectors`: what it writes, chooses and refuses."""

import json

from command_line import TINY


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


def test_what_is_refused(refused, tmp_path):
    assert "--operations has 'rmsnorm', expected some of" in refused("vectors", tmp_path / "a", "--operations", "rmsnorm")
    assert "did you mean rms_norm" in refused("vectors", tmp_path / "a", "--operations", "rmsnorm")
    assert "--types has 'Q9'" in refused("vectors", tmp_path / "a", "--types", "Q9")
    assert "--families has ''" in refused("vectors", tmp_path / "a", "--families", "")
    assert not (tmp_path / "a").exists()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "file").write_text("")
    assert "b is there, expected a new folder or an empty one" in refused("vectors", tmp_path / "b")
