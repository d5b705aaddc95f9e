"""A forward proxy on loopback for http:// and (with CONNECT) https://, with an optional password."""

from __future__ import annotations

import base64
import contextlib
import select
import socket
import threading
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Proxy:
    """Forwards every request from `with` to its end; `requests` lists the method and target of each request."""

    def __init__(self, user: str | None = None) -> None:
        self.user, self.requests = user, []
        handler = type("_Bound", (_Handler,), {"owner": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> Proxy:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._thread.join()
        self._http.server_close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Proxy

    def _refused(self) -> bool:
        self.owner.requests.append(f"{self.command} {self.path}")
        right = self.owner.user and "Basic " + base64.b64encode(self.owner.user.encode()).decode()
        if not right or self.headers.get("Proxy-Authorization") == right:
            return False
        self.send_response(407)
        self.send_header("Proxy-Authenticate", 'Basic realm="out"')
        self.send_header("Content-Length", "0")
        self.end_headers()
        return True

    def do_GET(self) -> None:
        if self._refused():
            return
        headers = {name: value for name, value in self.headers.items() if not name.lower().startswith("proxy-")}
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with opener.open(urllib.request.Request(self.path, headers=headers)) as answer:  # noqa: S310
            data = answer.read()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

    def do_CONNECT(self) -> None:
        if self._refused():
            return
        host, _, port = self.path.rpartition(":")
        with socket.create_connection((host, int(port))) as remote, contextlib.suppress(ConnectionError):
            self.send_response(200)
            self.end_headers()
            ends = {self.connection: remote, remote: self.connection}
            while True:
                for source in select.select(list(ends), [], [])[0]:
                    data = source.recv(65536)
                    if not data:
                        self.close_connection = True
                        return
                    ends[source].sendall(data)

    def log_message(self, *_: object) -> None:
        """Write nothing to stderr."""
