"""Limits measured on a model: honest engines pass on shallow and deep ones, mistakes that change less than roundings are found."""

import dataclasses

import numpy as np
import pytest
from spec_faults import SMALL_FAULTS, definition, model, ours, tokens

from bitnet_np import BITNET_CPP, EXACT, LLAMA_CPP, Dialect, forward_full
from bitnet_np.backend import Wrapped
from bitnet_np.dialects import DIALECTS
from bitnet_np.errors import NonFiniteError
from bitnet_np.judge.dump import check_logits
from bitnet_np.judge.engine import judge_logits
from bitnet_np.judge.logits import judge
from bitnet_np.judge.mistakes.catalogue import in_engine as known_mistakes
from bitnet_np.judge.reach import roundings
from bitnet_np.judge.roundings import to_eleven_bits as half
from bitnet_np.judge.variant import Variant, scaled, variant_logits
from bitnet_np.judge.verdict import Verdict
from bitnet_np.kernels import cpu
from bitnet_np.kernels.blocks import round_as_f16, round_as_q8_0
from bitnet_np.testing import random_model
from bitnet_np.widen import float32

FLIPS, WRONG = Verdict.FLIPS, Verdict.WRONG
BASE = Variant("ours", model(), EXACT)
DEEP = random_model(52, n_layers=30, width=128, ffn=256, vocab=256, heads=4, kv_heads=2, head_dim=32)
IDS = np.random.default_rng(0).integers(0, 256, 12)


def run(variant, ids=None):
    return variant_logits(variant, (tokens(17) if ids is None else ids)[None])[0]


def judged(theirs, n=17, **how):
    return judge_logits(ours(n), theirs, BASE, lambda variant: run(variant, tokens(n)), **how)


# --- what roundings do ----------------------------------------------------------------------------------------------------------------


def test_half_has_float16s_bits_and_float32s_range():
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    ties = (x.view(np.uint32) & 0x1FFF) == 0x1000
    np.testing.assert_array_equal(half(x)[~ties], x.astype(np.float16).astype(np.float32)[~ties])
    big = np.float32([1e30, -1e-30])
    assert (np.abs(half(big) / big - 1) < 2**-11).all()
    assert (half(big) != big).all()


@pytest.mark.parametrize("base", [EXACT, BITNET_CPP])
def test_roundings_are_no_fault_at_any_depth(base):
    """The fixed limit is too small for 30 layers; the measured one holds, whichever roundings are theirs."""
    ours = forward_full(DEEP, IDS[None], dialect=base)[0]
    others = {
        "halves": Variant("", DEEP, Dialect("halves", halves=True, stepped_angles=False)),
        "the other dialect": Variant("", DEEP, EXACT if base is BITNET_CPP else BITNET_CPP),
        "float16 products": Variant("", DEEP, base, Wrapped(cpu, ternary_matmul=lambda *args: half(cpu.ternary_matmul(*args)))),
        "float16 attention": Variant(
            "", DEEP, base, Wrapped(cpu, attend=lambda *args: half(cpu.attend(*args)), rope=lambda *a: half(cpu.rope(*a)))
        ),
        "float32 noise": Variant("", DEEP, base, Wrapped(cpu, rms_norm=lambda *args: cpu.rms_norm(*args) * np.float32(1 + 2e-7))),
    }
    verdicts = {}
    for name, variant in others.items():
        theirs = run(variant, IDS)
        found = judge_logits(ours, theirs, Variant("ours", DEEP, base), lambda v: run(v, IDS))
        assert found.verdict <= FLIPS, (name, found)
        verdicts[name] = judge(ours, theirs).verdict
    assert WRONG in verdicts.values()  # for the fixed limit


def test_the_dialect_that_was_not_declared_is_named():
    found = judged(forward_full(model(), tokens(17)[None], dialect=BITNET_CPP)[0])
    assert found.verdict is FLIPS
    assert found.explanation == "closest to the dialect bitnet.cpp (--as bitnet.cpp)"
    assert 1e-4 < found.mean_nmse <= found.reach < 3e-3


def test_nothing_is_run_for_what_needs_no_limit():
    def never(variant):
        raise AssertionError(variant.text)

    for theirs, verdict in (
        (ours(17), Verdict.SAME_BITS),
        (ours(17) * np.nan, Verdict.INVALID),
        (definition(tokens(17)), Verdict.ROUNDING),
    ):
        assert judge_logits(ours(17), theirs, BASE, never).verdict is verdict


# --- mistakes -------------------------------------------------------------------------------------------------------------------------

SAYS = {
    "activations of 7 bits": "63 steps",
    "absmax to 126": "126 steps",
    "truncated, not rounded": "truncated",
    "not quantised": "not quantised",
    "one scale for all tokens": "one activation scale for the whole tensor",
    "ffn_down's scale 5 % too large": "the scale of ffn_down is off, by a factor of about 1.05",
    "attn_q with the scale of attn_k": "at attn_q of every layer: the weight scale of attn_k is used",
}


@pytest.mark.parametrize("name", SAYS)
def test_mistakes_smaller_than_roundings_are_found_and_named(name):
    old, new, _ = SMALL_FAULTS[name]
    theirs = definition(tokens(17), old, new)
    assert judge(ours(17), theirs).verdict is FLIPS
    found = judged(theirs)
    assert found.verdict is WRONG, found
    assert SAYS[name] in found.explanation
    assert judged(theirs, search=False).explanation is None


def test_what_changes_less_than_float16_is_no_more_than_close():
    """It may flip the very codes that roundings flip, so it cannot be told from them; beyond what roundings reach it is named."""
    old, new, _ = SMALL_FAULTS["epsilon outside the root"]
    assert judged(definition(tokens(17), old, new)).verdict is FLIPS
    large = random_model(4, eps=0.05)
    ids = np.arange(9)
    base = Variant("ours", large, EXACT)
    theirs = run(next(m for m in known_mistakes(base) if m.text == "epsilon is 1e-06 instead of 0.05"), ids)
    found = judge_logits(run(base, ids), theirs, base, lambda v: run(v, ids))
    assert (found.verdict, found.explanation[:10]) == (WRONG, "epsilon is")


@pytest.mark.parametrize("factor", [0.95, 1.03, 1.1])
def test_a_wrong_scale_is_seen_through_float16(factor):
    """As large a change as the roundings it hides in, or smaller."""
    theirs = run(dataclasses.replace(scaled(Variant("", DEEP, BITNET_CPP), "ffn_down", factor)), IDS)
    base = Variant("ours", DEEP, EXACT)
    found = judge_logits(run(base, IDS), theirs, base, lambda v: run(v, IDS))
    assert found.verdict is WRONG, found


def names_itself(model, ids):
    """Of logits that a mistake made, no other mistake is blamed, unless it does the same. Returns those that make a difference."""
    base = Variant("ours", model, EXACT)
    mine = run(base, ids)
    mistakes = list(known_mistakes(base))
    assert len({m.text for m in mistakes}) == len(mistakes)
    seen = []
    for mistake in mistakes:
        theirs = run(mistake, ids)
        if judge(mine, theirs).verdict <= Verdict.ROUNDING:
            continue
        seen.append(mistake.text)
        found = judge_logits(mine, theirs, base, lambda v: run(v, ids))
        assert found.verdict is WRONG or mistake.weak, (mistake.text, found)
        if found.verdict is FLIPS:
            continue
        if found.explanation.split(", in the dialect")[0] == mistake.text.split(", in the dialect")[0]:
            continue  # large ones outweigh what dialects differ by
        same = run(next(m for m in mistakes if m.text == found.explanation), ids)
        assert judge(same, theirs).verdict <= Verdict.ROUNDING, (mistake.text, found.explanation)
    return seen


def test_every_known_mistake_names_itself():
    wide = random_model(3, vocab=300, n_layers=2, width=96, heads=6, kv_heads=2, head_dim=16, tied=False, context=64)
    assert len(names_itself(wide, np.random.default_rng(1).integers(0, 300, 12))) > 40


# --- other families -------------------------------------------------------------------------------------------------------------------

FAMILY = {  # what a family adds to the shape, how many mistakes make a difference at least, and some of them
    "bitnet": ({}, 45, ("relu(gate)^2 * up instead of SiLU(gate) * up", "at attn_q of every layer: the weight scale is missing")),
    "llama": (
        {"rope_scaling": 4.0},
        25,
        (
            "in RoPE: positions are not scaled",
            "in RoPE: the factors of the frequencies are not applied",
            "at attn_v of every layer: the bias is missing",
        ),
    ),
    "qwen2": ({}, 20, ("at attn_q of every layer: the bias is missing", "output_bias is missing")),
    "qwen3": (
        {},
        20,
        (
            "at attn_q_norm of every layer: the norm is missing: its input comes out unchanged",
            "at attn_k_norm of every layer: the norm's weight is missing",
        ),
    ),
    "gptneox": (
        {"rope_width": 8, "parallel_residual": True},
        25,
        (
            "in RoPE: all of each head is rotated, not a part",
            "the feed-forward reads what attention's branch was added to instead of the layer's input",
            "in every norm: the mean is not subtracted, as in RMSNorm",
        ),
    ),
    "gpt2": (
        {},
        20,
        (
            "position_embd is missing",
            "the exact GELU instead of GELU's approximation by tanh",
            "at ffn_norm of every layer: the norm's bias is missing",
        ),
    ),
}
SMALL = {"vocab": 300, "n_layers": 2, "width": 96, "heads": 6, "kv_heads": 2, "head_dim": 16, "tied": False, "context": 64}


@pytest.mark.parametrize("inner_norms", [False, True])
@pytest.mark.parametrize("family", FAMILY)
def test_every_known_mistake_of_a_family_names_itself(family, inner_norms):
    more, least, some = FAMILY[family]
    seen = names_itself(
        random_model(3, family=family, inner_norms=inner_norms, **SMALL, **more), np.random.default_rng(1).integers(0, 300, 12)
    )
    assert len(seen) >= least
    assert set(some) <= set(seen)
    assert ("at the norm inside ffn_down of every layer: the norm is missing: its input comes out unchanged" in seen) == inner_norms


def test_mistakes_that_a_norm_cancels_are_weak():
    assert {m.text for m in known_mistakes(BASE) if m.weak and m.mistake == "scale.missing"} == {
        f"at {name} of every layer: the weight scale is missing" for name in ("attn_v", "ffn_gate", "ffn_up")
    }
    silu = Variant("", random_model(0, family="bitnet"), EXACT)
    assert "at ffn_gate of every layer: the weight scale is missing" in {m.text for m in known_mistakes(silu) if not m.weak}


@pytest.mark.parametrize("weights", ["Q4_K", "Q4_1", "Q8_0", "float16"])
def test_dialects_are_no_fault_of_each_other(weights):
    """Whichever is declared, what another one gives is close, and named; a mistake on top of it is still found."""
    blocks = random_model(
        6, family="llama", weights=weights, table="float16", n_layers=3, width=256, ffn=256, heads=8, kv_heads=2, head_dim=32, vocab=300
    )
    ids = np.random.default_rng(1).integers(0, 300, 12)
    for declared in DIALECTS.values():
        base = Variant("ours", blocks, declared)
        mine = run(base, ids)
        for other in DIALECTS.values():
            theirs = run(dataclasses.replace(base, dialect=other), ids)
            found = judge_logits(mine, theirs, base, lambda v, ids=ids: run(v, ids))
            assert found.verdict <= FLIPS, (declared.name, other.name, found)
            if found.verdict is FLIPS:
                assert found.explanation == f"closest to the dialect {other.name} (--as {other.name})"
            turned = next(m for m in known_mistakes(dataclasses.replace(base, dialect=other)) if "turns the other way" in m.text)
            assert judge_logits(mine, run(turned, ids), base, lambda v, ids=ids: run(v, ids)).verdict is WRONG


def with_inputs(name, halves, rounded):
    """An engine that rounds the input of every product."""
    ops = Wrapped(
        cpu,
        matmul=lambda x, *table: cpu.matmul(rounded(x), *table),
        matmul_blocks=lambda x, *table: cpu.matmul_blocks(rounded(x), *table),
    )
    return {"dialect": Dialect(name, halves, False), "ops": ops}


ENGINES = (
    {"dialect": Dialect("llama.cpp, float16 cache", True, True, True)},
    with_inputs("8 bits, 32 to a scale: as on GPUs", False, round_as_q8_0),
    with_inputs("8 bits, float16 cache", True, round_as_q8_0),
    with_inputs("float16", False, round_as_f16),
    with_inputs("float16, float16 cache", True, round_as_f16),
)


@pytest.mark.parametrize("declared", [EXACT, LLAMA_CPP])
@pytest.mark.parametrize(("seed", "layers"), [(3, 1), (4, 1), (7, 1), (3, 4)])
def test_engines_of_a_llama_in_q4_k_m_are_left_alone(seed, layers, declared):
    """K-quants, the head in Q6_K. In one layer little flips, and then its input's scale is a factor of all logits."""
    shape = {"width": 256, "ffn": 512, "heads": 8, "kv_heads": 4, "head_dim": 32, "vocab": 300, "n_layers": layers, "tied": False}
    mixed = random_model(seed, family="llama", weights="Q4_K", table="Q6_K", **shape)
    ids = np.random.default_rng(seed).integers(0, 300, 12)
    base = Variant("ours", mixed, declared)
    mine = run(base, ids)
    for engine in ENGINES:
        found = judge_logits(mine, run(dataclasses.replace(base, **engine), ids), base, lambda v: run(v, ids))
        assert found.verdict is FLIPS, (engine["dialect"].name, found)


@pytest.mark.parametrize("weights", ["Q4_K", "float32"])
def test_a_wrong_scale_is_seen_in_any_weights(weights):
    family = random_model(
        6, family="llama", weights=weights, table="float16", n_layers=3, width=256, ffn=256, heads=8, kv_heads=2, head_dim=32, vocab=300
    )
    ids = np.random.default_rng(1).integers(0, 300, 12)
    base = Variant("ours", family, EXACT)
    theirs = run(scaled(Variant("", family, LLAMA_CPP), "ffn_up", 1.05), ids)
    found = judge_logits(run(base, ids), theirs, base, lambda v: run(v, ids))
    assert found.verdict is WRONG, found


def test_honest_variants_are_no_mistakes():
    for variant in roundings(BASE):
        assert judged(run(variant)).verdict is FLIPS, variant.text


def test_a_mistake_that_leaves_float32s_range_is_passed_over():
    def overflowing(variant):
        if "scale" in variant.text:
            raise NonFiniteError("out of range")
        return run(variant)

    old, new, _ = SMALL_FAULTS["truncated, not rounded"]
    found = judge_logits(ours(17), definition(tokens(17), old, new), BASE, overflowing)
    assert "truncated" in found.explanation


def test_progress_is_told_to_the_end():
    told = []
    judged(definition(tokens(17), *SMALL_FAULTS["absmax to 126"][:2]), progress=lambda done, total: told.append((done, total)))
    assert told[-1][0] == told[-1][1] > 40
    assert [done for done, _ in told] == sorted(done for done, _ in told)


# --- the parts of a dump that are looked at -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_only", [False, True])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (70,), (2, 70)])
def test_batches_and_long_sequences(shape, last_only):
    """At most 64 tokens are run again, and they are those whose logits come first."""
    small = random_model(5)
    ids = np.random.default_rng(2).integers(0, 50, shape)
    batch = ids if ids.ndim == 2 else ids[None]
    faulty = next(m for m in known_mistakes(Variant("", small, EXACT)) if "truncated" in m.text)
    theirs = forward_full(small, batch, last_only=last_only, ops=faulty.ops)
    theirs = theirs if ids.ndim == 2 else theirs[0]
    found = check_logits(small, ids, theirs, EXACT, last_only).logits
    assert found.verdict is WRONG
    assert "truncated" in found.explanation
    assert float32(small.token_embd).shape[0] == theirs.shape[-1]


def test_sequences_of_a_batch_that_are_mixed_are_named():
    small = random_model(5)
    ids = np.random.default_rng(2).integers(0, 50, (3, 9))
    right = forward_full(small, ids)
    said = check_logits(small, ids, right[[1, 0, 2]], EXACT, False).logits
    assert (said.verdict, said.explanation) == (Verdict.WRONG, "sequence 0 has the logits of sequence 1")
    noise = np.random.default_rng(3).standard_normal(right.shape[1:]).astype(np.float32)
    mixed = right + noise * (np.arange(3) == 1)[:, None, None]
    said = check_logits(small, ids, mixed, EXACT, False).logits
    assert (said.verdict, said.explanation) == (Verdict.WRONG, "only sequence 1 of 3 is wrong: are sequences of a batch mixed?")
    assert " of sequence 1, " in said.reason
    said = check_logits(small, ids, right[:, -1] + noise[:3], EXACT, True).logits  # all of them are
    assert (said.verdict, said.explanation) == (Verdict.WRONG, None)


def test_a_batch_of_one_row_is_a_last_row():
    small, ids = random_model(5), np.arange(9) * 7 % 50
    assert check_logits(small, ids, forward_full(small, ids[None])[:, -1], EXACT, True).verdict == Verdict.SAME_BITS
