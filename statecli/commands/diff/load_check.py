"""Compare a class with a checkpoint, in either order: report the entries that `load_state_dict` refuses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from msgspec.structs import replace

from statecli import live
from statecli.commands.diff.pairing import Match, MatchedBy, NotedMatches, list_names
from statecli.commands.diff.result import Broken, Field
from statecli.commands.diff.rules import LOAD_REFUSED
from statecli.core import model_kinds
from statecli.core.errors import ModelError, NothingMatched, UsageError
from statecli.core.finding import Finding, Wording
from statecli.core.load_rules import MISSING_ENTRY, SHAPE_MISMATCH, UNEXPECTED_ENTRY
from statecli.core.model_state import REGISTERED_KINDS, ModelState, Oddity
from statecli.core.oddity_kind import OddityKind
from statecli.core.parameter_or_buffer import MODEL_KINDS, list_model_sections, select_loaded_sections
from statecli.core.rule import Rule
from statecli.core.units import plural
from statecli.core.wrapper_prefix import PrefixedName, report_prefixes
from statecli.live.load_state_dict_result import Entries, LoadReport

if TYPE_CHECKING:
    from statecli.live.built_model import BuiltModel


class NotedState(msgspec.Struct, frozen=True):
    """State without the tensors that are not compared, and a note on these tensors."""

    state: ModelState
    notes: list[Oddity]


class NotedStates(msgspec.Struct, frozen=True):
    """Both states without the sections that are not compared, and notes on these sections."""

    before: ModelState
    after: ModelState
    notes: list[Oddity]


def select_expected(state: ModelState) -> NotedState:
    """Return the state of a class or pickled module without the tensors that are not in its state_dict.

    Left out are non-persistent buffers and unregistered tensors.
    """
    expected_tensors = tuple(tensor for tensor in state.tensors if tensor.is_in_state_dict)
    left_out = len(state.tensors) - len(expected_tensors)
    if not left_out:
        return NotedState(state, [])
    message = f"statecli did not compare {plural(left_out, 'tensor')} of {state.target} that are not in state_dict()"
    return NotedState(replace(state, tensors=expected_tensors), [Oddity("not-expected", message)])


def select_model(state: ModelState, model: ModelState) -> NotedState:
    """Reduce a checkpoint to the model section that `select_loaded_sections` chooses.

    Raises NothingMatched if the checkpoint has no model, UsageError if the checkpoint has several candidates.
    """
    sections = list_model_sections(state)
    if not sections:
        raise NothingMatched(
            f"{state.target}: contains no tensors of a model, so {model.target} cannot load the checkpoint"
        )
    loadable_sections = select_loaded_sections(sections)
    if len(loadable_sections) > 1:
        names = ", ".join(f"{state.target}#{section}" for section in sections[:4])
        raise UsageError(f"{state.target}: contains {len(sections)} models; choose one of these targets: {names}")
    section = loadable_sections[0]
    others = [other for other in state.sections if other != section]
    if not others:
        return NotedState(state, [])
    tensors = tuple(tensor for tensor in state.tensors if tensor.section == section)
    message = (
        f"statecli did not compare {', '.join(others)} of {state.target}, because {model.target} loads only {section}"
    )
    selected = replace(state, sections=(section,), tensors=tensors)
    return NotedState(selected, [Oddity(OddityKind.SECTIONS_LEFT_OUT.value, message)])


def pair_as_loaded(matches: list[Match], model: ModelState, built_model: BuiltModel | None) -> NotedMatches:
    """Pair the entries of a checkpoint with the names under which transformers loads them, and add a note.

    Entries that transformers merges or splits stay unchanged: the notes of `check_load` report them.
    """
    if built_model is None or built_model.spec.config is None:
        return NotedMatches(matches, [])
    model_rows = {id(tensor) for tensor in model.tensors}
    swapped = any(id(match.before) in model_rows for match in matches)
    rows = {row.fqn: row for match in matches if (row := match.after if swapped else match.before)}
    registered = {row.fqn: row for match in matches if (row := match.before if swapped else match.after)}
    loads = live.hf_auto.map_loaded_names(built_model.module, rows)
    unique_names = _select_one_to_one(loads, rows).items()
    pairs = [(rows[name], registered[partner]) for name, partner in unique_names if partner in registered]
    paired_ids = {id(row) for pair in pairs for row in pair}
    remaining_matches = [_remove_sides(match, paired_ids) for match in matches]
    pairs_as_loaded = [Match(partner, row) if swapped else Match(row, partner) for row, partner in pairs]
    notes = [
        Oddity(
            "renamed-on-loading",
            f"{model.target} renames {len(loads)} keys on load, such as {name} to {others[0]}",
        )
        for name, others in islice(loads.items(), 1)
    ]
    kept_matches = [match for match in remaining_matches if match.before or match.after]
    return NotedMatches(kept_matches + pairs_as_loaded, notes)


def _select_one_to_one(loads: Mapping[str, tuple[str, ...]], names: Iterable[str]) -> dict[str, str]:
    """Map each entry that is loaded under a single name to this name. Omit names shared by several entries."""
    becomes = [loads.get(name, (name,)) for name in names]
    count = Counter(target for targets in becomes for target in targets)
    return {name: targets[0] for name, targets in loads.items() if len(targets) == 1 and count[targets[0]] == 1}


def _remove_sides(match: Match, paired_ids: set[int]) -> Match:
    if id(match.before) not in paired_ids and id(match.after) not in paired_ids:
        return match
    before, after = (None if id(side) in paired_ids else side for side in (match.before, match.after))
    return Match(before, after)


def match_folders(before: ModelState, after: ModelState) -> NotedStates:
    """Reduce a training folder to its models if the other side has only models. Return two states, and notes."""
    selected_states = _select_models(before, after), _select_models(after, before)
    joined_states = _join_sections(*selected_states), _join_sections(*reversed(selected_states))
    notes = [
        _describe_joined_sections(*sides)
        for sides in zip(selected_states, joined_states, reversed(selected_states), strict=True)
        if sides[0] is not sides[1]
    ]
    for state, selected_state in zip((before, after), selected_states, strict=True):
        left_out = [section for section in state.sections if section not in selected_state.sections]
        if left_out:
            message = (
                f"statecli did not compare {', '.join(left_out)} of {state.target}, because the other target contains "
                "only a model"
            )
            notes.append(Oddity(OddityKind.SECTIONS_LEFT_OUT.value, message))
    return NotedStates(*joined_states, notes)


def _select_models(state: ModelState, other: ModelState) -> ModelState:
    """Reduce a training folder to its models if `other` has only models; otherwise return it unchanged."""
    if not state.traits.is_training_folder or any(tensor.kind not in MODEL_KINDS for tensor in other.tensors):
        return state
    of_model = [tensor for tensor in state.tensors if tensor.kind in MODEL_KINDS]
    if not of_model:
        return state
    model_sections = {tensor.section for tensor in of_model}
    return replace(
        state,
        tensors=tuple(of_model),
        sections=tuple(section for section in state.sections if section in model_sections),
    )


#: Name of Flax's collection of trained parameters; `batch_stats` and other collections are next to it.
FLAX_PARAMS = "params"


def _join_sections(state: ModelState, other: ModelState) -> ModelState:
    """Join the sections of a Flax model into a single section, named like the only model section of `other`."""
    if not state.traits.has_collections:
        return state
    own_sections, others = list_model_sections(state), list_model_sections(other)
    if len(own_sections) < 2 or FLAX_PARAMS not in own_sections or len(others) != 1 or others[0] in own_sections:
        return state
    other_names = {tensor.fqn for tensor in other.tensors}
    keeps_sections = any(f"{tensor.section}.{tensor.fqn}" in other_names for tensor in state.tensors)
    tensors = [
        replace(tensor, section=others[0], fqn=f"{tensor.section}.{tensor.fqn}" if keeps_sections else tensor.fqn)
        if tensor.section in own_sections
        else tensor
        for tensor in state.tensors
    ]
    if len({tensor.key for tensor in tensors}) < len(tensors):
        return state
    remaining_sections = (section for section in state.sections if section not in own_sections)
    return replace(state, tensors=tuple(tensors), sections=(others[0], *remaining_sections))


def _describe_joined_sections(state: ModelState, joined_state: ModelState, other: ModelState) -> Oddity:
    section_names = ", ".join(section for section in state.sections if section not in joined_state.sections)
    section = f"section {joined_state.sections[0]!r} of {other.target}"
    message = f"{section} is compared with these sections of {state.target}: {section_names}"
    return Oddity(OddityKind.SECTIONS_PAIRED.value, message)


class LoadCheck(msgspec.Struct, frozen=True):
    """Result of a load: errors of a strict load, notes on entries that hooks handle, and inconclusive checks."""

    findings: tuple[Finding, ...] = ()
    notes: tuple[Oddity, ...] = ()
    broken_pairs: tuple[Broken, ...] = ()


def check_load(
    matches: Sequence[Match],
    before: ModelState,
    after: ModelState,
    model: ModelState,
    built_model: BuiltModel,
    ignore: Sequence[Field],
) -> LoadCheck:
    """Call `load_state_dict` of the class with the checkpoint, and return the entries that it refuses.

    `matches` are all matches, unfiltered, because a strict load sees the whole checkpoint. `model` is the class's whole
    state, `built_model` its module, `before` and `after` the compared states.
    """
    load = _Load(matches, before, after, model)
    try:
        answer = live.load_state_dict.load(built_model, load.build_entries())
    except ModelError as error:
        message = f"{load.checkpoint.target}: cannot call load_state_dict: {error}"
        return LoadCheck(tuple(load.list_wrapper_findings()), (), (Broken("(load_state_dict)", load.section, message),))
    return LoadCheck(tuple(load.iter_findings(answer, ignore)), tuple(load.iter_notes(answer)))


class _Load:
    """A checkpoint prepared for a load: its entries have the names that the class uses."""

    def __init__(self, matches: Sequence[Match], before: ModelState, after: ModelState, model: ModelState) -> None:
        swapped = before.traits.is_class
        self.model, self.checkpoint = model, after if swapped else before
        self.pairs = [(m.after, m.before) if swapped else (m.before, m.after) for m in matches]
        self.prefixed = list(_list_prefixed_names(matches, swapped=swapped))
        self.ties = {
            registered.fqn
            for match, (_, registered) in zip(matches, self.pairs, strict=True)
            if match.matched_by is MatchedBy.TIE and registered
        }
        self.section = next(row.section for row, _ in self.pairs if row)
        self.state_dict = self.checkpoint.find_state_dict(self.section)
        self.registered = {row.fqn: row for row in model.tensors if row.kind in REGISTERED_KINDS}
        self._stored_names: dict[str, str] = {}

    def build_entries(self) -> Entries:
        """Return the entries under the names of the class. Strip prefixes, map modules, and add tied names."""
        paths = _map_module_paths([(row.fqn, registered.fqn) for row, registered in self.pairs if row and registered])
        others = tuple(_map_name(name, paths) for name in self.state_dict.others)
        below = tuple(f"{name}{mark}" for name in self.state_dict.holders for mark in "[.")
        tensors = {registered.fqn: row for row, registered in self.pairs if row and registered}
        for row, registered in self.pairs:
            if row is None or registered is not None or (below and row.fqn.startswith(below)):
                continue  # a tensor inside a value is not an entry of the state_dict
            name = _map_name(row.fqn, paths)
            name = row.fqn if name in tensors else name
            tensors[name] = row
            self._stored_names[name] = row.fqn
        self._stored_names.update(zip(others, self.state_dict.others, strict=True))
        self.entry_names = dict.fromkeys((*tensors, *others))
        self.tensors = tensors
        return Entries(tensors, others, self._rename_metadata(paths), self.state_dict.is_module)

    def _rename_metadata(self, paths: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]] | None:
        metadata = self.state_dict.metadata
        if metadata is None or not paths:
            return metadata
        # If the prefix `module.` is stripped, `module` has the metadata of the root, and "" the metadata of the
        # wrapper.
        ordered_items = sorted(metadata.items(), key=lambda item: item[0] in paths)
        return {paths.get(path, _map_name(path, paths)): local for path, local in ordered_items}

    def list_wrapper_findings(self) -> Iterator[Finding]:
        """Yield the finding about stripped prefixes: statecli strips them, but `load_state_dict` does not."""
        if not self.prefixed:
            return
        differing = {item.name for item in self.prefixed}
        yield report_prefixes(
            self.prefixed,
            [row.fqn for row, _ in self.pairs if row],
            target=self.checkpoint.target,
            state_dict=self.state_dict,
            kept_names=[row.fqn for row, registered in self.pairs if row and registered and row.fqn not in differing],
            model=self.model.target,
        )

    # --- objections of the class ------------------------------------------------------------------------------------

    def iter_findings(self, answer: LoadReport, ignore: Sequence[Field]) -> Iterator[Finding]:
        """Yield the errors of `load_state_dict` of the class, as findings of `classify_by_model` where possible."""
        # An entry that replaces a dropped tied name would be reported twice.
        mismatched = () if Field.SHAPE in ignore else _exclude(answer.mismatched, self.ties)
        reported = (
            *map(self._report_missing, answer.missing),
            *map(self._report_unexpected, answer.unexpected),
            *map(self._report_mismatch, mismatched),
        )
        objections = {(item.rule, item.fqn or ""): item for item in reported}
        yield from self.list_wrapper_findings()
        for item in self._classify_by_names() if objections else ():
            if objections.pop((item.rule, item.fqn or ""), None) is not None:
                yield item
        yield from objections.values()
        yield from (self._build_finding(LOAD_REFUSED, name, message) for name, message in answer.refused)

    def _classify_by_names(self) -> list[Finding]:
        """Return the findings that follow from names and shapes, in the order of the checkpoint."""
        rows = [replace(row, fqn=registered.fqn) if registered else row for row, registered in self.pairs if row]
        state = replace(self.checkpoint, tensors=tuple(rows), sections=(self.section,))
        return model_kinds.classify_by_model(state, self.model)[1]

    def _build_finding(self, rule: Rule, name: str | None, text: str, owner: str | None = None) -> Finding:
        registered = self.registered.get(name or "")
        origin = (registered.origin if registered else None) or UNSET
        wording = Wording(text, name or None, owner)
        return rule.finding(wording, target=self.checkpoint.target, fqn=name, section=self.section, origin=origin)

    def _report_missing(self, name: str) -> Finding:
        owner = self.model.target
        text = f"missing: {owner} requires this key, but {self.checkpoint.target} does not contain this key"
        return self._build_finding(MISSING_ENTRY, name, text, owner)

    def _report_unexpected(self, name: str) -> Finding:
        return self._build_finding(
            UNEXPECTED_ENTRY,
            self._stored_names.get(name, name),
            f"unexpected: {self.model.target} does not have this key",
        )

    def _report_mismatch(self, name: str) -> Finding:
        row = self.tensors.get(name)
        shape = "" if row is None or row.shape is None else f" {list(row.shape)}"
        message = (
            f"{self.checkpoint.target} has a tensor whose shape{shape} differs from the shape that "
            f"{self.model.target} expects"
        )
        return self._build_finding(SHAPE_MISMATCH, name, message)

    # --- entries that the class loads in its own way ----------------------------------------------------------------

    def iter_notes(self, answer: LoadReport) -> Iterator[Oddity]:
        """Yield notes on entries that the class loads although their names or shapes do not fit."""
        target, model = self.checkpoint.target, self.model.target
        if filled := self._list_filled(answer):
            message = (
                f"{target} lacks {list_names(filled)}, but {model} loads the checkpoint: {_CODE} fills in or "
                "renames such keys"
            )
            yield Oddity("filled-in", message)
        if taken_over_names := self._list_taken_over(answer):
            message = (
                f"{target} has {list_names(taken_over_names)}, which {model} does not register, but {model} loads the "
                f"checkpoint: {_CODE} renames or drops such keys"
            )
            yield Oddity("taken-over", message)
        if adapted := self._list_adapted(answer):
            message = f"{model} loads {list_names(adapted)} although the shapes differ: {_CODE} adapts the shapes"
            yield Oddity("shape-adapted", message)
        yield from self._describe_transformers(answer)
        if answer.extra:
            yield Oddity(
                "extra-state",
                f"statecli did not test whether set_extra_state accepts {list_names(answer.extra)}",
            )

    def _describe_transformers(self, answer: LoadReport) -> Iterator[Oddity]:
        target, model = self.checkpoint.target, self.model.target
        if answer.unsaved:
            message = f"{target} lacks {list_names(answer.unsaved)}, which {model} does not save or does not require"
            yield Oddity(
                OddityKind.NOT_SAVED_BY_CLASS.value,
                f"{message}: from_pretrained loads the checkpoint, but a strict load_state_dict fails",
            )
        if answer.unread:
            names = [self._stored_names.get(name, name) for name in answer.unread]
            yield Oddity(
                OddityKind.NOT_READ_BY_CLASS.value,
                f"from_pretrained of {model} ignores {list_names(names)}, but a strict load_state_dict fails",
            )
        if answer.converted:
            names = [self._stored_names.get(name, name) for name in answer.converted]
            message = f"transformers converts these names of {target} on load: {list_names(names)}"
            yield Oddity(
                OddityKind.CONVERTED_ON_LOAD.value,
                f"{message}; statecli checked only that the entries and their tensors in {model} have equally many "
                "elements",
            )

    def _list_filled(self, answer: LoadReport) -> list[str]:
        expected = [
            name for name, row in self.registered.items() if row.is_in_state_dict and name not in self.entry_names
        ]
        converted = (name for names in answer.converted.values() for name in names)
        return _exclude(expected, (*answer.missing, *answer.unsaved, *converted))

    def _list_taken_over(self, answer: LoadReport) -> list[str]:
        names = [name for name in self.entry_names if name not in self.registered and name not in answer.extra]
        reported = (*answer.unexpected, *answer.unread, *answer.converted)
        return [self._stored_names.get(name, name) for name in _exclude(names, reported)]

    def _list_adapted(self, answer: LoadReport) -> list[str]:
        refused_names = [name for name, _ in answer.refused if name]
        return _exclude(filter(self._is_of_another_shape, self.tensors), (*answer.mismatched, *refused_names))

    def _is_of_another_shape(self, name: str) -> bool:
        registered, tensor = self.registered.get(name), self.tensors[name]
        return (
            registered is not None and None not in (registered.shape, tensor.shape) and registered.shape != tensor.shape
        )


def _list_prefixed_names(matches: Iterable[Match], *, swapped: bool) -> Iterator[PrefixedName]:
    """Yield the pairs of names that differ only in a wrapper's prefix. If `swapped`, the class is the old side."""
    for match in matches:
        if match.stripped and match.before and match.after:
            names, stripped = (match.before.fqn, match.after.fqn), match.stripped
            name, registered = reversed(names) if swapped else names
            yield PrefixedName(name, registered, *(reversed(stripped) if swapped else stripped))


_CODE = "the loading code of the class"


def _exclude(names: Iterable[str], others: Iterable[str]) -> list[str]:
    excluded = set(others)
    return [name for name in names if name not in excluded]


def _map_module_paths(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Map module paths of the checkpoint to module paths of the class. Return {} if all names are equal."""
    paths: dict[str, str] = {}
    if all(stored_name == registered for stored_name, registered in pairs):
        return paths
    for stored_name, registered in pairs:
        path, other_path = stored_name.rpartition(".")[0], registered.rpartition(".")[0]
        while path not in paths:
            paths[path] = other_path
            (path, _, last), (other_path, _, other_last) = path.rpartition("."), other_path.rpartition(".")
            if not last or last != other_last:
                break
    return paths


def _map_name(name: str, paths: Mapping[str, str]) -> str:
    """Convert a tensor's name in the checkpoint to its name in the class. The innermost parent in `paths` decides."""
    above, suffix = name, ""
    while paths and above:
        above, _, last = above.rpartition(".")
        suffix = f"{last}.{suffix}" if suffix else last
        if above in paths:
            return f"{paths[above]}.{suffix}" if paths[above] else suffix
    return name
