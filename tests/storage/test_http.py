"""http and https: faults of servers, each produced by a real server on loopback."""

from __future__ import annotations

import datetime
import ipaddress
import json
import os
import re
import signal
import ssl
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from email.utils import format_datetime

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import save_file
from urllib3.exceptions import ReadTimeoutError

from statecli.storage import http, http_refusals, minimum_speed, retry

from .proxy import Proxy
from .server import (
    After,
    Basic,
    Delay,
    HangUp,
    Headers,
    OtherRange,
    Redirect,
    Refuse,
    Reply,
    Server,
    Signed,
    Stall,
    Times,
    WrongTotal,
    compress,
    ignore_range,
    login_page,
    reply_chunked,
)

pytest.importorskip("urllib3")
NAME = "m.safetensors"
DOWNLOAD = "; download the file first"
PASSWORD = "kraken-9137"  # noqa: S105 - it opens nothing


def write_checkpoint(path, elements=4):
    """Write a file with a single tensor of four bytes per element."""
    save_file({"w": torch.arange(elements, dtype=torch.float32)}, path)


@pytest.fixture
def server(file_server):
    write_checkpoint(file_server.folder / NAME)
    return file_server


@pytest.fixture
def big_file_server(file_server):
    """A server of a file of 2 MB."""
    write_checkpoint(file_server.folder / NAME, 500_000)
    return file_server


@pytest.fixture
def single_attempt(monkeypatch):
    """Fail after the first attempt."""
    monkeypatch.setenv("STATECLI_RETRIES", "0")
    monkeypatch.setenv("STATECLI_TIMEOUT", "0.3")


@pytest.fixture
def other_server(tmp_path):
    """A second server with a separate folder."""
    folder = tmp_path / "other"
    folder.mkdir()
    with Server(folder) as server:
        yield server


def inspect_url(url, statecli, *options):
    result = statecli("inspect", url, "-f", "json", *options)
    assert (result.code, result.err) == (0, ""), result
    return result


# --- ranges ----------------------------------------------------------------------------------------------------------


def test_header_takes_a_single_request(big_file_server, statecli):
    """Of a file of 2 MB, only 64 KiB are fetched."""
    state = inspect_url(big_file_server.url(NAME), statecli)
    assert list(state.rows()) == ["w"]
    assert [(request.method, request.status, request.sent) for request in big_file_server.requests] == [
        ("GET", 206, 64 << 10)
    ]


def test_large_file_without_range_support_is_refused_early(file_server, inspect_error):
    """Of 64 MB, the server sends only as much as the buffers of both sides hold."""
    with (file_server.folder / NAME).open("wb") as file:
        file.truncate(64 << 20)
    file_server.behave("*", ignore_range)
    error = inspect_error(file_server.url(NAME))
    assert error == (
        f"{file_server.url(NAME)}: the server ignores range requests and would send "
        "all 67,108,864 bytes; download the file first"
    )
    [request] = file_server.requests
    assert request.sent < 12 << 20


def test_small_file_without_range_support_is_fetched_once(big_file_server, statecli, tmp_path):
    """A file of 2 MB is fetched with a single request, however often it is read, and the result is the same."""
    local = statecli("inspect", big_file_server.folder / NAME, "--stats", "-f", "json").out
    big_file_server.behave("*", ignore_range)
    result = inspect_url(big_file_server.url(NAME), statecli, "--stats")
    assert result.out.replace(big_file_server.url(NAME), str(big_file_server.folder / NAME)) == local
    assert [request.status for request in big_file_server.requests] == [200]


def test_total_size_of_whole_files_is_limited(server, monkeypatch, inspect_error, statecli):
    """Here the limit is 50 bytes, and the message suggests downloading the files."""
    server.behave("*", ignore_range)
    monkeypatch.setattr(http, "MAX_ALL_WHOLE_BYTES", 50)
    assert inspect_error(server.url(NAME)).endswith(
        ": the server ignores range requests, and whole files would need more than 0 MiB of memory; download the files "
        "first"
    )


def test_whole_files_beyond_the_limit_are_refused(file_server, statecli, monkeypatch):
    """Of twenty files of 1 MB requested at once, only three fit into the limit; with and without lengths."""
    names = [f"model-{n:05}-of-00020.safetensors" for n in range(1, 21)]
    for name in names:
        save_file({name: torch.zeros(250_000)}, file_server.folder / name)
    index = {"metadata": {}, "weight_map": {name: name for name in names}}
    (file_server.folder / "model.safetensors.index.json").write_text(json.dumps(index))
    monkeypatch.setattr(http, "MAX_ALL_WHOLE_BYTES", 3_500_000)
    for behaviours in ((ignore_range,), (ignore_range, reply_chunked)):
        file_server.forget()
        file_server.behave("*.safetensors", *behaviours)
        store = http.Http()
        with ThreadPoolExecutor(20) as threads:
            tries = [threads.submit(store.get, file_server.url(name), 0, 100, None) for name in names]
        errors = [str(future.exception()) for future in tries if future.exception()]
        assert set(errors) == {
            (
                "the server ignores range requests, and whole files would need more than 3 MiB of memory; download the "
                "files first"
            )
        }
        assert len(names) - len(errors) == len(store._wholes)
        assert sum(len(data) for data, _ in store._wholes.values()) <= 3_500_000
        result = statecli("inspect", file_server.url("model.safetensors.index.json"))
        assert result.code == 2
        assert result.err.count("the server ignores range requests") == 1
        assert result.err.count("\n") == 1


def test_chunked_answer_is_read_if_small(big_file_server, statecli, inspect_error, monkeypatch):
    """A range reports its length in Content-Range; a whole file without a length is read only if small."""
    big_file_server.behave("*", reply_chunked)
    inspect_url(big_file_server.url(NAME), statecli)
    big_file_server.behave("*", ignore_range, reply_chunked)
    inspect_url(big_file_server.url(NAME), statecli)
    monkeypatch.setattr(http, "MAX_WHOLE_BYTES", 100_000)
    assert inspect_error(big_file_server.url(NAME)).endswith(
        ": the server ignores range requests and does not report the size of its answer; download the file first"
    )


def test_http_1_0_server_is_read(file_server, statecli, tmp_path):
    """HTTP/1.0 closes the connection after each answer."""
    with Server(file_server.folder, protocol="HTTP/1.0") as old:
        write_checkpoint(file_server.folder / NAME, 500_000)
        inspect_url(old.url(NAME), statecli, "--stats")
        assert {request.status for request in old.requests} == {206}


def test_whole_answer_without_a_length_is_refused(file_server, inspect_error):
    """A whole answer without a length, which ends with its connection, is not accepted as a file."""
    write_checkpoint(file_server.folder / NAME)

    def omit_length(request, reply):
        ignore_range(request, reply)
        reply.headers["Content-Length"] = ""

    with Server(file_server.folder, protocol="HTTP/1.0") as old:
        old.behave("*", omit_length)
        assert inspect_error(old.url(NAME)).endswith(
            ": the server does not report the size of its answer; download the file first"
        )


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (OtherRange(8), "the server answered with bytes 8 to 80 of 80, but statecli requested 0 to 65536" + DOWNLOAD),
        (WrongTotal("*"), "the server does not report the size of the file; download the file first"),
        (WrongTotal("many"), "the server does not report the range of its answer; download the file first"),
        (Headers(Content_Range=None), "the server does not report the range of its answer; download the file first"),
        (WrongTotal(50), "the server answered with bytes 0 to 80 of 50, but statecli requested 0 to 65536" + DOWNLOAD),
        (
            WrongTotal(500_000),
            "the server answered with bytes 0 to 80 of 500000, but statecli requested 0 to 65536" + DOWNLOAD,
        ),
        (Headers(Content_Length="95"), "the server reports contradictory sizes for its answer" + DOWNLOAD),
        (
            compress,
            "the server sends the file compressed (gzip), so it cannot be read in parts; download the file first",
        ),
        (Refuse(500), "the server is busy (HTTP 500); try again later"),
        (Refuse(503), "the server is busy (HTTP 503); try again later"),
        (Refuse(429), "the server is busy (HTTP 429); try again later"),
        (Refuse(404), "does not exist (HTTP 404)"),
        (Refuse(410), "does not exist (HTTP 410)"),
        (Refuse(403), "access is refused (HTTP 403): statecli sent no user name and no password"),
        (
            Refuse(401, WWW_Authenticate='Basic realm="x"'),
            "a user name and a password are needed (HTTP 401): write the user name and the password into the URL, "
            "https://USER:PASSWORD@…, or into ~/.netrc",
        ),
        (Refuse(418), "cannot be read (HTTP 418)"),
        (Redirect(NAME), "the server redirects in a circle; check the URL"),
        (Redirect("file:///etc/passwd"), "the server redirects to a URL that is not http:// or https://"),
        (login_page, "is an HTML page, perhaps a login or an error page (HTTP 200)"),
    ],
)
def test_fault_of_a_server_gives_a_single_line(server, behaviour, reason, inspect_error, statecli, single_attempt):
    """The message is a single line with the URL and the fault; the exit status is 2, and stdout is empty."""
    server.behave(NAME, behaviour)
    assert inspect_error(server.url(NAME)) == f"{server.url(NAME)}: {reason}"


def test_wrong_bytes_are_found_by_the_format(big_file_server, inspect_error):
    """HTTP cannot reveal a server that sends as many other bytes as requested; the format of the bytes does."""
    url = big_file_server.url(NAME)
    big_file_server.behave(NAME, Times(1, OtherRange(8, honest=False)))
    assert inspect_error(url).startswith(f"{url}: is a JSON document; ")


def test_file_without_bytes_is_reported_as_empty(file_server, inspect_error):
    """A 416 with size 0, and a whole answer without bytes."""
    (file_server.folder / NAME).touch()
    assert inspect_error(file_server.url(NAME)) == f"{file_server.url(NAME)}: is an empty file"
    file_server.behave(NAME, lambda request, reply: reply.become(Reply(200)))
    assert inspect_error(file_server.url(NAME)) == f"{file_server.url(NAME)}: is an empty file"


def test_refused_range_is_not_reported_as_an_empty_file(server, inspect_error):
    """A 416 with a positive size, or without a size."""
    for headers in ({"Content_Range": "bytes */96"}, {}, {"Content_Range": "bytes */*"}):
        server.behave(NAME, Refuse(416, **headers))
        reason = "the server refuses the byte range that statecli requested (HTTP 416): download the file first"
        assert inspect_error(server.url(NAME)) == f"{server.url(NAME)}: {reason}"


def test_message_suggests_to_escape_a_number_sign(file_server, statecli, inspect_error):
    """For an unescaped `#`, the message suggests %23."""
    write_checkpoint(file_server.folder / "a#b.safetensors")
    plain = file_server.url("a") + "#b.safetensors"
    assert inspect_error(plain) == (
        f"{file_server.url('a')}: does not exist (HTTP 404); statecli read #b.safetensors as the name of a section; if "
        "# belongs to the file name, write %23"
    )
    inspect_url(file_server.url("a%23b.safetensors").replace("%2523", "%23"), statecli)


def test_pickled_error_keeps_its_text_without_headers():
    """The error keeps its text, but not the answer's headers, because they may contain the target of a redirect."""
    import copy
    import pickle

    for kind in (http_refusals.RangeRefused, http_refusals.NoFile, http_refusals.Gone):
        error = kind("does not exist", 404, types.MappingProxyType({"Location": "http://host/?sig=5"}))
        for actual in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
            assert (type(actual), str(actual), dict(actual.headers)) == (kind, "does not exist", {})


# --- cuts and stalls ------------------------------------------------------------------------------------------------


def test_cut_connection_is_resumed_at_the_missing_byte(big_file_server, statecli):
    """No byte is fetched twice: the later requests are for the missing ranges."""
    local = statecli("inspect", big_file_server.folder / NAME, "--stats", "-f", "json").out
    big_file_server.behave(NAME, Times(2, HangUp(after=20_000)))
    result = inspect_url(big_file_server.url(NAME), statecli, "--stats")
    assert result.out.replace(big_file_server.url(NAME), str(big_file_server.folder / NAME)) == local
    first, second, third, *_ = big_file_server.requests
    assert [request.range for request in (first, second, third)] == [
        "bytes=0-65535",
        "bytes=20000-65535",
        "bytes=40000-65535",
    ]
    assert big_file_server.sent == (big_file_server.folder / NAME).stat().st_size


@pytest.mark.parametrize(("after", "came"), [(1000, 5000), (0, 0)])
def test_connection_cut_in_each_attempt_is_given_up(big_file_server, after, came, inspect_error):
    """After four more attempts, the message says how many bytes came."""
    big_file_server.behave(NAME, HangUp(after=after))
    reason = f"the connection was cut after {came:,} of 65,536 bytes, in each of 5 attempts; try again later"
    assert inspect_error(big_file_server.url(NAME)) == f"{big_file_server.url(NAME)}: {reason}"
    assert len(big_file_server.requests) == 5


def test_connection_cut_before_the_answer_is_repeated(server, statecli):
    """A single cut does no harm."""
    server.behave(NAME, Times(1, HangUp(None)))
    inspect_url(server.url(NAME), statecli)


def test_cut_whole_answer_is_fetched_again(big_file_server, statecli, inspect_error):
    """The server has no ranges, so the fetch cannot continue after the cut."""
    big_file_server.behave(NAME, ignore_range, Times(1, HangUp(1000)))
    inspect_url(big_file_server.url(NAME), statecli)
    big_file_server.behave(NAME, ignore_range, reply_chunked, HangUp(1000))
    assert "the connection was cut after 1,000 bytes, in each of 5 attempts" in inspect_error(big_file_server.url(NAME))


def test_answer_shorter_than_its_length_is_reported_as_cut(server, inspect_error, single_attempt):
    """The server announces more bytes than it sends."""

    def announce_more_bytes(request, reply):
        ignore_range(request, reply)
        reply.headers.update({"Content-Length": "500", "Connection": "close"})
        HangUp(after=80)(request, reply)

    server.behave(NAME, announce_more_bytes)
    assert inspect_error(server.url(NAME)).endswith("the connection was cut after 80 of 500 bytes; try again later")


def test_message_that_contains_the_letters_cut_is_kept():
    """The message of another error stays, and the number of bytes follows."""

    def stall(_):
        raise ReadTimeoutError(None, None, None) from minimum_speed.Stalled("no executable bytes")

    with pytest.raises(retry.Transient, match=r"no executable bytes in .*, after 3 of 10 bytes"):
        http._receive(types.SimpleNamespace(read1=stall), 10, [b"abc"])


def test_stalled_request_is_repeated(big_file_server, statecli, monkeypatch):
    """The server stalls once before the answer, and once in the middle of an answer."""
    monkeypatch.setenv("STATECLI_TIMEOUT", "0.2")
    big_file_server.behave(NAME, Times(1, Stall(None)), After(1, Times(1, Stall(10_000))))
    inspect_url(big_file_server.url(NAME), statecli)
    assert [request.range for request in big_file_server.requests] == [
        "bytes=0-65535",
        "bytes=0-65535",
        "bytes=10000-65535",
    ]


@pytest.mark.parametrize(("after", "came"), [(None, ""), (0, ", after 0 of 80 bytes"), (50, ", after 50 of 80 bytes")])
def test_server_that_always_stalls_is_given_up(server, after, came, inspect_error, single_attempt):
    """The message says how long no data came, and names the variable that sets the limit."""
    server.behave(NAME, Stall(after))
    reason = f"the server stalls: no data arrived in 0.3 s (STATECLI_TIMEOUT sets this limit){came}; try again later"
    assert inspect_error(server.url(NAME)) == f"{server.url(NAME)}: {reason}"


@pytest.mark.parametrize("status", [408, 425, 429, 500, 502, 503, 504])
def test_busy_server_is_requested_again(server, status, statecli):
    """The server is busy three times, and then sends the file."""
    server.behave(NAME, Times(3, Refuse(status, Retry_After="7")))
    inspect_url(server.url(NAME), statecli)
    assert [request.status for request in server.requests] == [status] * 3 + [206]


def test_retry_after_sets_the_pause(server, statecli, monkeypatch, inspect_error):
    """Retry-After is in seconds or a date; other values are ignored, and statecli never waits longer than 20 s."""
    slept = []
    monkeypatch.setattr(retry, "LONGEST_PAUSE_S", 20.0)
    monkeypatch.setattr(retry, "time", types.SimpleNamespace(sleep=slept.append))
    soon = datetime.datetime.now(datetime.timezone.utc) + datetime.timedelta(seconds=9)
    for retry_after in ("7", format_datetime(soon, usegmt=True), "soon", "-3"):
        server.behave(NAME, Times(1, Refuse(503, Retry_After=retry_after)))
        inspect_url(server.url(NAME), statecli)
    assert slept[0] == 7
    assert 5 < slept[1] <= 9
    assert slept[2:] == [0, 0]
    for retry_after, text in (("86400", "86,400"), ("9" * 400, "999,999,999")):
        server.forget()
        server.behave(NAME, Refuse(503, Retry_After=retry_after))
        reason = f"the server is busy (HTTP 503): the server asks statecli to wait {text} s; try again later"
        assert inspect_error(server.url(NAME)) == f"{server.url(NAME)}: {reason}"
        assert len(server.requests) == 1
    assert len(slept) == 4


@pytest.mark.parametrize(
    ("name", "texts", "allowed_values"),
    [
        ("TIMEOUT", ["no", "-1", "0", "nan", "1e9"], "a number above 0"),
        ("RETRIES", ["no", "-1", "0.001", "1000000"], "a whole number of 0 or more"),
        ("CONNECTIONS", ["no", "-1", "0", "2.5", "1000000"], "a whole number above 0"),
    ],
)
def test_invalid_setting_is_refused(server, name, texts, allowed_values, monkeypatch, statecli):
    """For other values, the message names the variable and the allowed values."""
    for text in texts:
        monkeypatch.setenv(f"STATECLI_{name}", text)
        result = statecli("inspect", server.url(NAME))
        assert (result.code, result.out) == (2, "")
        assert result.err == f"statecli: STATECLI_{name}={text}: must be {allowed_values} and below 1,000,000\n"


# --- redirects ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_redirect_is_followed_once(big_file_server, other_server, status, statecli):
    """Later requests go directly to the target of the redirect."""
    (big_file_server.folder / NAME).rename(other_server.folder / "there.bin")
    big_file_server.behave(NAME, Redirect(other_server.url("there.bin") + "?X-Signature=abc", status))
    other_server.behave("there.bin", Signed("X-Signature", "abc"))
    inspect_url(big_file_server.url(NAME), statecli, "--stats")
    assert len(big_file_server.requests) == 1
    assert len(other_server.requests) > 1


def test_refused_redirect_target_is_resolved_again(big_file_server, other_server, statecli):
    """After a 403 from the target of a redirect, statecli requests the original URL again."""
    write_checkpoint(other_server.folder / "there.bin", 500_000)
    big_file_server.behave(NAME, Redirect(other_server.url("there.bin")))
    other_server.behave("there.bin", After(1, Times(1, Refuse(403))))
    inspect_url(big_file_server.url(NAME), statecli, "--stats")
    assert [request.status for request in big_file_server.requests] == [302, 302]
    assert 403 in [request.status for request in other_server.requests]


def test_no_secret_goes_to_another_host(server, other_server, statecli):
    """Neither user and password nor the typed query reaches the other host, and no secret comes back."""
    write_checkpoint(other_server.folder / "there.bin")
    server.behave(NAME, Basic("me", PASSWORD), Redirect(other_server.url("there.bin")))
    inspect_url(server.url(NAME).replace("://", f"://me:{PASSWORD}@") + "?token=sesame123", statecli)
    [request] = other_server.requests
    assert "authorization" not in request.headers
    assert "referer" not in request.headers
    assert "cookie" not in request.headers
    assert request.query == {}
    assert PASSWORD not in str(request)
    [first] = server.requests
    assert first.query == {"token": "sesame123"}


def test_redirect_on_the_same_host_keeps_the_password(server, statecli):
    """The password is for all paths of the host."""
    (server.folder / "inner").mkdir()
    (server.folder / NAME).rename(server.folder / "inner" / NAME)
    server.behave(NAME, Redirect(f"inner/{NAME}"))
    server.behave(f"inner/{NAME}", Basic("me", PASSWORD))
    inspect_url(server.url(NAME).replace("://", f"://me:{PASSWORD}@"), statecli)


def test_endless_or_empty_redirect_is_reported(server, inspect_error):
    """More than ten redirects, or a redirect without a target."""
    for number in range(20):
        server.behave(f"r{number}", Redirect(f"r{number + 1}"))
    assert inspect_error(server.url("r0")).endswith(": the server redirects more than 10 times")
    server.behave("nowhere", lambda request, reply: reply.become(Reply(302)))
    assert inspect_error(server.url("nowhere")).endswith(": the server sent a redirect without a target")


@pytest.mark.parametrize(
    ("behaviour", "reason"),
    [
        (Refuse(404), "does not exist (HTTP 404 from {there})"),
        (Refuse(500), "the server is busy (HTTP 500 from {there}); try again later"),
        (HangUp(None), "the connection was cut ({there}, after a redirect); try again later"),
        (HangUp(10), "the connection was cut after 10 of 80 bytes ({there}, after a redirect); try again later"),
        (Stall(0), "{stalls}, after 0 of 80 bytes ({there}, after a redirect); try again later"),
        (
            OtherRange(8),
            "{other}, but statecli requested 0 to 65536 ({there}, after a redirect); download the file first",
        ),
        (
            Refuse(401),
            "access is refused (HTTP 401 from {there}): the user name and the password of the URL were not sent, "
            "because the URL redirects to another server",
        ),
        (
            Refuse(403),
            "access is refused (HTTP 403 from {there}): the user name and the password of the URL were not sent, "
            "because the URL redirects to another server",
        ),
    ],
)
def test_failing_server_after_a_redirect_is_named(
    server, other_server, behaviour, reason, inspect_error, single_attempt
):
    """The message names the server with its port, and says that no password was sent."""
    write_checkpoint(other_server.folder / "there.bin")
    other_server.behave("there.bin", behaviour)
    server.behave(NAME, Redirect(other_server.url("there.bin")))
    stalls = "the server stalls: no data arrived in 0.3 s (STATECLI_TIMEOUT sets this limit)"
    message = reason.format(
        there=other_server.address, stalls=stalls, other="the server answered with bytes 8 to 80 of 80"
    )
    url = server.url(NAME).replace("://", f"://me:{PASSWORD}@")
    assert inspect_error(url) == f"{server.url(NAME).replace('://', '://…@')}: {message}"


@pytest.mark.parametrize("to", ["http://[/x", "http://host:99999/x", "http://a b/x", "https://", "http://x:y/"])
def test_redirect_to_an_invalid_url_is_reported(server, to, inspect_error):
    """The message blames the redirect, not the typed URL."""
    server.behave(NAME, Redirect(to))
    assert inspect_error(server.url(NAME)) == f"{server.url(NAME)}: the server redirects to an invalid URL"


def test_fragment_of_a_redirect_is_not_sent(server, statecli):
    """A fragment is for programs that display a page."""
    server.behave(NAME, Redirect(f"{server.url('there.bin')}#top"))
    (server.folder / NAME).rename(server.folder / "there.bin")
    inspect_url(server.url(NAME), statecli)
    assert [request.path for request in server.requests] == [NAME, "there.bin"]


def test_redirect_to_a_login_page_names_its_host(server, other_server, inspect_error):
    """A user without a login gets such a redirect for every file; the message does not show its query."""
    other_server.behave("login", login_page)
    server.behave(NAME, Redirect(other_server.url("login") + "?next=secret-place"))
    assert inspect_error(server.url(NAME)) == (
        f"{server.url(NAME)}: is an HTML page, perhaps a login or an error page "
        f"(HTTP 200, after a redirect to {other_server.address})"
    )


def test_login_page_of_another_type_is_found_by_its_content(server, inspect_error):
    """The message is the same as for such a file on disk."""
    server.behave(NAME, login_page, Headers(Content_Type="application/octet-stream"))
    assert inspect_error(server.url(NAME)).endswith(": is an HTML page: the server sent a login page or an error page")


def test_compressed_login_page_is_recognised(server, inspect_error):
    """The page is recognised by its type, because its first bytes are compressed."""
    server.behave(NAME, login_page, compress)
    assert "is an HTML page" in inspect_error(server.url(NAME))


def test_checkpoint_with_an_html_content_type_is_read(server, statecli):
    """A server may send any type for a file of unknown type."""
    server.behave(NAME, Headers(Content_Type="text/html"))
    inspect_url(server.url(NAME), statecli)


# --- changed files --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "version_headers",
    [{"ETag": '"other"'}, {"ETag": None, "Last_Modified": "Tue, 01 Jan 2030 00:00:00 GMT"}],
    ids=["etag", "date"],
)
def test_file_changed_while_read_gives_a_single_line(big_file_server, version_headers, statecli):
    """A new ETag, or a new date if there is no ETag, fails the command with a single line, and without values."""
    first = {name: None for name, value in version_headers.items() if value is None}
    big_file_server.behave(NAME, Headers(**first), After(1, Headers(**version_headers)))
    result = statecli("inspect", big_file_server.url(NAME), "--stats")
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "w: changed while statecli read it; try again" in result.err


def test_changed_size_is_reported(big_file_server, statecli):
    """The server sends neither an ETag nor a date."""
    big_file_server.behave(NAME, Headers(ETag=None, Last_Modified=None), After(1, WrongTotal(2_000_081)))
    result = statecli("inspect", big_file_server.url(NAME), "--stats")
    assert (result.code, result.err.count("changed while statecli read it")) == (2, 1)


def test_weak_etag_may_differ(big_file_server, statecli):
    """A weak ETag belongs to its server; the date belongs to the file."""
    big_file_server.behave(NAME, Headers(ETag='W/"one"'), After(1, Headers(ETag='W/"two"')))
    inspect_url(big_file_server.url(NAME), statecli, "--stats")


def test_second_call_reads_the_file_again(server):
    """The second call reads the file in its new state."""
    import statecli

    assert statecli.inspect(server.url(NAME)).state.tensors[0].shape == (4,)
    write_checkpoint(server.folder / NAME, 6)
    assert statecli.inspect(server.url(NAME)).state.tensors[0].shape == (6,)
    before = statecli.diff(server.url(NAME), server.folder / NAME)
    assert not [change for change in before.changes if change.fields]


# --- credentials ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("user", "password"), [("me", PASSWORD), ("me@home.org", "a:b/c?d#e%41"), ("ü", "pass wörd"), ("me", "")]
)
def test_user_and_password_of_a_url_are_sent(server, user, password, statecli):
    """User and password may contain any character, if they are quoted in the URL."""
    from urllib.parse import quote

    server.behave(NAME, Basic(user, password))
    url = server.url(NAME).replace("://", f"://{quote(user, safe='')}:{quote(password, safe='')}@")
    assert inspect_url(url, statecli).json["target"] == server.url(NAME).replace("://", "://…@")


def test_user_and_password_of_the_netrc_file_are_sent(server, other_server, statecli, inspect_error):
    """They are sent to their host only; an unreadable netrc file is reported if a password was needed."""
    server.behave("*", Basic("me", PASSWORD))
    with open(os.environ["NETRC"], "w") as netrc:
        netrc.write(f"machine 127.0.0.1 login me password {PASSWORD}\n")
    inspect_url(server.url(NAME), statecli)
    with open(os.environ["NETRC"], "w") as netrc:
        netrc.write("machine 127.0.0.1 nonsense\n")
    assert inspect_error(server.url(NAME)).endswith("or into ~/.netrc (the netrc file cannot be read)")


@pytest.mark.parametrize(
    ("status", "expected_message"),
    [
        (401, "the server does not accept the user name and the password of the URL (HTTP 401)"),
        (
            403,
            "access is refused (HTTP 403): the user name and the password of the URL were sent, but do not give access",
        ),
    ],
)
def test_message_names_the_source_of_a_refused_password(server, status, expected_message, inspect_error):
    """The message names the source of the password, never the password."""
    server.behave(NAME, Refuse(status))
    error = inspect_error(server.url(NAME).replace("://", f"://me:{PASSWORD}@"))
    assert error == f"{server.url(NAME).replace('://', '://…@')}: {expected_message}"


def test_message_suggests_an_expired_signature(server, inspect_error):
    """The server's page repeats the signature, so statecli does not show the page."""
    server.behave(NAME, Signed("X-Amz-Signature", "right"))
    assert inspect_error(server.url(NAME) + "?X-Amz-Signature=wrong17") == (
        f"{server.url(NAME)}?X-Amz-Signature=…: access is refused (HTTP 403): the query was sent unchanged; "
        "a signature in the query may have expired"
    )


def test_message_asks_for_the_original_of_a_masked_url(server, inspect_error):
    """If the server refuses a masked URL, the message asks for the original URL."""
    server.behave(NAME, Signed("sig", "right"))
    assert inspect_error(server.url(NAME) + "?sig=…").endswith(
        "(HTTP 403): the URL contains … in place of a secret; use the original URL"
    )


# --- connections ----------------------------------------------------------------------------------------------------


def test_unreachable_or_invalid_host_gives_a_single_line(inspect_error, single_attempt):
    """An unknown name, a port without a server, and a URL without a valid host."""
    assert inspect_error("http://no-such-host.invalid/m.pt").removeprefix("http://no-such-host.invalid/m.pt: ") in (
        "unknown host: check the name in the URL and the network connection",
        "the host name cannot be resolved; check the network connection, then try again",
    )
    import socket

    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]  # no server uses the port from now on
    url = f"http://127.0.0.1:{port}/m.pt"
    assert inspect_error(url) == f"{url}: the server cannot be reached: connection refused; try again later"
    for url in ("http:///m.pt", "http://host:port/m.pt", "http://[::1/m.pt", "https://exa mple/m.pt"):
        named = url.replace(":port", ":…")  # the port may be a password
        assert inspect_error(url) == f"{named}: is not a URL with a valid host name"


@pytest.fixture
def https_server(file_server, tmp_path):
    """A server with a self-signed certificate, in `https_server.certificate`."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.datetime.now(datetime.timezone.utc)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "loopback")])
    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    day = datetime.timedelta(days=1)
    extension = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day).add_extension(
        names, False
    )
    extension = extension.add_extension(x509.BasicConstraints(ca=True, path_length=None), True).sign(
        key, hashes.SHA256()
    )
    pem = tmp_path / "certificate.pem"
    pem.write_bytes(
        extension.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(pem)
    write_checkpoint(file_server.folder / NAME)
    with Server(file_server.folder, tls=tls) as server:
        server.certificate = pem
        yield server


@pytest.fixture
def no_pools():
    """Forget connection pools, so that certificates are read again."""
    from statecli.storage import connections, lifetime

    lifetime.for_process(connections._Pools).__init__()
    yield
    lifetime.for_process(connections._Pools).__init__()


def test_untrusted_certificate_is_reported(https_server, inspect_error, no_pools):
    """The request is not repeated, and the message contains a remedy."""
    error = inspect_error(https_server.url(NAME))
    assert error.startswith(f"{https_server.url(NAME)}: the server's certificate cannot be verified: self")
    assert error.endswith("; to trust other certificates, set SSL_CERT_FILE to the file that contains them")


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "REQUESTS_CA_BUNDLE"])
def test_certificate_file_of_the_environment_is_trusted(https_server, variable, statecli, monkeypatch, no_pools):
    """statecli reads the same variables as other programs."""
    monkeypatch.setenv(variable, str(https_server.certificate))
    inspect_url(https_server.url(NAME), statecli)
    inspect_url(https_server.url(NAME).replace("https", "HTTPS"), statecli)


def test_missing_certificate_file_is_reported(https_server, inspect_error, monkeypatch, no_pools):
    """The variable names a missing file."""
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/no/such.pem")
    assert inspect_error(https_server.url(NAME)).endswith(
        ": the certificates in /no/such.pem cannot be read: no such file or directory"
    )


def test_message_suggests_the_other_scheme(server, https_server, inspect_error, no_pools):
    """The message suggests http://, and the other way round https://."""
    assert inspect_error(server.url(NAME).replace("http:", "https:")).endswith(
        "; if the server does not use TLS, write http://"
    )
    error = inspect_error(https_server.url(NAME).replace("https:", "http:"))
    assert "the connection was cut before an answer came, in each of 5 attempts" in error
    assert "; if the server uses TLS, write https://, then try again" in error


def test_redirect_from_https_to_http_is_refused(https_server, server, inspect_error, monkeypatch, no_pools):
    """The schemes may be in capital letters, and a redirect may follow another; no request reaches the http server."""
    monkeypatch.setenv("SSL_CERT_FILE", str(https_server.certificate))
    for scheme in ("http", "HTTP"):
        https_server.behave(NAME, Redirect(server.url(NAME).replace("http", scheme)))
        for typed in ("https", "HTTPS"):
            assert "redirects from https:// to http://" in inspect_error(https_server.url(NAME).replace("https", typed))
    https_server.behave("hop", Redirect(server.url(NAME)))
    https_server.behave(NAME, Redirect(https_server.url("hop").replace("https", "HTTPS")))
    assert "redirects from https:// to http://" in inspect_error(https_server.url(NAME))
    assert not server.requests


def test_proxy_of_the_environment_is_used(server, https_server, statecli, monkeypatch, no_pools):
    """The proxy is used for http and for https, but not for hosts in NO_PROXY."""
    with Proxy() as proxy:
        monkeypatch.setenv("SSL_CERT_FILE", str(https_server.certificate))
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("HTTPS_PROXY", proxy.url)
        inspect_url(server.url(NAME), statecli)
        assert proxy.requests == [f"GET {server.url(NAME)}"]
        inspect_url(https_server.url(NAME), statecli)
        assert proxy.requests[1:] == [f"CONNECT {https_server.address}"]
        inspect_url(server.url(NAME).replace("http", "HTTP"), statecli)
        assert proxy.requests[2:] == [f"GET {server.url(NAME)}"]
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        inspect_url(server.url(NAME), statecli)
        assert len(proxy.requests) == 3


def test_proxy_gets_the_password_of_its_url(server, https_server, statecli, inspect_error, monkeypatch, no_pools):
    """The proxy's password does not reach the server; without the password, the message asks for user and password."""
    with Proxy(f"out:{PASSWORD}") as proxy:
        monkeypatch.setenv("SSL_CERT_FILE", str(https_server.certificate))
        for variable in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(variable, proxy.url.replace("://", f"://out:{PASSWORD}@"))
        inspect_url(server.url(NAME), statecli)
        inspect_url(https_server.url(NAME), statecli)
        assert "proxy-authorization" not in server.requests[0].headers
        for variable in ("http_proxy", "https_proxy"):
            monkeypatch.setenv(variable, proxy.url)
        for url in (server.url(NAME), https_server.url(NAME)):
            assert ": the proxy asks for a user name and a password (HTTP 407): " in inspect_error(url)


def test_unreachable_proxy_is_reported(server, inspect_error, monkeypatch, single_attempt):
    """The message shows no part of the proxy's URL."""
    monkeypatch.setenv("http_proxy", f"http://out:{PASSWORD}@127.0.0.1:9")
    assert inspect_error(server.url(NAME)).endswith(
        ": the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be reached; try again later"
    )
    monkeypatch.setenv("http_proxy", f"socks5://out:{PASSWORD}@127.0.0.1:9")
    assert "the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY has an unsupported URL" in inspect_error(server.url(NAME))


@pytest.mark.parametrize("proxy", ["http://{}@127.0.0.1:99999", "http://{}@[bad", "[bad", "http://", "http://me:{}"])
def test_invalid_proxy_url_is_reported(server, inspect_error, monkeypatch, proxy):
    """The message blames the proxy's variable, not the requested URL, and shows no part of the proxy's URL."""
    monkeypatch.setenv("http_proxy", proxy.format(f"out:{PASSWORD}"))
    error = inspect_error(server.url(NAME))
    assert error == (
        f"{server.url(NAME)}: the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY is not a URL: write http://HOST:PORT"
    )


def test_paths_with_special_characters_reach_the_file(file_server, statecli):
    """Blanks, other alphabets, escapes and `#`, typed raw or quoted, reach the file."""
    from urllib.parse import quote

    for name in ("a b.safetensors", "ü&=;.safetensors", "100%25.safetensors", "a#b.safetensors"):
        write_checkpoint(file_server.folder / name)
        inspect_url(file_server.url() + quote(name), statecli)
    for name in ("a b.safetensors", "ü&=.safetensors".replace("&=", "&=;")):
        inspect_url(file_server.url() + name, statecli)
    assert {request.path for request in file_server.requests} == {path.name for path in file_server.folder.iterdir()}


def test_ipv6_host_is_read(tmp_path, statecli):
    """The address is in brackets."""
    import socket
    from http.server import HTTPServer, SimpleHTTPRequestHandler
    from threading import Thread

    if not socket.has_ipv6:
        pytest.skip("no IPv6")

    class Six(HTTPServer):
        address_family = socket.AF_INET6

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_):
            """Nothing on stderr."""

        def translate_path(self, path):
            return str(tmp_path / NAME)

    write_checkpoint(tmp_path / NAME)
    try:
        server = Six(("::1", 0), Quiet)
    except OSError:
        pytest.skip("no IPv6")
    with server:
        Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
        url = f"http://[::1]:{server.server_port}/{NAME}"
        inspect_url(url, statecli)
        assert statecli("audit", url).code == 0
        server.shutdown()


def test_file_url_is_read_as_a_path(tmp_path, statecli):
    """`file:///…`, with the escapes of URLs."""
    write_checkpoint(tmp_path / "a b.safetensors")
    url = (tmp_path / "a b.safetensors").as_uri()
    assert "%20" in url
    targets = [
        inspect_url(spelling, statecli).json["target"]
        for spelling in (url, url.replace("file:", "FILE:"), url[:7] + "localhost" + url[7:])
    ]
    assert targets == [str(tmp_path / "a b.safetensors")] * 3
    import statecli as api

    assert len(api.inspect(url).state.tensors) == 1


# --- shards ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def sharded_server(file_server):
    """A server with an index and two shards."""
    weight_map = {}
    for number in (1, 2):
        name = f"model-0000{number}-of-00002.safetensors"
        save_file({f"w{number}": torch.ones(3)}, file_server.folder / name)
        weight_map[f"w{number}"] = name
    (file_server.folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    return file_server


@pytest.mark.parametrize("behaviour", [Refuse(404), Refuse(403), HangUp(0), Refuse(500), login_page])
def test_unreadable_shard_keeps_its_rows(sharded_server, behaviour, statecli):
    """The tensors of readable shards are shown; the line on stderr names the unreadable shard and its fault."""
    sharded_server.behave("*-00002-of*", behaviour)
    result = statecli("inspect", sharded_server.url("model.safetensors.index.json"), "-f", "json")
    assert result.code == 2
    assert list(result.rows()) == ["w1", "w2"]
    assert result.err.count("\n") == 1
    assert "model-00002-of-00002.safetensors" in result.err


def test_index_in_an_unlisted_folder_is_read(sharded_server, statecli):
    """The folder's names are needed only to describe the other files of the folder."""
    state = inspect_url(sharded_server.url("model.safetensors.index.json"), statecli)
    assert list(state.rows()) == ["w1", "w2"]
    assert len(sharded_server.requests) <= 4


# --- the whole process ----------------------------------------------------------------------------------------------


def test_interrupt_does_not_wait_for_servers(sharded_server):
    """The command exits with status 130 and prints nothing, while every shard stalls."""
    stall = Stall(None)
    sharded_server.behave("*-of-*", stall)
    line = [sys.executable, "-m", "statecli", "inspect", sharded_server.url("model.safetensors.index.json")]
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while len(sharded_server._log) < 3 and process.poll() is None:
            threading.Event().wait(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (130, b"", b"")


def test_connection_limit_of_the_environment_is_kept(file_server, statecli, monkeypatch):
    """Of 40 shards, two are requested at a time."""
    weight_map, now, most = {}, [], []
    for number in range(1, 41):
        name = f"model-{number:05d}-of-00040.safetensors"
        save_file({f"w{number}": torch.ones(3)}, file_server.folder / name)
        weight_map[f"w{number}"] = name
    (file_server.folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )

    def count_requests(request, reply):
        now.append(request)
        most.append(len(now))
        reply.at.append((len(reply.body), lambda _: now.remove(request)))

    file_server.behave("*-of-*", count_requests, Delay(0.005))
    monkeypatch.setenv("STATECLI_CONNECTIONS", "2")
    inspect_url(file_server.url("model.safetensors.index.json"), statecli)
    assert max(most) == 2


# --- anything -------------------------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.integers(-3, 200).map(str), st.sampled_from(["9" * 5000, "²", "1e3", "", "*", "0x10", "+5"]))
HEADERS = {
    "Content-Range": st.one_of(
        st.text(max_size=20), st.tuples(NUMBERS, NUMBERS, NUMBERS).map(lambda three: "bytes {}-{}/{}".format(*three))
    ),
    "Content-Length": NUMBERS,
    "Content-Type": st.sampled_from(["text/html", "multipart/byteranges; boundary=x", "é", ""]),
    "Content-Encoding": st.sampled_from(["gzip", "identity", "br, gzip", "x" * 100]),
    "Transfer-Encoding": st.sampled_from(["chunked", "gzip, chunked", "nonsense"]),
    "Retry-After": NUMBERS,
    "ETag": st.text(max_size=5),
    "Location": st.one_of(st.text(max_size=20), st.sampled_from(["//", "http://[", "https://host:x/", "ftp://x", "?"])),
}


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    status=st.sampled_from([200, 200, 206, 206, 204, 301, 304, 401, 403, 416, 500, 600, 999]),
    heads=st.fixed_dictionaries({}, optional=HEADERS),
    body=st.binary(max_size=200),
)
def test_an_answer_of_random_bytes_is_one_line_of_error(status, heads, body, server, statecli, single_attempt):
    """There is never a traceback or a crash. No random body is a checkpoint."""
    printable = {name: re.sub(r"[^\x20-\x7e\xa0-\xff]", "", text) for name, text in heads.items()}

    def send_answer(request, reply):
        reply.become(Reply(status, {**printable, "Connection": "close"}, body))

    server.behave("*", send_answer, HangUp(200))
    result = statecli("inspect", server.url("net/any"))
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert "internal error" not in result.err
