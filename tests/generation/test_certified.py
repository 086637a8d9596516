"""The certified head gives the largest logits to the bit, whatever the table, and computes few of them."""

import mmap
import sys
from dataclasses import replace

import numpy as np
import pytest
import resident
from hypothesis import given, settings
from hypothesis import strategies as st
from models import as_table, assert_same_bits, random_model, random_tokens, seeds

from bitnet_np import BITNET_CPP, EXACT, LLAMA_CPP, Sampling, generate
from bitnet_np.base.errors import NonFiniteError, OptionError, UnsupportedError
from bitnet_np.generation.certified import LARGEST_K, MOST_COLUMNS, certify
from bitnet_np.generation.prompts import certified_for
from bitnet_np.kernels import cpu


def adversarial(rng, rows, width, kind):
    """Tables whose largest logits are hard to tell apart, or whose copies lose much."""
    table = rng.standard_normal((rows, width))
    if kind == "twins":  # every row some ulps from another
        table[rows // 2 :] = table[: rows - rows // 2] * (1 + 2.0**-23 * rng.integers(-2, 3, (rows - rows // 2, width)))
    elif kind == "ties":
        table = table[rng.integers(0, max(1, rows // 4), rows)]
    elif kind == "outliers":  # one weight takes all the steps of its row
        table[np.arange(rows), rng.integers(0, width, rows)] = rng.choice([-1, 1], rows) * 200.0
    elif kind == "scales":
        table *= np.exp2(rng.integers(-13, 14, (rows, 1)))
    elif kind == "sparse":
        table[rng.random((rows, width)) < 0.9] = 0
        table[rng.integers(0, rows)] = 0
    elif kind == "cancelling":  # large terms of opposite signs
        half = width // 2
        table[:, half : 2 * half] = -table[:, :half] * (1 + 2.0**-10 * rng.standard_normal((rows, half)))
    elif kind == "tiny":
        table *= 2.0**-24
    return table


KINDS = ["normal", "twins", "ties", "outliers", "scales", "sparse", "cancelling", "tiny"]


@given(
    seed=seeds,
    rows=st.integers(1, 70),
    width=st.integers(1, 70) | st.sampled_from([128, 255]),
    count=st.integers(1, 6),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    x_scale=st.sampled_from([1.0, 0.0, 2.0**-30, 2.0**20]),
    data=st.data(),
)
def test_the_largest_logits_are_there_to_the_bit(seed, rows, width, count, kind, dtype, x_scale, data):
    rng = np.random.default_rng(seed)
    table = as_table(adversarial(rng, rows, width, kind), dtype)
    x = (rng.standard_normal((count, width)) * x_scale).astype(np.float32)
    if kind == "cancelling":
        x[:, width // 2 : width // 2 * 2] = x[:, : width // 2]
    k = data.draw(st.integers(1, min(rows, LARGEST_K)))
    head = certify(table, k)
    exact = cpu.matmul(x, table)
    low, high = head._intervals(x)
    assert (low <= exact).all()
    assert (exact <= high).all()

    logits = head(x)
    assert head.counter.fallbacks == 0
    for out, expected in zip(logits, exact, strict=True):
        wanted = expected >= np.sort(expected)[-k]
        assert_same_bits(out[wanted], expected[wanted])
        known = np.isfinite(out)
        assert_same_bits(out[known], expected[known])
        assert np.isneginf(out[~known]).all()
        assert out.argmax() == expected.argmax()


def test_few_logits_are_computed():
    rng = np.random.default_rng(0)
    table = as_table(rng.standard_normal((20_000, 256)), "float16")
    head = certify(table, 1)
    x = rng.standard_normal((8, 256)).astype(np.float32)
    assert (head(x).argmax(axis=1) == cpu.matmul(x, table).argmax(axis=1)).all()
    assert head.counter.calls == 8
    assert 8 <= head.counter.rescored < 8 * 100


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e30])
def test_where_nothing_can_be_proven_all_are_computed(bad):
    rng = np.random.default_rng(1)
    table, x = as_table(rng.standard_normal((40, 20)) * 1e10, "float32"), rng.standard_normal((2, 20)).astype(np.float32)
    x[1, 3] = bad
    head = certify(table, 2)
    assert_same_bits(head(x), cpu.matmul(x, table))
    assert (head.counter.fallbacks, head.counter.rescored) == (2, 0)


@pytest.mark.parametrize("width", [140_000, MOST_COLUMNS])
def test_sums_beyond_32_bits_are_right(width):
    """Codes are stored 128 higher: their products with x reach further than those of the codes themselves."""
    table = np.outer([0.5, 1, 0.9], np.ones(width)).astype(np.float32)
    x = np.ones((1, width), np.float32)
    logits = certify(table)(x)
    assert_same_bits(logits.max(axis=1), cpu.matmul(x, table).max(axis=1))
    assert logits.argmax() == 1


def test_wider_tables_are_refused(monkeypatch):
    monkeypatch.setattr(sys.modules[certified_for.__module__], "_PAYS_FROM", (0, 48))
    table = np.ones((2, MOST_COLUMNS + 1), np.float32)
    with pytest.raises(UnsupportedError, match=f"rows of {MOST_COLUMNS + 1} numbers, expected at most {MOST_COLUMNS}"):
        certify(table)
    model = replace(random_model(0), output=table)
    assert certified_for(model, Sampling(), 1000) is None
    with pytest.raises(OptionError, match=f"no certified head: the output has rows of {MOST_COLUMNS + 1} numbers"):
        certified_for(model, Sampling(), 1000, "certified")


@pytest.mark.parametrize("k", [0, -1, 6, LARGEST_K + 1])
def test_k_is_checked(k):
    with pytest.raises(OptionError, match=f"k is {k}, expected 1 to 5"):
        certify(np.ones((5, 4), np.float32), k)


@pytest.mark.parametrize("table", [np.ones((5, 4)), np.ones((5, 4), np.int8), None])
def test_only_float_tables(table):
    with pytest.raises(UnsupportedError, match="needs a float32, float16 or bfloat16 table"):
        certify(table)


# --- in generation --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dialect", [EXACT, BITNET_CPP, LLAMA_CPP], ids=lambda dialect: dialect.name)
@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, top_k=5), Sampling(1.3, top_k=7, top_p=0.6)])
@given(seed=seeds)
@settings(max_examples=6)
def test_the_same_tokens_come_with_and_without(dialect, sampling, seed):
    model = random_model(seed % 50, table="float16")
    prompt = random_tokens(np.random.default_rng(seed), model, 1, 5)[0].tolist()
    options = {"sampling": sampling, "seed": seed, "dialect": dialect}
    head = certify(model.head, 7)
    expected = generate(model, prompt, 12, head="exact", **options)
    assert generate(model, prompt, 12, head="certified", **options) == expected
    assert generate(model, prompt, 12, head=head, **options) == expected
    assert head.counter.calls == 12


def test_auto_certifies_only_what_pays(monkeypatch):
    model = random_model(1, table="float16")
    assert certified_for(model, Sampling(), 1000) is None
    monkeypatch.setattr(sys.modules[certified_for.__module__], "_PAYS_FROM", (0, 48))  # bitnet_np.generation.generate is the function
    assert certified_for(model, Sampling(), 47) is None
    assert certified_for(model, Sampling(), 48).k == 1
    assert certified_for(model, Sampling(1, top_k=9), 48).k == 9
    assert certified_for(model, Sampling(1), 48) is None
    assert certified_for(model, Sampling(1, top_k=LARGEST_K + 1), 48) is None
    assert certified_for(model, Sampling(), 48, "exact") is None


def test_a_head_that_does_not_fit_is_refused():
    model, other = random_model(1, table="float16"), random_model(1, table="float16")
    with pytest.raises(OptionError, match="sampling needs all logits, not just the 256 largest"):
        certified_for(model, Sampling(1), 5, "certified")
    with pytest.raises(OptionError, match="the head given is another model's"):
        certified_for(model, Sampling(), 5, certify(other.head))
    with pytest.raises(OptionError, match="sampling needs the 3 largest logits, the head gives 2"):
        certified_for(model, Sampling(1, top_k=3), 5, certify(model.head, 2))


def test_a_model_that_overflows_says_where():
    model = random_model(1, table="float32")
    model = replace(model, output_norm=np.full_like(model.output_norm, 3e38))
    with pytest.raises(NonFiniteError, match="sequence 0, position 2"):
        generate(model, [1, 2, 3], 4, head="certified")


@pytest.mark.skipif(not resident.SMAPS.exists(), reason="Linux tells what is resident")
def test_a_mapped_table_gives_its_pages_back_as_it_is_copied(tmp_path):
    """All but the ends of each part, which share a page with the next one's. Its values stay."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal((10_000, 200)).astype(np.float16)
    path = tmp_path / "table"
    path.write_bytes(b"header" + values.tobytes())
    with path.open("rb") as file:
        table = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)[6:].view(np.float16).reshape(values.shape)
    assert np.isfinite(table).all()
    assert resident.of_file(path) >= values.nbytes
    head = certify(table)
    assert resident.of_file(path) <= 6 * mmap.PAGESIZE
    x = rng.standard_normal((1, 200)).astype(np.float32)
    assert head(x).argmax() == cpu.matmul(x, values).argmax()
    assert (table == values).all()
