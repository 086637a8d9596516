"""A real browser without a window, for pages that the tests open from a file."""

import shutil
import subprocess
from pathlib import Path

import pytest

PROGRAM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="needs Chromium or Chrome")
_FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-extensions", "--hide-scrollbars")


def document(page: Path, folder: Path, fragment: str = "") -> str:
    """The document of a page when its scripts have run, as HTML. folder: for the browser's own files."""
    address = page.resolve().as_uri() + (f"#{fragment}" if fragment else "")
    command = [str(PROGRAM), *_FLAGS, f"--user-data-dir={folder / 'profile'}", "--dump-dom", address]
    return subprocess.run(command, check=True, capture_output=True, timeout=300).stdout.decode()
