"""Record greedy continuations of the embedded demo model: `python scripts/recorders/record_demo.py tests/data/demo` writes greedy.json."""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from bitnet_np import embedded, generate, load
from bitnet_np.errors import Error
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.model import Model
from bitnet_np.text.tokenizer import Tokenizer, tokenizer_from

PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a little rabbit",
    "One day, Anna and Tom",
    "Q: Tom had 3 apples and found 4 more. How many apples does Tom have now?\nA:",
    "Leo went to the barn. Mia ran to the beach. Tom walked to the park.\nQ: Where is Mia?\nA:",
    "Q: What does a cow say?\nA:",
    "Q: 13 - 5 = ?\nA:",
)


def greedy(model: Model, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The continuations that `bitnet-np generate` prints, with their token ids."""
    continuations = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        tokens = generate(model, ids, embedded.DEMO_TOKENS, stop=tokenizer.stops)[len(ids) :]
        continuations.append({"prompt": prompt, "tokens": tokens, "text": tokenizer.decode(tokens)})
    return continuations


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="record_demo.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write to")
    options = parser.parse_args(argv)
    try:
        with embedded.demo_path() as path:
            model, tokenizer = load(path), tokenizer_from(open_gguf(path).metadata, path)
        lines = ",\n".join(map(json.dumps, greedy(model, tokenizer)))
        (options.folder / "greedy.json").write_text(f"[\n{lines}\n]\n", "utf-8")
    except (Error, OSError) as error:
        print(f"record_demo.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
