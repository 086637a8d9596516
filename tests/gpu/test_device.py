"""What is said where the package, a version or the GPU is missing, and what is chosen then."""

import sys

import pytest
from child import run_python
from gpu_marks import needs_no_gpu, needs_package

from bitnet_np.base.errors import OptionError
from bitnet_np.cli import main as cli
from bitnet_np.files import embedded
from bitnet_np.gpu.device import open_cuda


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr("bitnet_np.gpu.device.find_spec", lambda name: None)
    with pytest.raises(OptionError, match=r"numba-cuda is not installed.*pip install 'bitnet_np\[cuda\]'"):
        open_cuda()


@needs_package
def test_versions_that_do_not_go_together_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "numba.cuda", None)
    with pytest.raises(OptionError, match=r"numba-cuda [\d.]+, numba [\d.]+, numpy [\d.]+ do not load together, import of numba\.cuda"):
        open_cuda()


@needs_package
@needs_no_gpu
def test_without_a_gpu_the_error_says_so():
    with pytest.raises(OptionError, match="no CUDA device"):
        open_cuda()


@needs_package
def test_a_missing_compiler_is_no_missing_driver(monkeypatch):
    from numba import cuda

    monkeypatch.setattr(cuda, "is_available", lambda: False)
    monkeypatch.setattr(cuda, "cuda_error", lambda: None)
    with pytest.raises(OptionError, match=r"the driver is there and libnvvm is not.*CUDA_HOME"):
        open_cuda()


@needs_no_gpu
def test_the_command_line_without_a_gpu(capsys):
    with embedded.model_path() as path:
        assert cli.main(["logits", str(path), "--tokens", "1,2", "--device", "cuda"]) == 2
        assert "no CUDA" in capsys.readouterr().err
        assert cli.main(["logits", str(path), "--tokens", "1,2", "--device", "auto"]) == 0


def test_the_cpu_path_imports_no_cuda():
    run_python("import sys, bitnet_np.cli; sys.exit(any(name.startswith('numba.cuda.cudadrv') for name in sys.modules))")
