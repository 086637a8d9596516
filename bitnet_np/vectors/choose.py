"""Which cases a pack has: by size, families, types of matrices and operations."""

from collections.abc import Iterator, Sequence

from ..base.errors import OptionError, meant, shown
from ..model.families import FAMILIES
from ..model.records import Model
from ..testing.model_cases import TABLES
from . import models, operations
from .pack import Case

CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "families": {"full": tuple(FAMILIES), "small": ("bitnet-b1.58",)},
    "types": {"full": TABLES, "small": ("float32", "ternary", "Q8_0")},
    "operations": dict.fromkeys(("full", "small"), (*operations.NAMES, *models.NAMES)),
}
"""What can be named -> the size of a pack -> what that has, if nothing is named. A full pack has all."""
SIZES = ("full", "small")


def cases(size: str, like: Model | None = None, **named: Sequence[str] | None) -> Iterator[Case]:
    """The cases of a pack in an order that never changes. like: a model, of which a small one like it is in the pack. named: by the names
    of CHOICES; None: all that a pack of this size has.

    Raises OptionError for a name that is none.
    """
    chosen = {}
    for name, of_size in CHOICES.items():
        chosen[name] = of_size[size] if (given := named.get(name)) is None else tuple(given)
        for value in chosen[name]:
            if value not in of_size["full"]:
                raise OptionError(
                    f"--{name} has {shown(value)}, expected some of {', '.join(of_size['full'])}{meant(value, of_size['full'])}"
                )
    yield from operations.cases(size, chosen["types"], chosen["operations"])
    if {*models.NAMES} & {*chosen["operations"]}:
        of_types = () if size == "small" and named.get("types") is None else chosen["types"]
        made = models.cases(chosen["families"], of_types, size == "full", like)
        yield from (case for case in made if case.operation in chosen["operations"])
