"""An answer of a server that was saved as it came: log-probabilities of the most probable tokens, as `check --endpoint` would ask for them.

llama-server's `/completion` with n_probs, SGLang's `/generate`, and `/v1/completions` of others, with tokens by their ids.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...base.errors import FileFormatError, ServerError
from ...files.safetensors_file import json_of
from ...servers import llama_server, openai, sglang
from ...servers.completions import Completions

_LARGEST = 1 << 26  # bytes of a file
_MOST = 1 << 31  # tokens that may have been asked for: the file does not say
_PARSERS = {"completion_probabilities": llama_server.parse, "meta_info": sglang.parse, "choices": openai.parse}
"""By the member that only such answers have."""
NAMES = tuple(f'"{name}"'.encode() for name in _PARSERS)
"""Those members, as a file has them."""


def read(path: Path, ids: NDArray[np.int64]) -> Completions:
    """The log-probabilities of a file. ids: the tokens of the prompt, which answers do not hold. Raises FileFormatError."""
    try:
        return _read(json_of(path, _LARGEST), ids.tolist())
    except ServerError as error:
        raise FileFormatError(f"{path}: {error}") from None


def _read(answer: Any, ids: list[int]) -> Completions:
    name = next((name for name in _PARSERS if isinstance(answer, dict) and name in answer), None)
    if name is None:
        raise ServerError(f"no answer of a server, expected one of {', '.join(_PARSERS)} in it")
    record = _PARSERS[name](answer, ids, _MOST, 0)
    dialect = llama_server.LlamaServer.dialect if name == "completion_probabilities" else None
    return replace(record, k=min((len(row.ids) for row in record.top), default=0), dialect=dialect)
