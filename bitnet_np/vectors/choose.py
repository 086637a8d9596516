"""Which cases a pack has: by size, families, types of matrices, operations, or by what a model needs."""

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..base.errors import OptionError, meant, shown
from ..files.load import Source
from ..model.families import FAMILIES
from ..testing.model_cases import TABLES
from . import models, operations
from .pack import Case

SIZES = ("full", "small")
_SMALL_FAMILIES, _SMALL_TYPES = ("bitnet-b1.58", "llama"), ("float32", "ternary", "Q4_0", "Q8_0")
OPERATIONS = (*operations.NAMES, "model")
_TYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "I2_S": "ternary"}
"""The names that types of a file's tensors have here, where they differ."""


@dataclass(frozen=True)
class Choice:
    """What a pack has. Raises OptionError for a name that is none."""

    size: str = "full"
    families: tuple[str, ...] = tuple(FAMILIES)
    types: tuple[str, ...] = TABLES
    operations: tuple[str, ...] = OPERATIONS

    def __post_init__(self) -> None:
        for name, known in (("families", tuple(FAMILIES)), ("types", TABLES), ("operations", OPERATIONS)):
            for value in getattr(self, name):
                if value not in known:
                    raise OptionError(f"--{name} has {shown(value)}, expected some of {', '.join(known)}{meant(value, known)}")

    def cases(self) -> Iterator[Case]:
        """The cases, in an order that never changes."""
        for case in operations.cases(self.size, self.types):
            if case.operation in self.operations:
                yield case
        if "model" in self.operations:
            yield from models.cases(self.families, self.types)


def choice(
    size: str, families: Collection[str] | None = None, types: Collection[str] | None = None, named: Collection[str] | None = None
) -> Choice:
    """The choice of a size, with these families, types and operations; None leaves them as the size has them."""
    small = size == "small"
    return Choice(
        size,
        tuple(families) if families is not None else _SMALL_FAMILIES if small else tuple(FAMILIES),
        tuple(types) if types is not None else _SMALL_TYPES if small else TABLES,
        tuple(named) if named is not None else OPERATIONS,
    )


def like(source: Source) -> tuple[list[str], list[str], list[str]]:
    """The family of a model file, the types of its tensors, and the operations that it needs. Raises as reading its config does."""
    c = source.config
    types = {_TYPES.get(tensor.type.name, tensor.type.name) for tensor in source.tensors.values()}
    wanted = ["embed", f"{c.norm}_norm", "matmul", "attend", "mask", "head", "sample", "add", "model"]
    wanted += ["matmul_as_llama_cpp"] if types - {*_TYPES.values()} else []
    wanted += ["quantize", "ternary_matmul"] if "ternary" in types or FAMILIES[c.architecture].ternary else []
    wanted += ["rope"] if c.rope != "none" else []
    wanted += [c.activation if not c.gated or c.activation.endswith("_gate") else f"{c.activation}_gate"]
    wanted += ["top_experts", "expert_weights", "experts_matmul", "mix"] if c.experts else []
    wanted += ["sigmoid_gate"] if c.shared_ffn else []
    wanted += ["soft_cap"] if c.score_cap or c.logit_cap else []
    wanted += ["scaled"] if {c.embedding_scale, c.residual_scale} != {1.0} else []
    wanted += ["pool"] if c.pooling != "none" else []
    return [c.architecture], [kind for kind in TABLES if kind in types], wanted
