"""Compare the settings of two checkpoints: their numbers and strings, such as epoch, lr and `__metadata__`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from statecli import formats
from statecli.commands.diff.result import ScalarChange, Status
from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ModelState, Oddity, Scalar, Settings
from statecli.core.setting_paths import MORE, format_path, rename

#: Section of a whole file, which is not a path in the file.
_WHOLE_FILE_SECTION = "model"
#: Kind of an empty container by its text.
_KIND_BY_EMPTY_TEXT: Mapping[Scalar, str] = {"{}": "dict", "[]": "list"}
_HUGE_INTEGER = compile_on_use("-?[0-9]{19,400}")


class SettingsComparison(msgspec.Struct, frozen=True):
    """Differing settings, the paths of all compared settings, and notes on settings that are not compared."""

    changes: list[ScalarChange]
    paths: list[str]
    notes: list[Oddity]


def compare_settings(
    before: ModelState,
    after: ModelState,
    sections: tuple[str | None, str | None],
    section_pairs: Mapping[str, str] = {},
) -> SettingsComparison:
    """Compare the settings of two checkpoints by dotted path. Old settings come first, then added settings.

    For a target of a single section (`train.ckpt#optimizer`), the settings below the section are compared, by their
    paths below the section. A setting that only one side's format can record is noted, not reported. The same holds for
    attributes of modules that the other side's format need not keep. safetensors has only strings: compared with
    another format, a number equals its string. `section_pairs` maps old to new sections. A number as a key differs from
    its string, and another kind of container is a change. If a side has too many settings to list, statecli compares
    the settings that both sides list, and the digests of all settings.
    """
    old, old_modules = _select_section(before, sections[0], after)
    new, new_modules = _select_section(after, sections[1], before)
    if not any(sections):
        old, new = _rename_sections(old, new, section_pairs)
    is_same: Callable[[Scalar, Scalar], bool] = _is_same
    if before.traits.settings_are_compiled != after.traits.settings_are_compiled:
        old, new = Settings(old.values), Settings(new.values)
    if before.traits.settings_are_text != after.traits.settings_are_text:
        is_same = _is_number_and_text if after.traits.settings_are_text else _is_text_and_number
        old, new = Settings(old.values), Settings(new.values)
    old_values, new_values = _spell_keys(old, new), _spell_keys(new, old)
    # Paths of containers whose kind differs between the sides; the kind of the whole file is not a setting.
    differing = [path for path, kind in old.kinds.items() if path and new.kinds.get(path, kind) != kind]
    kinds = [ScalarChange(path, Status.CHANGED, old.kinds[path], new.kinds[path]) for path in differing]
    if MORE in old_values or MORE in new_values:
        if old_values.get(MORE) == new_values.get(MORE) and sections[0] == sections[1]:
            return SettingsComparison([], [*old_values], _describe_left_out_attributes((*old_modules, *new_modules)))
        old_values, new_values = _select_common(old_values, new_values), _select_common(new_values, old_values)
    changes: list[ScalarChange] = []
    format_only: list[str] = []
    companions = before.metadata.companion_names | after.metadata.companion_names
    are_on_both = old_values.keys() == new_values.keys()
    old_only = frozenset[str]() if are_on_both else _format_keys(before, after)
    new_only = frozenset[str]() if are_on_both else _format_keys(after, before)
    keys = list(dict.fromkeys((*old_values, *new_values)))
    for key in keys:
        if key in old_values and key in new_values and is_same(old_values[key], new_values[key]):
            continue
        if (key not in new_values and key in old_only) or (key not in old_values and key in new_only):
            file, dot, _ = key.partition(".")
            format_only.append(f"{file}.*" if dot and file in companions else key)
        else:
            changes.append(_build_change(key, old_values, new_values))
    notes = [*_format_note(format_only), *_describe_left_out_attributes((*old_modules, *new_modules))]
    return SettingsComparison(kinds + changes, keys, notes)


def _format_note(keys: Sequence[str]) -> list[Oddity]:
    """Return a note on settings that only one of the two formats records. `keys` may contain duplicates."""
    names = quoting.names(list(dict.fromkeys(keys)))
    message = f"statecli did not compare these settings, because only one of the two formats records them: {names}"
    return [Oddity("format-metadata", message)] if keys else []


def _describe_left_out_attributes(keys: Sequence[str]) -> list[Oddity]:
    attribute_names = quoting.names(list(dict.fromkeys(key.rpartition(".")[2] for key in keys)))
    message = (
        f"statecli did not compare these attributes of modules, because only one side records them: {attribute_names}"
    )
    return [Oddity("module-attributes", message)] if keys else []


def _build_change(key: str, before: Mapping[str, Scalar], after: Mapping[str, Scalar]) -> ScalarChange:
    status = Status.ADDED if key not in before else Status.REMOVED if key not in after else Status.CHANGED
    return ScalarChange(key, status, before.get(key), after.get(key))


def _select_common(values: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> dict[str, Scalar]:
    return {key: value for key, value in values.items() if key in other or key == MORE}


def _spell_keys(side: Settings, other: Settings) -> dict[str, Scalar]:
    """Map each setting's path to its value. A path includes the types of its keys if the types differ between sides.

    An empty container is left out if the other side's container has entries, because the entries are reported.
    """
    spelled_values: dict[str, Scalar] = {}
    for key, value in side.values.items():
        if key in other.kinds and key not in side.kinds and _KIND_BY_EMPTY_TEXT.get(value) == other.kinds[key]:
            continue
        types = side.types.get(key, "")
        typed_key = format_path(key, types) if types else key
        contended = typed_key in other.values or (key in other.values and other.types.get(key, "") != types)
        spelled_values[typed_key if contended else key] = value
    return spelled_values


def _select_section(state: ModelState, section: str | None, other: ModelState) -> tuple[Settings, list[str]]:
    """Return a section's settings without module attributes that `other` may lack, and the keys of these attributes."""
    side = state.metadata
    start = "" if section is None else _find_section_prefix(side, state, section)
    modules = _list_modules_with_more(state, other)
    if not start and not modules:
        return side, []
    kept_keys = _format_keys(state, other) | _find_shared_attributes(state, other)

    def is_left_out(key: str) -> bool:
        return f"{key}.".startswith(modules) and key not in kept_keys

    def name(key: str) -> tuple[str, str] | None:
        if is_left_out(key):
            return None
        return (start, "") if key.startswith(start) else ("", "") if key == MORE else None

    return rename(side, name), [key for key in side.values if key.startswith(start) and is_left_out(key)]


def _list_attribute_prefixes(state: ModelState) -> tuple[str, ...]:
    """Return the setting prefix of each module that was pickled whole. Return () for an exported program."""
    side = state.metadata
    if state.traits.settings_describe_program:
        return ()
    return tuple(_find_section_prefix(side, state, section) for section in state.whole_modules)


def _list_modules_with_more(state: ModelState, other: ModelState) -> tuple[str, ...]:
    """Return prefixes of module attributes that `other` may lack, such as attributes that compiled code never reads."""
    alike = state.traits.settings_are_compiled is other.traits.settings_are_compiled
    return () if alike and _list_attribute_prefixes(other) else _list_attribute_prefixes(state)


def _find_shared_attributes(state: ModelState, other: ModelState) -> frozenset[str]:
    """Return the keys in `state` of module attributes that `other` records too."""
    other_attributes = {
        key[len(start) :]
        for start in _list_attribute_prefixes(other)
        for key in other.metadata.values
        if key.startswith(start)
    }
    return frozenset(
        key
        for start in _list_attribute_prefixes(state)
        for key in state.metadata.values
        if key.startswith(start) and key[len(start) :] in other_attributes
    )


def _find_section_prefix(side: Settings, state: ModelState, section: str) -> str:
    """Return the key prefix of a section's settings, or "" if all settings of the file belong to the section."""
    prefix = f"{section}."
    is_named = section in side.kinds or any(key.startswith(prefix) for key in side.values)
    is_all = section in state.whole_modules or (section == _WHOLE_FILE_SECTION and state.sections == (section,))
    return "" if is_all and not is_named else prefix


def _rename_sections(
    old_settings: Settings, new_settings: Settings, section_pairs: Mapping[str, str]
) -> tuple[Settings, Settings]:
    """Rename the sections in the old settings to the names of their partners in the new checkpoint.

    A section has the same name on both sides: keys that lead to a section are not settings.
    """
    new_prefixes = {f"{old}.": f"{new}." for old, new in section_pairs.items() if old and new}
    before, after = _build_renaming(new_prefixes), _build_renaming({new: new for new in new_prefixes.values()})
    names = [new + key[len(old) :] for key in old_settings.values for old, new in [before(key)]]
    if len(set(names)) < len(names):  # the name exists: report removed and added settings, so that nothing is lost
        return old_settings, new_settings
    return rename(old_settings, before), rename(new_settings, after)


def _build_renaming(new_prefixes: Mapping[str, str]) -> Callable[[str], tuple[str, str]]:
    """Build a function that returns the old and the new prefix of a key's innermost section."""
    inner_first = sorted(new_prefixes, key=len, reverse=True)

    def renaming(key: str) -> tuple[str, str]:
        old = next((old for old in inner_first if key.startswith(old)), "")
        return old, new_prefixes.get(old, "")

    return renaming


def _format_keys(state: ModelState, other: ModelState) -> frozenset[str]:
    """Return the keys that only the format of `state` can record, not the format of `other`."""
    traits = state.traits
    keys = traits.own_settings - other.traits.own_settings
    if traits.drops_tied_names and not other.traits.drops_tied_names:
        keys |= _list_dropped_names(state)
    if traits.settings_vocabulary and traits.settings_vocabulary != other.traits.settings_vocabulary:
        keys |= state.metadata.values.keys()
    if traits.key_setting and traits.key_setting != other.traits.key_setting:
        keys |= frozenset(key for key in state.metadata.values if key.split(".")[-1] == traits.key_setting)
    companions = tuple(f"{name}." for name in state.metadata.companion_names)
    if companions and not other.metadata.companion_names:
        keys |= frozenset(key for key in state.metadata.values if key.startswith(companions))
    return keys


def list_format_keys(state: ModelState) -> frozenset[str]:
    """Return the keys of settings about the file format, not the model: `format`, `total_size`, dropped tied names."""
    traits = state.traits
    if traits.settings_describe_program:
        return frozenset(state.metadata.values)
    return traits.own_settings | _list_dropped_names(state) if traits.drops_tied_names else traits.own_settings


def _list_dropped_names(state: ModelState) -> frozenset[str]:
    """Return the tied names that the file does not store: keys of settings whose values are the stored names."""
    names = {tensor.fqn for tensor in state.tensors}
    return frozenset(key for key, value in state.metadata.values.items() if key in names and value in names)


def select_section_settings(state: ModelState, section: str | None) -> Settings:
    """Return the settings of a section, with paths relative to it, or all settings if `section` is None."""
    return _select_section(state, section, state)[0]


def _is_same(before: Scalar, after: Scalar) -> bool:
    if isinstance(before, bool) is not isinstance(after, bool):
        return False
    if type(before) is float and type(after) is str:
        return _is_huge(after, before)
    if type(after) is float and type(before) is str:
        return _is_huge(before, after)
    return before == after or (before != before and after != after)


def _is_huge(text: str, number: float) -> bool:
    """Return True if `text` is an integer of at least 2**63 (in absolute value) that equals the float `number`."""
    return 2.0**63 <= abs(number) < float("inf") and bool(_HUGE_INTEGER.fullmatch(text)) and int(text) == number


def _is_text_and_number(text: Scalar, value: Scalar) -> bool:
    return _is_number_and_text(value, text)


def _is_number_and_text(value: Scalar, text: Scalar) -> bool:
    """Return True if `value` equals the string `text` from safetensors, which stores settings only as strings."""
    is_spelled_alike = str(value) == str(text) and not str(value).startswith("'")
    return formats.describe_text(str(text)) == value or is_spelled_alike


def describe_setting_change(change: ScalarChange) -> str:
    """Return a change as one line: `epoch: 3 → 4`."""
    word = f"{change.status.value}: " if change.status in (Status.ADDED, Status.REMOVED) else ""
    return f"{change.key}: {word}{format_values(change)}"


def format_values(change: ScalarChange, longest: int = sys.maxsize) -> str:
    """Format a change of a setting: `3 → 4`, or the added or removed value as JSON."""
    sides = [_format_json(change.before, longest)] if change.status is not Status.ADDED else []
    sides += [_format_json(change.after, longest)] if change.status is not Status.REMOVED else []
    return " → ".join(sides)


def _format_json(value: Scalar, longest: int) -> str:
    import json

    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


# --- versions of modules ----------------------------------------------------------------------------------------------


def compare_versions(before: ModelState, after: ModelState, section_pairs: Mapping[str, str]) -> Iterator[ScalarChange]:
    """Yield module versions in `_metadata` that differ. `section_pairs` maps old to new sections.

    An older version makes torch convert or rename tensors on load.
    """
    state_dicts_after = {state_dict.section: state_dict for state_dict in after.state_dicts}
    for state_dict in before.state_dicts:
        counterpart = state_dicts_after.get(section_pairs.get(state_dict.section, state_dict.section))
        if counterpart is not None and state_dict.metadata and counterpart.metadata:
            prefix = "_metadata" if len(after.sections) < 2 else f"{counterpart.section}._metadata"
            for path, local in state_dict.metadata.items():
                for change in _compare_module(local, counterpart.metadata.get(path, local)):
                    yield replace(change, key=".".join(filter(None, (prefix, path, change.key))))


def _compare_module(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[ScalarChange]:
    """Yield the differing entries of a module's metadata. A dict is compared as JSON text."""
    import json

    before, after = (
        {name: json.dumps(value) if isinstance(value, dict) else value for name, value in side.items()}
        for side in (old, new)
    )
    for name in dict.fromkeys((*before, *after)):
        if name not in before or name not in after or before[name] != after[name]:
            yield _build_change(name, before, after)
