"""The kernels for NVIDIA GPUs, twins of the CPU's, and their backend. Only layout.py can be imported where there is no CUDA."""
