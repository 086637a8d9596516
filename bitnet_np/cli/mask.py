"""`bitnet-np mask Q K`: print a small mask, to see which keys each query sees.

Examples:
  bitnet-np mask 4 6 --window 3
  bitnet-np mask 4 4 --prefix 2 --bool
"""

import argparse
import json
from typing import get_args

from ..base.errors import OptionError
from ..engine import masks

SUMMARY = "Print a small attention mask."
LARGEST = 128  # queries and keys that are printed


ARGUMENTS = f"""
q_len@Q: number of queries
k_len@K: number of keys
--past N: number of keys before the first query's own (default K - Q)
--align {"|".join(get_args(masks.Align))} = bottom_right: corner at which the diagonal begins or ends; top_left is --past 0 and allows K < Q
--window N = 0: each query sees only the last N keys, its own included
--block N = 0: each query sees only keys of its own block of N positions
--sinks N = 0: with --window or --block: the first N keys are visible, too
--prefix N = 0: every query sees the first N keys
--bool: print 1 for a visible key and 0 for a hidden one, instead of 0 and -inf
"""


def run(arguments: argparse.Namespace) -> int:
    """Print the mask; returns the exit code."""
    if max(arguments.q_len, arguments.k_len) > LARGEST:
        raise OptionError(f"a mask of {arguments.q_len} x {arguments.k_len} is too large to print, expected {LARGEST} of each at most")
    pattern = masks.Pattern(arguments.window, arguments.prefix, arguments.block, arguments.sinks)
    seen = masks.mask(arguments.q_len, arguments.k_len, pattern, past=arguments.past, align=arguments.align, form="bool")
    blind = masks.fully_masked(seen).nonzero()[0].tolist()
    if arguments.json:
        print(json.dumps({"shape": seen.shape, "pattern": pattern._asdict(), "seen": seen.astype(int).tolist(), "fully_masked": blind}))
        return 0
    shown, hidden = ("1", "0") if arguments.bool else ("   0", "-inf")
    for row in seen:
        print(" ".join(shown if key else hidden for key in row))
    if blind:
        print(f"rows that see nothing, where attention gives zeros: {', '.join(map(str, blind))}")
    return 0
