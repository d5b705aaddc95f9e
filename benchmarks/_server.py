"""A folder behind ranges of http in a process of its own, as quick as asyncio can; it counts what it is asked for.

    with Served(folder, delay=0.03) as served:
        run(statecli("inspect", served.url("model.safetensors")))
        served.counts()     # since the last time

The first byte of each answer leaves `delay` seconds after its request has come.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
import sys
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import unquote

_ASKED = re.compile(rb"GET /(\S*) HTTP/1\.1\r\n")
_RANGE = re.compile(rb"\r\nrange: bytes=(\d+)-(\d*)\r\n", re.IGNORECASE)
#: Bytes that are handed to a connection at once.
BLOCK = 1 << 20
COUNTS = "_counts"


@dataclass(frozen=True)
class Counts:
    """Requests, bytes of bodies, the most requests that waited at one time, seconds of CPU that it took to answer."""

    requests: int
    sent: int
    most: int
    cpu: float


class Served:
    """A server from `with` to its end."""

    def __init__(self, folder: Path, delay: float) -> None:
        command = [sys.executable, __file__, str(folder), str(delay)]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())

    def __enter__(self) -> Served:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._process.kill()
        self._process.communicate()

    def url(self, path: str = "") -> str:
        """Where a file of the folder is."""
        return f"http://127.0.0.1:{self._port}/{path}"

    def counts(self) -> Counts:
        """Since the last time, or the start."""
        with urllib.request.urlopen(self.url(COUNTS)) as answer:  # noqa: S310 - our own
            return Counts(**json.load(answer))


class _Serving:
    """What all connections share."""

    def __init__(self, folder: str, delay: float) -> None:
        self.folder, self.delay = folder, delay
        self.files: dict[str, tuple[int, int]] = {}
        self.requests = self.sent = self.waiting = self.most = 0
        self._cpu = 0.0

    def counts(self) -> bytes:
        """The counts as JSON; they begin again."""
        cpu, used = self._cpu, sum(os.times()[:2])
        found = {"requests": self.requests, "sent": self.sent, "most": self.most, "cpu": used - cpu}
        self.requests = self.sent = self.most = 0
        self._cpu = used
        return json.dumps(found).encode()

    def opened(self, name: str) -> tuple[int, int] | None:
        """The descriptor and the size of a file of the folder."""
        if name not in self.files:
            path = os.path.join(self.folder, name)
            if not os.path.isfile(path):
                return None
            fd = os.open(path, os.O_RDONLY)
            self.files[name] = fd, os.fstat(fd).st_size
        return self.files[name]


class _Connection(asyncio.Protocol):
    """One request after another."""

    def __init__(self, serving: _Serving) -> None:
        self.serving = serving
        self.asked = b""
        self.going = asyncio.Event()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        transport.set_write_buffer_limits(high=2 * BLOCK)
        self.going.set()

    def pause_writing(self) -> None:
        self.going.clear()

    def resume_writing(self) -> None:
        self.going.set()

    def data_received(self, data: bytes) -> None:
        self.asked += data
        if self.asked.endswith(b"\r\n\r\n"):
            request, self.asked = self.asked, b""
            self._came(request)

    def _came(self, request: bytes) -> None:
        found, serving = _ASKED.match(request), self.serving
        name = unquote(found[1].decode()) if found else ""
        if name == COUNTS:
            body = serving.counts()
            self.transport.write(_head("200 OK", len(body)) + body)
            return
        serving.requests += 1
        serving.waiting += 1
        serving.most = max(serving.most, serving.waiting)
        asyncio.get_running_loop().call_later(serving.delay, self._answer, name, _RANGE.search(request))

    def _answer(self, name: str, asked: re.Match[bytes] | None) -> None:
        serving = self.serving
        serving.waiting -= 1
        if not name or name.endswith("/"):
            self._page(os.path.join(serving.folder, name))
            return
        file = serving.opened(name)
        if file is None:
            self.transport.write(_head("404 Not Found", 0))
            return
        fd, size = file
        start = int(asked[1]) if asked else 0
        stop = min(int(asked[2]) + 1, size) if asked and asked[2] else size
        which = f"Content-Range: bytes {start}-{stop - 1}/{size}\r\n" if asked else ""
        head = _head("206 Partial Content" if asked else "200 OK", stop - start, f'ETag: "{size:x}"\r\n{which}')
        serving.sent += stop - start
        if stop - start <= BLOCK:
            self.transport.write(head + os.pread(fd, stop - start, start))
            return
        self.transport.write(head)
        self.task = asyncio.ensure_future(self._stream(fd, start, stop))

    def _page(self, folder: str) -> None:
        links = "".join(f'<li><a href="{name}">{name}</a></li>\n' for name in sorted(os.listdir(folder)))
        body = f"<html><title>Directory listing for /</title><ul>\n{links}</ul></html>".encode()
        self.transport.write(_head("200 OK", len(body), "Content-Type: text/html; charset=utf-8\r\n") + body)

    async def _stream(self, fd: int, start: int, stop: int) -> None:
        for at in range(start, stop, BLOCK):
            await self.going.wait()
            self.transport.write(os.pread(fd, min(BLOCK, stop - at), at))
            await asyncio.sleep(0)


def _head(status: str, length: int, more: str = "") -> bytes:
    return f"HTTP/1.1 {status}\r\nContent-Length: {length}\r\nAccept-Ranges: bytes\r\n{more}\r\n".encode()


async def _serve(folder: str, delay: float) -> None:
    serving = _Serving(folder, delay)
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: _Connection(serving), "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1], float(sys.argv[2])))
