"""Every kernel for the GPU against the CPU's, bit for bit.

    python tests/cuda_checks --ptx              without a GPU: the compiled kernels, interpreted by tests/ptx
    python tests/cuda_checks --gpu              on a GPU, with large shapes too
    python tests/cuda_checks --ptx rows rope    some groups, or some checks

__main__.py   the command: one line of JSON for each check, with its name, its seconds and its problem
common.py     the list of checks, arrays, comparisons
rows.py       norms, the quantiser, RoPE, writes to caches, masks, kernels over single numbers
matrices.py   tables of numbers, ternary matrices, products with norms
attention.py  causal, split over chunks, by a mask array
models.py     whole forwards, caches, decoding by a captured graph, refusals

A group of checks is a module. tests/gpu/test_cuda.py runs each group in a process of its own.
"""

MODULES = ("rows", "matrices", "attention", "models")
