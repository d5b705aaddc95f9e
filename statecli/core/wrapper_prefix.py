"""Build the finding about names with a wrapper's prefix, with the same title and fix in all commands."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from statecli.core import quoting
from statecli.core.finding import Finding
from statecli.core.load_rules import WRAPPER_PREFIX
from statecli.core.model_state import StateDict
from statecli.core.parameter_or_buffer import WRAPPER_ATTRIBUTES


class PrefixedName(msgspec.Struct, frozen=True, gc=False):
    """Name in a checkpoint that differs from the model's name by the prefix of a wrapper.

    Attributes:
        name: Name in the checkpoint.
        registered: Name in the model.
        extra: Prefix that only `name` has, or "". lacking: Prefix that only `registered` has, or "".
    """

    name: str
    registered: str
    extra: str = ""
    lacking: str = ""


def report_prefixes(
    prefixed: Sequence[PrefixedName],
    names: Sequence[str],
    *,
    target: str,
    state_dict: StateDict,
    kept_names: Sequence[str] = (),
    section_text: str = "",
    model: str | None = None,
    is_refused: bool = True,
) -> Finding:
    """Return the finding about the prefixed names of a section.

    Args:
        prefixed: The names with a prefix on one side only.
        names: All names of the section.
        target: The checkpoint.
        state_dict: The state_dict of the section: the fix reads the names at its keys.
        kept_names: Names that are equal in the model: the fix keeps these names.
        section_text: The section in the words of the title, "" for a single section.
        model: The class that would load the names, None for an unknown class.
        is_refused: Whether `model` refuses the names.
    """
    return WRAPPER_PREFIX.finding(
        _describe(prefixed, names, kept_names, f"{section_text} ", model or "the plain model"),
        target=target,
        section=state_dict.section,
        help=_build_fix(prefixed, names, kept_names, state_dict),
        severity=WRAPPER_PREFIX.cases["refused by the class"] if is_refused else None,
    )


def _describe(
    prefixed: Sequence[PrefixedName], names: Sequence[str], kept_names: Sequence[str], section_text: str, owner: str
) -> str:
    extra, lacking = _join_prefixes(p.extra for p in prefixed), _join_prefixes(p.lacking for p in prefixed)
    affected_names = {item.name for item in prefixed}
    if len(extra) == 1:  # also names that the class does not have
        affected_names |= {name for name in set(names).difference(kept_names) if name.startswith(extra[0])}
    count = sum(name in affected_names for name in names)
    is_one = count == 1
    if not extra:
        lack = "lacks" if is_one else "lack"
        difference_text = f"{lack} the wrapper prefix {_quote(lacking)} of {owner}"
    else:
        at_start = all(name.startswith(tuple(extra)) for name in affected_names)
        has = "has the prefix" if is_one else "have the prefix"
        verb = has if at_start else "contains" if is_one else "contain"
        counterpart = f"where {owner} has {_quote(lacking)}" if lacking else f"which {owner} does not have"
        difference_text = f"{verb} {_quote(extra)} of a wrapper, {counterpart}"
    share = _format_share(count, len(names))
    names_text = "this name" if is_one else "these names"
    return f"{share}{section_text}{difference_text}: load_state_dict cannot match {names_text}"


def _format_share(count: int, total: int) -> str:
    if total == 1:
        return "the only name"
    return f"all {total:,} names" if count == total else f"{count:,} of {total:,} names"


def _quote(prefixes: Sequence[str]) -> str:
    return " and ".join(map(quoting.quote, prefixes))


def _join_prefixes(prefixes: Iterable[str]) -> list[str]:
    """Return the prefix or, for several prefixes, their distinct parts. FSDP adds a part at each level of modules."""
    distinct = list(dict.fromkeys(filter(None, prefixes)))
    return (
        distinct
        if len(distinct) < 2
        else list(dict.fromkeys(part for item in distinct for part in _split_prefix(item)))
    )


def _split_prefix(prefix: str) -> list[str]:
    return [f"{part}." for part in prefix.split(".") if part]


# --- the fix ---------------------------------------------------------------------------------------------------------


class _Removal(msgspec.Struct, frozen=True):
    """Code that removes prefixes from a name: `name.replace('_orig_mod.', '').removeprefix('module.')`."""

    start: tuple[str, ...] = ()
    anywhere: tuple[str, ...] = ()

    def apply(self, name: str) -> str:
        for part in self.anywhere:
            name = name.replace(part, "")
        for part in self.start:
            name = name.removeprefix(part)
        return name

    @property
    def code(self) -> str:
        anywhere = "".join(f".replace({part!r}, '')" for part in self.anywhere)
        return f"name{anywhere}{''.join(f'.removeprefix({part!r})' for part in self.start)}"


def _build_removal(names: Sequence[tuple[str, str]], kept_names: Iterable[str]) -> _Removal | None:
    """Return the code that removes the prefixes of these names (name, prefix) and leaves the kept names unchanged.

    Return None if no code fits all names.
    """
    prefixes = list(dict.fromkeys(prefix for _, prefix in names if prefix))
    if len(prefixes) == 1 and all(name.startswith(prefix) for name, prefix in names):
        removal = _Removal(start=(prefixes[0],))
    else:
        parts = dict.fromkeys(part for prefix in prefixes for part in _split_prefix(prefix))
        anywhere = tuple(part for part in parts if part[:-1] in WRAPPER_ATTRIBUTES)
        removal = _Removal(tuple(part for part in parts if part not in anywhere), anywhere)
    is_exact = all(removal.apply(name) == _remove_parts(name, prefix) for name, prefix in names)
    return removal if is_exact and all(removal.apply(name) == name for name in kept_names) else None


def _remove_parts(name: str, prefix: str) -> str:
    """Return the name without the parts of the prefix. Each part is removed once, where it first occurs."""
    *path, last = name.split(".")
    for part in prefix.split("."):
        if part in path:
            path.remove(part)
    return ".".join([*path, last])


def _format_source(state_dict: StateDict) -> str:
    """Return the code for the state_dict: `state`, or its place in the loaded object, such as `checkpoint['model']`."""
    if not state_dict.keys:
        return "state"
    keys = "".join(f"[{key!r}]" for key in state_dict.keys)
    return f"checkpoint{keys}{'.state_dict()' if state_dict.is_module else ''}"


def _build_fix(
    prefixed: Sequence[PrefixedName], names: Sequence[str], kept_names: Sequence[str], state_dict: StateDict
) -> str:
    """Return the code that renames the keys before load_state_dict, or a sentence if no code fits all names."""
    source = _format_source(state_dict)
    # A tensor inside a value (`nets['generator']['head.weight']`) is not an entry of the state_dict.
    holder_starts = tuple(f"{name}[" for name in state_dict.holders)
    is_flat = not any(item.name.startswith(holder_starts) for item in prefixed)
    removal = _build_removal([(item.name, item.extra) for item in prefixed], kept_names) if is_flat else None
    additions = {item.lacking for item in prefixed}
    if removal and additions == {""}:
        return _format_renaming(removal.code, source)
    start = next(iter(additions)) if len(additions) == 1 and len(prefixed) == len(names) else ""
    if removal and start and all(item.registered.startswith(start) for item in prefixed):
        return _format_renaming(f"{start!r} + {removal.code}", source)
    of_model = _build_removal([(item.registered, item.lacking) for item in prefixed], kept_names)
    if of_model and not any(item.extra for item in prefixed):
        names_of_model = f"names = {{{of_model.code}: name for name in model.state_dict()}}"
        return f"{names_of_model}\n{_format_renaming('names.get(name, name)', source)}"
    first = prefixed[0]
    new_name = first.registered or _remove_parts(first.name, first.extra)
    example = f"{quoting.quote(first.name)} to {quoting.quote(new_name)}"
    return f"rename the keys before load_state_dict, for example {example}"


def _format_renaming(key: str, source: str) -> str:
    return f"state = {{{key}: tensor for name, tensor in {source}.items()}}"
