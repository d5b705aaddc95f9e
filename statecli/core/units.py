"""Format facts as human-readable text: sizes, counts, shapes, names."""

from __future__ import annotations

from collections.abc import Sequence

from statecli.core.model_state import Evidence, Kind, Origin, TensorInfo
from statecli.core.run_scope import Configuration, NotChecked

#: Fields of `Stats` with a column each.
MOMENT_FIELDS = ("min", "max", "mean", "std")
COUNT_FIELDS = ("zeros", "nan", "inf")
STATS_FIELDS = MOMENT_FIELDS + COUNT_FIELDS

#: Plural noun for each kind.
KIND_NOUNS = {
    Kind.PARAMETER: "parameters",
    Kind.BUFFER: "buffers",
    Kind.UNREGISTERED: "unregistered",
    Kind.OPTIMIZER: "optimizer state",
    Kind.OTHER: "other",
}


def format_kind(tensor: TensorInfo) -> str:
    """Return the kind of a tensor, with a question mark if the kind is only assumed."""
    return format_kind_with_evidence((tensor.kind, tensor.evidence))


def format_kind_with_evidence(pair: tuple[Kind, Evidence]) -> str:
    """Return a tensor's kind from the pair (kind, how the kind was decided), with `?` if the kind is only assumed."""
    kind, evidence = pair
    return f"{kind.value}?" if evidence is Evidence.ASSUMED else kind.value


def format_shape(shape: tuple[int, ...] | None) -> str:
    """Return `[2,3]`, `[]` for a scalar, `?` for a tensor without a shape."""
    return "?" if shape is None else f"[{','.join(map(str, shape))}]"


def format_fqn(fqn: str) -> str:
    """Return the name, or `''` for the empty name, which would be invisible."""
    return fqn or "''"


def format_yes_no(value: bool | None) -> str | None:
    """Return `yes` or `no` for a flag, or None if the checkpoint does not record it."""
    return None if value is None else "yes" if value else "no"


def format_number(value: float | int | None, digits: int = 6) -> str:
    """Return the number with `digits` significant digits, or `-` for None."""
    if value is None:
        return "-"
    return str(value) if isinstance(value, int) else f"{value:.{digits}g}"


def format_size(count: int) -> str:
    """Format a number of bytes in decimal units: `90.9 MB`."""
    return _format_scaled(count, ("B", "kB", "MB", "GB", "TB"))


def format_count(count: int) -> str:
    """Format a number of elements as parameters are counted: `22.7 M`, `1.5 B`."""
    return _format_scaled(count, ("", "K", "M", "B", "T"))


def _format_scaled(count: int, units: tuple[str, ...]) -> str:
    """Format a count with the first unit that leaves at most three digits. A unit is 1,000 times the previous unit."""
    size, power = float(count), 0
    while size >= 999.5 and power < len(units) - 1:
        size, power = size / 1000, power + 1
    text = str(count) if not power else f"{size:.3g}" if size < 99.95 else f"{size:.0f}"
    return f"{text} {units[power]}" if units[power] else text


def format_section(section: str) -> str:
    """Return the name of a section, or `(top level)` for tensors of a checkpoint that are in no section."""
    return section or "(top level)"


def plural(count: int, noun: str) -> str:
    """Return the count and the noun: `1 tensor`, `1,024 tensors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_origin(origin: Origin) -> str:
    """Return the source line as `net.py:9`."""
    return f"{origin.file}:{origin.line}"


def describe_not_checked(entries: Sequence[NotChecked], limit: int = 8) -> str:
    """Return text such as `2 files (text file), 1 file (7z archive) and 5 more`. `limit`: number of entries to list."""
    parts = [f"{plural(entry.count, entry.what)} ({entry.why})" for entry in entries[:limit]]
    further_count = sum(entry.count for entry in entries[limit:])
    return ", ".join(parts) + (f" and {further_count:,} more" if further_count else "")


def describe_configuration(configuration: Configuration) -> str:
    """Return a line such as `configuration statecli.toml: disables 2 rules (nan, inf)`."""
    plugins = f"plugin{'s' * (len(configuration.plugins) > 1)} {', '.join(configuration.plugins)}"
    return "; ".join(filter(None, (_describe_file(configuration), plugins if configuration.plugins else "")))


def _describe_file(configuration: Configuration) -> str:
    if configuration.file is None:
        return "no configuration (--no-config)" if configuration.no_config else ""
    parts = [f"disables {plural(len(configuration.disabled), 'rule')} ({join_names(configuration.disabled, 5)})"]
    parts = [*(parts if configuration.disabled else []), *configuration.weakened]
    return f"configuration {configuration.file}" + (f": {', '.join(parts)}" if parts else "")


def join_names(names: Sequence[str], limit: int = 2) -> str:
    """Return the first `limit` names and the number of the rest: `a, b and 3 more`."""
    return ", ".join(names[:limit]) + (f" and {len(names) - limit:,} more" if len(names) > limit else "")


def format_fix_in_line(fix: str) -> str:
    """Join lines of code into a single line: statements first, each with its block, then all comments."""
    statements: list[str] = []
    comments: list[str] = []
    for line in fix.splitlines():
        if line.startswith("#"):
            comments.append(line.removeprefix("#").strip(" :"))
        elif line.startswith(" ") and statements:
            statements[-1] += f" {line.strip()}"
        else:
            statements.append(line)
    comment = f"# {'; '.join(dict.fromkeys(comments))}" if comments else ""
    return "  ".join(filter(None, ("; ".join(statements), comment)))
