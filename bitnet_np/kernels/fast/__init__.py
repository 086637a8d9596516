"""What builds LLVM IR: no other kernel for the CPU knows LLVM. Kernels call the functions made here.

emit.py           LLVM IR in few words: registers, tiles of them, memory
simd.py           one number, rows of numbers, tiles of dot products
byte_dots.py      byte dot products: the instructions of each processor
ternary_steps.py  ternary codes out of packed bytes, and their products
block_codes.py    the integers in ggml's blocks, as bytes
block_floats.py   ggml's blocks as floats
plans.py          the order in which a type's codes are multiplied by bytes
block_bytes.py    these products
float_control.py  the register that controls floating-point arithmetic
amx.py            Intel's matrix tiles, and a plain twin
team.py           how a team of threads runs a kernel
"""
