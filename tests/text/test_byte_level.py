"""Byte-level BPE: the ids of the library's tokenizer that a file was made from, and the rules that cut text into words."""

import itertools
import time

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from tokenizer_models import OURS, TRAINED, texts, tokenizer

from bitnet_np.text import byte_level
from bitnet_np.text.byte_level import BYTE_CHARACTERS
from bitnet_np.text.vocabulary import CONTROL, NORMAL


@pytest.mark.parametrize("style", list(TRAINED))
@given(text=texts)
@settings(deadline=None, max_examples=300)
def test_ids_are_those_of_the_tokenizer_whose_json_was_read(style, text):
    theirs, ours = TRAINED[style], OURS[style]
    for special in (True, False):
        theirs.encode_special_tokens = not special
        ids = ours.encode(text, special=special)
        assert ids == theirs.encode(text).ids
        assert ours.decode(ids[1:], skip_special=False) == text


def test_a_long_run_of_spaces_takes_no_longer_than_other_text():
    """deepseek-llm's pattern of spaces at the end of a line tries each of them: of 60,000 in front of a digit for 15 s."""
    (pattern, linear) = next(iter(byte_level._SAME_IN_LINEAR_TIME.items()))
    split = lambda pattern, text: tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated").pre_tokenize_str(text)  # noqa: E731
    texts = ["".join(text) for text in itertools.product(" a\t", repeat=5)] + ["a \n \n\nb", " \n  ", "\n a  "]
    assert [split(linear, text) for text in texts] == [split(pattern, text) for text in texts]
    ours, start = tokenizer(pre="deepseek-llm", words=[], merges=[]), time.perf_counter()
    assert len(ours.encode(" " * 60_000 + "1", add_bos=False)) == 60_001
    assert time.perf_counter() - start < 2


@pytest.mark.parametrize("bos", [128000, 127999])
def test_a_file_that_names_no_pre_tokenizer_has_llama_3s_if_its_vocabulary_is_llama_3s(bos):
    tokens = [*BYTE_CHARACTERS, "12", "123", "1234"]
    tokens += [f"x{i}" for i in range(128256 - len(tokens))]
    tokens[bos] = "<|begin_of_text|>"
    types = np.full(len(tokens), NORMAL)
    types[bos:] = CONTROL
    ours = tokenizer(tokens=tokens, token_type=types, merges=["1 2", "12 3", "123 4"], bos_token_id=bos, eos_token_id=128001)
    assert ours.encode("1234", add_bos=False) == ([257, ord("4")] if bos == 128000 else [258])
