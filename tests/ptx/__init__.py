"""A GPU in software: it runs PTX, the code that kernels compile to, instruction by instruction with NumPy. For tests only.

It refuses what a GPU does silently: threads that race, memory that nobody allocated, lanes that do not come together. The rules are those
of the PTX ISA manual. Sizes are to be small: an instruction of a block takes some microseconds.

driver.py       CUDA's driver API, as much as Numba and cuda.core use     streams.py   streams, events and graphs of it
machine.py      the device: blocks of threads that take instructions      source.py    PTX text as kernels and instructions
steps.py        what an instruction does to a block                       access.py    loads, stores, copies and atomics
arithmetic.py   what an instruction does to numbers                       lanes.py     exchanges among the lanes of a warp
memory.py       memory, and who touched it last                           counts.py    what a kernel costs
"""
