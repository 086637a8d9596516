"""Public functions, many at a time: an argument of another type, or too large, is refused with an error of the package's family."""

import dataclasses

import numpy as np
import pytest
from wrong_arguments import NO_INTEGERS

import bitnet_np as bn
from bitnet_np.base.errors import CapacityError, Error, OptionError, ShapeError, TokenRangeError
from bitnet_np.engine import masks
from bitnet_np.engine.network import Runtime
from bitnet_np.files.gguf_writer import write_model
from bitnet_np.generation.nll import token_nll
from bitnet_np.judge.compare_models import compare_models
from bitnet_np.judge.dump import compare_traces
from bitnet_np.judge.measures import judge
from bitnet_np.model.records import Yarn
from bitnet_np.testing.models import random_model
from bitnet_np.traces.formats import read_any
from bitnet_np.traces.llama_base import divergence, save_base
from bitnet_np.traces.points import Trace
from bitnet_np.traces.record import Recorder

MODEL = random_model(5, context=16)
TRACE = Trace({}, None, "a trace")
ANY = bn.Sampling(0.5)


def cache():
    filled = bn.KVCache(MODEL.config, 2, 8)
    bn.forward(MODEL, [[1, 2, 3]], filled, slots=[1])
    return filled


CALLS = {
    "batch": lambda v: bn.KVCache(MODEL.config, v, 4),
    "capacity": lambda v: bn.KVCache(MODEL.config, 1, [] if v is None else v),
    "truncated slot": lambda v: cache().truncate(v, 0),
    "truncated length": lambda v: cache().truncate(1, v),
    "rolled back": lambda v: cache().rollback(1, v),
    "cleared": lambda v: cache().clear([] if v is None else v),
    "fork's source": lambda v: cache().fork(v, [0]),
    "fork's target": lambda v: cache().fork(1, [v]),
    "fork's targets": lambda v: cache().fork(1, "x" if isinstance(v, list | dict | np.ndarray) else v),
    "fork's length": lambda v: cache().fork(1, [0], [] if v is None else v),
    "resized": lambda v: cache().resize([] if v is None else v, force=True),
    "block": lambda v: bn.prefill(MODEL, [[1]], cache(), block=v),
    "chunk": lambda v: bn.forward_incremental(MODEL, [[1]], chunk=v),
    "parallel_threshold": lambda v: bn.compute_logits(MODEL, [[1]], parallel_threshold=v),
    "n": lambda v: bn.generate(MODEL, [1], v),
    "stop": lambda v: bn.generate(MODEL, [1], 1, stop=[v]),
    "seed": lambda v: bn.generate(MODEL, [1], 1, sampling=bn.Sampling(0.5), seed=v),
    "top_k": lambda v: bn.Sampling(0.5, v),
    "sampling": lambda v: bn.generate(MODEL, [1], 1, sampling=v),
    "slots": lambda v: list(bn.generate_batch(MODEL, [bn.Request(1, [1], 1)], v)),
    "request": lambda v: list(bn.generate_batch(MODEL, [v], 1)),
    "request's n": lambda v: list(bn.generate_batch(MODEL, [bn.Request(1, [1], v)], 1)),
    "a batch's slots": lambda v: bn.Batch(MODEL, v, 4),
    "stride": lambda v: token_nll(MODEL, [1, 2], stride=[] if v is None else v),
    "nll's chunk": lambda v: token_nll(MODEL, [1, 2], chunk=v),
    "cache": lambda v: bn.forward(MODEL, [[1]], v),
    "dialect": lambda v: bn.forward_full(MODEL, [[1]], dialect=v),
    "model": lambda v: bn.forward_full(v, [[1]]),
    "pattern": lambda v: masks.mask(1, 2, v),
    "sequences": lambda v: bn.pad(v if np.ndim(v) == 0 and not isinstance(v, dict) else [v[0] if isinstance(v, list) else 1.5]),
    "prompt": lambda v: bn.generate(MODEL, [1.5] if isinstance(v, list | np.ndarray) else v, 1),
    "layers": lambda v: Recorder(print, Runtime(MODEL), layers=[v]),
    "names": lambda v: Recorder(print, Runtime(MODEL), names=[v] if v is None or isinstance(v, dict | list | np.ndarray) else v),
    "shape": lambda v: read_any(__file__, "raw", v),
    "lengths of a shape": lambda v: read_any(__file__, "raw", (v,)),
    "tokens": lambda v: bn.check(MODEL, v if np.ndim(v) == 0 else 1.5, TRACE),
    "other trace": lambda v: compare_traces(TRACE, v),
    "other model": lambda v: compare_models(MODEL, v, [[1]]),
    "base": lambda v: divergence(MODEL, 1.5 if isinstance(v, str) else v),
    "base's chunk": lambda v: save_base(MODEL, [1] * 8, "none.kld", context=[] if v is None else v),
    "base's first token": lambda v: save_base(MODEL, [1] * 8, "none.kld", bos=[] if v is None else v),
    "model written": lambda v: write_model("none.gguf", v, {}),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
def test_no_argument_of_another_type_gets_past_the_border(name, value):
    with pytest.raises(Error):
        CALLS[name](value)


@pytest.mark.parametrize("dtype", ["abc", 1.5, ..., [1], np.int32, ">f4"])
def test_dtypes_are_those_that_are_known(dtype):
    with pytest.raises(OptionError, match=r"KV cache: dtype is .*, expected float32 or float16"):
        bn.KVCache(MODEL.config, 1, 4, dtype)
    with pytest.raises(masks.MaskError, match=r"dtype is .*, expected float32 or float64 or float16"):
        masks.mask(1, 2, dtype=dtype)


@pytest.mark.parametrize("size", [2**62, 2**63, 10**30])
def test_sizes_beyond_memory_are_errors_of_ours(size):
    for make in (lambda: bn.KVCache(MODEL.config, size, 4), lambda: bn.KVCache(MODEL.config, 1, size), lambda: bn.Batch(MODEL, size, 4)):
        with pytest.raises(CapacityError, match="cannot be had"):
            make()


class Unwilling:
    """Says that it can be iterated over, and cannot."""

    def __iter__(self):
        raise RuntimeError("no iterator")


def once():
    """Stop tokens that can be read but once."""
    return (token for token in [1])


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: bn.generate(MODEL, [1], 1, stop=once()), OptionError, "stop is <generator .*, expected a collection of token ids"),
        (lambda: list(bn.generate_batch(MODEL, [bn.Request("a", [1], 1, stop=once())], 1)), OptionError, "stop is <generator"),
        (lambda: bn.generate(MODEL, [1] * 10, np.int8(120)), bn.Error, "exceed the model's context of 16"),  # 130 is beyond int8
        (lambda: bn.generate(MODEL, [1], 1, sampling=ANY, numbers=5), OptionError, "numbers is 5, expected a sequence"),
        (lambda: bn.generate(MODEL, [1], 1, sampling=ANY, numbers=Unwilling()), OptionError, "numbers is .*, expected a sequence"),
        (lambda: bn.generate(MODEL, [1], 1, sampling=ANY, numbers=["a"]), OptionError, "uniform number is 'a', expected a number"),
        (lambda: bn.forward_full(MODEL, [[1, 2]], mask=[[0.0], [0.0, 0.0]]), masks.MaskError, "mask is ragged"),
        (lambda: token_nll(MODEL, [[1], [1, 2]]), ShapeError, "tokens is ragged"),
        (lambda: Yarn(2.0, 64, truncate=np.ones(2)), OptionError, "YaRN's truncate is array"),
        (lambda: bn.check(MODEL, (np.array(1), [1, 2]), TRACE), ShapeError, "tokens has shape"),
        (lambda: bn.pad([[2**70]]), TokenRangeError, "beyond 64 bits"),
        (lambda: bn.check(dataclasses.replace(MODEL, config={}), [1], TRACE), ShapeError, "config is {}, expected a Config"),
        (
            lambda: judge(np.zeros((3, 0)), np.zeros((3, 0)), numbers=[1, 2]),
            ShapeError,
            r"numbers has shape \(2,\), expected one for each row",
        ),
    ],
)
def test_what_cannot_be_used_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_small_integers_and_collections_are_as_good_as_any():
    assert len(bn.generate(MODEL, np.array([1], np.int8), np.int8(15))) == 16
    greedy = bn.generate(MODEL, [1], 1)[-1]
    assert bn.generate(MODEL, [1], 1, stop=[greedy]) == [1]
