"""Refuse downloads while code of a model runs: an inspected class needs no pretrained weights.

`urllib` and sockets raise `DownloadRefused`, and huggingface_hub is in its offline mode: files in a cache are still
used. This holds only for the thread that runs the code, and not for reads by statecli itself, such as a configuration
on a server. The variable STATECLI_DOWNLOADS=1 allows downloads.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from enum import Enum
from typing import Any
from urllib.parse import urlsplit

import msgspec

from statecli.core.lazy_pattern import compile_on_use
from statecli.live.attribute_patch import replace_attribute
from statecli.live.installed_code import PACKAGE_FOLDER

#: Variable that allows downloads.
ALLOW_VARIABLE = "STATECLI_DOWNLOADS"
ALLOW = f"set {ALLOW_VARIABLE}=1 to allow the download"
#: Packages of statecli that read files from servers.
_READERS = tuple(os.path.join(PACKAGE_FOLDER, room) + os.sep for room in ("storage", "formats", "targets"))
#: Names of this machine; an empty host is this machine too.
_LOCAL_HOST = compile_on_use(r"|localhost|127\..*|::1|0\.0\.0\.0|::")
#: Errors of huggingface_hub for a file that is not in its cache, in offline mode.
_HUB_ERRORS = ("OfflineModeIsEnabled", "LocalEntryNotFoundError")
_HUB = "the Hugging Face hub"
#: Names of arguments that request weights.
_WEIGHTS_ARGUMENT = compile_on_use(r"(pretrained|weights)(_backbone|_encoder)?|(backbone|encoder)_weights")
#: Largest number of steps from an error to its causes.
_MAX_CAUSES = 20


class DownloadRefused(Exception):
    """Error: the model's code started a download. The message is the URL or the host."""


@contextmanager
def refuse_downloads() -> Iterator[None]:
    """Make downloads by this thread raise DownloadRefused in the block, unless STATECLI_DOWNLOADS is set."""
    if _are_allowed():
        yield
        return
    import socket
    import urllib.request

    guard = _Guard()
    with ExitStack() as patches:
        for owner, name, find_host in (
            (urllib.request.OpenerDirector, "open", _find_host_of_url),  # `urlopen` and `urlretrieve` call it
            (socket.socket, "connect", _find_host_of_address),
            (socket, "getaddrinfo", lambda host, *_, **__: (host, "")),
        ):
            patches.enter_context(replace_attribute(owner, name, guard.wrap(getattr(owner, name), find_host)))
        with suppress(Exception):  # a broken installation is an error of the code that needs it
            import huggingface_hub.constants

            offline = guard.is_active_or(was_offline=bool(huggingface_hub.constants.HF_HUB_OFFLINE))
            patches.enter_context(replace_attribute(huggingface_hub.constants, "HF_HUB_OFFLINE", offline))
        patches.callback(guard.end)
        yield


def _are_allowed() -> bool:
    return os.environ.get(ALLOW_VARIABLE, "0") not in ("", "0")


def _find_host_of_url(_opener: Any, fullurl: Any, *_: Any, **__: Any) -> tuple[object, str]:
    url = fullurl if isinstance(fullurl, str) else fullurl.full_url
    parts = urlsplit(url)
    return (parts.hostname or "" if parts.scheme in ("http", "https", "ftp") else ""), url


def _find_host_of_address(_connection: object, address: object) -> tuple[object, str]:
    """Return (host, "") for a socket address. The host is "" for a local socket, whose address is a string."""
    return (address[0] if isinstance(address, tuple) else ""), ""


class _Guard:
    def __init__(self) -> None:
        self._thread: int | None = threading.get_ident()

    def end(self) -> None:
        """Stop refusing downloads, even if a library has kept a copy of the object in `HF_HUB_OFFLINE`."""
        self._thread = None

    def is_active(self) -> bool:
        """Return True if this thread runs the model's code and statecli itself is not reading a file."""
        if threading.get_ident() != self._thread:
            return False
        frame = sys._getframe(1)
        while frame is not None:
            filename = frame.f_code.co_filename
            if filename.startswith(PACKAGE_FOLDER) and filename != __file__:
                return not filename.startswith(_READERS)
            frame = frame.f_back  # type: ignore[assignment]
        return True

    def is_active_or(self, *, was_offline: bool) -> Any:
        """Return a value for `HF_HUB_OFFLINE`. It is true while downloads are refused, or always if `was_offline`."""
        guard = self

        class Offline:
            def __bool__(self) -> bool:
                return was_offline or guard.is_active()

        return Offline()

    def refuse(self, host: object, source: str) -> None:
        """Raise DownloadRefused if `host` is another machine."""
        text = host.decode("ascii", "replace") if isinstance(host, bytes) else host
        is_remote = isinstance(text, str) and not _LOCAL_HOST.fullmatch(text) and text != platform.node()
        if is_remote and self.is_active():
            raise DownloadRefused(source or str(text))

    def wrap(self, original: Callable[..., Any], find_host: Callable[..., tuple[object, str]]) -> Callable[..., Any]:
        """Return `original` with a check that raises DownloadRefused. `find_host` finds the host in the arguments."""

        def connect(*args: Any, **kwargs: Any) -> Any:
            self.refuse(*find_host(*args, **kwargs))
            return original(*args, **kwargs)

        return connect


class Refusal(msgspec.Struct, frozen=True):
    """Refused download: its source, and the argument value that avoids the download (None if unknown)."""

    source: str
    argument: tuple[str, bool | None] | None = None


def find_refusal(error: BaseException) -> Refusal | None:
    """Return the refused download that caused an error, or None for other errors."""
    source = next(filter(None, map(_get_source, iter_causes(error))), None)
    if source is None or _are_allowed():
        return None
    refusals = (_find_argument(source, cause) for cause in iter_causes(error))
    return next(filter(None, refusals), Refusal(source))


def _get_source(error: BaseException) -> str | None:
    if isinstance(error, DownloadRefused):
        return str(error)
    return _HUB if type(error).__name__ in _HUB_ERRORS else None


def iter_causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and its causes."""
    for _ in range(_MAX_CAUSES):
        if error is None:
            return
        yield error
        error = error.__cause__ or error.__context__


def _find_argument(source: str, error: BaseException) -> Refusal | None:
    """Return the refusal with the outermost argument that requests weights, or None if no call has such an argument."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        argument = find_request(frame.f_locals)
        if argument is not None:
            return Refusal(source, argument)
    return None


def find_request(arguments: Mapping[str, Any]) -> tuple[str, bool | None] | None:
    """Return the argument that requests weights and the value that avoids a download; None without such an argument."""
    for name, value in tuple(arguments.items()):
        if names_weights(name) and (value is True or (value and isinstance(value, (str, Enum)))):
            return name, False if value is True else None
    return None


def names_weights(argument: str) -> bool:
    """Return True for the name of an argument that asks for weights: `pretrained`, `encoder_weights`."""
    return _WEIGHTS_ARGUMENT.fullmatch(argument) is not None
