"""Whoever leaves an option out gets the definition, today and in later versions: what is computed by default is written down here."""

import inspect

import numpy as np

import bitnet_np
from bitnet_np import EXACT, Sampling
from bitnet_np.engine import masks
from bitnet_np.kernels import cpu

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
