"""Does the judge serve engines that people run? Fresh random models in engines that are installed, right and with planted bugs.

Each of them (pip install torch transformers mlx-lm tinygrad==0.13.0 llama-cpp-python) loads the same model in each of its types, from a
folder or from the GGUF file made of it, and its tensors are recorded (judging/peers.py). They are judged as a stranger would: nothing is
declared. Three dumps are judged of each run: all tensors, the outputs of the layers with the logits, and the logits alone. Bugs are planted
in a copy of the model that the engine alone sees. torch and transformers must be there: they make the models.

Exit status: 0 if no right engine is an alarm and every bug is found in whole dumps, 1 otherwise, 2 if transformers is not installed.
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
from types import SimpleNamespace
from typing import Any, Literal, cast

import numpy as np
from judging.peers import Peer, installed
from numpy.typing import NDArray
from tqdm import tqdm

from bitnet_np import Model, check, load
from bitnet_np.files.convert import convert
from bitnet_np.files.load import Source
from bitnet_np.judge.report.report import Report
from bitnet_np.judge.verdict import Verdict
from bitnet_np.traces.points import Trace

SHAPE: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,  # of 32 numbers, as blocks of a KV cache have
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.08,
}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
GEMMA = {"head_dim": 32, "tie_word_embeddings": True}
CAPS = {"attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 32, "sliding_window": 16}
SCALES = {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 2.5, "attention_multiplier": 0.125}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32}),
    "gemma": ("GemmaForCausalLM", GEMMA),
    "gemma2": ("Gemma2ForCausalLM", GEMMA | CAPS),
    "gemma3": (
        "Gemma3ForCausalLM",
        GEMMA | {"query_pre_attn_scalar": 32, "sliding_window": 16, "num_hidden_layers": 6, "hidden_activation": "gelu_pytorch_tanh"},
    ),
    "phi3": ("Phi3ForCausalLM", {"pad_token_id": 0}),
    "olmo2": ("Olmo2ForCausalLM", {}),
    "smollm3": ("SmolLM3ForCausalLM", {"pad_token_id": 0}),
    "granite": ("GraniteForCausalLM", SCALES),
    "gpt2": ("GPT2LMHeadModel", {"n_inner": 352, "tie_word_embeddings": True, "intermediate_size": None, "num_key_value_heads": None}),
    "gptneox": ("GPTNeoXForCausalLM", {"hidden_act": "gelu_new", "num_key_value_heads": None}),
    "mixtral": ("MixtralForCausalLM", EXPERTS | {"num_experts": None, "moe_intermediate_size": None}),
    "qwen3moe": ("Qwen3MoeForCausalLM", EXPERTS | {"num_local_experts": None, "head_dim": 32, "norm_topk_prob": True}),
}
"""The class of transformers that has a family, and the settings that it adds to the shape; those that are None it does not have."""
DUMPS = {"all tensors": None, "l_out and logits": ("l_out", "result_output"), "logits alone": ("result_output",)}


# --- models and bugs ------------------------------------------------------------------------------------------------------------------


def make_folder(folder: Path, family: str, seed: int) -> None:
    """Write a random model of a family, float32, in transformers' format."""
    import torch
    import transformers

    torch.manual_seed(seed)
    name, settings = FAMILIES[family]
    kind = getattr(transformers, name)
    model = kind(kind.config_class(**{key: value for key, value in (SHAPE | settings).items() if value is not None}))
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name or "ln_" in name:
                weight.add_(0.5 * torch.randn_like(weight))
    model.save_pretrained(folder)
    path = folder / "config.json"
    config = json.loads(path.read_text("utf-8"))
    rope = config.get("rope_parameters", {})  # mlx-lm looks for bases outside, where older files have them
    for key, kind in (("rope_theta", "full_attention"), ("rope_local_base_freq", "sliding_attention")):
        if kind in rope:
            config[key] = rope[kind]["rope_theta"]
    if "rope_theta" in rope:
        config["rope_theta"] = rope["rope_theta"]
    path.write_text(json.dumps(config), "utf-8")


@dataclass(frozen=True)
class Bug:
    """A bug, and a word that the cause should have; empty where none is expected."""

    name: str
    config: Mapping[str, Any]
    change: Callable[[str, NDArray[np.float32]], NDArray[np.float32]]
    says: tuple[str, ...]
    engines: tuple[str, ...] = ("transformers", "mlx-lm", "tinygrad", "llama.cpp")  # those that read the changed setting


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
    Bug("GELU for SiLU", {"hidden_act": "gelu_pytorch_tanh"}, _same, ("GELU", "gelu"), ("transformers",)),  # SiLU elsewhere
    Bug("epsilon 1e-1", {"rms_norm_eps": 1e-1}, _same, ("epsilon",)),
    Bug("a norm without its weight", {}, _replaced(_in("layers.1.input_layernorm"), np.ones_like), ("weight",)),
    Bug("KV heads reversed", {}, _heads_reversed, ("",)),
    Bug("down times 1.1", {}, _replaced(_in("down_proj"), lambda x: x * 1.1), ("times", "scale")),
    Bug("o_proj sign", {}, _replaced(_in("layers.2", "o_proj.weight"), lambda x: -x), ("sign",)),
)
OWN_BUGS = {
    ("gemma", "mlx-lm"): Bug("its own: the exact GELU", {}, _same, ("exact GELU",)),
    ("gemma2", "mlx-lm"): Bug("its own: no window", {}, _same, ("window",)),
}
"""Bugs that engines have themselves, by family and engine: a setting of the model that they do not read."""


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


def readable(folder: Path, kind: Literal["folder", "gguf"]) -> Path:
    """The model of a folder as an engine reads it: the folder, or a GGUF file that is made of it when it is first asked for."""
    if kind == "folder":
        return folder
    path = folder.with_name(folder.name + ".gguf")
    if not path.exists():
        vocabulary = {"tokenizer.ggml.model": "none", "tokenizer.ggml.tokens": [f"<{n}>" for n in range(SHAPE["vocab_size"])]}
        convert(load(folder), path, cast(Source, SimpleNamespace(path=folder, metadata=vocabulary)))
    return path


# --- report ---------------------------------------------------------------------------------------------------------------------------


def judged(model: Model, trace: Trace, tokens: NDArray[np.int64]) -> Iterator[tuple[str, Report]]:
    """Yields the report on each dump that is made of a trace."""
    for name, points in DUMPS.items():
        part = {key: x for key, x in trace.points.items() if points is None or key.name in points}
        yield name, check(model, tokens, Trace(part, None, trace.origin))


def cause(report: Report) -> str:
    """The cause that a report names; empty if it names none."""
    first = report.first_wrong.hypothesis if report.first_wrong else None
    return first or (report.logits.explanation if report.logits and report.logits.explanation else "") or ""


def rows(families: list[str], seeds: int, peers: list[Peer], bugs: tuple[Bug, ...], quiet: bool) -> Iterator[dict[str, Any]]:
    """Yields a row for each family, seed, engine, bug and dump."""
    with tempfile.TemporaryDirectory() as temporary, tqdm(total=len(families) * seeds * len(peers), disable=quiet) as bar:
        for family in families:
            for seed in range(seeds):
                right = Path(temporary) / f"{family}-{seed}"
                make_folder(right, family, seed)
                tokens = np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], 24)
                folders: list[tuple[Bug | None, Path]] = [(None, right)]
                for n, planted in enumerate(bugs):
                    folders.append((planted, right.with_name(f"{right.name}-{n}")))
                    plant(planted, right, folders[-1][1])
                for peer in (p for p in peers if family in (p.families or FAMILIES)):
                    model = load(readable(right, peer.reads))
                    for bug, folder in folders:
                        if bug is None or peer.name.startswith(bug.engines):
                            try:
                                trace = peer.run(readable(folder, peer.reads), tokens)
                            except Exception as error:  # an engine that does not know a family fails in its own way
                                print(f"NOT RUN: {family} in {peer.name}: {type(error).__name__}: {error}"[:300], file=sys.stderr)
                                break
                            bug = bug or next(
                                (b for (of, name), b in OWN_BUGS.items() if of == family and peer.name.startswith(name)), None
                            )
                            for dump, report in judged(model, trace, tokens):
                                yield {"family": family, "seed": seed, "engine": peer.name, "dump": dump, **row(bug, report)}
                    bar.update()


def row(bug: Bug | None, report: Report) -> dict[str, Any]:
    """What a report says of a run with a bug, or without one."""
    return {
        "bug": bug.name if bug else "",
        "verdict": report.verdict.name,
        "alarm": report.verdict > Verdict.NARROW,
        "named": bug is not None and cause(report) != "" and any(word in cause(report) for word in bug.says),
        "cause": cause(report),
        "reason": report.reason,
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", default=",".join(FAMILIES), metavar="llama,...", help=f"of {', '.join(FAMILIES)} (default: all)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="models of each family (default 2)")
    parser.add_argument("--engines", default="", metavar="NAME,...", help="those whose names begin so (default: all that are installed)")
    parser.add_argument("--right", action="store_true", help="run right engines only")
    parser.add_argument("--report", action="store_true", help="print a line for each run, not the counts alone")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(argv)
    if not (find_spec("torch") and find_spec("transformers")):
        print("real_engines.py: torch or transformers is not installed, expected both, as they make the models", file=sys.stderr)
        return 2
    peers = [peer for peer in installed() if peer.name.startswith(tuple(options.engines.split(",")))]
    results = []
    for r in rows(options.families.split(","), options.seeds, peers, () if options.right else BUGS, not sys.stderr.isatty()):
        results.append(r)
        if options.report:
            print(" | ".join(str(r[name]) for name in ("family", "seed", "engine", "bug", "dump", "verdict", "cause")), flush=True)
    if options.json:
        print(json.dumps(results, indent=1))
    else:
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
