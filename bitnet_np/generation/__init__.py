"""From logits to tokens. The engine imports nothing of this room.

sampling.py  the next token out of its logits
batch.py     many prompts over few slots of a KV cache
generate.py  streams of tokens
nll.py       negative log-likelihood of a text
"""
