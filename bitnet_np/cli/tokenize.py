"""`bitnet-np tokenize`: the token ids of a text, and what each of them stands for."""

import argparse

from ..files.load import open_model
from ..text.tokenizer import tokenizer_from
from .arguments import add_model_and_tokens
from .inputs import token_ids
from .printing import print_json, table

SUMMARY = "Show the token ids of a text, or the text of token ids, piece by piece."


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add this command's arguments."""
    add_model_and_tokens(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print ids and pieces; returns the exit code."""
    source = open_model(arguments.model, arguments.download)
    tokenizer = tokenizer_from(source.metadata, source.path)
    ids = token_ids(arguments, lambda: tokenizer).ravel().tolist()
    pieces = [tokenizer.token_bytes(token, skip_special=False).decode("utf-8", "backslashreplace") for token in ids]
    if arguments.json:
        print_json({"tokens": ids, "pieces": pieces, "text": tokenizer.decode(ids)})
        return 0
    print(f"{','.join(map(str, ids))}\n")
    print(table(("token", "piece"), [(str(token), f"'{piece}'") for token, piece in zip(ids, pieces, strict=True)]))
    return 0
