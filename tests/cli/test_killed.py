"""A command that ends while it writes leaves the file that was there, whole, or none: whole_file.py gives a file its name at the end."""

import os

import pytest
from command_line import TINY

from bitnet_np.cli.main import main

IDS = ["--tokens", "1,2,3"]
COMMANDS = {
    "logits.npy": ["logits", TINY, *IDS, "--out"],
    "metrics.json": ["logits", TINY, *IDS, "--metrics"],
    "trace.npz": ["trace", TINY, *IDS, "--out"],
    "trace": ["trace", TINY, *IDS, "--format", "npy", "--out"],
    "check.html": ["check", TINY, *IDS, "--theirs", "dump.npz", "--html"],
    "receipt.json": ["compare", "dump.npz", "dump.npz", "--receipt"],
    "nll.npy": ["nll", TINY, *IDS, "--out"],
    "base.kld": ["nll", TINY, *IDS, "--save-all-logits"],
    "grad.npz": ["grad", TINY, *IDS, "--out"],
    "converted.gguf": ["convert", TINY, "--force"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_file_has_its_name_when_it_is_whole(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["trace", TINY, *IDS, "--out", "dump.npz"]) == 0
    folder = tmp_path / "outputs"
    folder.mkdir()
    if name != "trace":  # a folder that is there is an error
        (folder / name).write_bytes(b"old")

    def killed(part, path):
        assert os.path.basename(part).startswith(f".{name}.")
        assert os.path.getsize(part) > 3
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", killed)
    with pytest.raises(SystemExit, match="130"):
        main([*COMMANDS[name], str(folder / name)])
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == ({} if name == "trace" else {name: b"old"})
