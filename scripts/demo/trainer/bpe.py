"""The model's own BPE, trained on its own text, as the keys of a GGUF file.

It is learned as byte-level BPE and written as SentencePiece's: token i has the score -i, the order in which it was learned, and no token
crosses a word, so the same pieces are found. A file of that kind is read without any library (bitnet_np/text/spm.py).
"""

import json
from collections.abc import Iterable
from typing import Any

import tokenizers

from bitnet_np.base.errors import OptionError
from bitnet_np.text.byte_level import BYTE_CHARACTERS
from bitnet_np.text.spm import SPACE
from bitnet_np.text.vocabulary import BYTE, CONTROL, NORMAL

END = "<|endoftext|>"  # before and after every text, as in GPT-2
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'user' %}Q: {{ message['content'] | trim }}\nA:{% endif %}{% endfor %}"
)


def train(texts: Iterable[str], vocabulary: int) -> dict[str, Any]:
    """`tokenizer.*` keys and values of a GGUF file: all bytes, merged tokens, and END as the last of `vocabulary` tokens.

    The same texts give the same tokens. Raises OptionError if the texts have too little to merge.
    """
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)  # cuts words like GPT-2
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocabulary - 1, initial_alphabet=list(BYTE_CHARACTERS), show_progress=False)
    bpe.train_from_iterator(texts, trainer)
    made = json.loads(bpe.to_str())["model"]
    spelled = sorted(made["vocab"], key=made["vocab"].__getitem__)
    if len(spelled) != vocabulary - 1:
        raise OptionError(f"the vocabulary is {vocabulary}, but the texts and the end of text make {len(spelled) + 1} tokens")
    tokens, kinds = zip(*map(_as_piece, spelled), strict=True)
    return {
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_space_prefix": False,
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [*tokens, END],
        "tokenizer.ggml.token_type": [*kinds, CONTROL],
        "tokenizer.ggml.scores": [-float(i) for i in range(vocabulary)],
        "tokenizer.ggml.bos_token_id": len(spelled),
        "tokenizer.ggml.eos_token_id": len(spelled),
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def _as_piece(spelled: str) -> tuple[str, int]:
    """A token of byte-level BPE in SentencePiece's spelling, and its kind: text, or a byte that is no character."""
    data = bytes(BYTE_CHARACTERS.index(character) for character in spelled)
    if len(data) == 1 and not data.isascii():
        return f"<0x{data[0]:02X}>", BYTE
    return data.decode().replace(" ", SPACE), NORMAL
