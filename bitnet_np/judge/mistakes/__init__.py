"""The catalogue of known mistakes.

mistake.py      what a mistake is: id, text, who can make it, what it does to one operation and to a whole engine
catalogue.py    all of them, and how they are tried
quantiser.py    int8 codes of activations             matrices.py    scales, codes, weights, biases, inputs
norms.py        norms                                 positions.py   RoPE
attention.py    masks, heads, scores, the KV cache    gates.py       activation functions
layers.py       residuals, embedding, head, layers    anywhere.py    whatever any operation can get wrong
"""
