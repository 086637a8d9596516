"""Metrics: calls, times and bytes of every operation of forward passes,
counted only if a caller asks for them.

`Metrics().ops()` is a backend like any other, to be passed to whatever takes `ops`: it calls the operations
of the backend it was made from and counts. A forward pass that nobody measures therefore runs no extra code.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import wraps
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..kernels import cpu, workspace
from .backend import OPERATIONS, Backend, Wrapped, check_backend

_ATTENTION = ("attend", "attend_float16", "attend_masked")
_GATHERING = ("embed", "embed_blocks")
_NOT_COUNTED = ("storage", "wait", "mark")


@dataclass
class Operation:
    """The calls of one operation on one device."""

    device: str
    reason: str  # why on this device
    calls: int = 0
    seconds: float = 0.0
    bytes: int = 0  # inputs and results, counted once each; on a device they are not counted
    allocations: int = 0  # arrays of new memory for results
    reused: int = 0  # arrays in memory that an earlier result had


class Metrics:
    """Counters of all operations of its backends: `forward_full(model, tokens, ops=metrics.ops())`.
    For one thread at a time.

    `operations` by name, those of a second device as "add on cuda"; `forwards` and `layers` that began;
    `kv_writes`, calls that wrote to a KV cache, one for each layer, and `kv_positions`, how many keys and
    values each they wrote: none where there is no cache. `peak_workspace`: bytes of results in memory that
    kernels/workspace.py lends to the thread, at the end of any operation; results below 16 KB and above 64 MB
    do not count.
    """

    def __init__(self) -> None:
        self.operations: dict[str, Operation] = {}
        self.forwards = self.layers = self.kv_writes = self.kv_positions = self.peak_workspace = 0

    def ops(self, backend: Backend = cpu, reason: str = "the backend the caller chose") -> Backend:
        """The backend with every call counted; its results are the same. `reason`:
        why this backend was chosen.

        On a device it waits for each call, to time it.
        """
        check_backend("backend", backend)
        names = [name for name in OPERATIONS if name not in _NOT_COUNTED]
        counted = {name: self._counted(name, backend, reason) for name in names}
        return Wrapped(backend, mark=self._mark, **counted)

    def as_dict(self) -> dict[str, Any]:
        """All counters, for JSON."""
        arrays = sum(operation.allocations for operation in self.operations.values())
        reused = sum(operation.reused for operation in self.operations.values())
        return {
            "forwards": self.forwards,
            "layers": self.layers,
            "kv_writes": self.kv_writes,
            "kv_positions": self.kv_positions,
            "workspace": {
                "allocations": arrays,
                "hits": reused,
                "hit_rate": reused / (arrays + reused) if arrays + reused else 0.0,
                "peak_bytes": self.peak_workspace,
            },
            "devices": self.devices(),
            "operations": {name: asdict(operation) for name, operation in self._by_time()},
        }

    def devices(self) -> dict[str, dict[str, float]]:
        """Calls and seconds of all operations, by kind of device."""
        totals: dict[str, dict[str, float]] = {}
        for operation in self.operations.values():
            total = totals.setdefault(operation.device, {"calls": 0, "seconds": 0})
            total["calls"] += operation.calls
            total["seconds"] += operation.seconds
        return totals

    def table(self) -> tuple[Sequence[str], list[Sequence[object]]]:
        """Header and rows of a table, the operation with the most time first."""
        header = ("operation", "device", "calls", "ms", "us a call", "MB", "GB/s", "new arrays", "reused")
        rows: list[Sequence[object]] = []
        for name, o in self._by_time():
            times = (o.seconds * 1e3, o.seconds / o.calls * 1e6)
            sizes = (o.bytes / 1e6, o.bytes / o.seconds / 1e9)
            rows.append((name, o.device, o.calls, *times, *sizes, o.allocations, o.reused))
        return header, rows

    def _by_time(self) -> list[tuple[str, Operation]]:
        return sorted(self.operations.items(), key=lambda item: -item[1].seconds)

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
            memory = workspace.pool()
            fresh, again = memory.fresh, memory.again
            start = time.perf_counter()
            result = function(*arguments, **options)
            backend.wait()
            seconds = time.perf_counter() - start
            operation = self.operations.setdefault(name, Operation(device, reason))
            if operation.device != device:
                operation = self.operations.setdefault(f"{name} on {device}", Operation(device, reason))
            operation.calls += 1
            operation.seconds += seconds
            operation.allocations += memory.fresh - fresh
            operation.reused += memory.again - again
            operation.bytes += _bytes_read(name, arguments, options) + _size(result) if device == "cpu" else 0
            self.peak_workspace = max(self.peak_workspace, memory.lent)
            return result

        return counted


def _size(value: Any) -> int:
    """Bytes of an array, or of all arrays of a tuple or list."""
    if isinstance(value, tuple | list):
        return sum(_size(array) for array in value)
    size = getattr(value, "nbytes", 0)
    return size if isinstance(size, int) else 0


def _bytes_read(name: str, arguments: tuple, options: Mapping[str, Any]) -> int:
    """Bytes of the arguments: of a table that rows are gathered from only those rows,
    of a KV cache only the visible positions."""
    if name in _GATHERING:
        table, tokens = arguments[0], arguments[-1]
        return table[0].nbytes * len(tokens) + tokens.nbytes
    if name in _ATTENTION:
        q, k, _, slot, position = arguments[:5]
        mask_or_window = arguments[5] if len(arguments) > 5 else options.get("window")
        visible = _positions_seen(slot, position, mask_or_window if isinstance(mask_or_window, int) else None)
        return _size((q, slot, position, mask_or_window)) + 2 * visible * k[0, 0].nbytes
    return sum(map(_size, (*arguments, *options.values())))


def _positions_seen(slot: NDArray[np.int64], position: NDArray[np.int64], window: int | None) -> int:
    """Number of positions that some row sees, over all sequences."""
    total = 0
    for number in np.unique(slot):
        positions = position[slot == number]
        low = 0 if window is None else max(0, int(positions.min()) - window + 1)
        total += int(positions.max()) + 1 - low
    return total
