"""The catalogue of known mistakes.

mistake.py      a mistake: id, text, the models that can make it, its effect on one operation and on a whole engine
catalogue.py    all mistakes, and how they are tried
quantiser.py    int8 codes of activations             matrices.py    scales, codes, weights, biases, inputs
norms.py        norms                                 rope.py        RoPE
attention.py    masks, heads, scores, the KV cache    gates.py       activation functions
layers.py       residuals, embedding, head, layers    anywhere.py    mistakes that any operation can make
caches.py       masks and caches, without scores      hidden.py      mistakes behind tensors that are not in a dump
conversions.py  weights of fewer bits                 search.py      the search across several operations
experts.py      layers with experts                   switches.py    factors and caps that are not applied
edited.py       any edit of the definition            pooling.py     pooled outputs
"""
