"""Chat templates: rendered as they are written for, and no harm from one that is hostile."""

import time

import pytest
from tokenizer_models import MESSAGES, chatty

from bitnet_np.base.errors import FileFormatError, OptionError, UnsupportedError
from bitnet_np.text import chat_template

HEADERS = (
    "{% for message in messages %}{% if loop.first %}{{ bos_token }}{% endif %}"
    "[{{ message['role'] }}] {{ message['content'] | trim }}{{ eos_token }}\n{% endfor %}\n"
    "  {% if add_generation_prompt %}\n    [assistant]\n{% endif %}"
)


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


@pytest.mark.parametrize(
    ("template", "message", "error", "match"),
    [
        (None, {}, UnsupportedError, r"small\.gguf: the file has no tokenizer\.chat_template"),
        (HEADERS, {"role": "user", "content": "\udfff"}, OptionError, "lone surrogate"),
        (HEADERS, {"role": b"user"}, OptionError, r"messages are \[\{'role': b'user'\}\], expected what JSON can hold"),
        ("x" * (2**18 + 1), {}, UnsupportedError, "has 262145 characters, expected at most 262144"),
    ],
    ids=["no template", "surrogate", "bytes", "too long to compile"],
)
def test_chats_that_are_refused(template, message, error, match):
    with pytest.raises(error, match=match):
        chatty(template).chat([message])


def test_a_template_sees_nothing_of_an_object_but_its_public_side():
    assert chatty("{{ '{0.__class__}'.format(messages) }}{{ messages.__class__ }}{{ raise_exception.__code__ }}").chat_text([]) == ""


# --- a hostile template is an error of ours, soon ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("template", "says"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ raise_exception.__globals__ }}{{ raise_exception.__globals__.x }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update(role='system') }}", "SecurityError"),
        ("{{ lipsum(n=10 ** 9) }}", "SecurityError|UndefinedError"),
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
def test_a_hostile_template_is_an_error_of_ours(template, says, monkeypatch):
    """By what it does, and not because a busy machine takes longer than a template may: tests below have those that never end."""
    monkeypatch.setattr(chat_template, "_CHAT_SECONDS", 60.0)
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
