"""Record greedy continuations of the embedded demo model: `python scripts/recorders/record_demo.py tests/data/demo` writes greedy.json."""

import argparse
import json
from pathlib import Path

from bitnet_np import generate, load
from bitnet_np.files import embedded
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.text.tokenizer import tokenizer_from

PROMPTS = (
    "Once upon a time",
    "Once upon a time there was a little rabbit",
    "One day, Anna and Tom",
    "Q: Tom had 3 apples and found 4 more. How many apples does Tom have now?\nA:",
    "Leo went to the barn. Mia ran to the beach. Tom walked to the park.\nQ: Where is Mia?\nA:",
    "Q: What does a cow say?\nA:",
    "Q: 13 - 5 = ?\nA:",
)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="folder to write to")
    options = parser.parse_args(argv)
    with embedded.demo_path() as path:
        model, tokenizer = load(path), tokenizer_from(open_gguf(path).metadata, path)
    lines = []
    for prompt in PROMPTS:
        ids = tokenizer.encode(prompt)
        tokens = generate(model, ids, embedded.DEMO_TOKENS, stop=tokenizer.stops)[len(ids) :]
        lines.append(json.dumps({"prompt": prompt, "tokens": tokens, "text": tokenizer.decode(tokens)}))
    (options.folder / "greedy.json").write_text("[\n" + ",\n".join(lines) + "\n]\n", "utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
