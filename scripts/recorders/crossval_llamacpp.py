"""Cross-validation with llama.cpp, live: random models of every architecture and tensor type, converted, computed by both.

llama.cpp runs in this process (llama-cpp-python, at least 0.3.36) in its plainest way: one thread, no flash attention, a float32 KV cache,
weights not repacked. Every tensor of its graph that is a point of ours is judged from its own inputs in the dialect llama.cpp. The table
also counts the positions whose logits agree end to end, to 5e-6 of the largest logit: those before the first activation that rounds to
another code. A model passes if no tensor is WRONG or INVALID.

    python scripts/recorders/crossval_llamacpp.py --seeds 12
    python scripts/recorders/crossval_llamacpp.py --types all --archs llama,gptneox
    python scripts/recorders/crossval_llamacpp.py --record tests/data/llamacpp_families

`--record` writes a tiny model of each family instead: <name>.gguf, as `convert` writes it, and <name>.npz with `tokens` [T] and the tensors
of the graph that are points of ours, by label.
"""

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_np import LLAMA_CPP, Error, Model, forward_full
from bitnet_np.base.errors import OptionError
from bitnet_np.base.tensor_types import ALL_BLOCK_TYPES, PQ2_0, TERNARY_TYPES
from bitnet_np.files.convert import convert
from bitnet_np.files.load import load, open_model
from bitnet_np.judge.dump import judge_trace
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.families import FAMILIES, windowed_layers
from bitnet_np.model.records import LongRope, Yarn, window_fields
from bitnet_np.model.rope import yarn_magnitude
from bitnet_np.testing.models import random_model, write_gguf
from bitnet_np.traces.points import Key, Trace

sys.path.append(str(Path(__file__).parents[1]))  # for a run by its path

from judging.llama_cpp import LlamaCpp, Points, points
from judging.workers import add_cluster_arguments, over_workers

MIXTRAL = "mixtral"
"""The architecture llama with experts."""
ARCHITECTURES = (*(name for name in FAMILIES if name not in ("bitnet-b1.58", "bitnet-25")), MIXTRAL)  # llama.cpp does not know these two
BITNETS = tuple(name for name, family in FAMILIES.items() if family.ternary)
TERNARY = tuple(kind.name for kind in TERNARY_TYPES)
TYPES = ("float32", "float16", "bfloat16", *(kind.name for kind in ALL_BLOCK_TYPES if kind is not PQ2_0))
AGREEMENT = 5e-6


class Outcome(NamedTuple):
    """The result of one model."""

    text: str
    positions: int  # those of the tokens whose logits agree to AGREEMENT
    tokens: int
    wrong: str  # the reason of a verdict that is an alarm; empty if it is none


# --- ours -----------------------------------------------------------------------------------------------------------------------------


def draw(seed: int, architecture: str, kind: str) -> tuple[Model, NDArray[np.int64]]:
    """A random model that llama.cpp can load, and tokens for it."""
    rng = np.random.default_rng([seed, ARCHITECTURES.index(architecture), TYPES.index(kind)])
    mixtral, architecture = architecture == MIXTRAL, "llama" if architecture == MIXTRAL else architecture
    family = FAMILIES[architecture]
    kv_heads, head_dim = int(rng.choice([1, 2, 4])), int(rng.choice([32, 64]))
    heads = kv_heads * int(rng.choice([1, 2, 4]))
    if heads * head_dim % 256:
        heads, head_dim = 8 * max(1, heads // 8), 32
        kv_heads = min(kv_heads, heads)
    if "attn_qkv" in family.fused:
        kv_heads = heads  # llama.cpp's graphs of these have no grouped heads
    shape: dict[str, Any] = {
        "width": heads * head_dim,
        "heads": heads,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "ffn": 256 * int(rng.integers(1, 4)),
        "n_layers": int(rng.integers(1, 4)),
        "vocab": int(rng.integers(40, 300)),
        "context": 128,
        "rope_base": float(rng.choice([10000.0, 500000.0])),
        "eps": float(np.float32(rng.choice([1e-5, 1e-6]))),
    }
    if seed % 5:
        shape["pooling"] = ("none", "mean", "cls", "last")[seed % 5 - 1]
    if mixtral or "experts" in family.required:
        shape["experts"] = int(rng.integers(2, 9))
        shape["experts_used"] = int(rng.integers(1, shape["experts"] + 1))
    if family.rope_period:
        shape["n_layers"] += family.rope_period - 1
    if family.partial_rope:
        shape["rope_width"] = head_dim // 2 if seed % 2 else None
    if family.chooses_residual:
        shape["parallel_residual"] = bool(seed // 2 % 2)
    if family.scaling and family.config["rope"] != "none":
        shape["rope_scaling"] = float(rng.choice([1.0, 2.0, 8.0]))
        if family.local_rope:
            shape["n_layers"] = 7
        if family.local_rope_base is not None:
            shape["local_rope_base"] = [10000.0, 100.0][seed % 2]
        elif family.longrope and seed % 4 == 3:  # llama.cpp's cache holds more than 16 tokens and fewer than 4096
            pairs = (shape.get("rope_width") or head_dim) // 2
            lists = rng.uniform(1, 8, (2, pairs)).astype(np.float32).tolist()
            longrope = LongRope(int(rng.choice([16, 4096])), tuple(lists[0]), tuple(lists[1]))
            shape |= {"rope_scaling": 1.0, "longrope": longrope, "rope_magnitude": float(rng.choice([1.0, 1.25]))}
        elif seed % 3 == 2:
            yarn = Yarn(2 * shape["rope_scaling"], 16, fast=8.0)
            shape |= {"rope_scaling": 1.0, "yarn": yarn, "rope_magnitude": yarn_magnitude(yarn.factor) * (1.25 if seed % 2 else 1.0)}
    if family.local_rope and family.local_rope_base is None and seed % 4:  # OLMo 3's windows; OLMo 2 has none
        shape |= window_fields(20, windowed_layers(architecture, 7), 7)
    table = kind if kind not in TERNARY else "float16"
    model = random_model(
        seed, family=architecture, weights=kind, table=table, tied=architecture in ("bitnet", "gpt2", "gemma", "gemma2"), **shape
    )
    return _readable(model), rng.integers(0, model.config.vocab, int(rng.choice([2, 17, 40, 70])))


def _readable(model: Model) -> Model:
    """The model without the bias of GPT-NeoX's head, which llama.cpp does not read."""
    return replace(model, output_bias=None) if model.config.architecture == "gptneox" else model


# --- recordings -----------------------------------------------------------------------------------------------------------------------

_SHAPE: dict[str, Any] = {"width": 32, "ffn": 32, "heads": 2, "kv_heads": 1, "head_dim": 16, "vocab": 32, "context": 64, "n_layers": 2}
_TOKENS = np.array([3, 17, 3, 30, 8], np.int64)
_YARN: dict[str, Any] = {"yarn": Yarn(4.0, 16, fast=8.0), "rope_magnitude": yarn_magnitude(4.0)}
_LONGROPE: dict[str, Any] = {"longrope": LongRope(16, (2.0,) * 8, tuple(1.0 + i for i in range(8))), "rope_magnitude": 1.25}
RECORDED: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2": ("qwen2", _YARN),
    "qwen3": ("qwen3", {"pooling": "last"}),
    "qwen2moe": ("qwen2moe", {"experts": 3}),
    "qwen3moe": ("qwen3moe", {"experts": 3}),
    "mixtral": ("llama", {"experts": 3, "experts_used": 2}),
    "phi3_longrope": ("phi3", _LONGROPE),
    "smollm3": ("smollm3", {"n_layers": 4}),
    "granite": ("granite", {"pooling": "cls"}),
    "minicpm": ("minicpm", {"rope_scaling": 2.0}),
    "olmo2": ("olmo2", {}),
    "gemma": ("gemma", {"pooling": "mean", "tied": True}),
    "gemma2": ("gemma2", {"window": 3, "tied": True}),
    "gemma3": ("gemma3", {"window": 3, "n_layers": 6, "window_layers": tuple(range(5)), "rope_scaling": 4.0}),
    "gptneox": ("gptneox", {"kv_heads": 2, "rope_width": 8, "parallel_residual": True}),
    "gpt2": ("gpt2", {"kv_heads": 2, "tied": True}),
    "starcoder2": ("starcoder2", {"tied": True}),
    "olmo3": ("olmo2", _YARN | {"window": 3, "n_layers": 4, "window_layers": tuple(range(3))}),
    "phi2": ("phi2", {"rope_width": 8}),
    "stablelm": ("stablelm", {"rope_width": 8}),
}
"""The recordings: the family of each, and what its model has beside _SHAPE."""


def record(name: str, folder: Path) -> None:
    """Write <name>.gguf and <name>.npz."""
    family, options = RECORDED[name]
    shape = _SHAPE | {"tied": False, "table": "float16" if options.get("tied") else "Q8_0"} | options
    drawn = _readable(random_model(list(RECORDED).index(name), family=family, weights="Q8_0", **shape))
    _, theirs = both(drawn, _TOKENS, folder / f"{name}.gguf")
    tensors = {str(key): array for key, array in theirs.items()}
    np.savez_compressed(folder / f"{name}.npz", tokens=_TOKENS, **tensors)  # type: ignore[arg-type]
    print(f"{name}: {len(tensors)} tensors")


# --- the comparison -------------------------------------------------------------------------------------------------------------------


engine = lru_cache(LlamaCpp)  # one for each process, because a library cannot be sent


def validate(case: tuple[int, str, str]) -> Outcome:
    """The outcome of the model of a seed, an architecture and a type of weights."""
    seed, architecture, kind = case
    drawn, tokens = draw(seed, architecture, kind)
    with tempfile.TemporaryDirectory() as folder:
        model, theirs = both(drawn, tokens, Path(folder) / f"{architecture}-{kind}-{seed}.gguf")
        report = judge_trace(model, Trace(theirs, tokens, engine().version), tokens, LLAMA_CPP)
        ours = forward_full(model, tokens[None], dialect=LLAMA_CPP)[0]
    logits = theirs[Key("result_output", None)]
    errors = np.abs(ours - logits).max(axis=1) / np.abs(logits).max()
    agree = errors <= AGREEMENT
    c, error = model.config, float(errors[agree].max(initial=0))
    shape = f"L{c.n_layers} heads {c.heads}/{c.kv_heads}x{c.head_dim} F{c.ffn} V{c.vocab}"
    judged = f"{len(report.operations):>4} tensors  {report.verdict.name:<9}"
    text = f"{seed:>4}  {architecture:<8}  {kind:<8}  {shape:<30}  {judged}  {agree.sum():>3}/{len(tokens):<3} positions  {error:>8.1e}"
    return Outcome(text, int(agree.sum()), len(tokens), report.reason if report.verdict >= Verdict.WRONG else "")


def both(drawn: Model, tokens: NDArray[np.int64], path: Path) -> tuple[Model, Points]:
    """The model of the file at `path`, which is written as `convert` does, and llama.cpp's tensors and logits of it."""
    declared = {"context": drawn.config.context}  # LongRoPE's must be
    with tempfile.TemporaryDirectory() as scratch:
        source = Path(scratch) / "source.gguf"
        write_gguf(source, drawn, fused=False)
        convert(load(source, overrides=declared), path, open_model(source))
    model = load(path, overrides=declared)
    logits, nodes = engine().run(path, tokens, pooled=model.config.pooling != "none")
    return model, points(model.config, nodes, len(tokens)) | {Key("result_output", None): logits}


def _chosen(option: str, text: str, known: Sequence[str]) -> list[str]:
    names = list(known) if text == "all" else text.split(",")
    for name in names:
        if name not in known:
            raise OptionError(f"{option} has {name!r}, expected all or some of {', '.join(known)}")
    return names


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="models of each architecture and type (default 1)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--archs", default="all", metavar="llama,...", help=f"all (default) or some of {', '.join(ARCHITECTURES)}")
    parser.add_argument("--types", default="all", metavar="Q4_K,...", help=f"all (default) or some of {', '.join(TYPES)}")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="record a model of each family there, and compare nothing")
    add_cluster_arguments(parser)
    options = parser.parse_args(argv)
    rows = []
    try:
        if options.seeds < 1 or options.first < 0:
            raise OptionError(f"{options.seeds} seeds from {options.first} on, expected at least 1, from 0 on")
        architectures, types = _chosen("--archs", options.archs, ARCHITECTURES), _chosen("--types", options.types, TYPES)
        print(engine().version)
        if options.record:
            for name in RECORDED:
                record(name, options.record)
            return 0
        seeds = range(options.first, options.first + options.seeds)
        drawn = [case for case in product(seeds, architectures, types) if case[2] in TERNARY or case[1] not in BITNETS]
        with over_workers(options) as spread:
            for row in spread(validate, drawn):
                rows.append(row)
                print(row.text, *filter(None, [row.wrong]), sep="\n      ", flush=True)
    except Error as error:
        print(f"crossval_llamacpp.py: {error}", file=sys.stderr)
        return 2
    failed = [row for row in rows if row.wrong]
    positions, tokens = sum(row.positions for row in rows), sum(row.tokens for row in rows)
    print(f"{len(rows) - len(failed)} of {len(rows)} models agree; {positions} of {tokens} positions to {AGREEMENT:g}")
    return 1 if failed or not rows else 0


if __name__ == "__main__":
    import crossval_llamacpp  # workers find functions by their module's name, which is not __main__ there

    raise SystemExit(crossval_llamacpp.main())
