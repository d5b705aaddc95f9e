"""The digest algorithms of `lock`, and the functions that compute their hashes."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Protocol

from statecli.core.errors import MissingDependency, option
from statecli.core.installed_package import install_packages


class Algorithm(str, Enum):
    """Digest algorithm. Its digests have 256 bits."""

    BLAKE3 = "blake3"
    SHA256 = "sha256"


class Hasher(Protocol):
    """Hash of bytes, with the interface of `hashlib`."""

    def update(self, data: bytes | bytearray | memoryview, /) -> object: ...

    def digest(self) -> bytes: ...

    def hexdigest(self) -> str: ...


#: Constructor of a hash of the given bytes.
NewHasher = Callable[..., Hasher]


def load_hasher(algorithm: Algorithm) -> NewHasher:
    """Return the function that creates hash objects of an algorithm. Raises `MissingDependency`."""
    if algorithm is Algorithm.SHA256:
        from hashlib import sha256

        return sha256
    try:
        from blake3 import blake3
    except ImportError as error:  # pragma: no cover - only a trimmed installation lacks the dependency
        raise MissingDependency(
            f"blake3 digests need the package blake3: {install_packages('blake3')} (or {option('--digest', 'sha256')})"
        ) from error
    return blake3  # single-threaded: more threads are not faster on blocks of this size, but more workers are
