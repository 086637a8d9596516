"""tokenizer.json as the tokenizers library writes it, and changes of one key of it."""

import copy
from pathlib import Path
from typing import Any

from bitnet_np.text.hf_tokenizer import tokenizer_metadata
from bitnet_np.text.tokenizer import Tokenizer, tokenizer_from

PLAIN = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def bpe_json(vocab: dict[str, int], merges: list, special: dict[str, int], bos: str, **keys: Any) -> dict[str, Any]:
    """Of a BPE whose texts start with `bos`. keys: those of the model, and those of the whole that are not as here."""
    whole = {"normalizer": None, "pre_tokenizer": None, "decoder": None}
    single = [{"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}]
    tokens = {bos: {"id": bos, "ids": [special[bos]], "tokens": [bos]}}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None}
    return {
        "version": "1.0",
        "added_tokens": [{"id": i, "content": token, **PLAIN} for token, i in special.items()],
        **whole,
        "post_processor": {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens},
        "model": model | {name: value for name, value in keys.items() if name not in whole} | {"vocab": vocab, "merges": merges},
        **{name: value for name, value in keys.items() if name in whole},
    }


def from_json(told: dict[str, Any], config: Any = (("bos_token", "<s>"), ("eos_token", "</s>")), **model: Any) -> Tokenizer:
    """The tokenizer in these objects of tokenizer.json, tokenizer_config.json and config.json."""
    return tokenizer_from(tokenizer_metadata(Path("m"), told, dict(config), model, None), "m")


def changed(told: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    """A copy in which the key at the end of the dotted path has another value."""
    told = part = copy.deepcopy(told)
    *keys, last = path.split(".")
    for key in keys:
        part = part[int(key)] if key.isdigit() else part[key]
    part[last] = value
    return told
