"""A real HTTP/1.1 server on loopback that serves a folder, well or badly, and counts requests.

    with Server(folder) as server:
        server.behave("m.safetensors", Times(2, HangUp(after=100)))
        fetch(server.url("m.safetensors"))
        assert [r.status for r in server.requests] == [206, 206, 206]

Connections stay open between requests. Behaviours are functions of a request and the reply of an honest server; they
change the reply. Behaviours of the same path apply in the order in which they were given.
"""

from __future__ import annotations

import base64
import gzip
import html
import itertools
import mmap
import re
import socket
import ssl
import struct
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from email.utils import formatdate
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlsplit

BLOCK = 64 << 10  # bytes per write, and the socket's buffer: sent bytes are nearly received bytes
BEFORE_HEADERS = -1
SETTLED_S = 10


@dataclass
class Request:
    """A client's request, the status of its answer, and the number of body bytes that the client's socket took."""

    method: str
    path: str  # without the leading slash and the query
    query: dict[str, str]
    headers: dict[str, str]  # names in lower case
    body: bytes = b""
    status: int = 0
    sent: int = 0

    @property
    def range(self) -> str | None:
        return self.headers.get("range")


@dataclass
class Reply:
    """The answer before sending; `body` is a range of `whole`."""

    status: int
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes | memoryview = b""
    whole: bytes | memoryview | None = None
    chunked: bool = False
    at: list[tuple[int, Callable[[Server], None]]] = field(default_factory=list)  # byte of the body → action

    def become(self, other: Reply) -> None:
        self.status, self.headers, self.body, self.whole = other.status, other.headers, other.body, other.whole


Behaviour = Callable[[Request, Reply], None]


class _HungUp(Exception):
    """The server closed the connection in the middle of an answer."""


def page(status: int, text: str, **headers: str) -> Reply:
    """Return an HTML page; underscores in the names of headers stand for hyphens."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Reply(status, {"Content-Type": "text/html; charset=utf-8", **named}, text.encode())


# --- behaviours


def ignore_range(request: Request, reply: Reply) -> None:
    """Answer every request for a range with the whole file and 200."""
    if reply.whole is not None:
        reply.status, reply.body = 200, reply.whole
        reply.headers.pop("Content-Range", None)
        reply.headers.pop("Accept-Ranges", None)


def reply_chunked(request: Request, reply: Reply) -> None:
    """Answer with Transfer-Encoding: chunked, and so without Content-Length."""
    reply.chunked = True


def login_page(request: Request, reply: Reply) -> None:
    """Answer 200 and a form, as a proxy does to unknown users. Behind a redirect, behave("login", login_page)."""
    reply.become(page(200, "<!DOCTYPE html><title>Sign in</title><form method=post><input name=password></form>"))


@dataclass
class Redirect:
    """Redirect to another path of this server, to the request's own path (a circle), or to a URL."""

    to: str
    status: int = 302

    def __call__(self, request: Request, reply: Reply) -> None:
        reply.become(Reply(self.status, {"Location": self.to if "://" in self.to else f"/{self.to}"}))


@dataclass
class Stall:
    """Send nothing after so many bytes of the body (None: before the headers), until the server closes."""

    after: int | None = 0

    def __call__(self, request: Request, reply: Reply) -> None:
        reply.at.append((BEFORE_HEADERS if self.after is None else self.after, self._wait))

    def _wait(self, server: Server) -> None:
        with server.waiting():
            while not server.closing:
                time.sleep(0.02)
        raise _HungUp


@dataclass
class HangUp:
    """End the connection after so many bytes of the body (None: before the headers)."""

    after: int | None = 0

    def __call__(self, request: Request, reply: Reply) -> None:
        reply.at.append((BEFORE_HEADERS if self.after is None else self.after, self._hang_up))

    def _hang_up(self, server: Server) -> None:
        raise _HungUp


@dataclass
class OtherRange:
    """Send bytes after the requested range; Content-Range names the sent or (`honest=False`) the requested range."""

    shift: int
    honest: bool = True

    def __call__(self, request: Request, reply: Reply) -> None:
        match = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", reply.headers.get("Content-Range", ""))
        if match and reply.whole is not None:
            start, last, total = (int(number) for number in match.groups())
            start, last = min(start + self.shift, total - 1), min(last + self.shift, total - 1)
            reply.body = reply.whole[start : last + 1]
            if self.honest:
                reply.headers["Content-Range"] = f"bytes {start}-{last}/{total}"


@dataclass
class WrongTotal:
    """Send Content-Range with another size of the file, which may be "*" or text."""

    total: int | str

    def __call__(self, request: Request, reply: Reply) -> None:
        if "Content-Range" in reply.headers:
            reply.headers["Content-Range"] = f"{reply.headers['Content-Range'].rpartition('/')[0]}/{self.total}"


@dataclass
class Refuse:
    """Answer with an error page: Refuse(404); Refuse(503, Retry_After="1"); Refuse(401, WWW_Authenticate='Basic
    realm="x"').
    """

    def __init__(self, status: int, text: str = "<h1>refused</h1>", **headers: str) -> None:
        self.status, self.text, self.headers = status, text, headers

    def __call__(self, request: Request, reply: Reply) -> None:
        reply.become(page(self.status, self.text, **self.headers))


@dataclass
class Basic:
    """Answer 401 to requests without this name and password."""

    user: str
    password: str

    def __call__(self, request: Request, reply: Reply) -> None:
        right = "Basic " + base64.b64encode(f"{self.user}:{self.password}".encode()).decode()
        if request.headers.get("authorization") != right:
            Refuse(401, WWW_Authenticate='Basic realm="models"')(request, reply)


@dataclass
class Signed:
    """Answer 403 to a URL without this parameter in its query; the page repeats the given value, as S3's page does."""

    name: str
    value: str

    def __call__(self, request: Request, reply: Reply) -> None:
        value = request.query.get(self.name)
        if value != self.value:
            Refuse(403, f"<Code>SignatureDoesNotMatch</Code><SignatureProvided>{value}</SignatureProvided>")(
                request, reply
            )


def compress(request: Request, reply: Reply) -> None:
    """Compress the body for all clients, even for clients that do not accept gzip."""
    if reply.body:
        reply.headers["Content-Encoding"] = "gzip"
        reply.body = gzip.compress(bytes(reply.body))


@dataclass
class Headers:
    """Replace honest headers; None removes a header. Headers(ETag='"other"') describes a changed file."""

    def __init__(self, **headers: str | None) -> None:
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    def __call__(self, request: Request, reply: Reply) -> None:
        for name, value in self.headers.items():
            reply.headers.pop(name, None)
            if value is not None:
                reply.headers[name] = value


@dataclass
class Delay:
    """Wait so many seconds before the first byte, as a round trip does."""

    seconds: float

    def __call__(self, request: Request, reply: Reply) -> None:
        reply.at.append((BEFORE_HEADERS, lambda _: time.sleep(self.seconds)))


class Times:
    """Apply a behaviour to the first n requests only."""

    def __init__(self, n: int, behaviour: Behaviour) -> None:
        self.n, self.behaviour, self._count = n, behaviour, itertools.count()

    def _applies(self, number: int) -> bool:
        return number < self.n

    def __call__(self, request: Request, reply: Reply) -> None:
        if self._applies(next(self._count)):
            self.behaviour(request, reply)


class After(Times):
    """Apply a behaviour from the n-th request on, counted from 0: After(1, Headers(ETag='"other"'))."""

    def _applies(self, number: int) -> bool:
        return number >= self.n


# --- the server


class Server:
    """Serves a folder on a free port of 127.0.0.1 from `with` to its end.

    `listing` is the page format of a folder: "python" (-m http.server), "nginx", "apache", "caddy", or None (403).
    `tls` contains the server's certificate; an old `protocol` is "HTTP/1.0".
    """

    def __init__(
        self,
        folder: Path,
        listing: str | None = None,
        *,
        tls: ssl.SSLContext | None = None,
        protocol: str = "HTTP/1.1",
    ) -> None:
        self.tls, self.protocol = tls, protocol
        self.folder, self.listing = Path(folder), listing
        self.closing = False
        self._behaviours: list[tuple[str, tuple[Behaviour, ...]]] = []
        self._log: list[Request] = []
        self._errors: list[BaseException] = []
        self._changed = threading.Condition()
        self._busy = 0
        self._http = _Listener(self)
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Server:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
        assert not self._errors, f"the server of the test is broken: {self._errors}"

    def close(self) -> None:
        """Stop the server and reset its connections."""
        self.closing = True
        if self._thread.is_alive():
            self._http.shutdown()
            self._thread.join()
            self._http.server_close()
        self._http.close_connections()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._http.server_port}"

    def url(self, path: str = "") -> str:
        return f"http{'s' if self.tls else ''}://{self.address}/{quote(path)}"

    def behave(self, path: str, *behaviours: Behaviour) -> None:
        """Set the behaviours for a path, or for all paths that match a glob ("*": the whole server), from now on."""
        self._behaviours = [behaviour for behaviour in self._behaviours if behaviour[0] != path] + [(path, behaviours)]

    @property
    def requests(self) -> list[Request]:
        """All requests so far, in the order of their arrival, after waiting for unfinished answers (except stalled
        answers).
        """
        with self._changed:
            assert self._changed.wait_for(lambda: not self._busy, SETTLED_S), "a client neither reads nor hangs up"
            return list(self._log)

    @property
    def sent(self) -> int:
        """Number of body bytes that clients' connections took, all requests together."""
        return sum(request.sent for request in self.requests)

    def forget(self) -> None:
        """Clear the log of requests."""
        assert self.requests is not None
        self._log.clear()

    @contextmanager
    def waiting(self):
        """Do not count this thread's answer as unfinished, so that `requests` does not wait for the answer."""
        self._count(-1)
        try:
            yield
        finally:
            self._count(+1)

    def answer(self, request: Request) -> Reply:
        """Return the honest reply; servers of more than a folder override this method."""
        path = (self.folder / request.path).resolve()
        if not path.is_relative_to(self.folder.resolve()) or not path.exists():
            return page(404, "<h1>Not Found</h1>")
        if path.is_dir():
            return self._folder(request, path)
        return file_reply(request, path)

    def serve(self, handler: _Handler) -> None:
        """Answer a request and log the request."""
        request = _request(handler)
        with self._changed:
            self._log.append(request)
            self._busy += 1
        try:
            reply = self.answer(request)
            for pattern, behaviours in self._behaviours:
                if fnmatchcase(request.path, pattern):
                    for behaviour in behaviours:
                        behaviour(request, reply)
            self._send(handler, request, reply)
        except (_HungUp, ConnectionError):
            handler.close_connection = True
        finally:
            self._count(-1)

    def failed(self, error: BaseException | None) -> None:
        """Record a thread's error, unless a client hung up between two requests."""
        harmless = (ConnectionError, ssl.SSLError, ValueError) if self.closing else (ConnectionError, ssl.SSLError)
        if error is not None and not isinstance(error, harmless):
            self._errors.append(error)

    def _count(self, by: int) -> None:
        with self._changed:
            self._busy += by
            self._changed.notify_all()

    def _folder(self, request: Request, path: Path) -> Reply:
        if request.path and not request.path.endswith("/"):
            return Reply(301, {"Location": f"/{quote(request.path)}/"})
        if self.listing is None:
            return page(403, "<h1>Forbidden</h1>")
        return page(200, LISTINGS[self.listing](f"/{request.path}", sorted(path.iterdir())))

    def _send(self, handler: _Handler, request: Request, reply: Reply) -> None:
        happens = sorted(reply.at, key=lambda event: event[0])
        for offset, act in happens:
            if offset == BEFORE_HEADERS:
                act(self)
        request.status = reply.status
        _send_headers(handler, reply)
        position = 0
        if request.method != "HEAD":
            for offset, act in happens:
                if offset != BEFORE_HEADERS:
                    self._write(handler, request, reply, position, min(offset, len(reply.body)))
                    position = min(offset, len(reply.body))
                    act(self)
            self._write(handler, request, reply, position, len(reply.body))
            if reply.chunked:
                handler.wfile.write(b"0\r\n\r\n")

    def _write(self, handler: _Handler, request: Request, reply: Reply, start: int, stop: int) -> None:
        for at in range(start, stop, BLOCK):
            block = reply.body[at : min(at + BLOCK, stop)]
            if reply.chunked:
                handler.wfile.write(b"%x\r\n" % len(block) + bytes(block) + b"\r\n")
            else:
                handler.wfile.write(block)
            request.sent += len(block)


def file_reply(request: Request, path: Path) -> Reply:
    """Return the file, or its requested range as RFC 9110 defines ranges (several ranges: the whole file)."""
    status = path.stat()
    content = _map_file(path)
    headers = {
        "Content-Type": "application/octet-stream",
        "Accept-Ranges": "bytes",
        "ETag": f'"{status.st_mtime_ns:x}-{status.st_size:x}"',
        "Last-Modified": formatdate(status.st_mtime, usegmt=True),
    }
    return range_reply(request, content, headers)


def range_reply(request: Request, content: bytes | memoryview, headers: dict[str, str]) -> Reply:
    """Return all bytes and 200, a range and 206, or 416 beyond the end; If-Match and If-Range are heeded."""
    etag, size = headers.get("ETag"), len(content)
    if request.headers.get("if-match", etag) not in (etag, "*"):
        return page(412, "<h1>Precondition Failed</h1>")
    match = re.fullmatch(r"bytes=(\d*)-(\d*)", request.range or "")
    if not match or match[0] == "bytes=-" or request.headers.get("if-range", etag) != etag:
        return Reply(200, headers, content, content)
    start = int(match[1]) if match[1] else max(size - int(match[2]), 0)
    last = min(int(match[2]), size - 1) if match[1] and match[2] else size - 1
    if start >= size:
        return Reply(416, {"Content-Range": f"bytes */{size}"})
    if last < start:
        return Reply(200, headers, content, content)
    return Reply(206, {**headers, "Content-Range": f"bytes {start}-{last}/{size}"}, content[start : last + 1], content)


def _map_file(path: Path) -> bytes | memoryview:
    with path.open("rb") as file:
        empty = path.stat().st_size == 0
        return b"" if empty else memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _request(handler: _Handler) -> Request:
    parts = urlsplit(handler.path)
    headers = {name.lower(): value for name, value in handler.headers.items()}
    body = handler.rfile.read(int(headers.get("content-length", 0)))
    return Request(handler.command, unquote(parts.path).lstrip("/"), dict(parse_qsl(parts.query)), headers, body)


def _send_headers(handler: _Handler, reply: Reply) -> None:
    handler.send_response(reply.status)
    for name, value in reply.headers.items():
        handler.send_header(name, value)
    if reply.chunked:
        handler.send_header("Transfer-Encoding", "chunked")
    elif "Content-Length" not in reply.headers:
        handler.send_header("Content-Length", str(len(reply.body)))
    handler.end_headers()


def _python_listing(title: str, entries: list[Path]) -> str:
    rows = "".join(
        f'<li><a href="{quote(name)}">{html.escape(name, quote=False)}</a></li>\n'
        for name in (entry.name + "/" * entry.is_dir() for entry in entries)
    )
    heading = f"Directory listing for {html.escape(title, quote=False)}"
    head = f'<!DOCTYPE HTML>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{heading}</title>\n</head>\n'
    return f"{head}<body>\n<h1>{heading}</h1>\n<hr>\n<ul>\n{rows}</ul>\n<hr>\n</body>\n</html>\n"


def _nginx_listing(title: str, entries: list[Path]) -> str:
    rows = "".join(_nginx_row(entry) for entry in sorted(entries, key=lambda entry: (entry.is_file(), entry.name)))
    heading = f"Index of {html.escape(title)}"
    head = f"<html>\r\n<head><title>{heading}</title></head>\r\n<body>\r\n<h1>{heading}</h1><hr>"
    return f'{head}<pre><a href="../">../</a>\r\n{rows}</pre><hr></body>\r\n</html>\r\n'


def _nginx_row(entry: Path) -> str:
    """Names longer than 50 characters are cut in the visible text, and whole in the link."""
    name = entry.name + "/" * entry.is_dir()
    visible_name = name if len(name) <= 50 else name[:47] + "..>"
    size = "-" if entry.is_dir() else str(entry.stat().st_size)
    date = time.strftime("%d-%b-%Y %H:%M", time.gmtime(entry.stat().st_mtime))
    return (
        f'<a href="{quote(name)}">{html.escape(visible_name)}</a>{" " * (51 - len(visible_name))}{date}{size:>20}\r\n'
    )


def _apache_listing(title: str, entries: list[Path]) -> str:
    """mod_autoindex with fancy tables: links that sort, the parent's absolute link, names with a leading dot hidden."""
    rows = "".join(
        f'<tr><td valign="top"><img src="/icons/unknown.gif" alt="[   ]"></td><td><a href="{quote(name)}">'
        f'{html.escape(name)}</a></td><td align="right">2026-01-01 00:00  </td></tr>\n'
        for name in (entry.name + "/" * entry.is_dir() for entry in entries if not entry.name.startswith("."))
    )
    sort = '<tr><th><a href="?C=N;O=D">Name</a></th><th><a href="?C=S;O=A">Size</a></th></tr>'
    parent = f'<tr><td><a href="{quote(title.rstrip("/").rpartition("/")[0])}/">Parent Directory</a></td></tr>'
    head = f"<html>\n <head>\n  <title>Index of {html.escape(title)}</title>\n </head>\n <body>"
    return f"{head}\n<h1>Index of {html.escape(title)}</h1>\n<table>{sort}\n{parent}\n{rows}</table>\n</body></html>\n"


def _caddy_listing(title: str, entries: list[Path]) -> str:
    """Caddy's file_server browse: links begin with `./`, breadcrumb links lead up, and the page links to other hosts
    too.
    """
    rows = "".join(
        f'<tr class="file"><td><a href="./{quote(name)}"><span class="name">{html.escape(name)}</span></a></td></tr>\n'
        for name in (entry.name + "/" * entry.is_dir() for entry in entries)
    )
    crumbs = '<h1><a href="/">/</a><a href="../">up</a></h1><input type="search" id="filter">'
    foot = (
        '<footer>Served with <a rel="noopener" href="https://caddyserver.example/model.safetensors">Caddy</a></footer>'
    )
    head = f"<!DOCTYPE html><html><head><title>{title}</title></head>"
    return f"{head}<body>{crumbs}<table>{rows}</table>{foot}</body></html>"


LISTINGS = {"python": _python_listing, "nginx": _nginx_listing, "apache": _apache_listing, "caddy": _caddy_listing}


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self.server.owner.serve(self)

    do_HEAD = do_POST = do_GET

    def log_message(self, *_: object) -> None:
        """The log is for tests to read, not for stderr."""


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256  # a client may open as many connections at once

    def __init__(self, owner: Server) -> None:
        self.owner, self._open = owner, set()
        super().__init__(("127.0.0.1", 0), type("_Handler", (_Handler,), {"protocol_version": owner.protocol}))

    def process_request(self, connection: socket.socket, address: object) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BLOCK)
        if self.owner.tls is not None:
            connection = self.owner.tls.wrap_socket(connection, server_side=True, do_handshake_on_connect=False)
        self._open.add(connection)
        super().process_request(connection, address)

    def shutdown_request(self, connection: socket.socket) -> None:
        self._open.discard(connection)
        super().shutdown_request(connection)

    def close_connections(self) -> None:
        """Reset the connections that clients keep open, because the server stops."""
        for connection in list(self._open):
            try:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass  # already closed

    def handle_error(self, connection: object, address: object) -> None:
        self.owner.failed(sys.exc_info()[1])
