"""What a server says in the names that it gives: the float types that it computes in, and that its weights are quantised."""

import re
from collections.abc import Iterable

_TYPES = {"bfloat16": "bf16|bfloat16", "float16": "f16|fp16|float16|half"}
_QUANTISED = "awq|gptq|fp8|fp4|nf4|mxfp[468]|nvfp4|int[248]|[2348]-?bit|w[48]a(?:4|8|16)|bnb|exl[23]|(?:i?q[2-8]|tq[12])_[a-z0-9_]+"
_USUAL = {"vllm": ("bfloat16", "float16"), "sglang": ("bfloat16", "float16")}
"""Servers that compute in a narrow type unless they are told otherwise, by what they call themselves.

Sources: vLLM's `--dtype auto` and SGLang's `--dtype auto`, which take bfloat16 or float16 also for weights in float32.
"""


def stated_types(names: Iterable[str]) -> tuple[str, ...]:
    """The float types that a server computes in by the names it gives, such as its model's and its own, the likeliest first."""
    words = [name.lower() for name in names]
    named = [kind for kind, pattern in _TYPES.items() if any(_has(pattern, word) for word in words)]
    return tuple(dict.fromkeys([*named, *(kind for word in words for kind in _USUAL.get(word, ()))]))


def quantised_name(names: Iterable[str]) -> str | None:
    """The name of a model that says that its weights are quantised."""
    return next((name for name in names if _has(_QUANTISED, name.lower())), None)


def _has(pattern: str, word: str) -> bool:
    return re.search(rf"(?<![a-z0-9])(?:{pattern})(?![a-z0-9])", word) is not None
