"""The catalogue of known mistakes.

mistake.py      a mistake: id, text, the models that can make it, its effect on one operation and on a whole engine
catalogue.py    all mistakes, and how they are tried
quantiser.py    int8 codes of activations             matrices.py    scales, codes, weights, biases, inputs
norms.py        norms                                 rope.py        RoPE
attention.py    masks, heads, scores, the KV cache    gates.py       activation functions
layers.py       residuals, embedding, head, layers    anywhere.py    mistakes that any operation can make
caches.py       masks and caches, without scores      hidden.py      mistakes behind tensors that are not in a dump
products.py     products, without their inputs        search.py      the search across several operations
blocks.py       ggml's block types                    conversions.py weights of fewer bits
orders.py       wrong orders of a row's weights       switches.py    factors and caps that are not applied
experts.py      layers with experts                   pooling.py     pooled outputs
edited.py       any edit of the definition
"""
