"""`bitnet-np tokenize`: the token ids of a text, and what each of them stands for.

Examples:
  bitnet-np tokenize model.gguf --text "Once upon a time"
  bitnet-np tokenize model.gguf --tokens 1,2,3
"""

import argparse

from ..files.load import open_model
from ..text.tokenizer import tokenizer_from
from .arguments import MODEL_AND_TOKENS
from .inputs import token_ids
from .printing import answer, table

SUMMARY = "Show the token ids of a text, or the text of token ids, piece by piece."


ARGUMENTS = MODEL_AND_TOKENS


def run(arguments: argparse.Namespace) -> int:
    """Print ids and pieces; returns the exit code."""
    source = open_model(arguments.model, arguments.download)
    tokenizer = tokenizer_from(source.metadata, source.path)
    ids = token_ids(arguments, lambda: tokenizer).ravel().tolist()
    pieces = [tokenizer.token_bytes(token, skip_special=False).decode("utf-8", "backslashreplace") for token in ids]
    pairs = table(("token", "piece"), [(str(token), f"'{piece}'") for token, piece in zip(ids, pieces, strict=True)])
    facts = {"tokens": ids, "pieces": pieces, "text": tokenizer.decode(ids)}
    return answer(arguments, facts, f"{','.join(map(str, ids))}\n\n{pairs}")
