"""Checks a GPU in one call of less than eight minutes: its bits against the CPU's, and its speed against its own peaks.

    python scripts/gpu_check.py --json gpu.json

Needs numpy, numba, numba-cuda, gguf, hypothesis and pytest; this package need not be installed. The parts are independent: where one fails,
the script says so and goes on with the others in a new process, because after an error a process may have lost the GPU. The JSON is written
after each part. A short table comes last, even if a part does not end. Exit codes: 0 all is well, 1 something is wrong, 3 no GPU.
`--interpret` runs the same code on tiny shapes without a GPU, by interpreting the compiled kernels. It shows only that this script works.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import Any

INTERPRET = "--interpret" in sys.argv
ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]
if INTERPRET:
    sys.path.append(str(ROOT / "tests"))
    import_module("ptx.driver").install()

import numpy as np  # noqa: E402

from bitnet_np import Config, KVCache, Model, forward, forward_full  # noqa: E402
from bitnet_np import prefill as prefill_of  # noqa: E402
from bitnet_np.cache import new_cache  # noqa: E402
from bitnet_np.errors import OptionError  # noqa: E402
from bitnet_np.gpu.backend import SKINNY  # noqa: E402
from bitnet_np.gpu.decoder import GraphDecoder  # noqa: E402
from bitnet_np.gpu.device import open_cuda, place  # noqa: E402
from bitnet_np.kernels import cpu  # noqa: E402
from bitnet_np.masks import causal_loop  # noqa: E402
from bitnet_np.selftest import digest  # noqa: E402
from bitnet_np.testing import random_model  # noqa: E402

PATIENCE = 240  # seconds at most for the checks of single kernels
OVERLAPPING = [9, 0]  # compute capability from which on launches can overlap
SANITIZED = ("decoder", "greedy_steps")  # checks, of few kernels: they take many times as long under a checker
GRACE = 30  # seconds for the last part, after the time is up


@dataclass(frozen=True)
class Sizes:
    """The amount of work: for a GPU, or for the interpreter."""

    shape: dict[str, Any]  # of the model whose logits are compared
    bits: int  # tokens in its prompts
    crossed: tuple[int, ...]  # positions from which some tokens are decoded, up to the next chunk of keys or graph
    prompts: tuple[int, ...]
    batches: tuple[int, ...]
    positions: tuple[int, ...]  # of the tokens that are decoded; batches of several sequences take the first
    matrices: tuple[tuple[int, int], ...]  # [N, M]
    rows: tuple[int, ...]
    mask: int
    large_mask: int
    copied: int  # bytes of the copy whose speed is measured
    turns: int  # iterations of the loop that measures the tensor cores
    rounds: int
    calls: int  # calls in a round, of operations that take microseconds
    checks: tuple[tuple[str, ...], ...]  # names of checks and groups in tests/cuda_checks, by process


GPU = Sizes(
    {"width": 2560, "heads": 20, "kv_heads": 5, "head_dim": 128, "ffn": 6912, "n_layers": 3, "vocab": 2000,
     "context": 4096},
    140, (63, 127, 1023, 2047, 3990), (128, 512, 2048), (1, 2, 4, 8, 16), (128, 2048, 4000), ((2560, 2560), (6912, 2560), (2560, 6912)),
    (1, 2, 4, 8, 16, 17, 32, 64, 128, 512, 2048), 1100, 8192, 1 << 30, 20000, 5, 20,
    (("rows",), ("attention",), ("matrices",), ("models",)),
)  # fmt: skip
TINY = Sizes(
    {"width": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 12, "n_layers": 1, "vocab": 5},
    2, (1, 2), (2,), (2,), (2,), ((16, 20),), (2, 17), 12, 20, 64, 1, 1, 1, (("quantize",), ("fill_mask",)),
)  # fmt: skip


@dataclass
class Run:
    """The device, and the measurements so far."""

    on: Any
    sizes: Sizes
    results: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    until: float = float("inf")  # by time.perf_counter
    _model: Model | None = None

    def peak_bytes(self) -> int:
        """The most device memory taken at once since `describe`: memory of results is not given back, but kept for later ones."""
        free = self.on.free_bytes()
        return self.results.get("describe", {}).get("free_bytes", free) - free

    @property
    def config(self) -> Config:
        from benchmarks import gpu

        return gpu.TINY if INTERPRET else gpu.BITNET_2B

    @property
    def model(self) -> Model:
        """The random model that is timed, made at first use."""
        from benchmarks import gpu

        self._model = self._model or gpu.random_placed(self.config, self.on)
        return self._model

    def seconds(self, run: Callable[[], Any], calls: int = 1, as_graph: bool = True) -> float:
        from benchmarks import gpu

        return gpu.seconds(self.on, run, calls, self.sizes.rounds, as_graph)


def describe(run: Run) -> dict[str, Any]:
    from importlib.metadata import version

    from numba import cuda

    packages = {name: version(name) for name in ("numpy", "numba", "numba-cuda")}
    gpu = cuda.get_current_device()
    name = gpu.name.decode() if isinstance(gpu.name, bytes) else gpu.name
    free = run.on.free_bytes()
    return {"device": name, "compute": list(gpu.compute_capability), "processors": run.on.processors, "free_bytes": free, **packages}


def _checked(run: Run, names: Sequence[str], under: Sequence[str] = ()) -> tuple[str, str]:
    """What a process prints that runs some checks, and its error. under: a program that runs it, and that program's options."""
    patience = max(1, min(PATIENCE, run.until - time.perf_counter()))
    paths = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    command = [*under, sys.executable, str(ROOT / "tests" / "cuda_checks"), "--ptx" if INTERPRET else "--gpu", *names]
    try:
        output = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=patience, check=False)
        return output.stdout, output.stderr[-2000:] or f"exit code {output.returncode}" if output.returncode else ""
    except subprocess.TimeoutExpired as late:
        return (late.stdout or b"").decode(), f"{' '.join(names)}: not done after {patience:.0f} s"


def kernels(run: Run) -> dict[str, Any]:
    """Compares each kernel with the CPU's, bit for bit."""
    with ThreadPoolExecutor() as pool:  # each group compiles its kernels, which takes most of the time
        outputs = list(pool.map(partial(_checked, run), run.sizes.checks))
    text, error = "".join(output for output, _ in outputs), "\n".join(filter(None, (error for _, error in outputs)))
    results = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    wrong = {result["check"]: result["problem"][-1500:] for result in results if result["problem"]}
    for name in wrong:
        run.problems.append(f"kernel {name} differs from the CPU's")
    if error:
        run.problems.append(f"checks of kernels: {error}")
    if not results:
        raise RuntimeError(f"no check of a kernel ran: {error}")
    return {"ran": len(results), "wrong": wrong, "seconds": {result["check"]: result["seconds"] for result in results}}


def sanitized(run: Run) -> dict[str, str]:
    """Decodes under NVIDIA's checkers of memory and of races, where they are installed: the result by tool, "clean" or an error's end."""
    homes = (os.environ.get("CUDA_HOME"), "/usr/local/cuda")
    folders = [os.environ.get("PATH", ""), *(str(Path(home, "bin")) for home in homes if home)]
    program = None if INTERPRET else shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    results = {}
    for tool in ("memcheck", "racecheck") if program else ():
        options = ["--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
        output, error = _checked(run, SANITIZED, [str(program), *options])
        results[tool] = f"{output[-1000:]}{error}" if error else "clean"
        if error:
            run.problems.append(f"{tool}: {results[tool]}")
    return results


def bits(run: Run) -> dict[str, Any]:
    """Compares logits of the CPU and of the GPU: whole sequences, a ragged batch through a cache, and decoding by the captured graph."""
    model, t = random_model(0, table="float16", **run.sizes.shape), run.sizes.bits
    placed, rng, on = place(model, run.on), np.random.default_rng(1), run.on
    tokens, lengths = rng.integers(0, model.config.vocab, (2, t)), [t, max(1, t // 3)]
    results: dict[str, Any] = {}

    def compare(name: str, ours: np.ndarray, theirs: np.ndarray) -> None:
        results[name] = {"cpu": digest(ours), "gpu": digest(theirs), "equal": digest(ours) == digest(theirs)}
        if not results[name]["equal"]:
            results[name] |= {"largest_difference": float(np.abs(ours - theirs).max()), "differ": int((ours != theirs).sum())}
            run.problems.append(f"logits of {name} differ from the CPU's")

    compare("whole sequences", forward_full(model, tokens, lengths), forward_full(placed, tokens, lengths, ops=on))
    own, cache = KVCache(model.config, 2, t + 5), new_cache(model.config, 2, t + 5, on)
    compare("ragged prefill", forward(model, tokens, own, lengths), forward(placed, tokens, cache, lengths, ops=on))
    for slots in ([0, 1], [0]):
        decoder = GraphDecoder(placed, cache, on, np.asarray(slots))
        for i in range(2):
            following = rng.integers(0, model.config.vocab, len(slots))
            ours = forward(model, following[:, None], own, slots=slots, last_only=True)
            compare(f"token {i} of {len(slots)}, decoded", ours, decoder(following))
    for turn in range(2):
        for name, ours, theirs in crossings(run, model, placed):
            compare(f"{name}, turn {turn}", ours, theirs)
    return results


def crossings(run: Run, model: Model, placed: Model) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Logits of the CPU and of the GPU: of a long prompt, and of tokens that follow some of its positions."""
    on, length, rng = run.on, max(run.sizes.crossed), np.random.default_rng(2)
    own, cache = KVCache(model.config, 1, length + 3), new_cache(model.config, 1, length + 3, on)
    tokens = rng.integers(0, model.config.vocab, (1, length))
    yield f"{length} tokens", prefill_of(model, tokens, own), prefill_of(placed, tokens, cache, ops=on)
    for position in sorted(run.sizes.crossed, reverse=True):
        for each in (own, cache):
            each.truncate(0, position)
        decoder = GraphDecoder(placed, cache, on, np.arange(1))
        for token in rng.integers(0, model.config.vocab, (3, 1)):
            yield f"position {own.lengths[0]}", forward(model, token[:, None], own)[:, 0], decoder(token)


def peaks(run: Run) -> dict[str, float]:
    from benchmarks import gpu

    return {
        "copy_bytes_per_second": gpu.copy_bandwidth(run.on, run.sizes.copied),
        "int8_operations_per_second": gpu.tensor_peak(run.on, run.sizes.turns),
    }


def matrices(run: Run) -> list[dict[str, Any]]:
    """Times ternary products by number of tokens, on the GPU and on this CPU."""
    from benchmarks import gpu

    from bitnet_np import packing

    rng, results = np.random.default_rng(0), []
    for n, m in run.sizes.matrices:
        words = run.on.upload(gpu.ternary_words(n, m, rng))
        ours = packing.pack(rng.integers(-1, 2, (n, m)).astype(np.int8), 1.0)
        for rows in run.sizes.rows:
            x = rng.standard_normal((rows, m), np.float32)
            codes, scale = run.on.quantize(run.on.upload(x))
            product = partial(run.on.ternary_matmul, codes, scale, words, np.float32(1), n)
            time_there = run.seconds(product, run.sizes.calls)
            here, cpu_times = cpu.quantize(x), []
            for _ in range(3):
                start = time.perf_counter()
                cpu.ternary_matmul(*here, ours.codes, ours.scale, n)
                cpu_times.append(time.perf_counter() - start)
            results.append(
                {"n": n, "m": m, "rows": rows, "gpu_seconds": time_there, "cpu_seconds": min(cpu_times)}
                | {"operations_per_second": 2 * n * m * rows / time_there, "weight_bytes_per_second": n * m / 4 / time_there}
                | {"ways": ways_to_multiply(run, product) if rows > SKINNY else {}}
            )
    return results


def ways_to_multiply(run: Run, product: Callable[[], object]) -> dict[str, float]:
    """Seconds of a product of many tokens by each shape of warpgroups' blocks, and without them; nothing where there are none."""
    on, seconds = run.on, dict[str, float]()
    shapes, processors = on.groups, on.processors
    try:
        for shape in shapes:
            on.groups, on.processors = (shape,), 1  # whatever would keep the device busy
            seconds["warpgroups {} x {}".format(*shape)] = run.seconds(product, run.sizes.calls)
        on.groups, on.processors = (), processors
        if shapes:
            seconds["mma.sync"] = run.seconds(product, run.sizes.calls)
    finally:
        on.groups, on.processors = shapes, processors
    return seconds


def prefill(run: Run) -> list[dict[str, Any]]:
    results = []
    for length in run.sizes.prompts:
        tokens = np.random.default_rng(0).integers(0, run.config.vocab, (1, length))
        cache = new_cache(run.config, 1, length, run.on)
        times = []
        for _ in range(run.sizes.rounds + 1):  # the first compiles
            cache.clear()
            start = time.perf_counter()
            forward(run.model, tokens, cache, last_only=True, ops=run.on)
            times.append(time.perf_counter() - start)
        best = sorted(times[1:])[len(times[1:]) // 2]
        results.append({"tokens": length, "seconds": best, "tokens_per_second": length / best, "peak_bytes": run.peak_bytes()})
    return results


def decode(run: Run) -> list[dict[str, Any]]:
    """Times decoding, by batch: the graph alone, by the device's clock; steps that bring all logits back; and greedy steps."""
    first, *later = run.sizes.positions
    return [_decoded(run, batch, first) for batch in run.sizes.batches] + [_decoded(run, 1, position) for position in later]


def ways(run: Run) -> list[dict[str, Any]]:
    """Times a token of one sequence with and without fused norms and overlapping launches, to show the gain of each.

    And with half a processor's registers for a block: then each launch has room beside the one before it, but fewer weights on the way.
    """
    results = []
    for fused, overlap, at_once in ((True, True, 1), (True, True, 2), (True, False, 1), (False, True, 1), (False, False, 1)):
        run.on.fused, run.on.overlap, run.on.at_once = fused, overlap, at_once
        results.append({"norms_fused": fused, "blocks_at_once": at_once} | _decoded(run, 1, run.sizes.positions[0]))
    run.on.fused, run.on.overlap, run.on.at_once = True, True, 1
    compute = run.results.get("describe", {}).get("compute", [0, 0])
    if compute >= OVERLAPPING and not results[0]["launches_overlap"]:  # the bits would not show it
        run.problems.append(f"launches do not overlap, which they can on compute capability {compute[0]}.{compute[1]}")
    return results


def _decoded(run: Run, batch: int, position: int) -> dict[str, Any]:
    calls = min(50, position)
    cache = new_cache(run.config, batch, position + 2 * calls + 1, run.on)
    cache.lengths[:] = position  # of zeros: time does not depend on keys and values
    decoder = GraphDecoder(run.model, cache, run.on, np.arange(batch), greedy=True)
    tokens = decoder.largest(np.zeros(batch, np.int64))
    started = time.perf_counter()
    for _ in range(calls):
        decoder(tokens)
    brought = time.perf_counter()
    for step in range(calls):
        tokens = decoder.largest(tokens, more=step < calls - 1)
    ended = time.perf_counter()
    alone = run.seconds(decoder.graph.launch, run.sizes.calls, as_graph=False)
    entry = {"batch": batch, "position": position, "graph_seconds": alone, "step_seconds": (brought - started) / calls}
    entry |= {"greedy_seconds": (ended - brought) / calls, "tokens_per_second": batch * calls / (ended - brought)}
    return entry | {"launches_overlap": decoder.graph.overlapped, "peak_bytes": run.peak_bytes()}


def masks(run: Run) -> dict[str, float]:
    """Times a causal mask of more than 1024 positions against the nested loop, and the bandwidth of a large mask."""
    on, results = run.on, dict[str, float]()
    for name, size in (("mask", run.sizes.mask), ("large", run.sizes.large_mask)):
        out = on.empty((1, size, size))
        count, past = (on.upload(np.array([value])) for value in (size, 0))
        results[f"{name}_size"] = size
        results[f"{name}_seconds"] = run.seconds(partial(on.fill_mask, out, 0, count, past, count, 0, 0, 0, 0), 5)
    start = time.perf_counter()
    causal_loop(run.sizes.mask, run.sizes.mask)
    results["loop_seconds"] = time.perf_counter() - start
    results["bytes_per_second"] = 4 * run.sizes.large_mask**2 / results["large_seconds"]
    return results


PARTS: dict[str, Callable[[Run], Any]] = {
    part.__name__: part for part in (describe, peaks, bits, decode, ways, prefill, matrices, masks, kernels, sanitized)
}


def table(run: Run) -> list[str]:
    """The short table: each measurement, its share of the peak measured here, and its goal."""
    from benchmarks import gpu

    f, lines = run.results, []

    def line(what: str, value: str, share: str = "", goal: str = "") -> None:
        lines.append(f"{what:<34}{value:>18}  {share:<56}{goal}")

    peak = f.get("peaks", {})
    if peak:
        line("copy, read and write", f"{peak['copy_bytes_per_second'] / 1e12:.2f} TB/s")
        line("int8 mma.sync", f"{peak['int8_operations_per_second'] / 1e12:.0f} TOPS")
    for entry in f.get("decode", ()):
        rate, goal = entry["tokens_per_second"], {1: 2000, 16: 14000}.get(entry["batch"])
        share = gpu.bytes_per_token(run.config) / entry["graph_seconds"] / peak["copy_bytes_per_second"] if peak else 0
        alone = f"{share:.0%} of copy; graph alone {entry['batch'] / entry['graph_seconds']:,.0f}, "
        alone += f"with all logits {entry['batch'] / entry['step_seconds']:,.0f}"
        line(f"decode, batch {entry['batch']} at {entry['position']}", f"{rate:,.0f} tok/s", alone, _goal(rate, goal))
    for entry in f.get("ways", ()):
        how = " and ".join(name for name, key in (("fused", "norms_fused"), ("overlapped", "launches_overlap")) if entry[key]) or "neither"
        how += ", 2 blocks at once" if entry["blocks_at_once"] == 2 else ""
        line(f"a token, {how}", f"{1e6 * entry['graph_seconds']:,.0f} us")
    for entry in f.get("prefill", ()):
        rate, goal = entry["tokens_per_second"], 60000 if entry["tokens"] == 2048 else None
        share = gpu.ternary_operations(run.config) * rate / peak["int8_operations_per_second"] if peak else 0
        line(f"prefill {entry['tokens']}", f"{rate:,.0f} tok/s", f"{share:.0%} of int8", _goal(rate, goal))
    if most := max((entry["peak_bytes"] for part in ("decode", "prefill") for entry in f.get(part, ())), default=0):
        line("device memory at most", f"{most / 1e9:.2f} GB")
    for entry in f.get("matrices", ()):
        tops = entry["operations_per_second"] / 1e12
        share = f"{entry['cpu_seconds'] / entry['gpu_seconds']:.1f} x this CPU"
        shape = f"ternary {entry['n']}x{entry['m']}, {entry['rows']} rows"
        line(shape, f"{tops:.1f} TOPS", share, _goal(tops, 500 if entry["rows"] == 2048 else None))
        for way, seconds in entry.get("ways", {}).items():
            line(f"  {way}", f"{entry['operations_per_second'] * entry['gpu_seconds'] / seconds / 1e12:.1f} TOPS")
    if "masks" in f:
        times = f["masks"]["loop_seconds"] / f["masks"]["mask_seconds"]
        share = f"{f['masks']['bytes_per_second'] / 1e12:.2f} TB/s at {f['masks']['large_size']}"
        line(f"mask {f['masks']['mask_size']}", f"{times:,.0f} x the loop", share, _goal(times, 10))
    if "bits" in f:
        line("logits equal to the CPU's", f"{sum(e['equal'] for e in f['bits'].values())} of {len(f['bits'])}")
    if "kernels" in f:
        line("kernels equal to the CPU's", f"{f['kernels']['ran'] - len(f['kernels']['wrong'])} of {f['kernels']['ran']}")
    if "sanitized" in f:
        clean = [tool for tool, result in f["sanitized"].items() if result == "clean"]
        line("clean by compute-sanitizer", " and ".join(clean) if f["sanitized"] else "not installed")
    return lines


def _goal(value: float, goal: float | None) -> str:
    return "" if goal is None else f"goal {goal:,}: {'met' if value >= goal else 'missed'}"


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument(
        "--json", type=Path, default=Path("gpu_check.json"), metavar="F", help="the file for all results (default gpu_check.json)"
    )
    result.add_argument("--parts", default=",".join(PARTS), metavar="A,B", help=f"some of {', '.join(PARTS)} (default all)")
    result.add_argument("--seconds", type=float, default=450, metavar="S", help="begin no part after so many seconds (default 450)")
    result.add_argument("--resume", action="store_true", help="go on from the results in the JSON file")
    result.add_argument("--interpret", action="store_true", help="run tiny shapes without a GPU, to check that this script works")
    return result


def main(argv: Sequence[str] | None = None) -> int:
    options = parser().parse_args(argv)
    chosen = options.parts.split(",")
    unknown = [name for name in chosen if name not in PARTS]
    if unknown:
        print(f"gpu_check.py: --parts has {unknown[0]!r}, expected some of {', '.join(PARTS)}", file=sys.stderr)
        return 2
    began = time.perf_counter()
    try:
        run = Run(open_cuda(), TINY if INTERPRET else GPU, until=began + options.seconds)
        if INTERPRET:
            run.on.processors = 2  # a peak is measured with some blocks for each
    except OptionError as error:
        print(f"gpu_check.py: {error}; nothing was run", file=sys.stderr)
        return 3
    if options.resume:
        before = json.loads(options.json.read_text("utf-8"))
        run.results, run.problems = before["found"], before["problems"]
    watch = Timer(options.seconds + GRACE, partial(give_up, run))
    watch.daemon = True
    watch.start()
    try:
        run_parts(run, chosen, options, began)
    finally:
        watch.cancel()
    return report(run)


def run_parts(run: Run, chosen: Sequence[str], options: argparse.Namespace, began: float) -> None:
    """Run the parts, and write what is known after each. Those behind one that fails run in a process of their own."""
    for number, name in enumerate(chosen):
        start, failed = time.perf_counter(), False
        if start - began > options.seconds:
            run.problems.append(f"{name} was not begun: the time was up")
            continue
        try:
            run.results[name] = PARTS[name](run)
        except Exception:
            failed = True
            run.problems.append(f"{name}: {traceback.format_exc()[-3000:]}")
        print(f"{name}: {time.perf_counter() - start:.1f} s{', failed' if failed else ''}", flush=True)
        options.json.write_text(json.dumps({"found": run.results, "problems": run.problems}, indent=1) + "\n", "utf-8")
        if failed and number + 1 < len(chosen):
            left = options.seconds - (time.perf_counter() - began)
            rest = ["--json", str(options.json), "--parts", ",".join(chosen[number + 1 :]), "--seconds", f"{left:.0f}", "--resume"]
            os.execv(sys.executable, [sys.executable, __file__, *rest, *(["--interpret"] if INTERPRET else [])])


def report(run: Run) -> int:
    """Prints the table and the problems. Returns the exit code."""
    try:
        lines = table(run)
    except Exception:
        lines = [f"PROBLEM: no table: {traceback.format_exc()[-1000:]}"]
    print("\n".join(["", *(["INTERPRETED: no time below means anything"] if INTERPRET else []), *lines]))
    for problem in run.problems:
        print(f"PROBLEM: {problem}")
    return 1 if run.problems else 0


def give_up(run: Run) -> None:
    """Ends the process with the results so far: a kernel that does not end cannot be interrupted."""
    run.problems.append("a part did not end")
    report(run)
    sys.stdout.flush()
    os._exit(1)


if __name__ == "__main__":
    raise SystemExit(main())
