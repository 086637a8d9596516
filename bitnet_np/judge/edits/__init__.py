"""Edits of the definition: what any operation may do instead of what it should.

kinds.py    the kinds of edits, with their sentences       quantisers.py   other quantisers of activations
weights.py  what a matrix may be taken for                 caches.py       keys and values as a cache gives them
blocks.py   ggml's block types, misread, and wrong orders of a row's weights
edited.py   an operation with an edit in it, as it is computed
"""
