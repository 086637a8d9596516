"""Tokenizer and chat template: the ids of the tokenizer a file was made from, and no trust in the file."""

import json
import sys
import time

import numpy as np
import pytest
from corpus import CORPUS
from hypothesis import given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")
jinja2 = pytest.importorskip("jinja2")

from tokenizers import AddedToken, Regex, models, pre_tokenizers, trainers  # noqa: E402

from bitnet_np.errors import FileFormatError, OptionError, TokenRangeError, UnsupportedError  # noqa: E402
from bitnet_np.text import chat_template  # noqa: E402
from bitnet_np.text.byte_level import BYTE_CHARACTERS  # noqa: E402
from bitnet_np.text.tokenizer import tokenizer_from  # noqa: E402
from bitnet_np.text.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED  # noqa: E402

SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>", "<|eot|>", "<|eot|>s"]
USER = ["<tool>", "    "]
WHOLE_WORD = "Ġinternationally"  # a token that no merge makes: only a rule for whole words finds it

# The patterns again, as the published tokenizer.json files of Llama 3 and GPT-2's encoder.py have them.
LLAMA3 = (
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\\r\\n\\p{L}\\p{N}]?\\p{L}+|\\p{N}{1,3}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+"
)


def original(style):
    """A tokenizer trained by the library, in the style of Llama 3 or GPT-2, and the metadata of a GGUF file made from it."""
    trained = tokenizers.Tokenizer(models.BPE())
    trained.pre_tokenizer = {
        "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
        "llama-bpe": pre_tokenizers.Sequence(
            [pre_tokenizers.Split(Regex(LLAMA3), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
        ),
    }[style]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    vocab = {**model["vocab"], WHOLE_WORD: len(model["vocab"])}
    trained.model = models.BPE(vocab, [tuple(pair) for pair in model["merges"]], ignore_merges=style == "llama-bpe")
    trained.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIAL])
    trained.add_tokens([AddedToken(token, normalized=False) for token in USER])
    ordinary = sorted(vocab, key=vocab.__getitem__)
    tokens = [*ordinary, *SPECIAL, *USER]
    assert [trained.token_to_id(token) for token in tokens] == list(range(len(tokens)))
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": style,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([NORMAL] * len(ordinary) + [CONTROL] * len(SPECIAL) + [USER_DEFINED] * len(USER), np.int32),
        "tokenizer.ggml.merges": [" ".join(pair) for pair in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(ordinary),
        "tokenizer.ggml.eos_token_id": len(ordinary) + 1,
    }
    return trained, metadata


ORIGINALS = {style: original(style) for style in ("llama-bpe", "gpt-2")}
OURS = {style: tokenizer_from(metadata, "model.gguf") for style, (_, metadata) in ORIGINALS.items()}
BY_STYLE = pytest.mark.parametrize("style", list(ORIGINALS))
texts = st.lists(
    st.one_of(
        st.text(),
        st.sampled_from([*CORPUS[:4], *SPECIAL, *USER, " internationally", "<|eo", "t_id|>", "ſ", "'ſ", "'RE", "é"]),
        st.text(" \t\n\r\u00a0\u3000\u0085", max_size=6),
        st.text("'sStTrReEvVmMlLdD xſ", max_size=8),
        st.text("0123456789٣Ⅷ²,. ", max_size=8),
    ),
    max_size=6,
).map("".join)


@BY_STYLE
@given(text=texts)
@settings(deadline=None, max_examples=300)
def test_ids_are_those_of_the_tokenizer_the_file_was_made_from(style, text):
    trained, ours = ORIGINALS[style][0], OURS[style]
    for special in (True, False):
        trained.encode_special_tokens = not special
        assert ours.encode(text, add_bos=False, special=special) == trained.encode(text, add_special_tokens=False).ids
        assert ours.decode(ours.encode(text, special=special), skip_special=False).removeprefix("<|begin_of_text|>" * ours.add_bos) == text


@BY_STYLE
def test_whole_words_before_merges_is_the_rule_of_llama_3_alone(style):
    found = ORIGINALS[style][1]["tokenizer.ggml.tokens"].index(WHOLE_WORD) in OURS[style].encode(" internationally")
    assert found == (style == "llama-bpe")


def test_control_tokens_are_found_only_on_request_and_user_defined_ones_always():
    ours = OURS["gpt-2"]
    eot, tool = ours.tokens.index("<|eot_id|>"), ours.tokens.index("<tool>")
    assert ours.encode("<|eot_id|><tool>", special=True) == [eot, tool]
    plain = ours.encode("<|eot_id|><tool>")
    assert eot not in plain
    assert plain[-1] == tool
    assert ours.decode(plain) == "<|eot_id|><tool>"
    assert ours.encode("<|eot|>s", special=True) == [ours.tokens.index("<|eot|>s")]  # the longest, not the first


# A vocabulary small enough to know the answers by heart.
def small(**changes):
    """Metadata of 256 bytes, the `words`, and <s>, </s>. Keys are given without their "tokenizer.ggml."; None removes one."""
    words = changes.pop("words", ["ab", "abc"])
    tokens = [*BYTE_CHARACTERS, *words, "<s>", "</s>"]
    keys = {
        "model": "gpt2",
        "tokens": tokens,
        "token_type": [NORMAL] * (len(tokens) - 2) + [CONTROL] * 2,
        "merges": ["a b", "ab c"],
        "bos_token_id": len(tokens) - 2,
        "eos_token_id": len(tokens) - 1,
        **changes,
    }
    return {name if "." in name else f"tokenizer.ggml.{name}": value for name, value in keys.items() if value is not None}


def tokenizer(**changes):
    return tokenizer_from(small(**changes), "small.gguf")


CUTS = {
    "words": ["12", "123", "1234", "Ġ!", "'S", "'Sa"],
    "merges": ["1 2", "12 3", "123 4", "Ġ !", "' S", "'S a"],
}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["'", "S", "a", "1234", " !"]),
        (None, ["'", "S", "a", "1234", " !"]),
        ("llama-bpe", ["'S", "a", "123", "4", " !"]),
        ("default", ["'", "S", "a", "123", "4", " ", "!"]),
    ],
)
def test_pre_tokenizers_cut_where_they_should(pre, pieces):
    ours = tokenizer(pre=pre, **CUTS)
    assert [ours.decode([i]) for i in ours.encode("'Sa1234 !", add_bos=False)] == pieces


@pytest.mark.parametrize("bos", [128000, 127999])
def test_a_file_that_names_no_pre_tokenizer_has_llama_3s_if_its_vocabulary_is_llama_3s(bos):
    tokens = [*BYTE_CHARACTERS, *CUTS["words"]]
    tokens += [f"x{i}" for i in range(128256 - len(tokens))]
    tokens[bos] = "<|begin_of_text|>"
    types = np.full(len(tokens), NORMAL)
    types[bos:] = CONTROL
    ours = tokenizer(tokens=tokens, token_type=types, merges=CUTS["merges"], bos_token_id=bos, eos_token_id=128001)
    assert ours.encode("1234", add_bos=False) == ([257, ord("4")] if bos == 128000 else [258])


def test_bos_is_added_as_the_file_says_the_caller_before_the_file():
    assert tokenizer().encode("a") == [97]
    assert tokenizer(pre="llama-bpe").encode("a") == [258, 97]
    assert tokenizer(pre="llama-bpe", add_bos_token=False).encode("a") == [97]
    assert tokenizer(pre="llama-bpe", bos_token_id=None).encode("a") == [97]
    ours = tokenizer(add_bos_token=True)
    assert (ours.bos, ours.eos) == (258, 259)
    assert ours.encode("a") == [258, 97]
    assert ours.encode("") == [258]
    assert ours.encode("a", add_bos=False) == [97]
    assert tokenizer().encode("a", add_bos=True) == [258, 97]
    with pytest.raises(OptionError, match=r"small\.gguf has no tokenizer\.ggml\.bos_token_id"):
        tokenizer(bos_token_id=None).encode("a", add_bos=True)


def test_generation_stops_at_the_end_of_text_and_of_turn():
    assert tokenizer().stops == (259,)
    assert tokenizer(eot_token_id=258).stops == (258, 259)
    assert tokenizer(eos_token_id=None).stops == ()
    ours = OURS["llama-bpe"]
    assert ours.stops == (ours.eos, ours.tokens.index("<|eot_id|>"))


def test_decoding_knows_every_type_of_token():
    names = {"<unk>": UNKNOWN, "é": USER_DEFINED, "<0xC3>": BYTE, "<0xA9>": BYTE, "spare": UNUSED}
    tokens = [character for character in BYTE_CHARACTERS if character != "é"] + list(names)
    ours = tokenizer(tokens=tokens, token_type=[NORMAL] * 255 + list(names.values()), merges=None, bos_token_id=None, eos_token_id=None)
    assert ours.decode(range(255, 260)) == "éé"
    assert ours.decode(range(255, 260), skip_special=False) == "<unk>ééspare"
    assert ours.encode("é<unk><0xC3>spare", special=True) == [256, 255, *map(tokens.index, "<0xC3>spare")]
    assert ours.encode("<unk>") == [*map(tokens.index, "<unk>")]


@given(data=st.data(), skip_special=st.booleans())
@settings(deadline=None, max_examples=300)
def test_a_stream_says_what_the_whole_says(data, skip_special):
    ours = OURS["llama-bpe"]
    text_ids = texts.map(lambda text: ours.encode(text, special=True))
    ids = data.draw(st.one_of(text_ids, st.lists(st.integers(0, len(ours.tokens) - 1)), st.lists(st.integers(0, 255))))
    stream = ours.decode_stream(skip_special=skip_special)
    pieces = [stream.feed(i) for i in ids]
    assert "".join(pieces) + stream.finish() == ours.decode(ids, skip_special=skip_special)


def test_a_stream_holds_back_an_unfinished_character():
    ours, stream = tokenizer(), tokenizer().decode_stream()
    assert [stream.feed(byte) for byte in "a🙂".encode()] == ["a", "", "", "", "🙂"]
    assert stream.feed(0xF0) == ""
    assert stream.feed(ord("b")) == "\ufffdb"
    assert stream.feed(0xC3) == ""
    assert stream.finish() == "\ufffd" == ours.decode([0xC3])


def test_ids_of_any_integer_type_decode_and_others_are_refused():
    ours = tokenizer()
    assert ours.decode(np.array([97, 256], np.uint32)) == "aab"
    for bad in (-1, 260):
        with pytest.raises(TokenRangeError, match=rf"token id {bad}, but the vocabulary of small\.gguf has the ids 0 to 259"):
            ours.decode([97, bad])
    with pytest.raises(TokenRangeError, match=r"token id is 1\.5, expected an integer"):
        ours.decode([1.5])


def test_text_that_cannot_be_encoded_is_refused():
    with pytest.raises(OptionError, match=r"lone surrogate '\\ud800' at 2"):
        tokenizer().encode("ab\ud800")
    tokens = ["a", "b", "ab", "<s>"]
    ours = tokenizer(tokens=tokens, token_type=[NORMAL] * 3 + [CONTROL], merges=["a b"], bos_token_id=3, eos_token_id=3)
    assert ours.encode("ab<s>", special=True) == [2, 3]
    with pytest.raises(UnsupportedError, match=r"small\.gguf: no token spells the byte 0x63 of 'abc'"):
        ours.encode("abc")


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
        (FileFormatError, r"tokenizer\.ggml\.token_type has the shape \(0,\), but there are 260 tokens", {"token_type": None}),
        (FileFormatError, r"tokenizer\.ggml\.token_type has the shape \(259,\), but there are 260 tokens", {"token_type": [1] * 259}),
        (FileFormatError, r"tokenizer\.ggml\.token_type is 7 for token 1, expected 1 to 6", {"token_type": [1, 7] + [0] * 258}),
        (FileFormatError, r"tokenizer\.ggml\.scores has the shape \(2,\), but there are 260 tokens", {"scores": [0.0, 0.0]}),
        (FileFormatError, r"tokens has 'Ā' twice, as token 0 and as token 260", {"tokens": [*TOKENS, "Ā"], "token_type": [1] * 261}),
        (FileFormatError, r"tokens has an empty string", {"tokens": [*TOKENS, ""], "token_type": [1] * 261}),
        (FileFormatError, r"tokens has 'a b' of type normal, but ' ' is none", {"tokens": [*TOKENS, "a b"], "token_type": [1] * 261}),
        (FileFormatError, r"tokens has '<s>' of type byte, expected <0x00> to", {"token_type": [1] * 258 + [6, 6]}),
        (FileFormatError, r"merges has 'abc' as merge 1, expected two tokens and a space", {"merges": ["a b", "abc"]}),
        (FileFormatError, r"merges has 'ab q' as merge 1, but 'abq' is no token of type normal", {"merges": ["a b", "ab q"]}),
        (FileFormatError, r"merges has 'q abc' as merge 0, but 'qabc' is no token", {"merges": ["q abc"]}),
        (FileFormatError, r"merges has '< s>' as merge 0, but 's>' is no token", {"merges": ["< s>"]}),
        (FileFormatError, r"merges has the same merge twice", {"merges": ["a b", "ab c", "a b"]}),
        (FileFormatError, r"tokenizer\.ggml\.bos_token_id is 260, but there are 260 tokens", {"bos_token_id": 260}),
        (FileFormatError, r"tokenizer\.ggml\.eos_token_id is -1, but there are 260 tokens", {"eos_token_id": -1}),
        (FileFormatError, r"tokenizer\.ggml\.eot_token_id is 4294967295", {"eot_token_id": 2**32 - 1}),
        (FileFormatError, r"tokenizer\.ggml\.padding_token_id is 1\.0, expected int", {"padding_token_id": 1.0}),
        (FileFormatError, r"tokenizer\.ggml\.add_bos_token is 1, expected bool", {"add_bos_token": 1}),
        (FileFormatError, r"add_bos_token is True, but there is no", {"add_bos_token": True, "bos_token_id": None}),
        (FileFormatError, r"tokenizer\.chat_template is b'x', expected str", {"tokenizer.chat_template": b"x"}),
    ],
)
def test_a_bad_tokenizer_is_refused_by_file_key_and_value(error, match, changes):
    with pytest.raises(error, match=r"small\.gguf: " + ".*" + match):
        tokenizer(**changes)


@pytest.mark.parametrize("module", ["tokenizers", "jinja2.sandbox"])
def test_a_missing_extra_says_how_to_install_it(module, monkeypatch):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UnsupportedError, match=rf"text needs {module.split('.')[0]}: pip install 'bitnet_np\[text\]'"):
        tokenizer(**{"tokenizer.chat_template": "x"}).chat([])


# Chat templates

HEADERS = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}\n"
    "  {% if add_generation_prompt %}\n    [assistant]\n{% endif %}"
)
MESSAGES = [{"role": "user", "content": " abc? "}, {"role": "assistant", "content": "</s>"}]


def chatty(template, **changes):
    return tokenizer(**{"tokenizer.chat_template": template, "add_bos_token": True, **changes})


def test_chat_renders_the_template_and_parses_its_special_tokens():
    ours = chatty(HEADERS)
    assert ours.chat_text(MESSAGES) == "<s>[user] abc?</s>\n[assistant] </s></s>\n    [assistant]\n"
    assert ours.chat_text(MESSAGES, add_generation_prompt=False) == "<s>[user] abc?</s>\n[assistant] </s></s>\n"
    ids = ours.chat(MESSAGES)
    assert ids == ours.encode(ours.chat_text(MESSAGES), add_bos=False, special=True)
    assert ids.count(ours.bos) == 1
    assert ids.count(ours.eos) == 3
    assert 257 in ids


def test_chat_has_one_bos_whoever_writes_it():
    assert chatty("a").chat([]) == [258, 97]
    assert chatty("{{ bos_token }}a").chat([]) == [258, 97]
    assert chatty("a", add_bos_token=False).chat([]) == [97]
    assert chatty("{{ bos_token }}a", add_bos_token=False).chat([]) == [258, 97]
    assert chatty("{{ bos_token }}a", add_bos_token=None, bos_token_id=None).chat([]) == [97]


def test_templates_have_the_names_they_are_written_for():
    template = "{% set ns = namespace(n=0) %}{% for i in range(9) %}{% if i == 5 %}{% break %}{% endif %}{% set ns.n = ns.n + i * 2 % 3 %}"
    assert chatty(template + "{% endfor %}{{ ns.n }}{{ nothing }}").chat_text([]) == str(sum(i * 2 % 3 for i in range(5)))
    alternate = "{% if messages[0].role != 'user' %}{{ raise_exception('roles must alternate') }}{% endif %}"
    with pytest.raises(OptionError, match=r"small\.gguf: tokenizer\.chat_template refuses these messages: 'roles must alternate'"):
        chatty(alternate).chat([{"role": "tool", "content": ""}])


def test_a_file_without_a_template_has_no_chat():
    with pytest.raises(UnsupportedError, match=r"small\.gguf: the file has no tokenizer\.chat_template"):
        tokenizer().chat(MESSAGES)


def test_a_lone_surrogate_in_a_message_is_refused():
    with pytest.raises(OptionError, match="lone surrogate"):
        chatty(HEADERS).chat([{"role": "user", "content": "\udfff"}])


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[0].no.thing }}", "UndefinedError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ messages | unheard_of }}", "TemplateAssertionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update(role='system') }}", "SecurityError"),
        ("{{ ('%s' | attr('format')).__globals__.x }}", "SecurityError|UndefinedError"),
        ("{{ lipsum(n=10 ** 9) }}", "SecurityError|UndefinedError"),
        ("{{ self.__init__.__globals__.x }}", "SecurityError|UndefinedError"),
        ("{% include '/etc/passwd' %}", "TypeError"),
        ("{{ 10 ** 10 ** 10 }}", "SecurityError"),
        ("{{ 'x' * 10000000000 }}", "SecurityError"),
        ("{{ [0] * 10000000000 }}", "SecurityError"),
        ("{{ '%9999999999d' % 1 }}", "SecurityError"),
        ("{% for i in range(1000000000) %}{% endfor %}", "OverflowError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for i in range(99999) %}{{ messages[0].content }}0123456789012345678901234567890123456789{% endfor %}", "OverflowError"),
        ("{{ (" + "(" * 99999 + "1" + ")" * 99999 + ") }}", "RecursionError|TemplateSyntaxError|MemoryError"),
        ("{% set n = namespace(x='x') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MemoryError"),
        ("{{ 'x'.center(2000000000) }}", "MemoryError"),
        ("{{ [[1]] | tojson(indent=2000000000) }}", "MemoryError"),
    ],
)
def test_a_hostile_template_is_an_error_of_ours(template, says):
    with pytest.raises(FileFormatError, match=rf"small\.gguf: tokenizer\.chat_template does not work: ({says})"):
        chatty(template).chat(MESSAGES)
    assert MESSAGES[0] == {"role": "user", "content": " abc? "}


MANY = "{% for a in range(99999) %}"
TWICE = "{% if n.n %}{% set n.n = n.n - 1 %}{{ self.b() }}{{ self.b() }}{% set n.n = n.n + 1 %}{% endif %}"
BLOCK = "{% set n = namespace(n=60) %}{% block b scoped %}" + TWICE + "{% endblock %}"


@pytest.mark.parametrize(
    "template",
    [
        MANY * 3 + "{% set x = a %}" + "{% endfor %}" * 3,
        MANY * 3 + "{{ '' }}" + "{% endfor %}" * 3,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% macro f(n) %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call f(1) %}" * 40 + "{% endcall %}" * 40,
        "{% for x in [0, 0] recursive %}{{ loop([0, 0]) if loop.depth < 60 }}{% endfor %}",
        BLOCK,
    ],
)
def test_a_template_without_end_is_stopped(template, monkeypatch):
    monkeypatch.setattr(chat_template, "_CHAT_SECONDS", 0.1)
    start = time.monotonic()
    with pytest.raises(FileFormatError, match=r"does not work: TimeoutError: 'it takes longer than 0\.1 s'"):
        chatty(template).chat(MESSAGES)
    assert time.monotonic() - start < 3


NESTED = "{% set n = namespace(a=[1], b=[1]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}{% set n.b = [n.b, n.b] %}{% endfor %}"


@pytest.mark.parametrize("template", [NESTED + "{{ n.a == n.b }}", NESTED + "{{ n.a }}"])
def test_a_template_that_never_looks_at_the_clock_is_stopped(template, monkeypatch):
    monkeypatch.setattr(chat_template, "_CHAT_SECONDS", 0.1)
    with pytest.raises(FileFormatError, match=r"does not work: (its process ended with -\d+|MemoryError|.*it takes longer)"):
        chatty(template).chat(MESSAGES)


def test_messages_are_what_json_can_hold():
    with pytest.raises(OptionError, match=r"messages are \[\{'role': b'user'\}\], expected what JSON can hold"):
        chatty(HEADERS).chat([{"role": b"user"}])


@pytest.mark.parametrize("text", [None, b"abc", 5, ["a"]])
def test_only_text_is_encoded(text):
    with pytest.raises(OptionError, match="expected a str"):
        tokenizer().encode(text)


def test_a_template_sees_nothing_of_an_object_but_its_public_side():
    assert chatty("{{ '{0.__class__}'.format(messages) }}{{ messages.__class__ }}{{ raise_exception.__code__ }}").chat_text([]) == ""


def test_a_template_too_long_to_compile_is_not_compiled():
    with pytest.raises(UnsupportedError, match="has 262145 characters, expected at most 262144"):
        chatty("x" * (2**18 + 1)).chat([])
