"""The host side of the GPU: its memory and its launches. The kernels are in bitnet_np.kernels.cuda.

dispatch.py    the choice of a device
device.py      opens a GPU and places a model on it; imports no CUDA
storage.py     the memory of a KV cache
backend.py     the operations of a forward pass by the CPU's names, with the launch of each
"""
