"""Replace an attribute of a module or a class while a block runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def replace_attribute(owner: object, name: str, value: object) -> Iterator[None]:
    """Replace an attribute while the block runs. Afterwards restore the owner's value, or delete the replacement."""
    attributes = vars(owner)  # getattr would return a static or class method of a class without its decorator
    is_own, previous_value = name in attributes, attributes.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, previous_value) if is_own else delattr(owner, name)
