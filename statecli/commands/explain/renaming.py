"""Steps that rename the entries of a state_dict, as functions, Python code or `--map` rules.

The printed code and the names in the test load come from the same step, so they cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import NamedTuple

import msgspec

from statecli.core.parameter_or_buffer import WRAPPER_ATTRIBUTES

#: Largest number of steps in a short answer.
MAX_STEPS = 16


class Substitution(msgspec.Struct, frozen=True):
    """A regular expression and its replacement, as in `--map`.

    `old` and `new` are set if the expression is the literal text `old`: at the start if `at_start`, else anywhere.
    """

    pattern: str
    replacement: str
    old: str | None = None
    new: str = ""
    at_start: bool = False

    def apply(self, name: str) -> str:
        """Return the new name of an entry."""
        return re.sub(self.pattern, self.replacement, name)

    def format_code(self, name: str) -> str:
        """Return Python code that computes the new name. `name`: Python expression of the old name."""
        if self.old is None:
            return f"re.sub({format_raw(self.pattern)}, {format_raw(self.replacement)}, {name})"
        if not self.at_start:
            return f"{name}.replace({format_text(self.old)}, {format_text(self.new)})"
        if not self.old:
            return f"{format_text(self.new)} + {name}"
        if not self.new:
            return f"{name}.removeprefix({format_text(self.old)})"
        return f"re.sub({format_raw(self.pattern)}, {format_raw(self.replacement)}, {name})"

    @property
    def rules(self) -> tuple[str, ...]:
        """The `--map` rules that rename entries as this substitution does."""
        return (f"{self.pattern}={self.replacement}",)


class Shift(msgspec.Struct, frozen=True):
    """Step that adds `delta` to the indices of a module's children, from index `first` on."""

    module: str
    first: int
    last: int
    delta: int

    @property
    def pattern(self) -> str:
        return rf"^({self.module})(\d+)\b" if self.module else r"^()(\d+)\b"

    def apply(self, name: str) -> str:
        """Return the new name of an entry."""
        return re.sub(self.pattern, self._shift, name)

    def _shift(self, match: re.Match[str]) -> str:
        number = int(match[2])
        return f"{match[1]}{number + self.delta if number >= self.first else number}"

    def format_code(self, name: str) -> str:
        """Return Python code that computes the new name."""
        sign = "+" if self.delta > 0 else "-"
        change = f"{sign} {abs(self.delta)}" + (f" * (int(m[2]) >= {self.first})" if self.first > 0 else "")
        return f're.sub({format_raw(self.pattern)}, lambda m: f"{{m[1]}}{{int(m[2]) {change}}}", {name})'

    @property
    def rules(self) -> tuple[str, ...]:
        """The `--map` rules with the same effect, one for each index, in an order that avoids name clashes."""
        numbers = range(self.first, self.last + 1)
        ordered_numbers = reversed(numbers) if self.delta > 0 else numbers
        return tuple(rf"^({self.module}){n}\b=\g<1>{n + self.delta}" for n in ordered_numbers)


Step = Substitution | Shift


def apply_steps(steps: Iterable[Step], name: str) -> str:
    """Return the name of an entry after all steps."""
    for step in steps:
        name = step.apply(name)
    return name


def format_text(text: str) -> str:
    """Return the text as a Python literal, in double quotes if possible."""
    return f'"{text}"' if text.isprintable() and not set(text) & set('"\\') else repr(text)


def format_raw(text: str) -> str:
    """Return a regular expression as a Python literal, raw if that is possible and shorter."""
    if "\\" not in text or text.endswith("\\") or not text.isprintable() or '"' in text:
        return format_text(text)
    return f'r"{text}"'


def find_steps(names: Mapping[str, str], others: Iterable[str] = ()) -> tuple[Step, ...] | None:
    """Return a few steps that rename each key of `names` to its value without name clashes, or None if not found.

    `others` are names without a partner: their new names must not be values of `names`.
    """
    if all(name == new for name, new in names.items()):
        return ()
    unwrapped_names, wrappers = _remove_wrapper_parts(names)
    others = tuple(others)
    proposals = ((*wrappers, *steps) for context in (0, 1, 2) for steps in _propose_steps(unwrapped_names, context))
    ranked_proposals = sorted(
        dict.fromkeys(proposals), key=lambda steps: (len(steps), sum(len(step.pattern) for step in steps))
    )
    return next(
        (steps for steps in ranked_proposals if len(steps) <= MAX_STEPS and _are_exact(steps, names, others)), None
    )


def _are_exact(steps: Sequence[Step], names: Mapping[str, str], others: Iterable[str]) -> bool:
    """Return True if the steps produce exactly the new names, and no step gives two entries the same name."""
    current = [*names, *others]
    for step in steps:
        current = [step.apply(name) for name in current]
        if len(set(current)) < len(current):
            return False
    return all(name == new for name, new in zip(current, names.values(), strict=False))


def _remove_wrapper_parts(names: Mapping[str, str]) -> tuple[dict[str, str], tuple[Step, ...]]:
    """Remove wrapper parts such as `module.` that the model lacks. Return the new names and the removal steps."""
    parts = [
        part
        for part in WRAPPER_ATTRIBUTES
        if any(f".{part}." in f".{name}" for name in names)
        and not any(f".{part}." in f".{new}" for new in names.values())
    ]
    steps = tuple(Substitution(re.escape(f"{part}."), "", f"{part}.") for part in parts)
    return {apply_steps(steps, name): new for name, new in names.items()}, steps


class _Hunk(NamedTuple):
    """Components that differ between two names, with the components before and after them."""

    old: list[str]
    new: list[str]
    before: list[str]
    after: list[str]


def _find_hunks(name: str, new: str) -> list[_Hunk]:
    old_parts, new_parts = name.split("."), new.split(".")
    return [
        _Hunk(old_parts[start:stop], new_parts[new_start:new_stop], old_parts[:start], old_parts[stop:])
        for tag, start, stop, new_start, new_stop in SequenceMatcher(
            None, old_parts, new_parts, autojunk=False
        ).get_opcodes()
        if tag != "equal"
    ]


def _propose_steps(names: Mapping[str, str], context: int) -> Iterable[tuple[Step, ...]]:
    """Yield lists of steps to try. A substitution includes `context` unchanged components around the changed part."""
    prefix = _find_prefix_steps(names)
    for first in ((), *((p,) for p in prefix)):
        remaining_names = {apply_steps(first, name): new for name, new in names.items()}
        if len(remaining_names) < len(names):
            continue
        if all(name == new for name, new in remaining_names.items()):
            yield first
            continue
        shifts, shifted = _find_shifts(remaining_names)
        steps = _find_substitutions(shifted, context)
        yield (*first, *shifts, *steps)
        yield (*first, *shifts, *reversed(steps))
        if shifts:
            yield (*first, *_find_substitutions(remaining_names, context))


def _find_prefix_steps(names: Mapping[str, str]) -> list[Step]:
    """Return steps that remove or add a prefix that some or all names have."""
    steps: list[Step] = []
    removed_prefixes = {
        name[: len(name) - len(new)] for name, new in names.items() if name != new and name.endswith("." + new)
    }
    added_prefixes = {
        new[: len(new) - len(name)] for name, new in names.items() if name != new and new.endswith("." + name)
    }
    steps += [_remove_prefix(prefix) for prefix in sorted(removed_prefixes, key=len)[:3]]
    steps += [_add_prefix(prefix) for prefix in sorted(added_prefixes, key=len)[:3]]
    # If names are renamed too, no name is equal without the prefix. A prefix is then a first part that all names of
    # only one side share.
    for side, other_side in ((names.keys(), names.values()), (names.values(), names.keys())):
        head = {name.partition(".")[0] for name in side}
        if (
            len(head) == 1
            and all("." in name for name in side)
            and head.isdisjoint(n.partition(".")[0] for n in other_side)
        ):
            prefix = f"{next(iter(head))}."
            steps.append(_remove_prefix(prefix) if list(side) == list(names) else _add_prefix(prefix))
    return steps


def _add_prefix(prefix: str) -> Substitution:
    return Substitution("^", _escape(prefix), "", prefix, at_start=True)


def _remove_prefix(prefix: str) -> Substitution:
    return Substitution(f"^{re.escape(prefix)}", "", prefix, "", at_start=True)


def _escape(text: str) -> str:
    return text.replace("\\", r"\\")


def _find_shifts(names: Mapping[str, str]) -> tuple[tuple[Step, ...], dict[str, str]]:
    """Return the steps that shift module indices, and the names after these steps."""
    shifts_by_stem: dict[str, dict[int, int]] = {}
    for name, new in names.items():
        old_parts, new_parts = name.split("."), new.split(".")
        if len(old_parts) != len(new_parts):
            continue
        for n, (first, second) in enumerate(zip(old_parts, new_parts, strict=True)):
            if first.isdigit() and second.isdigit():
                stem = "".join(r"\d+\." if part.isdigit() else f"{re.escape(part)}\\." for part in old_parts[:n])
                shifts_by_stem.setdefault(stem, {})[int(first)] = int(second)
    steps = []
    for stem, numbers in shifts_by_stem.items():
        moved_numbers = {number: after for number, after in numbers.items() if number != after}
        deltas = {after - number for number, after in moved_numbers.items()}
        if len(deltas) == 1:
            lowest = min(moved_numbers)
            if all(number < lowest for number in numbers if number not in moved_numbers):
                start = 0 if lowest == min(numbers) else lowest
                steps.append(Shift(stem, start, max(numbers), deltas.pop()))
    return tuple(steps), {apply_steps(steps, name): new for name, new in names.items()}


def _find_substitutions(names: Mapping[str, str], context: int) -> list[Step]:
    """Return a substitution for each changed part of a name, with `context` unchanged components around the part."""
    hunks = (hunk for name, new in names.items() for hunk in _find_hunks(name, new))
    steps = dict.fromkeys(_build_substitution(hunk, context) for hunk in hunks)
    # Longer texts come first, because they may contain shorter texts.
    return sorted(steps, key=lambda step: -len(step.pattern))


def _build_substitution(hunk: _Hunk, context: int) -> Substitution:
    old, new, before, after = hunk
    remaining_context = context + (not old or not new)
    while remaining_context > 0 and after and not after[0].isdigit():
        old, new = [*old, after[0]], [*new, after[0]]
        after = after[1:]
        remaining_context -= 1
    while remaining_context > 0 and before and not before[-1].isdigit():
        old, new = [before[-1], *old], [before[-1], *new]
        before = before[:-1]
        remaining_context -= 1
    text, replaced = ".".join(old), ".".join(new)
    if not before:
        if not text:
            return _add_prefix(f"{replaced}.")
        if not after:
            return Substitution(f"^{re.escape(text)}$", _escape(replaced))
        dot = "." if replaced else ""
        return Substitution(
            rf"^{re.escape(text)}\.", _escape(replaced) + dot, f"{text}.", f"{replaced}{dot}", at_start=True
        )
    if after:
        old_text, new_text = (f".{part}." if part else "." for part in (text, replaced))
        return Substitution(re.escape(old_text), _escape(new_text), old_text, new_text)
    return Substitution(rf"\.{re.escape(text)}$", _escape(f".{replaced}"))
