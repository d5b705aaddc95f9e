"""Numbers and words beside the tensors (epoch, lr, `__metadata__`) that differ."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence

from statecli.commands.diff.result import ScalarChange, Status
from statecli.core import quoting
from statecli.core.state import ModelState, Oddity, Scalar, Settings
from statecli.formats.torch.settings import MORE, describe_text, format_path, rename

#: The section that is a whole file, and no path in one.
_LONE = "model"
#: How an empty container is told, and what it is.
_EMPTY: Mapping[Scalar, str] = {"{}": "dict", "[]": "list"}
_HUGE = re.compile("-?[0-9]{19,400}")


def changed_scalars(
    before: ModelState,
    after: ModelState,
    sections: tuple[str | None, str | None],
    paired: Mapping[str, str] = {},
) -> tuple[list[ScalarChange], list[str], list[Oddity]]:
    """What differs in the metadata of two checkpoints, by dotted path, in the order of before, then of after; the
    paths of all that was compared, and what must be said of it.

    Of a target that is one section (`train.ckpt#optimizer`), what lies below that section, by its path from there.
    What only one side's format can record is no difference, and a note names it: so are attributes of modules that one
    side has and the other's format need not keep. safetensors holds nothing but text:
    against another format, a number equals its text. `paired` says which section of before is compared with which of
    after. A key that is a number and one that is its text are two keys, and a container of another kind is a change.
    Of more settings than are told, those that both sides tell are compared, and the digest of all.
    """
    one, of_one = _side(before, sections[0], after)
    two, of_two = _side(after, sections[1], before)
    if not any(sections):
        one, two = _moved(one, two, paired)
    same: Callable[[Scalar, Scalar], bool] = _same
    if before.traits.settings_are_compiled != after.traits.settings_are_compiled:
        one, two = Settings(one.values), Settings(two.values)
    if before.traits.settings_are_text != after.traits.settings_are_text:
        same = _number_and_text if after.traits.settings_are_text else _text_and_number
        one, two = Settings(one.values), Settings(two.values)
    first, second = _spelled(one, two), _spelled(two, one)
    kinds = list(_kinds(one, two))
    if MORE in first or MORE in second:
        if first.get(MORE) == second.get(MORE) and sections[0] == sections[1]:
            return [], [*first], _of_modules((*of_one, *of_two))
        first, second = _told_by_both(first, second), _told_by_both(second, first)
    found: list[ScalarChange] = []
    passed: list[str] = []
    beside = _files_beside(before) | _files_beside(after)
    keys = list(dict.fromkeys((*first, *second)))
    for key in keys:
        if key in first and key in second and same(first[key], second[key]):
            continue
        if (key not in second and key in _own(before, after)) or (key not in first and key in _own(after, before)):
            file, dot, _ = key.partition(".")
            passed.append(f"{file}.*" if dot and file in beside else key)
        else:
            found.append(_change(key, first, second))
    return kinds + found, keys, [*_passed(passed), *_of_modules((*of_one, *of_two))]


def _passed(keys: Sequence[str]) -> list[Oddity]:
    """`keys` may name one again and again: a file beside the weights stands for all that it says."""
    message = f"only one side's format records {quoting.names(list(dict.fromkeys(keys)))}: no difference"
    return [Oddity("format-metadata", message)] if keys else []


def _of_modules(keys: Sequence[str]) -> list[Oddity]:
    shown = quoting.names(list(dict.fromkeys(key.rpartition(".")[2] for key in keys)))
    message = f"only one side records these attributes of whole modules ({shown}): no difference"
    return [Oddity("module-attributes", message)] if keys else []


def _kinds(one: Settings, two: Settings) -> Iterator[ScalarChange]:
    """Containers that both sides have, of two kinds; what the whole file is in is no setting."""
    for path, kind in one.kinds.items():
        if path and two.kinds.get(path, kind) != kind:
            yield ScalarChange(path, Status.CHANGED, kind, two.kinds[path])


def _change(key: str, before: Mapping[str, Scalar], after: Mapping[str, Scalar]) -> ScalarChange:
    if key not in before:
        return ScalarChange(key, Status.ADDED, None, after[key])
    if key not in after:
        return ScalarChange(key, Status.REMOVED, before[key], None)
    return ScalarChange(key, Status.CHANGED, before[key], after[key])


def _told_by_both(one: Mapping[str, Scalar], two: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {key: value for key, value in one.items() if key in two or key == MORE}


def _spelled(side: Settings, other: Settings) -> dict[str, Scalar]:
    """By path; one that is of other types on the other side, spelled out.

    Of a container that is empty here and is not there, what it holds there says enough.
    """
    told: dict[str, Scalar] = {}
    for key, value in side.values.items():
        if key in other.kinds and key not in side.kinds and _EMPTY.get(value) == other.kinds[key]:
            continue
        types = side.types.get(key, "")
        exact = format_path(key, types) if types else key
        contended = exact in other.values or (key in other.values and other.types.get(key, "") != types)
        told[exact if contended else key] = value
    return told


def _side(state: ModelState, section: str | None, other: ModelState) -> tuple[Settings, list[str]]:
    """The settings below the section, and those left out: attributes of whole modules that the other need not have."""
    side = state.metadata
    start = "" if section is None else _start(side, state, section)
    modules = _modules_with_more(state, other)
    if not start and not modules:
        return side, []
    kept = _own(state, other) | _shared_attributes(state, other)

    def is_left_out(key: str) -> bool:
        return f"{key}.".startswith(modules) and key not in kept

    def name(key: str) -> tuple[str, str] | None:
        if is_left_out(key):
            return None
        return (start, "") if key.startswith(start) else ("", "") if key == MORE else None

    return rename(side, name), [key for key in side.values if key.startswith(start) and is_left_out(key)]


def _attributes_of(state: ModelState) -> tuple[str, ...]:
    """What stands before the attributes of each whole module; a program's signature has none."""
    side = state.metadata
    if state.traits.settings_describe_program:
        return ()
    return tuple(_start(side, state, section) for section in state.whole_modules)


def _modules_with_more(state: ModelState, other: ModelState) -> tuple[str, ...]:
    """Those whose attributes the other does not record, or, if it is compiled, only where its code uses them."""
    alike = state.traits.settings_are_compiled is other.traits.settings_are_compiled
    return () if alike and _attributes_of(other) else _attributes_of(state)


def _shared_attributes(state: ModelState, other: ModelState) -> frozenset[str]:
    """The attributes that the other's modules record too, by their paths in this one."""
    theirs = {
        key[len(start) :] for start in _attributes_of(other) for key in other.metadata.values if key.startswith(start)
    }
    starts = _attributes_of(state)
    return frozenset(
        key
        for start in starts
        for key in state.metadata.values
        if key.startswith(start) and key[len(start) :] in theirs
    )


def _start(side: Settings, state: ModelState, section: str) -> str:
    """What stands before the settings of a section; nothing where the file is nothing else."""
    start = f"{section}."
    named = section in side.kinds or any(key.startswith(start) for key in side.values)
    is_all = section in state.whole_modules or (section == _LONE and state.sections == (section,))
    return "" if is_all and not named else start


def _moved(one: Settings, two: Settings, paired: Mapping[str, str]) -> tuple[Settings, Settings]:
    """The settings of each section before under the name of the one that it is compared with.

    A section is what it is called, on both sides: which keys lead there is no setting.
    """
    moves = {f"{old}.": f"{new}." for old, new in paired.items() if old and new}
    before, after = _beginning(moves), _beginning({new: new for new in moves.values()})
    names = [new + key[len(old) :] for key in one.values for old, new in [before(key)]]
    if len(set(names)) < len(names):
        return one, two  # something else of before has that name already: shown as gone and new, and nothing lost
    return rename(one, before), rename(two, after)


def _beginning(moves: Mapping[str, str]) -> Callable[[str], tuple[str, str]]:
    """How a path begins, and shall begin: of sections in sections, the inner one."""
    inner_first = sorted(moves, key=len, reverse=True)

    def renaming(key: str) -> tuple[str, str]:
        old = next((old for old in inner_first if key.startswith(old)), "")
        return old, moves.get(old, "")

    return renaming


def _own(state: ModelState, other: ModelState) -> frozenset[str]:
    """The keys that the state's format records and the other's cannot, names of dropped ties among them."""
    traits = state.traits
    own = traits.own_settings - other.traits.own_settings
    if traits.drops_tied_names and not other.traits.drops_tied_names:
        own |= _dropped_names(state)
    if traits.settings_vocabulary and traits.settings_vocabulary != other.traits.settings_vocabulary:
        own |= state.metadata.values.keys()
    beside = tuple(f"{name}." for name in _files_beside(state))
    if beside and not _files_beside(other):
        own |= frozenset(key for key in state.metadata.values if key.startswith(beside))
    return own


def format_bookkeeping(state: ModelState) -> frozenset[str]:
    """Return the settings that describe the container, not the model: `format`, `total_size`, names of dropped ties."""
    traits = state.traits
    if traits.settings_describe_program:
        return frozenset(state.metadata.values)
    return traits.own_settings | _dropped_names(state) if traits.drops_tied_names else traits.own_settings


def _dropped_names(state: ModelState) -> frozenset[str]:
    """Return the settings that name a tied tensor under which another is stored."""
    names = {tensor.fqn for tensor in state.tensors}
    return frozenset(key for key, value in state.metadata.values.items() if key in names and value in names)


def settings_of_section(state: ModelState, section: str | None) -> Settings:
    """Return the settings below a section, by their paths from there; all settings for None."""
    return _side(state, section, state)[0]


def _files_beside(state: ModelState) -> frozenset[str]:
    """Of a folder the files beside the weights that have settings; one file has none beside it."""
    return state.metadata.beside


def _same(before: Scalar, after: Scalar) -> bool:
    if isinstance(before, bool) is not isinstance(after, bool):
        return False
    if type(before) is float and type(after) is str:
        return _is_huge(after, before)
    if type(after) is float and type(before) is str:
        return _is_huge(before, after)
    return before == after or (before != before and after != after)


def _is_huge(text: str, number: float) -> bool:
    """Whether an integer that JSON has no number for, which is told as a text, is that float."""
    return 2.0**63 <= abs(number) < float("inf") and bool(_HUGE.fullmatch(text)) and int(text) == number


def _text_and_number(text: Scalar, told: Scalar) -> bool:
    return _number_and_text(told, text)


def _number_and_text(told: Scalar, text: Scalar) -> bool:
    """Whether what another format tells is what safetensors has as a text."""
    if describe_text(str(text)) == told:
        return True
    return str(told) == str(text) and not str(told).startswith("'")


def described(change: ScalarChange) -> str:
    """What became of it, on one line: `epoch: 3 → 4`."""
    word = f"{change.status.value}: " if change.status in (Status.ADDED, Status.REMOVED) else ""
    return f"{change.key}: {word}{told(change)}"


def told(change: ScalarChange, longest: int = sys.maxsize) -> str:
    """`3 → 4`, or the one value where it was added or removed; as JSON writes them, so that "1" is not 1."""
    sides = [_json(change.before, longest)] if change.status is not Status.ADDED else []
    sides += [_json(change.after, longest)] if change.status is not Status.REMOVED else []
    return " → ".join(sides)


def _json(value: Scalar, longest: int) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"
