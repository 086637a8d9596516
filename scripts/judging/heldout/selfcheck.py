"""Compares the cases of a set with the clean engine, without the judge: `python selfcheck.py public_faults_d|policies_c|...`.

A fault must change some tensor by more than LEAST of its largest number. A policy must change something, keep the logits' correlation above
0.98, and each of its methods must give nearly the clean one's numbers on the same inputs (`hooks`: it may only round).
A conditional fault must change the run if, and only if, its predicate holds, in `on` (it does), `off` (it does not) and a share of GRID.
"""

import argparse
import importlib
import sys
from types import SimpleNamespace

import engine
import numpy as np
from engine import F32, Engine, Num

LEAST = 1e-4
CHECKED = {"public_faults": "cdefg", "policies": "bcdefgh", "conditional_faults": "bcdefgh"}


def tokens_of(count, vocab, seed=7):
    return np.random.default_rng(seed).integers(1, vocab, count)


def run(cls, model, count, chunk=None, prefix=0, threads=1, num=None, tokens=None):
    case = cls(f"{engine.HERE}/models/{model}.gguf", num, threads)
    return case.run(tokens_of(count, case.c.vocab) if tokens is None else tokens, chunk, prefix)


def changes(a, b):
    """By name, in the order of the run: the largest difference over the largest number of the clean tensor, and the share of numbers."""
    out = {}
    for name, x in ((name, x) for name, x in b.items() if name in a):  # a fault may leave a tensor out, or add one
        d = np.abs(a[name].astype(np.float64) - x) if a[name].shape == x.shape else np.full(1, np.inf)
        bad = ~np.isfinite(a[name]).all()
        out[name] = (np.inf if bad else d.max() / max(np.abs(x).max(), 1e-30), (d > 1e-6 * np.abs(x).max()).mean())
    return out


def correlation(a, b):
    return np.corrcoef(a["result_output"].ravel(), b["result_output"].ravel())[0, 1]


def public(cases):
    for case in cases:
        args = case.model, case.tokens, case.chunk, case.prefix, case.threads
        wrong, clean = run(case.engine, *args), run(Engine, *args)
        by_name = changes(wrong, clean)
        first = next((name for name, (most, _) in by_name.items() if most > LEAST), None)
        worst = max(by_name, key=lambda name: by_name[name][0])
        ok = first is not None and np.isfinite(by_name[worst][0])
        print(
            f"{'ok  ' if ok else 'BAD '}{case.id} {case.reach:6} {case.model:12} first {first} {by_name.get(first, (0, 0))[0]:.1e} "
            f"({by_name.get(first, (0, 0))[1]:.0%}), worst {worst} {by_name[worst][0]:.1e}, logits {by_name['result_output'][0]:.1e} "
            f"correlation {correlation(wrong, clean):.4f}"
        )
        yield ok


def hooks(policy):
    """The largest relative distance of each rounding method of a policy from the clean one, on the same random numbers."""
    rng, clean, out = np.random.default_rng(3), Num(), {}
    x, w = rng.standard_normal((24, 64)).astype(F32), rng.standard_normal((48, 64)).astype(F32)
    q, k, v = (rng.standard_normal((4, n, 16)).astype(F32) for n in (24, 40, 40))
    p = np.abs(rng.standard_normal((4, 24, 40))).astype(F32)
    seen = np.arange(24)[:, None] + 16 >= np.arange(40)
    whole = SimpleNamespace(cap=lambda s, n: s, scale_scores=lambda s, n: s * F32(0.25))
    for num, name in ((policy, "softmax"), (clean, "softmax")):
        setattr(whole, name, lambda s, n, num=num: num.softmax(s))
        out.setdefault("attend", []).append(num.attend(whole, q, k, v, seen, 0))
    for name, args in dict(
        weight=(w, "blk.0.ffn_up.weight"), vector=(w[0], "blk.0.attn_norm.weight"), lin_in=(x, "blk.0.ffn_up.weight"), mm=(x, w),
        store=(x, "ffn_up"), cache=(q, "k"), qk=(q, k), pv=(p, v), exp=(-np.abs(4 * x),), tanh=(x,), rsqrt=(np.abs(x) + F32(0.1),),
        mean=(x * x,), total=(p,), softmax=(4 * x,), sigmoid=(4 * x,), silu=(4 * x,), gelu=(4 * x,), add=(x, x[::-1]), gain=(x, w[0]),
    ).items():  # fmt: skip
        out[name] = [getattr(num, name)(*args) for num in (policy, clean)]
    angle = np.multiply.outer(np.arange(40.0), 10000.0 ** (-np.arange(8) / 8))
    out["sin_cos"] = [np.stack(num.sin_cos(angle)) for num in (policy, clean)]
    return {name: np.abs(a - b).max() / np.abs(b).max() for name, (a, b) in out.items() if np.abs(a - b).max()}


def policies(cases):
    for case in cases:
        clean, right = run(Engine, "llama", 40), run(Engine, "llama", 40, num=case.make())
        far, r = hooks(case.make()), correlation(right, clean)
        worst = max(by_name := changes(right, clean), key=lambda label: by_name[label][0])
        ok = r > 0.98 and by_name[worst][0] > 1e-7 and np.isfinite(by_name[worst][0]) and max(far.values(), default=0) < 0.15
        each = ", ".join(f"{hook} {x:.0e}" for hook, x in far.items())
        print(f"{'ok  ' if ok else 'BAD '}{case.id} logits' correlation {r:.6f}, worst {worst} {by_name[worst][0]:.1e}; methods: {each}")
        yield ok


GRID = [
    (t, k, p, n)
    for t in (1, 2, 7, 17, 24, 33, 40, 49, 66)
    for k in (None, 1, 3, 8, 16, 20, 32)
    for p in (0, 1, 8, 16, 20, 32)
    for n in (1, 2, 3, 4, 5)
    if p < t and (k != 1 or t <= 40)
]


def conditional(cases, share):
    rng = np.random.default_rng(5)
    for case in cases:
        runs = [case.on, case.off] + [
            (model, *GRID[i]) for model in {case.on[0], case.off[0]} for i in rng.permutation(len(GRID))[: int(share * len(GRID))]
        ]
        changed, held, wrong = [], 0, []
        for i, (model, count, chunk, prefix, threads) in enumerate(runs):
            config = Engine(f"{engine.HERE}/models/{model}.gguf").c
            tokens = case.tokens if case.tokens is not None and i == 0 else tokens_of(count, config.vocab)
            found, clean = (run(cls, model, count, chunk, prefix, threads, tokens=tokens) for cls in (case.engine, Engine))
            most = max(x for x, _ in changes(found, clean).values())
            says = bool(case.when(config, tokens, chunk, prefix, threads))
            held += says
            right = LEAST < most < np.inf if says else most < 1e-5
            if not right or (i < 2 and says != (i == 0)):
                wrong.append((model, count, chunk, prefix, threads, says, float(most)))
            changed.append(most)
        print(
            f"{'BAD ' if wrong else 'ok  '}{case.id} on: {changed[0]:.1e}, smallest {case.smallest}; the condition holds in {held} of "
            f"{len(runs)} runs, and is wrong in {len(wrong)} {wrong[:4]}",
            flush=True,
        )
        yield not wrong


def main():
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("set", choices=[f"{kind}_{x}" for kind, letters in CHECKED.items() for x in letters])
    p.add_argument("--share", type=float, default=0.02, help="share of GRID that is run for each model of a conditional fault")
    p.add_argument("--only", default="", help="ids, with commas in between (default all)")
    a = p.parse_args()
    module = importlib.import_module(a.set)
    cases = module.POLICIES if a.set.startswith("policies") else module.FAULTS
    cases = [case for id, case in cases.items() if not a.only or id in a.only.split(",")]
    check = {"public": public, "policies": policies, "conditional": lambda cases: conditional(cases, a.share)}[a.set.split("_")[0]]
    right = list(check(cases))
    print(f"{sum(right)} of {len(right)} are as they should be")
    return 0 if all(right) else 1


if __name__ == "__main__":
    sys.exit(main())
