"""`bitnet-np convert`: what the command says of the file it wrote. What it writes: files/test_convert.py."""

from pathlib import Path

import pytest
from command_line import TINY

LLAMA = Path(__file__).parents[1] / "data" / "hf" / "llama_plain_gqa_untied"


@pytest.mark.parametrize(("source", "architecture", "permuted"), [(TINY, "bitnet-b1.58", False), (LLAMA, "llama", True)])
def test_the_command_says_what_it_wrote(run, tmp_path, source, architecture, permuted):
    """The rows of a Llama's queries and keys are permuted in GGUF, so that its sums have another order."""
    out = tmp_path / "out.gguf"
    result = run("convert", source, out, "--json")
    assert result == {"out": str(out), "bytes": out.stat().st_size, "architecture": architecture, "permuted": permuted}
    first, *rest = run("convert", source, out, "--force").splitlines()
    assert first == f"{out}: {result['bytes']:,} bytes, {architecture}"
    sentence = "rows of queries and keys are permuted, as this architecture has them: logits agree to float32 rounding, not to the bit"
    assert rest == [sentence] * permuted
