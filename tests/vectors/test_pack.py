"""A pack: its files, its version, the same bytes on every machine, and damage, which is an error and never a crash."""

import hashlib
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from checkers import REPLAY_C, REPLAY_RUST, SANITIZED, c_program, passed, rust_program
from processors import PROCESSORS

from bitnet_np import contract, forward_full, load
from bitnet_np.base.errors import UnsupportedError
from bitnet_np.vectors import operations, pack
from bitnet_np.vectors.choose import CHOICES, cases

FEW = {"types": ("ternary", "Q4_0"), "families": ("llama",)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A small pack, and what its manifest says."""
    folder = tmp_path_factory.mktemp("pack") / "pack"
    pack.write(folder, cases("small", **FEW), "1.2.3")
    return folder


@pytest.fixture(scope="module")
def manifest(folder):
    return json.loads((folder / "manifest.json").read_text("utf-8"))


def array(folder, place):
    """An array as the manifest describes it."""
    kind = {"bf16": "<u2"}.get(place["dtype"], f"<{place['dtype'][0]}{int(place['dtype'][1:]) // 8}" if place["dtype"] != "bf16" else "")
    count = int(np.prod(place["shape"], dtype=int))
    return np.fromfile(folder / place["file"], kind, count, offset=place["offset"]).reshape(place["shape"])


def test_digests_and_sizes_are_those_of_the_files(folder, manifest):
    for name, file in manifest["files"].items():
        content = (folder / name).read_bytes()
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"])
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert names == {*manifest["files"], "manifest.json", "vectors.txt", "vectors.h", "vectors.rs"}


def test_index_and_manifest_say_the_same(folder, manifest):
    first, *lines, last = (folder / "vectors.txt").read_text("utf-8").splitlines()
    assert first == f"bitnet_np-vectors 1 {manifest['version']} {len(manifest['files'])} {len(manifest['cases'])}"
    assert last == f"end {pack.fnv((first + chr(10) + chr(10).join(lines) + chr(10)).encode()):016x}"
    assert [line.split()[1] for line in lines if line.startswith("case")] == [case["id"] for case in manifest["cases"]]
    numbers = [*manifest["files"]]
    listed = {(p[1], numbers[int(p[3])], int(p[4]), *map(int, p[6:])) for line in lines if (p := line.split())[0] == "array"}
    for case in manifest["cases"]:
        assert case["what"]
        assert case["source"]
        for name, place in case["inputs"].items():
            assert (name, place["file"], place["offset"], *place["shape"]) in listed


def test_every_operation_has_a_case_and_only_some_are_written_if_asked(manifest):
    assert {case["operation"] for case in manifest["cases"]} == {*CHOICES["operations"]["full"]}
    some = {case.operation for case in cases("small", operations=("rope", "mask"))}
    assert some == {"rope", "mask"}


def test_a_number_of_a_case_is_what_the_contract_makes_of_its_inputs(folder, manifest):
    case = next(case for case in manifest["cases"] if case["id"] == "layer_norm-33")
    x, gain, bias = (array(folder, case["inputs"][name]) for name in ("x", "gain", "bias"))
    y = case["outputs"]["y"]["arrays"]
    np.testing.assert_array_equal(array(folder, y["bits"]), contract.layer_norm(x, gain, bias, case["numbers"]["eps"]))
    assert (np.abs(array(folder, y["bits"]) - array(folder, y["value"])) <= array(folder, y["limit"])).all()


def test_the_contracts_bits_are_within_every_limit(folder, manifest):
    for case in manifest["cases"]:
        for output in case["outputs"].values():
            places = output["arrays"]
            if "bits" in places:
                bits, value, limit = (array(folder, places[name]).astype(np.float64) for name in ("bits", "value", "limit"))
                assert (np.abs(bits - value) <= limit)[np.isfinite(limit)].all(), case["id"]


def test_a_models_file_gives_the_logits(folder, manifest):
    """By the kernels, which share nothing with the contract that has written them."""
    for case in manifest["cases"]:
        if case["operation"] == "model":
            tokens = array(folder, case["inputs"]["tokens_2" if case["id"].endswith("prefix") else "tokens"])
            logits = forward_full(load(folder / case["options"]["gguf"]), tokens[None])[0]
            expected = array(folder, case["outputs"]["logits"]["arrays"]["value"])
            np.testing.assert_array_equal(logits[len(logits) - len(expected) :], expected)


def test_the_version_changes_when_a_number_does_and_at_no_other_time(tmp_path, monkeypatch):
    def version(name, package="0"):
        return pack.write(tmp_path / name, cases("small", operations=("scaled",)), package)["version"]

    before = version("first")
    assert version("other package", "7") == before
    made = operations.noise
    monkeypatch.setattr(operations, "noise", lambda seed, *shape: np.nextafter(made(seed, *shape), np.float32(9)))
    assert version("other number") != before


def test_a_pack_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(pack, "MOST_BYTES", 1000)
    with pytest.raises(UnsupportedError, match="bytes, expected 1,000 at most"):
        pack.write(tmp_path / "pack", cases("small", operations=("scaled",)), "0")
    assert not (tmp_path / "pack").exists()


# --- every machine ------------------------------------------------------------------------------------------------------------------------

WITHOUT = "AVX2 FMA3 AVX512F AVX512CD AVX512_SKX AVX512_CLX AVX512_CNL AVX512_ICL AVX512_SPR X86_V3 X86_V4"


def test_two_processors_write_the_same_bytes(tmp_path):
    """One that Numba, NumPy and its library of matrices take for another: their own functions give other bits there."""
    if not PROCESSORS["SSE"].runs_here():
        pytest.skip("needs an x86-64 processor")
    wanted = "gelu,gelu_tanh,silu_gate,soft_cap,rope,attend,matmul,matmul_as_llama_cpp,expert_weights,experts_matmul,head,model"
    options = ["--size", "small", "--operations", wanted, "--types", "float32,Q4_K,IQ4_XS", "--families", "llama"]
    lesser = PROCESSORS["SSE"].environment | {"NPY_DISABLE_CPU_FEATURES": WITHOUT, "OPENBLAS_CORETYPE": "Nehalem"}
    contents = []
    for name, more in (("here", {}), ("lesser", lesser)):
        command = [sys.executable, "-W", "ignore", "-m", "bitnet_np", "vectors", str(tmp_path / name), *options]
        done = subprocess.run(command, env=os.environ | more, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        contents.append({path.relative_to(tmp_path / name): path.read_bytes() for path in (tmp_path / name).rglob("*") if path.is_file()})
    assert contents[0] == contents[1]


# --- damage -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["C", "C with sanitizers", "Rust"])
def reader(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("reader")
    if request.param == "Rust":
        return rust_program(folder, REPLAY_RUST)
    return c_program(folder, REPLAY_C, *(SANITIZED if "sanitizers" in request.param else ()))


def _refused(reader, folder, tmp_path):
    """What a checker says of a pack that it does not read."""
    done = subprocess.run([reader, folder, tmp_path], capture_output=True, text=True)
    assert done.returncode in (0, 1, 2), (done.returncode, done.stderr[-600:])  # no signal, no sanitizer's and no panic's code
    return done.stdout if done.returncode == 2 else ""


def _copy(folder, out):
    for path in folder.rglob("*"):
        if path.is_file():
            (out / path.relative_to(folder)).parent.mkdir(parents=True, exist_ok=True)
            (out / path.relative_to(folder)).write_bytes(path.read_bytes())
    return out


@pytest.fixture(scope="module")
def little(tmp_path_factory):
    """A pack of few cases, with numbers of each rule."""
    folder = tmp_path_factory.mktemp("little") / "pack"
    pack.write(folder, cases("small", operations=("scaled", "mask", "model"), types=(), families=("gpt2",)), "0")
    return folder


def test_a_damaged_byte_anywhere_is_seen(reader, little, tmp_path):
    damaged, rng = _copy(little, tmp_path / "pack"), np.random.default_rng(0)
    for name in ("vectors.txt", "operations/scaled-33.bin", "models/gpt2.bin", "models/gpt2.gguf"):
        content = (little / name).read_bytes()
        for at in rng.integers(0, len(content), 8):
            wrong = bytearray(content)
            wrong[at] ^= 1 << int(rng.integers(8))
            (damaged / name).write_bytes(wrong)
            assert re.search(r"Bail out! .*(is damaged|is cut short|no index|no words)", _refused(reader, damaged, tmp_path))
        for some in (b"", content[:-1], content + b"\0"):
            (damaged / name).write_bytes(some)
            assert re.search(r"Bail out! .*(is damaged|is cut short|bytes, expected)", _refused(reader, damaged, tmp_path))
        (damaged / name).unlink()
        assert "cannot be read" in _refused(reader, damaged, tmp_path)
        (damaged / name).write_bytes(content)
    assert "no case ran" in _refused(reader, damaged, tmp_path)


def _sealed(text):
    """An index with the checksum of what it says."""
    return text + b"end %016x\n" % pack.fnv(text)


def test_an_index_that_lies_never_crashes(reader, little, tmp_path):
    """Its checksums are right: whoever writes a pack can compute them. Words are exchanged, and numbers are the sizes that overflow."""
    damaged, rng, numbers = _copy(little, tmp_path / "pack"), np.random.default_rng(1), tmp_path / "numbers"
    numbers.mkdir()
    lines = (little / "vectors.txt").read_bytes().splitlines()[:-1]
    words = [word for line in lines for word in line.split()]
    more = [
        b"0",
        b"8",
        b"999999999999999",
        b"18446744073709551615",
        b"-1",
        b"nan",
        b"../x",
        b"",
        b"\xff\xfe",
        b"x" * 70,
        b"case",
        b"out",
        b"f64",
    ]
    refused = 0
    for _ in range(150):
        changed = [line.split() for line in lines]
        for _ in range(int(rng.integers(1, 4))):
            line = changed[int(rng.integers(len(changed)))]
            pool = more if rng.random() < 0.6 else words
            line[int(rng.integers(len(line)))] = pool[int(rng.integers(len(pool)))]
            if rng.random() < 0.2:
                changed.remove(line)
        (damaged / "vectors.txt").write_bytes(_sealed(b"\n".join(map(b" ".join, changed)) + b"\n"))
        refused += "no case ran" not in _refused(reader, damaged, numbers)
    assert refused > 75
    whole = b"\n".join(lines) + b"\n"
    for old, new, says in (
        (rb"file 0 (\d+) (\w+) operations/scaled-33.bin", rb"file 0 \1 \2 ../../secret.bin", "outside|not file"),
        (rb"array x f32 0 0 2 3 33", rb"array x f32 0 0 2 3 999999999", "larger than its file|no array in its file"),
        (rb"array x f32 0 0 2 3 33", rb"array x f32 77 0 2 3 33", "no array"),
        (rb"out y bounds\narray y.value f64", rb"out y bounds\narray y.value f32", "what"),
        (rb"bitnet_np-vectors 1", rb"bitnet_np-vectors 2", "no index of schema 1"),
    ):
        text, count = re.subn(old, new, whole, count=1)
        assert count
        (damaged / "vectors.txt").write_bytes(_sealed(text))
        assert re.search(says, _refused(reader, damaged, numbers))


def test_an_output_that_the_engine_forgot_fails(little, tmp_path):
    program = c_program(tmp_path, REPLAY_C.replace("return VEC_SKIP;", "continue;"))
    verdicts, text = passed(program, little, tmp_path)
    assert not any(verdicts.values())
    assert "is nan" in text
