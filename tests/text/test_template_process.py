"""The process that renders a chat template: whatever a hostile template does in it is an error of ours, soon."""

import time

import pytest
from tokenizer_models import MESSAGES, chatty

from bitnet_np.base.errors import FileFormatError
from bitnet_np.text import chat_template


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
