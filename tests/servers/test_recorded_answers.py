"""Answers in the form that servers have today, in data/servers with the sources of each form: read right, or refused for what they lack."""

import json
from pathlib import Path

import pytest
from fake_server import serving

from bitnet_np.base.errors import Error
from bitnet_np.servers.client import client_of
from bitnet_np.servers.endpoint import server_at

DATA = Path(__file__).parents[1] / "data" / "servers"
RECORDED = {path.stem: json.loads(path.read_text("utf-8")) for path in sorted(DATA.glob("*.json"))}
NAMES = {"sglang": "SGLang"}


def completed(recorded):
    answers = {path: (answer["status"], answer["body"], {}) for path, answer in recorded["answers"].items()}
    with serving(answers) as (url, _):
        server = server_at(client_of(url, 5))
        return server.name, server.complete(recorded["ids"], recorded["predict"], recorded["k"])


@pytest.mark.parametrize("server", [name for name, recorded in RECORDED.items() if "tokens" in recorded])
def test_an_answer_with_token_ids_is_read(server):
    recorded = RECORDED[server]
    name, made = completed(recorded)
    assert name == NAMES.get(server, "OpenAI-style server")
    assert made.tokens.tolist() == recorded["tokens"]
    rows = [[row.position, {str(i): x for i, x in zip(row.ids.tolist(), row.logprobs.tolist(), strict=True)}] for row in made.top]
    assert rows == recorded["top"]
    assert all(list(entries.values()) == sorted(entries.values(), reverse=True) for _, entries in rows)


@pytest.mark.parametrize("server", [name for name, recorded in RECORDED.items() if "refused" in recorded])
def test_a_server_without_token_ids_is_refused_and_never_judged(server):
    with pytest.raises(Error) as caught:
        completed(RECORDED[server])
    assert RECORDED[server]["refused"] in str(caught.value)


def test_every_form_has_a_source():
    assert set(RECORDED) == {"vllm", "sglang", "ollama", "lm_studio"}
    assert all(recorded["source"] for recorded in RECORDED.values())
