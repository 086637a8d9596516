"""Inputs of the commands: token ids."""

import argparse
from collections.abc import Callable

from numpy.typing import NDArray

from ..text.tokenizer import Tokenizer
from ..token_files import array_of_ids, check_ids, parse_numbers, read_token_ids


def token_ids(arguments: argparse.Namespace, tokenizer: Callable[[], Tokenizer]) -> NDArray:
    """The token ids of the command, [T] or [B, T]."""
    if arguments.tokens is not None:
        ids, source = array_of_ids(parse_numbers("--tokens", arguments.tokens, int)), "--tokens"
    elif arguments.tokens_file is not None:
        ids, source = read_token_ids(arguments.tokens_file), str(arguments.tokens_file)
    else:
        ids, source = array_of_ids(tokenizer().encode(arguments.text)), "the text"
    return check_ids(source, ids)
