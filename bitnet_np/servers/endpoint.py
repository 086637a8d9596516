"""Which API a server speaks."""

from typing import TypeAlias

from ..base.errors import ServerError, UnsupportedError
from .client import Client, RefusedError
from .fields import member
from .llama_server import LlamaServer
from .openai import OpenAiServer

Server: TypeAlias = LlamaServer | OpenAiServer
"""What completes token ids: both have the fields `name` and `dialect`, and the methods `tokenize` and `complete`."""


def server_at(client: Client) -> Server:
    """The server at an address: llama-server if it has `/props`, else an OpenAI-style one if it has `/v1/models`.

    Raises ServerError if it cannot be reached, UnsupportedError if it speaks neither API.
    """
    reasons = []
    for path, known in (("/props", _llama_server), ("/v1/models", _openai)):
        try:
            return known(client, client.get(path))
        except RefusedError as refusal:
            reasons.append(f"{path}: HTTP status {refusal.status}")
        except _UnlikeError as error:
            reasons.append(str(error))
    raise UnsupportedError(f"{client.url}: neither llama-server ({reasons[0]}) nor an OpenAI-style server ({reasons[1]})")


class _UnlikeError(ServerError):
    """An answer that another kind of server gives."""


def _llama_server(client: Client, props: object) -> Server:
    if not isinstance(props, dict) or "default_generation_settings" not in props:
        raise _UnlikeError("/props: no default_generation_settings")
    return LlamaServer(client)


def _openai(client: Client, models: object) -> Server:
    data = models.get("data") if isinstance(models, dict) else None
    if not isinstance(data, list) or not data:
        raise _UnlikeError("/v1/models: no list of models")
    return OpenAiServer(client, member("/v1/models: data[0]", data[0], "id", str))
