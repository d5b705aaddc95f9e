"""The baseline: accepted findings, each with its reason, so that an audit fails only for new findings.

A finding is identified by its rule, target, section and tensor, by `about` (`os.system`), and by its content. The
content is a digest of the checked bytes, or else the message. So a new payload is not accepted under the name of a
known payload. Some tensors are not registered by a class, or are separated from a tied tensor by a move. The baseline
identifies such a tensor (or its unregistered module) only by rule and name, because each command reports a different
consequence of the mistake.

The file has a sorted line for each finding, without times. Targets in the file are relative to its folder; once read,
they are relative to the current folder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from statecli.commands.audit import config
from statecli.commands.audit.result import Audit
from statecli.commands.lock.lock_file import read_document
from statecli.core import move_rules, registration_rules
from statecli.core.errors import MalformedError
from statecli.core.finding import Finding
from statecli.core.json_text import encode_json
from statecli.core.model_state import Oddity
from statecli.core.oddity_kind import OddityKind
from statecli.core.rule import list_present_names
from statecli.rules import audit_run
from statecli.rules.dictionary import DICTIONARY
from statecli.storage import files
from statecli.targets.location import find_path, is_in_folder, make_relative_name, resolve_name
from statecli.targets.target_result import Accepted, TargetResult, TargetStatus

SCHEMA = "statecli.baseline/2"
_WRITE_AGAIN = "write the baseline again with --write-baseline FILE --reason TEXT"
#: Rule of findings about a bug in statecli. A baseline never accepts such a finding.
INTERNAL_ERROR_RULE = audit_run.INTERNAL_ERROR.name
#: Rules of findings that are identified only by rule and name.
_RULES_BY_NAME = frozenset(
    rule.name for rule in (*registration_rules.RULES, move_rules.STALE_VIEW, move_rules.UNTIED_BY_MOVE)
)


class BaselineEntry(msgspec.Struct, frozen=True, omit_defaults=True):
    """An accepted finding, or an accepted tensor or module for rules about registration and moves.

    If `content` is set, `message` is only for the reader of the file. The entry of a tensor or module has neither.
    """

    target: str
    rule: str
    section: str | None
    fqn: str | None
    reason: str
    about: str | None = None
    message: str | None = None
    content: str | None = None


class Baseline(msgspec.Struct, frozen=True):
    """A baseline file."""

    schema: str
    findings: tuple[BaselineEntry, ...]


#: Target, rule, section, tensor or module, `about` and content. The content is "" for rules in `_RULES_BY_NAME`.
_Key = tuple[str, str, str | None, str | None, str | None, str | None]


def _map_modules(target: TargetResult) -> dict[str, str]:
    """Return the unregistered module of each of its tensors."""
    return {row.fqn: row.within for row in target.unregistered if row.within is not None}


def _make_key(finding: Finding, name: str, modules: dict[str, str]) -> _Key:
    """Return a key that identifies the finding. `name` is the name of the finding's target."""
    if finding.rule in _RULES_BY_NAME and finding.fqn is not None:
        is_module = finding.rule == registration_rules.UNREGISTERED_MODULE.name
        return name, finding.rule, None, modules.get(finding.fqn, finding.fqn) if is_module else finding.fqn, None, ""
    about = finding.about if isinstance(finding.about, str) else None
    # An empty digest means too many bytes: the content is unknown, and nothing accepts the finding.
    content = (finding.content or None) if isinstance(finding.content, str) else _strip_target(finding)
    return name, finding.rule, finding.section, finding.fqn, about, content


def _strip_target(finding: Finding) -> str:
    """Return the finding's message without the target's name, because users can type this name in different ways."""
    return finding.message.removeprefix(f"{finding.target}: ")


def _make_entry_key(entry: BaselineEntry) -> _Key:
    if entry.rule in _RULES_BY_NAME and entry.fqn is not None:
        return entry.target, entry.rule, None, entry.fqn, None, ""
    content = entry.message if entry.content is None else entry.content
    return entry.target, entry.rule, entry.section, entry.fqn, entry.about, content


def _build_entry(finding: Finding, key: _Key, reason: str) -> BaselineEntry:
    target, rule, section, fqn, about, _ = key
    if rule in _RULES_BY_NAME and fqn is not None:
        return BaselineEntry(target, rule, None, fqn, reason)
    content = finding.content if isinstance(finding.content, str) else None
    return BaselineEntry(target, rule, section, fqn, reason, about, _strip_target(finding), content)


def read_baseline(path: str, plugin_rules: Collection[str] | None = ()) -> Baseline:
    """Read a baseline file. Raises UnreadableError if the file is missing, MalformedError if it is not a baseline.

    `plugin_rules` are rules besides statecli's rules; None for a command without plugins. In such a command, an entry
    of an unknown rule accepts nothing, because the entry may be for an audit.
    """
    document = read_document(path, "the baseline")
    if document.get("schema") != SCHEMA:
        raise MalformedError(
            f"{path}: the baseline has the schema {document.get('schema')!r}, but this version of statecli reads "
            f"{SCHEMA!r}; delete the file, then {_WRITE_AGAIN}"
        )
    try:
        baseline = msgspec.convert(document, Baseline)
    except msgspec.ValidationError as error:
        raise MalformedError(f"{path}: is not a valid baseline: {error}; {_WRITE_AGAIN}") from error
    known_rules = {*DICTIONARY, *(plugin_rules or ())}
    baseline = replace(baseline, findings=tuple(_use_present_name(entry, known_rules) for entry in baseline.findings))
    for entry in baseline.findings:
        if plugin_rules is not None and entry.rule not in known_rules:
            suggestion = config.suggest_names(entry.rule, [*DICTIONARY, *plugin_rules])
            entry_text = f"{entry.rule!r} of {entry.target}, but this rule does not exist"
            advice = suggestion or "; remove the entry, or use --plugin to load the plugin that defines the rule"
            raise MalformedError(f"{path}: accepts {entry_text}{advice}")
        if not entry.reason.strip():
            raise MalformedError(
                f"{path}: accepts {entry.rule} of {entry.target} without a reason; add a reason to this entry of the "
                "baseline"
            )
    return _rename_targets(baseline, lambda target: resolve_name(target, files.get_folder(path)))


def _use_present_name(entry: BaselineEntry, known_rules: Collection[str]) -> BaselineEntry:
    """Replace the former name of a rule by the present name, unless `known_rules` contains the former name."""
    present = [] if entry.rule in known_rules else list_present_names(entry.rule)
    return replace(entry, rule=present[0]) if present else entry


def _rename_targets(baseline: Baseline, rename: Callable[[str], str]) -> Baseline:
    names = {target: rename(target) for target in {entry.target for entry in baseline.findings}}
    entries = (replace(entry, target=names[entry.target]) for entry in baseline.findings)
    return replace(baseline, findings=tuple(sorted(entries, key=_make_sort_key)))


def join_baselines(
    paths: Iterable[str | None], left_out: Collection[str] = (), plugin_rules: Collection[str] | None = ()
) -> Baseline | None:
    """Join the entries of several baseline files. The first reason for an entry counts. Return None without files.

    Entries of the rules `left_out` are not returned. `plugin_rules`: see `read_baseline`.
    """
    entries: dict[_Key, BaselineEntry] = {}
    given_paths = [path for path in paths if path is not None]
    for path in given_paths:
        for entry in read_baseline(path, plugin_rules).findings:
            entries.setdefault(_make_entry_key(entry), entry)
    kept_entries = tuple(entry for entry in entries.values() if entry.rule not in left_out)
    return Baseline(SCHEMA, kept_entries) if given_paths else None


def find_existing_file(path: str | None) -> str | None:
    """Return `path` if the file exists, else None. A new baseline keeps the reasons of an existing file."""
    return path if path is not None and os.path.lexists(path) else None


def accept_findings(audit: Audit, baseline: Baseline, *, unfiltered: bool) -> Audit:
    """Move findings to `accepted` if the baseline accepts them. Add a note for each baseline entry without a finding.

    `unfiltered`: no filter hid a tensor, so a missing finding is fixed.
    """
    reasons = {_make_entry_key(entry): entry.reason for entry in baseline.findings}
    return replace(audit, targets=tuple(_accept_in_target(target, reasons, unfiltered) for target in audit.targets))


def _accept_in_target(target: TargetResult, reasons: dict[_Key, str], unfiltered: bool) -> TargetResult:
    name, modules = make_relative_name(target.target), _map_modules(target)
    accepted_findings: list[Accepted] = []
    remaining: list[Finding] = []
    for finding in target.findings:
        key = _make_key(finding, name, modules)
        if _is_accepted(key, reasons):
            accepted_findings.append(Accepted(finding, reasons[key]))
        else:
            remaining.append(finding)
    all_accepted = (*target.accepted, *accepted_findings)
    current_keys = {_make_key(entry.finding, name, modules) for entry in all_accepted}
    remaining_keys = {_make_key(finding, name, modules)[:5] for finding in remaining}
    complete_rules = _list_complete_rules(target, unfiltered)
    notes = [
        _build_note(key, remaining_keys)
        for key in reasons
        if key[0] == name and key[1] in complete_rules and key not in current_keys
    ]
    other_notes = [note for note in target.notes if note.kind is not OddityKind.BASELINE_FIXED]
    return replace(target, findings=tuple(remaining), accepted=all_accepted, notes=(*other_notes, *notes))


def find_missing_entries(baseline: Baseline, targets: Sequence[str]) -> list[BaselineEntry]:
    """Return the baseline entries of files that no longer exist in the folders among `targets`."""
    folders = [target for target in targets if files.is_folder(target)]
    missing = {target for target in {entry.target for entry in baseline.findings} if _is_missing(target, folders)}
    return [entry for entry in baseline.findings if entry.target in missing]


def _is_missing(target: str, folders: Sequence[str]) -> bool:
    path = find_path(target)
    if not path or files.exists(path):
        return False
    return any(is_in_folder(path, folder) for folder in folders)


def _is_accepted(key: _Key, accepted_keys: Container[_Key]) -> bool:
    """Return whether the baseline accepts the finding. It cannot accept a bug in a rule: the rule checked nothing."""
    return key[1] != INTERNAL_ERROR_RULE and key[5] is not None and key in accepted_keys


def _list_complete_rules(target: TargetResult, unfiltered: bool) -> frozenset[str]:
    """Return the rules that checked the whole target. Only the baseline entries of these rules can be outdated."""
    return frozenset(target.ran if unfiltered and target.status is TargetStatus.AUDITED else ())


def _build_note(key: _Key, remaining: Container[tuple[str | None, ...]]) -> Oddity:
    """Return a note on a baseline entry that matches no finding. `remaining`: the findings' keys without content."""
    _, rule, _, fqn, about, content = key
    remedy = "but the target no longer has this finding; remove the entry from the baseline"
    if (fqn or about) and key[:5] in remaining:
        remedy = f"but the content of this finding has changed; review the finding, then {_WRITE_AGAIN}"
    return Oddity(
        OddityKind.BASELINE_FIXED.value, f"the baseline accepts {rule} of {fqn or about or content}, {remedy}", fqn
    )


def build_baseline(
    audit: Audit, old: Baseline | None, reason: str, *, unfiltered: bool, targets: Sequence[str] = ()
) -> Baseline:
    """Return a baseline of the current findings, and of the entries in `old` that this run did not check.

    An entry in `old` keeps its reason; new entries get `reason`. Entries of files gone from the folders in `targets`
    are dropped.
    """
    old_entries = {_make_entry_key(entry): entry for entry in old.findings} if old else {}
    entries: dict[_Key, BaselineEntry] = {}
    complete_rules: dict[str, frozenset[str]] = {}
    for target in audit.targets:
        name, modules = make_relative_name(target.target), _map_modules(target)
        complete_rules[name] = _list_complete_rules(target, unfiltered)
        for finding in target.findings:
            key = _make_key(finding, name, modules)
            if _is_accepted(key, (key,)):
                entries[key] = old_entries.get(key) or _build_entry(finding, key, reason)
        for accepted_finding in target.accepted:
            key = _make_key(accepted_finding.finding, name, modules)
            if _is_accepted(key, old_entries):
                entries[key] = old_entries[key]
    missing = {_make_entry_key(entry) for entry in find_missing_entries(old, targets)} if old else set()
    for key, entry in old_entries.items():
        if key not in entries and key not in missing and key[1] not in complete_rules.get(key[0], ()):
            entries[key] = entry
    return Baseline(SCHEMA, tuple(sorted(entries.values(), key=_make_sort_key)))


def _make_sort_key(entry: BaselineEntry) -> list[tuple[bool, str]]:
    return [(part is not None, part or "") for part in _make_entry_key(entry)]


def encode_baseline(baseline: Baseline, path: str) -> Iterator[bytes]:
    """Encode the baseline as JSON, with targets relative to the folder of `path`; yield the bytes in pieces."""
    folder = os.path.dirname(path) or "."
    baseline = _rename_targets(baseline, lambda target: make_relative_name(target, folder))
    yield b'{"schema": %b, "findings": [' % encode_json(baseline.schema)
    for n, entry in enumerate(baseline.findings):
        yield b"%b\n%b" % (b"," if n else b"", encode_json(entry))
    yield b"\n]}\n"


def report_fixed_entries(audit: Audit) -> list[Finding]:
    """Return a finding for each note about a baseline entry that is not needed any more."""
    return [
        audit_run.BASELINE_FIXED.finding(f"{target.target}: {note.message}", target=target.target, fqn=note.fqn)
        for target in audit.targets
        for note in target.notes
        if note.kind is OddityKind.BASELINE_FIXED
    ]
