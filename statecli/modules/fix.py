"""The source lines that would register an unregistered tensor, ready to paste."""

from __future__ import annotations

from statecli.modules.walk import Held


def suggest(held: Held, place: tuple[str, int] | None) -> str | None:
    return None
