"""Verdicts on another engine's numbers: same bits, rounding, or bug, and where.

check.py        `bitnet_np.check`: arrays of any library      sequences.py      several sequences, and later parts of one
dump.py         dumps of one sequence, by a model or another  compared.py       their tensors beside ours, and their types
tensors.py      each tensor from the dump's own inputs        engine.py         logits alone, against engines with mistakes
law.py          the law for one operation: its bound          definition.py     what it computes: spec.py's steps as expressions
expression.py   trees of steps, and their values              functions.py      the steps, and tables of alternatives
graph.py        the operations of a model                     expected.py       what a bound is made of
products.py     the numbers of matrices                       bounds.py         tensors against that law
roundings.py    how engines round                             precision.py      types that engines keep numbers in
logits.py       measures, limits and verdicts of logits       honest_engines.py how far roundings reach on this model
mistakes/       the one catalogue of known mistakes           edits/            the definition, changed
readings/       mistakes that are read off the numbers        variant.py        our engine with something changed
parts.py        mistakes in some rows, heads or elements      equivalence.py    differences that change nothing
verdict.py      SAME_BITS, ROUNDING, FLIPS, ... INVALID       options.py        what a caller asks of the judge
report.py       the Report, its tables and its heat map       detail.py         worst numbers and errors by position, on request
html.py         the report as one HTML file                   pictures.py       the report as pictures
top_logprobs.py log-probabilities of a running server         partial.py        tensors of which a part is known, or the RMS
receipt.py      BitNet-rs's parity receipts                   compare_models.py two models of a family, side by side

The way of a dump: check.py, sequences.py, dump.py, which has engine.py judge the logits alone and tensors.py every operation (law.py,
mistakes/search.py); then report.py. The judge shares no arithmetic with the kernels and dialects that it may have to judge.
"""
