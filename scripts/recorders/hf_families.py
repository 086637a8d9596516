"""Random models of every family but BitNet, as folders that transformers and this package read.

The definition's logits must be those of transformers in float64 throughout, to 1e-10 of the largest, and the kernels' those of transformers
in float32, to 2e-6. What transformers writes by save_pretrained must give the kernels' bits again.
"""

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
from hf_engine import Transformers

from bitnet_np import Model, forward_full, load, spec
from bitnet_np.files.convert import convert
from bitnet_np.files.load import Source
from bitnet_np.model.families import FAMILIES
from bitnet_np.testing.hf_files import exact_view, folder_model, write_hf

CONFIGS = json.loads((Path(__file__).parents[2] / "tests" / "data" / "hf_families" / "configs.json").read_text("utf-8"))
AGREEMENT, AGREEMENT_F32 = 1e-10, 2e-6
CONTEXT = {"context": 64}
"""LongRoPE's must be declared."""


PADDING = {"pad_token_id": 0}
"""Some types have one that is beyond a small vocabulary."""


def validate(hf: Transformers, name: str, seed: int, target: Path | None) -> tuple[str, list[str]]:
    """The line of a model, and what disagrees. target: where to record, without the ending of its files."""
    config = CONFIGS[name] | PADDING
    with tempfile.TemporaryDirectory() as scratch:
        folder, saved = Path(scratch), Path(scratch) / "saved"
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
    errors = [np.abs(spec.forward(definition, ids) - logits).max() for ids, logits in zip(tokens, exact, strict=True)]
    wide, narrow = float(max(errors) / largest), float(np.abs(ours - single).max() / largest)
    reasons = ["the saved folder gives other logits"] * (not same)
    reasons += ["float64 disagrees"] * (not wide <= AGREEMENT) + ["float32 disagrees"] * (not narrow <= AGREEMENT_F32)
    return f"{seed:>4}  {name:<20}  float64 {wide:.1e}  float32 {narrow:.1e}", reasons


def write_recording(target: Path, model: Model) -> None:
    """Write the model's GGUF file. GGUF has no setting for transformers' exact GELU of gptneox: set it after loading."""
    c = model.config
    activation = FAMILIES[c.architecture].config.get("activation", c.activation)
    source = SimpleNamespace(path=target, metadata={"tokenizer.ggml.model": "none"})
    convert(replace(model, config=replace(c, activation=activation)), target.with_suffix(".gguf"), cast(Source, source))
