"""A soak: KV caches are used on the main thread, which Ctrl-C interrupts at any step, while another thread decodes into the same cache.

    python tests/support/interrupted.py 100000

SIGALRM stands for Ctrl-C: up to three come in or shortly behind a call. After each call all that it could have torn is looked at. Prints
the number of interrupts and the faults by name.
"""

import faulthandler
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter

import numpy as np

import bitnet_np as bn
from bitnet_np.base.errors import SlotError
from bitnet_np.kernels import launching, workspace
from bitnet_np.testing import random_model

TOKENS = [1 + i % 7 for i in range(40)]
PATIENCE = 60  # seconds without a token of the other thread's
MODEL = random_model(3, width=64, ffn=128, heads=4, kv_heads=2, head_dim=32, n_layers=2)


def decode(cache, slot, tokens):
    return bn.forward(MODEL, [tokens], cache, slots=[slot])[0]


class Soak:
    """Slot 0 is the main thread's, 1 the other's, and 2 a copy of slot 0."""

    def __init__(self, seed=1):
        self.random = random.Random(seed)
        self.right, self.cache = (bn.KVCache(MODEL.config, slots, 2 * len(TOKENS)) for slots in (1, 3))
        self.logits = np.concatenate([decode(self.right, 0, [token]) for token in TOKENS])
        self.faults, self.swallowed, self.raised, self.left = Counter(), [], 0, 0
        self.beats, self.ended = 0, threading.Event()
        self.errors, self.pool = np.geterr(), workspace.pool()
        self.seconds = {}

    def interrupt(self, *_):
        if self.left > 0:
            self.left -= 1
            self.raised += 1
            raise KeyboardInterrupt

    def work(self):
        """The other thread's."""
        while not self.ended.is_set():
            self.cache.clear(1)
            for token, right in zip(TOKENS, self.logits, strict=True):
                self.faults["the other thread's bits"] += decode(self.cache, 1, [token])[0].tobytes() != right.tobytes()
                self.beats += 1

    def step(self):
        """A call, by name, and the lengths of slot 0 that it may leave."""
        n = int(self.cache.lengths[0])
        if n + 5 > len(TOKENS):
            return "truncate", lambda: self.cache.truncate(0, n // 2), {n, n // 2}
        name = self.random.choice(["forward"] * 6 + ["prefill", "rollback", "fork"])
        if name == "forward":
            return name, lambda: decode(self.cache, 0, [TOKENS[n]]), {n, n + 1}
        if name == "prefill":
            return name, lambda: bn.prefill(MODEL, [TOKENS[n : n + 5]], self.cache, slots=[0], block=2), {n, n + 5}
        if name == "rollback":
            return name, lambda: self.cache.rollback(0, n // 4), {n, n - n // 4}
        return name, lambda: self.cache.fork(0, [2]), {n}

    def round(self):
        self.cache.clear(2)
        name, call, lengths = self.step()
        usual, out, begin = self.seconds.get(name, 1e-3), None, time.perf_counter()
        self.left = self.random.choice((1, 1, 2, 3))
        try:
            signal.setitimer(signal.ITIMER_REAL, self.random.uniform(1e-6, usual), self.random.uniform(1e-5, 1e-4))
            out = call()
            self.left = 0
        except KeyboardInterrupt:
            self.left = 0
        except SlotError:
            self.faults["a slot stays taken"] += 1
        signal.setitimer(signal.ITIMER_REAL, 0)
        if out is not None:
            self.seconds[name] = 0.9 * usual + 0.1 * (time.perf_counter() - begin)
            self.faults["bits"] += out[-1].tobytes() != self.logits[int(self.cache.lengths[0]) - 1].tobytes()
        self.look(lengths)

    def look(self, lengths):
        n, copied = (int(self.cache.lengths[slot]) for slot in (0, 2))
        self.faults["another length"] += n not in lengths or copied not in (0, n)
        for array, right in ((self.cache.k, self.right.k), (self.cache.v, self.right.v)):
            for slot, length in ((0, n), (2, copied)):
                self.faults["keys below the length"] += array[:, slot, :length].tobytes() != right[:, 0, :length].tobytes()
                self.faults["keys past the length"] += bool(array[:, slot, length:].any())
        self.faults["swallowed"] += len(self.swallowed)
        self.swallowed.clear()
        self.faults["NumPy's error state"] += np.geterr() != self.errors
        self.faults["memory or launches of a recording"] += workspace.pool() is not self.pool or launching._this_thread.observer is not None

    def run(self, interrupts):
        signal.signal(signal.SIGALRM, self.interrupt)
        sys.unraisablehook = self.swallowed.append
        sys.setswitchinterval(1e-4)
        other = threading.Thread(target=self.work, daemon=True)
        other.start()
        last, seen = time.monotonic(), 0
        while self.raised < interrupts:
            self.round()
            if self.beats != seen:
                last, seen = time.monotonic(), self.beats
            elif time.monotonic() - last > PATIENCE:
                faulthandler.dump_traceback(all_threads=True)
                self.faults["the other thread hangs"] += 1
                break
        self.ended.set()
        other.join(PATIENCE)


def main(interrupts):
    soak = Soak()
    soak.run(interrupts)
    faults = {name: count for name, count in soak.faults.items() if count}
    print(json.dumps({"interrupts": soak.raised, "tokens of the other thread": soak.beats, "faults": faults}), flush=True)
    os._exit(0)  # whatever hangs


if __name__ == "__main__":
    main(int(sys.argv[1]))
