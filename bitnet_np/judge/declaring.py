"""What to declare where all that is wrong with a dump is that nobody declared its roundings: the flag to paste, tried before it is said."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from .bounds import within
from .law.formats import TYPES
from .law.levels import LEVELS
from .law.noise import OF_SUMS, SEVERAL
from .law.precision import Precision
from .report.report import OperationVerdict
from .tensors import TensorJudge
from .verdict import Verdict

_OPERANDS = "operands of products are rounded to "
_STEPS = 4  # powers above the level of all errors: the largest one is a few times as large


def flag(judge: TensorJudge, verdicts: Sequence[OperationVerdict]) -> Iterator[str]:
    """Yields the option that declares all that is NARROW; nothing if there is none, or more is wrong."""
    narrow = [o for o in verdicts if o.verdict == Verdict.NARROW]
    if not narrow or any(o.verdict > Verdict.NARROW for o in verdicts):
        return
    precision = replace(judge.types.precision, act=judge.types.act)
    sums = [o for o in narrow if judge.residuals[o.key].kind in (*OF_SUMS, SEVERAL)]
    functions = [o for o in narrow if o not in sums and o.mistake != LEVELS]  # what is stored in few numbers says so itself
    for field, base, some in (("noise", 2.0, sums), ("exp", 10.0, functions)):
        worst = {o.key.name: o for o in sorted(some, key=lambda o: judge.residuals[o.key].level)}
        level = max((judge.residuals[o.key].level for o in worst.values()), default=0.0)
        if not level:  # a cache's type, which is assumed already
            continue
        first = int(np.ceil(np.log(level) / np.log(base)))
        texts = [(o.hypothesis or "").partition(_OPERANDS)[2] for o in sums]
        named = [replace(precision, mul=str(TYPES[text])) for text in dict.fromkeys(texts) if text in TYPES and some is sums]
        parts = [base**k for k in range(first, min(first + _STEPS, 0))]
        levels = (replace(precision, noise=part) if field == "noise" else replace(precision, exp=part) for part in parts)
        found = next((one for one in (precision, *named, *levels) if all(_fits(judge, one, o) for o in worst.values())), None)
        if found is None:
            return
        precision = found
    if precision != judge.types.declared:
        yield f"to declare it: --precision {str(precision).replace(', ', ',')}"


def _fits(judge: TensorJudge, precision: Precision, of: OperationVerdict) -> bool:
    """Whether a tensor is right in a precision. Several operations are taken to be: they are measured, and no bound of theirs is known."""
    if len(of.across) > 1:
        return True
    site = judge.sites[of.key]
    expected = site.expected(replace(judge.types, precision=precision).storage(site), *(judge.theirs[key] for key in site.inputs))
    return within(expected, judge.theirs[of.key])[0] != Verdict.WRONG
