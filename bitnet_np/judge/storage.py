"""The type that each tensor of a dump is kept in: as declared, or as its numbers show."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from numpy.typing import NDArray

from ..traces.points import TOP_EXPERTS, Key
from .expected import Storage
from .graph import EMBEDDING, TOKENS, Operation
from .precision import DIGITS, FLOAT32, Precision, storage_type


@dataclass(frozen=True)
class Types:
    """The types of all tensors of one dump."""

    precision: Precision
    read: dict[Key, str] | None  # those read off the dump; None: as declared
    act: str  # of tensors that are not in the dump

    @classmethod
    def of(cls, precision: Precision | None, tensors: Mapping[Key, NDArray], same: Collection[Key]) -> "Types":
        """The types that are declared; without, those of a dump's tensors. same: the tensors that have our bits."""
        if precision is not None:
            return cls(precision, None, precision.act)
        own = {EMBEDDING} & set(same)  # rows of a narrow table are narrow in every engine
        read = {k: storage_type(x) for k, x in tensors.items() if k not in own and not k.name.endswith(("_codes", "_scale", TOP_EXPERTS))}
        return cls(FLOAT32, read, min(read.values(), key=DIGITS.__getitem__, default="float32"))

    def __getitem__(self, key: Key) -> str:
        if key == TOKENS:
            return "float32"
        return self.act if self.read is None else self.read.get(key, "float32" if key == EMBEDDING else self.act)

    def storage(self, operation: Operation) -> Storage:
        """The types of an operation's numbers."""
        return Storage(tuple(self[k] for k in operation.inputs), self[operation.key], self.precision)

    def with_cache(self, kind: str) -> "Types":
        """The same types with keys and values of this type; attention's probabilities are as narrow in engines with float16 caches."""
        return replace(self, precision=replace(self.precision, kv=kind, probs="float16" if kind == "float16" else self.precision.probs))

    @property
    def strict(self) -> bool:
        """Whether no rounding is taken for intended that was not declared."""
        return self.read is None

    @property
    def judged_as(self) -> Precision | None:
        """The types that were declared, or read off the dump; None where all of these are float32."""
        if self.strict:
            return self.precision
        precision = replace(self.precision, act=self.act)
        return None if precision == FLOAT32 else precision

    def notes(self) -> list[str]:
        """The precision that the dump is judged in, in words, where it is not float32."""
        if self.read is None:
            return [f"judged in the declared precision: {self.precision}"] if self.precision != FLOAT32 else []
        count = {kind: list(self.read.values()).count(kind) for kind in DIGITS}
        narrow = {kind: n for kind, n in count.items() if n and kind != "float32"}
        notes = [f"judged as {kind}, read off the dump: {n} of {len(self.read)} tensors" for kind, n in narrow.items()]
        if self.precision.kv != "float32":
            notes.append(f"a KV cache of {self.precision.kv} is assumed: the first attention shows it")
        return notes
