"""The schemas of --json: each accepts what its command prints, and nothing that is a little different.

Whatever other tests of commands print with --json is held to them, too (conftest.py).
"""

import copy
import json
from dataclasses import fields
from functools import partial

import numpy as np
import pytest
from command_line import TINY
from models import random_model

from bitnet_np.cli.main import COMMANDS, main
from bitnet_np.cli.schemas import schema
from bitnet_np.files.load import load
from bitnet_np.model.records import Config, LongRope, Yarn
from bitnet_np.sweep import tasks
from bitnet_np.testing import selftest
from bitnet_np.traces.record import record_trace

pytest.importorskip("jsonschema")
from printed_json import validator, values

TOKENS = ("--tokens", "1,2,3")


@pytest.fixture
def files(tmp_path, written):
    """Files that commands read, by the words that stand for them."""
    dump, wrong = tmp_path / "dump.npz", tmp_path / "wrong.npz"
    record_trace(load(TINY), [1, 2, 3], dump, names=["ffn_sub_norm", "ffn_down", "l_out", "result_output"])
    with np.load(dump) as arrays:
        np.savez(wrong, **{name: -x if name == "ffn_down-1" else x for name, x in arrays.items()})
    (tmp_path / "prompts").write_text('{"id": "a", "tokens": [1]}\n')
    (tmp_path / "plan").write_text(f'[models]\nm = "{TINY}"\n[tokens]\nt = {{ ids = [1, 2] }}\n[[run]]\ndo = "nll"\n')
    (tmp_path / "odd.json").write_text("[[1, 2], [3, 4]]")
    main(["nll", TINY, *TOKENS, "--save-all-logits", str(tmp_path / "base")])
    small = written(random_model(1, family="llama", weights="float32", yarn=Yarn(4.0, 64)))
    return {
        "DUMP": dump,
        "WRONG": wrong,
        "SMALL": small,
        **{name.upper(): tmp_path / name for name in ("prompts", "plan", "odd.json", "base", "out")},
    }


OUTPUTS = [
    ["inspect", TINY, "--tensors", "--points"],
    ["inspect", "SMALL"],
    ["tokenize", TINY, *TOKENS],
    ["logits", TINY, *TOKENS],
    ["logits", TINY, "--tokens-file", "ODD.JSON", "--last"],
    ["generate", TINY, "--prompts-file", "PROMPTS", "-n", "2"],
    ["check", TINY, *TOKENS, "--theirs", "DUMP"],
    ["check", TINY, *TOKENS, "--theirs", "WRONG"],
    ["trace", TINY, *TOKENS, "--out", "OUT", "--format", "npz"],
    ["grad", "SMALL", *TOKENS],
    ["compare", "DUMP", "WRONG"],
    ["compare", TINY, TINY, "--models", *TOKENS],
    ["nll", TINY, *TOKENS],
    ["nll", TINY, "--kl-divergence-base", "BASE"],
    ["sweep", "PLAN", "--out", "OUT"],
    ["convert", TINY, "OUT", "--type", "TQ2_0", "--allow-rounding"],
    ["mask", "3", "3"],
]


def changed(value, place=()):
    """Yields values that differ from this one at one place: a key more or less, or of another type."""
    if isinstance(value, dict):
        for key in value:
            yield (*place, key, "left out"), {name: x for name, x in value.items() if name != key}
        yield (*place, "one more"), value | {"": [{}]}
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(min(len(value), 2)):
            for where, other in changed(value[key], (*place, key)):
                whole = copy.copy(value)
                whole[key] = other
                yield where, whole
    yield (*place, "another type"), [{}]


FREE = {"types", "matrices", "keys", "causes", "outcomes", "settings", "result"}
"""The maps: keys of them may be left out, and so may these that --tensors and the like add."""
OPTIONAL = {"tensors", "points", "rounding"}


@pytest.mark.parametrize("words", OUTPUTS, ids=" ".join)
def test_a_schema_accepts_what_is_printed_and_nothing_else(words, files, capsys, monkeypatch):
    monkeypatch.setattr(selftest, "run", partial(selftest.run, "rms_norm"))
    tasks.this_machine.cache_clear()
    capsys.readouterr()
    main([str(files.get(word, word)) for word in words] + ["--json"])
    printed = values(capsys.readouterr().out)
    judge, tried = validator(words[0]), 0
    assert printed
    for value in printed:
        judge.validate(value)
        for place, other in changed(value):
            if place[-1] != "left out" or not (FREE & {*place[:-1]} or place[-2] in OPTIONAL):
                assert not judge.is_valid(other), place
                tried += 1
    assert tried > 3


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


def test_no_schema_accepts_any_key_or_any_value():
    for part in objects(schema("check")):
        assert part.get("maxProperties") == 0 or part["additionalProperties"] is False or part["additionalProperties"], part
        assert set(part.get("required", ())) <= set(part.get("properties", ()))
        assert all(part.get("properties", {"": True}).values())


def test_the_settings_of_a_model_are_the_fields_of_its_record():
    config = schema("inspect")["$defs"]["config"]
    names = [field.name for field in fields(Config)]
    assert config["required"] == [*config["properties"]] == names
    for kind in (Yarn, LongRope):
        assert config["properties"][kind.__name__.lower()]["required"] == [field.name for field in fields(kind)]
