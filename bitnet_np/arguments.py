"""Command-line arguments that several commands share, and what they mean."""

import argparse

from . import packing, progress
from .gguf_file import GGUFFile
from .hf_folder import Folder
from .load import model_from
from .model import Model


def add_load_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--allow-nan", action="store_true", help="load a model with NaN or infinity in its weights all the same")
    parser.add_argument(
        "--i2s-layout",
        choices=packing.I2S_LAYOUTS,
        default=packing.I2S_DEFAULT,
        help="how I2_S matrices lie in the file, which no file says: the released one (default), bitnet.cpp's for ARM from the end of "
        "2025, or its four rows in a byte. Read in another one, half of all weights are wrong",
    )


def loaded(file: GGUFFile | Folder, arguments: argparse.Namespace) -> Model:
    """The model of an open file, as the arguments ask for it, with a progress bar."""
    return model_from(file, progress.bar("checking weights"), allow_nan=arguments.allow_nan, i2s_layout=arguments.i2s_layout)
