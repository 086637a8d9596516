"""Traces in files: our own formats and those of other projects. A file is not trusted; every reader checks it before it believes it."""

from . import npy, raw
from .output import Writer
from .registry import FORMATS, Format, detect, read_any, writer

__all__ = ["FORMATS", "Format", "Writer", "detect", "npy", "raw", "read_any", "writer"]
