"""Cross-validation with Hugging Face transformers, live: random models of every family but BitNet, saved by transformers and read here.

It needs torch and transformers. Each seed draws the weights of every model of record_hf_families.py. transformers writes its folder by
save_pretrained; `load` reads it, and the definition's logits must be those of transformers in float64 throughout, to 1e-10 of the largest.
The kernels' must be those of transformers in float32, to 2e-6.

    python scripts/crossval_hf_families.py --seeds 4
    python scripts/crossval_hf_families.py --only gemma3 phi3_longrope
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record_hf_families import cases, draw, run
from spread import add_arguments, over_workers

from bitnet_np import forward_full, load, spec
from bitnet_np.dense import dense_view
from bitnet_np.errors import Error
from bitnet_np.files.hf_config import read_recipe
from bitnet_np.model import Model
from bitnet_np.rope import llama3_factors, rope_frequencies

AGREEMENT, AGREEMENT_F32 = 1e-10, 2e-6


def definition(model: Model, folder: Path) -> Any:
    """The model for spec.forward, with RoPE's factors in float64: those of a Model are float32."""
    recipe, c = read_recipe(json.loads((folder / "config.json").read_text()), folder / "config.json"), model.config
    factors: Any = None
    if recipe.llama3 is not None:
        scaling = recipe.llama3
        factors = llama3_factors(
            rope_frequencies(c.rope_base, 2 * c.rope_pairs), scaling.factor, scaling.low, scaling.high, scaling.original
        )
    elif c.yarn is not None:
        factors = spec.yarn_factors(c.rope_base, c.rope_pairs, c.yarn)
    elif c.longrope is not None:
        factors = np.array(c.longrope.short if c.context <= c.longrope.original else c.longrope.long)
    return replace(dense_view(model), rope_factors=factors)


def errors(named: tuple[str, int]) -> tuple[float, float]:
    """The largest errors of the definition and of the kernels, as parts of the largest logit, of the case of this name with this seed."""
    name, seed = named
    case = next(case for case in cases() if case.name == name)
    tokens: NDArray[np.int64] = np.random.default_rng([seed, 1]).integers(0, 31, (2, 24))
    with tempfile.TemporaryDirectory() as folder:
        single, exact = run(case, draw(case, seed), tokens, Path(folder))
        model = load(folder, overrides={"context": 64})  # LongRoPE's must be declared
        dense, ours = definition(model, Path(folder)), forward_full(model, tokens)
    largest = np.abs(exact).max()
    wide = max(np.abs(spec.forward(dense, ids) - theirs).max() for ids, theirs in zip(tokens, exact, strict=True))
    return float(wide / largest), float(np.abs(ours - single).max() / largest)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1, metavar="N", help="models of each kind (default 1)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default 0)")
    parser.add_argument("--only", nargs="*", metavar="NAME", help=f"some of {', '.join(case.name for case in cases())}")
    add_arguments(parser)
    options = parser.parse_args(argv)
    names = [case.name for case in cases() if not options.only or case.name in options.only]
    chosen = [(name, seed) for name in names for seed in range(options.first, options.first + options.seeds)]
    agree = total = 0
    with over_workers(options) as spread:
        outcomes = iter(spread(errors, chosen))
        for name, seed in chosen:
            try:
                wide, narrow = next(outcomes)
            except Error as error:
                print(f"crossval_hf_families.py: {name}: {error}", file=sys.stderr)
                return 2
            right = wide <= AGREEMENT and narrow <= AGREEMENT_F32
            agree, total = agree + right, total + 1
            print(f"{seed:>4}  {name:<20}  float64 {wide:.1e}  float32 {narrow:.1e}{'' if right else '  DISAGREES'}", flush=True)
    print(f"{agree} of {total} models agree")
    return 0 if agree == total > 0 else 1


if __name__ == "__main__":
    import crossval_hf_families  # workers find functions by their module's name, which is not __main__ there

    raise SystemExit(crossval_hf_families.main())
