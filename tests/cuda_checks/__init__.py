"""Every kernel for the GPU against the CPU's, bit for bit.

    python tests/cuda_checks --ptx                without a GPU: the compiled kernels, interpreted by tests/ptx
    python tests/cuda_checks --gpu                on a GPU, with large shapes too
    python tests/cuda_checks --ptx models rope    some groups, or some checks

__main__.py   the command: one line of JSON for each check, with its name, its seconds and its problem
common.py     the list of checks, arrays, comparisons
kernels.py    single operations
models.py     whole forwards, caches, decoding, refusals
compiled.py   what the kernels that ran before have been compiled to

A group of checks is a module. tests/gpu/test_cuda.py runs them all in one process, which compiles each kernel once.
"""

MODULES = ("kernels", "models", "compiled")
