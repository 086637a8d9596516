"""Speed and memory of a model on this machine, beside what the machine can do.

Rounds alternate over thread counts and workloads, because machines drift; medians over the rounds are printed. Bandwidth is
measured in the same rounds, by reading as much memory as the model's weights.
"""

import argparse
import json
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numba
import numpy as np
from tqdm import tqdm

from bitnet_np import KVCache, Linear, Model, forward, forward_full, load
from bitnet_np.kernels import cpu, simd


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--prefill", default="128,512", metavar="T,...", help="prompt lengths (default 128,512)")
    parser.add_argument("--decode", type=int, default=16, metavar="N", help="tokens to decode after a prompt of 8 (default 16)")
    parser.add_argument("--threads", default="1,2", metavar="N,...")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, metavar="F", help="write every figure")
    arguments = parser.parse_args(argv)
    lengths = [int(part) for part in arguments.prefill.split(",")]
    threads = [min(int(part), numba.config.NUMBA_NUM_THREADS) for part in arguments.threads.split(",")]

    start = time.perf_counter()
    model = load(arguments.model)
    loaded = time.perf_counter() - start
    work = workloads(model, lengths, arguments.decode)
    for run in work.values():
        run()  # compile, and bring the weights into memory
    seconds: dict[tuple[str, int], list[float]] = {(name, n): [] for name in work for n in threads}
    for _ in tqdm(range(arguments.rounds), disable=not sys.stderr.isatty()):
        for name, run in work.items():
            for n in threads:
                numba.set_num_threads(n)
                begin = time.perf_counter()
                run()
                seconds[name, n].append(time.perf_counter() - begin)

    machine = f"{processor()}, {numba.config.NUMBA_NUM_THREADS} cores, {simd.instruction_path()}, numba {numba.__version__}"
    print(f"{machine}\n{arguments.model}: loaded in {loaded:.2f} s, {weight_bytes(model) / 1e9:.2f} GB read for each token\n")
    print(f"{'workload':28}" + "".join(f"{f'{n} thread' + 's' * (n > 1):>24}" for n in threads))
    rows = {}
    for name in work:
        medians = [statistics.median(seconds[name, n]) for n in threads]
        rows[name] = [figure(model, name, value, arguments.decode) for value in medians]
        print(f"{name:28}" + "".join(f"{text:>24}" for text in rows[name]))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    print(f"\npeak memory of the process {peak / 1e9:.2f} GB, with the pages of the model file in use")
    if arguments.json:
        figures = {f"{name}, {n} threads": seconds[name, n] for name in work for n in threads}
        arguments.json.write_text(json.dumps({"machine": machine, "load": loaded, "peak_bytes": peak, "seconds": figures}, indent=2))
    return 0


def workloads(model: Model, lengths: list[int], n: int) -> dict[str, Callable[[], object]]:
    """Name -> what to time."""
    rng = np.random.default_rng(0)
    cache = KVCache(model.config, 1, max(*lengths, n + 8))
    found: dict[str, Callable[[], object]] = {"read weights": lambda: cpu.has_non_finite(memory)}
    memory = np.ones(weight_bytes(model) // 4, np.float32)

    def prefill(tokens: np.ndarray) -> None:
        cache.clear()
        forward(model, tokens, cache, last_only=True)

    def decode() -> None:
        cache.clear()
        forward(model, [[1] * 8], cache, last_only=True)
        for token in range(n):
            forward(model, [[token]], cache, last_only=True)

    for length in lengths:
        tokens = rng.integers(0, model.config.vocab, (1, length))
        found[f"prefill {length}"] = lambda tokens=tokens: prefill(tokens)  # type: ignore[misc]
    tokens = rng.integers(0, model.config.vocab, (1, lengths[0]))
    found[f"forward_full {lengths[0]}, all logits"] = lambda: forward_full(model, tokens)
    found[f"decode {n} after 8"] = decode
    return found


def figure(model: Model, name: str, seconds: float, n: int) -> str:
    """A median as people read it."""
    if name == "read weights":
        return f"{weight_bytes(model) / seconds / 1e9:.1f} GB/s"
    tokens = n + 1 if name.startswith("decode") else int("".join(filter(str.isdigit, name)))
    rate = tokens / seconds
    if name.startswith("decode"):
        return f"{rate:.1f} tok/s {rate * weight_bytes(model) / 1e9:.1f} GB/s"
    return f"{rate:.0f} tok/s {rate * layer_weights(model) / 1e9:.0f} GMAC/s"


def linears(model: Model) -> list[Linear]:
    """The matrices of all layers."""
    return [value for layer in model.layers for value in vars(layer).values() if isinstance(value, Linear)]


def layer_weights(model: Model) -> int:
    """Weights of all layers' matrices: multiply-adds of one token."""
    return sum(linear.shape[0] * linear.shape[1] for linear in linears(model))


def weight_bytes(model: Model) -> int:
    """Bytes that decoding one token must read."""
    return sum(linear.weights.nbytes for linear in linears(model)) + model.head.nbytes


def processor() -> str:
    """The processor's name, as far as the system tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        known = dict(line.split("\t: ", 1) if "\t: " in line else line.split(": ", 1) for line in lines if ": " in line)
        fields = {key.strip(): value for key, value in known.items()}
        return f"{fields['model name']} (family {fields['cpu family']}, model {fields['model']})"
    except (OSError, KeyError):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    raise SystemExit(main())
