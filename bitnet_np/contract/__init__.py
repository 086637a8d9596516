"""The law to the bit: every operation of a backend in plain NumPy, with each rounding in its place.

It is a backend like kernels/cpu.py: `forward_full(model, tokens, ops=contract)`. The kernels, and their twins
for CUDA, must give its bits. It is slow and shares no code with them. It imports only NumPy, gguf-py, errors,
and tables of tensor types. A port of the arithmetic is a port of these files.

THE CONTRACT. Prefill, decode, any batch, any chunks,
any number of threads and any processor give the same bits, because:

* Everything is in float32, and rounded after each operation, unless it is said otherwise. Ties round to even.
  Division and square root are IEEE's. Only what is written as `fma` is fused: a * b + c rounded once. Nothing
  else is reordered or approximated.
* Sums of integers are exact, so their order is free. A ternary product ends in float32 as
  `sum / scale * weight scale`.
* Every sum of floats has one order that depends on the summed axis alone: 16 lanes, lane = index mod 16, each
  lane a chain of fused multiply-adds that starts at +0, lanes then added by halving (i with i+8, i+4, i+2,
  i+1). Sums in float64 (the squares and means of norms) have 128 lanes, lane = index mod 128, halved likewise
  (i with i+64, i+32, ... i+1).
* Such a sum is never -0: +0 is added at its end. Lanes become -0 where products underflow. So it does not
  matter whether a -0 among weights or inputs keeps its sign, or whether zeros pad a row.
* Sums over keys go by absolute position in chunks of CHUNK keys from position 0. A chunk has its own maximum
  m_c, its own sum l_c = sum exp(s - m_c) by the lane rule, and its own o_c = sum exp(s - m_c) v as one chain
  in key order. Chunks are folded in order: m' = max(m, m_c), a = exp(m - m'), b = exp(m_c - m'),
  l' = fma(l, a, l_c * b), o' = fma(o, a, o_c * b). At the end o / l.
* The softmax of a router's logits is summed over experts by their numbers. The weights of a token's k experts
  are summed by falling logits, as are its k results times these weights; each product is rounded before it is
  added. Of equal logits, the one with the lower number is the larger.
* exp, tanh and the normal distribution are polynomials, by the constants in numbers.py.
* An all-zero row quantises to zeros. A row with NaN or infinity in it quantises to zeros with scale NaN, so
  that the NaN reaches the logits instead of vanishing. The sign and the payload of a NaN are open.

numbers.py      fused multiply-adds, lanes, exponentials and angles, which the rest is made of
products.py     matrices of floats, blocks and ternary codes
blocks.py       the weights of ggml's block types, and llama.cpp's products with them
rows.py         norms, rotations, roundings, sums and activations
attention.py    scores, softmax and sums over keys, in chunks
experts.py      routers and mixtures
arrays.py       where arrays are: NumPy's memory

Arrays are float32 if their type is not given; engine/backend.py explains the operations,
model/records.py the letters of shapes.
"""

# ruff: noqa: F401 (what is imported here are the backend's operations)
from .arrays import ArrayStorage, empty, mark, resident, storage, to_host, upload, wait
from .attention import CHUNK, attend, attend_float16, attend_masked
from .experts import expert_weights, mix, sigmoid_gate, top_experts
from .products import (
    embed,
    embed_blocks,
    matmul,
    matmul_blocks,
    matmuls_blocks_as_llama_cpp,
    quantize,
    ternary_matmul,
    ternary_matmuls,
)
from .rows import (
    add,
    add_bias,
    gelu,
    gelu_gate,
    gelu_tanh,
    layer_norm,
    relu2_gate,
    rms_norm,
    rope,
    rope_adjacent,
    rotations,
    round_as,
    scaled,
    silu_gate,
    soft_cap,
    take,
)

device = "cpu"
exact_only = False
splits_rows = True
repeats = False
