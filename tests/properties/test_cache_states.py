"""Whatever was done to a KV cache, what follows has the bits of the tokens that each slot should hold."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from models import assert_same_bits, random_model, random_tokens

from bitnet_np.base.errors import CapacityError, SlotError
from bitnet_np.engine import repeats
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.engine.forward_pass import forward, forward_full

SMALL = {"width": 20, "ffn": 36, "heads": 2, "kv_heads": 1, "head_dim": 6, "vocab": 30, "context": 1000}
slots = st.integers(0, 2)
counts = st.integers(1, 5) | st.sampled_from([63, 64, 65, 150, 250]) | st.integers(6, 250)
shorter = st.integers(0, 3) | st.integers(0, 300)


class Caches(RuleBasedStateMachine):
    """A cache of two slots or three. `held` are the tokens of each."""

    @initialize(
        window=st.sampled_from([None, 1, 3, 64, 65, 100]),
        seed=st.integers(0, 9),
        dtype=st.sampled_from([np.float32, np.float16]),
        dialect=st.sampled_from(list(DIALECTS.values())),
        first=st.sampled_from([5, 250, 400]),
    )
    def start(self, window, seed, dtype, dialect, first):
        self.model, self.rng, self.dialect = random_model(seed, **SMALL, window=window), np.random.default_rng(seed), dialect
        self.narrow = dialect if dtype == np.float32 else dialect.with_cache("float16")
        self.cache = KVCache(self.model.config, 2, 600, dtype)
        self.held = [[], []]
        self.run(0, first)

    @rule(slot=slots, count=counts)
    def run(self, slot, count):
        self.go_on(slot, [count])

    @rule(slot=slots, count=st.integers(2, 12))
    def decode(self, slot, count):
        """One token after another, by passes that are recorded and run again."""
        with mock.patch.object(repeats, "PATIENCE", 0):
            self.go_on(slot, [1] * count)

    def go_on(self, slot, counts):
        slot %= self.cache.batch
        held = self.held[slot]
        before = len(held)
        if before + sum(counts) > self.cache.capacity:
            return
        logits = []
        for count in counts:
            tokens = random_tokens(self.rng, self.model, count)
            logits.append(forward(self.model, tokens[None], self.cache, slots=[slot], dialect=self.dialect)[0])
            held.extend(tokens)
        assert_same_bits(np.concatenate(logits), forward_full(self.model, [held], dialect=self.narrow)[0, before:])

    @rule(slot=slots, count=counts)
    def interrupt(self, slot, count):
        """A pass that fails after its last layer has written."""
        slot %= self.cache.batch
        if len(self.held[slot]) + count > self.cache.capacity:
            return

        def stop(name, layer, array):
            if name == "result_norm":
                raise KeyboardInterrupt

        before = self.cache.k.tobytes(), self.cache.v.tobytes()
        with pytest.raises(KeyboardInterrupt):
            forward(self.model, [[1] * count], self.cache, slots=[slot], dialect=self.dialect, record=stop)
        assert (self.cache.k.tobytes(), self.cache.v.tobytes()) == before

    def length(self, slot, less):
        return max(len(self.held[slot]) - less, 0)

    @rule(slot=slots, less=shorter, rollback=st.booleans())
    def back(self, slot, less, rollback):
        slot %= self.cache.batch
        length = self.length(slot, less)
        change, number = (self.cache.rollback, len(self.held[slot]) - length) if rollback else (self.cache.truncate, length)
        change(slot, number)
        del self.held[slot][length:]

    @rule(slot=slots, every=st.sampled_from([False, False, True]))
    def clear(self, slot, every):
        slot %= self.cache.batch
        self.cache.clear(*[] if every else [slot])
        for i in range(self.cache.batch) if every else [slot]:
            self.held[i].clear()

    @rule(source=slots, less=shorter)
    def fork(self, source, less):
        source %= self.cache.batch
        held, length = self.held[source], self.length(source, less)
        targets = [i for i, other in enumerate(self.held) if i != source and not other]
        self.cache.fork(source, targets, *[] if length == len(held) else [length])
        for i in targets:
            self.held[i] = held[:length]

    @rule(batch=st.integers(2, 3) | st.just(1), capacity=st.integers(500, 900) | shorter, force=st.booleans())
    def resize(self, batch, capacity, force):
        capacity = capacity or 500
        if not force and (any(len(held) > capacity for held in self.held[:batch]) or any(self.held[batch:])):
            before = self.cache.k.tobytes(), self.cache.v.tobytes()
            with pytest.raises((CapacityError, SlotError)):
                self.cache.resize(batch, capacity)
            assert (self.cache.k.tobytes(), self.cache.v.tobytes()) == before
            return
        self.cache.resize(batch, capacity, force=force)
        self.held = [held[:capacity] for held in self.held[:batch]] + [[] for _ in range(batch - len(self.held))]

    @invariant()
    def holds_so_much_and_zeros(self):
        if hasattr(self, "cache"):
            lengths = [len(held) for held in self.held]
            assert self.cache.lengths.tolist() == lengths
            for slot, length in enumerate(lengths):
                assert not self.cache.k[:, slot, length:].any()
                assert not self.cache.v[:, slot, length:].any()


TestCaches = Caches.TestCase
TestCaches.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
