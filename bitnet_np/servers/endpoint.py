"""Which API a server speaks."""

from typing import Any, TypeAlias

from ..base.errors import UnsupportedError
from .client import Client, RefusedError
from .completions import member
from .llama_server import LlamaServer
from .openai import OpenAiServer
from .sglang import SglangServer

Server: TypeAlias = LlamaServer | OpenAiServer  # SglangServer is one
"""What completes token ids: both have the fields `name` and `dialect`, and the methods `tokenize` and `complete`."""


def server_at(client: Client) -> Server:
    """The server at an address: llama-server by `/props`, SGLang by `/get_model_info`, else an OpenAI-style one by `/v1/models`.

    Raises ServerError if it cannot be reached, UnsupportedError if it speaks none of these APIs.
    """
    props, reason = _answer(client, "/props")
    if isinstance(props, dict) and "default_generation_settings" in props:
        return LlamaServer(client)
    info, _ = _answer(client, "/get_model_info")
    if isinstance(info, dict) and "is_generation" in info:
        path = member("/get_model_info", info, "model_path", str)
        return SglangServer(client, path, names=(path, "sglang"))
    models, other_reason = _answer(client, "/v1/models")
    data = models.get("data") if isinstance(models, dict) else None
    if isinstance(data, list) and data:
        model = member("/v1/models: data[0]", data[0], "id", str)
        named = (data[0].get(field) for field in ("root", "owned_by"))
        return OpenAiServer(client, model, names=(model, *(name for name in named if isinstance(name, str))))
    neither = f"{reason or 'no default_generation_settings'}) nor an OpenAI-style server (/v1/models: {other_reason or 'no list of models'}"
    raise UnsupportedError(f"{client.url}: neither llama-server (/props: {neither})")


def _answer(client: Client, path: str) -> tuple[Any, str]:
    """The JSON value at a path, or why the server refuses it."""
    try:
        return client.get(path), ""
    except RefusedError as refusal:
        return None, f"HTTP status {refusal.status}"
