"""JSON Schemas (draft 2020-12) of what the commands print with --json: data/json_schemas.json has them all."""

import argparse
import json
import sys
from importlib import resources
from typing import Any


def schema(command: str) -> dict[str, Any]:
    """The schema of what a command prints: of each line where it prints JSON Lines."""
    schemas = json.loads(resources.files("bitnet_np").joinpath("data/json_schemas.json").read_text("utf-8"))
    return schemas | {"title": f"What bitnet-np {command} prints with --json", "$ref": f"#/$defs/{command}"}


class PrintSchema(argparse.Action):
    """The option of a command that prints its schema and ends, whatever else is given."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser._print_message(json.dumps(schema(parser.prog.rpartition(" ")[2]), indent=1) + "\n", sys.stdout)
        parser.exit()
