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
from ..judge.law.precision import CACHES, PROFILES, Profile, dialect_to_compute
from ..model import packing
from ..traces.formats import FORMATS

# --- the model and its tokens ---------------------------------------------------------------------------------------------------------

A_MODEL = "a GGUF file or a Hugging Face folder, or its name at Hugging Face (ORG/NAME) or Ollama (NAME:TAG)"
DOWNLOAD = "--download: fetch a model from Hugging Face if it is not in the cache (extra `hub`)"
MODEL = f"MODEL: {A_MODEL}\n{DOWNLOAD}"
TOKENS = """--tokens 1,2,3: token ids between commas or blanks
--tokens-file F: file of token ids [T] or [B, T]: .npy, .json, or .txt with a sequence on each line; .npz or .json with input_ids and
 attention_mask or lengths, where they are padded
--text S: text for the model's tokenizer; byte-level BPE needs the extra `text`"""
"""Of which one may be given; inputs.py reads them."""
MODEL_AND_TOKENS = f"{MODEL}\n\none of\n{TOKENS}\n"

THREADS = "--threads N: number of threads; the result does not depend on it"
LOADING = f"""--allow-nan: load a model even if its weights hold NaN or infinity
--i2s-layout {"|".join(packing.I2S_LAYOUTS)} = {packing.I2S_DEFAULT}: layout of I2_S matrices, which the file does not say:
 128/32 (default) as in the released model, 64/16 as bitnet.cpp writes for ARM since the end of 2025, 4-rows as bitnet.cpp writes on x86
 without ACT_PARALLEL. In the wrong layout half of all weights are wrong"""
MODEL_OPTIONS = f"""{THREADS}
{LOADING}
--override NAME=N+: replace a setting of the file: {", ".join(OVERRIDABLE)};
 KEY=none ignores an unknown key of the file; repeatable. Both values are reported on standard error
--allow-beyond-context: allow more tokens than the model was trained for"""

# --- how to compute -------------------------------------------------------------------------------------------------------------------

DIALECT_AND_MODEL = f"""--as dialect@{"|".join(DIALECTS)} = exact: the engine whose roundings to follow (default exact: the definition)
--precision kv=TYPE: the type of the KV cache: {", ".join(CACHES)} (default float32)
{MODEL_OPTIONS}"""
COMPUTING = f"""{DIALECT_AND_MODEL}
--device {"|".join(get_args(Device))} = cpu: where to compute: cpu (default), cuda (an NVIDIA GPU, extra `cuda`), auto (a GPU if there is
 one) or numpy (the contract in plain NumPy, without kernels: slow, for comparisons); the bits are the same
--metrics F.json: count and time every operation: JSON to this file, a table to standard error"""


def dialect_of(arguments: argparse.Namespace) -> Dialect:
    """The dialect that --as and --precision name, to compute in. Raises OptionError."""
    return dialect_to_compute(arguments.dialect, arguments.precision)


# --- what is judged -------------------------------------------------------------------------------------------------------------------

PROFILE = f"""--as profile@{"|".join(PROFILES)}: the kind of engine (default: the definition, with types narrower than float32 read off
 the dump; exact: nothing is read off; with --endpoint: the server's)
--precision act=bf16,kv=q8_0,...: the types that the engine keeps numbers in: act (tensors), kv (the cache), probs, acc, attn_acc (sums),
 scale (of int8 codes), head"""
"""What is declared of the engine that is judged; `profile_of` reads it."""


def profile_of(arguments: argparse.Namespace, default: str | None = None) -> Profile:
    """The dialect and precision that are declared, or a default one's by name. Raises OptionError."""
    return Profile.declared(arguments.profile or default, arguments.precision)


# --- what is written ------------------------------------------------------------------------------------------------------------------

_WRITTEN = "|".join(name for name, format in FORMATS.items() if format.writer)
FORMAT = f"--format {_WRITTEN}: format to write (default: by the end of the file's name)"
"""Of a trace that is written."""
REPORT = """--format text|json|github|junit|tap = text: form of the report: text (default), JSON, text and an annotation of
 GitHub Actions, JUnit's XML, or the Test Anything Protocol
-q, --quiet: print one line
-v, --verbose: print all layers, the tables of logits and of wrong tensors, and who is closer to float64
--html F.html: write the report as one HTML file, with the numbers of each tensor
--plot F.png: draw the heat map to this picture file (extra `plots`)"""
"""What `check.details_of` checks and `check.show` obeys."""


def check_out(option: str, path: Path | None, suffix: str = "") -> None:
    """Check that a file can be written to `path`, before anything is computed. Raises OptionError that names the option.

    suffix: what the name may end in, because the content is of that format, if it ends in anything.
    """
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise OptionError(f"{option} is {path}, expected a file in a folder that is there")
    if path is not None and suffix and path.suffix not in ("", suffix):
        raise OptionError(f"{option} is {path}, expected a name that ends in {suffix}: that is what is written")


def new_folder(path: Path) -> Path:
    """The path of a folder to write, which is not there or empty. Raises OptionError."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise OptionError(f"{path} is there, expected a new folder or an empty one")
    return path


def save_npy(path: Path, array: NDArray) -> None:
    """Write a .npy file, completely or not at all, whatever the name ends in."""
    with whole_file(path) as part, open(part, "wb") as file:
        np.save(file, array)
