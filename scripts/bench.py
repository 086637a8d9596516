"""Speed and memory on this machine, compared with the machine's peaks and other engines.

Results are checked before they are timed: finite, the same bits with every number of threads and by another path. Rounds alternate over
cases, thread counts and engines, because machines drift; medians over the rounds are printed, and medians of the rounds' ratios. The
machine's own peaks are measured in the same rounds. Compilation happens before, and has a separate bench.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numba
from benchmarks import forwards, gradients, llama_bench, memory, models, neighbours, operations, peaks, peers, processes, report
from benchmarks.released import TINY
from benchmarks.report import Table
from benchmarks.rounds import Case, CheckError, Engine, Results, Setup, measure

from bitnet_np import Error, Model, load
from bitnet_np.base.errors import OptionError
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.kernels import machine


class Bench(NamedTuple):
    """One sub-bench: the cases that it times, and the tables it makes of the results."""

    cases: Callable[[Setup], Iterable[Case]]
    tables: Callable[[Setup, Results], list[Table]]
    help: str


BENCHES = {
    "prefill": Bench(forwards.prefill, forwards.prefill_tables, "prompts through an empty cache, and how seconds grow with the length"),
    "decode": Bench(forwards.decode, lambda setup, results: forwards.speeds("decode", results), "one token at a time"),
    "batch": Bench(forwards.batch, forwards.batch_tables, "decode of many sequences, and whole sequences against steps"),
    "attention": Bench(
        operations.attention,
        lambda setup, results: forwards.speeds("attention", results, "queries and keys, probabilities and values"),
        "attention of whole sequences in one layer",
    ),
    "products": Bench(
        operations.products,
        lambda setup, results: forwards.speeds("products", results, "these matrices"),
        "products of few and many tokens by a matrix",
    ),
    "masks": Bench(operations.mask_arrays, operations.mask_tables, "masks as arrays by several ways, and hits of their cache"),
    "load": Bench(processes.load, processes.load_tables, "a new process until its first logits, and its memory"),
    "compile": Bench(processes.compilation, processes.compile_tables, "cold start: seconds of compilation"),
    "neighbours": Bench(neighbours.cases, neighbours.tables, "prefill and decode next to processes that keep cores busy"),
    "gradients": Bench(gradients.cases, gradients.tables, "loss and gradients of a batch, compared with its forward pass"),
    "memory": Bench(memory.cases, memory.tables, "what a call allocates"),
}
FORWARDS = {"prefill", "decode"}
"""The benches that other engines also run."""
FOLLOWING = FORWARDS | {"products"}
"""Those that can follow other engines' roundings."""


ENGINES = (peers.NAME, *llama_bench.NAMES)


def positive(text: str) -> int:
    """A number of at least 1."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a list such as 1,2,4."""
    return tuple(dict.fromkeys(map(positive, text.split(","))))


def engine(text: str) -> tuple[str, str]:
    """The name of another engine, and its program if one is given."""
    name, _, program = text.partition("=")
    if name not in ENGINES:
        raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(ENGINES)}")
    return name, program


def parser() -> argparse.ArgumentParser:
    available = ", ".join(f"{name} ({bench.help})" for name, bench in BENCHES.items())
    result = argparse.ArgumentParser(prog="bench.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    result.add_argument("bench", nargs="+", choices=BENCHES, metavar="SUB", help=f"any of: {available}")
    what = result.add_mutually_exclusive_group()
    what.add_argument("--shape", choices=models.SHAPES, default="small", help="a random model of this shape (default small)")
    what.add_argument("--model", type=Path, metavar="F", help="this GGUF file instead")
    result.add_argument("--model-dir", type=Path, metavar="DIR", help=f"where random models are kept (default {models.folder()})")
    result.add_argument("--seed", type=int, default=0, help="of random models and tokens")
    result.add_argument("--threads", type=numbers, metavar="N,...", help="default 1,2, or 1 where there is one core")
    result.add_argument("--rounds", type=positive, default=5, metavar="N")
    result.add_argument("--budget", type=float, default=300, metavar="S", help="seconds per bench; cases beyond are skipped (default 300)")
    result.add_argument("--lengths", type=numbers, metavar="T,...", help="prompt lengths, instead of each bench's own")
    result.add_argument("--batch", type=numbers, metavar="B,...", help="batch sizes of batch")
    result.add_argument("--steps", type=positive, default=16, metavar="N", help="tokens to decode (default 16)")
    result.add_argument(
        "--vs",
        action="append",
        type=engine,
        default=[],
        metavar="NAME[=PROGRAM]",
        help=f"also run this engine in prefill and decode; repeatable: {', '.join(ENGINES)}. "
        f"PROGRAM is the Python that has it (default: this one), "
        f"but for {' and '.join(llama_bench.NAMES)} the llama-bench of such a build, without which they are skipped",
    )
    result.add_argument("--peer-model", type=Path, metavar="F", help="the file for a llama-bench (default: ours)")
    result.add_argument(
        "--as",
        dest="dialect",
        choices=DIALECTS,
        default="exact",
        help="the engine whose roundings prefill, decode and products follow (default exact)",
    )
    result.add_argument("--read-mb", type=positive, default=1024, metavar="N", help="memory read for the bandwidth's peak (default 1024)")
    result.add_argument("--json", type=Path, metavar="F", help="write every sample")
    result.add_argument("--plot", type=Path, metavar="F.png", help="draw bars")
    return result


def checked_threads(requested: tuple[int, ...] | None) -> tuple[int, ...]:
    """The thread counts to measure: `requested`, checked, or 1 and 2 as far as Numba can run them."""
    most = numba.config.NUMBA_NUM_THREADS
    if requested is None:
        return tuple(n for n in (1, 2) if n <= most)
    if max(requested) > most:
        raise OptionError(f"--threads {max(requested)}: Numba has {most} here; NUMBA_NUM_THREADS says how many")
    return requested


def check_forwards(options: argparse.Namespace) -> None:
    """Raises OptionError for options that none of the asked benches has."""
    for name, is_given, benches in (("--vs", bool(options.vs), FORWARDS), ("--as", options.dialect != "exact", FOLLOWING)):
        if is_given and not benches & set(options.bench):
            raise OptionError(f"{name} is for {' and '.join(sorted(benches))}, not for {', '.join(options.bench)}")


def opened(options: argparse.Namespace, path: Path) -> Model:
    """The model, a random one with a context that holds all lengths that were asked for."""
    model = load(path)
    if options.model:
        return model
    return replace(model, config=replace(model.config, context=max(model.config.context, *(options.lengths or (0,)))))


def open_builds(options: argparse.Namespace, path: Path, skipped: list[str]) -> list[llama_bench.LlamaBench]:
    """The engines that a llama-bench times. One that does not run is named in `skipped`, so that one command serves many machines."""
    builds = []
    for name, program in dict(options.vs).items():
        if name not in llama_bench.NAMES:
            continue
        try:
            builds.append(llama_bench.LlamaBench(name, program, options.peer_model or path))
        except peers.PeerError as error:
            skipped.append(f"--vs {error}")
    return builds


def run(options: argparse.Namespace) -> tuple[list[Table], Results, dict]:
    """Run all benches; returns their tables, all measurements, and the JSON object."""
    folder = options.model_dir or models.folder()
    threads = checked_threads(options.threads)
    results, tables = Results(), []
    check_forwards(options)
    with ExitStack() as stack:
        stack.callback(numba.set_num_threads, numba.get_num_threads())
        pythons = {program or sys.executable for name, program in options.vs if name == peers.NAME}
        running = [stack.enter_context(closing(peers.Peer(python))) for python in pythons]  # first: a missing one is reported at once
        path = options.model or models.ours(folder, options.shape, options.seed)
        dialect = DIALECTS[options.dialect]
        setup = Setup(path, opened(options, path), threads, options.lengths, options.batch, options.steps, options.seed, dialect)
        config, ternary_weights = setup.model.config, models.ternary_weights(setup.model)
        for peer in running:
            longest = max(*setup.fitting((128, 512)), forwards.PROMPT + setup.steps)
            if ternary_weights:  # a model of the same shape, which it can load
                peer.open(path=str(models.for_llama_cpp(folder, config, setup.seed)), context=longest)
            else:
                peer.open("llama.cpp, the same file", path=str(path), context=longest)
        engines: list[Engine] = [*running, *open_builds(options, path, results.skipped)]
        machine_peaks = peaks.Peaks(options.read_mb)
        for name in dict.fromkeys(options.bench):
            asked = engines if name in FORWARDS else []
            measure(name, BENCHES[name].cases(setup), threads, options.rounds, options.budget, machine_peaks, asked, results)
            tables += BENCHES[name].tables(setup, results)
        head = {
            "machine": machine.describe(),
            "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
            "model": {
                "path": str(path),
                "architecture": config.architecture,
                "shape": {name: getattr(config, name) for name in TINY},
                "ternary_weights": ternary_weights,
                "bytes_per_token": models.weight_bytes(setup.model),
            },
            "peers": {engine.name: engine.description for engine in engines},
        }
    tables = [report.peaks(results), *tables]
    return tables, results, report.as_json(head, results, tables)


def introduction(outcome: dict) -> str:
    """The machine, the model, the peers, and the digests of checked results, as text."""
    machine, model = outcome["machine"], outcome["model"]
    roundings = outcome["options"]["dialect"]
    lines = [
        f"{machine['processor']}, {machine['kind']}, {machine['cores']} cores, "
        f"{machine['instruction path']} ({' '.join(machine['features'])}), matrix tiles: {machine['matrix tiles']}",
        f"bitnet_np {machine['bitnet_np']}, numba {machine['numba']}, {machine['threading layer']} threads, numpy {machine['numpy']}, "
        f"Python {machine['python']}, {machine['system']}",
        f"{model['path']}: {model['ternary_weights'] / 1e6:.1f} M ternary weights, {model['bytes_per_token'] / 1e6:.1f} MB read per token",
        *([f"{', '.join(sorted(FOLLOWING))} round as {roundings} does"] if roundings != "exact" else []),
        *(f"{name}: {text}" for name, text in outcome["peers"].items()),
    ]
    digests = {(entry["bench"], entry["case"]): entry["sha256"] for entry in outcome["results"] if entry.get("sha256")}
    lines += ["", "checked before timing, the same bits with every number of threads:"]
    lines += [f"  {bench}: {case}: sha256 {value[:16]}" for (bench, case), value in digests.items()] or ["  nothing that has bits"]
    if outcome["skipped"]:
        lines += ["", "skipped: " + "; ".join(outcome["skipped"])]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    options = parser().parse_args(argv)
    try:
        tables, results, outcome = run(options)
        print(introduction(outcome))
        for table in tables:
            print("\n" + report.render(table))
        if options.json:
            options.json.write_text(json.dumps(outcome, indent=1) + "\n", "utf-8")
        if options.plot:
            report.draw(results, outcome["machine"]["processor"], options.plot)
    except CheckError as error:
        print(f"bench.py: {error}; speed was not judged", file=sys.stderr)
        return 1
    except (Error, OSError, peers.PeerError) as error:
        print(f"bench.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
