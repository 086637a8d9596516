"""A pack on disk: cases with their inputs, what an engine should give, and how far it may be off. docs/vectors.md has the format.

`vectors.txt` is the index, in lines that any language splits at blanks; `manifest.json` says the same and more, in words. Numbers are in
`.bin` files, little-endian and in C order. Nothing depends on the machine, the day, or the folder.
"""

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..base.errors import UnsupportedError
from ..base.whole_file import whole_file
from ..judge.bounds import bound_of
from ..judge.law.expected import TINY, Expected
from ..judge.measures import FLIPS_LIMIT, OUTLIER_LIMIT, SCALE_LIMIT, Reach, limits

SCHEMA = 1
SHAPES: dict[str, dict[str, Any]] = json.loads((files("bitnet_np") / "vectors" / "shapes.json").read_text("utf-8"))
"""By operation and name. rope: the first position, fields of Config. attend: keys, keys before the first query, heads, heads of keys, their
width, fields of Config. mask: queries, keys, fields of Pattern. sample: temperature, top_p, a uniform number. folders: config.json."""
MOST_BYTES = 20_000_000
"""Of a pack: one that is larger is refused, because nobody keeps it in a repository."""


@dataclass(frozen=True)
class Output:
    """An array that an engine gives: "value" and what its rule reads, and "bits" of the contract. docs/vectors.md says what rules mean."""

    rule: str
    arrays: dict[str, NDArray]
    numbers: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """A call of one operation, or of a whole model."""

    id: str
    operation: str
    what: str  # in words
    source: str  # where the rule stands
    inputs: dict[str, NDArray]  # those without axes are numbers of the operation
    outputs: dict[str, Output]
    words: dict[str, str] = field(default_factory=dict)  # options that are no numbers, such as the type of a matrix
    data: str = ""  # the file of its arrays; cases that share one share the arrays that are the same object
    files: dict[str, bytes] = field(default_factory=dict)  # those that its words name


def bounded(expected: Expected, shape: tuple[int, ...], bits: NDArray | None = None, rows: slice = slice(None)) -> Output:
    """The rule of the judge for one operation, of some rows. bits: the contract's result.

    Where the contract's result is no number, because float32's range ends, any number is right.
    """
    most, _, value, square, reach = (np.asarray(x)[rows] for x in bound_of(expected, expected.value.shape))
    firm = (reach == 0) & (square > TINY**2)
    arrays = {"value": value, "limit": most, "square": np.where(firm, square, 0.0)}
    arrays = {name: np.array(array, np.float64).reshape(shape) for name, array in arrays.items()}
    if bits is not None:
        arrays["bits"] = np.asarray(bits[rows], np.float32).reshape(shape)
        open_ended = ~np.isfinite(arrays["bits"])
        arrays["limit"][open_ended], arrays["square"][open_ended], arrays["value"][open_ended] = np.inf, 0.0, 0.0
    return Output("bounds", arrays, {"shared": float(expected.shared)})


def equal(value: NDArray) -> Output:
    """The rule that an engine's numbers are these."""
    return Output("equal", {"value": np.asarray(value, np.float32)})


def across(value: NDArray, reach: Reach, is_logits: bool) -> Output:
    """The rule of the judge across operations: [T, N] is no farther off than roundings reach, by `measures.limits`."""
    most, mean = limits(reach, len(value))
    numbers = {"mean": mean}
    if is_logits:
        single = OUTLIER_LIMIT * max(1.0, (float(most.max()) / FLIPS_LIMIT) ** 0.5)
        numbers |= {"scale": SCALE_LIMIT + 2 * reach.scale, "single": single, "one_scale": float(reach.one_scale)}
    return Output("logits" if is_logits else "tensor", {"value": value, "most": most}, numbers)


class _Writer:
    """The files of a pack, its index and its manifest, as cases come."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, list[str]()
        self.files: dict[str, tuple[int, bytes]] = {}  # number and content
        self.places: dict[str, dict[int, tuple[int, NDArray]]] = {}  # by file: offsets of arrays, which are kept so that ids stay theirs
        self.cases: list[dict[str, Any]] = []

    def array(self, file: str, name: str, array: NDArray) -> dict[str, Any]:
        """Put an array into a file, once, and a line into the index; returns what the manifest says of it."""
        number, content = self.files.get(file, (len(self.files), b""))
        places = self.places.setdefault(file, {})
        if id(array) not in places:
            content += bytes(-len(content) % 8)
            places[id(array)] = (len(content), array)
            content += np.ascontiguousarray(array).astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
            self.files[file] = (number, content)
        offset, bits = places[id(array)][0], 8 * array.itemsize
        kind = "bf16" if array.dtype == np.uint16 else f"{array.dtype.kind}{bits}"
        self.lines.append(f"array {name} {kind} {number} {offset} {' '.join(map(str, (array.ndim, *array.shape)))}")
        return {"dtype": kind, "shape": list(array.shape), "file": file, "offset": offset}

    def case(self, case: Case) -> None:
        for name, content in case.files.items():
            self.files.setdefault(name, (len(self.files), content))
        file = case.data or f"operations/{case.id}.bin"
        self.lines.append(f"case {case.id} {case.operation}")
        self.lines += [f"word {name} {word}" for name, word in case.words.items()]
        inputs = {name: self.array(file, name, array) for name, array in case.inputs.items()}
        outputs = {}
        for name, output in case.outputs.items():
            self.lines.append(f"out {name} {output.rule}")
            numbers: dict[str, NDArray] = {key: np.array(number, np.float64) for key, number in output.numbers.items()}
            arrays = {key: self.array(file, f"{name}.{key}", array) for key, array in (output.arrays | numbers).items()}
            outputs[name] = {"rule": output.rule, "arrays": arrays, "numbers": output.numbers}
        words = {"id": case.id, "operation": case.operation, "what": case.what, "source": case.source, "options": case.words}
        scalars = {name: float(array) for name, array in case.inputs.items() if not array.ndim}
        self.cases.append(words | {"numbers": scalars, "inputs": inputs, "outputs": outputs})

    def finish(self, package: str) -> dict[str, Any]:
        """Write everything; returns what the manifest says of the whole pack."""
        contents = {name: content for name, (_, content) in self.files.items()}
        known = {name: hashlib.sha256(content).hexdigest() for name, content in contents.items()}
        listed = [f"file {number} {len(content)} {fnv(content):016x} {name}" for name, (number, content) in self.files.items()]
        body = "\n".join([*listed, *self.lines])
        version = hashlib.sha256("\n".join([body, *known.values()]).encode()).hexdigest()[:16]
        index = f"bitnet_np-vectors {SCHEMA} {version} {len(self.files)} {len(self.cases)}\n{body}\n".encode()
        whole = {"format": "bitnet_np-vectors", "schema": SCHEMA, "version": version, "package": package}
        sizes = {name: {"bytes": len(content), "sha256": known[name]} for name, content in contents.items()}
        manifest = json.dumps(whole | {"files": sizes, "cases": self.cases}, separators=(",", ":"), allow_nan=False) + "\n"
        contents |= {"vectors.txt": index + b"end %016x\n" % fnv(index), "manifest.json": manifest.encode()}
        contents |= {name: (files("bitnet_np") / "vectors" / name).read_bytes() for name in ("vectors.h", "vectors.rs")}
        nbytes = sum(map(len, contents.values()))
        if nbytes > MOST_BYTES:
            raise UnsupportedError(f"the pack has {nbytes:,} bytes, expected {MOST_BYTES:,} at most: --size small, or fewer families")
        for name, content in contents.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_bytes(content)
        return whole | {"cases": len(self.cases), "files": len(contents), "bytes": nbytes}


def fnv(content: bytes) -> int:
    """FNV-1a of 64 bits over words of 8 bytes, the last filled up with zeros: a checksum against damage that takes three lines of C."""
    total, padded = 0xCBF29CE484222325, content + bytes(-len(content) % 8)
    for word in np.frombuffer(padded, "<u8").tolist():
        total = (total ^ word) * 0x100000001B3 & 0xFFFFFFFFFFFFFFFF
    return total ^ len(content)


def write(folder: Path, cases: Iterable[Case], package: str) -> dict[str, Any]:
    """Write a pack to a new folder; returns what its manifest says of the whole, with the numbers of cases, files and bytes.

    package: the version of this package. Raises UnsupportedError for a pack that is too large.
    """
    with whole_file(folder, folder=True) as part:
        writer = _Writer(part)
        for case in cases:
            writer.case(case)
        return writer.finish(package)
