"""Recording models that run in transformers or mlx-lm, by modules of the same protocols. scripts/real_engines.py runs the real ones."""

from types import SimpleNamespace

import numpy as np
import pytest
from models import random_model
from recorder import record_all

from bitnet_np import check
from bitnet_np.base.errors import OptionError, ShapeError
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.arrays import as_numpy
from bitnet_np.traces.formats import read_any
from bitnet_np.traces.hooks import Recorded, record_mlx
from bitnet_np.traces.hooks import record_transformers as record
from bitnet_np.traces.points import Key
from bitnet_np.traces.record import write_trace

IDS = np.array([7, 3, 11, 3, 0, 5])
MODELS = {name: random_model(0, family=name, n_layers=2) for name in ("llama", "bitnet-b1.58", "qwen3")}
ROTATED = ("Qcur_rope", "Kcur_rope")

# --- stand-ins for the arrays of torch and MLX: what is asked of them, and what they refuse -------------------------------------------


class Tensor:
    """What is asked of torch's: bfloat16 has no NumPy, and a tensor with a gradient must be detached."""

    def __init__(self, array, dtype="torch.float32", detached=False):
        self.array, self.dtype, self.detached = array, dtype, detached

    @property
    def shape(self):
        return self.array.shape

    def detach(self):
        return Tensor(self.array, self.dtype, True)

    def float(self):
        return Tensor(self.array.astype(np.float32, copy=False), "torch.float32", self.detached)

    def cpu(self):
        return self

    def numpy(self):
        assert self.detached
        if self.dtype == "torch.bfloat16":
            raise TypeError("Got unsupported ScalarType BFloat16")
        return self.array


float32 = "this library's own float32"


class Bfloat16:
    """An array of MLX that NumPy cannot read; `astype` takes a dtype of the module of its class."""

    dtype = "mlx.core.bfloat16"

    def __init__(self, array):
        self.array = array

    def __array__(self, dtype=None, copy=None):
        raise ValueError("Item size 2 does not match")

    def astype(self, dtype):
        assert dtype is float32
        return self.array


# --- models that call their modules as transformers' models do -------------------------------------------------------------------------

LAYER = (
    ("input_layernorm", "layer input", "attn_norm"),
    *((f"self_attn.{x}_proj", "attn_norm", f"{x.upper()}cur") for x in "qkv"),
    *((f"self_attn.{x}_norm", f"{x.upper()}cur", f"{x.upper()}cur_normed") for x in "qk"),
    ("self_attn.attn_sub_norm", "kqv_out", "attn_sub_norm"),
    ("self_attn.o_proj", "attn_sub_norm", "attn_o_out"),
    ("self_attn.o_proj", "kqv_out", "attn_o_out"),
    ("self_attn", "attn_norm", "attn_o_out"),
    ("post_attention_layernorm", "ffn_inp", "ffn_norm"),
    *((f"mlp.{x}_proj", "ffn_norm", f"ffn_{x}") for x in ("gate", "up")),
    ("mlp.ffn_sub_norm", "ffn_out", "ffn_sub_norm"),
    ("mlp.down_proj", "ffn_sub_norm", "ffn_down"),
    ("mlp.down_proj", "ffn_out", "ffn_down"),
    ("mlp", "ffn_norm", "ffn_down"),
    ("", "layer input", "l_out"),
)


def calls(points, n_layers):
    """The calls of a forward pass in their order: the module, and the points that it takes and gives."""
    yield "model.embed_tokens", None, Key("inp_embd", None)
    for n in range(n_layers):
        before = Key("l_out", n - 1) if n else Key("inp_embd", None)
        seen = set()
        for module, source, result in LAYER:
            keys = before if source == "layer input" else Key(source, n), Key(result, n)
            if module not in seen and all(key in points for key in keys):
                seen.add(module)
                yield f"model.layers.{n}.{module}".rstrip("."), *keys
    yield "model.norm", Key("l_out", n_layers - 1), Key("result_norm", None)
    yield "lm_head", Key("result_norm", None), Key("result_output", None)


def apply_rotary_pos_emb(queries, keys):
    """What an attention calls: here it gives what it takes."""
    return queries, keys


class Module:
    """What is asked of a module: that Python calls it by its class."""

    def __init__(self):
        self.result, self.rotated = None, ()

    def __call__(self, *arguments):
        return self.result


class TorchModule(Module):
    head_dim = MODELS["llama"].config.head_dim

    def __call__(self, *arguments):
        if self.rotated:
            apply_rotary_pos_emb(*self.rotated)
        return self.result


class MlxModule(Module):
    def __call__(self, *arguments):
        for heads in self.rotated:
            self.rope.result = heads
            self.rope()
        return self.result


class FakeModel:
    """A model whose modules take and give these points, some rows at each call."""

    def __init__(self, kind, wrap, model=MODELS["llama"]):
        self.kind, self.wrap, self.head_dim, self.factor = kind, wrap, model.config.head_dim, np.float32(1)
        self.points = points_of(model)
        self.make(calls(self.points, model.config.n_layers))

    def make(self, calls):
        """Let the model consist of the modules of these calls."""
        self.calls = list(calls)
        self.modules = {path: self.kind() for path, *_ in self.calls} | {"model.layers.0.mlp.act_fn": self.kind(), "": self.kind()}
        for path, module in self.modules.items():
            if path.endswith("self_attn") and self.kind is MlxModule:
                module.rope = self.kind()

    def named_modules(self):
        return iter(self.modules.items())

    def __call__(self, rows=slice(None), last_logits_only=False):
        for path, source, result in self.calls:
            part = slice(rows.stop - 1, rows.stop) if last_logits_only and path == "lm_head" else rows
            self.modules[path].result = self.wrap(self.points[result][None, part])
            if path.endswith("self_attn"):
                rotated = (self.points[Key(name, int(path.split(".")[-2]))][part] for name in ROTATED)
                heads = (x.reshape(1, len(x), -1, self.head_dim).swapaxes(1, 2) for x in rotated)
                self.modules[path].rotated = tuple(map(self.wrap, heads))
            if path.endswith("1"):
                self.modules[path].result = (self.modules[path].result, None)  # layers of older versions give a tuple
            self.modules[path](Tensor(IDS) if source is None else self.wrap(self.points[source][None, part]))
        self.modules[""].result = self.wrap(self.points[Key("result_output", None)][None, rows] * self.factor)
        return self.modules[""](Tensor(IDS))


def points_of(model):
    return {Key(name, layer): array.reshape(len(IDS), -1) for (name, layer), array in record_all(model, IDS).items()}


FAKES = {"transformers": (TorchModule, Tensor), "mlx": (MlxModule, lambda array: array)}


@pytest.fixture(params=FAKES.values(), ids=FAKES)
def fake(request):
    return request.param


@pytest.fixture
def engine(fake):
    """A Llama of both kinds."""
    return FakeModel(*fake)


def state(model):
    return [type(model), apply_rotary_pos_emb, *map(type, model.modules.values())]


@pytest.mark.parametrize("name", MODELS)
def test_a_forward_pass_is_recorded_to_the_bit(fake, name):
    engine = FakeModel(*fake, MODELS[name])
    with record(engine) as trace:
        engine()
    named = {key for key in engine.points if not key.name.endswith(("_codes", "_scale"))}
    assert set(trace.points) == named
    for key in named:
        assert trace.points[key].tobytes() == engine.points[key].tobytes()
    assert check(MODELS[name], IDS, trace).verdict == Verdict.SAME_BITS


FUSED = {"self_attn.q_proj": None, "self_attn.k_proj": None, "mlp.gate_proj": None}
FUSED |= {"self_attn.v_proj": ("self_attn.qkv_proj", ("Qcur", "Kcur", "Vcur")), "mlp.up_proj": ("mlp.gate_up_proj", ("ffn_gate", "ffn_up"))}


def fuse(engine, config):
    """Make one module of queries, keys and values, and of gate and up; a model's configuration tells them apart."""
    calls = []
    for path, source, result in engine.calls:
        layer, _, module = path.removeprefix("model.layers.").partition(".")
        if FUSED.get(module):
            name, parts = FUSED[module]
            joined = Key(name, int(layer))
            engine.points[joined] = np.concatenate([engine.points[Key(part, int(layer))] for part in parts], axis=1)
            calls.append((f"model.layers.{layer}.{name}", source, joined))
        elif module not in FUSED:
            calls.append((path, source, result))
    engine.config = config
    engine.make(calls)


def test_matrices_of_one_module_are_told_apart(engine):
    named = {key for key in engine.points if not key.name.endswith(("_codes", "_scale"))}
    c = MODELS["llama"].config
    fuse(engine, SimpleNamespace(num_attention_heads=c.heads, num_key_value_heads=c.kv_heads))
    with record(engine) as trace:
        engine()
    assert set(trace.points) == named
    assert check(MODELS["llama"], IDS, trace).verdict == Verdict.SAME_BITS


def test_a_model_that_does_not_say_its_heads_is_refused(engine):
    fuse(engine, None)
    with pytest.raises(OptionError, match="expected num_attention_heads"), record(engine):
        engine()


EXPERTS = random_model(0, family="qwen3moe", n_layers=2)
ROUTED = ("ffn_moe_logits", "ffn_moe_weights", "ffn_moe_topk")


def test_what_routers_and_experts_give_is_recorded(fake):
    """A prefill of as many tokens as a token has experts, and a step: rows are not taken for slots."""
    points, kind, used = points_of(EXPERTS), fake[0], EXPERTS.config.experts_used
    torch = kind is TorchModule
    modules = {f"model.layers.{n}.mlp.{name}": kind() for n in range(2) for name in ("gate", "experts", "switch_mlp")}
    model = kind()
    model.named_modules = modules.items

    def call(path, result, *arguments):
        modules[path].result = result
        modules[path](*arguments)

    with record(model) as trace:
        for rows in (slice(used), *(slice(t, t + 1) for t in range(used, len(IDS)))):
            for n in range(2):
                part = {key.name: x[rows] for key, x in points.items() if key.layer == n}
                logits, weights, chosen = (part[name] for name in ROUTED)
                chosen = Tensor(chosen.astype(np.int64)) if torch else chosen[None].astype(np.uint32)
                if torch:
                    call(f"model.layers.{n}.mlp.gate", (Tensor(logits), Tensor(weights), chosen), Tensor(part["ffn_norm"]))
                    call(f"model.layers.{n}.mlp.experts", Tensor(part["ffn_moe_out"]), Tensor(part["ffn_norm"]), chosen, Tensor(weights))
                else:
                    call(f"model.layers.{n}.mlp.gate", logits[None], part["ffn_norm"][None])
                    slots = part["ffn_moe_down"].reshape(1, len(logits), used, -1)
                    call(f"model.layers.{n}.mlp.switch_mlp", slots, part["ffn_norm"][None], chosen)
    recorded = {*ROUTED, "ffn_moe_out"} if torch else {"ffn_moe_logits", "ffn_moe_topk", "ffn_moe_down"}
    assert {key.name for key in trace.points} == recorded
    for key, array in trace.points.items():
        np.testing.assert_array_equal(array, points[key])
        assert array.dtype == points[key].dtype


def test_the_model_is_as_it_was(engine):
    before = state(engine)
    with record(engine):
        assert state(engine) != before
    assert state(engine) == before
    engine.calls.append(("no such module", None, None))
    with pytest.raises(KeyError), record(engine):
        engine()
    assert state(engine) == before


def test_a_module_that_cannot_be_recorded_leaves_no_other_recorded(engine):
    engine.modules["lm_head"] = len  # its class has no other
    before = state(engine)
    with pytest.raises(TypeError), record(engine):
        pass
    assert state(engine) == before


def test_normed_heads_may_come_first():
    """The rows of the queries before their norm tell which axis is the tokens'; where both are as long, tokens come first as usual."""
    recorded, heads = Recorded(), np.arange(2 * 5 * 3, dtype=np.float32).reshape(1, 2, 5, 3)
    recorded.add(Key("Qcur", 0), np.zeros((1, 5, 6), np.float32))
    recorded.add(Key("Qcur_normed", 0), heads)
    np.testing.assert_array_equal(recorded[Key("Qcur_normed", 0)], heads[0].swapaxes(0, 1).reshape(5, 6))
    square = Recorded()
    square.add(Key("Qcur", 0), np.zeros((1, 2, 6), np.float32))
    square.add(Key("Qcur_normed", 0), heads[:, :, :2])
    np.testing.assert_array_equal(square[Key("Qcur_normed", 0)], heads[0, :, :2].reshape(2, 6))


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_numbers_are_widened_exactly_and_recorded_as_they_were(dtype):
    """Tensors may change later."""

    def wrap(array):
        return Tensor((array * dtype(1 + 2**-40)).astype(dtype), f"torch.{dtype.__name__}")

    engine = FakeModel(TorchModule, wrap)
    with record(engine) as trace:
        engine()
        for module in engine.modules.values():
            if isinstance(module.result, Tensor):
                module.result.array[:] = 0
    for key, array in trace.points.items():
        assert array.dtype == (np.float64 if dtype is np.float64 else np.float32)
        np.testing.assert_array_equal(array, wrap(engine.points[key]).array)


def test_logits_of_some_positions_only_are_those_of_the_last(engine):
    """generate computes the prompt's last logits, and then each token's."""
    with record(engine) as trace:
        engine(slice(0, 4), last_logits_only=True)
        engine(slice(4, 5))
        engine(slice(5, 6))
    np.testing.assert_array_equal(trace.points[Key("result_output", None)], engine.points[Key("result_output", None)][-1:])
    report = check(MODELS["llama"], IDS, trace)
    assert report.verdict == report.logits.verdict == Verdict.SAME_BITS


def test_logits_are_those_that_the_whole_model_gives(engine):
    """Some models scale or cap what their head gives."""
    engine.factor = np.float32(0.25)
    with record(engine) as trace:
        engine(slice(0, 4))
        engine(slice(4, 6))
    np.testing.assert_array_equal(trace.points[Key("result_output", None)], engine.points[Key("result_output", None)] / 4)


def test_a_head_that_is_no_module():
    """mlx-lm does not call a head that is the embedding: the whole model's output is the logits. A model without a head has none."""
    engine = FakeModel(*FAKES["mlx"])
    engine.make(engine.calls[:-1])
    with record_mlx(engine) as trace:
        engine()
    np.testing.assert_array_equal(trace.points[Key("result_output", None)], engine.points[Key("result_output", None)])
    assert type(engine) is FakeModel
    engine.make((path.removeprefix("model."), *keys) for path, *keys in engine.calls)
    with record_mlx(engine) as trace:
        engine()
    assert Key("result_norm", None) in trace.points
    assert Key("result_output", None) not in trace.points


def test_several_sequences_and_other_objects_are_refused(fake):
    kind, wrap = fake
    engine = FakeModel(kind, lambda array: wrap(np.concatenate([array, array])))
    with pytest.raises(ShapeError, match=r"inp_embd has shape \[2, 6, \d+\] in the model, expected one sequence"), record(engine):
        engine()
    with pytest.raises(OptionError, match="expected a model of transformers or mlx-lm"), record(3):
        pass
    engine.modules = {"": kind(), "encoder": kind()}
    with pytest.raises(OptionError, match="a FakeModel with the modules encoder, expected some such as"), record(engine):
        pass


@pytest.mark.parametrize("name", ["dump.npz", "dump.safetensors", "dump"])
def test_a_recording_is_written_and_read_again(engine, tmp_path, name):
    with record(engine) as trace:
        engine()
    written = write_trace(trace, tmp_path / name, tokens=IDS, format=None if "." in name else "npy")
    again = read_any(tmp_path / name)
    assert set(again.points) == set(written) == set(trace.points)
    np.testing.assert_array_equal(again.tokens, IDS)
    assert check(MODELS["llama"], IDS, again).verdict == Verdict.SAME_BITS


# --- arrays of other libraries, by stand-ins -----------------------------------------------------------------------------------------


NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3) / 4


def test_arrays_of_numpy_are_not_copied():
    assert as_numpy("x", NUMBERS) is NUMBERS
    assert np.shares_memory(as_numpy("x", Tensor(NUMBERS)), NUMBERS)


@pytest.mark.parametrize("value", [NUMBERS.tolist(), Tensor(NUMBERS), Tensor(NUMBERS, "torch.bfloat16"), memoryview(NUMBERS)])
def test_arrays_of_any_library(value):
    np.testing.assert_array_equal(as_numpy("x", value), NUMBERS)


def test_a_library_with_types_of_its_own():
    np.testing.assert_array_equal(as_numpy("x", Bfloat16(NUMBERS)), NUMBERS)


@pytest.mark.parametrize("value", ["abc", None, object(), [[1], [2, 3]], np.array(["a"]), np.zeros(2, np.complex64)])
def test_what_is_no_array_of_numbers_is_refused(value):
    with pytest.raises(ShapeError, match=r"^dump\['x'\] is of type "):
        as_numpy("dump['x']", value)
