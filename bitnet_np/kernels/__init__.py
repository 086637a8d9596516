"""The kernels: Numba on the CPU, and in cuda/ on NVIDIA GPUs.

cpu.py         the operations of the CPU backend, gathered from the files below
scalar.py      the rules of the arithmetic contract (../contract/) for one number: exp, rounding, GELU
rows.py        norms, RoPE, residuals, gates                 floats.py      embedding and products with float tables
ternary.py     the int8 quantiser and ternary products       blocks.py      products with ggml's block types (block_formats.py)
activations.py  how llama.cpp rounds what it multiplies by a matrix
attention.py   causal attention                              masks.py       attention with mask arrays, and their filling
backward.py    the gradients of these operations             certified.py   bounds on the logits of every token
packing.py     files' ternary layouts -> packed matrices     checks.py      weights that are NaN, infinite or no ternary code
block_products.py  products with these types by bytes: block_token.py of one token, block_tiles.py on matrix tiles, what they share in
               block_rows.py, block_plans.py and block_bytes.py
ternary_product.py and ternary_tiles.py: what ternary products share, and those on matrix tiles (amx.py)
grids.py       products with the block types that have no kernel
tiles.py       tiles of dot products; sums.py: float64 sums  simd.py        vector registers: the one file that knows LLVM
processor.py   the features that Numba compiles for
launching.py   compiling kernels (outermost.py), and sharing them out
workspace.py   memory for results                            huge_pages.py  memory for weights
storage.py     the memory of a KV cache
disk_cache.py  compiled kernels on disk: their folder (cache_folder.py), their check (cache_check.py), and private_cache.py for unknown
               versions of Numba
"""
