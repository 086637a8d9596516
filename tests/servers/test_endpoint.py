"""Which API a server speaks is found out, or said not to be known."""

import pytest
from fake_server import MODELS, PROPS, SGLANG_INFO, serving

from bitnet_np.base.errors import ServerError, UnsupportedError
from bitnet_np.servers.client import client_of
from bitnet_np.servers.endpoint import server_at


def found(answers):
    with serving(answers) as (url, _):
        return server_at(client_of(url, 5))


@pytest.mark.parametrize(
    ("answers", "seen"),
    [
        ({"/props": PROPS, "/v1/models": MODELS}, ("llama-server", "llama.cpp", None)),  # it has both
        ({"/get_model_info": SGLANG_INFO, "/v1/models": MODELS}, ("SGLang", None, "tiny")),  # its completions name tokens by their texts
        *(
            ({"/props": props, "/v1/models": MODELS}, ("OpenAI-style server", None, "tiny"))
            for props in ((404, {}, {}), (501, {}, {}), {"other": 1}, [1])
        ),
    ],
)
def test_servers_are_known_by_what_they_say_of_themselves(answers, seen):
    server = found(answers)
    assert (server.name, server.dialect, getattr(server, "model", None)) == seen


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({}, r"neither llama-server \(/props: HTTP status 404\) nor an OpenAI-style server \(/v1/models: HTTP status 404\)"),
        ({"/props": {}, "/v1/models": {"data": []}}, r"/props: no default_generation_settings.*/v1/models: no list of models"),
        ({"/v1/models": [1]}, "/v1/models: no list of models"),
    ],
)
def test_a_server_that_speaks_neither(answers, said):
    with pytest.raises(UnsupportedError, match=said):
        found(answers)


def test_what_is_no_json_is_an_error():
    with pytest.raises(ServerError, match="/props: the answer is no JSON"):
        found({"/props": b"<html>"})
    with pytest.raises(ServerError, match=r"data\[0\].id is 5, expected a string"):
        found({"/v1/models": {"data": [{"id": 5}]}})
