"""A class against a checkpoint: what `load_state_dict` would find there, whichever of the two comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec.structs import replace

from statecli import live
from statecli.commands.diff.pairing import Match, Way, counted
from statecli.commands.diff.result import Broken, Field
from statecli.commands.diff.rules import LOAD_REFUSED
from statecli.core import kinds, model_kinds
from statecli.core.errors import ModelError, NothingMatched, UsageError
from statecli.core.finding import Finding, Severity
from statecli.core.load_rules import MISSING_ENTRY, SHAPE_MISMATCH, UNEXPECTED_ENTRY, WRAPPER_PREFIX
from statecli.core.oddity_kind import OddityKind
from statecli.core.rule import Rule
from statecli.core.state import Kind, ModelState, Oddity, StateDict, TensorInfo
from statecli.live import Answer, Entries, hf_auto

if TYPE_CHECKING:
    from statecli.live.build import Built


def is_class(state: ModelState) -> bool:
    """Whether the state is that of a live model class."""
    return state.traits.is_class


def expected(state: ModelState) -> tuple[ModelState, list[Oddity]]:
    """A class's or a pickled module's state without what no state_dict of it holds.

    That is its non-persistent buffers and its unregistered tensors.
    """
    kept = tuple(tensor for tensor in state.tensors if _is_expected(tensor))
    left_out = len(state.tensors) - len(kept)
    if not left_out:
        return state, []
    message = f"{counted(left_out)} of {state.target} are in none of its state_dicts, and not looked for"
    return replace(state, tensors=kept), [Oddity("not-expected", message)]


def _is_expected(tensor: TensorInfo) -> bool:
    return tensor.kind is not Kind.UNREGISTERED and tensor.persistent is not False and tensor.saved is not False


def of_model(state: ModelState, model: ModelState) -> tuple[ModelState, list[Oddity]]:
    """The one section of a checkpoint that a class could load, which is what `kinds.select_loaded_sections` says.

    Raises NothingMatched where it holds no model, UsageError where it holds several and that does not tell.
    """
    held = list(dict.fromkeys(tensor.section for tensor in state.tensors if tensor.kind in kinds.MODEL_KINDS))
    if not held:
        raise NothingMatched(f"{state.target}: holds no model's tensors that {model.target} could load")
    meant = kinds.select_loaded_sections(held)
    if len(meant) > 1:
        names = ", ".join(f"{state.target}#{section}" for section in held[:4])
        raise UsageError(f"{state.target}: holds {len(held)} models' states; name the one that is meant: {names}")
    section = meant[0]
    others = [other for other in state.sections if other != section]
    if not others:
        return state, []
    tensors = tuple(tensor for tensor in state.tensors if tensor.section == section)
    message = f"{', '.join(others)} of {state.target}: left out, {model.target} loads {section}"
    return replace(state, sections=(section,), tensors=tensors), [Oddity(OddityKind.SECTIONS_LEFT_OUT.value, message)]


def as_loaded(matches: list[Match], model: ModelState, built: Built | None) -> tuple[list[Match], list[Oddity]]:
    """The same, and a note; of a class given by a configuration, each name is paired with what it is loaded as.

    What transformers makes of several, or into several, stays as it is: the notes of `loaded` say it.
    """
    if built is None or not hf_auto.is_auto(built.spec):
        return matches, []
    known = {id(one) for one in model.tensors}
    swapped = any(id(match.before) in known for match in matches)
    rows = {row.fqn: row for match in matches if (row := match.after if swapped else match.before)}
    registered = {row.fqn: row for match in matches if (row := match.before if swapped else match.after)}
    loads = hf_auto.loaded_as(built.module, rows)
    single = _one_to_one(loads, rows).items()
    pairs = [(rows[name], registered[other]) for name, other in single if other in registered]
    taken = {id(row) for pair in pairs for row in pair}
    kept = [_without_sides(match, taken) for match in matches]
    found = [Match(one, row) if swapped else Match(row, one) for row, one in pairs]
    notes = [
        Oddity(
            "renamed-on-loading", f"{model.target} loads {len(loads)} entries under other names, {name} as {others[0]}"
        )
        for name, others in islice(loads.items(), 1)
    ]
    return [match for match in kept if match.before or match.after] + found, notes


def _one_to_one(loads: Mapping[str, tuple[str, ...]], names: Iterable[str]) -> dict[str, str]:
    """Those that become one name that no other becomes."""
    becomes = [loads.get(name, (name,)) for name in names]
    count = Counter(other for several in becomes for other in several)
    return {name: several[0] for name, several in loads.items() if len(several) == 1 and count[several[0]] == 1}


def _without_sides(match: Match, taken: set[int]) -> Match:
    """The match without what is paired otherwise."""
    if id(match.before) not in taken and id(match.after) not in taken:
        return match
    before, after = (None if id(side) in taken else side for side in (match.before, match.after))
    return Match(before, after)


def of_folders(before: ModelState, after: ModelState) -> tuple[tuple[ModelState, ModelState], list[Oddity]]:
    """Both; of a training's folder the models alone where the other side has nothing else, with a note of the rest."""
    both = _apart(before, after), _apart(after, before)
    joined = _together(*both), _together(*reversed(both))
    notes = [
        _told_together(*sides) for sides in zip(both, joined, reversed(both), strict=True) if sides[0] is not sides[1]
    ]
    for whole, kept in zip((before, after), both, strict=True):
        left = [section for section in whole.sections if section not in kept.sections]
        if left:
            message = f"{', '.join(left)} of {whole.target}: left out, for the other side holds a model alone"
            notes.append(Oddity(OddityKind.SECTIONS_LEFT_OUT.value, message))
    return joined, notes


def _apart(state: ModelState, other: ModelState) -> ModelState:
    """The folder's models; all of it where it is none, or the other side has more than models too."""
    of_model = [tensor for tensor in state.tensors if tensor.kind in kinds.MODEL_KINDS]
    if (
        not state.traits.is_training_folder
        or not of_model
        or any(tensor.kind not in kinds.MODEL_KINDS for tensor in other.tensors)
    ):
        return state
    held = {tensor.section for tensor in of_model}
    return replace(
        state, tensors=tuple(of_model), sections=tuple(section for section in state.sections if section in held)
    )


#: What Flax calls the collection that is trained; `batch_stats` and others lie beside it.
PARAMS = "params"


def _together(state: ModelState, other: ModelState) -> ModelState:
    """A model of Flax as one section, where the other side has one alone; by its collections' names where that has."""
    own, others = _models(state), _models(other)
    if not state.traits.has_collections or len(own) < 2 or PARAMS not in own or len(others) != 1 or others[0] in own:
        return state
    known = {tensor.fqn for tensor in other.tensors}
    named = any(f"{tensor.section}.{tensor.fqn}" in known for tensor in state.tensors)
    moved = [
        replace(one, section=others[0], fqn=f"{one.section}.{one.fqn}" if named else one.fqn)
        if one.section in own
        else one
        for one in state.tensors
    ]
    if len({(one.section, one.fqn) for one in moved}) < len(moved):
        return state
    rest = (section for section in state.sections if section not in own)
    return replace(state, tensors=tuple(moved), sections=(others[0], *rest))


def _models(state: ModelState) -> list[str]:
    return list(dict.fromkeys(tensor.section for tensor in state.tensors if tensor.kind in kinds.MODEL_KINDS))


def _told_together(state: ModelState, joined: ModelState, other: ModelState) -> Oddity:
    own = ", ".join(section for section in state.sections if section not in joined.sections)
    message = f"{own} of {state.target} are compared together with section {joined.sections[0]!r} of {other.target}"
    return Oddity(OddityKind.SECTIONS_PAIRED.value, message)


class Loaded(msgspec.Struct, frozen=True):
    """What must be said of a load: what a strict one objects to, what its hooks make good, and what cannot be told."""

    findings: tuple[Finding, ...] = ()
    notes: tuple[Oddity, ...] = ()
    broken: tuple[Broken, ...] = ()

    def only(self, wanted: Callable[[str], bool]) -> Loaded:
        """The same without the findings on names that are not wanted."""
        kept = tuple(one for one in self.findings if one.fqn is None or wanted(one.fqn))
        return replace(self, findings=kept)


def loaded(
    matches: Sequence[Match],
    before: ModelState,
    after: ModelState,
    model: ModelState,
    built: Built,
    ignore: Sequence[Field],
) -> Loaded:
    """What `load_state_dict` of the class says to the checkpoint, in the words of `model_kinds.classify_by_model`.

    `matches` are all of them, whatever the globs leave: a strict load sees the whole. `model` is the class's whole
    state, `built` its module, `before` and `after` what was compared.
    """
    load = _Load(matches, before, after, model)
    try:
        answer = live.load(built, load.entries())
    except ModelError as error:
        message = f"{load.checkpoint.target}: cannot tell what load_state_dict says to it: {error}"
        return Loaded(tuple(load.wrappers()), (), (Broken("(load_state_dict)", load.section, message),))
    return Loaded(tuple(load.findings(answer, ignore)), tuple(load.notes(answer)))


class _Load:
    """One checkpoint, under the names that the class has for it."""

    def __init__(self, matches: Sequence[Match], before: ModelState, after: ModelState, model: ModelState) -> None:
        swapped = is_class(before)
        self.model, self.checkpoint = model, after if swapped else before
        self.pairs = [(m.after, m.before) if swapped else (m.before, m.after) for m in matches]
        self.looked_through = Counter(_longer(m.stripped) for m in matches if m.stripped and m.before and m.after)
        self.ties = {known.fqn for m, (_, known) in zip(matches, self.pairs, strict=True) if m.way is Way.TIE and known}
        self.section = next(row.section for row, _ in self.pairs if row)
        held = (one for one in self.checkpoint.state_dicts if one.section == self.section)
        self.state_dict = next(held, StateDict(self.section))
        self.registered = {row.fqn: row for row in model.tensors if row.kind in (Kind.PARAMETER, Kind.BUFFER)}
        self._own: dict[str, str] = {}

    def entries(self) -> Entries:
        """The checkpoint as the class's state_dict: prefixes looked through, `--map` done, dropped ties restored."""
        paths = _paths([(row.fqn, known.fqn) for row, known in self.pairs if row and known])
        others = tuple(_moved(name, paths) for name in self.state_dict.others)
        below = tuple(f"{name}{mark}" for name in self.state_dict.holders for mark in "[.")
        tensors = {known.fqn: row for row, known in self.pairs if row and known}
        for row, known in self.pairs:
            if row is None or known is not None or (below and row.fqn.startswith(below)):
                continue  # what lies in a value is no entry of the state_dict
            name = _moved(row.fqn, paths)
            name = row.fqn if name in tensors else name
            tensors[name] = row
            self._own[name] = row.fqn
        self._own.update(zip(others, self.state_dict.others, strict=True))
        self.held = dict.fromkeys((*tensors, *others))
        self.tensors = tensors
        return Entries(tensors, others, self._metadata(paths), self.state_dict.is_module)

    def _metadata(self, paths: Mapping[str, str]) -> Mapping[str, Mapping[str, Any]] | None:
        recorded = self.state_dict.metadata
        if recorded is None or not paths:
            return recorded
        # `module` is the root's metadata where `module.` is looked through; "" is that of the wrapper.
        ordered = sorted(recorded.items(), key=lambda item: item[0] in paths)
        return {paths.get(path, _moved(path, paths)): local for path, local in ordered}

    def wrappers(self) -> Iterator[Finding]:
        """The prefixes that were looked through, which a load does not."""
        for prefix, count in self.looked_through.items():
            yield _wrapped(prefix, count, self.checkpoint, self.model)

    # --- what the class objects to ----------------------------------------------------------------------------------

    def findings(self, answer: Answer, ignore: Sequence[Field]) -> Iterator[Finding]:
        """The class's answer; in the order and the words of the names where these say the same."""
        # What was put in the place of a dropped tie is another entry, of which the same is said.
        mismatched = () if Field.SHAPE in ignore else _without(answer.mismatched, self.ties)
        objections = (
            *map(self._missing, answer.missing),
            *map(self._unexpected, answer.unexpected),
            *map(self._mismatch, mismatched),
        )
        said = {(one.rule, one.fqn or ""): one for one in objections}
        yield from self.wrappers()
        for one in self._by_names() if said else ():
            if said.pop((one.rule, one.fqn or ""), None) is not None:
                yield one
        yield from said.values()
        yield from (self._finding(LOAD_REFUSED, name, message) for name, message in answer.refused)

    def _by_names(self) -> list[Finding]:
        """What names and shapes say, in the order of the checkpoint, without asking the class."""
        rows = [replace(row, fqn=known.fqn) if known else row for row, known in self.pairs if row]
        state = replace(self.checkpoint, tensors=tuple(rows), sections=(self.section,))
        return model_kinds.classify_by_model(state, self.model)[1]

    def _finding(self, rule: Rule, name: str | None, message: str) -> Finding:
        about = f"{name}: " if name else ""
        return rule.finding(about + message, target=self.checkpoint.target, fqn=name, section=self.section)

    def _missing(self, name: str) -> Finding:
        message = f"missing: {self.model.target} asks for it, {self.checkpoint.target} lacks it"
        return self._finding(MISSING_ENTRY, name, message)

    def _unexpected(self, name: str) -> Finding:
        return self._finding(
            UNEXPECTED_ENTRY, self._own.get(name, name), f"unexpected: {self.model.target} takes no such entry"
        )

    def _mismatch(self, name: str) -> Finding:
        row = self.tensors.get(name)
        held = "" if row is None or row.shape is None else f" {list(row.shape)}"
        message = f"{self.checkpoint.target} holds{held or ' it in another shape'}, {self.model.target} takes another"
        return self._finding(SHAPE_MISMATCH, name, message)

    # --- what it makes good -----------------------------------------------------------------------------------------

    def notes(self, answer: Answer) -> Iterator[Oddity]:
        """Where the class loads what names and shapes alone would refuse."""
        target, model = self.checkpoint.target, self.model.target
        if filled := self._filled(answer):
            message = f"{target} lacks {_listed(filled)}, and {model} loads without: {_CODE} fills in or renames"
            yield Oddity("filled-in", message)
        if taken := self._taken(answer):
            message = f"{model} registers no {_listed(taken)}, and loads all the same: {_CODE} renames or drops"
            yield Oddity("taken-over", message)
        if adapted := self._adapted(answer):
            yield Oddity("shape-adapted", f"{model} loads {_listed(adapted)} of another shape: {_CODE} adapts it")
        yield from self._of_transformers(answer)
        if answer.extra:
            yield Oddity("extra-state", f"whether set_extra_state takes {_listed(answer.extra)} is not tried")

    def _of_transformers(self, answer: Answer) -> Iterator[Oddity]:
        target, model = self.checkpoint.target, self.model.target
        if answer.unsaved:
            what = f"{target} lacks {_listed(answer.unsaved)}, which {model} is neither to save nor to miss"
            yield Oddity(
                OddityKind.NOT_SAVED_BY_CLASS.value,
                f"{what}: from_pretrained loads without, a strict load_state_dict does not",
            )
        if answer.unread:
            held = [self._own.get(name, name) for name in answer.unread]
            yield Oddity(
                OddityKind.NOT_READ_BY_CLASS.value,
                f"{model} passes over {_listed(held)}: a strict load_state_dict does not",
            )
        if answer.converted:
            held = [self._own.get(name, name) for name in answer.converted]
            what = f"transformers converts these names of {target} on load: {_listed(held)}"
            yield Oddity(
                OddityKind.CONVERTED_ON_LOAD.value, f"{what}: as many elements as {model} has; more cannot be told"
            )

    def _filled(self, answer: Answer) -> list[str]:
        wanted = [name for name, row in self.registered.items() if _is_expected(row) and name not in self.held]
        made = (name for names in answer.converted.values() for name in names)
        return _without(wanted, (*answer.missing, *answer.unsaved, *made))

    def _taken(self, answer: Answer) -> list[str]:
        held = [name for name in self.held if name not in self.registered and name not in answer.extra]
        told = (*answer.unexpected, *answer.unread, *answer.converted)
        return [self._own.get(name, name) for name in _without(held, told)]

    def _adapted(self, answer: Answer) -> list[str]:
        refused = [name for name, _ in answer.refused if name]
        return _without(filter(self._is_of_another_shape, self.tensors), (*answer.mismatched, *refused))

    def _is_of_another_shape(self, name: str) -> bool:
        known, held = self.registered.get(name), self.tensors[name]
        return known is not None and None not in (known.shape, held.shape) and known.shape != held.shape


_CODE = "code that runs on loading"
#: Names that a note lists.
SHOWN = 3


def _without(names: Iterable[str], others: Iterable[str]) -> list[str]:
    known = set(others)
    return [name for name in names if name not in known]


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _paths(pairs: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Module path in the checkpoint -> in the class, by the tensors of both; empty where all names are the same."""
    paths: dict[str, str] = {}
    if all(own == known for own, known in pairs):
        return paths
    for own, known in pairs:
        one, two = own.rpartition(".")[0], known.rpartition(".")[0]
        while one not in paths:
            paths[one] = two
            (one, _, last), (two, _, other) = one.rpartition("."), two.rpartition(".")
            if not last or last != other:
                break
    return paths


def _moved(name: str, paths: Mapping[str, str]) -> str:
    """A name of the checkpoint as the class has it, by the nearest module above it whose path is known."""
    above, rest = name, ""
    while paths and above:
        above, _, last = above.rpartition(".")
        rest = f"{last}.{rest}" if rest else last
        if above in paths:
            return f"{paths[above]}.{rest}" if paths[above] else rest
    return name


def _longer(stripped: tuple[str, str]) -> str:
    return max(stripped, key=len)


def _wrapped(prefix: str, count: int, checkpoint: ModelState, model: ModelState) -> Finding:
    message = f"the names of {counted(count)} differ by {prefix!r} from those that {model.target} registers"
    help = f"rename them before load_state_dict, which matches names exactly: {prefix!r} is a wrapper's prefix"
    return WRAPPER_PREFIX.finding(message, target=checkpoint.target, help=help, severity=Severity.ERROR)
