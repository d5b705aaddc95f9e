"""Byte sequences of no real HTTP server: the reader stops soon, with a single line."""

from __future__ import annotations

import re
import socket
import threading
import time
from contextlib import contextmanager, suppress

import pytest
import torch
from safetensors.torch import save

from statecli.core.errors import UnreadableError
from statecli.storage.http import Http

from .server import After, Headers, Times

pytest.importorskip("urllib3")
NAME = "m.safetensors"
FILE = save({"w": torch.arange(100_000, dtype=torch.float32)})
#: How many timeouts a server goes on for, unless its client hangs up. A test that takes so long fails.
MAX_TIMEOUTS = 100
TIMEOUT_S = 0.3


@contextmanager
def serve_raw(answer):
    """A server whose `answer` gives the bytes sent after a request for a range (start, last, number of the request)."""
    count, closing = 0, threading.Event()

    def serve(connection):
        nonlocal count
        with connection, suppress(OSError):
            while head := _read_request(connection):
                start, last = map(int, re.search(r"(?i)range: bytes=(\d+)-(\d+)", head).groups())
                count += 1
                until = time.monotonic() + MAX_TIMEOUTS * TIMEOUT_S
                for part in answer(start, min(last, len(FILE) - 1), count):
                    if closing.is_set() or time.monotonic() > until:
                        return
                    if part is None:
                        time.sleep(0.02)
                    else:
                        connection.sendall(part)

    def listen():
        while not closing.is_set():
            with suppress(OSError):
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.05)
        thread = threading.Thread(target=listen, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/{NAME}"
        closing.set()
        thread.join()


def _read_request(connection):
    connection.settimeout(MAX_TIMEOUTS * TIMEOUT_S)
    head = b""
    while b"\r\n\r\n" not in head:
        part = connection.recv(65536)
        if not part:
            return None
        head += part
    return head.decode("latin-1")


def build_range_head(start, last, *headers, length=True):
    """Return the correct headers of a range."""
    lines = [f"Content-Range: bytes {start}-{last}/{len(FILE)}", *headers]
    lines += [f"Content-Length: {last + 1 - start}"] * length
    return "\r\n".join(("HTTP/1.1 206 Partial Content", *lines, "", "")).encode()


def encode_chunk(data):
    """Return the bytes as a chunk of HTTP."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def repeat_forever(part):
    """Yield the same bytes again and again, with short pauses."""
    while True:
        yield part
        yield None


def drip_head(start, last, n):
    yield b"HTTP/1.1 206 Partial Content\r\n"
    yield from repeat_forever(b"X")


def drip_body(start, last, n):
    yield build_range_head(start, last)
    yield from repeat_forever(b"\x00")


def repeat_continue(start, last, n):
    yield from repeat_forever(b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def send_endless_headers(start, last, n):
    yield b"HTTP/1.1 206 Partial Content\r\n"
    yield from repeat_forever(b"X-A: b\r\n" * 1000)


def send_endless_line(start, last, n):
    yield b"HTTP/1.1 206 Partial Content\r\nX-A: "
    yield from repeat_forever(b"a" * 65536)


def send_endless_chunk_size(start, last, n):
    yield build_range_head(start, last, "Transfer-Encoding: chunked", length=False) + b"1;"
    yield from repeat_forever(b"a" * 65536)


def send_endless_trailers(start, last, n):
    yield build_range_head(start, last, "Transfer-Encoding: chunked", length=False) + encode_chunk(
        FILE[start : last + 1] + b"more"
    )
    yield from repeat_forever(b"X-A: b\r\n" * 1000)


def send_endless_trailers_of_a_file(start, last, n):
    yield b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + encode_chunk(FILE) + b"0\r\n"
    yield from repeat_forever(b"X-A: b\r\n" * 1000)


def send_ssh(start, last, n):
    yield b"\x00SSH-2.0-OpenSSH\r\n"
    yield from repeat_forever(b"")


def send_404(start, last, n):
    yield b"HTTP/1.1 404 Not Found\r\nContent-Length: 10000\r\n\r\n"
    yield from repeat_forever(b"")


def drip_404(start, last, n):
    yield b"HTTP/1.1 404 Not Found\r\nContent-Length: 10000\r\n\r\n"
    yield from repeat_forever(b"x")


def send_compressed(start, last, n):
    yield build_range_head(start, last, "Transfer-Encoding: gzip, chunked", length=False)
    yield from repeat_forever(b"")


def send_too_many_chunks(start, last, n):
    yield build_range_head(start, last, "Transfer-Encoding: chunked", length=False)
    yield encode_chunk(FILE[start : last + 1]) + encode_chunk(b"more") + b"0\r\n\r\n"


STALLS = "the server stalls: "
NO_END = "incomplete response headers"
TIMEOUT_TEXT = f" in {TIMEOUT_S:g} s (STATECLI_TIMEOUT sets this limit)"
GARBAGE = "the server sent an answer that is not valid HTTP"
TRY_AGAIN = "; try again later"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (drip_head, f"{STALLS}{NO_END}{TIMEOUT_TEXT}{TRY_AGAIN}"),
        (repeat_continue, f"{STALLS}{NO_END}{TIMEOUT_TEXT}{TRY_AGAIN}"),
        (drip_body, f"{STALLS}too few bytes arrived{TIMEOUT_TEXT}, after [0-9]{{1,3}} of 65,536 bytes{TRY_AGAIN}"),
        (send_endless_headers, GARBAGE),
        (send_endless_line, GARBAGE),
        (send_endless_chunk_size, f"{GARBAGE}, after 0 of 65,536 bytes{TRY_AGAIN}"),
        (send_endless_trailers, "the server reports contradictory sizes for its answer; download the file first"),
        (send_endless_trailers_of_a_file, f"{STALLS}{NO_END}{TIMEOUT_TEXT}, after {len(FILE):,} bytes{TRY_AGAIN}"),
        (send_ssh, GARBAGE),
        (send_404, "does not exist (HTTP 404)"),
        (drip_404, "does not exist (HTTP 404)"),
        (
            send_compressed,
            "the server sends the file compressed (gzip), so it cannot be read in parts; download the file first",
        ),
        (send_too_many_chunks, "the server reports contradictory sizes for its answer; download the file first"),
    ],
)
def test_server_that_keeps_its_client_busy_is_given_up(answer, reason, inspect_error, monkeypatch):
    """statecli gives up within the timeout, whatever bytes the server sends."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    monkeypatch.setenv("STATECLI_TIMEOUT", str(TIMEOUT_S))
    with serve_raw(answer) as url:
        pattern = re.escape(reason).replace(r"\[0\-9\]\{1,3\}", "[0-9]{1,3}")
        assert re.fullmatch(re.escape(f"{url}: ") + pattern, inspect_error(url))


def test_answer_that_is_not_http_is_not_requested_again(inspect_error):
    """The server will not speak HTTP at the next attempt either."""
    requests = []

    def answer(start, last, n):
        requests.append(n)
        yield from send_ssh(start, last, n)

    with serve_raw(answer) as url:
        assert inspect_error(url) == f"{url}: {GARBAGE}"
    assert requests == [1]


def test_slow_connection_is_not_a_stall(statecli, monkeypatch):
    """A body takes three times the timeout, but is faster than the lowest accepted speed."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    monkeypatch.setenv("STATECLI_TIMEOUT", str(TIMEOUT_S))

    def answer(start, last, n):
        yield build_range_head(start, last)
        for at in range(start, last + 1, 1500):
            yield FILE[at : min(at + 1500, last + 1)]
            yield None

    with serve_raw(answer) as url:
        result = statecli("inspect", url)
        assert (result.code, result.err) == (0, "")


def test_chunks_that_end_keep_the_connection(statecli):
    """After a range in chunks, the next range is requested on the same connection."""
    connections = set()

    def answer(start, last, n):
        connections.add(threading.get_ident())
        yield build_range_head(start, last, "Transfer-Encoding: chunked", length=False)
        yield encode_chunk(FILE[start : last + 1]) + b"0\r\n\r\n"

    with serve_raw(answer) as url:
        assert statecli("inspect", url, "--stats").code == 0
    assert len(connections) == 1


# --- versions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def server(file_server):
    (file_server.folder / NAME).write_bytes(FILE)
    return file_server


@pytest.mark.parametrize("header", ["ETag", "Last_Modified"])
def test_version_of_a_later_answer_is_checked(server, header):
    """The first answer has no version, and the later answers have two different versions."""
    nothing = Headers(ETag=None, Last_Modified=None)
    values = (
        ('"one"', '"two"') if header == "ETag" else ("Tue, 01 Jan 2030 00:00:00 GMT", "Wed, 02 Jan 2030 00:00:00 GMT")
    )
    first, second = (Headers(**{header: value}) for value in values)
    server.behave(NAME, nothing, After(1, Times(1, first)), After(2, second))
    store, version = Http(), None
    for n in range(2):
        _, version = store.get(server.url(NAME), n * 10, 10, version)
    with pytest.raises(UnreadableError, match="changed while statecli read it; try again"):
        store.get(server.url(NAME), 20, 10, version)


def test_answers_without_a_common_version_field_match(server, statecli):
    """Answers without a common version field count as the same version; only a field of both answers can differ."""
    server.behave(NAME, After(1, Times(1, Headers(ETag=None))), After(2, Headers(Last_Modified=None)))
    result = statecli("inspect", server.url(NAME), "--stats")
    assert (result.code, result.err) == (0, "")
