"""Replace an attribute of a module or a class while a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replace_attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute; afterwards the owner has the old one, inherits it again, or lacks it again."""
    own = vars(owner)  # getattr would return a static or class method of a class without its decorator
    is_own, before = name in own, own.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before) if is_own else delattr(owner, name)
