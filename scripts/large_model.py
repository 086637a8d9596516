"""A model that outgrows memory: write one of random weights, and measure what computing its logits takes.

`write` makes a GGUF file of architecture `llama`, in the shape of Llama 3 1B, 8B or 70B. Its layers repeat one random layer and its
matrices some random rows, so that 40 GB are written as fast as the disk takes them. Every tensor has its own pages. `run` computes logits
in a new process as `bitnet-np logits` does and watches it: seconds, bytes read from the disk, and private memory, in which the file's pages
do not count. Linux only.

    python scripts/large_model.py write 70b Q4_K 70b.gguf
    python scripts/large_model.py run 70b.gguf --tokens 8 --limit 2000 --cold
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_np import Config
from bitnet_np.base.errors import Error, OptionError
from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, F16, F32, I2_S, Q4_K, Q6_K, TERNARY_TYPES, TensorType
from bitnet_np.cli.progress import bar
from bitnet_np.files.gguf_names import tensor_name
from bitnet_np.files.gguf_writer import FILE_TYPES, write_file, write_keys
from bitnet_np.model import packing
from bitnet_np.model.families import layer_shapes
from bitnet_np.model.records import Blocks
from bitnet_np.testing.models import random_table

SHAPES: dict[str, dict[str, Any]] = {
    "tiny": {"vocab": 512, "width": 256, "n_layers": 2, "ffn": 512, "heads": 4, "kv_heads": 2, "head_dim": 64},
    "1b": {"vocab": 128256, "width": 2048, "n_layers": 16, "ffn": 8192, "heads": 32, "kv_heads": 8, "head_dim": 64},
    "8b": {"vocab": 128256, "width": 4096, "n_layers": 32, "ffn": 14336, "heads": 32, "kv_heads": 8, "head_dim": 128},
    "70b": {"vocab": 128256, "width": 8192, "n_layers": 80, "ffn": 28672, "heads": 64, "kv_heads": 8, "head_dim": 128},
}
_ROWS = 512
TYPES = {kind.name: kind for kind in (I2_S, *ALL_BLOCK_TYPES)}
MIXTURE = "Q4_K_M"
"""llama.cpp's usual choice: Q4_K, but Q6_K for embedding and head, and for values and ffn_down of every other layer."""


# --- writing --------------------------------------------------------------------------------------------------------------------------


def config_of(shape: str, layers: int | None = None) -> Config:
    """The Config of a shape, with fewer or more layers if that is asked for."""
    numbers = SHAPES[shape] | ({"n_layers": layers} if layers else {})
    return Config("llama", context=8192, eps=1e-5, rope="adjacent", rope_base=500000.0, activation="silu", **numbers)


def write(path: Path, config: Config, name: str, seed: int) -> None:
    """Write the model. Matrices have the type of this name or those of MIXTURE; embedding and head are float16 where that is ternary."""
    rng = np.random.default_rng(seed)
    kind = Q4_K if name == MIXTURE else TYPES[name]
    table_type = F16 if kind in (I2_S, *TERNARY_TYPES) else Q6_K if name == MIXTURE else kind
    shapes = layer_shapes(config)
    mixed = [field for field in shapes if name == MIXTURE and field in ("attn_v", "ffn_down")]
    layer = {field: _random(rng, kind, shape) for field, shape in shapes.items()}
    other = layer | {field: _random(rng, Q6_K, shapes[field]) for field in mixed}
    tables = {"token_embd": (config.vocab, config.width), "output_norm": (config.width,), "output": (config.vocab, config.width)}

    def entries() -> Iterator[tuple[str, TensorType, tuple[int, ...]]]:
        for n in range(config.n_layers):
            for field, shape in shapes.items():
                of_matrix = Q6_K if field in mixed and n % 2 else kind
                yield tensor_name(field, n), of_matrix if len(shape) == 2 else F32, shape
        for field, shape in tables.items():
            yield tensor_name(field), table_type if len(shape) == 2 else F32, shape

    def contents() -> Iterator[NDArray]:
        for n in range(config.n_layers):
            yield from (other if n % 2 else layer).values()
        for shape in tables.values():
            yield _random(rng, table_type, shape)

    metadata = {"tokenizer.ggml.model": "none", "general.name": f"random, seed {seed}", "general.file_type": FILE_TYPES.get(kind)}
    write_file(path, "llama", lambda writer: write_keys(writer, config, metadata), list(entries()), contents(), progress=bar(path.name))


def _random(rng: np.random.Generator, kind: TensorType, shape: tuple[int, ...]) -> NDArray:
    """A tensor with which activations keep their size. A matrix has at most _ROWS different rows."""
    if len(shape) == 1:
        return rng.normal(1, 0.1, shape).astype(np.float32)
    n, m = shape
    order, spread = rng.integers(0, _ROWS, n), m**-0.5
    if kind is I2_S:
        packed = packing.to_i2s(packing.pack(rng.integers(-1, 2, (_ROWS, m), np.int8), spread))
        return np.concatenate([packed[: -I2_S.trailer].reshape(_ROWS, -1)[order].reshape(-1), packed[-I2_S.trailer :]])
    table = random_table(rng, "float16" if kind is F16 else kind.name, _ROWS, m, spread)
    return (table.data if isinstance(table, Blocks) else table)[order]


# --- running --------------------------------------------------------------------------------------------------------------------------


@dataclass
class Usage:
    """What a process took."""

    seconds: float = 0.0
    private: int = 0  # bytes of memory that is no file's, at the peak
    read: int = 0  # bytes read from the disk


def run(path: Path, tokens: int, limit: int | None, threads: int, options: Sequence[str] = ()) -> tuple[Usage, str]:
    """Run `bitnet-np logits` on the first token ids, in one pass; returns what it took and what it printed.

    limit: bytes of private memory. options: more options of the command.

    Raises OptionError if the process fails, as it does where it needs more memory.
    """

    def restrict() -> None:
        if limit is not None:
            import resource  # which Windows has not

            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))

    command = [sys.executable, "-m", "bitnet_np", "logits", str(path), "--mode", "parallel", *options]
    command += ["--tokens", ",".join(map(str, range(1, tokens + 1)))]
    root = str(Path(__file__).parents[1])
    environment = os.environ | {
        "NUMBA_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")])),
    }
    usage, start = Usage(), time.monotonic()
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, preexec_fn=restrict
    ) as child:
        while child.poll() is None:
            _watch(child.pid, usage)
            time.sleep(0.02)
        usage.seconds = time.monotonic() - start
        said = child.stdout.read() if child.stdout else ""
    if child.returncode:
        raise OptionError(f"{path}: the process ended with exit code {child.returncode}: {said.strip()[-500:]}")
    return usage, said


def _watch(pid: int, usage: Usage) -> None:
    """Take down what Linux says of a process, if it still lives."""
    try:
        lines = [*Path(f"/proc/{pid}/status").read_text().splitlines(), *Path(f"/proc/{pid}/io").read_text().splitlines()]
    except OSError:
        return
    numbers = {key: int(rest[0]) for key, *rest in (line.replace(":", " ").split() for line in lines) if key in ("RssAnon", "read_bytes")}
    usage.private = max(usage.private, 1024 * numbers.get("RssAnon", 0))
    usage.read = max(usage.read, numbers.get("read_bytes", 0))


def drop(path: Path) -> None:
    """Let the system forget the pages of the file that it holds."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    writing = commands.add_parser("write", help="write a model of random weights")
    writing.add_argument("shape", choices=SHAPES)
    writing.add_argument("type", choices=(*TYPES, MIXTURE), metavar="TYPE", help=f"of the matrices: {MIXTURE}, {', '.join(TYPES)}")
    writing.add_argument("path", type=Path, metavar="OUT.gguf")
    writing.add_argument("--layers", type=int, metavar="N", help="instead of the shape's own number")
    writing.add_argument("--seed", type=int, default=0)
    running = commands.add_parser("run", help="compute logits in a new process, and say what that took")
    running.add_argument("path", type=Path, metavar="FILE")
    running.add_argument("--tokens", type=int, default=1, metavar="N", help="length of the prompt (default 1)")
    running.add_argument("--threads", type=int, default=os.cpu_count() or 1, metavar="N")
    running.add_argument("--limit", type=int, metavar="MB", help="most private memory; the process fails where it needs more")
    running.add_argument("--allow-nan", action="store_true", help="check no weights while loading, which reads the whole file once")
    running.add_argument("--cold", action="store_true", help="forget the pages of the file first")
    options = parser.parse_args(argv)
    try:
        if options.command == "write":
            write(options.path, config_of(options.shape, options.layers), options.type, options.seed)
            return 0
        if options.cold:
            drop(options.path)
        limit, more = options.limit and options.limit * 10**6, ["--allow-nan"] if options.allow_nan else []
        usage, said = run(options.path, options.tokens, limit, options.threads, more)
    except (Error, OSError) as error:
        print(f"large_model.py: {error}", file=sys.stderr)
        return 2
    size = options.path.stat().st_size
    print(said.strip())
    print(f"\n{options.path}: {size / 1e9:.2f} GB, {options.tokens} tokens, {options.threads} threads")
    print(f"{usage.seconds:.1f} s, {usage.private / 1e6:,.0f} MB of private memory at the peak")
    print(f"{usage.read / 1e9:.2f} GB read from the disk, {usage.read / size:.2f} times the file")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
