"""The tokenizer's keys: none of them is trusted."""

import pytest
from tokenizer_models import small, tokenizer

from bitnet_np.base.errors import FileFormatError, UnsupportedError

TOKENS = small()["tokenizer.ggml.tokens"]


@pytest.mark.parametrize(
    ("error", "match", "changes"),
    [
        (UnsupportedError, r"tokenizer\.ggml\.model is 'missing'", {"model": None}),
        (UnsupportedError, r"tokenizer\.ggml\.model is 't5', expected 'gpt2'", {"model": "t5"}),
        (FileFormatError, r"tokenizer\.ggml\.model is 3, expected str", {"model": 3}),
        (UnsupportedError, r"tokenizer\.ggml\.pre is 'superbpe', expected one of llama-bpe, .*gpt-2", {"pre": "superbpe"}),
        (FileFormatError, r"tokenizer\.ggml\.tokens is missing or empty", {"tokens": None, "token_type": []}),
        (FileFormatError, r"tokenizer\.ggml\.tokens is 'abc', expected an array of strings", {"tokens": "abc"}),
        (FileFormatError, r"tokenizer\.ggml\.tokens is \[1, 2\], expected an array of strings", {"tokens": [1, 2]}),
        (FileFormatError, r"tokenizer\.ggml\.token_type has the shape \(259,\), but there are 260 tokens", {"token_type": [1] * 259}),
        (FileFormatError, r"tokenizer\.ggml\.token_type is 7 for token 1, expected 1 to 6", {"token_type": [1, 7] + [0] * 258}),
        (FileFormatError, r"tokens has 'Ā' twice, as token 0 and as token 260", {"tokens": [*TOKENS, "Ā"], "token_type": [1] * 261}),
        (FileFormatError, r"tokens has an empty string", {"tokens": [*TOKENS, ""], "token_type": [1] * 261}),
        (FileFormatError, r"tokens has 'a b' of type normal, but ' ' is none", {"tokens": [*TOKENS, "a b"], "token_type": [1] * 261}),
        (FileFormatError, r"tokens has '<s>' of type byte, expected <0x00> to", {"token_type": [1] * 258 + [6, 6]}),
        (FileFormatError, r"merges has 'abc' as merge 1, expected two tokens and a space", {"merges": ["a b", "abc"]}),
        (FileFormatError, r"merges has 'ab q' as merge 1, but 'abq' is no token of type normal", {"merges": ["a b", "ab q"]}),
        (FileFormatError, r"merges has the same merge twice", {"merges": ["a b", "ab c", "a b"]}),
        (FileFormatError, r"tokenizer\.ggml\.bos_token_id is 260, but there are 260 tokens", {"bos_token_id": 260}),
        (FileFormatError, r"tokenizer\.ggml\.eos_token_id is -1, but there are 260 tokens", {"eos_token_id": -1}),
        (FileFormatError, r"tokenizer\.ggml\.padding_token_id is 1\.0, expected int", {"padding_token_id": 1.0}),
        (FileFormatError, r"tokenizer\.ggml\.add_bos_token is 1, expected bool", {"add_bos_token": 1}),
        (FileFormatError, r"add_bos_token is True, but there is no", {"add_bos_token": True, "bos_token_id": None}),
        (FileFormatError, r"tokenizer\.chat_template is b'x', expected str", {"tokenizer.chat_template": b"x"}),
    ],
)
def test_a_bad_tokenizer_is_refused_by_file_key_and_value(error, match, changes):
    with pytest.raises(error, match=r"small\.gguf: " + ".*" + match):
        tokenizer(**changes)
