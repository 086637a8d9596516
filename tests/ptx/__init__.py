"""A GPU in software: it runs PTX, the code that kernels compile to, instruction by instruction with NumPy. For tests only.

It raises a Fault for errors that a GPU lets pass: threads that race, memory that was not allocated, lanes that diverge. The rules are those
of the PTX ISA manual. Sizes should be small: an instruction of a block takes some microseconds.

driver.py       the part of CUDA's driver API that Numba and cuda.core use    streams.py   its streams, events and graphs
machine.py      the device: blocks of threads that run instructions           source.py    PTX text as kernels and instructions
steps.py        the effect of instructions on a block                         access.py    loads, stores, copies and atomics
arithmetic.py   the effect of instructions on numbers                         lanes.py     exchanges among the lanes of a warp
memory.py       memory, and the last threads that touched it                  counts.py    the cost of a kernel
fences.py       what blocks may know of each other
"""
