"""Chat templates: rendered as they are written for, and no harm from one that is hostile."""

import pytest
from tokenizer_models import MESSAGES, chatty

from bitnet_np.base.errors import OptionError, UnsupportedError

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
