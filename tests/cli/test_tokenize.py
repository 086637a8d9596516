"""`bitnet-np tokenize`."""

from command_line import ROOT, needs_text, with_commas

pytestmark = needs_text
DEMO = ROOT / "bitnet_np" / "data" / "demo.gguf"
TEXT = "Once é\n"
IDS = [1535, 395, 220, 127, 102, 198]
PIECES = ["<|endoftext|>", "Once", " ", "\\xc3", "\\xa9", "\n"]


def test_a_text_and_its_ids_have_the_same_pieces(run):
    result = run("tokenize", DEMO, "--text", TEXT, "--json")
    assert result == run("tokenize", DEMO, "--tokens", with_commas(IDS), "--json") == {"tokens": IDS, "pieces": PIECES, "text": TEXT}


def test_an_id_that_is_none(refused):
    assert "token id 1536, but the vocabulary of" in refused("tokenize", DEMO, "--tokens", "1536")
