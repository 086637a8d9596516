"""`bitnet-np mask Q K`: print a small mask, to see which keys each query sees."""

import argparse
import json

from ..base.errors import OptionError
from ..engine import masks

LARGEST = 128  # queries and keys that are printed


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
