"""Mutate GGUF files and read them whole: whatever is wrong with a file, the reader must say so with an error of its own family.

    python scripts/fuzz_gguf.py [--mutations 20000] [--seed 0] [--seconds S] [FILE ...]

Without a FILE a small sample is made up. Only headers are mutated, as the reader does not look into tensor data: those are a hole of the
right size. Mutation i depends on seed + i alone, so a finding is repeated by that seed and `--mutations 1`. Exit status 1 if there is any.
"""

import argparse
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, cast

import gguf
import numpy as np

from bitnet_np.errors import Error
from bitnet_np.gguf_file import GGUFFile, StringArray, open_gguf
from bitnet_np.tensor_types import I2_S

SLOW = 10.0  # seconds; a read that takes longer is a finding
SMALL = 1 << 20  # bytes; tensors up to here are summed
EDGES = [*range(16), 32, 64, 65, 65535, 65536, *(1 << bit for bit in (31, 32, 62, 63)), (1 << 32) - 1, (1 << 63) - 1, (1 << 64) - 1]


class Seed(NamedTuple):
    """A file to mutate."""

    name: str  # as it is given on the command line
    head: bytes
    tail: int  # bytes of tensor data


def write_sample(path: Path) -> None:
    """A small file with a value of every kind."""
    writer = gguf.GGUFWriter(path, "bitnet-b1.58")
    writer.add_custom_alignment(32)
    writer.add_name("sample ✓")
    writer.add_uint64("block_count", 2)
    writer.add_float32("epsilon", 1e-5)
    writer.add_float64("base", 5e5)
    writer.add_bool("flag", True)
    writer.add_array("tokens", ["a", "Ġthe", "🙂", "<|end|>"])
    writer.add_array("scores", [0.5, -1.0, 2.0, 0.0])
    writer.add_array("types", [1, 1, 1, 3])
    writer.add_array("flags", [True, False])
    writer.add_tensor("norm.weight", np.ones(8, np.float32))
    writer.add_tensor("table.weight", np.ones((4, 8), np.float16))
    i2_s = cast(gguf.GGMLQuantizationType, I2_S.number)  # unknown to gguf, which writes it all the same
    writer.add_tensor("down.weight", np.zeros(I2_S.nbytes(256), np.int8), raw_shape=(2, 128), raw_dtype=i2_s)
    writer.add_tensor("q8.weight", np.zeros((2, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def load_seed(path: Path, name: str) -> Seed:
    size = path.stat().st_size
    try:
        end = min((tensor.offset for tensor in open_gguf(path).tensors.values()), default=size)
    except Error:  # a damaged file may be worth mutating, too
        end = min(size, 1 << 24)
    with open(path, "rb") as file:
        return Seed(name, file.read(end), size - end)


def mutate(seed: Seed, draw: random.Random) -> tuple[bytes, int]:
    """One to four changes of the kinds that break readers: lengths and types that lie, bytes lost, doubled or put in."""
    head, tail = bytearray(seed.head), seed.tail
    for _ in range(draw.randint(1, 4)):
        at, width = draw.randint(0, len(head)), draw.choice([1, 4, 8])
        change = draw.choice(["flip", "set", "add", "insert", "delete", "double", "cut"])
        if change == "flip":
            head[at : at + 1] = bytes(byte ^ 1 << draw.randrange(8) for byte in head[at : at + 1])
        elif change == "set":
            number = draw.choice([*EDGES, len(head), len(head) + tail, draw.getrandbits(64)])
            head[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif change == "add":
            number = int.from_bytes(head[at : at + width], "little") + draw.randint(-9, 9)
            head[at : at + width] = (number % (1 << 8 * width)).to_bytes(width, "little")
        elif change == "insert":
            head[at:at] = draw.randbytes(draw.randint(1, 16))
        elif change == "delete":
            del head[at : at + draw.randint(1, 64)]
        elif change == "double":
            head[at:at] = head[at : at + draw.randint(1, 64)]
        elif draw.random() < 0.5:
            tail = draw.randint(0, tail)
        else:
            del head[at:]
            tail = 0
    return bytes(head), tail


def read_all(file: GGUFFile) -> None:
    for value in file.metadata.values():
        if isinstance(value, StringArray):
            list(value)
        elif isinstance(value, np.ndarray):
            value.tobytes()
    for tensor in file.tensors.values():
        if tensor.data.size <= SMALL:
            tensor.data.sum()


def attempt(path: Path, head: bytes, tail: int) -> tuple[bool, str]:
    """Whether the file was read to the end, and what is wrong with the way it was not ('' if nothing)."""
    path.unlink(missing_ok=True)  # a new inode: the old one may still be mapped
    with open(path, "wb") as file:
        file.write(head)
        file.truncate(len(head) + tail)
    start = time.perf_counter()
    try:
        read_all(open_gguf(path))
        read = True
    except Error:
        read = False
    except Exception as error:  # the very thing this script looks for
        return False, f"{type(error).__name__}: {error}"
    took = time.perf_counter() - start
    return read, f"took {took:.1f} s" if took > SLOW else ""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Fuzz the GGUF reader.")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="files to mutate in turn; default: a small sample")
    parser.add_argument("--mutations", type=int, default=20_000, help="how many, over all files (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the first mutation (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long")
    options = parser.parse_args(argv)

    start, done, read, found = time.perf_counter(), 0, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder, "mutated.gguf")
        if options.files:
            seeds = [load_seed(path, str(path)) for path in options.files]
        else:
            write_sample(Path(folder, "sample.gguf"))
            seeds = [load_seed(Path(folder, "sample.gguf"), "")]
        while done < options.mutations and time.perf_counter() - start < options.seconds:
            seed, number = seeds[done % len(seeds)], options.seed + done
            was_read, wrong = attempt(scratch, *mutate(seed, random.Random(number)))
            done, read = done + 1, read + was_read
            if wrong:
                found += 1
                print(f"{wrong} <- fuzz_gguf.py --seed {number} --mutations 1 {seed.name}".rstrip())
            if done % 250 == 0 and sys.stderr.isatty():
                print(f"\r{done} of {options.mutations}, {found} findings", end="", file=sys.stderr, flush=True)
    if done >= 250 and sys.stderr.isatty():
        print(file=sys.stderr)
    print(f"{done} mutations: {read} read, {done - read - found} refused, {found} findings, {time.perf_counter() - start:.1f} s")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
