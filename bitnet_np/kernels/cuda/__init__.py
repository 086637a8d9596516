"""The kernels for NVIDIA GPUs: device code alone. bitnet_np.gpu launches them, and is not imported here.

They are twins of the CPU's kernels; experts and the dialects have none.

target.py       the compilation of kernels and their functions
ptx.py          single instructions that Numba has no name for
rows.py         kernels over rows or single numbers: norms, the quantiser, RoPE, caches, masks
floats.py       tables of float32, float16 or bfloat16, and products with them
ternary.py      products of ternary matrices with int8 codes, by tensor cores
attention.py    attention, causal or by a mask array
"""
