"""The largest logits of some steps, in the JSON of the command bitnet-cli of BitNet-rs, which is developed as bitnet-rs-swarm.

`logits_dump` has an object for each step (--dump-logit-steps, --logits-topk, --json-out): its number `step`, the token `chosen_id`, and
`top_logits`, objects of token_id and logit, or `topk`, pairs of both. `run` chooses tokens: its step 0 follows the prompt, whose ids
bitnet-rs-swarm adds as tokens.prompt_ids. `eval` is given them: its step 0 follows the first one; the first 100 are in `tf_path_head`.
"""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import FileFormatError, ServerError
from ...files.safetensors_file import json_of
from ...servers.completions import Completions, listed, logprob, member, of_type, token, tokens, top_logprobs

_LARGEST = 1 << 26  # bytes of a file


def read(path: Path, ids: NDArray[np.int64]) -> Completions:
    """The steps of a file. ids: of the prompt of `run`, or of all tokens of `eval`. Raises FileFormatError."""
    try:
        return _read(str(path), json_of(path, _LARGEST), ids.tolist())
    except ServerError as error:  # from the checks that answers of servers also go through
        raise FileFormatError(str(error)) from None


def _read(where: str, value: Any, ids: list[int]) -> Completions:
    steps, forced = member(where, value, "logits_dump", list), value.get("tf_path_head")
    held = value["tokens"].get("prompt_ids") if forced is None and isinstance(value.get("tokens"), dict) else forced
    if held is not None and (known := tokens(f"{where}: its token ids", held)) != ids[: len(known) if forced is not None else None]:
        raise FileFormatError(f"{where}: holds the tokens {known[:8]}, expected {ids[:8]}")
    top, chosen, first = [], list[int](), 0 if forced is not None else len(ids) - 1
    for i, step in enumerate(steps):
        here = f"{where}: logits_dump[{i}]"
        if member(here, step, "step", int) != i:
            raise FileFormatError(f"{here}.step is {step['step']}, expected {i}")
        name = "topk" if "topk" in step else "top_logits"
        top.append(top_logprobs(first + i, listed(f"{here}.{name}", step.get(name), _entry)))
        if forced is None and i + 1 < len(steps):
            chosen.append(token(f"{here}.chosen_id", step.get("chosen_id")))
    if first + len(steps) > len(ids) + len(chosen):
        raise FileFormatError(f"{where}: {len(steps)} steps of forced tokens, expected at most {len(ids)}, the tokens")
    together = np.array(ids + chosen, np.int64)
    return Completions(together, len(together), min((len(row.ids) for row in top), default=0), tuple(top), logits=True)


def _entry(where: str, value: Any) -> tuple[int, float]:
    """The id and the logit of a token: {"token_id": 1, "logit": 2.5} or [1, 2.5]."""
    if isinstance(value, dict):
        value = [value.get("token_id"), value.get("logit")]
    if len(of_type(where, value, list)) != 2:
        raise ServerError(f"{where} is {value}, expected a token id and its logit")
    return token(f"{where}: the id", value[0]), logprob(f"{where}: the logit", value[1])
