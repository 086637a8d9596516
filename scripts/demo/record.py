"""Record continuations of the embedded demo model, and its logits by Hugging Face transformers: `python scripts/demo/record.py FOLDER`.

FOLDER/greedy.json gets greedy continuations of some prompts. `--transformers` needs torch and transformers: transformers' BitNet with its
own quantised linears (AutoBitLinear, offline) gets the weights of the model file, and FOLDER/transformers.npz gets `text`, its `tokens`
[T], `logits_f32` [T, V], computed in float32, and `logits_f64`, computed with float64 for every float32 in transformers' source.

This script made the recordings in tests/data/demo/.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from bitnet_np import embedded, generate, load
from bitnet_np.dense import DenseLinear, dense_view
from bitnet_np.errors import Error
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.model import Model
from bitnet_np.text.tokenizer import Tokenizer, tokenizer_from
from bitnet_np.traces.points import Key

sys.path.append(str(Path(__file__).parents[1]))  # for a run by its path; in tests it is on sys.path already

from crossval_hf import MODULES, Case, Matrix, Transformers

PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a little rabbit",
    "One day, Anna and Tom",
    "Q: Tom had 3 apples and found 4 more. How many apples does Tom have now?\nA:",
    "Leo went to the barn. Mia ran to the beach. Tom walked to the park.\nQ: Where is Mia?\nA:",
    "Q: What does a cow say?\nA:",
    "Q: 13 - 5 = ?\nA:",
)
TEXT = "Once upon a time there was a brave girl named Lily. She had a red kite.\nQ: What color was the kite?\nA:"


def build(hf: Transformers, model: Model) -> object:
    """A model of transformers with the weights of ours."""
    theirs = hf.empty_model(Case(0, ("autobitlinear", "offline"), model.output is None, False, model.config, 0))
    modules = dict(theirs.named_modules())
    hf.set(modules["model.embed_tokens"].weight, np.asarray(model.token_embd, np.float32))
    hf.set(modules["model.norm"].weight, model.output_norm)
    for n, layer in enumerate(model.layers):
        dense = dense_view(layer)
        for field, name in MODULES.items():
            module, value = modules[f"model.layers.{n}.{name}"], getattr(dense, field)
            if isinstance(value, DenseLinear):
                hf.set_linear(module, Matrix(value.matrix.astype(np.int8), np.array([value.scale], np.float32), value))
            else:
                hf.set(module.weight, value.astype(np.float32))
    return theirs


def greedy(model: Model, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The continuations that `bitnet-np generate` prints, with their token ids."""
    continuations = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        tokens = generate(model, ids, embedded.DEMO_TOKENS, stop=tokenizer.stops)[len(ids) :]
        continuations.append({"prompt": prompt, "tokens": tokens, "text": tokenizer.decode(tokens)})
    return continuations


def record_transformers(path: Path, model: Model, tokenizer: Tokenizer) -> None:
    hf = Transformers()
    tokens = np.array(tokenizer.encode(TEXT))
    theirs = build(hf, model)
    logits = hf.run(theirs, tokens)[Key("result_output", None)]
    with hf.strict(theirs):
        strict = hf.run(theirs, tokens)[Key("result_output", None)]
    np.savez(path, text=np.array(TEXT), tokens=tokens, logits_f32=logits, logits_f64=strict)
    print(f"{hf.versions}: {len(tokens)} tokens, |float32 - float64| at most {np.abs(logits - strict).max():.2g}")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="record.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write to")
    parser.add_argument("--transformers", action="store_true", help="record transformers' logits instead of continuations")
    options = parser.parse_args(argv)
    try:
        with embedded.demo_path() as path:
            model, tokenizer = load(path), tokenizer_from(open_gguf(path).metadata, path)
        if options.transformers:
            record_transformers(options.folder / "transformers.npz", model, tokenizer)
        else:
            lines = ",\n".join(map(json.dumps, greedy(model, tokenizer)))
            (options.folder / "greedy.json").write_text(f"[\n{lines}\n]\n", "utf-8")
    except (Error, OSError) as error:
        print(f"record.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
