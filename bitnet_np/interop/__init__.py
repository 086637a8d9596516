"""Traces in files: our own formats and those of other projects. A file is not trusted; every reader checks it before it believes it."""

from . import npy, raw
from .formats import FORMATS, Format, detect, read_any, writer
from .output import Writer

__all__ = ["FORMATS", "Format", "Writer", "detect", "npy", "raw", "read_any", "writer"]
