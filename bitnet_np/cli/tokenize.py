"""`bitnet-np tokenize`: the token ids of a text, and what each of them stands for."""

import argparse

from ..base.errors import OptionError, shown
from ..base.tables import table
from ..files.load import open_model
from ..files.safetensors_file import json_of
from ..text.tokenizer import Tokenizer, tokenizer_from
from ..traces.token_files import check_ids, read_token_ids
from .check_server import tokenizer_difference
from .inputs import token_ids
from .printing import answer, outcome

_LARGEST = 1 << 24  # bytes of a file of messages


def run(arguments: argparse.Namespace) -> int:
    """Print ids and pieces, and how another tokenizer's ids differ; returns the exit code."""
    source = open_model(arguments.model, arguments.download)
    tokenizer = tokenizer_from(source.metadata, source.path)
    ids = _ids(arguments, tokenizer)
    pieces = [tokenizer.token_bytes(token, skip_special=False).decode("utf-8", "backslashreplace") for token in ids]
    pairs = table(("token", "piece"), [(str(token), f"'{piece}'") for token, piece in zip(ids, pieces, strict=True)])
    facts = {"tokens": ids, "pieces": pieces, "text": tokenizer.decode(ids)}
    text = f"{','.join(map(str, ids))}\n\n{pairs}"
    if arguments.theirs is None:
        return answer(arguments, facts, text)
    theirs = check_ids(str(arguments.theirs), read_token_ids(arguments.theirs)).ravel().tolist()
    difference = tokenizer_difference(ids, theirs, tokenizer.bos, "the other")
    first = outcome(difference is None, f": {difference or f'the same {len(ids)} token ids'}")
    return answer(arguments, facts | {"difference": difference}, f"{first}\n\n{text}", 0 if difference is None else 1)


def _ids(arguments: argparse.Namespace, tokenizer: Tokenizer) -> list[int]:
    """The token ids of the command. Raises OptionError for --chat without --text, and for messages that are none."""
    if arguments.chat and arguments.text is None:
        raise OptionError("--chat needs --text")
    if arguments.messages is not None:
        messages = json_of(arguments.messages, _LARGEST)
        if not isinstance(messages, list):
            raise OptionError(f"--messages {arguments.messages} has {shown(messages)}, expected a list of messages: role and content")
        return tokenizer.chat(messages)
    if arguments.chat:
        return tokenizer.chat([{"role": "user", "content": arguments.text}])
    return token_ids(arguments, lambda: tokenizer).ravel().tolist()
