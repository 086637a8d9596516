"""Does the judge serve engines that people run? Fresh random models in transformers and mlx-lm, right and with planted bugs.

Each engine that is installed (pip install torch transformers mlx-lm) loads the same folder in each of its types, and records its tensors
(bitnet_np.hooks). They are judged as a stranger would: nothing is declared. Three dumps are judged of each run: all tensors, the outputs of
the layers with the logits, and the logits alone. Bugs are planted in a copy of the folder that the engine alone sees.

Exit status: 0 if no right engine is an alarm and every bug is found in whole dumps, 1 otherwise, 2 if no engine is installed.
"""

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from bitnet_np import Model, load
from bitnet_np.hooks import record_mlx, record_transformers
from bitnet_np.judge.dump import check_trace
from bitnet_np.judge.report import Report
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.points import Trace

Tensors = dict[str, NDArray[np.float32]]
Run = Callable[[Path, NDArray[np.int64]], Trace]

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}
FAMILIES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
DUMPS = {"all tensors": None, "l_out and logits": ("l_out", "result_output"), "logits alone": ("result_output",)}


# --- engines --------------------------------------------------------------------------------------------------------------------------


def _transformers(dtype: str, attention: str) -> Run:
    def run(folder: Path, tokens: NDArray[np.int64]) -> Trace:
        import torch
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), attn_implementation=attention).eval()
        with torch.no_grad(), record_transformers(model) as trace:
            model(torch.tensor(tokens[None]))
        return _kept(trace)

    return run


def _mlx(dtype: str) -> Run:
    def run(folder: Path, tokens: NDArray[np.int64]) -> Trace:
        import mlx.core as mx
        from mlx.utils import tree_map
        from mlx_lm.utils import load_model

        model, _ = load_model(folder)
        model.update(tree_map(lambda x: x.astype(getattr(mx, dtype)), model.parameters()))
        with record_mlx(model) as trace:
            mx.eval(model(mx.array(tokens[None])))
        return _kept(trace)

    return run


def _kept(trace: Trace) -> Trace:
    """The trace with its arrays in memory."""
    return Trace({key: np.array(trace.points[key]) for key in trace.points}, None, trace.origin)


def engines() -> dict[str, Run]:
    """The engines that are installed, in each of their types."""
    runs: dict[str, Run] = {}
    if find_spec("torch") and find_spec("transformers"):
        for dtype in ("float32", "float16", "bfloat16"):
            runs |= {f"transformers {dtype} {attention}": _transformers(dtype, attention) for attention in ("eager", "sdpa")}
    if find_spec("mlx_lm"):
        runs |= {f"mlx-lm {dtype}": _mlx(dtype) for dtype in ("float32", "float16", "bfloat16")}
    return runs


# --- models and bugs ------------------------------------------------------------------------------------------------------------------


def make_folder(folder: Path, family: str, seed: int) -> None:
    """Write a random model of a family, float32, in transformers' format."""
    import torch
    import transformers

    torch.manual_seed(seed)
    kind = getattr(transformers, FAMILIES[family])
    extra = {"head_dim": 16} if family == "qwen3" else {}
    model = kind(kind.config_class(**SHAPE, **extra))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.mul_(1 + 0.2 * torch.randn_like(weight))
    model.save_pretrained(folder)


@dataclass(frozen=True)
class Bug:
    """A bug, and a word that the cause should have; empty where none is expected."""

    name: str
    config: Mapping[str, Any]
    change: Callable[[str, NDArray[np.float32]], NDArray[np.float32]]
    says: tuple[str, ...]
    engines: tuple[str, ...] = ("transformers", "mlx-lm")  # those that read the changed setting


def _same(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x


def _in(*parts: str) -> Callable[[str], bool]:
    return lambda name: all(part in name for part in parts)


def _heads_reversed(name: str, x: NDArray[np.float32]) -> NDArray[np.float32]:
    if not any(part in name for part in ("layers.1.self_attn.k_proj", "layers.1.self_attn.v_proj")):
        return x
    return np.ascontiguousarray(x.reshape(SHAPE["num_key_value_heads"], -1, *x.shape[1:])[::-1].reshape(x.shape))


def _replaced(wanted: Callable[[str], bool], change: Callable[[NDArray[np.float32]], NDArray[np.float32]]) -> Callable:
    return lambda name, x: change(x).astype(np.float32) if wanted(name) else x


BUGS = (
    Bug("RoPE base 500000", {"rope_theta": 500000.0}, _same, ("base",)),
    Bug("GELU for SiLU", {"hidden_act": "gelu_pytorch_tanh"}, _same, ("GELU", "gelu"), ("transformers",)),  # mlx-lm's Llama has SiLU
    Bug("epsilon 1e-1", {"rms_norm_eps": 1e-1}, _same, ("epsilon",)),
    Bug("a norm without its weight", {}, _replaced(_in("layers.1.input_layernorm"), np.ones_like), ("weight",)),
    Bug("KV heads reversed", {}, _heads_reversed, ("",)),
    Bug("down times 1.1", {}, _replaced(_in("down_proj"), lambda x: x * 1.1), ("times", "scale")),
    Bug("o_proj sign", {}, _replaced(_in("layers.2", "o_proj.weight"), lambda x: -x), ("sign",)),
)


def plant(bug: Bug, source: Path, target: Path) -> None:
    """Copy a folder with a bug in it."""
    from safetensors.numpy import load_file, save_file

    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text("utf-8"))
    for key, value in bug.config.items():
        inner = config.get("rope_parameters")
        config[key] = value
        if key == "rope_theta" and isinstance(inner, dict):  # where transformers looks; mlx-lm looks outside
            inner[key] = value
    (target / "config.json").write_text(json.dumps(config), "utf-8")
    weights = target / "model.safetensors"
    save_file({name: bug.change(name, x) for name, x in load_file(weights).items()}, weights, metadata={"format": "pt"})


# --- report ---------------------------------------------------------------------------------------------------------------------------


def judged(model: Model, trace: Trace, tokens: NDArray[np.int64]) -> Iterator[tuple[str, Report]]:
    """Yields the report on each dump that is made of a trace."""
    for name, points in DUMPS.items():
        part = {key: x for key, x in trace.points.items() if points is None or key.name in points}
        yield name, check_trace(model, tokens, Trace(part, None, trace.origin))


def cause(report: Report) -> str:
    """The cause that a report names; empty if it names none."""
    first = report.first_wrong.hypothesis if report.first_wrong else None
    return first or (report.logits.explanation if report.logits and report.logits.explanation else "") or ""


def rows(families: list[str], seeds: int, quiet: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each family, seed, engine, bug and dump."""
    runs = engines()
    with tempfile.TemporaryDirectory() as temporary, tqdm(total=len(families) * seeds * len(runs), disable=quiet) as bar:
        for family in families:
            for seed in range(seeds):
                right = Path(temporary) / f"{family}-{seed}"
                make_folder(right, family, seed)
                model = load(right)
                tokens = np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], 24)
                folders: list[tuple[Bug | None, Path]] = [(None, right)]
                for n, planted in enumerate(BUGS):
                    folders.append((planted, right.with_name(f"{right.name}-{n}")))
                    plant(planted, right, folders[-1][1])
                for engine, run in runs.items():
                    for bug, folder in folders:
                        if bug is not None and not engine.startswith(bug.engines):
                            continue
                        for dump, report in judged(model, run(folder, tokens), tokens):
                            named = bug is not None and any(word in cause(report) for word in bug.says) and cause(report) != ""
                            yield {
                                "family": family,
                                "seed": seed,
                                "engine": engine,
                                "bug": bug.name if bug else "",
                                "dump": dump,
                                "verdict": report.verdict.name,
                                "alarm": report.verdict > Verdict.NARROW,
                                "named": named,
                                "cause": cause(report),
                                "reason": report.reason,
                            }
                    bar.update()


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default=",".join(FAMILIES), metavar="llama,...", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="models of each family (default 2)")
    parser.add_argument("--report", action="store_true", help="print a line for each run, not the counts alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if not engines():
        print("real_engines.py: no engine is installed, expected torch and transformers, or mlx-lm", file=sys.stderr)
        return 2
    results = list(rows(options.families.split(","), options.seeds, not sys.stderr.isatty()))
    if options.json:
        print(json.dumps(results, indent=1))
    else:
        if options.report:
            for r in results:
                print(" | ".join(str(r[name]) for name in ("family", "seed", "engine", "bug", "dump", "verdict", "cause")))
        print("| engine | dump | honest runs | alarms | bugs | found | named |\n|---|---|---|---|---|---|---|")
        for engine in dict.fromkeys(r["engine"] for r in results):
            for dump in DUMPS:
                own = [r for r in results if r["engine"] == engine and r["dump"] == dump]
                honest, wrong = ([r for r in own if bool(r["bug"]) == faulty] for faulty in (False, True))
                found, named = (sum(r[name] for r in wrong) for name in ("alarm", "named"))
                alarms = sum(r["alarm"] for r in honest)
                print(f"| {engine} | {dump} | {len(honest)} | {alarms} | {len(wrong)} | {found} | {named} |")
    false = [("ALARM", r) for r in results if not r["bug"] and r["alarm"]]
    missed = [("MISSED", r) for r in results if r["bug"] and r["dump"] == "all tensors" and not r["alarm"]]
    for what, r in (*false, *missed):
        where = ", ".join(str(r[name]) for name in ("family", "seed", "engine", "bug", "dump") if r[name] != "")
        print(f"{what}: {where}: {r['reason']}", file=sys.stderr)
    return 1 if false or missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
