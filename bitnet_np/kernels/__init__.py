"""The kernels: Numba on the CPU, and in cuda/ on NVIDIA GPUs.

THE OPERATIONS
cpu.py             the operations of the CPU backend, gathered from the files below
scalar.py          the rules of the arithmetic contract (../contract/) for one number: exp, rounding, GELU
roundings.py       numbers as narrower types hold them
rows.py            norms, RoPE; loops over single numbers, whose rules are in cpu.py
floats.py          embedding and products with tables of floats
ternary.py         the int8 quantiser and ternary products
ggml/              matrices in ggml's block types: rows, products, as llama.cpp multiplies them too, and checks
attention.py       attention, causal or by a mask array
experts.py         the router of a layer with experts
packing.py         files' ternary layouts, masters, ternary blocks -> packed matrices
checks.py          weights that are NaN, infinite or no ternary code
storage.py         the memory of a KV cache

WHAT THEY ARE MADE OF
tiles.py           sizes of tiles of dot products on this processor
sums.py            the sum of a row in float64, and its largest magnitude
attention_chunk.py attention to one chunk of keys
float_products.py  products of many tokens with floats and blocks, widened a strip at a time
ternary_product.py ternary products on vectors
ternary_tiles.py   ternary products on matrix tiles (AMX)

WHAT COMPILES AND RUNS THEM
float_state.py     the default state of floating-point arithmetic, for public functions and threads
launching.py       compiling kernels, and dividing their work among threads
working_clock.py   a clock that stands while kernels are compiled
recording.py       the launches of a pass, to be run again by one call
numba_threads.py   the number of threads that Numba has, asked without its lock
sharing.py         whether it pays to share kernels among threads
workspace.py       memory for results, kernels and weights
processor.py       the features that Numba compiles for
machine.py         the processor and the software that a result was computed on
fast/              what builds LLVM IR: vector registers, byte dot products, matrix tiles
cache/             compiled kernels on disk
cuda/              the same kernels for NVIDIA GPUs
"""

import _thread
import sys

from ..base.errors import UnsupportedError

if sys.version_info >= (3, 12):
    is_main_interpreter = getattr(_thread, "_is_main_interpreter", lambda: True)()
else:
    from _xxsubinterpreters import get_current, get_main  # type: ignore[import-not-found]

    is_main_interpreter = get_current() == get_main()

if not is_main_interpreter:  # asked in front of Numba, whose import would wait for ever
    raise UnsupportedError("this is a subinterpreter, in which Numba does not run: import bitnet_np in the main one, or in another process")

import numba  # noqa: F401

if not getattr(sys, "_is_gil_enabled", lambda: True)():  # asked after Numba is imported: an extension that needs the GIL has turned it on
    raise UnsupportedError("this Python runs without the GIL, with which alone bitnet_np is tested: start it with PYTHON_GIL=1")
