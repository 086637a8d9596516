"""The kernels for NVIDIA GPUs, twins of the CPU's: device code alone, launched by bitnet_np.gpu, of which nothing is imported here.

target.py             how kernels and their functions are compiled
ptx.py                single instructions: the one file that knows PTX
layout.py             ternary matrices and codes as they lie on the GPU: the one file that needs no CUDA
rows.py               kernels that take rows or numbers one by one: norms, the quantiser, RoPE, caches, masks
norms.py              RMS norms of rows that fit shared memory, with the codes or the product that read them
floats.py             tables of float32, float16 or bfloat16, and products with them
ternary.py            products of ternary matrices with int8 codes
attention.py          attention of runs of rows, causal or by a mask array
attention_split.py    attention of single rows, as in decoding: a block for each chunk of keys
attention_shape.py    what attention is compiled for, and the memory of a block; its steps are attention_scores.py,
                      attention_weights.py and attention_values.py
"""
