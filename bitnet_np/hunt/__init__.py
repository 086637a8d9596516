"""The hunt: another project's engine is run on random models and calls until it fails, and the failure is told in words.

api.py       bitnet_np.hunt
engine.py    a command or a function that is run within limits
draws.py     cases around the edges that engines have
outcome.py   what one run shows
company.py   runs beside what the same tokens give alone
shrink.py    the smallest case that fails in the same way
contrast.py  the condition under which it fails
facts.py     statements about cases, in words
probes.py    from logits alone to a place
run.py       all of it, until the time is over
keep.py      a failing case in a folder, and run again
"""

from .keep import again

__all__ = ["again"]
