"""tokenizer.json of a Hugging Face folder -> the keys that a GGUF file has for the same tokenizer (text.tokenizer_from reads them).

So there is one tokenizer whatever a model lies in, and converting a folder carries it over. What those keys cannot say is refused by name.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .byte_level import DIGITS, GPT2_WORDS, pre_tokenizer_name
from .errors import FileFormatError, UnsupportedError, shown
from .vocabulary import CONTROL, NORMAL, UNUSED, USER_DEFINED

_MAX_PADDING = 1 << 16  # rows of an embedding that no token has
_OFF = (None, False, "")
_MODEL = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk", "byte_fallback")
_ADDED = ("single_word", "lstrip", "rstrip")


def tokenizer_metadata(
    path: Path, tokenizer: Mapping[str, Any], config: Mapping[str, Any], model: Mapping[str, Any], template: str | None
) -> dict[str, Any]:
    """From the objects in tokenizer.json, tokenizer_config.json and config.json, and the text of chat_template.jinja.

    Empty if there is no tokenizer.json; `path` is for messages. Raises FileFormatError or UnsupportedError.
    """
    if not tokenizer:
        return {}
    where = f"{path / 'tokenizer.json'}"
    bpe = _object(tokenizer.get("model"), f"{where}: model")
    if bpe.get("type") != "BPE":
        raise UnsupportedError(f"{where}: model.type is {shown(bpe.get('type'))}, supported is BPE of bytes")
    for key in _MODEL:
        if bpe.get(key) not in _OFF:
            raise UnsupportedError(f"{where}: model.{key} is {shown(bpe.get(key))}, supported is none")
    if tokenizer.get("normalizer") is not None:
        raise UnsupportedError(f"{where}: normalizer is {shown(tokenizer['normalizer'])}, supported is none")
    tokens, types = _tokens(where, bpe, tokenizer, model.get("vocab_size"))
    ids = {token: i for i, token in enumerate(tokens)}
    found: dict[str, Any] = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": _pre_tokenizer(where, tokenizer.get("pre_tokenizer"), bpe.get("ignore_merges") is True),
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.merges": _merges(where, bpe.get("merges")),
    }
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        token = _named(config, model, name, ids)
        if token is not None:
            found[f"tokenizer.ggml.{key}_token_id"] = token
    found["tokenizer.ggml.add_bos_token"] = _adds_bos(
        tokenizer.get("post_processor"), config, found.get("tokenizer.ggml.bos_token_id"), ids
    )
    template = template if template is not None else _template(config.get("chat_template"))
    return found | ({} if template is None else {"tokenizer.chat_template": template})


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileFormatError(f"{where} is {shown(value)}, expected an object")
    return value


def _tokens(where: str, bpe: Mapping[str, Any], tokenizer: Mapping[str, Any], vocabulary: Any) -> tuple[list[str], list[int]]:
    """Spelling and type of each id. Ids that nobody has are unused tokens, as llama.cpp's converter calls them."""
    spelled: dict[int, tuple[str, int]] = {}
    for spelling, i in _object(bpe.get("vocab"), f"{where}: model.vocab").items():
        if type(i) is not int or i < 0 or i in spelled:
            raise FileFormatError(f"{where}: model.vocab has {shown(spelling)} as {shown(i)}, expected an id of its own")
        spelled[i] = spelling, NORMAL
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list):
        raise FileFormatError(f"{where}: added_tokens is {shown(added)}, expected an array")
    for entry in added:
        entry = _object(entry, f"{where}: an entry of added_tokens")
        token, text = entry.get("id"), entry.get("content")
        if type(token) is not int or token < 0 or not isinstance(text, str) or spelled.get(token, (text, 0))[0] != text:
            raise FileFormatError(f"{where}: added_tokens has {shown(text)} as {shown(token)}, expected an id of its own")
        for key in _ADDED:
            if entry.get(key) not in _OFF:
                raise UnsupportedError(f"{where}: the added token {shown(text)} has {key}, which is not supported")
        spelled[token] = text, CONTROL if entry.get("special") is True else USER_DEFINED
    size = max(spelled, default=-1) + 1
    if type(vocabulary) is int and size < vocabulary:
        size = vocabulary
    if size - len(spelled) > _MAX_PADDING:
        raise FileFormatError(f"{where}: {size} ids for {len(spelled)} tokens, expected at most {_MAX_PADDING} more")
    both = [spelled.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)]
    return [text for text, _ in both], [kind for _, kind in both]


def _merges(where: str, merges: Any) -> list[str]:
    """As "left right". Newer files have pairs."""
    if not isinstance(merges, list):
        raise FileFormatError(f"{where}: model.merges is {shown(merges)}, expected an array")
    found = []
    for merge in merges:
        parts = merge if isinstance(merge, list) else [merge]
        if not all(isinstance(part, str) for part in parts):
            raise FileFormatError(f"{where}: model.merges has {shown(merge)}, expected two tokens")
        found.append(" ".join(parts))
    return found


def _pre_tokenizer(where: str, told: Any, whole_words: bool) -> str:
    """The name of the rules by which text is cut into words."""
    parts = told.get("pretokenizers") if isinstance(told, dict) and told.get("type") == "Sequence" else [told]
    name = None
    if isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts):
        *cuts, last = parts
        patterns = [_pattern(part) for part in cuts]
        if last.get("use_regex", True) is True:
            patterns.append(GPT2_WORDS)
        if last.get("type") == "ByteLevel" and last.get("add_prefix_space") is False:
            name = pre_tokenizer_name(tuple(pattern or "" for pattern in patterns), whole_words)
    if name is None:
        raise UnsupportedError(f"{where}: pre_tokenizer is {shown(told)} with ignore_merges {whole_words}, which has no name in GGUF here")
    return name


def _pattern(part: Mapping[str, Any]) -> str | None:
    """Of a step that keeps all it cuts."""
    if part.get("type") == "Digits" and part.get("individual_digits") is True:
        return DIGITS
    pattern = part.get("pattern")
    plain = part.get("type") == "Split" and part.get("behavior") == "Isolated" and part.get("invert") is False
    found = pattern.get("Regex") if plain and isinstance(pattern, dict) else None
    return found if isinstance(found, str) else None


def _named(config: Mapping[str, Any], model: Mapping[str, Any], name: str, ids: Mapping[str, int]) -> int | None:
    """The id of a special token: by its spelling in tokenizer_config.json, or by its number in config.json."""
    told = config.get(f"{name}_token")
    text = told.get("content") if isinstance(told, dict) else told
    if isinstance(text, str):
        return ids.get(text)
    token = model.get(f"{name}_token_id")
    token = token[0] if isinstance(token, list) and token else token
    return token if type(token) is int and 0 <= token < len(ids) else None


def _adds_bos(told: Any, config: Mapping[str, Any], bos: int | None, ids: Mapping[str, int]) -> bool:
    """Whether the post-processor's template begins with the bos; if there is none, what tokenizer_config.json says."""
    parts = told.get("processors") if isinstance(told, dict) and told.get("type") == "Sequence" else [told]
    for part in parts if isinstance(parts, list) else []:
        if isinstance(part, dict) and part.get("type") == "TemplateProcessing":
            single = part.get("single")
            first = single[0] if isinstance(single, list) and single else None
            special = first.get("SpecialToken") if isinstance(first, dict) else None
            spelled = special.get("id") if isinstance(special, dict) else None
            return bos is not None and isinstance(spelled, str) and ids.get(spelled) == bos
    return bos is not None and config.get("add_bos_token") is True


def _template(told: Any) -> str | None:
    """The one template, or of several the one called default."""
    if isinstance(told, list):
        named = {part.get("name"): part.get("template") for part in told if isinstance(part, dict)}
        told = named.get("default")
    return told if isinstance(told, str) else None
