"""The command line: `bitnet-np SUBCOMMAND`. Exit codes: 0 fine, 1 a difference was found, 2 invalid input."""

import argparse
import io
import json
import math
import os
import platform
import sys
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, get_args

import numba
import numpy as np
from numpy.typing import NDArray

from . import batch_command, convert_command, embedded, grad_command, mask_command, progress, selftest, trace_command
from .arguments import add_load_arguments, add_override_arguments, loaded
from .check_command import JUDGEMENT_HEADER, add_compare_arguments, check_logits, check_trace, judgement_row, run_compare, show_check
from .compare import Judgement, Verdict, judge
from .dispatch import Device, choose
from .errors import EmptyInputError, Error, OptionError, ShapeError, shown
from .generate import HeadChoice, Sampling, stream
from .gguf_file import GGUFFile, Value
from .hf_folder import Folder
from .interop import FORMATS, read_any
from .kernels import simd
from .load import model_from, open_model, read_config
from .metrics import Metrics
from .model import Model
from .nll import token_nll
from .report import Report
from .text import Tokenizer, tokenizer_from
from .transformer import BITNET_CPP, DIALECTS, EXACT, PARALLEL_THRESHOLD, Mode, compute_logits

TOP = 5
TOKENS = 64


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit code."""
    arguments = _parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a model's text on a terminal that cannot show it
    try:
        if getattr(arguments, "threads", None) is not None:
            _set_threads(arguments.threads)
        with progress.compiling(), _measured(arguments):
            code = arguments.run(arguments)
        print(end="", flush=True)
        return code
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (Error, OSError, MemoryError) as error:
        print(f"bitnet-np: {_printable(str(error) or type(error).__name__)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("bitnet-np: interrupted", file=sys.stderr)
        return 130


# --- arguments ------------------------------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bitnet-np", description="A reference implementation of BitNet b1.58 inference.", epilog=__doc__)
    commands = parser.add_subparsers(required=True, metavar="SUBCOMMAND")

    def command(name: str, run: Callable[[argparse.Namespace], int], summary: str) -> argparse.ArgumentParser:
        added = commands.add_parser(name, help=summary, description=summary)
        added.set_defaults(run=run)
        added.add_argument("--json", action="store_true", help="one JSON object on standard output")
        return added

    def computing(added: argparse.ArgumentParser) -> None:
        added.add_argument("--threads", type=int, metavar="N", help="threads to compute with; the result is the same")
        added.add_argument("--as", dest="dialect", choices=DIALECTS, default="exact", help="whose roundings to follow")
        add_load_arguments(added)
        add_override_arguments(added)

    def measurable(added: argparse.ArgumentParser) -> None:
        added.add_argument(
            "--device",
            choices=get_args(Device),
            default="cpu",
            help="compute on the CPU (default) or on a GPU (extra `cuda`): the same bits",
        )
        added.add_argument("--metrics", type=Path, metavar="F.json", help="count and time every operation; a table on standard error, too")

    def tokens(added: argparse.ArgumentParser, text: str, required: bool) -> argparse._MutuallyExclusiveGroup:
        group = added.add_mutually_exclusive_group(required=required)
        group.add_argument("--tokens", metavar="1,2,3", help="token ids")
        group.add_argument("--tokens-file", type=Path, metavar="F", help=".npy, .json or .txt (a line a sequence): [T] or [B, T] token ids")
        group.add_argument(text, dest="text", metavar="S", help="text for the file's tokenizer (extra `text`)")
        return group

    inspect = command("inspect", _inspect, "What a model file holds, and whether it is supported.")
    inspect.add_argument("model", type=Path)
    inspect.add_argument("--tensors", action="store_true", help="list every tensor")

    logits = command("logits", _logits, "Reference logits of token ids.")
    logits.add_argument("model", type=Path)
    tokens(logits, "--text", required=True)
    logits.add_argument(
        "--mode", choices=("parallel", "incremental", "auto"), help="which path computes (default auto); the bits are the same"
    )
    logits.add_argument("--parallel-threshold", type=int, default=PARALLEL_THRESHOLD, metavar="N", help="auto is parallel above N tokens")
    logits.add_argument("--chunk", type=int, metavar="N", help="tokens at a time through the KV cache (implies --mode incremental)")
    logits.add_argument("--last", action="store_true", help="logits of the last position only")
    logits.add_argument("--out", type=Path, metavar="F.npy", help="write the logits, float32")
    computing(logits)
    measurable(logits)

    generate = command("generate", _generate, "Continue a prompt, token by token.")
    generate.add_argument("model", type=Path, nargs="?", help="default: the embedded demo model")
    batch_command.add_arguments(generate, tokens(generate, "--prompt", required=True))
    generate.add_argument("--chat", action="store_true", help="put the prompt into the file's chat template, as the user's message")
    generate.add_argument(
        "-n",
        type=int,
        metavar="N",
        help=f"tokens to generate at most (default {TOKENS}, {embedded.DEMO_TOKENS} from the demo model, or what fits the context)",
    )
    generate.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 (default) is greedy")
    generate.add_argument("--top-k", type=int, default=0, metavar="K", help="sample among the K largest logits (default 0: all)")
    generate.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample among the fewest tokens with probability P")
    generate.add_argument("--seed", type=int, default=0, metavar="N")
    generate.add_argument("--uniforms", metavar="0.1,0.7", help="sample with these numbers instead of the seed's, one for each token")
    generate.add_argument(
        "--head",
        choices=get_args(HeadChoice),
        default="auto",
        help="compute all logits (exact) or only those that can win (certified): the same tokens; auto (default): what is faster, with "
        "--prompts-file exact",
    )
    generate.add_argument("--stop", default=None, metavar="7,8", help="token ids that end the text; default: the file's end tokens")
    computing(generate)
    measurable(generate)

    check = command("check", _check, "Judge another engine's logits; with no arguments, the embedded recording of bitnet.cpp's.")
    check.add_argument("model", type=Path, nargs="?")
    tokens(check, "--text", required=False)
    check.add_argument(
        "--theirs", type=Path, metavar="DUMP", help="their tensors, or logits [T, V] or [B, T, V], with --last [V] or [B, V]"
    )
    check.add_argument("--format", choices=FORMATS, help="of the dump (default: found out)")
    check.add_argument("--last", action="store_true", help="theirs are logits of the last position only")
    check.add_argument("--plot", type=Path, metavar="F.png", help="the heat map as a picture (extra `plots`)")
    computing(check)

    trace = command("trace", lambda a: trace_command.run_trace(a, _tokens, _table), "Write every intermediate tensor of a forward pass.")
    trace_command.add_arguments(trace)
    tokens(trace, "--text", required=True)
    computing(trace)

    grad = command("grad", lambda a: grad_command.run_grad(a, _tokens, _table), "Loss of token ids, and its gradients.")
    grad_command.add_arguments(grad)
    tokens(grad, "--text", required=True)

    compare = command("compare", lambda a: run_compare(a, _table), "Compare two dumps, without a model.")
    add_compare_arguments(compare)

    nll = command("nll", _nll, "Mean negative log-likelihood and perplexity of a text.")
    nll.add_argument("model", type=Path)
    tokens(nll, "--text", required=True)
    nll.add_argument("--stride", type=int, metavar="N", help="tokens between the starts of windows, for texts longer than the context")
    nll.add_argument("--out", type=Path, metavar="F.npy", help="write the value of each token but the first, float64")
    computing(nll)
    measurable(nll)

    convert = command("convert", convert_command.run_convert, "Write a model as a GGUF file: the same model to the bit, or a refusal.")
    convert_command.add_arguments(convert)

    mask = command("mask", mask_command.run_mask, "Print a small attention mask.")
    mask_command.add_arguments(mask)

    test = command("selftest", _selftest, "Every kernel against known bits, on this machine.")
    test.add_argument("--threads", type=int, metavar="N")
    return parser


def _set_threads(threads: int) -> None:
    most = numba.config.NUMBA_NUM_THREADS
    if not 1 <= threads <= most:
        raise OptionError(f"--threads is {threads}, expected 1 to {most} here")
    numba.set_num_threads(threads)


@contextmanager
def _measured(arguments: argparse.Namespace) -> Iterator[None]:
    """The backend that the command computes with, and what --metrics asks to be told of it when the command is done."""
    path: Path | None = getattr(arguments, "metrics", None)
    _check_out("--metrics", path)
    metrics = Metrics()
    chosen = choose(getattr(arguments, "device", "cpu"))
    arguments.ops = chosen.ops if path is None else metrics.ops(*chosen)
    yield
    if path is not None:
        path.write_text(json.dumps(metrics.as_dict(), indent=1) + "\n", "utf-8")
        print(_table(*metrics.table()), file=sys.stderr)
        print(
            f"{metrics.forwards} forwards, {metrics.layers} layers, {metrics.kv_positions} positions written to KV caches", file=sys.stderr
        )


def _numbers(option: str, text: str, kind: Callable[[str], Any]) -> list:
    try:
        return [kind(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise OptionError(f"{option} is {text[:60]!r}, expected numbers separated by commas") from None


def _read_npy(path: Path, what: str) -> NDArray:
    """The array in a .npy file, mapped: a header cannot claim more than the file holds."""
    try:
        with np.errstate(over="raise"):
            return np.lib.format.open_memmap(path, mode="r")
    except OSError:
        raise
    except Exception as error:  # NumPy reads the header as Python's source: a damaged one can raise nearly anything
        raise ShapeError(f"{path}: no .npy array of {what}: {error}") from None


def _read_tokens(path: Path) -> NDArray:
    """[T] or [B, T] token ids from .npy, .json or .txt (one sequence a line)."""
    if path.suffix == ".npy":
        return _read_npy(path, "token ids")
    if path.suffix not in (".json", ".txt"):
        raise OptionError(f"{path}: expected a name that ends in .npy, .json or .txt")
    try:
        text = path.read_text("utf-8")
        if path.suffix == ".txt":
            rows = [_numbers(str(path), line, int) for line in text.splitlines() if line.strip()]
            return _array(rows[0] if len(rows) == 1 else rows)
        return _array(json.loads(text))
    except Error:
        raise
    except (ValueError, RecursionError) as error:
        raise ShapeError(f"{path}: no array of token ids: {error}") from None


def _array(values: Any) -> NDArray:
    sizes = [len(row) for row in values if isinstance(row, list)] if isinstance(values, list) else []
    if sizes and min(sizes) < max(sizes):
        raise ValueError(f"its sequences have {min(sizes)} to {max(sizes)} tokens, expected as many in each")
    return np.asarray(values)


def _tokens(arguments: argparse.Namespace, tokenizer: Callable[[], Tokenizer]) -> NDArray:
    """The token ids that were asked for, [T] or [B, T]."""
    if arguments.tokens is not None:
        ids, source = _array(_numbers("--tokens", arguments.tokens, int)), "--tokens"
    elif arguments.tokens_file is not None:
        ids, source = _read_tokens(arguments.tokens_file), str(arguments.tokens_file)
    else:
        ids, source = _array(tokenizer().encode(arguments.text)), "the text"
    if ids.ndim not in (1, 2):
        raise ShapeError(f"{source}: token ids have shape {list(ids.shape)}, expected [T] or [B, T]")
    if ids.size == 0:
        raise EmptyInputError(f"{source}: Tokens cannot be empty")
    if ids.dtype.kind not in "iu":
        raise ShapeError(f"{source}: token ids have dtype {ids.dtype}, expected integers of 64 bits at most")
    return ids


# --- output ---------------------------------------------------------------------------------------------------------------------------


def _table(header: Sequence[str], rows: Collection[Sequence[object]]) -> str:
    """Columns that line up: text to the left, numbers to the right."""
    cells = [[_cell(value) for value in row] for row in rows]
    numeric = [all(not isinstance(row[i], str) for row in rows) for i in range(len(header))]
    widths = [max(len(row[i]) for row in [list(header), *cells]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.rjust(w) if right else cell.ljust(w) for cell, w, right in zip(row, widths, numeric, strict=True)).rstrip()

    return "\n".join([line(header), *(line(row) for row in cells)])


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else _printable(str(value))


def _printable(text: str) -> str:
    """What a file says, without what could garble a terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _plain(value: Value | dict | list | None) -> str | int | float | None:
    """A metadata value as JSON can hold it: arrays by their length, and NaN and infinity by their names."""
    if isinstance(value, dict | list | None):
        return None if value is None else json.dumps(value)
    if not isinstance(value, str | int | float):
        return f"[{len(value)} values]"
    return value if isinstance(value, str) or math.isfinite(value) else str(value)


def _print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


# --- inspect --------------------------------------------------------------------------------------------------------------------------


def _support(file: GGUFFile | Folder) -> str:
    """Why this file cannot be run, or an empty string."""
    try:
        model_from(file, progress.bar("checking weights"))
    except Error as error:
        return str(error)
    return ""


def _inspect(arguments: argparse.Namespace) -> int:
    file = open_model(arguments.model)
    problem = _support(file)
    try:
        config = read_config(file)
    except Error:
        config = None
    keys = file.config if isinstance(file, Folder) else file.metadata
    types: dict[str, list[int]] = {}
    for tensor in file.tensors.values():
        entry = types.setdefault(tensor.type.name, [0, 0, 0])
        for i, value in enumerate((1, int(np.prod(tensor.shape, dtype=object)), tensor.data.size)):
            entry[i] += value
    cache = 2 * 4 * config.n_layers * config.kv_width if config else None
    facts = {
        "file": str(file.path),
        "bytes": file.size,
        "kind": file.kind,
        "version": file.version if isinstance(file, GGUFFile) else None,
        "supported": not problem,
        "problem": problem or None,
        "config": vars(config) if config else None,
        "kv_cache_bytes_per_token": cache,
        "types": {name: dict(zip(("tensors", "elements", "bytes"), entry, strict=True)) for name, entry in types.items()},
        "keys": {key: _plain(value) for key, value in keys.items()},
    }
    tensors = [(t.name, t.type.name, " x ".join(map(str, t.shape)), t.data.size) for t in file.tensors.values()]
    if arguments.json:
        listed = [dict(zip(("name", "type", "shape", "bytes"), row, strict=True)) for row in tensors]
        _print_json(facts | ({"tensors": listed} if arguments.tensors else {}))
        return 0
    print(f"{_printable(str(file.path))}: {file.kind}, {file.size:,} bytes, {len(file.tensors)} tensors")
    print("supported: " + (f"no: {_printable(problem)}" if problem else "yes") + "\n")
    if config:
        rows = [(name, str(value)) for name, value in vars(config).items()]
        print(_table(("config", ""), [*rows, ("KV cache, bytes per token", str(cache))]) + "\n")
    print(_table(("type", "tensors", "elements", "bytes"), [(name, *entry) for name, entry in types.items()]) + "\n")
    values = [(key, shown(v) if isinstance(v, str | int | float) else _plain(v)) for key, v in keys.items()]
    print(_table(("key", "value"), values))
    if arguments.tensors:
        print("\n" + _table(("tensor", "type", "shape", "bytes"), tensors))
    return 0


# --- logits ---------------------------------------------------------------------------------------------------------------------------


def _compute(model: Model, ids: NDArray, arguments: argparse.Namespace, **how: Any) -> NDArray[np.float32]:
    """Logits of ids [T] or [B, T]: an axis V more, or in place of T with --last."""
    batch = ids if ids.ndim == 2 else ids[None]
    logits = compute_logits(model, batch, last_only=arguments.last, dialect=DIALECTS[arguments.dialect], ops=arguments.ops, **how)
    return logits if ids.ndim == 2 else logits[0]


def _logits(arguments: argparse.Namespace) -> int:
    mode: Mode = arguments.mode or ("auto" if arguments.chunk is None else "incremental")
    if arguments.chunk is not None and mode != "incremental":
        raise OptionError(f"--chunk needs --mode incremental, not {mode}: no other mode has chunks")
    _check_out("--out", arguments.out)
    file = open_model(arguments.model)
    ids = _tokens(arguments, lambda: tokenizer_from(file.metadata, file.path))
    model = loaded(file, arguments)
    start = time.perf_counter()
    chunk = 1 if arguments.chunk is None else arguments.chunk
    result = _compute(model, ids, arguments, mode=mode, parallel_threshold=arguments.parallel_threshold, chunk=chunk)
    seconds = time.perf_counter() - start
    last = np.atleast_2d(result if arguments.last else result[..., -1, :])
    if arguments.out is not None:
        _save(arguments.out, result)
    top = [[(int(i), float(row[i])) for i in np.argsort(-row, kind="stable")[:TOP]] for row in last]
    checksum = selftest.digest(result)
    if arguments.json:
        tops = [[{"id": i, "logit": value} for i, value in row] for row in top]
        _print_json(
            {"shape": result.shape, "sha256": checksum, "top": tops, "dialect": arguments.dialect, "mode": mode, "seconds": seconds}
        )
        return 0
    print(f"shape   {list(result.shape)} float32")
    print(f"sha256  {checksum}")
    for b, row in enumerate(top):
        print(f"\nlast position{f' of sequence {b}' if ids.ndim == 2 else ''}")
        print(_table(("token", "logit"), [(str(i), f"{value:+.6f}") for i, value in row]))
    return 0


def _check_out(option: str, path: Path | None) -> None:
    """Before anything is computed."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise OptionError(f"{option} is {path}, expected a file in a folder that is there")


def _save(path: Path, array: NDArray) -> None:
    """Write .npy under another name first, so that nothing half written stays."""
    part = path.with_name(path.name + ".part")
    try:
        with open(part, "wb") as file:
            np.save(file, array)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


# --- generate -------------------------------------------------------------------------------------------------------------------------


def _generate(arguments: argparse.Namespace) -> int:
    with ExitStack() as stack:
        most = embedded.DEMO_TOKENS if arguments.model is None else TOKENS
        path = Path(arguments.model or stack.enter_context(embedded.demo_path()))
        chosen_stops = None if arguments.stop is None else _numbers("--stop", arguments.stop, int)
        if arguments.prompts_file is not None:
            arguments.n = most if arguments.n is None else arguments.n
            return batch_command.run_prompts(arguments, path, chosen_stops, _printable)
        if arguments.batch is not None:
            raise OptionError("--batch needs --prompts-file")
        file = open_model(path)
        tokenizer = tokenizer_from(file.metadata, file.path) if arguments.text is not None else None
        if arguments.chat:
            if tokenizer is None:
                raise OptionError("--chat needs --prompt")
            ids = np.asarray(tokenizer.chat([{"role": "user", "content": arguments.text}]))
        else:
            ids = _tokens(arguments, lambda: tokenizer or tokenizer_from(file.metadata, file.path))
        if ids.ndim != 1:
            raise ShapeError(f"token ids have shape {list(ids.shape)}, expected [T]: one prompt")
        stops = (tokenizer.stops if tokenizer else ()) if chosen_stops is None else chosen_stops
        numbers = None if arguments.uniforms is None else _numbers("--uniforms", arguments.uniforms, float)
        sampling = Sampling(arguments.temperature, arguments.top_k, arguments.top_p)
        model = loaded(file, arguments)
        tokens = stream(
            model,
            ids.tolist(),
            max(1, min(most, model.config.context - len(ids))) if arguments.n is None else arguments.n,
            sampling=sampling,
            numbers=numbers,
            seed=arguments.seed,
            stop=stops,
            dialect=DIALECTS[arguments.dialect],
            ops=arguments.ops,
            head=arguments.head,
        )
        decoder = tokenizer.decode_stream(after=ids.tolist()) if tokenizer else None
        new: list[int] = []
        pieces: list[str] = []
        start = time.perf_counter()
        first = None
        for token in tokens:
            first = first or time.perf_counter()
            new.append(token)
            pieces.append(decoder.feed(token) if decoder else f"{',' if len(new) > 1 else ''}{token}")
            if not arguments.json:
                print(pieces[-1], end="", flush=True)
        end = time.perf_counter()
        pieces.append(decoder.finish() if decoder else "")
    prefill = len(ids) / ((first or end) - start)
    decode = (len(new) - 1) / (end - first) if first and len(new) > 1 else None
    if arguments.json:
        text = {"text": "".join(pieces)} if decoder else {}
        speed = {"prefill_tokens_per_second": prefill, "decode_tokens_per_second": decode}
        _print_json({"prompt": ids.tolist(), "tokens": new} | text | speed)
    else:
        print(pieces[-1])
    rate = "" if decode is None else f", decode {decode:.1f} tokens/s ({len(new)} tokens)"
    print(f"prefill {prefill:.1f} tokens/s ({len(ids)} tokens){rate}", file=sys.stderr)
    return 0


# --- check ----------------------------------------------------------------------------------------------------------------------------


def _check(arguments: argparse.Namespace) -> int:
    tokens = (arguments.tokens, arguments.tokens_file, arguments.text)
    given = [arguments.model is not None, arguments.theirs is not None, tokens != (None, None, None)]
    if not any(given):
        return _check_embedded(arguments)
    if not all(given):
        raise OptionError("check needs MODEL, token ids (--tokens, --tokens-file or --text) and --theirs, or none of them")
    file = open_model(arguments.model)
    ids = _tokens(arguments, lambda: tokenizer_from(file.metadata, file.path))
    report, logits = _judged(file, arguments, ids)
    if not arguments.json:
        print(f"{_printable(f'{arguments.theirs} against {arguments.model}')}, dialect {arguments.dialect}\n")
    return show_check(arguments, report, logits, _table)


def _judged(file: GGUFFile | Folder, arguments: argparse.Namespace, ids: NDArray) -> tuple[Report, Judgement | None]:
    """Theirs against ours."""
    if ids.ndim == 2 or arguments.last:  # logits and nothing else
        theirs = _read_npy(arguments.theirs, "logits")
        logits = check_logits(loaded(file, arguments), ids, theirs, DIALECTS[arguments.dialect], arguments.last)
        return Report(logits.verdict, logits.reason), logits
    trace = read_any(arguments.theirs, arguments.format, tokens=ids)
    return check_trace(loaded(file, arguments), ids, trace, DIALECTS[arguments.dialect])


# What the recording must come to, or our kernels are broken here: its float16 roundings followed, all but long sequences agree.
_EXPECTED = {("bitnet.cpp", n): Verdict.ROUNDING if n <= 17 else Verdict.FLIPS for n in embedded.LENGTHS}


def _check_embedded(arguments: argparse.Namespace) -> int:
    with embedded.model_path() as path:
        model = loaded(open_model(path), arguments)
    recording = embedded.recording()
    found: dict[str, dict[str, Judgement]] = {}
    fine = True
    for name in (EXACT.name, BITNET_CPP.name):
        for n in embedded.LENGTHS:
            logits = compute_logits(model, recording[f"tokens_T{n}"][None], dialect=DIALECTS[name])[0]
            for path_name in ("prefill", "decode"):
                judgement = judge(logits, recording[f"logits_{path_name}_T{n}"])
                found.setdefault(name, {})[f"{n} {path_name}"] = judgement
                fine &= judgement.verdict <= _EXPECTED.get((name, n), Verdict.FLIPS)
    bits = {name: ok for name, ok in selftest.run() if name.startswith("forward")}
    fine &= all(bits.values())
    if arguments.json:
        tables = {name: {row: j.as_dict() for row, j in rows.items()} for name, rows in found.items()}
        _print_json({"fine": fine, "dialects": tables, "known_bits": bits})
        return 0 if fine else 1
    print("The embedded model (BitNet b1.58, 3 layers, random weights) against logits recorded from bitnet.cpp.\n")
    print("exact: the definition, no float16 anywhere. bitnet.cpp rounds its KV cache, queries, probabilities and head")
    print("input to float16, so this is how far its logits are from the model's definition:\n")
    print(_table(JUDGEMENT_HEADER, [judgement_row(*item) for item in found["exact"].items()]))
    print("\nbitnet.cpp: the same forward with those roundings:\n")
    print(_table(JUDGEMENT_HEADER, [judgement_row(*item) for item in found["bitnet.cpp"].items()]))
    for name, ok in bits.items():
        print(f"\n{name}: {'the bits known for every machine' if ok else 'NOT the bits known for every machine'}", end="")
    print(f"\n\n{'fine' if fine else 'NOT FINE: the kernels are broken on this machine, see bitnet-np selftest'}")
    return 0 if fine else 1


# --- nll ------------------------------------------------------------------------------------------------------------------------------


def _nll(arguments: argparse.Namespace) -> int:
    _check_out("--out", arguments.out)
    file = open_model(arguments.model)
    ids = _tokens(arguments, lambda: tokenizer_from(file.metadata, file.path))
    model = loaded(file, arguments)
    bar = progress.bar("reading")
    values = token_nll(model, ids, stride=arguments.stride, dialect=DIALECTS[arguments.dialect], ops=arguments.ops, progress=bar)
    if arguments.out is not None:
        _save(arguments.out, values)
    mean = float(values.mean())
    perplexity = float(np.exp(min(mean, 700.0)))
    if arguments.json:
        _print_json({"tokens": len(ids), "mean_nll": mean, "perplexity": perplexity, "sha256": selftest.digest(values)})
        return 0
    print(f"mean negative log-likelihood  {mean:.6f} nats a token ({len(values)} tokens)")
    print(f"perplexity                    {perplexity:.4f}")
    return 0


# --- selftest -------------------------------------------------------------------------------------------------------------------------


def _selftest(arguments: argparse.Namespace) -> int:
    start = time.perf_counter()
    results = list(selftest.run())
    seconds = time.perf_counter() - start
    machine = {
        "machine": platform.machine(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "threads": numba.get_num_threads(),
        "instruction_path": simd.instruction_path(),
        "features": sorted(simd.cpu_features()),
    }
    fine = all(ok for _, ok in results)
    if arguments.json:
        _print_json(machine | {"fine": fine, "kernels": dict(results), "seconds": seconds})
        return 0 if fine else 1
    facts = [(key, " ".join(value) if isinstance(value, list) else str(value)) for key, value in machine.items()]
    print(_table(("machine", ""), facts) + "\n")
    print(_table(("kernel", "bits"), [(name, "as known" if ok else "DIFFER") for name, ok in results]))
    print(f"\n{'all as known' if fine else 'NOT FINE'}, {seconds:.1f} s")
    return 0 if fine else 1
