"""Writers: a file or folder appears when it is whole, each point is written once, and nothing else is overwritten."""

import os
import re

import numpy as np
import pytest
from trace_files import LOGITS, TOKENS, WHOLE, T, all_points, write_trace

from bitnet_np.base.errors import EmptyInputError, FileFormatError, OptionError
from bitnet_np.traces.formats import FORMATS
from bitnet_np.traces.points import Key


@pytest.mark.parametrize("format", [name for name, format in FORMATS.items() if format.writer])
def test_an_exception_leaves_nothing(tmp_path, format):
    if format.startswith("bitnet-rs"):
        pytest.importorskip("blake3")

    class Stop(Exception):
        pass

    def interrupted():
        with FORMATS[format].writer(tmp_path / "t", TOKENS) as out:
            out.add(LOGITS, all_points()[LOGITS])
            raise Stop

    with pytest.raises(Stop):
        interrupted()
    assert not list(tmp_path.iterdir())
    with pytest.raises(EmptyInputError, match="nothing was written"), FORMATS[format].writer(tmp_path / "t", TOKENS):
        pass
    out = tmp_path / "no" / "t"  # named, and not the file beside it that is written first
    with pytest.raises(OptionError, match=re.escape(f"{out}: there is no folder {out.parent}")), FORMATS[format].writer(out, TOKENS):
        pass
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("format", WHOLE)
def test_points_are_written_once_and_have_to_be_points(tmp_path, format):
    one = np.ones((T, 2), np.float32)
    for wrong in (one.astype(complex), one.astype(object), one > 0, np.ones((2, 3, 4)), np.ones((0, 3))):
        with pytest.raises(FileFormatError), FORMATS[format].writer(tmp_path / "t", TOKENS) as out:
            out.add(Key("l_out", 0), wrong)
    with FORMATS[format].writer(tmp_path / "u", TOKENS) as out:
        out.add(Key("l_out", 0), one)
        with pytest.raises(OptionError, match="l_out-0 was written already"):
            out.add(Key("l_out", 0), one)
    assert [path.name for path in tmp_path.iterdir()] == ["u"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes here")
def test_what_is_neither_file_nor_folder_stays(tmp_path):
    os.mkfifo(tmp_path / "t.npz")
    with pytest.raises(OptionError, match="is there already, expected a file or"):
        write_trace(tmp_path / "t.npz", "npz")
    assert (tmp_path / "t.npz").is_fifo()


def test_files_are_replaced_and_folders_are_not(tmp_path):
    for _ in range(2):
        write_trace(tmp_path / "t.npz", "npz")
    write_trace(tmp_path / "t", "npy")
    for format in ("npy", "npz"):
        with pytest.raises(OptionError, match="is there already"):
            write_trace(tmp_path / "t", format)
    with pytest.raises(OptionError, match="is there already"):
        write_trace(tmp_path / "t.npz", "npy")
    (tmp_path / "empty").mkdir()
    write_trace(tmp_path / "empty", "npy")
    with pytest.raises(OptionError, match="has no name"):
        write_trace("/", "npy")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "t", "t.npz"]
