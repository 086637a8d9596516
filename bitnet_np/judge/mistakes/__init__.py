"""Known mistakes: names of edits of the definition, and whole engines that compute another model.

mistake.py      a mistake: id, text, and the edit or the engines that it is
catalogue.py    the table of all mistakes              engines.py     other models, dialects, quantisers and prompts
hypotheses.py   where they may be, in one or several operations at once
search.py       the one search for a cause, known, fitted to theirs, or hidden: each hypothesis is tried once
"""
