"""Verdicts on another engine's numbers: same bits, rounding, or bug, and where.

dump.py         dumps of one sequence: `judge_dump`           compare_dumps.py   two dumps without a model
trace.py        the report on all tensors of a dump           tensors.py         each tensor from the dump's own inputs
compared.py     their tensors beside ours                     storage.py         the type that each tensor is kept in
engine.py       logits alone, against engines with mistakes   options.py         what a caller asks of the judge
law.py          the law for one operation: its bound,         definition.py      what it computes: the operations of spec.py as
                step by step                                                     expressions
expression.py   trees of steps, and their values              functions.py       the steps, and tables of alternatives
graph.py        the operations of a model                     expected.py        what a bound is made of
products.py     the numbers of matrices
bounds.py       tensors against that law                      roundings.py       how engines round
precision.py    types that engines keep numbers in            honest_engines.py  how far roundings reach on this model
logits.py       measures, limits and verdicts of logits       verdict.py         SAME_BITS, ROUNDING, FLIPS, NARROW, WRONG, INVALID
mistakes/       the one catalogue of known mistakes           readings/          mistakes that are read off the numbers
edits/          the definition, changed                       variant.py         our engine with something changed
equivalence.py  differences that change nothing               ggml_attention.py  the grid of ggml's flash attention
parts.py        mistakes in some rows, heads or elements      screen.py          large products, looked at in part first
report.py       the Report, its tables and its heat map       pictures.py        the report as pictures
html.py         the report as one HTML file                   detail.py          worst numbers and errors by position, on request
check.py        `bitnet_np.check`: arrays of any library      top_logprobs.py    log-probabilities of a running server
sequences.py    several sequences, and later parts of one     compare_models.py  two models of a family, side by side
partial.py      tensors of which a part is known, or the RMS  receipt.py         BitNet-rs's parity receipts

spec.py is the law for whole models, law.py the law for one operation on given inputs. The judge shares no arithmetic with the
kernels and dialects that it may have to judge; tests/judge/ ties them together.
"""
