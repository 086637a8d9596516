"""How far roundings reach on a model: honest engines pass, shallow or deep, in any dialect and with any weights."""

import dataclasses
from functools import partial

import numpy as np
import pytest
from engine_runs import DEEP, DEEP_TOKENS, TOKENS_OF_300, float16_scales, float16_sums, judge_by, known_mistakes, llama_of, logits_of

from bitnet_np import BITNET_CPP, EXACT, LLAMA_CPP, Dialect
from bitnet_np.engine.backend import Wrapped
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.judge.honest_engines import in_precision
from bitnet_np.judge.law.precision import FLASH, FLOAT32, Precision
from bitnet_np.judge.law.roundings import to_eleven_bits as half
from bitnet_np.judge.logits_alone import judge_logits
from bitnet_np.judge.measures import judge, position_nmse
from bitnet_np.judge.options import Options
from bitnet_np.judge.variant import Variant
from bitnet_np.judge.verdict import Verdict
from bitnet_np.kernels import cpu
from bitnet_np.model.records import MATRICES
from bitnet_np.testing.models import random_model

FLIPS, NARROW, WRONG = Verdict.FLIPS, Verdict.NARROW, Verdict.WRONG
SHALLOW = dataclasses.replace(DEEP, config=dataclasses.replace(DEEP.config, n_layers=8), layers=DEEP.layers[:8])


@pytest.mark.usual("8 layers, bitnet.cpp")
@pytest.mark.parametrize(("base", "model"), [(EXACT, DEEP), (BITNET_CPP, SHALLOW)], ids=["30 layers", "8 layers, bitnet.cpp"])
def test_roundings_are_no_fault_at_any_depth(base, model):
    """FLIPS_LIMIT is too small for 30 layers. The limit that is measured holds for every kind of rounding, and no known mistake, which are
    tried in eight layers, is like one."""
    ours = Variant("ours", model, base)
    judge_theirs, logits = judge_by(ours, DEEP_TOKENS, search=model is SHALLOW), logits_of(ours, DEEP_TOKENS)
    others = {
        "halves": Variant("", model, Dialect("halves", in_float16=True, stepped_angles=False)),
        "the other dialect": Variant("", model, EXACT if base is BITNET_CPP else BITNET_CPP),
        "float16 products": Variant("", model, base, Wrapped(cpu, ternary_matmul=lambda *args: half(cpu.ternary_matmul(*args)))),
        "float16 attention": Variant(
            "", model, base, Wrapped(cpu, attend=lambda *args: half(cpu.attend(*args)), rope=lambda *a: half(cpu.rope(*a)))
        ),
        "float32 noise": Variant("", model, base, Wrapped(cpu, rms_norm=lambda *args: cpu.rms_norm(*args) * np.float32(1 + 2e-7))),
    }
    verdicts = set()
    for name, variant in others.items():
        theirs = logits_of(variant, DEEP_TOKENS)
        judgement = judge_theirs(theirs)
        assert judgement.verdict <= FLIPS, (name, judgement)
        verdicts.add(judge(logits, theirs).verdict)
    assert WRONG in verdicts or model is not DEEP  # by FLIPS_LIMIT


@pytest.mark.usual("float16-False")
@pytest.mark.parametrize(("weights", "search"), [("Q4_K", True), ("Q4_1", False), ("float16", False)])
def test_dialects_are_no_fault_of_each_other(weights, search):
    """The logits of a dialect that was not declared are close, and it is named. With a mistake they are still wrong. search: whether known
    mistakes, none of which is to be taken for a dialect, are tried."""
    model = llama_of(weights)
    for declared in DIALECTS.values():
        base = Variant("ours", model, declared)
        judge_theirs = judge_by(base, TOKENS_OF_300, search)
        for other in DIALECTS.values():
            judgement = judge_theirs(logits_of(dataclasses.replace(base, dialect=other), TOKENS_OF_300))
            assert judgement.verdict <= NARROW, (declared.name, other.name, judgement)
            if judgement.verdict is FLIPS:
                assert judgement.explanation == f"closest to the dialect {other.name} (--as {other.name})"
            turned = next(m for m in known_mistakes(dataclasses.replace(base, dialect=other)) if "turns the other way" in m.text)
            assert judge_theirs(logits_of(turned, TOKENS_OF_300)).verdict is WRONG


def with_inputs(kind):
    """The operations of an engine that rounds the input of every product."""
    kernels = {name: getattr(cpu, name) for name in ("matmul", "matmul_blocks")}
    return Wrapped(
        cpu, **{name: lambda x, *table, kernel=kernel: kernel(cpu.round_as(x, kind), *table) for name, kernel in kernels.items()}
    )


ENGINES = (
    {"dialect": Dialect("llama.cpp, float16 cache", True, True, True)},
    {"dialect": Dialect("8 bits, 32 to a scale: as on GPUs", False, False), "ops": with_inputs("q8_0")},
    {"dialect": Dialect("8 bits, float16 cache", True, False), "ops": with_inputs("q8_0")},
    {"dialect": Dialect("float16, float16 cache", True, False), "ops": with_inputs("float16")},
)


@pytest.mark.usual(1)
@pytest.mark.parametrize("declared", [EXACT, LLAMA_CPP])
@pytest.mark.parametrize(("seed", "layers"), [(7, 1), (3, 4)])
def test_engines_of_a_llama_in_q4_k_m_are_left_alone(seed, layers, declared):
    """With K-quants and a head in Q6_K. In one layer little flips, so that the scale of the head's input is a factor of all logits."""
    shape = {"width": 256, "ffn": 512, "heads": 8, "kv_heads": 4, "head_dim": 32, "vocab": 300, "n_layers": layers, "tied": False}
    mixed = random_model(seed, family="llama", weights="Q4_K", table="Q6_K", **shape)
    ids = np.random.default_rng(seed).integers(0, 300, 12)
    base = Variant("ours", mixed, declared)
    judge_theirs = judge_by(base, ids)
    for engine in ENGINES:
        judgement = judge_theirs(logits_of(dataclasses.replace(base, **engine), ids))
        assert judgement.verdict in (FLIPS, NARROW), (engine["dialect"].name, judgement)


@pytest.mark.parametrize(
    ("field", "model", "ops"),
    [
        ("scale", DEEP, {"quantize": float16_scales}),
        ("acc", llama_of("float32"), {"matmul": float16_sums}),
        ("probs", llama_of("float32"), {"attend": cpu.attend_float16}),
        ("attn_acc", llama_of("float32"), {"attend": lambda *a: half(cpu.attend(*a))}),
    ],
)
def test_every_type_of_a_precision_has_a_reach(field, model, ops):
    """An engine with this type alone is honest in its precision. Our run in it is farther from ours than float32's noise."""
    base = Variant("ours", model, EXACT)
    ids, precision = (DEEP_TOKENS if model is DEEP else TOKENS_OF_300), Precision(**{field: "float16"})
    own = logits_of(base, ids)
    run = in_precision(base, precision)
    assert run.dialect == EXACT
    assert position_nmse(own, logits_of(run, ids)).mean() > 1e-9
    theirs = logits_of(dataclasses.replace(base, ops=Wrapped(cpu, **ops)), ids)
    judgement = judge_logits(own, theirs, base, lambda variant: logits_of(variant, ids), Options(precision), False)
    assert judgement.verdict <= FLIPS, judgement.reason
    same = in_precision(base, FLOAT32)
    np.testing.assert_array_equal(logits_of(same, ids), own)


def test_a_converted_head_has_a_reach():
    base = Variant("ours", llama_of("float32"), EXACT)
    run = in_precision(base, Precision(head="q8_0"))
    assert 0 < position_nmse(logits_of(base, TOKENS_OF_300), logits_of(run, TOKENS_OF_300)).mean() < 1e-3


def test_flash_attention_rounds_as_the_dialect_does_and_its_sums():
    """Keys, values, queries and probabilities are rounded by the dialect; what is added grows with the number of keys."""
    base = Variant("ours", llama_of("float32"), EXACT)
    halves = dataclasses.replace(base, dialect=dataclasses.replace(EXACT, in_float16=True))
    summed, rounded = logits_of(in_precision(base, FLASH), TOKENS_OF_300), logits_of(halves, TOKENS_OF_300)
    without = in_precision(base, dataclasses.replace(FLASH, attn_acc="float32"))
    np.testing.assert_array_equal(logits_of(without, TOKENS_OF_300), rounded)
    own = logits_of(base, TOKENS_OF_300)
    assert position_nmse(own, summed).mean() > 2 * position_nmse(own, rounded).mean()


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_narrow_tensors_have_narrow_weights(kind):
    """An engine that rounds the weights of a float32 model, too, is about as far from ours as our run in its precision."""
    model, narrow = llama_of("float32"), partial(cpu.round_as, kind=kind)
    base = Variant("ours", model, EXACT)
    own = logits_of(base, TOKENS_OF_300)
    engine = base
    for name in base.present(MATRICES):
        engine = engine.with_field(name, lambda w: dataclasses.replace(w, weights=narrow(w.weights)))
    theirs = logits_of(dataclasses.replace(engine, edit=lambda name, n, x: narrow(x)), TOKENS_OF_300)
    ours = logits_of(in_precision(base, Precision(act=kind)), TOKENS_OF_300)
    assert 0.5 < position_nmse(own, theirs).mean() / position_nmse(own, ours).mean() < 1.6
