"""The schemas of --json: they say every key and its type, and accept what commands print.

Whatever other tests of commands print with --json is held to them, too (conftest.py).
"""

import json
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
from command_line import TINY
from models import random_model

from bitnet_np.cli.main import COMMANDS
from bitnet_np.cli.schemas import schema
from bitnet_np.files.load import load
from bitnet_np.model.records import Config, LongRope, Yarn
from bitnet_np.sweep import tasks
from bitnet_np.testing import selftest
from bitnet_np.traces.record import record_trace

pytest.importorskip("jsonschema")
from printed_json import validator


def test_schemas_accept_what_other_tests_do_not_print(run, printed, tmp_path, written, monkeypatch):
    monkeypatch.setattr(selftest, "run", partial(selftest.run, "rms_norm"))
    tasks.this_machine.cache_clear()
    small = written(random_model(1, family="llama", weights="float32", yarn=Yarn(4.0, 64)))
    run("inspect", small, "--json")
    run("grad", small, "--tokens", "1,2,3", "--json")
    run("convert", TINY, tmp_path / "out", "--type", "TQ2_0", "--allow-rounding", "--json")
    (tmp_path / "plan").write_text(f'[models]\nm = "{TINY}"\n[tokens]\nt = {{ ids = [1, 2] }}\n[[run]]\ndo = "nll"\n')
    printed("sweep", tmp_path / "plan", "--out", tmp_path / "rows", "--json")
    dump, wrong = tmp_path / "dump.npz", tmp_path / "wrong.npz"
    record_trace(load(TINY), [1, 2, 3], dump, names=["ffn_sub_norm", "ffn_down", "l_out", "result_output"])
    with np.load(dump) as arrays:
        np.savez(wrong, **{name: -x if name == "ffn_down-1" else x for name, x in arrays.items()})
    run("check", TINY, "--tokens", "1,2,3", "--theirs", wrong, "--json", code=1)
    run("compare", dump, wrong, "--json", code=1)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints_its_schema(command, ended):
    code, out, _ = ended(command, "--json-schema")
    assert (code, json.loads(out)) == (0, schema(command))
    for wrong in ({}, [], None, 0, "", [{}], {"": 0}):
        assert not validator(command).is_valid(wrong)


def objects(part):
    """Yields every schema of an object within a schema."""
    if isinstance(part, dict):
        if "object" in part.get("type", ()):
            yield part
        part = list(part.values())
    for inner in part if isinstance(part, list) else ():
        yield from objects(inner)


OPTIONAL = {"tensors", "points", "text", "error", "rounding", "against", "difference"}
OPTIONAL |= {"version", "schema_version", "files", "tokens", "dialect"}
"""Keys that only some calls of a command print."""


def test_schemas_say_every_key_and_its_type():
    """A map has keys of any name, and values of one type."""
    for part in objects(schema("check")):
        keys, more = part.get("properties", {}), part.get("additionalProperties")
        assert part.get("maxProperties") == 0 or (more is False if keys else more), part
        assert keys.keys() - set(part.get("required", ())) <= OPTIONAL, part
        for value in (*keys.values(), more or {"type": ""}):
            assert value.keys() & {"type", "$ref", "enum", "const", "anyOf", "oneOf"}, value
            assert "items" in value or "array" not in value.get("type", ()), value


def test_the_settings_of_a_model_are_the_fields_of_its_record():
    config = schema("inspect")["$defs"]["config"]
    names = [field.name for field in fields(Config)]
    assert config["required"] == [*config["properties"]] == names
    for kind in (Yarn, LongRope):
        assert config["properties"][kind.__name__.lower()]["required"] == [field.name for field in fields(kind)]
