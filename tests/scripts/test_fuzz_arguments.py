"""The fuzzer of arguments: it knows every public function and every option, sound calls end well, and what is foreign is a finding."""

import inspect
from dataclasses import replace

import fuzz_gguf
import numpy as np
import pytest
from fuzzing import arguments, cases

import bitnet_np as bn
from bitnet_np.base.errors import OptionError
from bitnet_np.engine import mask_checks

RECORDS = {"Blocks", "Completion", "Config", "Dialect", "Expert", "Judgement", "Layer", "Linear", "Model", "Report", "Ternary"} | {
    "OperationVerdict",
    "Trace",
}
"""What functions take and give. The fuzzer changes their fields where they are arguments."""
NO_FUNCTIONS = {"BITNET_CPP", "EXACT", "LLAMA_CPP", "Error", "Verdict", "Metrics", "contract", "masks", "errors"} | {
    "record_mlx",
    "record_transformers",
}
"""The last two take models of other libraries, whatever these are."""
PARTS = {"masks.plan", "masks.check_causal"}  # of masks.mask and masks.check


def test_every_public_function_and_each_of_its_parameters_is_there(tmp_path):
    found, own = arguments.calls(tmp_path / "own"), (bn.masks.__name__, mask_checks.__name__)
    of_masks = {f"masks.{name}" for name, value in vars(bn.masks).items() if inspect.isfunction(value) and value.__module__ in own}
    public = {name for name in of_masks - PARTS if "._" not in name} | set(bn.__all__) - RECORDS - NO_FUNCTIONS
    assert len(public) >= 30
    assert public <= found.keys()
    for name in public:
        function = found[name].function
        if function.__name__ != "<lambda>" and name != "Precision":  # whose fields are alike
            parameters = inspect.signature(function).parameters.keys() - {"storage"}
            if "how" in parameters:  # options by name, as a TypedDict
                parameters = parameters - {"how"} | bn.masks._How.__annotations__.keys()
            assert parameters == found[name].arguments.keys(), name


def test_sound_calls_and_commands_end_well(tmp_path):
    (folder := tmp_path / "own").mkdir()
    for call in arguments.calls(folder).values():
        call.function(**call.arguments)
    for name, words in arguments.commands(folder).items():
        if name not in ("check", "compare", "nll"):  # whose parts other tests run
            arguments._run([name, *words])


def test_no_argument_is_answered_by_a_foreign_error(tmp_path):
    """Some of the cases that CI runs for a minute (fuzz_gguf.py)."""
    seeds = [cases.Seed("arguments", None, {})]
    outcomes = {n: cases.attempt(seeds, n, tmp_path) for n in range(120)}
    assert {n: outcome for n, outcome in outcomes.items() if outcome not in ("ran", "refused")} == {}
    assert list(outcomes.values()).count("ran") > 5


@pytest.mark.parametrize("error", [KeyError("planted"), RuntimeError("planted"), OptionError("planted"), MemoryError()])
def test_a_foreign_error_is_a_finding(tmp_path, monkeypatch, capsys, error):
    def fragile(**arguments):
        raise error

    monkeypatch.setattr(arguments, "calls", lambda folder: {"f": arguments.Call(fragile, {"x": np.zeros(3)})})
    (tmp_path / "arguments").mkdir()
    foreign = not isinstance(error, OptionError | MemoryError)
    assert fuzz_gguf.main(["--cases", "3", "--seed", "1", "--jobs", "0", str(tmp_path / "arguments")]) == int(foreign)
    assert ("planted" in capsys.readouterr().out) == foreign


KNOWN = {
    "gain": (lambda: arguments.random_model(0, gain="x"), "gain is 'x'"),
    "gain of float16": (lambda: arguments.random_model(0, weights="Q8_0", width=64, gain=2**64), "gain is .* at most 1000, .* of Q8_0"),
    "strict": (lambda: bn.check(arguments._model(), [1], {"logits": arguments._logits()[:1]}, strict=np.ones(2)), "strict is array"),
    "rows": (lambda: bn.generate_batch(arguments._model(), np.broadcast_to(1, (2**20, 2**20)), 1), "request is array"),
    "vocab": (lambda: arguments.random_model(0, vocab=2**62), "vocab is"),
    "yarn": (lambda: arguments.random_model(0, yarn=3), "yarn is 3, expected a Yarn"),
    "ops": (lambda: bn.forward_full(arguments._model(), [[1]], ops="cuda"), "ops is 'cuda', expected a backend"),
    "record": (lambda: bn.forward_full(arguments._model(), [[1]], record=3), "record is 3, expected a function"),
    "metrics": (lambda: bn.Metrics().ops(3), "backend is 3"),
    "surrogate": (lambda: bn.load("\ud800"), "path is"),
    "mask": (lambda: bn.masks.as_additive(np.array([0, 1e308])), "mask has 1e\\+308, expected numbers within float32's range"),
    "like": (lambda: bn.hunt(print, replace(arguments._model(), token_embd=range(3))), "token_embd is range"),
    "repr": (lambda: bn.pad(arguments.Hostile("__repr__")), "tokens is a Hostile__repr__"),
}


@pytest.mark.parametrize("name", KNOWN)
def test_errors_that_were_foreign(name):
    call, said = KNOWN[name]
    with pytest.raises(bn.Error, match=said):
        call()
