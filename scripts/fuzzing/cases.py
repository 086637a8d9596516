"""One case: a sound file is changed, then read and used as its users do, or a call has arguments that no caller should pass.

Case n depends on n and the seeds alone.
"""

import random
import time
import tracemalloc
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from bitnet_np import KVCache, forward, forward_full
from bitnet_np.base.errors import Error
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.files.load import model_from, open_model
from bitnet_np.text.tokenizer import tokenizer_from
from bitnet_np.traces.formats import COMPLETIONS, bitnet_rs, eval_callback, read_any
from fuzzing.gguf_bytes import Document

from .arguments import ADDRESSES, use_arguments
from .edits import edit_file
from .gguf_document import changed
from .hf_folders import changed_folder
from .seeds import TOKENS, VOCAB

SECONDS = 1.0  # of processor time; a case that takes more of it, or of memory, is a finding
MEMORY = 64 << 20  # bytes beyond those of the file, of Python's objects and NumPy's arrays; mapped files do not count
_SUMMED = 1 << 20  # bytes; tensors up to this size are read whole

Files: TypeAlias = dict[str, bytes]


class Seed(NamedTuple):
    """A sound file to change: a GGUF file and the other parts of its model, or the files of a Hugging Face folder or a dump by their names.

    document: the first of `files`, if that is a GGUF file.
    """

    name: str
    document: Document | None
    files: Files

    @property
    def kind(self) -> str:
        if not self.files:
            return "arguments"
        if "config.json" in self.files:
            return "folder"
        if self.document is None:
            return "dump"
        return "parts" if len(self.files) > 1 else "tokenizer" if self.name.startswith("tokenizer") else "model"

    def with_first(self, raw: bytes) -> Files:
        """The files with other bytes of the first. A GGUF file that is its model's only one is called t.gguf."""
        first = next(iter(self.files))
        return {**self.files, first: raw} if self.kind == "parts" else {"t.gguf": raw}


_SHARES = {"model": 5, "arguments": 4, "dump": 2, "folder": 2, "tokenizer": 1, "parts": 1}


def read_seeds(paths: Sequence[Path]) -> list[Seed]:
    """The seeds at these paths: GGUF files, folders of one model, and folders of one dump, named after its format.

    A folder of GGUF files is a model in several parts, which gives a seed for each part. An empty one stands for calls and commands.
    """
    seeds = []
    for path in paths:
        if path.is_dir():
            files = {str(part.relative_to(path)): part.read_bytes() for part in sorted(path.rglob("*")) if part.is_file()}
            parts = [name for name in files if name.endswith(".gguf")]
            seeds += [Seed(f"{path.name}-{i}", Document.read(path / name), {name: files[name], **files}) for i, name in enumerate(parts)]
            if not parts:
                seeds.append(Seed(path.name, None, files))
        else:
            seeds.append(Seed(path.name, Document.read(path), {path.name: path.read_bytes()}))
    return seeds


def case(seeds: Sequence[Seed], n: int) -> tuple[Seed, Files]:
    """The seed of case n, and its changed files."""
    draw = random.Random(n)
    kinds = {kind: [seed for seed in seeds if seed.kind == kind] for kind in _SHARES}
    present = [kind for kind, members in kinds.items() if members]
    seed = draw.choice(kinds[draw.choices(present, [_SHARES[kind] for kind in present])[0]])
    if seed.kind == "arguments":
        return seed, {}
    if seed.kind == "folder":
        return seed, changed_folder(seed.files, draw)
    document, change = seed.document, draw.random()
    if document is None or change > 0.75:
        files = dict(seed.files) if document is None else seed.with_first(next(iter(seed.files.values())))
        for _ in range(draw.randint(1, 4)):
            edit_file(files, draw)
        return seed, files
    files = seed.with_first(changed(document, draw))
    if len(files) > 1 and change < 0.1:
        files = dict(zip(files, reversed(files.values()), strict=True))  # each part under another's name
    return seed, files


def write(folder: Path, files: Files) -> None:
    """Write the files of a case to a folder, and delete those of the case before."""
    for path in folder.rglob("*") if folder.exists() else ():
        if path.is_file():
            path.unlink()  # files are replaced, not rewritten, because the old ones may still be mapped
    for name, raw in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def attempt(seeds: Sequence[Seed], n: int, scratch: Path) -> str:
    """The outcome of case n: "ran", "refused", or the finding."""
    seed, files = case(seeds, n)
    use = {"dump": use_dump, "arguments": use_arguments}.get(seed.kind, use_model)
    write(scratch / seed.name, files)
    return outcome(lambda: use(scratch / seed.name, n), sum(map(len, files.values())))


def outcome(use: Callable[[], None], size: int) -> str:
    """What becomes of reading files of `size` bytes: "ran", "refused", or the finding.

    They are read once, because that may compile kernels, then to measure memory, which takes time, and if that was long once more.
    """
    ended, took, memory = "", 0.0, 0
    for measure in ("nothing", "memory", "time"):
        if measure == "time" and took <= SECONDS:
            break
        if measure == "memory":
            tracemalloc.start()
        start = time.process_time()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error")  # the library never prints
                use()
            ended = "ran"
        except Error:
            ended = "refused"
        except Exception as error:  # a finding
            return f"{type(error).__name__}: {str(error)[:300]}"
        finally:
            took, memory = time.process_time() - start, max(memory, tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    if memory > ADDRESSES:  # NumPy counts arrays that it was refused
        memory = 0
    return f"took {took:.1f} s" if took > SECONDS else f"took {memory:,} bytes" if memory > size + MEMORY else ended


def use_model(folder: Path, n: int) -> None:
    """Open a model, read every value, every small tensor and its tokenizer, load it, and run it with three tokens and, cached, with one.

    A model in several files is opened by one of them.
    """
    parts = sorted(folder.glob("*.gguf"))
    file = open_model(parts[n % len(parts)] if parts else folder)
    for value in file.metadata.values():
        if isinstance(value, np.ndarray):
            value.tobytes()
    for tensor in file.tensors.values():
        if tensor.data.size <= _SUMMED:
            tensor.data.tobytes()
    if "tokenizer.ggml.tokens" in file.metadata:
        tokenizer = tokenizer_from(file.metadata, file.path)
        tokenizer.decode(tokenizer.encode("hello \U0001f642 <user>", special=True))
    model = model_from(file, allow_nan=n % 8 == 0)
    last = model.config.vocab - 1
    ids = [[last, 0, last // 2][: model.config.context]]
    dialect = tuple(DIALECTS.values())[n % 3]
    forward_full(model, ids, dialect=dialect)
    cache = KVCache(model.config, capacity=min(64, model.config.context))  # one of the whole context takes what the file says
    forward(model, [[last]], cache, dialect=dialect)


def use_dump(folder: Path, n: int) -> None:
    """Read every point of a dump, with its format detected or declared."""
    name = folder.name
    entries = list(folder.iterdir())
    path = entries[0] if len(entries) == 1 and name not in ("npy", "aprt", "steps", "steps-in-names") else folder
    if name in COMPLETIONS:
        COMPLETIONS[name](path, TOKENS)
        return
    if name.startswith("bitnet-rs"):
        bitnet_rs.read(path)
    if name == "eval-callback":
        eval_callback.read(path)
        return
    format = {"packed": "npz", "modules": "npz", "steps": "npy", "steps-in-names": "npy"}.get(name, name) if n % 2 else None
    shape = (len(TOKENS), VOCAB) if name == "raw" else None
    trace = read_any(path, format, shape=shape, tokens=TOKENS if n % 3 else None)
    for point in trace.points:
        trace.points[point].tobytes()


def run_cases(seeds: Sequence[Seed], numbers: Sequence[int], scratch: Path, say: Callable[[int, str], None], seconds: float) -> None:
    """Run cases one after another, with `say(n, "")` before each and `say(n, outcome)` after it."""
    end = time.monotonic() + seconds
    for n in numbers:
        if time.monotonic() > end:
            return
        say(n, "")
        say(n, attempt(seeds, n, scratch))
