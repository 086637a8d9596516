"""Trains the demo model on that text and measures it.

settings.py    the settings of a run
bpe.py         the tokenizer
adamw.py       the optimiser
checkpoint.py  stopping and going on
export.py      the model file
evaluate.py    perplexity and grades
"""
