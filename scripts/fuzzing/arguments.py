"""Arguments of the public functions and the command line: those of a sound call, of which one or two are what no caller should pass.

What may become of a call: it ends well, or raises bitnet_np.Error, or MemoryError where sizes that are allowed do not fit into memory, or
OSError where the system refuses a file. Python itself raises TypeError for arguments that a function does not have. An iterable without an
end, and a callback that raises, are the caller's.
"""

import contextlib
import dataclasses
import io
import random
import sys
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numba
import numpy as np

import bitnet_np as bn
from bitnet_np.cli.main import build_parser, main
from bitnet_np.hunt.outcome import Judge
from bitnet_np.judge.mistakes import search
from bitnet_np.judge.options import Options
from bitnet_np.kernels import cpu
from bitnet_np.model.records import Yarn
from bitnet_np.testing.models import random_model, write_gguf
from bitnet_np.traces.points import Key
from bitnet_np.training.gradients import parameter_shapes

# --- what no caller should pass -------------------------------------------------------------------------------------------------------


ADDRESSES = 1 << 36  # bytes that a call may reserve: no array is larger


def _nothing(*arguments: Any) -> None:
    """A callback that takes what it is given."""


class Hostile:
    """An object whose method of this name raises what no library expects, or gives `result`."""

    def __new__(cls, name: str, *result: Any) -> Any:
        def method(self: Any, *arguments: Any, **options: Any) -> Any:
            if result:
                return result[0]
            raise RuntimeError(f"hostile {name}")

        return object.__new__(type(f"Hostile{name}", (), {name: method, "__len__": lambda self: 3} | {name: method}))


def _nested(depth: int) -> list[Any]:
    value: list[Any] = [1]
    for _ in range(depth):
        value = [value]
    return value


VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**62, 2**63, 2**64, -(2**63), -(2**70), 10**400),
    *(0.5, -0.0, 1e308, 1e-320, float("nan"), float("inf"), float("-inf"), 1j),
    *("", "x", "ä\u0130.gguf", "\0", "\udcff", "a" * 10_000, "nan", "\n", b"", b"x", b"\xff\xfe", bytearray(3)),
    *([], [[]], [1], [[1, 2], [3]], [[1.5]], [["a"]], [[2**64]], [[-1]], [[[[1]]]], [None], [[None]], [[True, False]], [[1j]]),
    *((), {}, {"a": 1}, {1: 2}, {"logits": 3}, {3}, frozenset(), range(0), range(3), _nested(100), _nested(5000)),
    *(np.zeros(0), np.zeros((0, 3), int), np.int64(1), np.float32("nan"), np.bool_(True), np.array(5), np.array([[np.nan]], "f4")),
    *(np.zeros((1, 3), complex), np.zeros((1, 3), bool), np.array([["a"]]), np.array([[None]]), np.zeros((1, 3), "M8[s]")),
    *(np.full((1, 3), 2**64 - 1, np.uint64), np.zeros((1,) * 20, int), np.zeros((1, 3), "f4,i4"), np.zeros((1, 3), ">i4")),
    *(np.ma.masked_array([[1, 2]], [[True, False]]), np.zeros((3, 1), int).T, np.zeros((1, 3), np.float16), np.zeros((1, 3), "m8")),
    np.broadcast_to(np.int64(1), (2**20, 2**20)),
    *(Hostile("__array__"), Hostile("__array__", "text"), Hostile("__array__", np.zeros((1, 3))), Hostile("__array_interface__", 3)),
    *(Hostile("__len__"), Hostile("__len__", -1), Hostile("__len__", 2**62), Hostile("__getitem__")),
    *(Hostile("__iter__"), Hostile("__iter__", 3), Hostile("__index__"), Hostile("__float__"), Hostile("__bool__"), Hostile("__eq__")),
    *(Hostile("__repr__"), Hostile("__str__"), Hostile("__fspath__"), Hostile("__fspath__", 3), Hostile("__fspath__", b"\xff")),
    *(Hostile("__getattr__"), Hostile("__hash__"), Hostile("__contains__")),
    *(object(), _nothing, np, Ellipsis, NotImplemented, slice(None), Path("ä"), Path(), ValueError("x"), bn.EXACT, bn.Sampling()),
]


def varied(value: Any, draw: random.Random, whole: bool = False) -> Any:
    """What stands in the place of a sound value: a hostile one, or, unless it is replaced as a whole, one that is nearly as it is."""
    if whole or draw.random() < 0.5:
        return draw.choice(VALUES)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        name = draw.choice([field.name for field in dataclasses.fields(value) if field.init])
        return dataclasses.replace(value, **{name: varied(getattr(value, name), draw)})
    if isinstance(value, np.ndarray):
        return _varied_array(value, draw)
    if isinstance(value, dict) and value:
        name = draw.choice(list(value))
        return value | {name: varied(value[name], draw)}
    if isinstance(value, tuple | list) and value:
        changed = (*value[:-1], varied(value[-1], draw))
        return type(value)(draw.choice([(), value * 2, value[:-1], changed, changed, changed]))
    return draw.choice(VALUES)


def _varied_array(array: Any, draw: random.Random) -> Any:
    with np.errstate(all="ignore"):
        match draw.randrange(3):
            case 0:
                return array.astype(draw.choice(["f8", "f4", "f2", "i1", "u1", "i8", object, bool, complex, "U3", ">f4"]))
            case 1:
                return draw.choice([array[:0], array[..., :-1], array[None], array.T, np.repeat(array, 2, 0), array.ravel(), array[::-1]])
        changed = array.copy()
        if array.size:
            changed.flat[draw.randrange(array.size)] = np.float64(draw.choice([np.nan, np.inf, -1, 2**31, 1e38])).astype(array.dtype)
        return changed


# --- the calls ------------------------------------------------------------------------------------------------------------------------


class Call(NamedTuple):
    """A sound call: the function, and its arguments by name. Those of `whole` are replaced, and not changed in part."""

    function: Callable
    arguments: dict[str, Any]
    whole: tuple[str, ...] = ()


@lru_cache
def _model() -> bn.Model:
    return random_model(1, vocab=9, context=16, width=128, ffn=128, heads=4, kv_heads=2, head_dim=32, n_layers=2)


@lru_cache
def _logits() -> np.ndarray:
    return bn.forward_full(_model(), [[0, 1, 2]])[0]


def model_file(folder: Path) -> Path:
    """The model as a file beside the folder of the cases, which is emptied before each."""
    path = folder.parent / "sound.gguf"
    if not path.exists():
        write_gguf(path, _model())
    return path


def _dump(folder: Path) -> Path:
    """A dump beside the folder of the cases, which is emptied before each."""
    path = folder.parent / "sound.npy"
    if not path.exists():
        np.save(path, _logits())
    return path


def calls(folder: Path) -> dict[str, Call]:
    """Every public function with sound arguments."""
    model, tokens, hidden = _model(), [[1, 2, 3]], np.ones((1, 3, 128), np.float32)
    config, logits = model.config, np.arange(27, dtype=np.float32).reshape(3, 9)
    causal, whole = bn.masks.mask(3, 3), bn.masks.mask(5, 5)

    def cache(filled: int = 0) -> bn.KVCache:
        made = bn.KVCache(config, 2, 8)
        if filled:
            bn.forward(model, [[1] * filled], made)
        return made

    def batch() -> bn.Batch:
        made = bn.Batch(model, 1)
        made.submit(bn.Request("waits", [1], 1))
        return made

    computing = {"model": model, "dialect": bn.EXACT, "ops": cpu}
    observing = computing | {"record": _nothing}
    whole_sequences = observing | {"tokens": tokens, "lengths": [3], "last_only": False, "mask": causal}
    sampled: dict[str, Any] = computing | {"prompt": [1, 2], "n": 2, "sampling": bn.Sampling(1.0, 3, 0.9), "seed": 1, "stop": [4]}
    request: dict[str, Any] = {"id": "a", "prompt": [1, 2], "n": 2, "sampling": bn.Sampling(), "seed": 1, "stop": [3]}
    pattern, windowed = bn.masks.Pattern(window=2), {"q_len": 3, "k_len": 5, "past": 2, "form": "additive", "dtype": np.float32}
    parameters = {name: np.full(shape, 0.5, np.float32) for name, shape in parameter_shapes(config).items()}

    trace = bn.Trace({Key("result_output", None): logits}, None, "a trace")

    def submit(request: Any) -> None:
        made = batch()
        made.submit(request)
        while made.step():
            pass

    return {
        "load": Call(
            bn.load,
            {"path": model_file(folder), "progress": _nothing, "allow_nan": False, "i2s_layout": "128/32", "overrides": {"context": 8}},
        ),
        "open_gguf": Call(bn.open_gguf, {"path": model_file(folder)}),
        "KVCache": Call(bn.KVCache, {"config": config, "batch": 1, "capacity": 4, "dtype": np.float32}),
        "KVCache.truncate": Call(lambda **own: cache(3).truncate(**own), {"slot": 0, "length": 2}),
        "KVCache.rollback": Call(lambda **own: cache(3).rollback(**own), {"slot": 0, "count": 2}),
        "KVCache.clear": Call(lambda **own: cache(3).clear(**own), {"slot": 0}),
        "KVCache.fork": Call(lambda **own: cache(3).fork(**own), {"source": 0, "targets": [1], "length": 2}),
        "KVCache.resize": Call(lambda **own: cache(3).resize(**own), {"batch": 3, "capacity": 9, "force": False}),
        "forward_full": Call(bn.forward_full, whole_sequences | {"strict": True}),
        "forward_incremental": Call(bn.forward_incremental, whole_sequences | {"chunk": 2}),
        "compute_logits": Call(bn.compute_logits, whole_sequences | {"mode": "auto", "parallel_threshold": 2, "chunk": 2, "strict": True}),
        "forward": Call(bn.forward, whole_sequences | {"cache": cache(), "slots": [1], "strict": True}),
        "prefill": Call(bn.prefill, computing | {"tokens": tokens, "cache": cache(), "lengths": [3], "block": 2, "slots": [1]}),
        "forward_layer": Call(bn.forward_layer, observing | {"layer": 1, "hidden": hidden, "mask": causal, "strict": True, "cache": None}),
        "feed_forward": Call(bn.feed_forward, observing | {"layer": 1, "hidden": hidden, "norm": True}),
        "forward_batch": Call(
            bn.forward_batch, computing | {"sequences": [[1, 2], [3]], "cache": cache(), "slots": [1, 0], "start": [0, 0]}
        ),
        "generate": Call(bn.generate, sampled | {"numbers": [0.5, 0.25]}),
        "stream": Call(lambda **own: list(bn.stream(**own)), sampled),
        "generate_batch": Call(
            lambda **own: list(bn.generate_batch(**own)),
            computing | {"requests": [bn.Request(**request)], "slots": 2, "dtype": np.float32, "observe": _nothing},
        ),
        "Batch": Call(bn.Batch, computing | {"slots": 2, "capacity": 8, "dtype": np.float32, "observe": _nothing}),
        "Batch.submit": Call(submit, {"request": bn.Request(**request)}),
        "Request": Call(bn.Request, request),
        "Sampling": Call(bn.Sampling, {"temperature": 1.0, "top_k": 3, "top_p": 0.9}),
        "pad": Call(bn.pad, {"sequences": [[1, 2], [3]]}),
        "judge": Call(bn.judge, {"ours": logits, "theirs": logits + 1, "reach": None, "numbers": np.arange(3), "details": None}),
        "check": Call(
            bn.check,
            {
                "model": model,
                "tokens": [0, 1, 2],
                "dump": {"logits": _logits()},
                "dialect": "exact",
                "precision": "act=bf16",
                "budget": 0.1,
            }
            | {"bars": lambda label: _nothing, "details": None, "prefix": 0, "strict": False},
            whole=("dump",),  # NaN is invalid; the search for the cause of wrong numbers takes ten seconds
        ),
        "compare_models": Call(
            bn.compare_models,
            {
                "dialect": bn.EXACT,
                "ops": cpu,
                "ours": model,
                "theirs": model,
                "sequences": tokens,
                "names": ("a", "b"),
                "progress": _nothing,
            },
        ),
        "compare_traces": Call(
            bn.compare_traces,
            {"ours": trace, "theirs": trace, "partial": True, "details": None, "tolerance": 0.1},
            whole=("ours", "theirs"),
        ),
        "read_any": Call(bn.read_any, {"path": _dump(folder), "format": "logits", "shape": None, "tokens": [0, 1, 2], "config": config}),
        "record_trace": Call(
            bn.record_trace,
            computing
            | {"tokens": [0, 1, 2], "out": folder / "recorded.npz", "format": "npz", "layers": [0], "names": ["l_out"], "scores": False},
        ),
        "hunt": Call(
            bn.hunt,
            {"engine": lambda model, tokens: bn.forward_full(model, [tokens])[0], "like": model, "time": 0.5, "runs": 1, "workers": 1}
            | {
                "seed": 0,
                "limit": 5.0,
                "out": folder / "cases",
                "single": False,
                "judge": Judge(bn.EXACT, Options()),
                "spread": map,
                "progress": _nothing,
            },
        ),
        "Metrics.ops": Call(lambda **own: bn.Metrics().ops(**own), {"backend": cpu, "reason": "x"}),
        "Dialect.with_cache": Call(bn.EXACT.with_cache, {"kind": "q8_0"}),
        "Precision": Call(bn.Precision, {"act": "bfloat16", "kv": "q8_0"}),
        "Precision.parse": Call(bn.Precision.parse, {"text": "act=bf16", "base": bn.Precision()}),
        "masks.Pattern": Call(bn.masks.Pattern, {"window": 2, "prefix": 1, "block": 1, "sinks": 1}),
        "masks.mask": Call(bn.masks.mask, windowed | {"pattern": pattern, "align": "bottom_right"}),
        "masks.part": Call(bn.masks.part, {"whole": whole, "q_len": 2, "k_len": 4, "past": 2}),
        "masks.causal": Call(bn.masks.causal, {"q_len": 2, "k_len": 4, "form": "bool", "dtype": np.float32}),
        "masks.rows": Call(lambda **own: list(bn.masks.rows(**own)), windowed | {"pattern": pattern, "block": 2}),
        "masks.batch": Call(
            bn.masks.batch, {"q_lens": [1, 2], "k_lens": None, "past_lens": [1, 0], "pattern": pattern, "form": "bool", "dtype": "f4"}
        ),
        "masks.as_additive": Call(bn.masks.as_additive, {"mask": causal == 0, "dtype": np.float32}),
        "masks.as_bool": Call(bn.masks.as_bool, {"mask": causal}),
        "masks.fully_masked": Call(bn.masks.fully_masked, {"mask": causal}),
        "masks.check": Call(
            bn.masks.check, {"mask": causal, "q_len": 3, "k_len": 3, "batch": 1, "form": "additive", "past": 0, "strict": True}
        ),
        "loss_and_gradients": Call(
            bn.loss_and_gradients,
            {"config": config, "parameters": parameters, "tokens": tokens, "lengths": [3], "weights": "none", "divisor": 2.0},
        ),
        "random_model": Call(
            random_model,
            {"seed": 1, "family": "qwen3", "table": "float16", "weights": "Q8_0", "tied": False, "gain": 1.0, "inner_norms": False}
            | {"vocab": 9, "context": 16, "width": 64, "ffn": 64, "heads": 4, "kv_heads": 2, "head_dim": 16, "n_layers": 1}
            | {"yarn": Yarn(4.0, 8), "eps": 1e-5, "rope_base": 1e4},
        ),
        "write_gguf": Call(write_gguf, {"path": folder / "written.gguf", "model": model, "fused": False}),
    }


# --- the command line -----------------------------------------------------------------------------------------------------------------

WORDS = [
    *("", "x", "-1", "0", "1", "7", "9" * 20, "9" * 5000, "1e999", "nan", "inf", "-inf", "0x10", "1.5", "1,2,3", "1,,2", "1,-2", "1 2"),
    *("\u00e4", "\udcff", "a" * 5000, ".", "..", "-", "--", "@x", "%s", "{}", "\n", "a..b", "http://a..b", "http://127.0.0.1:1"),
    *(
        "http://127.0.0.1:1/\u00e4",
        "file:///etc/hostname",
        "context=none",
        "context=-1",
        "eps=nan",
        "x=1",
        "kv=q8_0",
        "kv=",
        "act=bf16",
        ":0:",
    ),
]
"""Values of options. None is a path outside of the folder: a command may write there."""
_LEFT_OUT = ("--download", "--scheduler", "--workers", "--timeout")  # these ask the network or start processes


def commands(folder: Path) -> dict[str, list[str]]:
    """Sound words of each command. `selftest` runs for half a minute and `sweep` starts processes."""
    model, logits = str(model_file(folder)), str(folder / "logits.npy")
    np.save(logits, _logits())
    tokens = [model, "--tokens", "0,1,2"]
    return {
        "demo": [str(folder / "demo")],
        "inspect": [model],
        "tokenize": [str(Path(bn.__file__).parent / "data" / "demo.gguf"), "--text", "hello"],
        "logits": tokens,
        "generate": [*tokens, "-n", "2"],
        "check": [*tokens, "--theirs", logits],
        "trace": [*tokens, "--out", str(folder / "trace.npz")],
        "grad": [*tokens, "--out", str(folder / "gradients.npz")],
        "compare": [logits, logits],
        "nll": tokens,
        "convert": [model, str(folder / "converted.gguf"), "--type", "I2_S"],
        "mask": ["3", "5"],
    }


def places(folder: Path) -> list[tuple[str, list[str], int | str]]:
    """Every command with its sound words, and where a value is replaced: the number of a word, or an option that is added."""
    found: list[tuple[str, list[str], int | str]] = []
    parsers = build_parser().commands
    for name, words in commands(folder).items():
        found += [(name, words, i) for i, word in enumerate(words) if not word.startswith("-")]
        options = [action.option_strings[-1] for action in parsers[name]._actions if action.option_strings and action.nargs is None]
        found += [(name, words, option) for option in options if option not in (*words, *_LEFT_OUT)]
    return found


def command_of(n: int, folder: Path) -> list[str]:
    """The words of case n of the command line: one place of one command, each in its turn."""
    every = places(folder)
    name, words, place = every[n % len(every)]
    word = random.Random(n).choice(WORDS)
    if isinstance(place, str):
        return [name, *words, *([f"{place}={word}"] if place.startswith("--") else [place, word])]
    return [name, *words[:place], word, *words[place + 1 :]]


# --- cases ----------------------------------------------------------------------------------------------------------------------------


def call_of(n: int, folder: Path) -> tuple[Callable, Callable[[], dict[str, Any]]]:
    """The function of case n, and what makes its arguments, which may refuse to be made.

    One parameter of one function, each in its turn, is hostile, and sometimes a second one.
    """
    every = [(call, name) for call in calls(folder).values() for name in call.arguments]
    call, name = every[n % len(every)]

    def arguments() -> dict[str, Any]:
        draw = random.Random(n)
        names = {name, *draw.choices(list(call.arguments), k=int(draw.random() < 0.2))}
        return call.arguments | {name: varied(call.arguments[name], draw, name in call.whole) for name in sorted(names)}

    return call.function, arguments


def use_arguments(folder: Path, n: int) -> None:
    """Case n: a call, or one time in eight a command, in this folder. Raises Error where it is refused in one of the ways allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    threads = numba.get_num_threads()
    try:
        with (
            _limited(),
            contextlib.chdir(folder),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
            mock.patch.object(search, "thread_time", count(0, 2**40).__next__),  # a `budget` of seconds is over at once
        ):
            if n % 8:
                function, arguments = call_of(n // 8 * 7 + n % 8, folder)
                function(**arguments())
            else:
                _run(command_of(n // 8, folder))
    except (MemoryError, OSError) as error:
        raise bn.Error(str(error)) from None
    finally:
        numba.set_num_threads(threads)


@contextlib.contextmanager
def _limited() -> Iterator[None]:
    """Context in which a process has ADDRESSES bytes of them: a KV cache of a size that is asked for takes no memory until it is filled."""
    if sys.platform == "win32":
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESSES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _run(words: list[str]) -> None:
    try:
        code = main(words)
    except SystemExit as ended:
        code = ended.code  # type: ignore[assignment]
    if code == 2:
        raise bn.Error("refused")
    if code not in (0, 1):
        raise RuntimeError(f"exit code {code}")
