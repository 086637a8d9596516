"""Edits of the definition: what any operation may do instead of what it should.

kinds.py     the kinds of edits, with their sentences      quantisers.py   other quantisers of activations
weights.py   what a matrix may be taken for                orders.py       wrong orders of a row's weights
blocks.py    ggml's block types, misread                   caches.py       keys, values and heads of attention
"""
