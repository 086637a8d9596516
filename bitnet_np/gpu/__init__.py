"""The host side of the GPU: its memory and its launches. The kernels are in bitnet_np.kernels.cuda.

device.py      opens a GPU and places a model on it; imports no CUDA
storage.py     the memory of a KV cache
backend.py     the operations of a forward pass by the CPU's names, with the launch of each
products.py    ternary matrices that read the same input, launched with the norm before and the sum or gate after
launch.py      launches of kernels, their arguments packed into one buffer
arrays.py      arrays on the device, results computed at first use, and the memory of both
decoder.py     one more token of each sequence, as one launch of a captured graph
graph.py       capturing launches as a CUDA graph, whose kernels overlap
"""
