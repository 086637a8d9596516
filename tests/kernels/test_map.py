"""The docstrings that are maps of the kernels name every file and folder once, and none that is not there; and who knows LLVM."""

import re
from pathlib import Path

import pytest

from bitnet_np import kernels
from bitnet_np.kernels import cache, fast


@pytest.mark.parametrize("package", [kernels, fast, cache], ids=lambda package: package.__name__)
def test_a_map_names_what_is_there(package):
    there = [path.name + "/" * path.is_dir() for path in Path(package.__file__).parent.iterdir() if not path.name.startswith("__")]
    assert sorted(re.findall(r"^(\w+(?:\.py|/)) +", package.__doc__, re.MULTILINE)) == sorted(there)


def test_what_builds_llvm_ir_is_in_one_folder():
    folder = Path(kernels.__file__).parent
    knowing = {
        path.parent.name for path in folder.rglob("*.py") if re.search(r"from llvmlite import ir|import intrinsic", path.read_text("utf-8"))
    }
    assert knowing - {"cuda"} == {"fast"}
