"""Draw the pictures of the documents: the output of a command on a terminal, as SVG, for a light and a dark page.

`make docs` writes docs/pictures. A test compares the text in the pictures with the output of the program.
"""

from __future__ import annotations

import html
import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

import shown

if TYPE_CHECKING:
    from rich.console import Console

FOLDER = Path(__file__).parent / "pictures"
#: Command that a picture shows, by the name of the picture.
COMMANDS = {"inspect": "statecli inspect sample_models/net.py:Net --to meta"}
#: Background, foreground, and the colours 0 to 15 of the terminal.
THEMES = {
    "light": ("#ffffff", "#24292f", "24292f cf222e 116329 7d4e00 0969da 8250df 1b7c83 57606a"),
    "dark": ("#0d1117", "#e6edf3", "484f58 ff7b72 3fb950 d29922 58a6ff bc8cff 39c5cf b1bac4"),
}
#: Fonts that systems have; nothing is loaded from the network.
FONTS = "ui-monospace, SFMono-Regular, Menlo, Consolas, 'DejaVu Sans Mono', monospace"


def main() -> None:
    """Write every picture."""
    for name, line in COMMANDS.items():
        for theme in THEMES:
            (FOLDER / f"{name}-{theme}.svg").write_text(draw(line, theme), "utf-8")


def draw(line: str, theme: str) -> str:
    """Return the SVG of a terminal in which the command ran."""
    from rich.console import Console
    from rich.text import Text

    console = Console(record=True, width=shown.WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(Text.from_ansi(f"\x1b[1m$ {line}\x1b[0m\n{run(line, color=True)}"))
    return export(console, theme)


def export(console: Console, theme: str, name: str = "") -> str:
    """Return the SVG of the printed text; ids contain the name, because a page may have several pictures."""
    from rich.terminal_theme import TerminalTheme

    background, foreground, colors = THEMES[theme]
    palette = [parse_color(color) for color in colors.split()]
    svg = console.export_svg(
        title="statecli",
        theme=TerminalTheme(parse_color(background[1:]), parse_color(foreground[1:]), palette, palette),
        unique_id=f"statecli-{name}{theme}",
    )
    svg = re.sub(r"@font-face \{.*?\}\n", "", svg, flags=re.DOTALL)
    # The border of rich is invisible on a light page.
    svg = svg.replace("rgba(255,255,255,0.35)", "#8b949e")
    return re.sub(r"font-family: [^;]*;", f"font-family: {FONTS};", svg)


def run(line: str, *, color: bool = False) -> str:
    """Return the output of a command on a terminal."""
    output, _ = shown.run_on_terminal(line.split()[1:], shown.WIDTH, color=color)
    return output.rstrip()


def parse_color(text: str) -> tuple[int, int, int]:
    """Return the red, green and blue of a colour such as "24292f"."""
    red, green, blue = bytes.fromhex(text)
    return red, green, blue


def read_text(svg: str) -> list[str]:
    """Return the lines of text of a picture, without spaces."""
    lines: dict[str, str] = {}
    for y, text in re.findall(r'<text [^>]*?\by="([\d.]+)"[^>]*>(.*?)</text>', svg):
        lines[y] = lines.get(y, "") + re.sub(r"<[^>]*>", "", html.unescape(text))
    return [re.sub(r"\s", "", text) for text in lines.values() if text.strip()]


if __name__ == "__main__":
    main()
