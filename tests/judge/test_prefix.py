"""Dumps of calls that reuse the keys and values of the first tokens: the rows that they have are judged as in a whole dump."""

import numpy as np
import pytest
from dumps import recorded, trace, without_codes
from hypothesis import given, settings
from hypothesis import strategies as st
from models import family_shapes, random_model, random_tokens, seeds

import bitnet_np as bn
from bitnet_np import spec
from bitnet_np.base.errors import OptionError
from bitnet_np.cli.main import main
from bitnet_np.engine.cache import KVCache
from bitnet_np.judge.law.precision import DIGITS
from bitnet_np.judge.law.roundings import to_digits
from bitnet_np.judge.verdict import Verdict
from bitnet_np.testing.models import write_gguf
from bitnet_np.traces.points import Key

MODEL = random_model(3, family="llama", width=64, ffn=128, heads=4, kv_heads=2, head_dim=16, vocab=90)
TOKENS = random_tokens(np.random.default_rng(1), MODEL, 20)


def continued(model, tokens, prefix):
    """The tensors of the later tokens, of a call that goes on in a cache."""
    cache, dump = KVCache(model.config, capacity=len(tokens)), {}
    bn.forward(model, [tokens[:prefix]], cache)

    def record(name, layer, array):
        dump[name if layer is None else f"{name}-{layer}"] = array.reshape(len(array), -1).copy()

    bn.forward(model, [tokens[prefix:]], cache, record=record)
    return dump


@settings(max_examples=30)
@given(shape=family_shapes(), seed=seeds, length=st.integers(2, 40), share=st.floats(0, 1), alone=st.booleans())
def test_an_honest_call_has_our_bits(shape, seed, length, share, alone):
    model = random_model(seed, **shape)
    tokens = random_tokens(np.random.default_rng(seed), model, length)
    prefix = 1 + int(share * (length - 2))
    dump = continued(model, tokens, prefix)
    dump = {"logits": dump["result_output"]} if alone else dump
    assert bn.check(model, tokens, dump, prefix=prefix).verdict <= Verdict.FLIPS


def next_floats(seed):
    """Rounds every tensor once more, up or down: the last bit of an engine that sums in another order."""
    rng = np.random.default_rng(seed)

    def edit(name, layer, x):
        if x.dtype != np.float32 or name.endswith("_scale"):
            return x
        return np.nextafter(x, np.where(rng.random(x.shape) < 0.5, np.inf, -np.inf).astype(np.float32))

    return edit


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
@pytest.mark.parametrize("prefix", [1, 7])
def test_the_type_of_tensors_is_seen_behind_a_prefix(kind, prefix):
    def narrow(name, layer, x):
        return to_digits(x.astype(np.float64), DIGITS[kind]).astype(np.float32) if x.dtype == np.float32 else x

    dump = without_codes(recorded(MODEL, TOKENS, edit=narrow))
    report = bn.check(MODEL, TOKENS, trace({key: x[prefix:] for key, x in dump.items()}), prefix=prefix, budget=0.0)
    assert report.verdict <= Verdict.FLIPS, report.reason
    assert any(note.startswith(f"judged as {kind}, read off the dump") for note in report.notes)


@pytest.mark.usual(1)
@pytest.mark.parametrize("seed", [3, 7, 9, 11])
def test_codes_that_flip_in_the_prefix_are_no_mistake(seed):
    """Its keys and values are ours, and those of the engine have other codes. A key too few of the prefix is found all the same."""
    model = random_model(seed, family="bitnet-b1.58", n_layers=3, width=256, ffn=256, heads=8, kv_heads=1, head_dim=32)
    ids = random_tokens(np.random.default_rng(seed), model, 100)
    whole = recorded(model, ids, edit=next_floats(seed + 100))
    dump = {key: x[32:] for key, x in without_codes(whole).items()}
    assert bn.check(model, ids, trace(dump), prefix=32, budget=0).verdict <= Verdict.NARROW
    last = Key("kqv_out", 2)
    q, k, v = (whole[Key(name, 2)].astype(np.float64).reshape(100, -1, 32) for name in ("Qcur_rope", "Kcur_rope", "Vcur"))
    sees = np.tri(100, dtype=bool) & (np.arange(100) != 5)
    weights = spec.softmax(np.where(sees, np.einsum("thk,sk->hts", q, k[:, 0]) / 32**0.5, -np.inf))
    wrong = np.einsum("hts,sk->thk", weights, v[:, 0]).reshape(100, -1)[32:].astype(np.float32)
    report = bn.check(model, ids, trace(dump | {last: wrong}), prefix=32, budget=0)
    assert report.first_wrong.key == last


@pytest.mark.parametrize("prefix", [1, 8, 19])
@pytest.mark.parametrize("tensor", ["Qcur-0", "Kcur_rope-1", "kqv_out-1", "ffn_down-0", "l_out-1", "result_norm"])
def test_a_wrong_row_of_any_tensor_is_found_where_it_is(tensor, prefix):
    dump = continued(MODEL, TOKENS, prefix)
    dump[tensor][-1] *= np.float32(1.01)
    report = bn.check(MODEL, TOKENS, dump, prefix=prefix, budget=0.0)
    assert report.verdict == Verdict.WRONG
    assert str(report.first_wrong.key) == tensor
    assert "the first" in report.notes[0]


def test_positions_that_restart_are_named():
    """As in an engine that counts the rows of a call."""
    dump = continued(MODEL, TOKENS, 8)
    cache, restarted = KVCache(MODEL.config, capacity=20), {}
    bn.forward(MODEL, [TOKENS[8:]], cache, record=lambda name, layer, array: restarted.setdefault((name, layer), array.copy()))
    dump |= {f"{name}_rope-0": restarted[f"{name}_rope", 0] for name in ("Qcur", "Kcur")}
    assert "positions restart at position 8" in bn.check(MODEL, TOKENS, dump, prefix=8).reason


@pytest.mark.parametrize("left", [False, True])
def test_sequences_of_a_batch_have_one_prefix(left):
    """Padded, in front of the tokens or behind; the fault of one is said of it."""
    sequences = [TOKENS, TOKENS[::-1][:14]]
    dumps = [continued(MODEL, tokens, 6) for tokens in sequences]
    dumps[1]["ffn_up-1"] = dumps[1]["ffn_up-1"] + np.float32(0.1)
    pad = {True: lambda n: (14 - n, 0), False: lambda n: (0, 14 - n)}[left]
    dump = {
        name: np.stack([np.pad(one[name].reshape(len(one[name]), -1), (pad(len(one[name])), (0, 0))) for one in dumps]) for name in dumps[0]
    }
    report = bn.check(MODEL, [list(tokens) for tokens in sequences], dump, prefix=6)
    assert [one.verdict for one in report.sequences] == [Verdict.SAME_BITS, Verdict.WRONG]
    assert str(report.first_wrong.key) == "ffn_up-1"


@pytest.mark.parametrize("prefix", [20, 21, -1, 1.5])
def test_a_prefix_that_leaves_no_row_is_refused(prefix):
    with pytest.raises(OptionError, match=r"prefix.*expected"):
        bn.check(MODEL, TOKENS, {"l_out-0": np.zeros((1, 64), np.float32)}, prefix=prefix)


def test_the_command_takes_a_prefix(tmp_path, capsys):
    write_gguf(tmp_path / "m.gguf", MODEL)
    dump = continued(MODEL, TOKENS, 8)
    np.savez(tmp_path / "d.npz", tokens=TOKENS[8:], **dump)
    arguments = ["check", str(tmp_path / "m.gguf"), "--tokens", ",".join(map(str, TOKENS)), "--theirs", str(tmp_path / "d.npz")]
    assert main([*arguments, "--prefix", "8"]) == 0
    assert "the rows of the first 8 tokens are our own" in capsys.readouterr().out
    assert main(arguments) == 2
    assert main([*arguments, "--prefix", "20"]) == 2
