"""The host side of the GPU: what lies in its memory and what is launched there. The kernels are in bitnet_np.kernels.cuda.

device.py      opens a GPU, places a model on it, and keeps a KV cache there; imports no CUDA
backend.py     the operations of a forward pass by the CPU's names, with the launch of each
products.py    ternary matrices that read the same input, launched with the norm before and the sum or gate after
arrays.py      arrays on the device, results that are worked out when they are needed, and the memory of both
decoder.py     one more token of each sequence, as one launch of a captured graph
graph.py       capturing launches as a CUDA graph, whose kernels overlap
"""
