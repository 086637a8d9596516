"""Checks a GPU in one call: its bits against the CPU's, and its speed.

    python scripts/gpu_check.py --json gpu.json

Needs numpy, numba, numba-cuda, gguf, hypothesis and pytest; this package need not be installed. Each part runs in a process of its own,
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

from bitnet_np import KVCache, Model, forward, forward_full, prefill  # noqa: E402
from bitnet_np.base.errors import OptionError  # noqa: E402
from bitnet_np.engine.cache import new_cache  # noqa: E402
from bitnet_np.gpu.device import open_cuda, place  # noqa: E402
from bitnet_np.testing.models import random_model  # noqa: E402

TINY = {"width": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "ffn": 12, "vocab": 5, "context": 12}
BITNET = {"width": 2560, "heads": 20, "kv_heads": 5, "head_dim": 128, "ffn": 6912, "vocab": 128256, "context": 4096}
SHAPE, LAYERS, VOCAB = (TINY, 1, 5) if INTERPRET else (BITNET, 30, 2000)
STARTS = (1, 2) if INTERPRET else (62, 126, 1022, 2046, 3990)  # positions from which some tokens are decoded, across chunks
PROMPTS = (2,) if INTERPRET else (128, 512, 2048)
BATCHES = (1, 2) if INTERPRET else (1, 2, 4, 8, 16)
STEPS = 2 if INTERPRET else 20  # that are timed


def describe(on: Any) -> dict[str, Any]:
    """The device, its memory, and the bytes that a copy moves in a second, reads and writes."""
    from numba import cuda

    gpu, n = cuda.get_current_device(), 1 << 10 if INTERPRET else 1 << 28
    a, b = on.zeros((n,)), on.zeros((n,))
    seconds = timed(on, lambda: on.add(a, b), 5)
    name = gpu.name.decode() if isinstance(gpu.name, bytes) else gpu.name
    packages = {package: version(package) for package in ("numpy", "numba", "numba-cuda")}
    return {"device": name, "compute": list(gpu.compute_capability), "GB/s": 12 * n / seconds / 1e9} | packages


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
    """A random model of BitNet's 2B shape, and the same on the device. Its layers are alike, each with memory of its own there."""
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
        following = rng.integers(0, model.config.vocab, (4, 1, 1))
        steps = ((forward(model, token, own), forward(on_device, token, cache, ops=on)) for token in following)
        equal[f"decoding from {start}"] = all(np.array_equal(ours, theirs) for ours, theirs in steps)
    return {"equal": equal} | ({} if all(equal.values()) else {"problem": f"logits differ from the CPU's: {equal}"})


def read(on: Any, on_device: Model, n: int) -> None:
    """Reads a prompt of n tokens."""
    prefill(on_device, np.zeros((1, n), np.int64), new_cache(on_device.config, 1, n, on), ops=on)


def speed(on: Any) -> dict[str, Any]:
    """Tokens in a second: prompts, and decoding by batch and position."""
    _, on_device = placed(on, LAYERS, SHAPE["vocab"])
    found = {}
    for n in PROMPTS:
        found[f"prompt of {n}"] = n / timed(on, partial(read, on, on_device, n), 1 if INTERPRET else 3)
    for batch in BATCHES:
        for start in STARTS[:: len(STARTS) - 1]:
            cache = new_cache(on_device.config, batch, start + STEPS + 3, on)
            cache.lengths[:] = start  # of zeros: what is in the cache changes no time
            step = partial(forward, on_device, np.zeros((batch, 1), np.int64), cache, last_only=True, ops=on)
            step()
            seconds = timed(on, step, STEPS)
            found[f"decoding {batch} from {start}"] = batch / seconds
    return {"tokens in a second": found}


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


PARTS: dict[str, Callable[[Any], dict[str, Any]]] = {part.__name__: part for part in (describe, bits, kernels, speed, sanitized)}


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
