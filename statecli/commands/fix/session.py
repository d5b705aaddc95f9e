"""A session of `fix`: verify, edit a copy, verify again, and keep the edits that pass."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from msgspec.structs import replace

from statecli.commands.fix import git_status, other_classes
from statecli.commands.fix.defects import Defect, DefectCause, find_defects
from statecli.commands.fix.edit_check import TensorNames, compare_proofs, judge
from statecli.commands.fix.line_diff import list_blocks
from statecli.commands.fix.measure import Measurement, measure
from statecli.commands.fix.project_copy import Project
from statecli.commands.fix.propose import propose_edits
from statecli.commands.fix.result import ChangedFile, Edit, Fixes, ProofChange
from statecli.commands.fix.source import NoEdit
from statecli.commands.verify import run as verify_run
from statecli.commands.verify.result import Check, Verdict
from statecli.core.errors import ModelError, UnreadableError, UsageError
from statecli.core.progress import report_stage
from statecli.live.installed_code import is_installed_file

#: Largest number of rounds: each round keeps or refuses an edit.
MAX_ROUNDS = 200


def repair(project: Project, request: verify_run.Request, *, write: bool) -> Fixes:
    """Repair the defects of the model, and return all edits. Raises StateError if the model cannot be built."""
    data = _read_file(project, project.file)
    session = Session(project, request, measure(project, request, {project.file: data}))
    session.originals[project.file] = data
    session.repair_all_together()
    session.repair_one_by_one()
    return session.build_result(write=write)


class Session:
    """Edits of one model. `contents` maps the absolute path of each edited file to its new bytes."""

    def __init__(self, project: Project, request: verify_run.Request, first: Measurement) -> None:
        self.project = project
        self.request = request
        self.first = self.current = first
        self.contents: dict[str, bytes] = {}
        self.originals: dict[str, bytes] = {}
        self.edits: dict[object, Edit] = {}
        self.repaired: list[str] = []

    def find_defects(self) -> list[Defect]:
        """Return the defects whose edits were neither kept nor refused so far, ordered by line."""
        defects = find_defects(self.current.verification)
        return [defect for defect in defects if defect.key not in self.edits]

    def repair_all_together(self) -> None:
        """Keep the first edit of every defect if all these edits pass together: a single verification is enough."""
        contents: dict[str, bytes] = dict(self.contents)
        edited: list[tuple[Defect, bytes, bytes]] = []
        # Edit the last line first, so that the line numbers of other defects stay correct.
        for defect in reversed(self.find_defects()):
            try:
                path = self._locate(defect)
                before = self._read_content(path, contents)
                after = next(propose_edits(defect, before, path))
            except (NoEdit, StopIteration):
                continue
            contents[path] = after
            edited.append((defect, before, after))
        if len(edited) > 1:
            self._try(edited, contents)

    def repair_one_by_one(self) -> None:
        """Try the edits of each remaining defect."""
        for _ in range(MAX_ROUNDS):
            defects = self.find_defects()
            if not defects:
                return
            self._repair(defects[0])

    def _repair(self, defect: Defect) -> None:
        reason = ""
        try:
            path = self._locate(defect)
            before = self._read_content(path, self.contents)
            for after in propose_edits(defect, before, path):
                refusal = self._try([(defect, before, after)], {**self.contents, path: after})
                if not refusal:
                    return
                reason = reason or refusal
        except NoEdit as refusal:
            reason = str(refusal)
        self.edits[defect.key] = self._build_edit(defect, reason=reason or "statecli has no fix")

    def _try(self, edited: Sequence[tuple[Defect, bytes, bytes]], contents: dict[str, bytes]) -> str:
        """Keep the edits and return "" if they pass. Otherwise return the reason."""
        report_stage(f"checking the fix for {', '.join(defect.rule for defect, _, _ in edited[:3])}")
        for _, before_bytes, after_bytes in edited:
            if conflict := other_classes.find_conflict(before_bytes, after_bytes):
                return conflict
        try:
            after = measure(self.project, self.request, contents, self.first)
        except (ModelError, UsageError) as error:
            return f"the fixed class cannot be checked: {error}"
        defects = [defect for defect, _, _ in edited]
        judgement = judge(defects, self.current, after, self.first, self.repaired)
        reason = judgement.reason or self._find_unbuildable(contents)
        if reason:
            return reason
        for defect, before_bytes, after_bytes in edited:
            proofs = compare_proofs(defect, self.current, after)
            edit = self._build_edit(defect)
            before_text, after_text = _compare_lines(before_bytes, after_bytes)
            names = TensorNames(defect.names)
            keys = tuple(key for key in judgement.new_keys if key in names)
            self.edits[defect.key] = replace(
                edit, before=before_text, after=after_text, proofs=proofs, kept=True, new_keys=keys
            )
            self.repaired += defect.names
        self.contents, self.current = contents, after
        remaining = {defect.key for defect in find_defects(after.verification)}
        self.edits = {key: edit for key, edit in self.edits.items() if edit.kept or key in remaining}
        return ""

    def _find_unbuildable(self, contents: dict[str, bytes]) -> str:
        """Describe a class that cannot be built with the edits, and its error. Return "" if no class fails."""
        classes = {
            path: other_classes.list_related_classes(before, data)
            for path, data in contents.items()
            if (before := self._read_content(path, self.contents)) != data
        }
        return other_classes.find_unbuildable(self.project, self.contents, contents, classes)

    def _build_edit(self, defect: Defect, reason: str = "") -> Edit:
        path = self.current.copy.locate(defect.file) if defect.file else ""
        proofs = tuple(ProofChange(proof, Verdict.FAILED, Verdict.FAILED) for proof in defect.proofs)
        names = defect.names
        file = self.project.format_path(path) if path else ""
        line = self._find_original_line(path, defect.line)
        hide = self.current.copy.hide
        advice = hide(defect.fix) if reason and not self._depends_on_input(defect) else ""
        message = hide(defect.message)
        return Edit(defect.rule, file, line, names, proofs=proofs, reason=hide(reason), advice=advice, message=message)

    def _depends_on_input(self, defect: Defect) -> bool:
        """Return True if cached values come from the input or are random, so forward cannot create them again."""
        is_cache = defect.cause is DefectCause.CACHED_BY_FORWARD
        return is_cache and not self.current.input_dependent.isdisjoint(defect.names)

    def _find_original_line(self, path: str, line: int) -> int:
        """Convert a line number in the edited file to the line number in the user's file."""
        new = self.contents.get(path)
        if new is None or not line:
            return line
        old_lines, new_lines = self._read_content(path, {}).splitlines(), new.splitlines()
        for block in list_blocks(old_lines, new_lines):
            if block.new_start <= line - 1 < block.new_stop:
                return block.start + (line - block.new_start if block.kind == "equal" else 1)
        return line

    def _locate(self, defect: Defect) -> str:
        """Return the path of the file to edit. Raises NoEdit if the defect or the file cannot be edited."""
        if self._depends_on_input(defect):
            raise NoEdit(
                f"another input gives {defect.names[0]} other values, so creating the tensor again would change the "
                "results; register the tensor in __init__ with its final shape"
            )
        if not defect.file or not defect.line:
            raise NoEdit("statecli does not know which line to change")
        path = self.current.copy.locate(defect.file)
        if is_installed_file(path):
            raise NoEdit("the line is in an installed package: report the problem to the authors of the package")
        if not self.project.contains(path) or not os.path.isfile(path):
            raise NoEdit(f"{defect.file} is neither in the current folder nor in the folder of the model")
        return path

    def _read_content(self, path: str, contents: dict[str, bytes]) -> bytes:
        if path in contents:
            return contents[path]
        if path not in self.originals:
            self.originals[path] = _read_file(self.project, path)
        return self.originals[path]

    def _check_unchanged(self) -> None:
        """Raise UnreadableError for a file changed since its first read."""
        for path in self.contents:
            if _read_file(self.project, path) != self.originals[path]:
                raise UnreadableError(
                    f"{self.project.format_path(path)}: the file changed while statecli checked the fixes; run the "
                    "command again"
                )

    def build_result(self, *, write: bool) -> Fixes:
        """Return the edits, and the files with kept edits. Raises UnreadableError for a file that has changed."""
        self._check_unchanged()
        files = tuple(
            ChangedFile(self.project.format_path(path), path, self._read_content(path, {}), data)
            for path, data in sorted(self.contents.items())
        )
        checks = self.current.verification.checks  # a kept edit may give a check its first result
        skipped = tuple(check.check.value for check in checks if check.verdict is Verdict.SKIPPED)
        hide = self.current.copy.hide
        notes = (*_describe_unchecked(checks, Verdict.SKIPPED), *(git_status.describe_changes(file) for file in files))
        edits = sorted(self.edits.values(), key=lambda edit: (edit.file, edit.line))
        return Fixes(
            self.first.verification.state,
            tuple(edits),
            files,
            write and bool(files),
            skipped,
            tuple(map(hide, _describe_unchecked(checks, Verdict.INCONCLUSIVE))),
            tuple(map(hide, filter(None, notes))),
        )


def _describe_unchecked(checks: Sequence[Check], verdict: Verdict) -> Iterator[str]:
    """Yield a line for each reason why checks have no result. `fix` cannot repair the defects that they would find."""
    proofs: dict[str | None, list[str]] = {}
    for check in checks:
        if check.verdict is verdict:
            proofs.setdefault(check.reason, []).append(check.check.value)
    for reason, names in proofs.items():
        yield f"{verdict.value}: {', '.join(names)}" + (f" ({reason})" if reason else "")


def _read_file(project: Project, path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise UnreadableError(f"{project.format_path(path)}: cannot be read: {error.strerror}") from error


def _compare_lines(before: bytes, after: bytes) -> tuple[str, str]:
    """Return the text from the first changed line to the last, before and after the edits."""
    old, new = (data.decode("utf-8", "replace").splitlines() for data in (before, after))
    changed_blocks = [block for block in list_blocks(old, new) if block.kind != "equal"]
    if not changed_blocks:
        return "", ""
    first, last = changed_blocks[0], changed_blocks[-1]
    return "\n".join(old[first.start : last.stop]), "\n".join(new[first.new_start : last.new_stop])
