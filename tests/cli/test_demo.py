"""`bitnet-np demo`: what it writes is enough for the commands that it prints."""

import shlex

import pytest

from bitnet_np.files import embedded
from bitnet_np.files.gguf_file import open_gguf
from bitnet_np.text.tokenizer import tokenizer_from


def test_the_printed_commands_judge_one_dump_right_and_name_the_mistake_in_the_other(run, printed, tmp_path):
    folder = tmp_path / "a folder"
    inspect, right, wrong = (shlex.split(line) for line in run("demo", folder).splitlines())
    assert {words[0] for words in (inspect, right, wrong)} == {"bitnet-np"}
    assert "bitnet-b1.58" in run(*inspect[1:])
    assert run(*right[1:]).startswith("PASS (SAME_BITS)")
    out, _ = printed(*wrong[1:], code=1)
    assert "WRONG at layer 3 ffn_out: SiLU(gate) * up instead of relu(gate)^2 * up" in out


def test_its_tokens_are_a_text(run, tmp_path):
    pytest.importorskip("tokenizers")
    run("demo", tmp_path)
    with embedded.demo_path() as path:
        tokenizer = tokenizer_from(open_gguf(path).metadata, path)
    ids = tokenizer.encode("Once upon a time there was a little rabbit")
    assert (tmp_path / "tokens.txt").read_text().split() == [*map(str, ids)]


def test_it_writes_into_a_new_folder_alone(run, refused, tmp_path):
    assert sorted(run("demo", tmp_path, "--json")["files"]) == sorted(path.name for path in tmp_path.iterdir())
    assert "expected a new folder or an empty one" in refused("demo", tmp_path)
