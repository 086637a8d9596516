"""Sliding windows: layers that see the last tokens only, and a KV cache that holds no more than those."""

import bounds
import numpy as np
import pytest
from bounds import assert_within
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from models import assert_same_bits, padded, random_model, random_tokens, seeds, shapes

from bitnet_np import KVCache, forward, forward_full
from bitnet_np.dialects import BITNET_CPP, DIALECTS, EXACT
from bitnet_np.errors import CapacityError, Error, OptionError, ShapeError
from bitnet_np.kernels.scalar import CHUNK

SMALL = {"width": 20, "ffn": 36, "heads": 2, "kv_heads": 1, "head_dim": 6, "vocab": 30, "context": 2000}
WINDOWS = [1, 2, 5, 63, 64, 65, 66, 128, 129]


def windowed(window, seed=0, **shape):
    return random_model(seed, **SMALL | shape, window=window)


# --- the rule -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, (0,), (1,), ()])
@pytest.mark.parametrize("window", [1, 3, 9, 12])
def test_layers_see_what_the_definition_says(window, layers):
    """Attention of each layer, from the layer's own queries, keys and values."""
    model, seen = windowed(window, family="llama", window_layers=layers), {}
    tokens = random_tokens(np.random.default_rng(0), model, 12)
    forward_full(model, [tokens], record=lambda name, layer, array: seen.update({(name, layer): array.copy()}))
    for layer in range(model.config.n_layers):
        q, k, v, out = (seen[name, layer].reshape(12, -1, 6) for name in ("Qcur_rope", "Kcur_rope", "Vcur", "kqv_out"))
        sees = window if layers is None or layer in layers else None
        assert_within(out, *bounds.attend(q, k[None], v[None], np.zeros(12, int), np.arange(12), sees))
    everything = forward_full(random_model(0, **SMALL, family="llama"), [tokens])[0]
    assert_same_bits(forward_full(model, [tokens])[0, :window], everything[:window])
    if layers != () and window < 12:
        assert (forward_full(model, [tokens])[0, window:] != everything[window:]).any(axis=1).all()


def test_a_window_reaches_as_far_back_as_the_layers_carry_it():
    """Two layers of 3: position t depends on t - 4 and on, not on t - 5. One layer of 3 below one that sees all: on everything."""
    tokens = np.array([[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]])
    changed = tokens.copy()
    changed[0, 4] = 20
    for layers, reach in ((None, 4), ((0,), 99)):
        model = windowed(3, window_layers=layers)
        differ = (forward_full(model, tokens) != forward_full(model, changed)).any(axis=-1)[0]
        assert differ.tolist() == [4 <= t <= 4 + reach for t in range(11)]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window": 0}, "window is 0, expected 1 to 1048576"),
        ({"window": 3, "window_layers": (0, 2)}, r"window_layers are \(0, 2\), expected numbers of 2 layers"),
    ],
)
def test_a_window_that_cannot_be(change, message):
    with pytest.raises(ShapeError, match=message):
        random_model(0, **SMALL, **change)


# --- the ring -------------------------------------------------------------------------------------------------------------------------


def ring(model, batch=1, capacity=2000, dtype=np.float32):
    return KVCache(model.config, batch, capacity, dtype, ring=True)


@settings(max_examples=60)
@given(data=st.data(), shape=shapes(), seed=seeds, window=st.sampled_from(WINDOWS), dialect=st.sampled_from(sorted(DIALECTS)))
def test_a_ring_gives_the_same_bits_in_any_chunks(data, shape, seed, window, dialect):
    """Ragged, prefill longer than the window and the ring, chunks that begin and end around its places."""
    model = random_model(seed, **shape | {"window": window, "window_layers": None, "context": 500})
    rng, how = np.random.default_rng(seed), {"dialect": DIALECTS[dialect]}
    cache, sequences = ring(model, 2, 500), [random_tokens(rng, model, n) for n in data.draw(st.tuples(*[st.integers(1, 300)] * 2))]
    expected = [forward_full(model, [tokens], **how)[0] for tokens in sequences]
    done = np.zeros(2, np.int64)
    steps = st.sampled_from([1, 2, 63, 64, 65, 129, cache.k.shape[2] - 1, cache.k.shape[2], cache.k.shape[2] + 1, 300])
    while (left := [len(tokens) - n for tokens, n in zip(sequences, done, strict=True)]) != [0, 0]:
        slots = np.flatnonzero(left)
        counts = [min(left[i], data.draw(steps)) for i in slots]
        tokens, lengths = padded(rng, [sequences[i][done[i] : done[i] + n] for i, n in zip(slots, counts, strict=True)])
        out = forward(model, tokens, cache, lengths, slots=slots, **how)
        for i, n, logits in zip(slots, counts, out, strict=True):
            assert_same_bits(logits[:n], expected[i][done[i] : done[i] + n])
            done[i] += n


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_float16_rings_give_the_bits_of_float16_caches(dtype):
    model = windowed(70)
    tokens = random_tokens(np.random.default_rng(0), model, 1, 400)
    cache, straight = ring(model, dtype=dtype), KVCache(model.config, 1, 400, dtype)
    for dialect in (EXACT, BITNET_CPP):
        for start, end in ((0, 300), (300, 301), (301, 400)):
            both = [forward(model, tokens[:, start:end], kept, dialect=dialect) for kept in (cache, straight)]
            assert_same_bits(*both)
        cache.clear()
        straight.clear()
    assert not cache.k.any()


@pytest.mark.parametrize("window", WINDOWS)
def test_a_ring_is_as_small_as_it_says(window):
    model = windowed(window)
    places = ring(model).k.shape[2]
    assert places % CHUNK == 0
    assert window <= places < window + 2 * CHUNK
    assert ring(model).nbytes == 2 * 4 * model.config.n_layers * places * model.config.kv_width
    assert ring(model, capacity=10).k.shape[2] == 10


@pytest.mark.parametrize("change", [{"window": None}, {"window": 4, "window_layers": (0,)}])
def test_a_ring_needs_a_window_in_every_layer(change):
    with pytest.raises(OptionError, match="a ring is for a model with a window in every layer"):
        ring(random_model(0, **SMALL, **change))


def test_an_error_leaves_a_ring_as_it_was():
    """Also where new positions have been written over old ones that earlier tokens still see."""
    model = windowed(65)
    tokens = random_tokens(np.random.default_rng(0), model, 1, 700)
    expected = forward_full(model, tokens)[0]
    cache = ring(model)

    def stop(name, layer, array):
        if (name, layer) == ("l_out", 1):
            raise KeyboardInterrupt

    done = 0
    for count in (50, 1, 100, 1, 300, 1, 1, 246):
        before = cache.k.tobytes(), cache.v.tobytes(), cache.lengths.tobytes()
        with pytest.raises(KeyboardInterrupt):
            forward(model, tokens[:, done : done + count], cache, record=stop)
        assert (cache.k.tobytes(), cache.v.tobytes(), cache.lengths.tobytes()) == before
        assert_same_bits(forward(model, tokens[:, done : done + count], cache)[0], expected[done : done + count])
        done += count


class Rings(RuleBasedStateMachine):
    """A ring after any calls is worth as much as a cache that holds everything, or says what it has forgotten."""

    @initialize(window=st.sampled_from([1, 3, 64, 65, 100]), seed=st.integers(0, 9))
    def start(self, window, seed):
        self.model = windowed(window, seed, n_layers=1)
        self.rng = np.random.default_rng(seed)
        self.ring, self.full = ring(self.model, 2, 600), KVCache(self.model.config, 2, 600)
        self.forgotten = [0, 0]  # positions that were written over

    def both(self, call):
        """The same from both, be it an error."""
        call(self.full)
        call(self.ring)
        for slot in (0, 1):
            length = int(self.ring.lengths[slot])
            self.forgotten[slot] = min(length, max(self.forgotten[slot], length - self.ring.k.shape[2]))

    @rule(slot=st.integers(0, 1), count=st.integers(1, 5) | st.integers(1, 250))
    def run(self, slot, count):
        if self.full.lengths[slot] + count <= self.full.capacity:
            tokens = random_tokens(self.rng, self.model, 1, count)
            results = []
            self.both(lambda cache: results.append(forward(self.model, tokens, cache, slots=[slot])))
            assert_same_bits(*results)

    @rule(slot=st.integers(0, 1), count=st.integers(0, 3) | st.integers(0, 300))
    def back(self, slot, count):
        length = int(self.ring.lengths[slot]) - count
        if length < 0:
            return
        window = self.model.config.window
        if length and max(0, length - window + 1) < self.forgotten[slot]:
            with pytest.raises(CapacityError, match=f"slot {slot} has forgotten the positions before"):
                self.ring.rollback(slot, count)
        else:
            self.both(lambda cache: cache.rollback(slot, count))

    @precondition(lambda self: self.ring.lengths[0] and not self.ring.lengths[1])
    @rule(less=st.integers(0, 80))
    def fork(self, less):
        length = max(1, int(self.ring.lengths[0]) - less)
        try:
            self.ring.fork(0, [1], length)
        except CapacityError:
            assert max(0, length - self.model.config.window + 1) < self.forgotten[0]
            return
        self.full.fork(0, [1], length)
        self.forgotten[1] = min(self.forgotten[0], length)

    @rule(slot=st.integers(0, 1))
    def clear(self, slot):
        self.both(lambda cache: cache.clear(slot))

    @rule(capacity=st.integers(600, 900), slots=st.integers(2, 3))
    def grow(self, capacity, slots):
        self.both(lambda cache: cache.resize(max(slots, cache.batch), max(capacity, cache.capacity)))

    @invariant()
    def same_lengths(self):
        if hasattr(self, "ring"):
            np.testing.assert_array_equal(self.ring.lengths, self.full.lengths)
            assert self.ring.capacity == self.full.capacity


@pytest.mark.parametrize("length", [0, 1, 280, 300])
def test_a_part_of_a_ring_is_forked_as_if_the_rest_had_never_been(length):
    """Nothing past its end, whatever the source has in those places, and nothing forgotten that it never held."""
    model = windowed(8)
    cache = ring(model, 2, 400)
    tokens = np.arange(300) % model.config.vocab
    forward(model, tokens[None], cache, slots=[0], last_only=True)
    if length == 1:
        with pytest.raises(CapacityError, match="has forgotten"):
            cache.fork(0, [1], length)
        return
    cache.fork(0, [1], length)
    cache.truncate(0, length)
    np.testing.assert_array_equal(cache.k[:, 1], cache.k[:, 0])
    np.testing.assert_array_equal(cache.v[:, 1], cache.v[:, 0])
    for _ in range(2):
        forward(model, [[7, 8, 9]] * 2, cache, last_only=True)
        cache.rollback(1, 3)
        cache.rollback(0, 3)


TestRings = Rings.TestCase
TestRings.settings = settings(max_examples=30, stateful_step_count=15, deadline=None)


def test_a_ring_is_cut_by_force_as_far_as_it_remembers():
    model = windowed(64)
    cache = ring(model, 1, 400)
    tokens = random_tokens(np.random.default_rng(0), model, 1, 400)
    forward(model, tokens[:, :300], cache)
    with pytest.raises(CapacityError, match="slot 0 has forgotten the positions before 172, and after 200 a window of 64 needs them"):
        cache.resize(capacity=200, force=True)
    assert (cache.capacity, cache.lengths.tolist()) == (400, [300])
    cache.resize(capacity=240, force=True)
    assert (cache.capacity, cache.lengths.tolist()) == (240, [240])
    with pytest.raises(Error, match="holds 240 of 240 positions"):
        forward(model, tokens[:, 240:241], cache)
    cache.resize(capacity=400)
    assert_same_bits(forward(model, tokens[:, 240:], cache), forward_full(model, tokens)[:, 240:])
