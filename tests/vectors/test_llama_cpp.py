"""llama.cpp's library under a pack, by examples/vectors/llama_cpp.c: where the compiler is told in LLAMA_CPP_FLAGS where it is."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest
from checkers import FOLDER

from bitnet_np.vectors import pack
from bitnet_np.vectors.choose import cases

ADAPTOR = Path(__file__).parents[2] / "examples" / "vectors" / "llama_cpp.c"


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    flags = os.environ.get("LLAMA_CPP_FLAGS")
    if flags is None:
        pytest.skip("needs llama.cpp, and LLAMA_CPP_FLAGS='-I.../include -L.../lib -lllama -lggml -lggml-base -lggml-cpu'")
    program = tmp_path_factory.mktemp("llama_cpp") / "llama_cpp"
    subprocess.run(["cc", "-std=gnu11", "-O1", f"-I{FOLDER}", ADAPTOR, "-o", program, *shlex.split(flags), "-lm"], check=True)
    return program


def test_llama_cpp_is_right_but_for_the_angles_of_far_positions(program, tmp_path):
    """It steps RoPE's angles from pair to pair in float32, which at position 100,000 is more than roundings of one number explain."""
    some = {
        "types": ("float32", "bfloat16", "Q4_0", "Q4_K", "Q6_K", "TQ2_0", "IQ4_XS"),
        "families": ("llama", "qwen3", "gemma3", "phi2", "gpt2"),
    }
    pack.write(tmp_path / "pack", cases("full", **some), "0")
    done = subprocess.run([program, tmp_path / "pack"], capture_output=True, text=True)
    ran = [line for line in done.stdout.splitlines() if line.startswith(("ok", "not ok")) and "# SKIP" not in line]
    assert [line for line in ran if line.startswith("not ok")] == [line for line in ran if "- rope-far" in line]
    for beginning in ("model-llama-prefix", "model-gemma3-batch", "model-Q4_K-as-llama-cpp", "matmul_as_llama_cpp-Q6_K", "embed-IQ4_XS"):
        assert any(f"- {beginning}" in line for line in ran), beginning
