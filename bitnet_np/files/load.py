"""A model file -> a Model: every tensor checked, float tables left where they lie in the mapped file."""

import os
from collections.abc import Mapping
from typing import Any

from ..base.errors import OptionError, UnsupportedError, shown
from ..base.progress import Progress, silent
from ..base.validate import choice, flag, function
from ..kernels.float_state import steady
from ..model import packing
from ..model.families import FAMILIES, layer_shapes
from ..model.records import Expert, Layer, Model, frozen, shapes_of
from ..model.rope import rope_fields, scaling_factors
from .gguf_file import open_parts
from .gguf_source import GGUFSource, GGUFWeights
from .hf_folder import HFSource, open_folder
from .hf_weights import HFWeights
from .locate import locate
from .overrides import OVERRIDABLE, overridden
from .tensors import Shapes, of_file

Source = GGUFSource | HFSource
"""An open GGUF file or Hugging Face folder: its headers are checked, its tensors are not read. No command asks which kind it has.

Both give the weights of a model by the names of fields of records.Model and records.Layer, each of which is asked for at most once: `has`
says whether an optional part is there; then `vector`, `table`, `linears` (matrices that are rows of the tensor whose name `place` gives),
`experts` and `rope_factors`; and `check_all_taken` refuses a tensor that nobody has asked for.
"""
ModelWeights = GGUFWeights | HFWeights


@steady
def load(
    path: str | os.PathLike,
    progress: Progress = silent,
    *,
    allow_nan: bool = False,
    i2s_layout: str = packing.I2S_DEFAULT,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """Open a GGUF file, any part of a model in several GGUF files, a Hugging Face folder, or what `locate` finds by a name, as a model.

    Tables and block types stay in the mapped file; ternary matrices are packed anew (model/packing.py), and their pages of the file are
    released, so that a model takes no more memory than its file. Everything is read once, to check that scales, norms and tables are finite
    and that no ternary code is 3.

    progress: called after each layer with the layers done and all layers.
    allow_nan: accept NaN and infinity, to see what a damaged model computes. A scale below zero or a code of 3 stays an error.
    i2s_layout: one of packing.I2S_LAYOUTS. A file does not say which layout it has, and it cannot be guessed.
    overrides: fields of the Config, of overrides.OVERRIDABLE, to have instead of the file's: {"context": 8192}, or overrides.BEYOND. A key
    of the file with None, {"logit_scale": None}, is ignored.

    Raises FileFormatError, UnsupportedError, ShapeError or NonFiniteError, naming the file and the key or tensor; OptionError for an
    unknown layout or an impossible override; MissingFileError. PermissionError passes through.
    """
    return model_from(open_model(path), progress, allow_nan=allow_nan, i2s_layout=i2s_layout, overrides=overrides)


def open_model(path: str | os.PathLike, download: bool = False) -> Source:
    """Check the headers of a GGUF file (of all parts, if it is one of several) or of a Hugging Face folder. Raises as `load` does.

    download: fetch a repository of Hugging Face that is not in the cache.
    """
    path = locate(path, download)
    return open_folder(path) if path.is_dir() else GGUFSource(open_parts(path))


def model_from(
    source: Source,
    progress: Progress = silent,
    *,
    allow_nan: bool = False,
    i2s_layout: str = packing.I2S_DEFAULT,
    overrides: Mapping[str, Any] | None = None,
) -> Model:
    """Load an open source. Parameters and errors are those of `load`."""
    choice("i2s_layout", i2s_layout, packing.I2S_LAYOUTS)
    function("progress", progress)
    flag("allow_nan", allow_nan)
    overrides = {} if overrides is None else overrides
    source = without_ignored(source, overrides)
    model = _build(source, source.weights(allow_nan, i2s_layout), progress)
    model = overridden(model, overrides) if overrides else model
    rope, context = model.config.longrope, model.config.context
    if rope is not None and rope.short != rope.long and context > rope.original and overrides.get("context") is None:
        raise UnsupportedError(
            f"{source.path}: RoPE is scaled by longrope, whose frequencies are others in contexts of more than {rope.original} tokens. "
            f"Engines choose by the length of a sequence or by the size of a cache; here --override context=N says it, up to {context}"
        )
    return model


def without_ignored(source: Source, overrides: Mapping[str, Any]) -> Source:
    """The source without the keys that are None in `overrides`. Raises OptionError for no mapping, or a key that the source has not."""
    if not isinstance(overrides, Mapping):
        raise OptionError(f"overrides is {shown(overrides)}, expected a mapping of some of {', '.join(OVERRIDABLE)}")
    for key, value in overrides.items():
        if value is None:
            source = source.without(key)
    return source


def _build(source: Source, weights: ModelWeights, progress: Progress) -> Model:
    """The Model of all tensors, each of them taken once."""
    c = weights.config
    rope_factors = weights.rope_factors()
    if rope_factors is not None and scaling_factors(c) is not None:
        kind = "YaRN" if c.longrope is None else "LongRoPE"
        problem = f"RoPE's frequencies have separate factors and are scaled by {kind}"
        raise UnsupportedError(f"{source.path}: {problem}, expected one of both")
    with of_file(source.path):
        parts = rope_fields(c, rope_factors)
    has = {"token_embd": True, "position_embd": FAMILIES[c.architecture].positions, "output_norm": True}
    has |= {"output_norm_bias": c.norm == "layer"} | {name: weights.has(name) for name in ("output", "output_bias")}
    shapes = shapes_of(Model, c)
    for name in (name for name in has if has[name]):
        parts[name] = weights.vector(name, *shapes[name]) if len(shapes[name]) == 1 else weights.table(name, shapes[name])
    layers, of_layer = [], layer_shapes(c)
    for n in range(c.n_layers):
        layers.append(_build_layer(weights, of_layer, n))
        progress(n + 1, c.n_layers)
    weights.check_all_taken()
    return frozen(Model(config=c, layers=tuple(layers), norm_offset=weights.norm_offset, stated_dtype=weights.stated_dtype, **parts))


def _build_layer(weights: ModelWeights, shapes: Shapes, n: int) -> Layer:
    c = weights.config
    fields: dict[str, Any] = {}
    together: dict[str, dict[str, tuple[int, ...]]] = {}  # matrices that are rows of one tensor
    ends = ("", "_bias") if c.norm == "layer" else ("",)  # of a norm's tensors
    for name, shape in shapes.items():
        if len(shape) == 2:
            together.setdefault(weights.place(name, n), {})[name] = shape
            continue
        for end in ends:
            fields[name + end] = weights.vector(name + end, shape[0], n)
    for place, parts in together.items():
        fields |= weights.linears(place, parts)
    if c.experts:
        fields["experts"] = weights.experts(shapes_of(Expert, c), n)
    return frozen(Layer(**fields))
