"""A GPU that is not there: PTX, the code that kernels compile to, run instruction by instruction by NumPy. For tests only.

What a GPU does silently, this one refuses: threads that race, memory that nobody allocated, lanes that do not come together.
Rules are those of the PTX ISA manual. Sizes are to be small: an instruction of a block takes some microseconds.
"""
