"""Masks: against their rules, in every form, and what is refused. The cache: bounded, shared, counted."""

import time
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bitnet_np import spec
from bitnet_np.base.errors import Error, MaskError
from bitnet_np.engine import masks
from bitnet_np.engine.masks import Pattern

INF = np.inf


def visible(q_len, k_len, past, pattern):
    """The rules once more: [q_len, k_len] of queries from position `past` on."""
    i, j = past + np.arange(q_len)[:, None], np.arange(k_len)
    near = (j > i - (pattern.window or 2**40)) & (j // (pattern.block or 2**40) == i // (pattern.block or 2**40))
    return ((j <= i) & (near | (j < pattern.sinks))) | (j < pattern.prefix)


def assert_is(mask, seen, dtype=np.float32):
    """An additive mask of exactly 0 and -infinity, no negative zeros."""
    assert mask.dtype == dtype
    expected = np.where(seen, 0.0, -INF).astype(dtype)
    assert mask.shape == expected.shape
    assert mask.tobytes() == expected.tobytes()


LENGTHS = st.integers(0, 9) | st.integers(0, 512)
patterns = st.builds(
    lambda window, prefix, block, sinks: Pattern(window, prefix, block, sinks if window or block else 0),
    *[st.sampled_from([0, 0, 1, 2, 3, 7, 64, 600])] * 4,
)

# --- what a mask holds ----------------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(
    pattern=patterns,
    q_len=LENGTHS,
    more=LENGTHS,
    past=st.none() | LENGTHS,
    top_left=st.booleans(),
    dtype=st.sampled_from([np.float16, np.float32, np.float64]),
)
def test_every_pattern_is_its_rule(pattern, q_len, more, past, top_left, dtype):
    if top_left:
        k_len, how, past = more + 1, {"align": "top_left"}, 0
    elif past is None:
        k_len, how, past = min(512, q_len + more), {}, min(512, q_len + more) - q_len
    else:
        k_len, how = past + q_len + more, {"past": past}
    seen = visible(q_len, k_len, past, pattern)
    assert_is(masks.mask(q_len, k_len, pattern, dtype=dtype, **how), seen, dtype)
    as_bool = masks.mask(q_len, k_len, pattern, form="bool", **how)
    assert as_bool.dtype == bool
    np.testing.assert_array_equal(as_bool, seen)
    if pattern == masks.CAUSAL and past == k_len - q_len:
        np.testing.assert_array_equal(masks.causal(q_len, k_len, form="bool"), seen)
    windowed = visible(q_len, k_len, past, Pattern(pattern.window))
    np.testing.assert_array_equal(spec.causal_mask(q_len, k_len, past, pattern.window or None), np.where(windowed, 0, -INF))


@pytest.mark.parametrize("q_len", [2, 300, 9000])
def test_masks_are_the_callers_own(q_len):
    """Small ones, those that are copied from a line, and large ones."""
    masks.mask(q_len, 100, align="top_left", form="bool")[:] = False
    made = masks.mask(q_len, 100, align="top_left", form="bool")
    np.testing.assert_array_equal(made, visible(q_len, 100, 0, masks.CAUSAL))
    assert made.flags.c_contiguous


def test_arguments_that_equal_remembered_ones_are_refused_all_the_same():
    """And one without a hash is taken."""

    class Hostile:
        def __hash__(self):
            raise RuntimeError("no hash")

    expected = masks.mask(1, 2, past=1)
    sizes = ((True, 2), (1, 2.0), (1, [2]), (1, Hostile()), (1, 2, (0, 0, 0, 0)))
    for arguments, past in (*((size, 1) for size in sizes), ((1, 2), True), ((1, 2), 1.0)):
        with pytest.raises(Error, match="expected"):
            masks.mask(*arguments, past=past)
    assert_is(masks.mask(np.array(1), np.int8(2), past=1), expected == 0)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_making_a_mask_takes_its_own_bytes_and_no_more(dtype):
    tracemalloc.start()
    try:
        mask = masks.causal(1000, 1000, dtype=dtype)
        assert mask.nbytes <= tracemalloc.get_traced_memory()[1] < 1.05 * mask.nbytes
    finally:
        tracemalloc.stop()


@settings(max_examples=60)
@given(
    pattern=patterns,
    q_len=st.integers(0, 70),
    past=st.integers(0, 30),
    more=st.integers(0, 5),
    block=st.integers(1, 80),
    form=st.sampled_from(["bool", "additive"]),
)
def test_pieces_and_parts_are_those_of_the_whole_mask(pattern, q_len, past, more, block, form):
    k_len = past + q_len + more
    whole = masks.mask(q_len, k_len, pattern, past=past, form=form)
    pieces = list(masks.rows(q_len, k_len, pattern, block=block, past=past, form=form))
    for i, piece in enumerate(pieces):
        assert piece.shape == (min(block, q_len - i * block), k_len)
        assert piece.flags.owndata
    assert b"".join(piece.tobytes() for piece in pieces) == whole.tobytes()
    larger = masks.mask(110, 110, pattern, form=form)
    view = masks.part(larger, q_len, k_len, past=past)
    assert (view.dtype, view.shape, view.tobytes()) == (whole.dtype, whole.shape, whole.tobytes())
    assert np.shares_memory(view, larger) or not view.size
    assert not view.flags.writeable
    assert larger.flags.writeable


@settings(max_examples=80)
@given(
    pattern=patterns, sizes=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), min_size=1, max_size=6), given_keys=st.booleans()
)
def test_each_sequence_of_a_ragged_batch_has_its_own_mask(pattern, sizes, given_keys):
    q_lens, past = (np.array(column) for column in zip(*sizes, strict=True))
    how = {"k_lens": q_lens + past} if given_keys else {"past_lens": past}
    both = masks.batch(q_lens, pattern=pattern, dtype=np.float64, **how)
    assert both.shape == (len(sizes), 1, q_lens.max(), (q_lens + past).max())
    np.testing.assert_array_equal(masks.batch(q_lens, pattern=pattern, form="bool", **how), both == 0)
    for one, (q_len, before) in zip(both[:, 0], sizes, strict=True):
        seen = np.zeros(one.shape, bool)
        seen[:q_len, : before + q_len] = visible(q_len, before + q_len, before, pattern)
        assert_is(np.ascontiguousarray(one), seen, np.float64)


# --- callers' masks -------------------------------------------------------------------------------------------------------------------


def test_forms_can_be_turned_into_each_other():
    additive, visible = masks.causal(3, 5), masks.causal(3, 5, form="bool")
    assert_is(masks.as_additive(visible), visible)
    assert_is(masks.as_additive(additive, np.float64), visible, np.float64)
    assert masks.as_additive(additive) is additive
    assert masks.as_bool(visible) is visible
    np.testing.assert_array_equal(masks.as_bool(additive), visible)


def test_rows_that_see_nothing_are_found():
    additive = np.where(np.array([[1, 0], [0, 0], [0, 1]]), np.float32(0), -INF)
    for mask in (additive, additive > -INF):
        np.testing.assert_array_equal(masks.fully_masked(mask), [False, True, False])
    np.testing.assert_array_equal(masks.fully_masked(masks.batch([1, 2])), [[[False, True]], [[False, False]]])


@pytest.mark.parametrize(
    "mask",
    [masks.causal(2, 3), masks.causal(2, 3, form="bool"), np.zeros((2, 3), np.float32), np.float64([[0, -2.5, -INF], [3, 1, 0]])],
    ids=str,
)
def test_good_masks_pass_as_views(mask):
    checked = masks.check(mask, 2, 3, batch=4)
    assert checked.shape == (1, 1, 2, 3)
    assert np.shares_memory(checked, mask)
    assert not checked.flags.writeable
    assert mask.flags.writeable
    np.testing.assert_array_equal(checked[0, 0], mask)
    for n in (1, 4):
        assert masks.check(np.broadcast_to(mask, (n, 1, 2, 3)), 2, 3, batch=4).shape == (n, 1, 2, 3)


def changed(index, value, dtype=np.float32):
    mask = masks.causal(2, 3, dtype=dtype)
    mask[index] = value
    return mask


@pytest.mark.parametrize(
    ("mask", "how", "message"),
    [
        (np.zeros((3, 2)), {}, r"mask has shape \(3, 2\), expected \(2, 3\) or \(4, 1, 2, 3\)"),
        (np.zeros((2, 2, 3)), {}, r"mask has shape \(2, 2, 3\)"),
        (np.zeros((2, 1, 2, 3)), {}, r"mask has shape \(2, 1, 2, 3\)"),
        (np.zeros((4, 2, 2, 3)), {}, r"mask has shape \(4, 2, 2, 3\)"),
        (np.zeros(3), {}, r"mask has shape \(3,\)"),
        ([[0, 0, 0], [0, 0]], {}, "mask is ragged, expected rows of one length"),
        (np.tril(np.ones((2, 3), np.float32), 1), {}, "mask is float32 of zeros and ones, expected 0 and -inf"),
        (np.ones((2, 3)), {}, "mask is float64 of zeros and ones"),
        (np.tril(np.ones((2, 3), np.int64), 1), {}, "mask has dtype int64, expected bool, or float32"),
        (changed((1, 2), np.nan), {}, r"mask\[0, 0, 1, 2\] is nan"),
        (changed((0, 1), INF), {}, r"mask\[0, 0, 0, 1\] is inf, expected a number, or -inf"),
        (changed((0, 2), -1e10), {}, r"mask\[0, 0, 0, 2\] is -10000000000.0, expected -inf: a finite number hides nothing"),
        (changed((0, 2), np.finfo(np.float32).min), {}, "expected -inf"),
        (changed((0, 2), np.finfo(np.float16).min, np.float16), {}, "expected -inf"),
        (masks.causal(2, 3), {"form": "bool"}, "mask has dtype float32, expected bool"),
        (masks.causal(2, 3, form="bool"), {"form": "additive"}, "mask has dtype bool, expected an additive mask"),
        (np.zeros((2, 3)), {"strict": True}, r"mask\[0, 0, 0, 2\] lets the query at position 1 see the key at position 2, which is later"),
        (masks.causal(2, 3), {"strict": True, "past": 0}, r"mask\[0, 0, 0, 1\] lets the query at position 0"),
    ],
)
def test_wrong_masks_are_refused(mask, how, message):
    with pytest.raises(MaskError, match=message):
        masks.check(mask, 2, 3, batch=4, **how)


def test_strict_takes_what_is_causal():
    for pattern in (masks.CAUSAL, Pattern(window=2), Pattern(window=2, sinks=1), Pattern(block=2)):
        masks.check(masks.mask(3, 5, pattern), 3, 5, strict=True)
    masks.check(masks.causal(2, 2), 2, 2, form="additive", strict=True)
    with pytest.raises(MaskError, match="later"):
        masks.check(masks.mask(3, 3, Pattern(prefix=2)), 3, 3, strict=True)


# --- what cannot be -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: masks.causal(2, 0), "2 queries have no keys to see"),
        (lambda: masks.causal(-1, 3), "q_len is -1, expected 0 to 2147483647"),
        (lambda: masks.causal(1, 2.0), r"k_len is 2\.0, expected an integer"),
        (lambda: masks.causal(True, 2), "q_len is True"),
        (lambda: masks.causal(1, 2**31), "k_len is 2147483648"),
        (lambda: masks.mask(2, 4, past=3), "4 keys are fewer than 3 past and 2 queries"),
        (lambda: masks.mask(2, 4, past=-1), "past is -1"),
        (lambda: masks.mask(2, 4, past=1, align="top_left"), "past is 1, but align='top_left' means 0"),
        (lambda: masks.mask(2, 4, align="left"), "align is 'left'"),
        (lambda: masks.mask(2, 4, form="float"), "form is 'float'"),
        (lambda: masks.mask(2, 4, dtype=np.int32), "dtype is int32"),
        (lambda: Pattern(window=-1), "window is -1"),
        (lambda: Pattern(sinks=2), "sinks is 2 without a window or block"),
        (lambda: masks.batch([]), "q_lens has shape"),
        (lambda: masks.batch([1.5]), "q_lens has shape"),
        (lambda: masks.batch([1, -2]), r"q_lens\[1\] is -2"),
        (lambda: masks.batch([1, 2], past_lens=[3]), "1 sequences have keys and 2 have queries"),
        (lambda: masks.batch([1, 2], k_lens=[3]), "1 sequences have keys and 2 have queries"),
        (lambda: masks.batch([1, 2], k_lens=[3, 1]), "sequence 1 has 2 queries and only 1 keys"),
        (lambda: masks.batch([1], k_lens=[1], past_lens=[0]), "one of them"),
        (lambda: masks.MaskCache(entries=0), "entries is 0"),
        (lambda: masks.mask(4, 2), r"2 keys are fewer than 0 past and 4 queries; align='top_left' if that is meant"),
        (lambda: masks.rows(2, 3, block=0), "block is 0"),  # on the call itself
        (lambda: masks.rows(3, 2), "fewer"),
        (lambda: masks.part(np.zeros((4, 4)), 2, 5), r"the larger mask has shape .*, expected \[N, N\] with N at least 5"),
        (lambda: masks.part(np.zeros((5, 6)), 2, 5), "the larger mask has shape"),
        (lambda: masks.part(np.zeros(5), 2, 5), "the larger mask has shape"),
    ],
)
def test_what_cannot_be_is_refused(make, message):
    with pytest.raises(MaskError, match=message) as caught:
        make()
    assert isinstance(caught.value, Error)


# --- the cache ------------------------------------------------------------------------------------------------------------------------


WAYS = [
    {},
    {"pattern": Pattern(window=2)},
    {"pattern": Pattern(prefix=2)},
    {"pattern": Pattern(block=2)},
    {"pattern": Pattern(window=2, sinks=1)},
    {"past": 0},
    {"form": "bool"},
    {"dtype": np.float64},
    {"dtype": np.float16},
]


def test_the_same_request_gives_the_same_array_and_everything_that_matters_is_in_the_key():
    cache = masks.MaskCache()
    kept = [cache.get(4, 6, **how) for how in WAYS]
    for how, first in zip(WAYS, kept, strict=True):
        made = masks.mask(4, 6, **how)
        assert (first.dtype, first.tobytes(), first.flags.writeable) == (made.dtype, made.tobytes(), False)
        assert cache.get(4, 6, **how) is first
    assert cache.get(4, 6, past=2) is kept[0]
    assert cache.get(4, 6, form="bool", dtype=np.float64) is kept[6]
    assert (cache.hits, cache.misses, len(cache)) == (len(WAYS) + 2, len(WAYS), len(WAYS))
    assert cache.nbytes == sum(mask.nbytes for mask in kept)


def test_the_mask_not_used_longest_goes_where_masks_or_bytes_are_too_many():
    assert vars(masks.MaskCache()).items() >= {"entries": 100, "side": 2048}.items()
    cache = masks.MaskCache(entries=3, side=9)
    assert cache.get(1, 9) is cache.get(1, 9)
    assert cache.get(1, 10) is not cache.get(1, 10)
    cache.clear()
    cache.warm([1, 2, 3, 1, 4])  # 1 was used again, so 2 is the oldest
    assert (len(cache), cache.nbytes, cache.hits) == (3, 4 * (1 + 9 + 16), 2)
    cache.warm([1, 2])
    assert cache.hits == 3
    cache = masks.MaskCache(nbytes=1000)
    cache.warm([10, 10, 12, 5])  # 400, 576, 100 bytes
    assert (len(cache), cache.nbytes) == (2, 676)
    assert cache.get(16, 16).nbytes == 1024  # larger than the whole budget: it pushes nothing out
    assert (len(cache), cache.nbytes) == (2, 676)
    cache.clear()
    assert (len(cache), cache.nbytes, cache.misses) == (0, 0, 4)


def test_threads_share_one_array(monkeypatch):
    cache, build = masks.MaskCache(), masks._build
    monkeypatch.setattr(masks, "_build", lambda plan: time.sleep(0.1) or build(plan))
    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(lambda n: cache.get(3, n), [3] * 4)
    assert all(other is first for other in others)
    assert (len(cache), cache.nbytes, cache.misses) == (1, 36, 1)
