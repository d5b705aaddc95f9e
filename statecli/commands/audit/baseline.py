"""The baseline: findings that were accepted on a day, each with its reason, so that an audit fails for new ones alone.

A finding is known by its rule, target, section and tensor, by what else it is about (`os.system`), and by its content:
the digest of what was judged, or else the message. So no other payload passes under the name of an accepted one. The
file has a finding a line, sorted, and no times. It names targets from its own folder; once read, they are named as from
here.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Iterable, Iterator, Sequence

import msgspec
from msgspec.structs import replace

from statecli.commands.audit import config
from statecli.commands.audit.result import Audit
from statecli.commands.lock.lock_file import read_document
from statecli.core.errors import MalformedError
from statecli.core.finding import Finding
from statecli.core.json_text import encode_json
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import Oddity
from statecli.rules import RULES, run_notes
from statecli.storage import files
from statecli.targets.location import is_in, named, path_of, unnamed
from statecli.targets.outcome import Accepted, Status, Target

SCHEMA = "statecli.baseline/2"
#: The schema of files that accept findings by name, whatever their content.
BY_NAME = "statecli.baseline/1"
#: The rule of findings that say nothing of the target, and are not to be lived with.
BUG = run_notes.INTERNAL_ERROR.name


class Entry(msgspec.Struct, frozen=True, omit_defaults=True):
    """One finding that is accepted. Where `content` is there, `message` is for the reader of the file alone."""

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
    findings: tuple[Entry, ...]


_Key = tuple[str, str, str | None, str | None, str | None, str | None]


def _key(finding: Finding, name: str) -> _Key:
    """`name` is that of its target, which many have."""
    about = finding.about if isinstance(finding.about, str) else None
    # A digest is "" where there are too many bytes for one: they may be any, and nothing accepts them.
    content = (finding.content or None) if isinstance(finding.content, str) else _message(finding)
    return name, finding.rule, finding.section, finding.fqn, about, content


def _message(finding: Finding) -> str:
    """Return the message without the target, which is typed in many ways."""
    return finding.message.removeprefix(f"{finding.target}: ")


def _key_of(entry: Entry) -> _Key:
    content = entry.message if entry.content is None else entry.content
    return entry.target, entry.rule, entry.section, entry.fqn, entry.about, content


def _entry(finding: Finding, name: str, reason: str) -> Entry:
    about, content = (part if isinstance(part, str) else None for part in (finding.about, finding.content))
    message = _message(finding)
    return Entry(name, finding.rule, finding.section, finding.fqn, reason, about, message, content)


def read(path: str) -> Baseline:
    """The file. Raises `UnreadableError` where there is none, `MalformedError` for what is no baseline."""
    found = read_document(path, "the baseline")
    if found.get("schema") == BY_NAME:
        again = "delete it and write it again: --write-baseline FILE --reason TEXT"
        raise MalformedError(f"{path}: accepts findings by name, whatever their content ({BY_NAME}); {again}")
    if found.get("schema") != SCHEMA:
        raise MalformedError(f"{path}: is no baseline that this version reads: its schema is {found.get('schema')!r}")
    try:
        listed = msgspec.convert(found, Baseline)
    except msgspec.ValidationError as why:
        raise MalformedError(f"{path}: is no baseline: {why}; write it again") from why
    rules = [rule.name for rule in RULES]
    for one in listed.findings:
        if one.rule not in rules:
            near = config.near(one.rule, rules)
            what = f"{one.rule!r} of {one.target}, and there is no such rule"
            raise MalformedError(f"{path}: accepts {what}{near or '; drop the entry'}")
        if not one.reason.strip():
            raise MalformedError(f"{path}: accepts {one.rule} of {one.target} without a reason; say why, it is shown")
    return _renamed(listed, lambda target: unnamed(target, files.get_folder(path)))


def _renamed(baseline: Baseline, name: Callable[[str], str]) -> Baseline:
    names = {target: name(target) for target in {one.target for one in baseline.findings}}
    entries = (replace(one, target=names[one.target]) for one in baseline.findings)
    return replace(baseline, findings=tuple(sorted(entries, key=_order)))


def joined(paths: Iterable[str | None]) -> Baseline | None:
    """The entries of those files that are given, the first reason for each; None where none is."""
    entries: dict[_Key, Entry] = {}
    given = [path for path in paths if path is not None]
    for path in given:
        for entry in read(path).findings:
            entries.setdefault(_key_of(entry), entry)
    return Baseline(SCHEMA, tuple(entries.values())) if given else None


def older(path: str | None) -> str | None:
    """The file that is to be written, where there is one already: its reasons are kept."""
    return path if path is not None and os.path.lexists(path) else None


def accepting(found: Audit, baseline: Baseline, *, whole: bool) -> Audit:
    """The audit with what the baseline accepts set apart, and a note for each entry that nothing needs any more.

    `whole`: no filter hid anything, so that what was not found is not there.
    """
    reasons = {_key_of(entry): entry.reason for entry in baseline.findings}
    return replace(found, targets=tuple(_accepting(one, reasons, whole) for one in found.targets))


def _accepting(target: Target, reasons: dict[_Key, str], whole: bool) -> Target:
    name = named(target.target)
    keyed = [(one, _key(one, name)) for one in target.findings]
    accepted = [Accepted(one, reasons[key]) for one, key in keyed if _is_in(key, reasons)]
    left = tuple(one for one, key in keyed if not _is_in(key, reasons))
    met = {_key(one.finding, name) for one in (*accepted, *target.accepted)}
    looked = _looked_for(target, whole)
    remaining = {key[:5] for one, key in keyed if not _is_in(key, reasons)}
    notes = [_note(key, remaining) for key in reasons if key[0] == name and key[1] in looked and key not in met]
    kept = [note for note in target.notes if note.kind is not OddityKind.BASELINE_FIXED]
    return replace(target, findings=left, accepted=(*target.accepted, *accepted), notes=(*kept, *notes))


def gone(baseline: Baseline, targets: Sequence[str]) -> list[Entry]:
    """The entries of files that are no longer there, in the folders of `targets`, of which an audit tells."""
    folders = [one for one in targets if files.is_folder(one)]
    missing = {target for target in {one.target for one in baseline.findings} if _is_gone(target, folders)}
    return [one for one in baseline.findings if one.target in missing]


def _is_gone(target: str, folders: Sequence[str]) -> bool:
    path = path_of(target)
    if not path or files.exists(path):
        return False
    return any(is_in(path, folder) for folder in folders)


def _is_in(key: _Key, known: Container[_Key]) -> bool:
    return key[1] != BUG and key[5] is not None and key in known


def _looked_for(target: Target, whole: bool) -> frozenset[str]:
    """The rules of which nothing more is to be found in the target than was."""
    return frozenset(target.ran if whole and target.status is Status.AUDITED else ())


def _note(key: _Key, left: Container[tuple[str | None, ...]]) -> Oddity:
    """Return the note of an entry that accepts nothing; `left` are the findings that remain, without their content."""
    _, rule, _, fqn, about, content = key
    why = "it is fixed, drop it from there"
    if (fqn or about) and key[:5] in left:
        why = "its content has changed, review it and write the baseline again"
    return Oddity(
        OddityKind.BASELINE_FIXED.value, f"the baseline accepts {rule} of {fqn or about or content}: {why}", fqn
    )


def made(found: Audit, old: Baseline | None, reason: str, *, whole: bool, targets: Sequence[str] = ()) -> Baseline:
    """What is found now, for this reason unless `old` has one, and of `old` what was not looked for this time.

    `targets` are those that were asked for: what is gone from their folders drops out.
    """
    known = {_key_of(entry): entry for entry in old.findings} if old else {}
    now: dict[_Key, Entry] = {}
    looked: dict[str, frozenset[str]] = {}
    for target in found.targets:
        name = named(target.target)
        looked[name] = _looked_for(target, whole)
        new = {_key(one, name): _entry(one, name, reason) for one in target.findings}
        now |= {key: entry for key, entry in new.items() if _is_in(key, new)}
        now |= {key: known[key] for one in target.accepted if _is_in(key := _key(one.finding, name), known)}
    entries = [known.get(key) or entry for key, entry in now.items()]
    missing = {_key_of(entry) for entry in gone(old, targets)} if old else set()
    for key, entry in known.items():
        if key not in now and key not in missing and key[1] not in looked.get(key[0], ()):
            entries.append(entry)
    return Baseline(SCHEMA, tuple(sorted(entries, key=_order)))


def _order(entry: Entry) -> list[tuple[bool, str]]:
    return [(part is not None, part or "") for part in _key_of(entry)]


def written(baseline: Baseline, folder: str = ".") -> Iterator[bytes]:
    """The file that is to lie in `folder`, piece by piece."""
    baseline = _renamed(baseline, lambda target: named(target, folder))
    yield b'{"schema": %b, "findings": [' % encode_json(baseline.schema)
    for n, entry in enumerate(baseline.findings):
        yield b"%b\n%b" % (b"," if n else b"", encode_json(entry))
    yield b"\n]}\n"


def fixed(found: Audit) -> list[Finding]:
    """The notes of entries that nothing needs, as they are told."""
    return [
        run_notes.BASELINE_FIXED.finding(f"{target.target}: {note.message}", target=target.target, fqn=note.fqn)
        for target in found.targets
        for note in target.notes
        if note.kind is OddityKind.BASELINE_FIXED
    ]
