"""Connections to servers, through whatever proxy there is, and what goes wrong on the way, in words."""

from __future__ import annotations

import os
import socket
import sys
from functools import cache
from typing import Any

from statecli.core.errors import MissingDependency, StateError, UnreadableError
from statecli.storage import redact
from statecli.storage.credentials import NO_URL
from statecli.storage.limits import Settings, settings
from statecli.storage.retry import Transient
from statecli.storage.url import parts

#: Seconds that a server may take to take up a connection, at most.
CONNECT = 10.0
#: Files or folders of certificates, as other programs are told of them.
_BUNDLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_PROXY = "the proxy of the environment"
_LOG_IN = "write them into its URL in the environment: http://USER:PASSWORD@…"


def ask(url: str, headers: dict[str, str]) -> Any:
    """The answer to GET, of which nothing but the head is read: a response of urllib3. Redirects are answers too.

    Raises UnreadableError, Transient, and MissingDependency without urllib3.
    """
    try:
        import urllib3
    except ImportError as missing:
        raise MissingDependency("URLs need the package urllib3: pip install 'statecli[remote]'") from missing
    try:
        pools = _pool(*_way(url), os.getpid(), settings())
    except urllib3.exceptions.ProxySchemeUnknown:
        error: StateError | Transient = UnreadableError(
            f"{_PROXY} is none that can be used: only http:// and https:// are"
        )
    except ValueError:
        error = UnreadableError(f"{_PROXY} is no URL (HTTP_PROXY, HTTPS_PROXY, ALL_PROXY): write http://HOST:PORT")
    else:
        try:
            return pools.urlopen(
                "GET", url, headers=headers, redirect=False, retries=False, preload_content=False, decode_content=False
            )
        except (urllib3.exceptions.HTTPError, ValueError) as why:
            error = failed(why)
    # Outside, so that the error has no other behind it, which would hold the URL.
    raise error


@cache
def _pool(scheme: str, proxy: str | None, process: int, how: Settings) -> Any:
    """The connections of this process, which a forked one must not use; certificates are loaded once.

    Raises ValueError for a proxy that is none.
    """
    del process
    import urllib3

    options: dict[str, Any] = {
        "num_pools": 64,
        "maxsize": how.connections,
        "timeout": urllib3.Timeout(connect=min(CONNECT, how.timeout), read=how.timeout),
        **({"ssl_context": _trusted()} if "https" in (scheme, (proxy or "").partition(":")[0]) else {}),
    }
    if proxy is None:
        return _paced(urllib3.PoolManager(**options))
    link = parts(proxy)
    from urllib.parse import unquote

    known = {} if link.user is None else urllib3.make_headers(proxy_basic_auth=unquote(link.user))
    for value in known.values():
        redact.remember(value.rpartition(" ")[2], unquote(link.user or "").rpartition(":")[2])
    found = urllib3.ProxyManager(link.scheme + link.way, proxy_headers=known, **options)
    if found.proxy is None or not found.proxy.host:
        raise ValueError
    return _paced(found)


def _paced(pools: Any) -> Any:
    from statecli.storage.minimum_speed import POOLS

    redact.quiet()
    pools.pool_classes_by_scheme = POOLS
    return pools


def _way(url: str) -> tuple[str, str | None]:
    """The scheme, and the proxy that the environment, or the system, has for the URL."""
    scheme, _, rest = url.partition("://")
    everywhere = sys.platform not in ("darwin", "win32")
    if everywhere and not any(name.lower().endswith("_proxy") for name in os.environ):
        return scheme, None
    from urllib.request import getproxies, proxy_bypass

    found = getproxies()
    proxy = found.get(scheme) or found.get("all")
    if not proxy or proxy_bypass(rest.partition("/")[0]):
        return scheme, None
    return scheme, proxy if "://" in proxy else f"http://{proxy}"


def _trusted() -> Any:
    import ssl

    own = os.environ.get("SSL_CERT_FILE")
    bundle = own or next((os.environ[name] for name in _BUNDLES if os.environ.get(name)), None)
    try:
        if bundle is not None and os.path.isdir(bundle):
            return ssl.create_default_context(capath=bundle)
        return ssl.create_default_context(cafile=bundle)
    except OSError as why:
        raise UnreadableError(
            f"the certificates in {bundle} cannot be read: {(why.strerror or 'none').lower()}"
        ) from why


def failed(why: Exception) -> StateError | Transient:
    """The error of ours for one of urllib3."""
    from urllib3 import exceptions

    if isinstance(why, exceptions.ProxyError):
        return _of_proxy(str(why.original_error))
    if isinstance(why, (exceptions.LocationValueError, ValueError)):
        return UnreadableError(NO_URL)
    if isinstance(why, exceptions.NameResolutionError):
        return _of_name(why.__cause__)
    if isinstance(why, exceptions.NewConnectionError):
        inner = why.__cause__
        said = os.strerror(inner.errno).lower() if isinstance(inner, OSError) and inner.errno else "no connection"
        return Transient(f"the server cannot be reached: {said}")
    if isinstance(why, exceptions.ConnectTimeoutError):
        return Transient(f"the server does not answer: no connection in {min(CONNECT, settings().timeout):g} s")
    if isinstance(why, exceptions.ReadTimeoutError):
        return Transient(
            f"the server stalls: {_too_slow(why.__cause__)} in {settings().timeout:g} s (STATECLI_TIMEOUT)"
        )
    if isinstance(why, exceptions.SSLError):
        return _of_tls(why.args[0] if why.args else None)
    if isinstance(why, exceptions.ProtocolError) and _is_garbage(why.args[-1]):
        return UnreadableError("the server does not speak HTTP, or not so that it can be understood")
    return Transient("the connection was cut")


def _too_slow(why: BaseException | None) -> str:
    from statecli.storage.minimum_speed import Stalled

    return str(why) if isinstance(why, Stalled) else "nothing came"


def _is_garbage(inner: object) -> bool:
    from http.client import HTTPException, IncompleteRead, RemoteDisconnected

    return isinstance(inner, HTTPException) and not isinstance(inner, (IncompleteRead, RemoteDisconnected))


def _of_proxy(said: str) -> UnreadableError | Transient:
    if "407" in said:
        return UnreadableError(f"the proxy asks for a user and a password (HTTP 407): {_LOG_IN}")
    if "Tunnel connection failed" in said:
        return UnreadableError(f"the proxy refuses to connect to the server ({said.partition(': ')[2][:40]})")
    return Transient(f"{_PROXY} cannot be reached")


def _of_name(inner: BaseException | None) -> UnreadableError | Transient:
    if isinstance(inner, socket.gaierror) and inner.errno == socket.EAI_AGAIN:
        return Transient("the host's name cannot be looked up: no network?")
    return UnreadableError("there is no host of this name")


def _of_tls(inner: object) -> UnreadableError:
    import ssl

    if isinstance(inner, ssl.SSLCertVerificationError):
        trust = "SSL_CERT_FILE names a file with certificates to trust"
        return UnreadableError(f"the server's certificate cannot be verified: {inner.verify_message}; {trust}")
    reason = getattr(inner, "reason", None)
    wrong = "; is it a server of http://?" if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE") else ""
    return UnreadableError(f"no secure connection (TLS): {str(reason or 'failed').replace('_', ' ').lower()}{wrong}")
