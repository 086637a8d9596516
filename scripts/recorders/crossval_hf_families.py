"""Cross-validation with Hugging Face transformers, live: random models of every family but BitNet, as folders that both read.

It needs torch, transformers and accelerate. Each seed draws the weights of every model of tests/data/hf_families/configs.json. The
definition's logits must be those of transformers in float64 throughout, to 1e-10 of the largest, and the kernels' those of transformers in
float32, to 2e-6. What transformers writes by save_pretrained must give the kernels' bits again.

    python scripts/recorders/crossval_hf_families.py --seeds 4
    python scripts/recorders/crossval_hf_families.py --only gemma3 phi3_longrope
    python scripts/recorders/crossval_hf_families.py --first 7 --record tests/data/hf_families

`--record` writes <name>.gguf and <name>.npz of each model, with `tokens` [B, T], `logits_f32` and `logits_f64` of transformers.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from hf_engine import Transformers

from bitnet_np import Model, forward_full, load, spec
from bitnet_np.base.errors import Error
from bitnet_np.files.convert import convert
from bitnet_np.files.load import Source
from bitnet_np.model.families import FAMILIES
from bitnet_np.testing.hf_files import exact_view, folder_model, write_hf

CONFIGS = Path(__file__).parents[2] / "tests" / "data" / "hf_families" / "configs.json"
AGREEMENT, AGREEMENT_F32 = 1e-10, 2e-6
CONTEXT = {"context": 64}
"""LongRoPE's must be declared."""


PADDING = {"pad_token_id": 0}
"""Some types have one that is beyond a small vocabulary."""


def compared(hf: Transformers, config: dict[str, Any], seed: int, target: Path | None) -> tuple[float, float, bool]:
    """The largest errors of the definition and of the kernels, as parts of the largest logit, and whether the saved folder gives the same.

    target: where to record, without the ending of its files.
    """
    with tempfile.TemporaryDirectory() as name:
        folder, saved = Path(name), Path(name) / "saved"
        write_hf(folder, config, folder_model(config, seed), floats="F32")
        model = load(folder, overrides=CONTEXT)
        tokens = np.random.default_rng([seed, 1]).integers(0, model.config.vocab, (2, 24))
        theirs = hf.open(folder)
        theirs.save_pretrained(saved)
        single = hf.logits(theirs, tokens)
        with hf.strict(folder) as strict:
            exact = hf.logits(strict, tokens)
        definition, ours = exact_view(folder, model), forward_full(model, tokens)
        same = np.array_equal(forward_full(load(saved, overrides=CONTEXT), tokens), ours)
        if target is not None:
            target.parent.mkdir(parents=True, exist_ok=True)
            write_recording(target, model)
            np.savez_compressed(target.with_suffix(".npz"), tokens=tokens, logits_f32=single, logits_f64=exact)
    largest = np.abs(exact).max()
    wide = max(np.abs(spec.forward(definition, ids) - logits).max() for ids, logits in zip(tokens, exact, strict=True))
    return float(wide / largest), float(np.abs(ours - single).max() / largest), same


def write_recording(target: Path, model: Model) -> None:
    """Write the model's GGUF file. GGUF has no setting for transformers' exact GELU of gptneox: set it after loading."""
    c = model.config
    activation = FAMILIES[c.architecture].config.get("activation", c.activation)
    source = SimpleNamespace(path=target, metadata={"tokenizer.ggml.model": "none"})
    convert(replace(model, config=replace(c, activation=activation)), target.with_suffix(".gguf"), cast(Source, source))


def main(argv: list[str] | None = None) -> int:
    configs = json.loads(CONFIGS.read_text("utf-8"))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="models of each kind (default 1)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--only", nargs="*", metavar="NAME", choices=configs, help=f"some of {', '.join(configs)}")
    parser.add_argument("--record", type=Path, metavar="FOLDER", help="record the models of the first seed there")
    options = parser.parse_args(argv)
    agree = total = 0
    try:
        hf = Transformers()
        print(hf.versions)
        for name in options.only or configs:
            for seed in range(options.first, options.first + options.seeds):
                target = options.record / name if options.record and seed == options.first else None
                wide, narrow, same = compared(hf, configs[name] | PADDING, seed, target)
                right = wide <= AGREEMENT and narrow <= AGREEMENT_F32 and same
                agree, total = agree + right, total + 1
                what = f"float64 {wide:.1e}  float32 {narrow:.1e}{'' if same else '  saved: others'}{'' if right else '  DISAGREES'}"
                print(f"{seed:>4}  {name:<20}  {what}", flush=True)
    except Error as error:
        print(f"crossval_hf_families.py: {error}", file=sys.stderr)
        return 2
    print(f"{agree} of {total} models agree")
    return 0 if agree == total > 0 else 1


if __name__ == "__main__":
    raise SystemExit(main())
