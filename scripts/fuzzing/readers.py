"""Every reader of one file, with sound files to begin with: what `fuzz_coverage.py` feeds."""

import argparse
import io
import json
import random
import tempfile
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from bitnet_np.base.errors import Error
from bitnet_np.cli.generate_many import read_prompts
from bitnet_np.cli.inputs import token_ids
from bitnet_np.files.load import model_from, open_model
from bitnet_np.judge import receipt
from bitnet_np.servers import llama_server, openai
from bitnet_np.testing.models import random_model, write_gguf
from bitnet_np.text.tokenizer import Tokenizer

from .cases import Files, files_of, read_model, use_dump, write
from .edits import edit_archive, edit_bytes, edit_words
from .seeds import write_dumps, write_folders, write_parts, write_tokenizers

_INDEX = "model.safetensors.index.json"
_FIRST_FILE = {"npy": "l_out-0.npy", "steps": "step-0/l_out-0.npy", "steps-in-names": "l_out-0.step-0.npy"}
"""The fuzzed file of dumps that are folders. The formats that are not here have it as the first of the sorted names."""
_MODELS: tuple[dict[str, Any], ...] = (  # small enough that most of a file are its headers
    {"family": "llama", "weights": "float32"},
    {"family": "gpt2", "weights": "float16", "table": "bfloat16"},
    {"family": "bitnet", "weights": "ternary", "ffn": 128, "width": 128, "heads": 2, "head_dim": 64},
    {"family": "qwen2", "weights": "Q8_0", "ffn": 32, "width": 32, "head_dim": 16},
)
_NUMBERS = {"vocab": 5, "width": 16, "ffn": 16, "heads": 2, "kv_heads": 1, "head_dim": 8, "n_layers": 1, "context": 64}
_TOP = [{"id": 5, "logprob": -0.1}, {"id": 7, "logprob": None}]
_LLAMA_ANSWER = {
    "tokens": [5],
    "tokens_evaluated": 2,
    "truncated": False,
    "completion_probabilities": [{"id": 5, "bytes": [63], "logprob": -0.1, "top_logprobs": _TOP}],
}
_OPENAI_ANSWER = {
    "usage": {"prompt_tokens": 2},
    "choices": [
        {
            "prompt_logprobs": [None, {"5": {"logprob": -0.1, "rank": 1}}],
            "logprobs": {"tokens": ["token_id:5"], "token_logprobs": [-0.1], "top_logprobs": [{"token_id:5": -0.1, "token_id:7": -3.0}]},
        }
    ],
}


@dataclass(frozen=True)
class Reader:
    """How one kind of file is read."""

    folder: str  # the name of the folder that the files are written to: use_dump knows a dump's format by it
    file: str  # the name of the file that is fuzzed
    seeds: tuple[bytes, ...]
    read: Callable[[Path], None]  # reads the folder
    others: Files = field(default_factory=dict)  # the sound files beside it

    def files(self, data: bytes) -> Files:
        return {**self.others, self.file: data}


def readers() -> dict[str, Reader]:
    """Every reader by the name of what it reads."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokenizers(folder)
        write_folders(folder)
        write_parts(folder)
        for i, sizes in enumerate(_MODELS):
            write_gguf(folder / f"{i}.gguf", random_model(i, **_NUMBERS | sizes))
        (folder / "dumps").mkdir()
        write_dumps(folder / "dumps")
        every = {"gguf": Reader("gguf", "t.gguf", tuple(path.read_bytes() for path in sorted(folder.glob("*.gguf"))), _read_model)}
        parts = files_of(folder / "parts")
        for name in parts:
            others = {other: raw for other, raw in parts.items() if other != name}
            every[f"gguf-{name[:7]}"] = Reader("gguf", name, (parts[name],), _read_model, others)
        every |= _of_folders({path.name: files_of(path) for path in sorted(folder.glob("hf-*"))})
        every |= _of_dumps({path.name: files_of(path) for path in sorted((folder / "dumps").iterdir())})
    array = io.BytesIO()
    np.save(array, np.array([[1, 2], [3, 4]]))
    texts = {"json": b"[[1, 2], [3, 4]]", "txt": b"1, 2 3\n4 5 6\n", "npy": array.getvalue()}
    every |= {f"tokens-{name}": Reader("tokens", f"t.{name}", (text,), _read_tokens) for name, text in texts.items()}
    prompts = b'{"id": 1, "prompt": "a"}\n\n{"id": "b", "tokens": [1, 2]}\n'
    every["prompts"] = Reader("prompts", "t.jsonl", (prompts,), lambda folder: _all(read_prompts(folder / "t.jsonl")))
    row = {"pos": 0, "mse": 1e-9, "kl": None, "topk_agree": 1.0}
    written = json.dumps(receipt.receipt([row], model="", backend="", prompt="")).encode()
    every["receipt"] = Reader("receipts", "t.json", (written,), lambda folder: _all(receipt.read(folder / "t.json").rows))
    for name, parse, answer in (("llama-server", llama_server.parse, _LLAMA_ANSWER), ("openai", openai.parse, _OPENAI_ANSWER)):
        every[f"answer-{name}"] = Reader("answers", "t.json", (json.dumps(answer).encode(),), _parses(parse))
    return every


def mutated(data: bytes, largest: int, draw: random.Random) -> bytes:
    """The file with words, bytes or members of an archive changed; coverage says which of these are kept."""
    raw = bytearray(data)
    for _ in range(draw.randint(1, 3)):
        if data.startswith(b"PK") and draw.random() < 0.8:
            raw = edit_archive(bytes(raw), draw)
        elif draw.random() < 0.6:
            raw = edit_words(raw, draw)
        else:
            raw = edit_bytes(raw, draw, near=draw.choice([64, 300, None]))
    return bytes(raw[:largest])


def _of_folders(folders: Mapping[str, Files]) -> dict[str, Reader]:
    """The readers of the files of a Hugging Face folder."""
    whole, split = folders["hf-tokenizer-bytes"], folders["hf-online"]

    def reader(name: str, files: Files, seeds: Iterable[Files], read: Callable[[Path], None] = _read_model) -> Reader:
        others = {other: raw for other, raw in files.items() if other != name}
        return Reader("folder", name, tuple(files[name] for files in seeds), read, others)

    texts = whole, folders["hf-tokenizer-scores"]
    return {
        "config.json": reader("config.json", whole, folders.values(), _read_config),
        "model.safetensors": reader("model.safetensors", whole, [whole]),
        _INDEX: reader(_INDEX, split, [split]),
        "tokenizer.json": reader("tokenizer.json", whole, [whole]),
        "tokenizer.json-scores": reader("tokenizer.json", texts[1], [texts[1]]),
        "tokenizer_config.json": reader("tokenizer_config.json", whole, texts),
    }


def _of_dumps(dumps: Mapping[str, Files]) -> dict[str, Reader]:
    made = {}
    for name, files in dumps.items():
        file = _FIRST_FILE.get(name, min(files))
        others = {other: raw for other, raw in files.items() if other != file}
        made[f"dump-{name}"] = Reader(name, file, (files[file],), _read_dump, others)
    return made


def _read_model(folder: Path) -> None:
    """Everything before the kernels: the model is loaded, not run."""
    model_from(read_model(next(folder.glob("*.gguf"), folder)))


def _read_config(folder: Path) -> None:
    """A sound config.json may be of another model than the tensors beside it."""
    source = open_model(folder)
    source.config()
    with suppress(Error):
        model_from(source)


def _read_dump(folder: Path) -> None:
    for n in (1, 2):  # of a format that is declared, and of one that is detected
        use_dump(folder, n)


def _read_tokens(folder: Path) -> None:
    (path,) = folder.iterdir()
    np.array(token_ids(argparse.Namespace(tokens=None, tokens_file=path, text=None), tokenizer=_no_tokenizer))


def _no_tokenizer() -> Tokenizer:
    raise AssertionError("a file of tokens needs no tokenizer")


def _all(values: object) -> None:
    list(values)  # type: ignore[call-overload]


def _parses(parse: Callable[..., object]) -> Callable[[Path], None]:
    """The reader of an answer, whose JSON is sound: the client has read it."""

    def read(folder: Path) -> None:
        try:
            answer = json.loads((folder / "t.json").read_bytes())
        except (ValueError, RecursionError):
            return
        parse(answer, [3, 4], 1, 2)

    return read


def prepare(corpus: Path, reader: Reader) -> None:
    """Make the corpus's folder, with the sound files in it."""
    corpus.mkdir(parents=True, exist_ok=True)
    for i, seed in enumerate(reader.seeds):
        (corpus / f"sound-{i}").write_bytes(seed)


def written(folder: Path, reader: Reader, data: bytes) -> Path:
    """Write the reader's files with `data` as the fuzzed one. Returns their folder."""
    write(folder / reader.folder, reader.files(data))
    return folder / reader.folder
