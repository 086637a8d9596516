"""Cross-validation with Hugging Face transformers, live: fresh random models of every family, as folders that both read.

It needs torch, transformers and accelerate. Each seed draws the weights of every model of tests/data/hf_families/configs.json, and of a
BitNet a shape, and one of the forms in which its checkpoints store ternary matrices, which transformers reads with its own quantised
linears (AutoBitLinear, BitLinear).

* float32: judge.dump.judge_trace judges every output of transformers' modules, each operation from transformers' own inputs, and
  judge.logits.judge judges the logits. Rounding and flipped int8 codes pass; WRONG and INVALID do not. Where no activation is rounded to
  int8, the logits must be the kernels' to 2e-6 of the largest.
* strict float64: the logits must equal spec.forward's to 1e-10 of the largest. That holds up to the first position with an activation
  within 1e-9 of an int8 rounding boundary, where either code is right.
* the folder that transformers saves gives the bits of the first one. (It does not save unpacked matrices, "autobitlinear offline".)

    python scripts/recorders/crossval_hf.py --seeds 4
    python scripts/recorders/crossval_hf.py --only bitnet --seeds 12
    python scripts/recorders/crossval_hf.py --first 7 --record tests/data/hf_families
    python scripts/recorders/crossval_hf.py --gradients tests/data/hf_gradients
    python scripts/recorders/crossval_hf.py --demo tests/data/demo

Exit status: 0 all agree, 1 a disagreement, 2 nothing could be compared. `--record` writes <name>.gguf and <name>.npz of each model of the
first seed, with `tokens` [B, T], `logits_f32` and `logits_f64` of transformers; not of BitNet. `--gradients` records those that torch
computes for models in training, master weights in AutoBitLinear: <name>.npz has `tokens` [T], the `loss` (mean next-token cross-entropy),
the model's `config` as JSON, and by GGUF's names `parameters/<tensor>`, float32, and `gradients/<tensor>`, strict float64. `--demo` records
what transformers computes for the embedded demo model: transformers.npz has `text`, its `tokens` [T], `logits_f32` and `logits_f64` [T, V].
"""

import argparse
import json
import sys
import tempfile
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from exact_folder import exact_view
from hf_engine import Transformers
from numpy.typing import NDArray

from bitnet_np import Model, spec
from bitnet_np.base.errors import Error, UnsupportedError
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.files import embedded
from bitnet_np.files.convert import convert
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.files.hf_model_types import HF_MODULES
from bitnet_np.files.load import Source, load
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.measures import judge
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.families import FAMILIES, NORMS
from bitnet_np.model.records import MATRICES, Activation, Config
from bitnet_np.testing.hf_files import folder_model, write_folder, write_hf
from bitnet_np.text.tokenizer import tokenizer_from
from bitnet_np.traces.points import Trace
from bitnet_np.training.gradients import parameter_shapes

KINDS = (  # linear_class, quantization_mode
    ("autobitlinear", "online"),  # master weights, quantised in every forward pass: ternary times their mean magnitude
    ("bitlinear", "offline"),  # packed -1, 0, +1; divided by weight_scale
    ("autobitlinear", "offline"),  # -1, 0, +1; multiplied by weight_scale
)
BITNET = "bitnet"
CONFIGS = json.loads((Path(__file__).parents[2] / "tests" / "data" / "hf_families" / "configs.json").read_text("utf-8"))
PADDING = {"pad_token_id": 0}  # some types have one that is beyond a small vocabulary
CONTEXT = {"context": 64}  # LongRoPE's must be declared
TIE = 1e-9
AGREEMENT, AGREEMENT_F32 = 1e-10, 2e-6
TEXT = "Once upon a time there was a brave girl named Lily. She had a red kite.\nQ: What color was the kite?\nA:"
"""What the demo model reads."""


def config_json(c: Config, kind: tuple[str, str], tied: bool) -> dict[str, Any]:
    """The config.json of a BitNet whose linears are of this kind."""
    sizes = {"vocab_size": c.vocab, "hidden_size": c.width, "intermediate_size": c.ffn, "num_hidden_layers": c.n_layers}
    sizes |= {"num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "head_dim": c.head_dim}
    return sizes | {
        "model_type": "bitnet",
        "architectures": ["BitNetForCausalLM"],
        "hidden_act": c.activation,
        "max_position_embeddings": c.context,
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope_base,
        "tie_word_embeddings": tied,
        "quantization_config": {"quant_method": "bitnet", "linear_class": kind[0], "quantization_mode": kind[1]},
    }


def draw(seed: int) -> dict[str, Any]:
    """The config.json of a seed: kinds and head sharing take turns; widths, lengths and constants are random."""
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
        activation="relu2",
    )
    return config_json(config, KINDS[seed % 3], bool(seed // 3 % 2))


# --- the comparison -------------------------------------------------------------------------------------------------------------------


def near_tie(x: NDArray[np.float64]) -> NDArray[np.bool_]:  # [T, M] -> [T]
    """True for each row with a number that float64 may round to either of two int8 codes."""
    return np.logical_or.reduce(np.abs(np.abs(x * spec.quantize(x)[1]) % 1 - 0.5) <= TIE, axis=1)


def draw_tokens(seed: int, definition: Any) -> NDArray[np.int64]:
    """Random token ids. Those of the first half have no tie in the first layer, where ties of bfloat16 numbers are exact.

    The second half may have ties, because the comparison covers how float32 rounds them.
    """
    rng = np.random.default_rng([seed, 2])
    tokens = rng.integers(0, definition.config.vocab, int(rng.choice([17, 40, 64, 65, 100, 128])))
    x = spec.rms_norm(definition.token_embd, definition.layers[0].attn_norm, definition.config.eps)
    clear = np.flatnonzero(~near_tie(x))
    if clear.size:
        half = -(-len(tokens) // 2)
        tokens[:half] = rng.choice(clear, half)
    return tokens


def compare_float64(definition: Any, tokens: NDArray[np.int64], theirs: NDArray, ternary: bool) -> tuple[int, float]:
    """The number of positions that can be compared, and the largest error of their logits [T, V] as a part of the largest logit."""
    if theirs.dtype != np.float64:
        raise UnsupportedError(f"transformers' logits are {theirs.dtype}, expected float64")
    ties = np.zeros(len(tokens), bool)

    def look(name: str, layer: int | None, array: NDArray) -> None:
        if ternary and name in NORMS:  # the inputs of ternary matrices
            ties[:] |= near_tie(array)

    ours = spec.forward(definition, tokens, record=look)
    sure = ~np.logical_or.accumulate(ties)
    errors = np.abs(ours - theirs)[sure] / np.abs(ours).max()
    return int(sure.sum()), float(np.nan_to_num(errors, nan=np.inf).max(initial=0))


def validate(hf: Transformers, name: str, seed: int, target: Path | None) -> tuple[str, list[str]]:
    """The line of a model, and what disagrees. target: where to record, without the ending of its files."""
    ternary = name == BITNET
    config, floats = (draw(seed), "BF16" if seed % 2 else "F32") if ternary else (CONFIGS[name] | PADDING, "F32")  # BF16: ties are exact
    overrides = {} if ternary else CONTEXT
    with tempfile.TemporaryDirectory() as scratch:
        folder, saved = Path(scratch), Path(scratch) / "saved"
        write_hf(folder, config, folder_model(config, seed), floats=floats)
        model = load(folder, overrides=overrides)
        definition = exact_view(folder, model)
        if ternary:
            tokens = draw_tokens(seed, definition)[None]
        else:
            tokens = np.random.default_rng([seed, 1]).integers(0, model.config.vocab, (2, 24))
        ours, opened = forward_full(model, tokens), hf.open(folder)
        single, points = hf.logits(opened, tokens), hf.points(opened, tokens[0])
        again = ours
        if not ternary or kind_of(config) != KINDS[2]:
            opened.save_pretrained(saved)
            again = forward_full(load(saved, overrides=overrides), tokens)
        with hf.strict(folder) as strict:
            exact = hf.logits(strict, tokens)
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_recording(target, model)
            np.savez_compressed(target.with_suffix(".npz"), tokens=tokens, logits_f32=single, logits_f64=exact)
    report = judge_trace(model, Trace(points, tokens[0], hf.versions), tokens[0])
    worst = max((judge(a, b) for a, b in zip(ours, single, strict=True)), key=lambda judgement: judgement.verdict)
    compared = [compare_float64(definition, *each, ternary) for each in zip(tokens, exact, strict=True)]
    positions, wide = min(count for count, _ in compared), max(error for _, error in compared)
    narrow = float(np.abs(ours - single).max() / np.abs(exact).max())
    reasons = [judged.reason for judged in (report, worst) if judged.verdict >= Verdict.WRONG]
    reasons += [f"the saved folder gives other logits, by up to {np.abs(again - ours).max():.2g}"] * (not np.array_equal(again, ours))
    reasons += ["float64: every position comes after a tie, nothing could be compared"] * (not positions)
    reasons += ["float64 disagrees"] * (not wide <= AGREEMENT) + ["float32 disagrees"] * (not (ternary or narrow <= AGREEMENT_F32))
    c, form = model.config, " ".join([name, *(kind_of(config) if ternary else ())])
    shape = f"V{c.vocab} L{c.n_layers} heads {c.heads}/{c.kv_heads}x{c.head_dim} F{c.ffn} {floats}"
    judged = f"{len(report.operations):>3} tensors {report.verdict.name}, logits {worst.verdict.name} {narrow:.1e}"
    return f"{seed:>4}  {form:<28}  {shape:<39}  {judged}; float64: {positions} positions, {wide:.1e}", reasons


def kind_of(config: dict[str, Any]) -> tuple[str, str]:
    """The member of KINDS that a BitNet's config.json says."""
    return config["quantization_config"]["linear_class"], config["quantization_config"]["quantization_mode"]


# --- recordings -----------------------------------------------------------------------------------------------------------------------


def write_recording(target: Path, model: Model) -> None:
    """Write the model's GGUF file. GGUF has no setting for transformers' exact GELU of gptneox: set it after loading."""
    c = model.config
    activation = FAMILIES[c.architecture].config.get("activation", c.activation)
    source = SimpleNamespace(path=target, metadata={"tokenizer.ggml.model": "none"})
    convert(replace(model, config=replace(c, activation=activation)), target.with_suffix(".gguf"), cast(Source, source))


_TRAINED: dict[str, tuple[str, Activation, bool]] = {  # architecture, activation, whether the head is the embedding
    "relu2_tied": ("bitnet-b1.58", "relu2", True),
    "silu_untied": ("bitnet", "silu", False),
}
_SHAPE: dict[str, Any] = {"width": 16, "ffn": 12, "heads": 4, "kv_heads": 2, "head_dim": 4, "vocab": 23, "context": 64, "n_layers": 2}


def module_of(tensor: str) -> str:
    """A GGUF tensor's module in transformers."""
    ends = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
    parts = tensor.removesuffix(".weight").split(".")
    modules = {field: HF_MODULES[field] for field in (*NORMS, *MATRICES)}
    return ends[parts[0]] if len(parts) == 1 else f"model.layers.{parts[1]}.{modules[parts[2]]}"


def record_gradients(hf: Transformers, name: str, path: Path) -> None:
    """Write <path>, the gradients of a small random model."""
    architecture, activation, tied = _TRAINED[name]
    config, rng = Config(architecture, eps=1e-5, rope_base=100.0, activation=activation, **_SHAPE), np.random.default_rng(5)
    recording: dict[str, NDArray] = {"tokens": rng.integers(0, config.vocab, 16), "config": np.array(json.dumps(asdict(config)))}
    shapes = parameter_shapes(config, tied)
    for tensor, shape in shapes.items():
        drawn = rng.normal(1, 0.3, shape) if len(shape) == 1 else rng.normal(size=shape) / shape[1] ** 0.5
        recording[f"parameters/{tensor}"] = drawn.astype(np.float32)
    weights = {f"{module_of(tensor)}.weight": recording[f"parameters/{tensor}"] for tensor in shapes}
    with tempfile.TemporaryDirectory() as folder:
        write_folder(Path(folder), config_json(config, KINDS[0], tied), weights)
        with hf.strict(Path(folder)) as model:
            modules, tokens = dict(model.named_modules()), hf.torch.from_numpy(recording["tokens"])
            logits = model(input_ids=tokens[None], use_cache=False).logits[0]
            loss = hf.torch.nn.functional.cross_entropy(logits[:-1], tokens[1:])
            loss.backward()
    if loss.dtype != hf.torch.float64:
        raise UnsupportedError(f"{name}: transformers' loss is {loss.dtype}, expected float64")
    gradients = {f"gradients/{tensor}": modules[module_of(tensor)].weight.grad.numpy() for tensor in shapes}
    np.savez_compressed(path, **recording, loss=np.array(loss.item()), **gradients)  # type: ignore[arg-type]
    print(f"{path}: loss {loss.item():.6f}, {hf.versions}")


def record_demo(hf: Transformers, path: Path) -> None:
    """Write <path>, the logits of the embedded demo model."""
    with embedded.demo_path() as source, tempfile.TemporaryDirectory() as name:
        model, tokenizer = load(source), tokenizer_from(open_gguf(source).metadata, source)
        tokens = np.array(tokenizer.encode(TEXT))
        folder = write_hf(Path(name), config_json(model.config, KINDS[2], model.output is None), model, floats="F32")
        single = hf.logits(hf.open(folder), tokens[None])[0]
        with hf.strict(folder) as theirs:
            strict = hf.logits(theirs, tokens[None])[0]
    np.savez(path, text=np.array(TEXT), tokens=tokens, logits_f32=single, logits_f64=strict)
    print(f"{path}: {hf.versions}, |float32 - float64| at most {np.abs(single - strict).max():.2g}")


def main(argv: list[str] | None = None) -> int:
    names = (BITNET, *CONFIGS)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="models of each kind (default 1)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--only", nargs="*", default=names, metavar="NAME", choices=names, help=f"some of {', '.join(names)}")
    recording = parser.add_mutually_exclusive_group()
    recording.add_argument("--record", type=Path, metavar="FOLDER", help="record the models of the first seed there")
    recording.add_argument("--gradients", type=Path, metavar="FOLDER", help="record gradients there, and compare nothing")
    recording.add_argument("--demo", type=Path, metavar="FOLDER", help="record the demo model's logits there, and compare nothing")
    options = parser.parse_args(argv)
    agree = total = 0
    try:
        hf = Transformers()
        print(hf.versions)
        if options.demo:
            record_demo(hf, options.demo / "transformers.npz")
        if options.gradients:
            for name in _TRAINED:
                record_gradients(hf, name, options.gradients / f"{name}.npz")
        if options.demo or options.gradients:
            return 0
        for name in options.only:
            for seed in range(options.first, options.first + options.seeds):
                recorded = options.record and seed == options.first and name != BITNET
                text, reasons = validate(hf, name, seed, options.record / name if recorded else None)
                agree, total = agree + (not reasons), total + 1
                print(text, *reasons, sep="\n      ", flush=True)
    except Error as error:
        print(f"crossval_hf.py: {error}", file=sys.stderr)
        return 2
    print(f"{agree} of {total} models agree")
    return 0 if agree == total > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
