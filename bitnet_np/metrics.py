"""Metrics: what forward passes did, operation by operation, for a caller who asks. Nothing is counted otherwise.

`Metrics().ops()` is a backend like any other, to be given to whatever takes `ops`: it calls the operations of the backend it was made from
and counts. So a forward pass that nobody measures runs the code it always runs.
"""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .backend import OPERATIONS, Backend, Wrapped
from .kernels import cpu, workspace

_ATTENTION = ("attend", "attend_halves", "attend_masked")
_GATHERING = ("embed", "embed_blocks")
_NOT_COUNTED = ("storage", "wait", "mark")


@dataclass
class Latency:
    """How long calls took."""

    calls: int = 0
    seconds: float = 0.0
    squares: float = 0.0  # of seconds
    shortest: float = np.inf
    longest: float = 0.0
    histogram: Counter[int] = field(default_factory=Counter)  # calls of 2^i to 2^(i+1) microseconds

    def count(self, seconds: float) -> None:
        self.calls += 1
        self.seconds += seconds
        self.squares += seconds * seconds
        self.shortest, self.longest = min(self.shortest, seconds), max(self.longest, seconds)
        self.histogram[max(0, int(seconds * 1e6).bit_length() - 1)] += 1

    def add(self, other: "Latency") -> None:
        """Calls that were counted elsewhere."""
        self.calls += other.calls
        self.seconds += other.seconds
        self.squares += other.squares
        self.shortest, self.longest = min(self.shortest, other.shortest), max(self.longest, other.longest)
        self.histogram += other.histogram

    def summary(self) -> dict[str, float]:
        """In seconds; zeros where nothing was called."""
        if not self.calls:
            return dict.fromkeys(("min", "max", "avg", "var"), 0.0)
        mean = self.seconds / self.calls
        return {"min": self.shortest, "max": self.longest, "avg": mean, "var": max(0.0, self.squares / self.calls - mean * mean)}


@dataclass
class Operation:
    """The calls of one operation on one device."""

    device: str
    reason: str  # why there
    latency: Latency = field(default_factory=Latency)
    nbytes: int = 0  # read and written at least, once each; on a device they are not counted
    allocations: int = 0  # arrays of new memory for results
    reused: int = 0  # arrays of memory that an earlier result had

    def as_dict(self) -> dict[str, Any]:
        histogram = self.latency.histogram
        return {
            "device": self.device,
            "reason": self.reason,
            "calls": self.latency.calls,
            "seconds": self.latency.seconds,
            "bytes": self.nbytes,
            "allocations": self.allocations,
            "reused": self.reused,
            "latency_seconds": self.latency.summary(),
            "latency_histogram_us": {str(1 << i): histogram[i] for i in sorted(histogram)},
        }


class Metrics:
    """Counters of all that ran over its backends: `forward_full(model, tokens, ops=metrics.ops())`. For one thread at a time.

    `operations` by name; `forwards` and `layers` that began; `kv_writes`, calls that wrote to a KV cache, one for each layer, and
    `kv_positions`, how many keys and values each they wrote: none where there is no cache. `peak_workspace`: bytes of results in memory
    that workspace.py lends, all of the thread, at the end of any operation; results below 16 KB and above 64 MB are not among them.
    `decisions`: how often a policy (dispatch.py) gave an operation to a device, and why.
    """

    def __init__(self) -> None:
        self.operations: dict[str, Operation] = {}
        self.decisions: Counter[tuple[str, str, str]] = Counter()  # operation, device, reason
        self.forwards = self.layers = self.kv_writes = self.kv_positions = self.peak_workspace = 0

    def ops(self, backend: Backend = cpu, reason: str = "the backend the caller chose") -> Backend:
        """The backend with every call counted; its results are the same. `reason`: why this one.

        On a device each call is waited for, to know how long it takes.
        """
        counted = {name: self._counted(name, backend, reason) for name in OPERATIONS if name not in _NOT_COUNTED}
        return Wrapped(backend, mark=self._mark, **counted)

    def decided(self, operation: str, device: str, reason: str) -> None:
        """Told of each decision of a policy."""
        self.decisions[operation, device, reason] += 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        arrays = sum(operation.allocations for operation in self.operations.values())
        reused = sum(operation.reused for operation in self.operations.values())
        return {
            "forwards": self.forwards,
            "layers": self.layers,
            "kv_writes": self.kv_writes,
            "kv_positions": self.kv_positions,
            **self.dispatches(),
            "decisions": [
                {"operation": operation, "device": device, "reason": reason, "times": times}
                for (operation, device, reason), times in self.decisions.items()
            ],
            "workspace": {
                "allocations": arrays,
                "hits": reused,
                "hit_rate": reused / (arrays + reused) if arrays + reused else 0.0,
                "peak_bytes": self.peak_workspace,
            },
            "operations": {name: operation.as_dict() for name, operation in self._by_time()},
        }

    def dispatches(self) -> dict[str, Any]:
        """Calls of operations by device, "cpu" and "gpu", by the names that realizar's server gives to its own (`DispatchMetrics`).

        Microseconds, and their squares for the variance. Bucket i counts the calls of 2^i microseconds and more, below 2^(i+1); shorter
        ones are in the first.
        """
        on = {"cpu": Latency(), "gpu": Latency()}
        for operation in self.operations.values():
            on["cpu" if operation.device == "cpu" else "gpu"].add(operation.latency)
        total = sum(latency.calls for latency in on.values())
        buckets = max((i for latency in on.values() for i in latency.histogram), default=-1) + 1
        told: dict[str, Any] = {f"{name}_dispatches": latency.calls for name, latency in on.items()}
        told |= {"total_dispatches": total, "gpu_ratio": on["gpu"].calls / total if total else 0.0}
        told["bucket_boundaries_us"] = [f"{1 << i if i else 0}-{2 << i}" for i in range(buckets)]
        for name, latency in on.items():
            lowest, largest, mean, variance = (value * 1e6 for value in latency.summary().values())
            values = {"min": lowest, "max": largest, "mean": mean, "variance": variance * 1e6, "stddev": (variance * 1e6) ** 0.5}
            told |= {f"{name}_latency_{key}_us": value for key, value in values.items()}
            told[f"{name}_latency_bucket_counts"] = [latency.histogram[i] for i in range(buckets)]
        return told

    def table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        """Header and rows for people, the longest first."""
        header = ("operation", "device", "calls", "ms", "us a call", "MB", "GB/s", "new arrays", "reused")
        rows: list[Sequence[object]] = []
        for name, o in self._by_time():
            seconds, calls = o.latency.seconds, o.latency.calls
            times = (seconds * 1e3, seconds / calls * 1e6)
            rows.append((name, o.device, calls, *times, o.nbytes / 1e6, o.nbytes / seconds / 1e9, o.allocations, o.reused))
        return header, rows

    def _by_time(self) -> list[tuple[str, Operation]]:
        return sorted(self.operations.items(), key=lambda item: -item[1].latency.seconds)

    def _mark(self, event: str, count: int = 1) -> None:
        if event == "forward":
            self.forwards += 1
        elif event == "layer":
            self.layers += 1
        else:
            self.kv_writes += 1
            self.kv_positions += count

    def _counted(self, name: str, backend: Backend, reason: str) -> Callable:
        function, device = getattr(backend, name), backend.device

        @wraps(function)
        def counted(*arguments: Any, **options: Any) -> Any:
            memory = workspace.counts()
            fresh, again = memory.fresh, memory.again
            start = time.perf_counter()
            result = function(*arguments, **options)
            backend.wait()
            seconds = time.perf_counter() - start
            operation = self.operations.get(name) or self.operations.setdefault(name, Operation(device, reason))
            operation.latency.count(seconds)
            operation.allocations += memory.fresh - fresh
            operation.reused += memory.again - again
            operation.nbytes += _bytes_read(name, arguments, options) + _size(result) if device == "cpu" else 0
            self.peak_workspace = max(self.peak_workspace, memory.lent)
            return result

        return counted


def _size(value: Any) -> int:
    """Bytes of an array, or of all arrays of a tuple or list."""
    if isinstance(value, tuple | list):
        return sum(_size(part) for part in value)
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _bytes_read(name: str, arguments: tuple, options: Mapping[str, Any]) -> int:
    """Of the arguments. Of a table that rows are taken from: those rows; of a KV cache: the positions that are seen."""
    if name in _GATHERING:
        table, tokens = arguments[0], arguments[-1]
        return table[0].nbytes * len(tokens) + tokens.nbytes
    if name in _ATTENTION:
        q, k, _, slot, position = arguments[:5]
        mask_or_window = arguments[5] if len(arguments) > 5 else options.get("window")
        seen = _positions_seen(slot, position, mask_or_window if isinstance(mask_or_window, int) else None, k.shape[1])
        return _size((q, slot, position, mask_or_window)) + 2 * seen * k[0, 0].nbytes
    return sum(map(_size, (*arguments, *options.values())))


def _positions_seen(slot: NDArray[np.int64], position: NDArray[np.int64], window: int | None, places: int) -> int:
    """Positions of all sequences that some row sees."""
    total = 0
    for one in np.unique(slot):
        mine = position[slot == one]
        first = 0 if window is None else max(0, int(mine.min()) - window + 1)
        total += min(int(mine.max()) + 1 - first, places)
    return total
