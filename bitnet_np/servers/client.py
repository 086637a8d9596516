"""HTTP with JSON, to a server that is not trusted.

Answers are limited in time and in bytes. Redirects are refused, and proxies of the environment are not used: a request goes to the host
that the caller names and to no other.
"""

import json
import re
import socket
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from threading import Event, Timer
from typing import Any
from urllib.parse import urlsplit

from ..base.errors import OptionError, ServerError, shown
from .completions import of_type, tokens

_PIECE = 1 << 20  # bytes read at a time
SMALL_ANSWER = 1 << 20
"""Most bytes of an answer without log-probabilities. A `/props` of llama-server has some 3 KB, and a chat template of as many again."""


class RefusedError(ServerError):
    """The server answered with an HTTP status that is no success."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


def most_bytes(entries: int) -> int:
    """Most bytes of an answer with this many log-probabilities: each has a token's text, its bytes and its id."""
    return SMALL_ANSWER + 1024 * entries


@dataclass(frozen=True)
class Client:
    """The address of a server, `scheme://host:port/path` without a trailing slash."""

    url: str
    timeout: float  # seconds for one request and its whole answer

    def get(self, path: str) -> Any:
        """The JSON value at a path. Raises ServerError."""
        return self._json("GET", path, None, SMALL_ANSWER)

    def post(self, path: str, body: dict[str, Any], most: int = SMALL_ANSWER) -> Any:
        """The JSON value that answers a JSON body, of at most `most` bytes. Raises ServerError."""
        return self._json("POST", path, json.dumps(body).encode(), most)

    def tokenize(self, body: dict[str, Any], text: str) -> list[int]:
        """The token ids of a text, by `/tokenize`, which llama-server and vLLM answer alike. Raises ServerError."""
        answer = self.post("/tokenize", body, SMALL_ANSWER + 64 * len(text))
        return tokens("/tokenize: tokens", of_type("/tokenize: answer", answer, dict).get("tokens"))

    def _json(self, method: str, path: str, body: bytes | None, most: int) -> Any:
        url = f"{self.url}{path}"
        status, location, raw = self._answer(method, path, body, most)
        if 300 <= status < 400:
            raise RefusedError(f"{url}: redirects to {shown(location)}, which is not followed; name the server itself", status)
        if not 200 <= status < 300:
            raise RefusedError(f"{url}: HTTP status {status}: {shown(_message(raw))}", status)
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ServerError(f"{url}: the answer is no JSON: {error}") from None

    def _answer(self, method: str, path: str, body: bytes | None, most: int) -> tuple[int, str | None, bytes]:
        """Status, Location and body of the answer."""
        url, late = f"{self.url}{path}", Event()
        parts = urlsplit(url)
        connection = (HTTPSConnection if parts.scheme == "https" else HTTPConnection)(
            parts.hostname or "", parts.port, timeout=self.timeout
        )
        timer: Timer | None = None
        try:
            connection.connect()
            timer = Timer(self.timeout, _hang_up, (connection.sock, late))
            timer.daemon = True
            timer.start()
            headers = {"Accept": "application/json", "Content-Type": "application/json"}
            connection.request(method, parts.path, body, headers)
            response = connection.getresponse()
            response.fp = _Sized(response.fp)  # type: ignore[assignment]
            raw = bytearray()
            while piece := response.read(min(_PIECE, most + 1 - len(raw))):
                raw += piece
            if late.is_set():
                raise TimeoutError
            if len(raw) > most:
                raise ServerError(f"{url}: the answer has more than {most:,} bytes, which is the most that it may have")
            return response.status, response.getheader("Location"), bytes(raw)
        except ServerError:
            raise
        except (OSError, HTTPException, ValueError) as error:  # ValueError: http.client trusts numbers and host names
            if late.is_set() or isinstance(error, TimeoutError):
                raise ServerError(f"{url}: no whole answer within {self.timeout:g} s") from None
            raise ServerError(f"{url}: {str(error) or type(error).__name__}") from None
        finally:
            if timer is not None:
                timer.cancel()
            connection.close()


class _Sized:
    """What http.client reads an answer from. A chunk whose length is negative would be read to the end, however far that is."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def read(self, size: int) -> bytes:
        if size < 0:
            raise HTTPException(f"a chunk has {size} bytes")
        return self._file.read(size)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def _hang_up(connected: socket.socket, late: Event) -> None:
    """Ends an exchange that takes too long: a server that sends a byte now and then never runs into a socket's own timeout."""
    late.set()
    with suppress(OSError):
        connected.shutdown(socket.SHUT_RDWR)


def _message(raw: bytes) -> str:
    """The message of an error answer, which may be anything."""
    with suppress(ValueError, RecursionError):
        value = json.loads(raw)
        for name in ("error", "message", "detail"):
            value = value.get(name, value) if isinstance(value, dict) else value
        return value if isinstance(value, str) else json.dumps(value)
    return raw[:200].decode("utf-8", "replace")


def client_of(url: str, timeout: float) -> Client:
    """The client for an address. A trailing `/v1` is left out: it is part of the API's paths. Raises OptionError."""
    named = re.sub(r"^(\w+://)?.*@|\?.*", r"\1...", url, flags=re.DOTALL)  # a password is not repeated
    try:
        parts = urlsplit(url)
        parts.port  # noqa: B018 - a wrong one is an error
        (parts.hostname or "").encode("idna")  # raises UnicodeError, a ValueError, for names such as a..b
    except ValueError as error:
        raise OptionError(f"the endpoint is {shown(named)}: {error if named == url else 'it is no address'}") from None
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise OptionError(f"the endpoint is {shown(named)}, expected an address such as http://127.0.0.1:8080")
    if parts.username is not None or parts.query or parts.fragment or not url.isprintable() or " " in url or not parts.path.isascii():
        what = "expected an address without a user name, blanks, `?` or `#`, and with a path of ASCII characters"
        raise OptionError(f"the endpoint is {shown(named)}, {what}")
    if not 0 < timeout <= 86400:
        raise OptionError(f"the timeout is {timeout:g} s, expected more than 0 and at most 86400")
    return Client(f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/').removesuffix('/v1')}", timeout)
