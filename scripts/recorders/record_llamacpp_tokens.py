"""Record the tokens into which llama.cpp cuts texts, by every pre-tokenizer we know and by scores: `record_llamacpp_tokens.py OUT.json`.

It needs llama-cpp-python. tests/support/cut_texts.py has the texts and the vocabularies. OUT.json has `ids`, the different answers: each
lists the ids of every text of TEXTS, and last those of MESSAGE with its special tokens. It also has `answer`, the number of each
tokenizer's answer: `spm` is SentencePiece's, the others are pre-tokenizers of byte-level BPE.
"""

import argparse
import importlib
import json
import sys
import tempfile
from pathlib import Path

from bitnet_np.cli.progress import bar
from bitnet_np.files.gguf_writer import write_model
from bitnet_np.testing.models import random_model

sys.path.append(str(Path(__file__).parents[2] / "tests" / "support"))  # the recordings are the tests', and so are their subjects

CUTS = importlib.import_module("cut_texts")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Record the tokens that llama.cpp cuts texts into.")
    parser.add_argument("out", type=Path, metavar="OUT.json")
    options = parser.parse_args(argv)
    llama = importlib.import_module("llama_cpp").Llama
    answers: list[list[list[int]]] = []
    numbers: dict[str, int] = {}
    advance = bar("recording")
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, metadata) in enumerate(CUTS.tokenizers().items()):
            path = Path(folder) / "t.gguf"
            keys = metadata()
            vocab = len(keys["tokenizer.ggml.tokens"])
            model = random_model(0, family="llama", weights="float32", vocab=vocab, width=16, ffn=16, heads=1, kv_heads=1)
            write_model(path, model, keys)
            theirs = llama(str(path), vocab_only=True, verbose=False)
            ids = [theirs.tokenize(text.encode(), add_bos=False) for text in CUTS.TEXTS]
            ids.append(theirs.tokenize(CUTS.MESSAGE.encode(), add_bos=False, special=True))
            if ids not in answers:
                answers.append(ids)
            numbers[name] = answers.index(ids)
            advance(i + 1, len(CUTS.tokenizers()))
    options.out.write_text(json.dumps({"answer": numbers, "ids": answers}, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
