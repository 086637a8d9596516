"""The fresh process of memory.py: `resident.py MODEL TOKENS SEED THREADS` prints by how many bytes each call makes it grow, as JSON."""

import json
import sys

import numba
from benchmarks import memory

from bitnet_np import load


def main() -> None:
    path, *numbers = sys.argv[1:]
    n, seed, threads = map(int, numbers)
    numba.set_num_threads(threads)
    model = load(path)
    for call in memory.calls(model, n, seed).values():  # loads the kernels, and touches the weights and the embeddings
        call()
    print(json.dumps({name: memory.resident_growth(call) for name, call in memory.calls(model, n, seed).items()}))


if __name__ == "__main__":
    main()
