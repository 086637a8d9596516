"""Command-line arguments that several commands share, each declared once, and what they say."""

import argparse
from pathlib import Path
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ..base.errors import OptionError
from ..base.whole_file import whole_file
from ..engine.dialects import DIALECTS, Dialect
from ..files.overrides import OVERRIDABLE
from ..gpu.dispatch import Device
from ..judge.precision import CACHES, PROFILES, Precision, Profile
from ..model import packing
from ..traces.formats import FORMATS

# --- the model and its tokens ---------------------------------------------------------------------------------------------------------


def add_model_argument(parser: argparse.ArgumentParser, metavar: str = "MODEL", default: str = "") -> None:
    """Add MODEL, which most commands begin with. default: the model taken where none is named, in words; empty: one must be named."""
    description = "a GGUF file or a Hugging Face folder, or its name at Hugging Face (ORG/NAME) or Ollama (NAME:TAG)"
    description += f" (default: {default})" if default else ""
    parser.add_argument("model", type=Path, nargs="?" if default else None, metavar=metavar, help=description)
    add_download_argument(parser)


def add_download_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--download", action="store_true", help="fetch a model from Hugging Face if it is not in the cache (extra `hub`)")


def add_model_and_tokens(
    parser: argparse.ArgumentParser, default: str = "", text: str = "--text", required: bool = True
) -> argparse._MutuallyExclusiveGroup:
    """Add MODEL and the options for token ids."""
    add_model_argument(parser, default=default)
    return add_token_arguments(parser, text, required)


def add_token_arguments(parser: argparse.ArgumentParser, text: str = "--text", required: bool = True) -> argparse._MutuallyExclusiveGroup:
    """Add the options for token ids, of which one may be given; text: the name of the one for a text. inputs.py reads them."""
    group = parser.add_mutually_exclusive_group(required=required)
    group.add_argument("--tokens", metavar="1,2,3", help="token ids between commas or blanks")
    group.add_argument(
        "--tokens-file", type=Path, metavar="F", help="file of token ids [T] or [B, T]: .npy, .json, or .txt with a sequence on each line"
    )
    group.add_argument(text, dest="text", metavar="S", help="text for the model's tokenizer; byte-level BPE needs the extra `text`")
    return group


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say how a model's file is read."""
    parser.add_argument("--allow-nan", action="store_true", help="load a model even if its weights hold NaN or infinity")
    parser.add_argument(
        "--i2s-layout",
        choices=packing.I2S_LAYOUTS,
        default=packing.I2S_DEFAULT,
        help="layout of I2_S matrices, which the file does not say: 128/32 (default) as in the released model, 64/16 as bitnet.cpp writes "
        "for ARM since the end of 2025, 4-rows as bitnet.cpp writes on x86 without ACT_PARALLEL. In the wrong layout half of all weights "
        "are wrong",
    )


def add_threads_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, metavar="N", help="number of threads; the result does not depend on it")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """Add --threads, and the options for loading and overriding."""
    add_threads_argument(parser)
    add_load_arguments(parser)
    parser.add_argument(
        "--override",
        action="append",
        default=[],
        metavar="NAME=N",
        help=f"replace a setting of the file: {', '.join(OVERRIDABLE)}; KEY=none ignores an unknown key of the file; repeatable. "
        "Both values are reported on standard error",
    )
    parser.add_argument("--allow-beyond-context", action="store_true", help="allow more tokens than the model was trained for")


# --- how to compute -------------------------------------------------------------------------------------------------------------------


def add_computing_arguments(parser: argparse.ArgumentParser, device: bool = True) -> None:
    """Add --as, --precision, --threads, the options for loading and overriding, and with a choice of devices --device and --metrics."""
    parser.add_argument(
        "--as",
        dest="dialect",
        choices=DIALECTS,
        default="exact",
        help="the engine whose roundings to follow (default exact: the definition)",
    )
    parser.add_argument("--precision", metavar="kv=TYPE", help=f"the type of the KV cache: {', '.join(CACHES)} (default float32)")
    add_model_options(parser)
    if not device:
        return
    parser.add_argument(
        "--device",
        choices=get_args(Device),
        default="cpu",
        help="where to compute: cpu (default), cuda (an NVIDIA GPU, extra `cuda`), auto (a GPU if there is one) or numpy (the contract in "
        "plain NumPy, without kernels: slow, for comparisons); the bits are the same",
    )
    parser.add_argument(
        "--metrics", type=Path, metavar="F.json", help="count and time every operation: JSON to this file, a table to standard error"
    )


def dialect_of(arguments: argparse.Namespace) -> Dialect:
    """The dialect that --as and --precision name, to compute in. Raises OptionError."""
    dialect = DIALECTS[arguments.dialect]
    if arguments.precision is None:
        return dialect
    precision = Precision.parse(arguments.precision)
    if precision != Precision(kv=precision.kv):
        raise OptionError(f"--precision is {arguments.precision!r}, expected kv=TYPE alone: other types are known to check only")
    return dialect.with_cache(precision.kv)


# --- what is judged -------------------------------------------------------------------------------------------------------------------


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    """Add --as and --precision, what is declared of the engine that is judged; `profile_of` reads them."""
    parser.add_argument(
        "--as",
        dest="profile",
        choices=PROFILES,
        help="the kind of engine (default: the definition, with types narrower than float32 read off the dump; exact: nothing is read off; "
        "with --endpoint: the server's)",
    )
    parser.add_argument(
        "--precision",
        metavar="act=bf16,kv=q8_0,...",
        help="the types that the engine keeps numbers in: act (tensors), kv (the cache), probs, acc, attn_acc (sums), "
        "scale (of int8 codes), head",
    )


def profile_of(arguments: argparse.Namespace, default: str | None = None) -> Profile:
    """The dialect and precision that are declared, or a default one's by name. Raises OptionError."""
    return Profile.of(arguments.profile or default, arguments.precision)


# --- what is written ------------------------------------------------------------------------------------------------------------------


def add_format_argument(parser: argparse.ArgumentParser) -> None:
    """Add --format, for a trace that is written."""
    formats = [name for name, format in FORMATS.items() if format.writer]
    parser.add_argument("--format", choices=formats, help="format to write (default: by the end of the file's name)")


def check_out(option: str, path: Path | None, suffix: str = "") -> None:
    """Check that a file can be written to `path`, before anything is computed. Raises OptionError that names the option.

    suffix: what the name may end in, because the content is of that format, if it ends in anything.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise OptionError(f"{option} is {path}, expected a file in a folder that is there")
    if path is not None and suffix and path.suffix not in ("", suffix):
        raise OptionError(f"{option} is {path}, expected a name that ends in {suffix}: that is what is written")


def save_npy(path: Path, array: NDArray) -> None:
    """Write a .npy file, completely or not at all, whatever the name ends in."""
    with whole_file(path) as part, open(part, "wb") as file:
        np.save(file, array)
