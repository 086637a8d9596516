"""HTTP to a server that is not trusted: every answer ends in a value or a clear error, in limited time and memory."""

import json
import socket
import time

import pytest
from fake_server import raw, serving

from bitnet_np.base.errors import OptionError, ServerError
from bitnet_np.servers.client import SMALL_ANSWER, RefusedError, client_of


@pytest.mark.parametrize(
    ("url", "seen"),
    [
        ("http://127.0.0.1:8080", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/", "http://127.0.0.1:8080"),
        ("http://127.0.0.1:8080/v1/", "http://127.0.0.1:8080"),
        ("https://example.org/llm/v1", "https://example.org/llm"),
        ("http://[::1]:80", "http://[::1]:80"),
    ],
)
def test_addresses(url, seen):
    assert client_of(url, 1).url == seen


REFUSED = [
    *("", "127.0.0.1:8080", "file:///etc/passwd", "ftp://a", "http://", "http://a:b", "http://a:99999", "http://[::1"),
    *("http://a/#b", "http://a/ b", "http://a/\nb", "http://me:secret@a", "me:secret@a", "http://me:x/secret@a", "http://me:se@cret@a"),
    *("http://a/?key=secret", "http://me\n:secret@a", "http://a..b", "http://" + "a" * 64, "http://a/\u0131"),
]


@pytest.mark.parametrize("url", REFUSED)
def test_addresses_that_are_refused_and_passwords_not_repeated(url):
    with pytest.raises(OptionError, match="the endpoint is") as refused:
        client_of(url, 1)
    assert not any(part in str(refused.value) for part in ("secret", "cret", "me:"))


@pytest.mark.parametrize("timeout", [0, -1, 1e9, float("nan"), float("inf")])
def test_timeouts_that_are_refused(timeout):
    with pytest.raises(OptionError, match="the timeout is"):
        client_of("http://a", timeout)


def test_json_goes_both_ways():
    with serving({"/v/x": lambda body: {"got": body}}) as (url, requests):
        client = client_of(url + "/v", 5)
        assert client.post("/x", {"a": [1, "é"]}) == {"got": {"a": [1, "é"]}}
        assert client.get("/x") == {"got": None}
        assert requests == [("POST", "/v/x", {"a": [1, "é"]}), ("GET", "/v/x", None)]


def test_nan_is_passed_on_for_the_judge():
    with serving({"/x": b'{"a": NaN, "b": -Infinity}'}) as (url, _):
        value = client_of(url, 5).get("/x")
    assert value["a"] != value["a"]
    assert value["b"] == float("-inf")


OK = b"HTTP/1.0 200 OK\r\n"
BAD = {
    **{repr(body[:12]): (body, "/x: the answer is no JSON") for body in (b"", b"{", b"no json", b"\xff\xfe\x00", b"[" * 100_000)},
    "digits": (b"[" + b"9" * 10_000 + b"]", "/x: the answer is no JSON"),
    "trailing": (b'{"a": 1} trailing', "/x: the answer is no JSON"),
    "ssh": (raw(lambda handler: handler.wfile.write(b"SSH-2.0-OpenSSH\r\n")), "/x: "),
    "nothing": (raw(lambda handler: None), "/x: "),
    "headers": (raw(lambda handler: handler.wfile.write(OK + b"".join(b"X%d: 1\r\n" % i for i in range(1000)) + b"\r\n{}")), "/x: "),
}


@pytest.mark.parametrize(("answer", "said"), BAD.values(), ids=BAD)
def test_what_is_no_http_or_no_json_is_refused(answer, said):
    with serving({"/x": answer}) as (url, _), pytest.raises(ServerError, match=said):
        client_of(url, 5).get("/x")


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [
        (500, {"error": {"message": "model\x1b[2J exploded", "code": 500}}, r"HTTP status 500: 'model\x1b[2J exploded'"),
        (401, {"error": "no key"}, "HTTP status 401: 'no key'"),
        (422, {"detail": [1]}, "HTTP status 422: '[1]'"),
        (400, b"<html>" + b"a" * 1000, "HTTP status 400: '<html>aaa"),
        (404, b"\xff", "HTTP status 404"),
        (503, b"[" * 100_000, "HTTP status 503"),
    ],
)
def test_refusals_say_what_the_server_says(status, body, said):
    with serving({"/x": (status, body, {})}) as (url, _), pytest.raises(RefusedError) as caught:
        client_of(url, 5).get("/x")
    assert said in str(caught.value)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250
    assert caught.value.status == status


def test_no_redirect_is_followed():
    with serving({"/secret": {}}) as (other, theirs):
        for status in (301, 302, 303, 307, 308):
            with (
                serving({"/x": (status, b"", {"Location": f"{other}/secret"})}) as (url, _),
                pytest.raises(ServerError, match="redirects to"),
            ):
                client_of(url, 5).post("/x", {})
        assert theirs == []


def test_proxies_of_the_environment_are_not_used(monkeypatch):
    with serving({}) as (proxy, seen), serving({"/x": 1}) as (url, _):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        assert client_of(url, 5).get("/x") == 1
        assert seen == []


def endless(chunked):
    @raw
    def write(handler):
        handler.send_response(200)
        if chunked:
            handler.protocol_version = "HTTP/1.1"
            handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        while True:
            handler.wfile.write(b"4000\r\n" + b" " * 0x4000 + b"\r\n" if chunked else b" " * 0x4000)

    return write


@pytest.mark.parametrize(("length", "said"), [("-5", "a chunk has -5 bytes"), ("-1", "a chunk has -1 bytes"), ("x", "/x: ")])
def test_a_chunk_of_a_length_that_is_none_is_refused(length, said):
    """http.client would read one of -1 bytes to its end, which never comes."""

    @raw
    def write(handler):
        handler.protocol_version = "HTTP/1.1"
        handler.send_response(200)
        handler.send_header("Transfer-Encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(f"{length}\r\n".encode())
        while True:
            handler.wfile.write(b" " * 0x4000)

    with serving({"/x": write}) as (url, _), pytest.raises(ServerError, match=said):
        client_of(url, 60).get("/x")


@pytest.mark.parametrize("chunked", [False, True])
def test_an_answer_without_an_end_is_cut_off(chunked):
    with serving({"/x": endless(chunked)}) as (url, _), pytest.raises(ServerError, match=f"more than {SMALL_ANSWER:,} bytes"):
        client_of(url, 60).get("/x")


def test_an_answer_of_just_the_most_bytes_is_read():
    body = json.dumps("a" * 98).encode()
    assert len(body) == 100
    with serving({"/x": body}) as (url, _):
        assert client_of(url, 5).post("/x", {}, most=100) == "a" * 98
        with pytest.raises(ServerError, match="more than 99 bytes"):
            client_of(url, 5).post("/x", {}, most=99)


SLOW = {  # what is sent at once, what is sent again and again, how often, and the seconds between
    "body": (OK + b"\r\n", b"a", 100, 0.1),
    "headers": (OK + b"X: ", b"a", 100, 0.1),
    "silent": (b"", b"", 1, 3),
    "continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n", 1000, 0.01),
}


@pytest.mark.parametrize(("first", "piece", "times", "pause"), SLOW.values(), ids=SLOW)
def test_the_time_limit_is_for_the_whole_answer(first, piece, times, pause):
    @raw
    def dripping(handler):
        handler.wfile.write(first)
        for _ in range(times):
            handler.wfile.write(piece)
            time.sleep(pause)

    with serving({"/x": dripping}) as (url, _):
        start = time.monotonic()
        with pytest.raises(ServerError, match=r"no whole answer within 0.5 s"):
            client_of(url, 0.5).get("/x")
        assert time.monotonic() - start < 3


def test_a_server_that_is_not_there():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        with pytest.raises(ServerError, match=f"{url}/x: "):
            client_of(url, 5).get("/x")


def test_https_needs_a_certificate():
    with serving({"/x": 1}) as (url, _), pytest.raises(ServerError, match="https://"):
        client_of(url.replace("http:", "https:"), 5).get("/x")
