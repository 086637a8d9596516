"""The parts of train_demo.py.

settings.py  what a run is                    words.py     the small world of the stories
dice.py      chance that repeats              document.py  a text, and questions that can be graded
stories.py, sums.py, facts.py  what is told   corpus.py    the stream of documents, and what is held out
plots/       what happens in stories
bpe.py       the tokenizer                    adamw.py     the optimiser
checkpoint.py  stop and go on                 export.py    the model file
evaluate.py  perplexity and grades            curve.py     the picture of the loss
"""
