"""tokenizer.json of a Hugging Face folder -> the keys that a GGUF file has for the same tokenizer; tokenizer.tokenizer_from reads them.

One tokenizer therefore serves both kinds of source, and converting a folder keeps it. Settings that those keys cannot express are refused
by name.
"""

from collections.abc import Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from ..base.errors import FileFormatError, UnsupportedError, shown
from .byte_level import DIGITS, GPT2_WORDS, pre_tokenizer_name
from .spm import SPACE
from .vocabulary import BYTE, BYTES, CONTROL, NFC, NORMAL, UNKNOWN, UNUSED, USER_DEFINED

_MAX_PADDING = 1 << 16  # rows of an embedding that no token has
_OFF = (None, False, "")
_MODEL = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
_ADDED = ("single_word", "lstrip", "rstrip")
_NFC = {"type": "NFC"}
_SPECIAL = {"bos": "tokenizer.ggml.bos_token_id", "eos": "tokenizer.ggml.eos_token_id", "pad": "tokenizer.ggml.padding_token_id"}
"""Special tokens -> the keys that name them."""


def tokenizer_metadata(
    path: Path, tokenizer: Mapping[str, Any], config: Mapping[str, Any], model: Mapping[str, Any], template: str | None
) -> dict[str, Any]:
    """The keys, from the objects in tokenizer.json, tokenizer_config.json and config.json, and the text of chat_template.jinja.

    Empty for a folder without tokenizer.json. `path` is for messages. Raises FileFormatError or UnsupportedError.
    """
    if not tokenizer:
        return {}
    where = f"{path / 'tokenizer.json'}"
    bpe = _object(tokenizer.get("model"), f"{where}: model")
    if bpe.get("type") != "BPE":
        raise UnsupportedError(f"{where}: model.type is {shown(bpe.get('type'))}, supported is BPE")
    _refuse(where, bpe, _MODEL)
    scored = bpe.get("byte_fallback") is True
    tokens, types = _tokens(where, bpe, tokenizer, model.get("vocab_size"), scored)
    merges = _merges(where, bpe.get("merges"))
    keys: dict[str, Any] = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": np.array(types, np.int32)}
    keys |= _scored(where, tokenizer, bpe, merges, tokens, types) if scored else _byte_level(where, tokenizer, bpe, merges)
    keys |= _special(where, tokenizer, config, model, {token: i for i, token in enumerate(tokens)})
    template = _template(config) if template is None else template
    return keys | ({} if template is None else {"tokenizer.chat_template": template})


def _byte_level(where: str, tokenizer: Mapping[str, Any], bpe: Mapping[str, Any], merges: list[tuple[str, str]]) -> dict[str, Any]:
    """The keys that only byte-level BPE has."""
    _refuse(where, bpe, ("unk_token", "fuse_unk"))
    if (normalizer := tokenizer.get("normalizer")) not in (None, _NFC):
        raise UnsupportedError(f"{where}: normalizer is {shown(normalizer)}, supported for BPE of bytes are none and NFC")
    pre = _pre_tokenizer(where, tokenizer.get("pre_tokenizer"), bpe.get("ignore_merges") is True)
    keys: dict[str, Any] = {} if normalizer is None else {NFC: True}
    keys |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.merges": [" ".join(pair) for pair in merges]}
    return keys | {"tokenizer.ggml.pre": pre}


def _special(
    where: str, tokenizer: Mapping[str, Any], config: Mapping[str, Any], model: Mapping[str, Any], ids: Mapping[str, int]
) -> dict[str, Any]:
    """The keys that name special tokens, and say which of them a text gets."""
    named = {name: _named(config, model, name, ids) for name in _SPECIAL}
    keys: dict[str, Any] = {key: token for name, key in _SPECIAL.items() if (token := named[name]) is not None}
    adds = _adds(where, tokenizer.get("post_processor"), config, named, ids)
    return keys | {f"tokenizer.ggml.add_{name}_token": added for name, added in adds.items()}


def _template(config: Mapping[str, Any]) -> str | None:
    """The chat template in tokenizer_config.json: the only one, or the one called default."""
    template = config.get("chat_template")
    if isinstance(template, list) and template:
        template = {_at(part, "name"): _at(part, "template") for part in template}.get("default")
    return template if isinstance(template, str) else None


def _scored(
    where: str,
    tokenizer: Mapping[str, Any],
    bpe: Mapping[str, Any],
    merges: list[tuple[str, str]],
    tokens: list[str],
    types: list[int],
) -> dict[str, Any]:
    """The keys that only SentencePiece's BPE has. Its merges are scores that were converted; here they become scores again.

    Merges say the same as scores if each token has all of its merges, one after the other: every two tokens that it can be split into.
    """
    _refuse(where, bpe, ("ignore_merges",))
    whole = {token for token, kind in zip(tokens, types, strict=True) if kind == NORMAL}
    scores: dict[str, float] = {}
    for rank, (left, right) in enumerate(merges):
        scores.setdefault(left + right, -float(rank))
    made = [left + right for left, right in merges]
    splits = {(token[:i], token[i:]) for token in whole for i in range(1, len(token)) if token[:i] in whole and token[i:] in whole}
    runs = sum(1 for i, token in enumerate(made) if i == 0 or token != made[i - 1])
    if runs != len(scores) or splits != {pair for pair in merges if pair[0] + pair[1] in whole}:
        raise UnsupportedError(f"{where}: model.merges with byte_fallback are not what scores of tokens can say, supported are only those")
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.scores": np.array([scores.get(token, -float(len(merges))) for token in tokens], np.float32),
        "tokenizer.ggml.add_space_prefix": _space_prefix(where, tokenizer),
        **({"tokenizer.ggml.unknown_token_id": types.index(UNKNOWN)} if UNKNOWN in types else {}),
    }


def _space_prefix(where: str, tokenizer: Mapping[str, Any]) -> bool:
    """Whether every text starts with a space. Files say in two ways that spaces are U+2581."""
    normalizer, pre = tokenizer.get("normalizer"), tokenizer.get("pre_tokenizer")
    prepend, replace = {"type": "Prepend", "prepend": SPACE}, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    if pre is None and normalizer in (replace, {"type": "Sequence", "normalizers": [replace]}):
        return False
    if pre is None and normalizer == {"type": "Sequence", "normalizers": [prepend, replace]}:
        return True
    if normalizer is None and pre == {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False}:
        return False  # its other schemes put none before a text that starts with one, which no key of GGUF can say
    raise UnsupportedError(
        f"{where}: normalizer is {shown(normalizer)} and pre_tokenizer {shown(pre)}, supported with byte_fallback are a U+2581 for each "
        "space, and before all text or before none"
    )


def _refuse(where: str, bpe: Mapping[str, Any], keys: Iterable[str]) -> None:
    for key in keys:
        if bpe.get(key) not in _OFF:
            raise UnsupportedError(f"{where}: model.{key} is {shown(bpe.get(key))}, supported is none")


def _at(value: Any, *path: str) -> Any:
    """The value at the end of a path of keys; None if the path does not exist."""
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise FileFormatError(f"{where} is {shown(value)}, expected an object")
    return value


def _tokens(where: str, bpe: Mapping[str, Any], tokenizer: Mapping[str, Any], vocabulary: Any, scored: bool) -> tuple[list[str], list[int]]:
    """The spelling and the type of each id. Ids without a token are unused tokens, named as llama.cpp's converter does."""
    spelled: dict[int, tuple[str, int]] = {}
    for spelling, i in _object(bpe.get("vocab"), f"{where}: model.vocab").items():
        if type(i) is not int or i < 0 or i in spelled:
            raise FileFormatError(f"{where}: model.vocab has {shown(spelling)} as {shown(i)}, expected a distinct id")
        spelled[i] = spelling, BYTE if scored and spelling in BYTES else NORMAL
    for i, text, kind in _added_tokens(where, tokenizer):
        if spelled.get(i, (text, kind))[0] != text:
            raise FileFormatError(f"{where}: added_tokens has {shown(text)} as {shown(i)}, expected a distinct id")
        spelled[i] = text, kind
    if scored:
        spelled |= {i: (text, UNKNOWN) for i, (text, _) in spelled.items() if text == bpe.get("unk_token")}
    size = max([-1, *spelled]) + 1
    size = max(size, vocabulary) if type(vocabulary) is int else size
    if size - len(spelled) > _MAX_PADDING:
        raise FileFormatError(f"{where}: {size} ids for {len(spelled)} tokens, expected at most {_MAX_PADDING} more")
    both = [spelled.get(i, (f"[PAD{i}]", UNUSED)) for i in range(size)]
    return [text for text, _ in both], [kind for _, kind in both]


def _added_tokens(where: str, tokenizer: Mapping[str, Any]) -> Iterator[tuple[int, str, int]]:
    """Id, text and type of each added token."""
    added = tokenizer.get("added_tokens") or []
    if not isinstance(added, list):
        raise FileFormatError(f"{where}: added_tokens is {shown(added)}, expected an array")
    for entry in added:
        entry = _object(entry, f"{where}: an entry of added_tokens")
        i, text = entry.get("id"), entry.get("content")
        if type(i) is not int or i < 0 or not isinstance(text, str):
            raise FileFormatError(f"{where}: added_tokens has {shown(text)} as {shown(i)}, expected a text and its id")
        for key in _ADDED:
            if entry.get(key) not in _OFF:
                raise UnsupportedError(f"{where}: the added token {shown(text)} has {key}, which is not supported")
        if entry.get("normalized") is True and tokenizer.get("normalizer") is not None:
            raise UnsupportedError(f"{where}: the added token {shown(text)} is normalized, which is not supported with a normalizer")
        yield i, text, CONTROL if entry.get("special") is True else USER_DEFINED


def _merges(where: str, merges: Any) -> list[tuple[str, str]]:
    """Pairs of tokens, in order of rank. Older files have "left right" for each."""
    if not isinstance(merges, list):
        raise FileFormatError(f"{where}: model.merges is {shown(merges)}, expected an array")
    pairs = []
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not isinstance(parts, list) or len(parts) != 2 or not all(isinstance(part, str) for part in parts):
            raise FileFormatError(f"{where}: model.merges has {shown(merge)}, expected two tokens")
        pairs.append((parts[0], parts[1]))
    return pairs


def _pre_tokenizer(where: str, pre: Any, whole_words: bool) -> str:
    """The name of the rules by which text is cut into words."""
    parts = _at(pre, "pretokenizers") if _at(pre, "type") == "Sequence" else [pre]
    name = None
    if isinstance(parts, list) and parts and all(isinstance(part, dict) for part in parts):
        *cuts, last = parts
        patterns = [_pattern(part) for part in cuts]
        if last.get("use_regex", True) is True:
            patterns.append(GPT2_WORDS)
        if last.get("type") == "ByteLevel" and last.get("add_prefix_space") is False:
            name = pre_tokenizer_name(tuple(pattern or "" for pattern in patterns), whole_words)
    if name is None:
        raise UnsupportedError(f"{where}: pre_tokenizer is {shown(pre)} with ignore_merges {whole_words}, which has no name in GGUF here")
    return name


def _pattern(part: Mapping[str, Any]) -> str | None:
    """The pattern of a step that cuts and keeps everything; None for another step."""
    if part.get("type") == "Digits" and part.get("individual_digits") is True:
        return DIGITS
    plain = part.get("type") == "Split" and part.get("behavior") == "Isolated" and part.get("invert") is False
    regex = _at(part, "pattern", "Regex")
    return regex if plain and isinstance(regex, str) else None


def _named(config: Mapping[str, Any], model: Mapping[str, Any], name: str, ids: Mapping[str, int]) -> int | None:
    """The id of a special token: by its spelling in tokenizer_config.json, or by its number in config.json."""
    special = config.get(f"{name}_token")
    if isinstance(text := special if isinstance(special, str) else _at(special, "content"), str):
        return ids.get(text)
    token = model.get(f"{name}_token_id")
    token = token[0] if isinstance(token, list) and token else token
    return token if type(token) is int and 0 <= token < len(ids) else None


def _adds(where: str, post: Any, config: Mapping[str, Any], named: Mapping[str, int | None], ids: Mapping[str, int]) -> dict[str, bool]:
    """Whether a text gets bos and eos: as the post-processor's template says, or without one as tokenizer_config.json says."""
    parts = _at(post, "processors") if _at(post, "type") == "Sequence" else [post]
    for part in _items(parts):
        if _at(part, "type") == "TemplateProcessing":
            single = part.get("single")
            steps = [_step(step, ids) for step in _items(single)]
            for bos, eos in product((True, False), repeat=2):
                if steps == [*[named["bos"]] * bos, "text", *[named["eos"]] * eos]:
                    return {"bos": bos, "eos": eos}
            raise UnsupportedError(f"{where}: post_processor makes {shown(single)}, supported is a text, with bos before and eos after it")
    return {name: named[name] is not None and config.get(f"add_{name}_token") is True for name in ("bos", "eos")}


def _items(value: Any) -> list[Any]:
    """The items of a list; none of anything else."""
    return value if isinstance(value, list) else []


def _step(step: Any, ids: Mapping[str, int]) -> int | str | None:
    """A step of the post-processor's template: "text", the id of a token, or "?" for anything else."""
    if _at(step, "Sequence") is not None:
        return "text"
    spelled = _at(step, "SpecialToken", "id")
    return ids.get(spelled, "?") if isinstance(spelled, str) else "?"
