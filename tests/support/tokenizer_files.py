"""The tokenizer in the objects of a tokenizer.json, and changes of one key of it."""

import copy
from pathlib import Path
from typing import Any

from bitnet_np.text.hf_tokenizer import tokenizer_metadata
from bitnet_np.text.tokenizer import Tokenizer, tokenizer_from


def from_json(told: dict[str, Any], config: Any = (("bos_token", "<s>"), ("eos_token", "</s>")), **model: Any) -> Tokenizer:
    """The tokenizer in these objects of tokenizer.json, tokenizer_config.json and config.json."""
    return tokenizer_from(tokenizer_metadata(Path("m"), told, dict(config), model, None), "m")


def changed(told: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy in which the key at the end of the dotted path has another value."""
    told = part = copy.deepcopy(told)
    *keys, last = path.split(".")
    for key in keys:
        part = part[int(key)] if key.isdigit() else part[key]
    part[last] = value
    return told
