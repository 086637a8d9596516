"""One engine: the network's one order of operations, over any backend.

backend.py       the protocols of a backend: what a forward pass asks of a CPU or a GPU
tokens.py        token ids of a call, checked once
cache.py         the KV cache                          cache_types.py  the types of a cache
masks.py         attention masks as arrays             mask_checks.py  a caller's mask, checked
dialects.py      where other engines round
network.py       embedding, layers, head
forward_pass.py  the ways through it: `forward`, `forward_full`, `prefill`
repeats.py       recordings of decoded tokens, and when they are used
pooling.py       embedding models: the one vector of a sequence
metrics.py       calls, times and bytes of every operation
"""
