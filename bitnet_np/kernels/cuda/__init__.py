"""The kernels for NVIDIA GPUs, twins of the CPU's. They are device code alone: bitnet_np.gpu launches them, and is not imported here.

target.py             the compilation of kernels and their functions
ptx.py                single instructions: the one file that knows PTX
layout.py             the layout of ternary matrices and codes: the one file that needs no CUDA
rows.py               kernels over single rows or numbers: norms, the quantiser, RoPE, caches, masks
norms.py              RMS norms of rows that fit shared memory, with the codes or the product that read them
floats.py             tables of float32, float16 or bfloat16, and products with them
ternary.py            products of ternary matrices with int8 codes
attention.py          attention of runs of rows, causal or by a mask array
attention_split.py    attention of single rows, as in decoding: a block for each chunk of keys
attention_shape.py    the shapes of attention kernels, and the memory of a block; the steps are attention_scores.py,
                      attention_weights.py and attention_values.py
"""
