"""What commands print with --json, judged by their schemas where jsonschema is installed."""

import json
from functools import cache
from importlib.util import find_spec

from bitnet_np.cli.schemas import schema


@cache
def validator(command):
    """jsonschema's validator of what a command prints."""
    from jsonschema import Draft202012Validator

    Draft202012Validator.check_schema(schema(command))
    return Draft202012Validator(schema(command))


def values(text):
    """The JSON values that stand one after another in a text."""
    found, end = [], 0
    while text[end:].strip():
        value, end = json.JSONDecoder().raw_decode(text, end + len(text[end:]) - len(text[end:].lstrip()))
        found.append(value)
    return found


def check(command, text):
    """Fails unless each JSON value of a text is one that the command may print."""
    for value in values(text) if find_spec("jsonschema") else []:
        validator(command).validate(value)
