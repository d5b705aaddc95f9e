"""Scroll bars drawn with whole characters: a thumb on a dotted track, which is visible without colour too."""

from __future__ import annotations

from typing import Any

from rich.segment import Segment, Segments
from rich.style import Style
from textual.scrollbar import ScrollBarRender

_THUMB, _TRACK = "┃", "┊"


class TrackRender(ScrollBarRender):
    """Scroll bar with `┃` for the visible part and `┊` for the rest. The mouse acts as on textual's scroll bars."""

    VERTICAL_BARS = [" "]  # noqa: RUF012 - as in the base class: whole characters only

    @classmethod
    def render_bar(cls, *args: Any, **options: Any) -> Segments:
        """Draw the bar."""
        bar = super().render_bar(*args, **options)
        bar.segments = [_draw(segment) for segment in bar.segments]
        return bar


def _draw(segment: Segment) -> Segment:
    style = segment.style
    if style is None or segment.text.strip():
        return segment
    is_thumb = bool(style.reverse)
    plain_style = Style(dim=not is_thumb, meta=style.meta)
    return Segment((_THUMB if is_thumb else _TRACK) * len(segment.text), plain_style)
