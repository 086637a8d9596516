"""What forward passes cost, counted and not timed: launches of kernels, calls of operations and their bytes. No other program disturbs it.

    python scripts/costs.py                      compare with the last entry of costs.json; the exit status is 1 if anything differs
    python scripts/costs.py --record "REASON"    add an entry: a change of costs is meant, and this is why
    python scripts/costs.py --history            the totals of all entries, as a table in Markdown: the one of docs/performance.md

The counts depend on the sources alone: on no processor, number of threads, or version of Numba. So a change that reads the weights twice,
launches a kernel for each row or copies the cache shows in the tests, without a clock. What kernels compile to is not counted here;
tests/kernels/test_instruction_sets.py reads the instructions of their inner loops for stated processors.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import numpy as np

from bitnet_np import KVCache, Metrics, Model, forward, forward_full, forward_incremental
from bitnet_np.kernels import launching, ternary_product
from bitnet_np.kernels.fast import amx
from bitnet_np.testing.models import random_model

RECORD = Path(__file__).with_suffix(".json")

Costs = dict[str, dict[str, Any]]
"""Workload -> "launches" by kernel, and "calls" and "bytes" by operation."""

_MODELS = {
    "bitnet": {"family": "bitnet", "table": "float16"},
    "llama, Q4_K": {"family": "llama", "table": "float16", "weights": "Q4_K"},
}
_SHAPE = {"width": 256, "ffn": 512, "heads": 4, "kv_heads": 2, "head_dim": 64, "n_layers": 2, "vocab": 320, "context": 256}


def _workloads(model: Model) -> dict[str, Callable[[Any], object]]:
    """By name, what is counted; each takes the backend to compute with."""
    ids = np.random.default_rng(0).integers(0, model.config.vocab, (4, 128))

    def cache_of(slots: int, tokens: int) -> KVCache:
        cache = KVCache(model.config, slots, 140)
        forward(model, ids[:slots, :tokens], cache, last_only=True)
        return cache

    one, four, empty = cache_of(1, 100), cache_of(4, 100), KVCache(model.config, 1, 140)
    return {
        "whole sequence, 128 tokens": lambda ops: forward_full(model, ids[:1], ops=ops),
        "prefill, 128 tokens": lambda ops: forward(model, ids[:1], empty, last_only=True, ops=ops),
        "a step after 100 tokens": lambda ops: forward(model, ids[:1, :1], one, ops=ops),
        "a step of 4 sequences": lambda ops: forward(model, ids[:, :1], four, ops=ops),
        "16 tokens, one by one": lambda ops: forward_incremental(model, ids[:1, :16], ops=ops),
    }


@contextmanager
def _launches() -> Iterator[Counter[str]]:
    """Counts calls of `launch` by kernel."""
    counted: Counter[str] = Counter()
    code = launching.launch.__code__

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code is code:
            counted[frame.f_locals["kernel"].body.__name__.strip("_")] += 1

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield counted
    finally:
        sys.setprofile(before)


@mock.patch.multiple(amx, unit=lambda: None)  # matrix tiles have separate launches, which few processors would repeat
@mock.patch.object(ternary_product, "LEAST", 3)  # each processor has another number: from 3 tokens on, all have the same kernel
def costs() -> Costs:
    """The costs of all workloads on both models."""
    counted: Costs = {}
    for model_name, how in _MODELS.items():
        model = random_model(0, **_SHAPE, **how)  # type: ignore[arg-type]
        for name, run in _workloads(model).items():
            metrics = Metrics()
            with _launches() as launches:
                run(metrics.ops())
            operations = sorted(metrics.operations.items())
            counted[f"{model_name}: {name}"] = {
                "launches": dict(sorted(launches.items())),
                "calls": {operation: counters.calls for operation, counters in operations},
                "bytes": {operation: counters.bytes for operation, counters in operations},
            }
    return counted


def differences(recorded: Costs, counted: Costs) -> list[str]:
    """A line for each number that is not the recorded one."""

    def flat(of: Costs) -> dict[str, int]:
        return {
            f"{workload}: {kind} of {name}": number
            for workload, kinds in of.items()
            for kind, numbers in kinds.items()
            for name, number in numbers.items()
        }

    before, now = flat(recorded), flat(counted)
    return [
        f"{what}: {now.get(what, 0):,}, recorded {before.get(what, 0):,}"
        for what in sorted(before | now)
        if before.get(what) != now.get(what)
    ]


def read() -> list[dict[str, Any]]:
    """The recorded entries, the newest last: "reason" and "costs"."""
    return json.loads(RECORD.read_text("utf-8")) if RECORD.exists() else []


def history(entries: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A row for each workload of the newest entry, with the launches and bytes of every entry."""
    yield "| workload | " + " | ".join(f"{n}. {entry['reason']}" for n, entry in enumerate(entries, 1)) + " |"
    yield "|---" * (len(entries) + 1) + "|"
    for workload in entries[-1]["costs"]:
        found = [entry["costs"].get(workload) for entry in entries]
        cells = [f"{sum(c['launches'].values()):,} launches, {sum(c['bytes'].values()) / 1e6:.2f} MB" if c else "" for c in found]
        yield f"| {workload} | " + " | ".join(cells) + " |"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Count what forward passes cost, and compare with what is recorded.")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--record", metavar="REASON", help="add the costs of now to costs.json")
    which.add_argument("--history", action="store_true", help="print the totals of all entries")
    options = parser.parse_args(argv)
    entries = read()
    if options.history:
        print("\n".join(history(entries)) if entries else "no entry")
        return 0
    lines = differences(entries[-1]["costs"] if entries else {}, costs())
    print("\n".join(lines) or "as recorded")
    if options.record is None:
        return 1 if lines else 0
    if lines:
        RECORD.write_text(json.dumps([*entries, {"reason": options.record, "costs": costs()}], indent=1) + "\n", "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
