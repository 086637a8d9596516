"""Matrices in ggml's block types, whose layouts are in base/block_formats.py.

blocks.py       rows, products with widened weights, checks
products.py     products with bytes, of the dialect llama.cpp
grids.py        the types without kernels
activations.py  how llama.cpp rounds what it multiplies by a matrix
"""
