"""Prints the verdict on each case of a set, and its reason: `python judge.py policies|policies_b|public_faults|... whole|layers|logits`.

No search for causes runs with --budget 0. A right engine must pass; a mistake must be WRONG, and the reason should be its cause.
"""

import argparse
import importlib

import engine
import numpy as np

import bitnet_np as bn

FORMS = {"whole": "", "layers": ("l_out", "result_output"), "logits": "result_output"}

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
SETS = [f"{kind}{x}" for kind, letters in (("policies", "bcdefgh"), ("public_faults", "bcdefg")) for x in ("", *(f"_{y}" for y in letters))]
parser.add_argument("set", choices=SETS)
parser.add_argument("form", choices=FORMS)
parser.add_argument("--budget", type=float, default=15.0, help="seconds of each search for causes (default %(default)s)")
options = parser.parse_args()

module = importlib.import_module(options.set)
is_right = options.set.startswith("policies")
passed = 0
cases = module.POLICIES if is_right else module.FAULTS
for name, case in cases.items():
    path = f"{engine.HERE}/models/{'llama' if is_right else case.model}.gguf"
    model = bn.load(path)
    tokens = np.random.default_rng(7).integers(1, model.config.vocab, 40 if is_right else case.tokens)
    if is_right:
        dump = engine.run(path, tokens, policy=case.make())
    else:
        dump = case.engine(path, None, case.threads).run(tokens, case.chunk, case.prefix)
    kept = {label: x for label, x in dump.items() if label.startswith(FORMS[options.form])}
    report = bn.check(model, tokens, kept, prefix=0 if is_right else case.prefix, budget=options.budget)
    passed += report.verdict <= bn.Verdict.NARROW
    print(f"{name} {report.verdict.name}: {report.reason}\n    {case.what if is_right else case.cause}", flush=True)
print(f"{passed} of {len(cases)} pass")
