"""A GPU in software: it runs PTX, the code that kernels compile to, instruction by instruction with NumPy. For tests only.

It raises a Fault for errors that a GPU lets pass: threads that race, memory that was not allocated, lanes that diverge. The rules are those
of the PTX ISA manual. Sizes should be small: an instruction of a block takes some microseconds.

driver.py       the part of CUDA's driver API that Numba and cuda.core use    source.py    PTX text as kernels and instructions
machine.py      the device: blocks of threads that run instructions           access.py    loads, stores and atomics
steps.py        the effect of instructions on a block                         lanes.py     exchanges among the lanes of a warp
arithmetic.py   the effect of instructions on numbers                         memory.py    memory, and the last threads that touched it
"""
