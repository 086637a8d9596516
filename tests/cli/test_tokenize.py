"""`bitnet-np tokenize`."""

import json

import pytest
from command_line import ROOT, needs_text, with_commas, write_file

pytestmark = needs_text
DEMO = ROOT / "bitnet_np" / "data" / "demo.gguf"
TEXT = "Once é\n"
IDS = [1535, 395, 220, 127, 102, 198]
PIECES = ["<|endoftext|>", "Once", " ", "\\xc3", "\\xa9", "\n"]


def test_a_text_and_its_ids_have_the_same_pieces(run):
    result = run("tokenize", DEMO, "--text", TEXT, "--json")
    assert result == run("tokenize", DEMO, "--tokens", with_commas(IDS), "--json") == {"tokens": IDS, "pieces": PIECES, "text": TEXT}


def test_an_id_that_is_none(refused):
    assert "token id is 1536, expected 0 to 1535" in refused("tokenize", DEMO, "--tokens", "1536")


@pytest.mark.parametrize(
    ("theirs", "said"),
    [
        (IDS, None),
        ([IDS], None),
        (IDS[1:], "the other tokenizer puts no BOS in front of the text, and the model's file says to: 1535"),
        ([*IDS[:2], 221, *IDS[3:]], "at index 2 it has token 221, ours token 220"),
        (IDS[:-1], "at index 5 it has no token, ours token 198"),
    ],
)
def test_the_ids_of_another_tokenizer_are_judged(run, tmp_path, theirs, said):
    path = write_file(tmp_path / "ids.json", json.dumps(theirs))
    words, code = ("tokenize", DEMO, "--text", TEXT, "--theirs", path), int(said is not None)
    first = run(*words, code=code).splitlines()[0]
    difference = run(*words, "--json", code=code)["difference"]
    if said is None:
        assert (first, difference) == ("PASS: the same 6 token ids", None)
    else:
        assert first == f"FAIL: {difference}"
        assert said in difference


def test_a_chat_is_tokenized_in_the_models_template(run, refused, tmp_path):
    messages = write_file(tmp_path / "m.json", json.dumps([{"role": "user", "content": TEXT}]))
    chat = run("tokenize", DEMO, "--messages", messages, "--json")
    assert chat == run("tokenize", DEMO, "--text", TEXT, "--chat", "--json")
    assert TEXT.strip() in chat["text"]
    assert chat["tokens"] != IDS
    assert "--chat needs --text" in refused("tokenize", DEMO, "--tokens", "1", "--chat")
    assert "m.json has 3, expected a list of messages" in refused("tokenize", DEMO, "--messages", write_file(tmp_path / "m.json", "3"))
