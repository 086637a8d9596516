"""The part of `bitnet-np compare` that compares two models on the same tokens (--models)."""

import argparse
import math

from ..base.errors import OptionError
from ..base.tables import printable, table
from ..judge.compare_models import ModelDifference, compare_models
from ..judge.report.pictures import check_plot, picture_map, save
from ..judge.report.report import text_map
from ..model.matrix_facts import matrix_errors
from ..traces.points import Key
from . import progress
from .arguments import dialect_of
from .inputs import opened
from .inspect import short
from .nll import kl_facts
from .printing import answer, fitted, width

COSTLIEST = 10  # tensors, and matrices, that are listed


def run(arguments: argparse.Namespace) -> int:
    """Print the difference, and draw it to --plot; returns the exit code."""
    if (arguments.tokens, arguments.tokens_file, arguments.text) == (None, None, None):
        raise OptionError("--models needs token ids: --tokens, --tokens-file or --text")
    if arguments.plot is not None:
        check_plot(arguments.plot)
    inputs = [opened(arguments, path) for path in (arguments.ours, arguments.theirs)]
    sequences, dialect = inputs[0].sequences(), dialect_of(arguments)
    names = (str(inputs[0].source.path), str(inputs[1].source.path))
    ours, theirs = (source.model() for source in inputs)
    how = {"names": names, "dialect": dialect, "ops": arguments.ops, "progress": progress.bar("comparing")}
    difference = compare_models(ours, theirs, sequences, **how)
    heading = f"{names[1]} against {names[0]}: {len(difference.kl)} tokens, dialect {dialect.name}"
    if arguments.plot is not None:
        errors, most = _errors(difference)
        figure = picture_map({key: min(error, most) for key, error in errors.items()}, "relative error", most / 1e3, most)
        save(figure, arguments.plot, heading)
    matrices = matrix_errors(ours, theirs)
    finite = {name: error if math.isfinite(error) else None for name, error in matrices.items()}
    facts = {"ours": names[0], "theirs": names[1], "dialect": dialect.name, "matrices": finite} | _facts(difference)
    text = _printed(difference, printable(heading), width())
    if costliest := sorted(((name, error) for name, error in matrices.items() if error), key=lambda item: -item[1])[:COSTLIEST]:
        farthest = fitted("Matrices whose weights are farthest from the first model's:", width())
        text += f"\n\n{farthest}\n{table(('matrix', 'error'), costliest)}"
    return answer(arguments, facts, text)


def _facts(difference: ModelDifference) -> dict[str, object]:
    """The numbers, for JSON: null for an error that is infinite."""
    numbers = [(t.key, [x if math.isfinite(x) else None for x in (t.error, t.growth)]) for t in difference.tensors]
    tensors = [{"tensor": key.name, "layer": key.layer, "error": error, "growth": growth} for key, (error, growth) in numbers]
    settings = {name: [short(value) for value in both] for name, both in difference.settings.items()}
    return {
        "tokens": len(difference.kl),
        "kl": kl_facts(difference.kl),
        "same_top": float(difference.same_top.mean()),
        "settings": settings,
        "tensors": tensors,
    }


def _printed(difference: ModelDifference, heading: str, columns: int | None) -> str:
    """The difference for people, in this many columns."""
    kl, settings = difference.kl, difference.settings
    lines = [heading, f"KL divergence of the logits: mean {kl.mean():.3g}, largest {kl.max():.3g} nats"]
    lines += [f"the same token on top at {difference.same_top.mean():.1%} of positions"]
    lines += [f"note: {name} is {short(ours)} and {short(theirs)}" for name, (ours, theirs) in settings.items()]
    parts = [fitted("\n".join(lines), columns), "\n".join(_map(difference, columns))]
    rows = [(t.key.place, t.error, t.growth) for t in difference.costliest[:COSTLIEST]]
    if rows:
        growing = "Tensors in which the error grows most, over the largest error of what they are computed from:"
        parts.append(f"{fitted(growing, columns)}\n{table(('tensor', 'error', 'growth'), rows)}")
    return "\n\n".join(parts)


def _errors(difference: ModelDifference) -> tuple[dict[Key, float], float]:
    """The relative error of each tensor, and the largest that is finite; 1 if there is none above 0."""
    errors = {t.key: t.error for t in difference.tensors}
    return errors, max((error for error in errors.values() if math.isfinite(error)), default=0.0) or 1.0


def _map(difference: ModelDifference, columns: int | None) -> list[str]:
    """The relative errors, three letters each, in units of a power of ten that suits the largest."""
    errors, most = _errors(difference)
    unit = 10.0 ** (math.floor(math.log10(most)) - 1)
    cells = {key: f"{e / unit:.1f}" if e < 9.95 * unit else f"{e / unit:.0f}" for key, e in errors.items()}
    return [f"Relative errors, in units of {unit:g}:", "", *text_map(cells, columns)]
