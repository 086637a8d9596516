"""Whatever was done to a KV cache, what follows has the bits of the tokens that each slot should hold, or the cache says what it forgot."""

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from models import assert_same_bits, random_model, random_tokens

from bitnet_np.base.errors import CapacityError, SlotError
from bitnet_np.engine.cache import KVCache
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.engine.forward_pass import forward, forward_full

SMALL = {"width": 20, "ffn": 36, "heads": 2, "kv_heads": 1, "head_dim": 6, "vocab": 30, "context": 1000}
slots = st.integers(0, 2)
counts = st.integers(1, 5) | st.sampled_from([63, 64, 65, 150, 250])
shorter = st.integers(0, 3) | st.integers(0, 300) | st.sampled_from(["kept", "lost"])


class Caches(RuleBasedStateMachine):
    """A cache of two slots or three. `held` are the tokens of each; `forgotten` positions of a ring were written over."""

    @initialize(
        window=st.sampled_from([None, 1, 3, 64, 65, 100]),
        ring=st.booleans(),
        seed=st.integers(0, 9),
        dtype=st.sampled_from([np.float32, np.float16]),
        dialect=st.sampled_from(list(DIALECTS.values())),
        first=st.sampled_from([5, 250, 400]),
    )
    def start(self, window, ring, seed, dtype, dialect, first):
        self.model, self.rng, self.dialect = random_model(seed, **SMALL, window=window), np.random.default_rng(seed), dialect
        self.narrow = dialect if dtype == np.float32 else dialect.with_cache("float16")
        self.cache = KVCache(self.model.config, 2, 600, dtype, ring=ring and window is not None)
        self.held, self.forgotten = [[], []], [0, 0]
        self.run(0, first)

    def lost(self, slot, length):
        """Whether a slot cannot go on from so many positions, because the window of the next has been written over."""
        window = self.cache.window
        return bool(length) and window is not None and max(0, length - window + 1) < self.forgotten[slot]

    def cut(self, slot, length):
        del self.held[slot][length:]
        self.forgotten[slot] = min(self.forgotten[slot], length)

    @rule(slot=slots, count=counts)
    def run(self, slot, count):
        slot %= self.cache.batch
        held = self.held[slot]
        if len(held) + count > self.cache.capacity:
            return
        tokens = random_tokens(self.rng, self.model, count)
        logits = forward(self.model, tokens[None], self.cache, slots=[slot], dialect=self.dialect)[0]
        before = len(held)
        held.extend(tokens)
        assert_same_bits(logits, forward_full(self.model, [held], dialect=self.narrow)[0, before:])
        self.forgotten[slot] = max(self.forgotten[slot], len(held) - self.cache.k.shape[2])

    @rule(slot=slots, count=counts)
    def interrupt(self, slot, count):
        """A pass that fails after its last layer has written over old positions of a ring, which earlier tokens still see."""
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
        """A length of a slot that is so much less, or from which a ring just has, or just lacks, what the next token sees."""
        least = self.forgotten[slot] + (self.cache.window or 1) - 1
        length = {"kept": least, "lost": least - 1}[less] if isinstance(less, str) else len(self.held[slot]) - less
        return min(max(length, 0), len(self.held[slot]))

    @rule(slot=slots, less=shorter, rollback=st.booleans())
    def back(self, slot, less, rollback):
        slot %= self.cache.batch
        length = self.length(slot, less)
        change, number = (self.cache.rollback, len(self.held[slot]) - length) if rollback else (self.cache.truncate, length)
        self.attempt(self.lost(slot, length), lambda: change(slot, number), lambda: self.cut(slot, length))

    @rule(slot=slots, every=st.sampled_from([False, False, True]))
    def clear(self, slot, every):
        slot %= self.cache.batch
        self.cache.clear(*[] if every else [slot])
        for i in range(self.cache.batch) if every else [slot]:
            self.cut(i, 0)

    @rule(source=slots, less=shorter)
    def fork(self, source, less):
        source %= self.cache.batch
        held, length = self.held[source], self.length(source, less)
        targets = [i for i, other in enumerate(self.held) if i != source and not other]

        def copied():
            for i in targets:
                self.held[i], self.forgotten[i] = held[:length], min(self.forgotten[source], length)

        self.attempt(self.lost(source, length), lambda: self.cache.fork(source, targets, *[] if length == len(held) else [length]), copied)

    @rule(batch=st.integers(2, 3) | st.just(1), capacity=st.integers(500, 900) | shorter, force=st.booleans())
    def resize(self, batch, capacity, force):
        capacity = capacity if isinstance(capacity, int) and capacity > 0 else self.length(0, capacity) or 500
        too_long = any(len(held) > capacity for held in self.held[:batch])
        lost = any(len(held) > capacity and self.lost(i, capacity) for i, held in enumerate(self.held[:batch]))

        def resized():
            for i in range(min(batch, len(self.held))):
                self.cut(i, capacity)
            self.held = self.held[:batch] + [[] for _ in range(batch - len(self.held))]
            self.forgotten = self.forgotten[:batch] + [0] * (batch - len(self.forgotten))

        refused = lost if force else too_long or any(self.held[batch:])
        self.attempt(refused, lambda: self.cache.resize(batch, capacity, force=force), resized)

    def attempt(self, refused, change, meant):
        """Change the cache, and what it should hold; or see that it is refused and changes no byte."""
        if refused:
            before = self.cache.k.tobytes(), self.cache.v.tobytes()
            with pytest.raises((CapacityError, SlotError)):
                change()
            assert (self.cache.k.tobytes(), self.cache.v.tobytes()) == before
        else:
            change()
            meant()

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
