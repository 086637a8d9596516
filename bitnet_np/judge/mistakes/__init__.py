"""The catalogue of known mistakes.

mistake.py      a mistake: id, text, the models that can make it, its effect on one operation and on a whole engine
catalogue.py    all mistakes, and how they are tried
edited.py       tables of edits, and any others       search.py       the search across several operations
quantiser.py    int8 codes of activations             matrices.py     scales, codes, weights, biases, inputs
norms.py        norms                                 rope.py         RoPE
attention.py    masks, heads, scores, the KV cache    gates.py        activation functions
experts.py      layers with experts                   layers.py       residuals, embedding, head, pooling, layers
switches.py     settings of models and dialects       anywhere.py     mistakes that any operation can make
"""
