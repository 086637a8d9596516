"""Edits of the definition: what any operation may do instead of what it should.

expression.py   trees of steps, and their values       definition.py   the operations of spec.py as expressions
functions.py    the steps, and tables of alternatives  kinds.py        the kinds of edits, with their sentences
weights.py      what a matrix may be taken for         orders.py       wrong orders of a row's weights
blocks.py       ggml's block types, misread            caches.py      keys, values and heads of attention
quantisers.py   other quantisers of activations
"""
