"""Cross-validation with Hugging Face transformers: fresh random BitNet models through both, tensor by tensor: `crossval_hf.py --seeds 12`.

It needs torch and transformers: pip install torch transformers. Each seed draws a shape, weights, and one of the forms in which BitNet
checkpoints store them. It builds a BitNetForCausalLM with transformers' own quantised linears (AutoBitLinear, BitLinear), and the same
model as a `Model` of ours. Then, for one sequence:

* float32: judge.trace.judge_trace judges every output of transformers' modules, each operation from transformers' own inputs, and
  judge.logits.judge judges the logits. Rounding and flipped int8 codes pass; WRONG and INVALID do not.
* strict float64: transformers computes in float32 in places, whatever its model's dtype (norms, softmax, RoPE's frequencies and angles, the
  quantisers). Its source is run with float64 for every float32 in it, and every tensor must equal spec.forward's to 1e-10 of its largest
  number. That holds up to the first position with an activation within 1e-9 of an int8 rounding boundary, where either code is right.
* the folder: `load` reads what save_pretrained writes, and gives the bits of our model. (transformers does not save unpacked matrices by
  itself: its own function packs them again.)

Exit status: 0 all agree, 1 a disagreement, 2 nothing could be compared.
"""

import argparse
import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from bitnet_np import packing, spec
from bitnet_np.dense import DenseLinear, dense_view
from bitnet_np.errors import Error, OptionError, UnsupportedError
from bitnet_np.families import MATRICES, NORMS
from bitnet_np.files.hf_model_types import HF_MODULES
from bitnet_np.files.load import load
from bitnet_np.forward_pass import forward_full
from bitnet_np.judge.logits import judge
from bitnet_np.judge.trace import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model import Config, Layer, Linear, Model, frozen
from bitnet_np.rope import rope_frequencies
from bitnet_np.traces.formats import labels
from bitnet_np.traces.points import QUANTIZED, Key, Trace

Points = dict[Key, NDArray]

KINDS = (  # linear_class, quantization_mode
    ("autobitlinear", "online"),  # master weights, quantised in every forward pass: ternary times their mean magnitude
    ("bitlinear", "offline"),  # packed -1, 0, +1; divided by weight_scale
    ("autobitlinear", "offline"),  # -1, 0, +1; multiplied by weight_scale
)

MODULES = {field: HF_MODULES[field] for field in (*NORMS, *MATRICES)}
"""Field of model.Layer -> module of a decoder layer."""

BEFORE = {"attn_sub_norm": "kqv_out", "ffn_norm": "ffn_inp", "ffn_sub_norm": "ffn_out"}
"""Module -> the point that is its input and no module's output."""

TIE = 1e-9
AGREEMENT = 1e-10


@dataclass(frozen=True)
class Case:
    """The random case of one seed."""

    seed: int
    kind: tuple[str, str]
    tied: bool
    bf16: bool  # float weights and scales are bfloat16 numbers, so that codes fall on ties exactly
    config: Config
    tokens: int

    @property
    def shape(self) -> str:
        c = self.config
        heads = f"{c.heads}x{c.head_dim}" if c.heads == c.kv_heads else f"{c.heads}/{c.kv_heads}x{c.head_dim}"
        return f"V{c.vocab} L{c.n_layers} heads {heads} F{c.ffn} T{self.tokens} {'tied' if self.tied else 'own head'}{' bf16' * self.bf16}"


@dataclass(frozen=True)
class Row:
    """The result of one seed."""

    seed: int
    linears: str
    shape: str
    tensors: int  # number of judged tensors
    trace: str  # verdict of the worst tensor, each judged from its own inputs
    logits: str  # verdict of the logits end to end
    float32_error: float  # largest |ours - theirs| of the logits, in standard deviations of ours
    flips: int  # int8 codes of ours that are not those of their inputs
    float64_positions: int  # number of compared positions
    float64_error: float  # largest error of any tensor of those positions, as a part of the tensor's largest number
    float64_tensor: str  # the tensor with that error, or the first that differs by more than roundings
    reason: str
    passed: bool


def draw(seed: int) -> Case:
    """Kinds and head sharing take turns; widths, lengths and constants are random."""
    rng = np.random.default_rng([seed, 0])
    kv_heads, head_dim = int(rng.choice([1, 2, 3])), int(rng.choice([4, 12, 20, 32, 64]))  # BitLinear: all widths in fours
    heads = kv_heads * (1, 2, 4)[seed // 2 % 3]
    config = Config(
        architecture="bitnet-b1.58",
        vocab=int(rng.integers(33, 300)),
        context=128,
        width=heads * head_dim,
        n_layers=int(rng.integers(1, 5)),
        ffn=4 * int(rng.integers(10, 100)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        eps=float(rng.choice([1e-5, 1e-6])),
        rope_base=float(rng.choice([10000.0, 500000.0])),
    )
    return Case(seed, KINDS[seed % 3], bool(seed // 3 % 2), bool(seed % 2), config, int(rng.choice([17, 40, 64, 65, 100, 128])))


# --- the same weights for both --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matrix:
    """A linear's weights in the form of a checkpoint of its kind."""

    codes: NDArray[np.int8]  # [N, M]
    stated: NDArray[np.float32]  # as stored: [N, M] master weights, or [1] weight_scale
    ours: DenseLinear


def float32(values: NDArray, bf16: bool) -> NDArray[np.float32]:
    """The values rounded to float32, or cut to bfloat16."""
    cut = np.uint32(0xFFFF0000 if bf16 else 0xFFFFFFFF)
    return (values.astype(np.float32).view(np.uint32) & cut).view(np.float32)


def matrix(rng: Generator, case: Case, n: int, m: int) -> Matrix:
    """Random weights. Masters stay away from half their mean magnitude, where their codes change: float32 means may differ."""
    codes = rng.choice([-1, 0, 1], (n, m), p=[0.35, 0.3, 0.35]).astype(np.int8)
    codes[np.arange(n), rng.integers(0, m, n)] = rng.choice([-1, 1], n)  # no row is zero
    size = rng.uniform(0.8, 1.25) / np.sqrt(0.7 * m)
    if case.kind == ("autobitlinear", "online"):
        spread = np.where(codes == 0, rng.uniform(-0.2, 0.2, (n, m)), codes * rng.uniform(0.7, 1.5, (n, m)))
        masters = float32(spread * size, case.bf16)
        wide = masters.astype(np.float64)
        scale = np.abs(wide).mean()
        return Matrix(codes, masters, DenseLinear(np.clip(np.rint(wide / scale), -1, 1).astype(np.int8), float(scale)))
    divides = case.kind[0] == "bitlinear"
    stated = float32(np.array([1 / size if divides else size]), case.bf16)
    return Matrix(codes, stated, DenseLinear(codes, 1 / float(stated[0]) if divides else float(stated[0])))


@dataclass(frozen=True)
class Pair:
    """One model in transformers and in this package."""

    theirs: Any  # a BitNetForCausalLM in float32
    model: Model
    definition: Any  # for spec.forward, with scales in float64: they need not be float32 numbers


def build(hf: "Transformers", case: Case) -> Pair:
    rng, c = np.random.default_rng([case.seed, 1]), case.config
    theirs = hf.empty_model(case)
    modules = dict(theirs.named_modules())

    def give(module: str, values: NDArray[np.float32]) -> NDArray[np.float32]:
        hf.set(modules[module].weight, values)
        return values

    def table() -> NDArray[np.float32]:
        return float32(rng.standard_normal((c.vocab, c.width)), case.bf16)

    def norm(n: int) -> NDArray[np.float32]:
        return float32(rng.normal(1, 0.3, n), case.bf16)

    q, kv = c.q_width, c.kv_width
    shapes = dict(
        zip(MATRICES, [(q, c.width), (kv, c.width), (kv, c.width), (c.width, q), *[(c.ffn, c.width)] * 2, (c.width, c.ffn)], strict=True)
    )
    layers, wide = [], []
    for n in range(c.n_layers):
        path = {field: f"model.layers.{n}.{name}" for field, name in MODULES.items()}
        matrices = {name: matrix(rng, case, *shape) for name, shape in shapes.items()}
        for name, drawn in matrices.items():
            hf.set_linear(modules[path[name]], drawn)
        norms: dict[str, Any] = {name: give(path[name], norm(size)) for name, size in zip(NORMS, (c.width, q, c.width, c.ffn), strict=True)}
        packed: dict[str, Any] = {name: Linear(packing.pack(drawn.ours.matrix, drawn.ours.scale)) for name, drawn in matrices.items()}
        layers.append(Layer(**norms, **packed))
        wide.append(replace(dense_view(layers[-1]), **{name: drawn.ours for name, drawn in matrices.items()}))
    embedding = give("model.embed_tokens", table())
    model = Model(
        config=c,
        token_embd=embedding,
        layers=tuple(frozen(layer) for layer in layers),
        output_norm=give("model.norm", norm(c.width)),
        rope_frequency=rope_frequencies(c.rope_base, c.head_dim),
        output=None if case.tied else give("lm_head", table()),
    )
    return Pair(theirs, frozen(model), replace(dense_view(model), layers=tuple(wide)))


# --- theirs ---------------------------------------------------------------------------------------------------------------------------


class Float64:
    """torch with float64 in place of float32."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.float32 = self.float = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)


class Transformers:
    """The part of torch and transformers that is used here. The constructor imports them."""

    def __init__(self) -> None:
        try:
            self.torch: Any = importlib.import_module("torch")
            self.transformers: Any = importlib.import_module("transformers")
            self.modeling: Any = importlib.import_module("transformers.models.bitnet.modeling_bitnet")
            self.linears: Any = importlib.import_module("transformers.integrations.bitnet")
        except ImportError as error:
            raise UnsupportedError(f"cross-validation needs torch and transformers: pip install torch transformers ({error})") from None
        self.transformers.utils.logging.disable_progress_bar()
        self.torch.compiler.set_stance("force_eager")  # otherwise some of BitLinear is compiled, which takes minutes

    @property
    def versions(self) -> str:
        return f"transformers {self.transformers.__version__}, torch {self.torch.__version__}"

    def empty_model(self, case: Case) -> Any:
        """A model of the case's shape with transformers' quantised linears. Its weights are not set."""
        c, (linear_class, mode) = case.config, case.kind
        config = self.transformers.BitNetConfig(
            vocab_size=c.vocab,
            hidden_size=c.width,
            intermediate_size=c.ffn,
            num_hidden_layers=c.n_layers,
            num_attention_heads=c.heads,
            num_key_value_heads=c.kv_heads,
            hidden_act=c.activation,
            max_position_embeddings=c.context,
            rms_norm_eps=c.eps,
            rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
            tie_word_embeddings=case.tied,
            bos_token_id=1,
            eos_token_id=2,
            attn_implementation="eager",
        )
        quantization = self.transformers.BitNetQuantConfig(linear_class=linear_class, quantization_mode=mode)
        model = self.transformers.BitNetForCausalLM(config)
        self.linears.replace_with_bitnet_linear(model, ["lm_head"], quantization)
        for module in model.modules():
            if isinstance(module, (self.linears.BitLinear, self.linears.AutoBitLinear)):
                module.to_empty(device="cpu")
        model.tie_weights()
        return model.eval()

    def save(self, model: Any, kind: tuple[str, str], folder: Path) -> None:
        """Write a folder in the form of published checkpoints of this kind. It saves a copy: saving changes the model."""
        model = deepcopy(model)
        state = model.state_dict()
        for name, module in model.named_modules():
            if isinstance(module, self.linears.AutoBitLinear) and not module.online_quant:
                state[name + ".weight"] = self.linears.pack_weights(module.weight.data)
        model.config.quantization_config = {"quant_method": "bitnet", "linear_class": kind[0], "quantization_mode": kind[1]}
        model.save_pretrained(folder, state_dict=state)

    def set(self, tensor: Any, values: NDArray) -> None:
        """Copy values into a parameter or buffer, without broadcasting."""
        if tuple(tensor.shape) != values.shape:
            raise UnsupportedError(f"transformers has a weight of shape {list(tensor.shape)}, expected {list(values.shape)}")
        with self.torch.no_grad():
            tensor.copy_(self.torch.from_numpy(values.copy()))

    def set_linear(self, module: Any, matrix: Matrix) -> None:
        if getattr(module, "online_quant", False):
            self.set(module.weight, matrix.stated)
            return
        packed = self.linears.pack_weights(self.torch.from_numpy(matrix.codes.copy()))
        if isinstance(module, self.linears.BitLinear):
            self.set(module.weight, packed.numpy())
        else:  # like transformers' loader
            self.set(module.weight, self.linears.unpack_weights(packed, dtype=module.weight.dtype).numpy())
        self.set(module.weight_scale, matrix.stated)

    @contextmanager
    def strict(self, model: Any) -> Iterator[None]:
        """Run with float64 for every float32, in the model and in transformers' source."""
        torch = self.torch
        wide = Float64(torch)
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(self.modeling, "torch", wide))
            stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
            model.double()
            for module in model.modules():
                if isinstance(module, self.linears.BitLinear):
                    module.dtype = torch.float64
            rotary = model.model.rotary_emb
            rotary.inv_freq = rotary.compute_default_rope_parameters(model.config)[0]
            if rotary.inv_freq.dtype != torch.float64:
                raise UnsupportedError("this transformers works out RoPE's frequencies in another way than with its module's torch.float")
            yield

    def run(self, model: Any, tokens: NDArray) -> Points:
        """Every point that is a module's output or input, and rotated queries and keys, each [T, width]."""
        points: Points = {}

        def keep(key: Key, tensor: Any) -> None:
            points[key] = tensor.detach().reshape(len(tokens), -1).numpy().copy()

        def after(key: Key) -> Callable[..., None]:
            return lambda module, inputs, output: keep(key, output[0] if isinstance(output, tuple) else output)

        def before(key: Key) -> Callable[..., None]:
            return lambda module, inputs: keep(key, inputs[0])

        rotate = self.modeling.apply_rotary_pos_emb
        layers = iter(range(model.config.num_hidden_layers))

        def rotated(*arguments: Any, **options: Any) -> Any:
            q, k = rotate(*arguments, **options)  # [1, heads, T, K]
            layer = next(layers)
            keep(Key("Qcur_rope", layer), q.transpose(1, 2))
            keep(Key("Kcur_rope", layer), k.transpose(1, 2))
            return q, k

        handles = []
        for name, module in model.named_modules():
            key = labels.direct(name)
            if key:
                handles.append(module.register_forward_hook(after(key)))
                if key.name in BEFORE:
                    handles.append(module.register_forward_pre_hook(before(Key(BEFORE[key.name], key.layer))))
        try:
            with self.torch.no_grad(), mock.patch.object(self.modeling, "apply_rotary_pos_emb", rotated):
                model(input_ids=self.torch.from_numpy(tokens[None].astype(np.int64)), use_cache=False)
        finally:
            for handle in handles:
                handle.remove()
        return points


# --- the comparison -------------------------------------------------------------------------------------------------------------------


def near_tie(x: NDArray[np.float64]) -> NDArray[np.bool_]:  # [T, M] -> [T]
    """True for each row with a number that float64 may round to either of two int8 codes."""
    return np.logical_or.reduce(np.abs(np.abs(x * spec.quantize(x)[1]) % 1 - 0.5) <= TIE, axis=1)


def draw_tokens(case: Case, definition: Any) -> NDArray[np.int64]:
    """Random token ids. Those of the first half have no tie in the first layer, where ties of bfloat16 numbers are exact.

    The second half may have ties, because the comparison covers how float32 rounds them.
    """
    rng = np.random.default_rng([case.seed, 2])
    tokens = rng.integers(0, case.config.vocab, case.tokens)
    x = spec.rms_norm(definition.token_embd, definition.layers[0].attn_norm, case.config.eps)
    clear = np.flatnonzero(~near_tie(x))
    if clear.size:
        half = -(-case.tokens // 2)
        tokens[:half] = rng.choice(clear, half)
    return tokens


def recorded(forward: Callable[..., NDArray], *arguments: Any) -> tuple[NDArray, Points]:
    points: Points = {}
    logits = forward(*arguments, record=lambda name, layer, array: points.update({Key(name, layer): np.array(array)}))
    return logits, points


def compare_float64(ours: Points, theirs: Points) -> tuple[int, float, str]:
    """The number of positions that can be compared, the largest error as a part of the tensor's largest number, and a tensor.

    That is the first tensor with an error beyond rounding, else the one with the largest error.
    """
    expected = set(ours)
    if set(theirs) != expected:
        raise UnsupportedError(f"transformers gives other tensors than expected: {', '.join(sorted(map(str, expected ^ set(theirs))))}")
    length = len(ours[Key("inp_embd", None)])
    sure = np.ones(length, bool)
    for key in ours:
        if key.name in QUANTIZED:
            sure &= ~near_tie(ours[key])
    sure = np.logical_and.accumulate(sure)
    if not sure.any():
        return 0, 0.0, ""
    errors = {}
    for key, array in ours.items():
        own, other = array.reshape(length, -1)[sure], theirs[key][sure]
        if other.dtype != np.float64 or other.shape != own.shape:
            raise UnsupportedError(f"transformers' {key} is {other.dtype} {list(other.shape)}, expected float64 {list(own.shape)}")
        error = np.abs(own - other).max() / np.abs(own).max()
        errors[key] = float(error) if np.isfinite(error) else np.inf
    worst = max(errors, key=lambda key: errors[key])
    first = next((key for key, error in errors.items() if error > AGREEMENT), worst)  # in the order of the forward pass
    return int(sure.sum()), errors[worst], str(first)


def count_flips(ours: Points, theirs: Points) -> int:
    """Int8 codes of ours that differ from those of transformers' own float32 numbers, quantised in float32 in its order of operations."""
    flips = 0
    for key, x in theirs.items():
        if key.name in QUANTIZED:
            scale = np.float32(127) / np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(1e-5))
            flips += int((np.rint(x * scale) != ours[Key(key.name + "_codes", key.layer)]).sum())
    return flips


def validate(hf: Transformers, seed: int) -> Row:
    case = draw(seed)
    pair = build(hf, case)
    tokens = draw_tokens(case, pair.definition)
    theirs = hf.run(pair.theirs, tokens)
    logits, ours = recorded(forward_full, pair.model, tokens[None])
    other = theirs[Key("result_output", None)]
    report = judge_trace(pair.model, Trace(theirs, tokens, hf.versions), tokens)
    judgement = judge(logits[0], other)
    with tempfile.TemporaryDirectory() as name:
        hf.save(pair.theirs, case.kind, Path(name))
        saved = forward_full(load(name), tokens[None])

    with hf.strict(pair.theirs):
        strict = hf.run(pair.theirs, tokens)
    _, exact = recorded(spec.forward, pair.definition, tokens)
    positions, error, where = compare_float64(exact, strict)

    reasons = [report.reason] * (report.verdict >= Verdict.WRONG) + [judgement.reason] * (judgement.verdict >= Verdict.WRONG)
    if not np.array_equal(saved, logits):
        reasons.append(f"the saved folder gives other logits, by up to {np.abs(saved - logits).max():.2g}")
    if not positions:
        reasons.append("float64: every position comes after a tie, nothing could be compared")
    if error > AGREEMENT:
        reasons.append(f"float64: {where} is the first that differs, the largest error is {error:.2g} of a tensor's largest number")
    return Row(
        seed=seed,
        linears=" ".join(case.kind),
        shape=case.shape,
        tensors=len(report.operations),
        trace=report.verdict.name,
        logits=judgement.verdict.name,
        float32_error=float(np.abs(logits[0] - other).max() / logits.std()),
        flips=count_flips(ours, theirs),
        float64_positions=positions,
        float64_error=error,
        float64_tensor=where,
        reason="; ".join(reasons),
        passed=not reasons,
    )


HEADER = ("seed", "linears", "shape", "tensors", "trace", "logits", "max error", "flips", "float64: positions", "max error")
"""The first error is that of the logits, in their standard deviations. The second is the largest of all tensors, as a part of its largest
number."""


def line(row: Row, tokens: str) -> str:
    cells = (
        f"{row.seed:>4}",
        f"{row.linears:<21}",
        f"{row.shape:<52}",
        f"{row.tensors:>7}",
        f"{row.trace:<9}",
        f"{row.logits:<9}",
        f"{row.float32_error:>9.2g}",
        f"{row.flips:>5}",
        f"{row.float64_positions:>14}/{tokens:<3}",
        f"{row.float64_error:>9.1e}",
    )
    return "  ".join(cells) + (f"\n      {row.reason}" if row.reason else "")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=12, metavar="N", help="how many models (default 12)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--json", type=Path, metavar="F", help="write the results to this file")
    options = parser.parse_args(argv)
    try:
        if options.seeds < 1 or options.first < 0:
            raise OptionError(f"{options.seeds} seeds from {options.first} on, expected at least 1, from 0 on")
        hf = Transformers()
        print(hf.versions)
        widths = (4, 21, 52, 7, 9, 9, 9, 5, 18, 9)
        print("  ".join(f"{name:<{width}}" for name, width in zip(HEADER, widths, strict=True)))
        rows = []
        for seed in range(options.first, options.first + options.seeds):
            rows.append(validate(hf, seed))
            print(line(rows[-1], str(draw(seed).tokens)), flush=True)
    except Error as error:
        print(f"crossval_hf.py: {error}", file=sys.stderr)
        return 2
    if options.json:
        options.json.write_text(json.dumps({"versions": hf.versions, "seeds": [asdict(row) for row in rows]}, indent=2))
    failed = [row.seed for row in rows if not row.passed]
    compared = sum(row.float64_positions for row in rows)
    print(f"{len(rows) - len(failed)} of {len(rows)} models agree; {compared} positions compared in float64")
    if failed:
        print(f"disagreements: seeds {', '.join(map(str, failed))}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
