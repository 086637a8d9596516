"""Whoever leaves an option out gets the definition, today and in later versions: what is computed by default is written down here."""

import inspect

import numpy as np
import pytest
from child import run_python

import bitnet_np
from bitnet_np import EXACT, Sampling
from bitnet_np.engine import masks
from bitnet_np.hunt.outcome import Outcome
from bitnet_np.hunt.run import Finding, Hunt
from bitnet_np.kernels import cpu
from bitnet_np.testing.space import Case

MEANT = {
    "align": "bottom_right",
    "allow_nan": False,
    "capacity": None,
    "chunk": 1,
    "dialect": EXACT,
    "dtype": np.float32,
    "form": "additive",
    "i2s_layout": "128/32",
    "last_only": False,
    "mask": None,
    "mode": "auto",
    "ops": cpu,
    "overrides": None,
    "sampling": Sampling(temperature=0, top_k=0, top_p=1),
    "seed": 0,
    "stop": (),
    "strict": False,
    "temperature": 0,
    "top_k": 0,
    "top_p": 1,
}


def test_an_option_left_out_means_the_same_everywhere_and_always():
    seen = set()
    for module, names in ((bitnet_np, bitnet_np.__all__), (masks, vars(masks))):
        for name in names:
            public = getattr(module, name)
            if name.startswith("_") or not callable(public) or not public.__module__.startswith("bitnet_np"):
                continue
            if name == "check" or (isinstance(public, type) and issubclass(public, Exception)):
                continue  # a check takes what it is given
            for option in inspect.signature(public).parameters.values():
                if option.default is not option.empty and option.name in MEANT:
                    seen.add(option.name)
                    assert option.default == MEANT[option.name], f"{name}({option.name}={option.default})"
    assert seen == MEANT.keys()


def test_names_are_imported_from_where_type_checkers_see_them():
    for name, module in bitnet_np._MODULES.items():
        namespace = {}
        exec(f"from bitnet_np{module.removesuffix('.')} import {name}", namespace)
        assert getattr(bitnet_np, name) is namespace[name]
    with pytest.raises(AttributeError, match="has no attribute 'chek'"):
        bitnet_np.chek  # noqa: B018


def test_the_package_alone_imports_no_kernels():
    program = "import sys, bitnet_np; print({'numpy', 'numba', 'bitnet_np.kernels', 'bitnet_np.judge'} & sys.modules.keys())"
    assert run_python(program) == "set()\n"


OF_PACKAGES = """
import sys, bitnet_np as bn
for name in sys.argv[1:]:
    exec(name)
from bitnet_np import hunt, judge
from bitnet_np.judge.verdict import Verdict
from bitnet_np.hunt.keep import keep
assert bn.hunt is hunt and bn.judge is judge and bn.Verdict is Verdict
print(hunt.__module__, judge.__module__)
"""


@pytest.mark.parametrize(
    "order", [(), ("import bitnet_np.judge.check", "import bitnet_np.hunt"), ("bn.judge", "bn.hunt", "import bitnet_np.hunt.run")]
)
def test_hunt_and_judge_are_functions_whatever_is_imported_first(order):
    assert run_python(OF_PACKAGES, *order) == "bitnet_np.hunt.api bitnet_np.judge.measures\n"


LOGITS = np.linspace(-1, 1, 60, dtype=np.float32).reshape(3, 20) ** 3
FINDING = Finding(Case(), Outcome("wrong", "off"), condition=(), stands=True, failing=7, passing=0)


@pytest.mark.parametrize(
    ("passes", "fails", "said"),
    [
        (bitnet_np.judge(LOGITS, LOGITS), bitnet_np.judge(LOGITS, -LOGITS), "WRONG: "),
        (bitnet_np.judge(LOGITS, LOGITS), bitnet_np.judge(LOGITS, LOGITS[:2]), "INVALID: "),
        (Hunt(runs=7), Hunt([FINDING], runs=7), "WRONG in all 7 runs; smallest: llama, "),
        (Hunt(runs=7), Hunt(notes=["the engine took no model: crash"]), "the engine took no model: crash"),
    ],
)
def test_a_result_is_true_if_it_passed(passes, fails, said):
    """So that `assert bn.judge(...)` and `assert bn.hunt(...)` say what they seem to say; tests/judge/test_report.py has a Report's."""
    assert passes
    assert passes.passed
    assert passes.raise_if_wrong() is passes
    assert not fails
    assert not fails.passed
    with pytest.raises(bitnet_np.errors.WrongError) as error:
        fails.raise_if_wrong()
    assert str(error.value).startswith(said)
