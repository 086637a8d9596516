"""Writes the text that the demo model learns: an endless stream of small documents, each a function of its seed and index.

corpus.py    the stream of documents, and the combinations that are held out of training
stories.py, sums.py, facts.py    the kinds of document
plots/       the plots of the stories
words.py     the people, animals, places and things in them
document.py  a text with questions whose answers can be graded
dice.py      choices by chance that repeat
"""
