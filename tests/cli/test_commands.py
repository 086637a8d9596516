"""What can be typed is declared without the library: help imports none of it, and the names that options take are the library's."""

import argparse
import re
from typing import get_args

import pytest
from child import run_python

from bitnet_np.cli.commands import COMMANDS
from bitnet_np.cli.main import EXIT_CODES, build_parser
from bitnet_np.engine import cache_types, masks
from bitnet_np.engine.dialects import DIALECTS
from bitnet_np.engine.forward_pass import PARALLEL_THRESHOLD, Mode
from bitnet_np.files import convert, embedded
from bitnet_np.files.overrides import OVERRIDABLE
from bitnet_np.gpu.dispatch import Device
from bitnet_np.judge.law.precision import PROFILES
from bitnet_np.judge.options import USUAL_BUDGET
from bitnet_np.model import packing
from bitnet_np.traces.formats import FORMATS
from bitnet_np.traces.llama_base import CONTEXT
from bitnet_np.vectors.choose import SIZES

IMPORTED = """
import sys
from bitnet_np.cli.main import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
heavy = {"numpy", "numba", "gguf", "bitnet_np.judge", "bitnet_np.kernels", "bitnet_np.engine", "bitnet_np.hunt"}
print("IMPORTED", sorted(heavy & sys.modules.keys()))
"""


@pytest.mark.parametrize(
    "words",
    [["--version"], ["--help"], ["check", "--help"], ["hunt"], ["chek"], ["grad", "--json-schema"], ["completion", "bash"]],
    ids=" ".join,
)
def test_help_and_wrong_usage_import_neither_the_library_nor_numpy(words):
    assert run_python(IMPORTED, *words).splitlines()[-1] == "IMPORTED []"


def options(name):
    """The options of a name in all commands, each with its command."""
    for command, parser in build_parser().commands.items():
        for action in parser._actions:
            if name in action.option_strings:
                yield command, action


FORMATS_TO_WRITE = [name for name, form in FORMATS.items() if form.writer]
CHOICES = {
    "--as": {"check": PROFILES, "hunt": PROFILES, None: DIALECTS},
    "--dump-format": {None: FORMATS},
    "--format": {
        "check": ["text", "json", "github", "junit", "tap"],
        "compare": ["text", "json", "github", "junit", "tap"],
        None: FORMATS_TO_WRITE,
    },
    "--i2s-layout": {None: packing.I2S_LAYOUTS},
    "--device": {None: get_args(Device)},
    "--mode": {None: get_args(Mode)},
    "--align": {None: get_args(masks.Align)},
    "--type": {None: convert.TYPES},
    "--head": {None: convert.HEADS},
    "--size": {None: SIZES},
}


@pytest.mark.parametrize("name", CHOICES)
def test_an_option_takes_the_names_that_the_library_has(name):
    found = dict(options(name))
    assert found
    for command, action in found.items():
        assert sorted(action.choices) == sorted(CHOICES[name].get(command, CHOICES[name].get(None))), command


def test_defaults_and_names_in_help_are_the_librarys():
    (budget,) = (action.default for _, action in options("--budget"))
    (threshold,) = (action.default for _, action in options("--parallel-threshold"))
    assert (budget, threshold) == (USUAL_BUDGET, PARALLEL_THRESHOLD)
    assert {action.default for _, action in options("--i2s-layout")} == {packing.I2S_DEFAULT}
    for name, said in {
        "--ctx-size": f"default {CONTEXT}",
        "--override": ", ".join(OVERRIDABLE),
        "-n": f", {embedded.DEMO_TOKENS} with the demo model",
    }.items():
        assert all(said in action.help for _, action in options(name)), name
    caches = [re.search(r"KV cache: (.+) \(", action.help) for _, action in options("--precision")]
    assert {tuple(found[1].split(", ")) for found in caches if found} == {tuple(cache_types.KINDS)}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_shows_every_default_and_the_exit_codes(name):
    parser = build_parser().commands[name]
    assert " ".join(parser.format_help().split()).endswith(f"{EXIT_CODES}.")
    for action in parser._actions:
        if action.default not in (None, False, [], argparse.SUPPRESS):
            assert re.search(rf"default {str(action.default).removesuffix('.0')}\b", action.help), action.option_strings


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_a_module_that_runs_it(name):
    module = __import__(f"bitnet_np.cli.{name}", fromlist=["run"])
    assert callable(module.run)
    assert isinstance(build_parser().commands[name], argparse.ArgumentParser)
