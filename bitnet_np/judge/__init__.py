"""Verdicts on another engine's numbers: same bits, rounding, or bug, and where.

dump.py         dumps of one sequence: `judge_dump`           compare_dumps.py   two dumps without a model
trace.py        the report on all tensors of a dump           tensors.py         each tensor from the dump's own inputs
compared.py     their tensors beside ours                     storage.py         the type that each tensor is kept in
engine.py       logits alone, beside our engine with mistakes options.py         what a caller asks of the judge
graph.py        the operations of a model                     law.py             the law for one operation: its bound, step by step
expected.py     what a bound is made of                       products.py        the numbers of matrices
bounds.py       tensors against that law                      roundings.py       how engines round
precision.py    types that engines keep numbers in            honest_engines.py  how far roundings reach on this model
logits.py       measures, limits and verdicts of logits       verdict.py         SAME_BITS, ROUNDING, FLIPS, NARROW, WRONG, INVALID
mistakes/       the one catalogue of known mistakes           readings/          mistakes that are read off the numbers
edits/          the definition as expressions, and changed    variant.py         our engine with something changed
equivalence.py  differences that change nothing               ggml_attention.py  the grid of ggml's flash attention
parts.py        mistakes in some rows, heads or elements      screen.py          large products, looked at in part first
report.py       the Report, its tables and its heat map       pictures.py        the report as pictures
html.py         the report as one HTML file                   detail.py          worst numbers and errors by position, on request
check.py        `bitnet_np.check`: arrays of any library      top_logprobs.py    log-probabilities of a running server
sequences.py    several sequences, and later parts of one     compare_models.py  two models of a family, side by side
partial.py      tensors of which a part is known, or the RMS  receipt.py         BitNet-rs's parity receipts
place.py        a tensor's place in a model and a dialect

The way of a dump: check.py, sequences.py, dump.py, which has engine.py judge the logits alone and trace.py every operation (tensors.py,
law.py, mistakes/search.py); then report.py. The judge shares no arithmetic with the kernels and dialects that it may have to judge.
"""
