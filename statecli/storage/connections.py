"""Connections to web servers and proxies, and messages for network errors."""

from __future__ import annotations

import os
import socket
import sys
from typing import TYPE_CHECKING, Any

from statecli import storage
from statecli.core.errors import MissingDependency, StateError, UnreadableError
from statecli.core.installed_package import install_extra
from statecli.storage import lifetime, redact
from statecli.storage.credentials import InvalidUrl
from statecli.storage.limits import RequestLimits, settings
from statecli.storage.masked_url import parse_url
from statecli.storage.retry import ConnectionCut, Transient

if TYPE_CHECKING:
    from ssl import SSLContext

    from urllib3 import BaseHTTPResponse, PoolManager

#: Maximum time in seconds for a server to accept a connection.
CONNECT_TIMEOUT_S = 10.0
#: Variables of other programs that name a file or a folder of CA certificates.
_BUNDLE_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY = "the proxy of HTTP_PROXY, HTTPS_PROXY or ALL_PROXY"
#: Advice for a proxy that requires a login.
ADD_TO_PROXY_URL = "add the user name and the password to the proxy URL in the environment: http://USER:PASSWORD@…"


def send(url: str, headers: dict[str, str]) -> BaseHTTPResponse:
    """Send a GET request and return the response of urllib3 after the headers were read.

    urllib3 neither retries nor follows a redirect: a retry would request the whole range again, and errors after a
    redirect contain the query of the URL.

    Raises UnreadableError, Transient, and MissingDependency without urllib3.
    """
    try:
        import urllib3
    except ImportError as missing:
        raise MissingDependency(f"URLs need the package urllib3: {install_extra('remote')}") from missing
    try:
        pools = lifetime.for_process(_Pools).open(*_find_proxy(url))
    except urllib3.exceptions.ProxySchemeUnknown:
        error: StateError | Transient = UnreadableError(f"{_PROXY} has an unsupported URL: write http://HOST:PORT")
    except ValueError:
        error = UnreadableError(f"{_PROXY} is not a URL: write http://HOST:PORT")
    else:
        try:
            return pools.urlopen(
                "GET", url, headers=headers, redirect=False, retries=False, preload_content=False, decode_content=False
            )
        except (urllib3.exceptions.HTTPError, ValueError) as why:
            error = translate_error(why)
    # Raised outside of the `except` block, so that the error has no cause: the cause would contain the URL.
    raise error


class _Pools:
    """Connection pools by scheme, proxy, process and settings. A forked process must not use its parent's connections.

    Connections outlive a command, so that certificates are loaded once.
    """

    def __init__(self) -> None:
        self._by_key: dict[tuple[str, str | None, int, RequestLimits], PoolManager] = {}

    def open(self, scheme: str, proxy: str | None) -> PoolManager:
        """Return the connection pool for a scheme. Raises ValueError for an invalid proxy URL."""
        key = scheme, proxy, os.getpid(), settings()
        if key not in self._by_key:
            redact.filter_logs()
            pools = _create_pool(scheme, proxy, settings())
            pools.pool_classes_by_scheme = storage.minimum_speed.POOLS
            self._by_key.setdefault(key, pools)
        return self._by_key[key]


def _create_pool(scheme: str, proxy: str | None, settings: RequestLimits) -> PoolManager:
    import urllib3

    options: dict[str, Any] = {
        "num_pools": 64,
        "maxsize": settings.connections,
        "timeout": urllib3.Timeout(connect=min(CONNECT_TIMEOUT_S, settings.timeout), read=settings.timeout),
        **({"ssl_context": _load_certificates()} if "https" in (scheme, (proxy or "").partition(":")[0]) else {}),
    }
    if proxy is None:
        return urllib3.PoolManager(**options)
    link = parse_url(proxy)
    from urllib.parse import unquote

    headers = {} if link.user is None else urllib3.make_headers(proxy_basic_auth=unquote(link.user))
    for value in headers.values():
        redact.hide(value.rpartition(" ")[2], unquote(link.user or "").rpartition(":")[2])
    manager = urllib3.ProxyManager(link.scheme + link.path, proxy_headers=headers, **options)
    if manager.proxy is None or not manager.proxy.host:
        raise ValueError
    return manager


def _find_proxy(url: str) -> tuple[str, str | None]:
    """Return the scheme of the URL, and the proxy that the environment or the system sets for it (else None)."""
    scheme, _, address = url.partition("://")
    has_system_settings = sys.platform in ("darwin", "win32")
    if not has_system_settings and not any(name.lower().endswith("_proxy") for name in os.environ):
        return scheme, None
    from urllib.request import getproxies, proxy_bypass

    proxies = getproxies()
    proxy = proxies.get(scheme) or proxies.get("all")
    if not proxy or proxy_bypass(address.partition("/")[0]):
        return scheme, None
    return scheme, proxy if "://" in proxy else f"http://{proxy}"


def _load_certificates() -> SSLContext:
    import ssl

    certificate_file = os.environ.get("SSL_CERT_FILE")
    bundle = certificate_file or next((os.environ[name] for name in _BUNDLE_VARIABLES if os.environ.get(name)), None)
    try:
        if bundle is not None and os.path.isdir(bundle):
            return ssl.create_default_context(capath=bundle)
        return ssl.create_default_context(cafile=bundle)
    except OSError as why:
        raise UnreadableError(
            f"the certificates in {bundle} cannot be read: {(why.strerror or 'unknown error').lower()}"
        ) from why


def translate_error(why: Exception) -> StateError | Transient:
    """Convert an error of urllib3 to an error of statecli."""
    from urllib3 import exceptions

    if isinstance(why, exceptions.ProxyError):
        return _explain_proxy_error(str(why.original_error))
    if isinstance(why, (exceptions.LocationValueError, ValueError)):
        return InvalidUrl()
    if isinstance(why, exceptions.NameResolutionError):
        return _explain_name_error(why.__cause__)
    if isinstance(why, exceptions.NewConnectionError):
        cause = why.__cause__
        reason = os.strerror(cause.errno).lower() if isinstance(cause, OSError) and cause.errno else "no connection"
        return Transient(f"the server cannot be reached: {reason}")
    if isinstance(why, exceptions.ConnectTimeoutError):
        return Transient(
            f"the server does not answer: no connection in {min(CONNECT_TIMEOUT_S, settings().timeout):g} s"
        )
    if isinstance(why, exceptions.ReadTimeoutError):
        problem = str(why.__cause__) if isinstance(why.__cause__, storage.minimum_speed.Stalled) else "no data arrived"
        limit = f"in {settings().timeout:g} s (STATECLI_TIMEOUT sets this limit)"
        return Transient(f"the server stalls: {problem} {limit}")
    if isinstance(why, exceptions.SSLError):
        return _explain_tls_error(why.args[0] if why.args else None)
    if isinstance(why, exceptions.ProtocolError) and _is_garbage(why.args[-1]):
        return UnreadableError("the server sent an answer that is not valid HTTP")
    return ConnectionCut("the connection was cut")


def _is_garbage(cause: object) -> bool:
    from http.client import HTTPException, IncompleteRead, RemoteDisconnected

    return isinstance(cause, HTTPException) and not isinstance(cause, (IncompleteRead, RemoteDisconnected))


def _explain_proxy_error(text: str) -> UnreadableError | Transient:
    if "407" in text:
        return UnreadableError(f"the proxy asks for a user name and a password (HTTP 407): {ADD_TO_PROXY_URL}")
    if "Tunnel connection failed" in text:
        return UnreadableError(f"the proxy refuses to connect to the server ({text.partition(': ')[2][:40]})")
    return Transient(f"{_PROXY} cannot be reached")


def _explain_name_error(cause: BaseException | None) -> UnreadableError | Transient:
    if isinstance(cause, socket.gaierror) and cause.errno == socket.EAI_AGAIN:
        return Transient("the host name cannot be resolved; check the network connection")
    return UnreadableError("unknown host: check the name in the URL and the network connection")


def _explain_tls_error(cause: object) -> UnreadableError:
    import ssl

    if isinstance(cause, ssl.SSLCertVerificationError):
        trust = "to trust other certificates, set SSL_CERT_FILE to the file that contains them"
        return UnreadableError(f"the server's certificate cannot be verified: {cause.verify_message}; {trust}")
    reason = getattr(cause, "reason", None)
    may_be_plain = reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE")
    advice = "; if the server does not use TLS, write http://" if may_be_plain else ""
    problem = str(reason or "unknown error").replace("_", " ").lower()
    return UnreadableError(f"the TLS connection failed: {problem}{advice}")
