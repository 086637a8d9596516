"""Checks a GPU in one call: its bits against the CPU's, its speed as parts of its peaks, its memory, and from what size on it pays.

    python scripts/gpu_check.py --json gpu.json

Needs numpy, numba, numba-cuda, gguf, hypothesis and pytest; this package need not be installed. Each part runs in a separate process,
because after an error a process may have lost the GPU, and the JSON is written after each. Exit codes: 0 all is well, 1 something is
wrong, 3 no GPU. `--interpret` runs the same code on tiny shapes without a GPU, by interpreting the compiled kernels. It shows only that
this script works: its times mean nothing.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
INTERPRET = "--interpret" in sys.argv
PATIENCE = 400  # seconds at most for a part
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]
if INTERPRET:
    import_module("ptx.gpu").install()

import numpy as np  # noqa: E402
from numba import njit  # noqa: E402
from numpy.typing import NDArray  # noqa: E402

from bitnet_np import KVCache, Model, forward, forward_full, forward_incremental, prefill  # noqa: E402
from bitnet_np.base.errors import OptionError  # noqa: E402
from bitnet_np.engine.cache import new_cache  # noqa: E402
from bitnet_np.gpu import dispatch  # noqa: E402
from bitnet_np.gpu.device import bytes_needed, open_cuda, place  # noqa: E402
from bitnet_np.kernels import cpu  # noqa: E402
from bitnet_np.model import packing  # noqa: E402
from bitnet_np.model.records import Linear, Ternary  # noqa: E402
from bitnet_np.testing.models import random_model  # noqa: E402

TINY = {"width": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 12, "vocab": 5, "context": 12}
BITNET = {"width": 2560, "heads": 20, "kv_heads": 5, "head_dim": 128, "ffn": 6912, "vocab": 128256, "context": 4096}
SHAPE, LAYERS, VOCAB = (TINY, 1, 5) if INTERPRET else (BITNET, 30, 2000)
STARTS = (1, 2) if INTERPRET else (62, 126, 1022, 2046, 3990)  # positions from which some tokens are decoded, across chunks
PROMPTS = (2,) if INTERPRET else (128, 512, 2048)
BATCHES = (2,) if INTERPRET else (1, 2, 4, 8, 16)
STEPS = 1 if INTERPRET else 20  # that are timed
MASKS = (3,) if INTERPRET else (64, 128, 256, 512, 1024, 2048, 4096)  # positions
ROWS = (1, 2) if INTERPRET else tuple(1 << n for n in range(10))  # of the products that are timed here and there
SECONDS = 3  # in which nvidia-smi watches
INT8 = {(8, 0): 2048, (8, 6): 1024, (8, 7): 1024, (8, 9): 1024, (9, 0): 4096}
"""Multiply-adds of int8 that a multiprocessor's tensor cores do in a clock, without sparsity: NVIDIA's data sheets, by their clocks."""


def describe(on: Any) -> dict[str, Any]:
    """The device, its memory, and the bytes that a copy moves in a second, reads and writes."""
    from numba import cuda

    gpu, n = cuda.get_current_device(), 1 << 10 if INTERPRET else 1 << 28
    a, b = on.zeros((n,)), on.zeros((n,))
    seconds = timed(on, lambda: on.add(a, b), 5)
    name = gpu.name.decode() if isinstance(gpu.name, bytes) else gpu.name
    packages = {package: version(package) for package in ("numpy", "numba", "numba-cuda")}
    moved, most = 12 * n / seconds, peaks(gpu)
    parts = {"part of the memory's peak": moved / most["bytes"]} if "bytes" in most else {}
    facts = {"device": name, "compute": list(gpu.compute_capability), "GB/s": moved / 1e9, "peaks in a second": most}
    return facts | parts | packages


def peaks(gpu: Any) -> dict[str, float]:
    """What the device can do in a second by its own clocks: bytes of its memory, multiply-adds of int8. What is not known is absent."""
    most, per_clock = dict[str, float](), INT8.get(tuple(gpu.compute_capability))
    if width := getattr(gpu, "GLOBAL_MEMORY_BUS_WIDTH", 0):
        most["bytes"] = 2 * gpu.MEMORY_CLOCK_RATE * 1e3 * width / 8  # two transfers in a clock
    if per_clock and (clock := getattr(gpu, "CLOCK_RATE", 0)):
        most["int8"] = per_clock * gpu.MULTIPROCESSOR_COUNT * clock * 1e3
    return most


def timed(on: Any, run: Callable[[], Any], times: int) -> float:
    """Seconds of a call, after a first one that compiles."""
    run()
    on.wait()
    start = time.perf_counter()
    for _ in range(times):
        run()
    on.wait()
    return (time.perf_counter() - start) / times


def placed(on: Any, layers: int, vocab: int) -> tuple[Model, Model]:
    """A random model of BitNet's 2B shape, and the same on the device. Its layers are alike, each with separate memory there."""
    shape: dict[str, Any] = SHAPE | {"n_layers": 1, "vocab": vocab}
    one = random_model(0, **shape, table="float16")
    model = replace(one, config=replace(one.config, n_layers=layers), layers=one.layers * layers)
    return model, place(model, on)


def bits(on: Any) -> dict[str, Any]:
    """Logits of whole sequences, of a ragged batch, and of decoding from some positions on: equal to the CPU's?"""
    (model, on_device), rng, equal = placed(on, min(LAYERS, 3), VOCAB), np.random.default_rng(1), dict[str, bool]()
    t = 2 if INTERPRET else 140
    tokens, lengths = rng.integers(0, model.config.vocab, (2, t)), [t, max(1, t // 3)]
    equal["whole"] = bool(np.array_equal(forward_full(model, tokens, lengths), forward_full(on_device, tokens, lengths, ops=on)))
    own, cache = KVCache(model.config, 2, t), new_cache(model.config, 2, t, on)
    equal["ragged"] = bool(np.array_equal(forward(model, tokens, own, lengths), forward(on_device, tokens, cache, lengths, ops=on)))
    own, cache = KVCache(model.config, 1), new_cache(model.config, 1, None, on)
    prompt = rng.integers(0, model.config.vocab, (1, STARTS[-1]))
    forward(model, prompt, own, last_only=True)
    forward(on_device, prompt, cache, last_only=True, ops=on)
    for start in reversed(STARTS):
        for each in (own, cache):
            each.truncate(0, start)
        following = rng.integers(0, model.config.vocab, (2 if INTERPRET else 4, 1, 1))
        steps = ((forward(model, token, own), forward(on_device, token, cache, ops=on)) for token in following)
        equal[f"decoding from {start}"] = all(np.array_equal(ours, theirs) for ours, theirs in steps)
    return {"equal": equal} | ({} if all(equal.values()) else {"problem": f"logits differ from the CPU's: {equal}"})


def read(on: Any, on_device: Model, n: int) -> None:
    """Reads a prompt of n tokens."""
    prefill(on_device, np.zeros((1, n), np.int64), new_cache(on_device.config, 1, n, on), ops=on)


def steps(on: Any, on_device: Model, batch: int, start: int) -> Callable[[], object]:
    """A step of decoding by this many sequences that hold `start` positions each; it may be called STEPS + 3 times."""
    cache = new_cache(on_device.config, batch, start + STEPS + 3, on)
    cache.lengths[:] = start  # of zeros: what is in the cache changes no time
    return partial(forward, on_device, np.zeros((batch, 1), np.int64), cache, last_only=True, ops=on)


def speed(on: Any) -> dict[str, Any]:
    """Tokens in a second, and as parts of the peaks: prompts of that of int8, decoding by batch and position of the memory's."""
    from numba import cuda

    model, on_device = placed(on, LAYERS, SHAPE["vocab"])
    found, parts, most = dict[str, float](), dict[str, float](), peaks(cuda.get_current_device())
    ternary = sum(w.weights.shape[0] * w.weights.shape[1] for w in linears(model) if isinstance(w.weights, Ternary))
    for n in PROMPTS:
        found[f"prompt of {n}"] = speed = n / timed(on, partial(read, on, on_device, n), 1 if INTERPRET else 3)
        if "int8" in most:
            parts[f"prompt of {n}"] = speed * ternary / most["int8"]
    for batch in BATCHES:
        for start in STARTS[:: len(STARTS) - 1]:
            step = steps(on, on_device, batch, start)
            step()
            found[f"decoding {batch} from {start}"] = speed = batch / timed(on, step, STEPS)
            if "bytes" in most:
                parts[f"decoding {batch} from {start}"] = speed / batch * bytes_needed(model) / most["bytes"]
    return {"tokens in a second": found, "parts of the peaks": parts}


def linears(model: Model) -> list[Linear]:
    return [value for layer in model.layers for value in vars(layer).values() if isinstance(value, Linear)]


def utilization(on: Any) -> dict[str, Any]:
    """Per cent of the time in which a kernel runs, as nvidia-smi says: while a prompt is read, and in decoding by batch."""
    _, on_device = placed(on, LAYERS, SHAPE["vocab"])
    found = {f"prompt of {PROMPTS[-1]}": busy(partial(read, on, on_device, PROMPTS[-1]))}
    for batch in BATCHES:
        cache = new_cache(on_device.config, batch, 8, on)

        def step(cache: KVCache = cache) -> None:
            cache.lengths[:] = 4
            forward(on_device, np.zeros((cache.batch, 1), np.int64), cache, last_only=True, ops=on)

        found[f"decoding {batch}"] = busy(step)
    return {"per cent": {name: value for name, value in found.items() if value is not None}}


def busy(run: Callable[[], object]) -> float | None:
    """What nvidia-smi says on average while a call is repeated; None where it is not installed."""
    program = None if INTERPRET else shutil.which("nvidia-smi")
    if program is None:
        return None
    which = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    command = [program, "-i", which, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
    run()  # which compiles
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        end = time.perf_counter() + SECONDS
        while time.perf_counter() < end:
            run()
        process.terminate()
        said = process.communicate()[0].split()[3:]  # the first are of the time before
    return float(np.mean([float(number) for number in said])) if said else None


def memory(on: Any) -> dict[str, Any]:
    """Bytes that forward passes take on the device at most, in addition to the weights: whole sequences, and token by token."""
    model, on_device = placed(on, LAYERS, VOCAB)
    found = {}
    for n in PROMPTS:
        tokens = np.zeros((1, n), np.int64)
        found[f"whole sequence of {n}"] = peak(on, partial(forward_full, on_device, tokens, last_only=True, ops=on))
        if n == PROMPTS[0]:
            found[f"token by token, {n}"] = peak(on, partial(forward_incremental, on_device, tokens, last_only=True, ops=on))
    return {"weights": bytes_needed(model), "peak": found}


def peak(on: Any, run: Callable[[], object]) -> int:
    """Bytes that a call takes on the device at most, as the driver says whenever an array is made. What Numba keeps counts."""
    before = least = on.free_bytes()
    empty = on.empty

    def watched(*arguments: Any) -> Any:
        nonlocal least
        out = empty(*arguments)
        least = min(least, on.free_bytes())
        return out

    on.empty = watched
    try:
        run()
    finally:
        del on.empty
    return before - least


@njit
def nested_loop(n: int) -> NDArray[np.float32]:
    """The mask as BitNet-rs made it, element by element."""
    out = np.empty((n, n), np.float32)
    for i in range(n):
        for j in range(n):
            out[i, j] = 0 if j <= i else -np.inf
    return out


def masks(on: Any) -> dict[str, Any]:
    """Milliseconds of a causal mask on the device: filled there, made here and sent, and by a compiled loop over its elements and sent."""
    found, equal = dict[str, dict[str, float]](), True
    for n in MASKS:
        ways: dict[str, Callable[[], Any]] = {"filled there": partial(made, on, n, 0), "sent": partial(made, on, n, n * n)}
        ways["loop, sent"] = lambda n=n: on.upload(nested_loop(n))  # type: ignore[misc]
        found[str(n)] = {way: 1e3 * timed(on, run, 2 if INTERPRET else 20) for way, run in ways.items()}
        results = [on.to_host(run()) for run in ways.values()]
        equal = equal and all(np.array_equal(result, results[0]) for result in results)
    return {"ms": found} | ({} if equal else {"problem": "masks differ"})


def made(on: Any, n: int, most_sent: int) -> Any:
    """dispatch.make_mask with another rule for where."""
    dispatch.MOST_SENT = most_sent
    return dispatch.make_mask(n, n, ops=on)


def crossover(on: Any) -> dict[str, Any]:
    """Milliseconds of a product here and on the device, with its rows sent there and back: of one row, which is a vector, and of more."""
    rng, (n, m) = np.random.default_rng(0), (SHAPE["ffn"], SHAPE["width"])
    packed, table = packing.pack(rng.integers(-1, 2, (n, m), np.int8), 1.0), rng.standard_normal((n, m), np.float32)

    def ternary(ops: Any, codes: Any, x: NDArray[np.float32]) -> NDArray:
        return ops.to_host(ops.ternary_matmul(*ops.quantize(ops.upload(x)), codes, packed.scale, n))

    def floats(ops: Any, matrix: Any, x: NDArray[np.float32]) -> NDArray:
        return ops.to_host(ops.matmul(ops.upload(x), matrix))

    found: dict[str, Any] = {}
    for product, here, there in ((ternary, packed.codes, on.ternary(packed)), (floats, table, on.upload(table))):
        times = {}
        for rows in ROWS:
            x = rng.standard_normal((rows, m), np.float32)
            times[rows] = [1e3 * timed(on, partial(product, ops, w, x), 1 if INTERPRET else 10) for ops, w in ((cpu, here), (on, there))]
        slower = [rows for rows, (ours, theirs) in times.items() if theirs >= ours]
        faster = [rows for rows in ROWS if rows > max(slower, default=0)]
        found[product.__name__] = {"ms here, there": times, "faster there from": faster[0] if faster else None}
    return found


def kernels(on: Any, under: Sequence[str] = ()) -> dict[str, Any]:
    """Each kernel against the CPU's, and the code it compiles to. under: a program that runs the checks, and its options."""
    names = ["quantize", "fill_mask"] if INTERPRET else ["decoding", "attend"] if under else []
    command = [*under, sys.executable, str(ROOT / "tests" / "cuda_checks"), "--ptx" if INTERPRET else "--gpu", *names]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(command, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True, check=False)
    checks = [json.loads(line) for line in result.stdout.splitlines() if line.startswith("{")]
    wrong = "".join(f"{each['check']}: {each['problem']}" for each in checks if each["problem"])
    if result.returncode or not checks:
        wrong += f"exit code {result.returncode}: {result.stdout[-1000:]}{result.stderr[-1000:]}"
    return {"ran": len(checks), "seconds": sum(each["seconds"] for each in checks)} | ({"problem": wrong} if wrong else {})


def sanitized(on: Any) -> dict[str, Any]:
    """Some checks under NVIDIA's checkers of memory and of races, where they are installed."""
    folders = [os.environ.get("PATH", ""), *(str(Path(home, "bin")) for home in (os.environ.get("CUDA_HOME"), "/usr/local/cuda") if home)]
    program = None if INTERPRET else shutil.which("compute-sanitizer", path=os.pathsep.join(folders))
    options = [str(program), "--error-exitcode", "9", "--report-api-errors", "no", "--tool"]
    results = {tool: kernels(on, [*options, tool]) for tool in ("memcheck", "racecheck") if program}
    problem = "".join(result.get("problem", "") for result in results.values())
    return results | ({"problem": problem} if problem else {})


_PARTS = describe, bits, kernels, speed, utilization, memory, masks, crossover, sanitized
PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {part.__name__: part for part in _PARTS}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("gpu_check", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="F", help="write all results there")
    parser.add_argument("--parts", default=",".join(PARTS), metavar="A,B", help="some of %(default)s")
    parser.add_argument("--interpret", action="store_true", help="without a GPU: does this script work?")
    parser.add_argument("--one", choices=PARTS, help=argparse.SUPPRESS)  # in this process, as JSON
    options = parser.parse_args(argv)
    try:
        on = open_cuda()
    except OptionError as error:
        print(f"{error}: nothing was run")
        return 3
    if options.one:
        print(json.dumps(PARTS[options.one](on)))
        return 0
    found = dict[str, Any]()
    for name in options.parts.split(","):
        command = [sys.executable, __file__, "--one", name, *(["--interpret"] if INTERPRET else [])]
        try:
            result = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=False)
            found[name] = json.loads(result.stdout) if result.returncode == 0 else {"problem": result.stderr[-2000:]}
        except subprocess.TimeoutExpired:
            found[name] = {"problem": f"not done after {PATIENCE} s"}
        print(f"{name}: {json.dumps(found[name], indent=1)}", flush=True)
        if options.json:
            options.json.write_text(json.dumps(found, indent=1), "utf-8")
    return int(any("problem" in part for part in found.values()))


if __name__ == "__main__":
    raise SystemExit(main())
