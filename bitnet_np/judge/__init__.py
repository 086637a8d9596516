"""Verdicts on another engine's numbers: same bits, rounding, or bug, and where.

check.py        `bitnet_np.check`: arrays of any library      sequences.py      several sequences, and later parts of one
dump.py         dumps of one sequence, by a model or another  compared.py       their tensors beside ours, and their types
tensors.py      each tensor from the dump's own inputs        logits_alone.py   logits alone, against engines with mistakes
bounds.py       tensors against the law of their operation    measures.py       measures, limits and verdicts of logits
law/            the law for one operation: value and bound    edits/            the definition, changed
mistakes/       the one catalogue of known mistakes           readings/         mistakes that are read off the numbers
parts.py        mistakes in some rows, heads or elements      equivalence.py    differences that change nothing
variant.py      our engine with something changed             honest_engines.py how far roundings reach on this model
verdict.py      SAME_BITS, ROUNDING, FLIPS, ... INVALID       options.py        what a caller asks of the judge
report/         the Report: tables, HTML, pictures            compare_models.py two models of a family, side by side
top_logprobs.py log-probabilities of a running server         partial.py        tensors of which a part is known, or the RMS
receipt.py      BitNet-rs's parity receipts               first_looks.py    what a dump is in place of what it should be
declaring.py    the flag that declares what was seen          hypothesis.py     the record of a thought: an edit, where it is
evidence.py     when numbers are explained                    words.py          numbers, places and moves in words
detail.py       worst numbers and errors by position, on request

The way of a dump: check.py, sequences.py, dump.py, which has logits_alone.py judge the logits and tensors.py every operation (law/,
mistakes/search.py); then report/. The judge shares no arithmetic with the kernels and dialects that it may have to judge.

The way of a cause is that of one record, a Hypothesis: an edit, with numbers, in the operations where it is. edits/ yields what may be done
to a step, mistakes/catalogue.py has names for some of it, and mistakes/hypotheses.py puts it into operations, layers or an engine. A Case
(TensorCase, LogitsCase) says what each one leaves, in the whole tensor and in its parts. mistakes/search.py asks the named ones first, then
readings/, which solve for what no list has, and the others; what leaves least is the cause that the report names, by its text and id.

Four records say how an engine rounds. A Dialect (engine/dialects.py) is what our own forward pass rounds as that engine does. A Precision
has the types that the engine keeps numbers in. A Profile is both, under the name that --as takes. A Variant is our engine with something
changed.
"""
