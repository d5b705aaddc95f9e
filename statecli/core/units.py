"""Facts as people read them: sizes, counts, shapes."""

from __future__ import annotations

import math
from collections.abc import Sequence

from statecli.core.scope import Configuration, NotChecked
from statecli.core.state import Evidence, Kind, Origin, TensorInfo

#: The fields of `Stats` that have a column.
MOMENTS = ("min", "max", "mean", "std")
COUNTS = ("zeros", "nan", "inf")
STATS = MOMENTS + COUNTS

#: The kinds as one speaks of several.
NOUNS = {
    Kind.PARAMETER: "parameters",
    Kind.BUFFER: "buffers",
    Kind.UNREGISTERED: "unregistered",
    Kind.OPTIMIZER: "optimizer state",
    Kind.OTHER: "other",
}


def kind_text(tensor: TensorInfo) -> str:
    """The kind, with a question mark where it is only assumed."""
    return f"{tensor.kind.value}?" if tensor.evidence is Evidence.ASSUMED else tensor.kind.value


def shape_text(shape: tuple[int, ...] | None) -> str:
    """`[2,3]`, `[]` for a scalar, `?` where there is no shape yet."""
    return "?" if shape is None else f"[{','.join(map(str, shape))}]"


def shown(fqn: str) -> str:
    """A name; `''` for the empty one, of which nothing would be seen."""
    return fqn or "''"


def flag(value: bool | None) -> str:
    """`yes`, `no`, and `-` where the source does not say."""
    return said(value) or "-"


def said(value: bool | None) -> str | None:
    """`yes`, `no`, and nothing where the source does not say."""
    return None if value is None else "yes" if value else "no"


def number(value: float | int | None, digits: int = 6) -> str:
    """A number of so many significant digits, `-` for none."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def size_text(count: int) -> str:
    """Bytes for people, decimal units: `90.9 MB`."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            return f"{count} B" if unit == "B" else f"{size:.3g} {unit}" if size < 99.95 else f"{size:.0f} {unit}"
        size /= 1000
    return f"{count} B"


def count_text(count: int) -> str:
    """Elements for people: `22.7 M`."""
    size = float(count)
    for unit in ("", "k", "M", "G", "T"):
        if size < 999.5 or unit == "T":
            return str(count) if not unit else f"{size:.3g} {unit}" if size < 99.95 else f"{size:.0f} {unit}"
        size /= 1000
    return str(count)


def plural(count: int, noun: str) -> str:
    """`1 tensor`, `1,024 tensors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def place(origin: Origin) -> str:
    """`net.py:9`"""
    return f"{origin.file}:{origin.line}"


def describe_not_checked(entries: Sequence[NotChecked], most: int = 8) -> str:
    """Return `2 files (text file), 1 file (7z archive)`: the first reasons, and how many things have other reasons."""
    parts = [f"{plural(entry.count, entry.what)} ({entry.why})" for entry in entries[:most]]
    rest = sum(entry.count for entry in entries[most:])
    return ", ".join(parts) + (f" and {rest:,} more" if rest else "")


def describe_configuration(configuration: Configuration) -> str:
    """Return `configuration statecli.toml: disables 2 rules (nan, inf), fail-on = error`; "" without a file."""
    if configuration.file is None:
        return "no configuration (--no-config)" if configuration.no_config else ""
    parts = [f"disables {plural(len(configuration.disabled), 'rule')} ({names(configuration.disabled, 5)})"]
    parts = [*(parts if configuration.disabled else []), *configuration.weakened]
    return f"configuration {configuration.file}" + (f": {', '.join(parts)}" if parts else "")


def names(several: Sequence[str], most: int = 2) -> str:
    """The first of them, two unless `most` says how many, and how many more."""
    return ", ".join(several[:most]) + (f" and {len(several) - most:,} more" if len(several) > most else "")


#: Cells of a bar, and the powers of ten that they span: from a rounding of float32 to a change as large as the value.
BAR_CELLS = 10
BAR_DECADES = 8
_EIGHTHS = " ▏▎▍▌▋▊▉"


def bar(relative: float | None) -> str:
    """A relative change as a bar on a log scale, full at 1, empty for none; what is not 0 shows."""
    if not relative:
        return ""
    share = min(1.0, max(0.0, 1 + math.log10(relative) / BAR_DECADES))
    eighths = max(1, round(share * BAR_CELLS * 8))
    return "█" * (eighths // 8) + _EIGHTHS[eighths % 8].strip()
