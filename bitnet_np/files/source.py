"""A place to load a model from: an open GGUF file or Hugging Face folder. Its headers are checked, its tensors are not read.

Both give the weights of a model by the names of fields of model.Model and model.Layer, each of which is asked for at most once: `has` says
whether there is a part that is optional; then `vector`, `table`, `linear`, `siblings` (matrices that may be rows of one tensor), `experts`
and `rope_factors`; and `check_all_taken` refuses a tensor that nobody has asked for. load.py builds a Model through them, and no command
asks which kind it has.
"""

from collections.abc import Mapping
from typing import Any

from ..base.errors import OptionError, shown
from .gguf_source import GGUFSource, GGUFWeights
from .hf_source import HFSource, HFWeights
from .overrides import OVERRIDABLE

Source = GGUFSource | HFSource
ModelWeights = GGUFWeights | HFWeights


def without_ignored(source: Source, overrides: Mapping[str, Any]) -> Source:
    """The source without the keys that are None in `overrides`. Raises OptionError for no mapping, or a key that the source has not."""
    if not isinstance(overrides, Mapping):
        raise OptionError(f"overrides is {shown(overrides)}, expected a mapping of some of {', '.join(OVERRIDABLE)}")
    for key, value in overrides.items():
        if value is None:
            source = source.without(key)
    return source
