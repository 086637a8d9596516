"""A GPU in software: it runs PTX, the code that kernels compile to, instruction by instruction with NumPy. For tests only.

It raises a Fault for errors that a GPU lets pass: threads that race, memory that was not allocated, lanes that diverge. The rules are those
of the PTX ISA manual. Sizes should be small: an instruction of a block takes some microseconds.

gpu.py          in place of a GPU: memory for Numba's arrays, and launches of its kernels
source.py       PTX text as instructions                     machine.py      blocks of threads that run them
instructions.py the effect of an instruction on a block      arithmetic.py   and on numbers
memory.py       memory, and races in it
"""
