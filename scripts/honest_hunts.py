"""Hunts in engines that are right, which must find nothing: `python scripts/honest_hunts.py --runs 1000 [--kinds float16 bfloat16]`.

The engines are those of judging/engine.py, by the types in which they keep numbers; nothing is declared of them. Their sums are in another
order for each chunk and number of threads.
"""

import argparse
import time
from typing import Any

import numpy as np
from judging.engine import KINDS, Engine
from numpy.typing import NDArray

import bitnet_np as bn
from bitnet_np.testing import random_model
from bitnet_np.traces.points import Key

LIKE: dict[str, Any] = {
    "family": "bitnet-b1.58",
    "width": 128,
    "ffn": 128,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 32,
    "n_layers": 2,
    "vocab": 64,
}


def engine_of(kind: str) -> Any:
    """A function of a model and token ids, or of several sequences. Products are computed of a chunk of rows, and summed by threads."""

    def engine(model: bn.Model, tokens: NDArray | list[NDArray], chunk: int | None = None, threads: int = 1) -> NDArray | list[NDArray]:
        def dot(x: NDArray, w: NDArray) -> NDArray:
            rows = np.array_split(x, range(chunk or len(x), len(x), chunk or len(x)))
            parts = [np.array_split(part, threads, axis=1) for part in rows]
            shares = np.array_split(w, threads, axis=1)
            return np.concatenate([sum(a @ b.T for a, b in zip(part, shares, strict=True)) for part in parts])

        if kind.startswith("q8_0") and model.config.kv_heads * model.config.head_dim % 32:
            raise NotImplementedError("blocks of 32 keys are not whole")
        every = tokens if isinstance(tokens, list) else [tokens]
        rows = [Engine(model, ids, dot=dot, **KINDS[kind]).run()[Key("result_output", None)] for ids in every]
        return rows if isinstance(tokens, list) else rows[0]

    return engine


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000, help="draws for each kind (default %(default)s)")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(argv)
    like, alarms = random_model(1, table="float16", **LIKE), 0
    for kind in options.kinds:
        begin = time.monotonic()
        result = bn.hunt(engine_of(kind), like, time=1e6, runs=options.runs, seed=options.seed)
        alarms += len(result.findings)
        print(f"{kind}: {result.runs} runs, {len(result.findings)} findings, {time.monotonic() - begin:.0f} s", flush=True)
        for finding in result.findings:
            print(f"  {finding.where}\n  {finding.outcome.text}\n  {finding.case}")
    return int(alarms > 0)


if __name__ == "__main__":
    raise SystemExit(main())
