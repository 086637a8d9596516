"""The worth of verdicts on logits alone: honest engines and faulty ones on random models, by the fixed and by the measured limit.

The engine is judging/engine.py: float32 NumPy, or with bitnet.cpp's float16 roundings, which the judge is not told about.
"""

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from typing import Any

import numpy as np
from judging.engine import Engine, Floats, accumulate, embedded_model, f32, float16, precise
from judging.faults import LAYER, Step, faults, silu, truncated
from judging.workers import add_cluster_arguments, over_workers
from numpy.typing import NDArray
from tqdm import tqdm

from bitnet_np import Model, check
from bitnet_np.engine.forward_pass import forward_full
from bitnet_np.judge.measures import judge
from bitnet_np.judge.verdict import Verdict
from bitnet_np.model.records import Ternary
from bitnet_np.testing.models import random_model
from bitnet_np.traces.points import Key

Make = Callable[[Model, NDArray[np.int64]], Floats]
LOGITS = Key("result_output", None)
SHAPES: tuple[tuple[int, int, int], ...] = (
    (2, 128, 16),
    (2, 64, 4),
    (3, 256, 17),
    (6, 256, 17),
    (12, 256, 16),
    (12, 256, 40),
    (24, 192, 8),
    (30, 256, 16),
)
SHAPES += ((30, 128, 64), (30, 128, 1))
"""Layers, width, tokens."""


@dataclass
class Quantizer(Engine):
    """An engine with another quantiser."""

    most: float = 127
    rounded: Callable[[Floats], Floats] = field(default=np.rint)
    axis: int | None = 1

    def quantized(self, x: Floats) -> tuple[Floats, Floats]:
        scale = f32(self.most) / np.maximum(f32(1e-5), np.abs(x).max(axis=self.axis, keepdims=True))
        return self.rounded(x * scale), np.broadcast_to(scale, (len(x), 1))


def engine(kind: type[Engine] = Engine, **how: object) -> Make:
    return lambda model, tokens: kind(model, tokens, **how).run()[LOGITS]  # type: ignore[arg-type]


def times(name: str, source: str, field_name: str, factor: float) -> dict:
    """A fault for Engine: a scale wrong by this factor in every layer."""
    return {name: lambda e, n: e.linear(e.at(source, n), getattr(e.model.layers[n], field_name).weights) * f32(factor)}


def unscaled_values(e: Engine, n: int) -> Floats:
    weights = e.model.layers[n].attn_v.weights
    assert isinstance(weights, Ternary)
    return e.linear(e.at("attn_norm", n), weights) / weights.scale


def honest() -> Iterator[tuple[str, Make]]:
    for in_float16 in (False, True):
        kind = "bitnet.cpp's float16" if in_float16 else "float32"
        yield f"{kind}, BLAS", engine(in_float16=in_float16)
        yield f"{kind}, rounded once", engine(in_float16=in_float16, dot=precise)
        yield f"{kind}, sums of 8", engine(in_float16=in_float16, dot=accumulate(8))
    norm_names = {"attn_norm": None, "attn_sub_norm": "kqv_out", "ffn_norm": "ffn_inp", "ffn_sub_norm": "ffn_out"}

    def norm(name: str, source: str | None) -> Callable[[Engine, int], Floats]:
        return lambda e, n: float16(e.norm(e.stream(n) if source is None else e.at(source, n), getattr(e.model.layers[n], name)))

    yield "float16 norms", engine(faults={name: norm(name, source) for name, source in norm_names.items()})


def faulty() -> Iterator[tuple[str, Make]]:
    quantisers: dict[str, dict[str, Any]] = {
        "codes truncated": {"rounded": np.trunc},
        "activations of 7 bits": {"most": 63},
        "absmax to 126": {"most": 126},
        "activations not quantised": {"rounded": lambda x: x},
        "one activation scale for all tokens": {"axis": None},
    }
    scales = [("ffn_down", "ffn_sub_norm", "ffn_down", factor) for factor in (1.02, 1.05, 1.1)]
    scales.append(("attn_o_out", "attn_sub_norm", "attn_output", 1.05))
    for in_float16, end in ((False, ""), (True, ", float16 engine")):
        for name, how in quantisers.items():
            yield name + end, engine(Quantizer, **how, in_float16=in_float16)
        for scale in scales:
            yield f"scale of {scale[2]} times {scale[3]}{end}", engine(faults=times(*scale), in_float16=in_float16)
    gate: dict[str, Step] = {"ffn_out": lambda e, n: silu(e.at("ffn_gate", n)) * e.at("ffn_up", n)}
    late: dict[str, Step] = {"Kcur_rope": lambda e, n: e.rope(e.at("Kcur", n), np.arange(len(e.tokens)) + 1)}
    yield "scale of attn_v missing", engine(faults={"Vcur": unscaled_values})
    yield "codes truncated in ffn_down of a layer", engine(faults={"ffn_down": truncated}, layers=(LAYER,))
    yield "SiLU for relu squared", engine(faults=gate)
    yield "keys one position late", engine(faults=late)
    yield "logits times 1.01", lambda model, tokens: engine()(model, tokens) * f32(1.01)


def verdicts(model: Model, tokens: NDArray[np.int64], theirs: Floats) -> tuple[Verdict, Verdict]:
    """The verdicts by the fixed limit and by the measured one."""
    return judge(forward_full(model, tokens[None])[0], theirs).verdict, check(model, tokens, theirs).verdict


@lru_cache
def models(seed: int) -> list[tuple[Model, NDArray[np.int64]]]:
    """Random models with tokens. A worker makes them itself and is sent numbers."""
    made = []
    for i, (layers, width, length) in enumerate(SHAPES):
        wide, table = 2 * width, ("float32", "float16")[i % 2]
        sizes = {"n_layers": layers, "width": width, "ffn": wide, "vocab": wide}
        model = random_model(seed + i, table=table, **sizes, heads=width // 16, kv_heads=width // 32, head_dim=16)  # type: ignore[arg-type]
        made.append((model, np.random.default_rng(seed + i).integers(0, wide, length)))
    return made


def engines(title: str) -> list[tuple[str, Make]]:
    return list(honest() if title == "honest engine" else faulty())


def on_all_models(engine: tuple[str, int], seed: int) -> list[tuple[Verdict, Verdict]]:
    """The verdicts on one of the engines of a title, given by its number, on each model."""
    title, number = engine
    _, make = engines(title)[number]
    return [verdicts(model, tokens, make(model, tokens)) for model, tokens in models(seed)]


def of_mutation(number: int, seed: int) -> tuple[Verdict, Verdict] | None:
    """The verdicts on the logits of one of mutations.py's faults in the embedded model, None where it has none."""
    model, tokens = embedded_model(), np.random.default_rng(seed).integers(0, 512, 17)
    dump, ids = list(faults())[number].make(model, tokens)
    return verdicts(model, ids, dump[LOGITS]) if LOGITS in dump else None


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="seed of the models (default 0)")
    add_cluster_arguments(parser)
    options = parser.parse_args(argv)
    with over_workers(options) as spread:
        return report(options.seed, spread)


def report(seed: int, spread: Callable) -> int:
    """Print the tables; returns the exit code."""
    print(f"How many of {len(SHAPES)} random models, of {min(SHAPES)[0]} to {max(SHAPES)[0]} layers, are called WRONG")
    alarms = 0
    for title in ("honest engine", "fault"):
        print(f"\n| {title} | fixed | measured | no difference to see |\n|---|---|---|---|")
        names = [name for name, _ in engines(title)]
        judged = spread(partial(on_all_models, seed=seed), [(title, number) for number in range(len(names))])
        for name, pairs in zip(names, tqdm(judged, desc=title, total=len(names), disable=None), strict=True):
            fixed, measured = (sum(v == Verdict.WRONG for v in column) for column in zip(*pairs, strict=True))
            alarms += measured if title == "honest engine" else 0
            print(f"| {name} | {fixed} | {measured} | {sum(f <= Verdict.ROUNDING and m <= Verdict.ROUNDING for f, m in pairs)} |")
    print("\nThe faults of mutations.py, logits alone, on the embedded model with 17 tokens")
    missed: dict[str, list[str]] = {"fixed": [], "measured": []}
    every = list(faults())
    judged = spread(partial(of_mutation, seed=seed), range(len(every)))
    for fault, pair in zip(every, tqdm(judged, desc="mutations", total=len(every), disable=None), strict=True):
        for how, verdict in zip(missed, pair or (), strict=False):
            if verdict <= Verdict.FLIPS:
                missed[how].append(fault.name)
    for how, names in missed.items():
        print(f"{how}: {len(every) - len(names)} of {len(every)} found, not {'; '.join(names)}")
    return 1 if alarms else 0


if __name__ == "__main__":
    import logits_only  # workers find functions by their module's name, which is not __main__ there

    raise SystemExit(logits_only.main())
