"""The result of `statecli fix`: edits with the checks before and after, and the new text of each file."""

from __future__ import annotations

import msgspec

from statecli.commands.verify.result import Name, Verdict
from statecli.core.model_state import ModelState


class ProofChange(msgspec.Struct, frozen=True):
    """Verdict of a check for the tensors of an edit, before the edit and with the edit."""

    proof: Name
    before: Verdict
    after: Verdict


class Edit(msgspec.Struct, frozen=True):
    """A defect and its edit.

    Attributes:
        rule: Rule of the defect, as in `verify`.
        file: The file to edit, as typed or relative to the current folder; "" if unknown.
        line: Line of the defect in the file before any edit; 0 if unknown.
        names: Names of the tensors.
        before: The lines replaced by the edit, with surrounding lines that change.
        after: The lines of the edit.
        proofs: The checks repaired by the edit. Without an edit: the failed checks.
        kept: True if the edit passes `verify`.
        reason: Why there is no edit; "" for a kept edit.
        advice: The remedy printed by `verify`; "" for a kept edit.
        new_keys: Names that only the state_dict of the edited class has.
        message: The problem in one line, as in `verify`.
    """

    rule: str
    file: str
    line: int
    names: tuple[str, ...]
    before: str = ""
    after: str = ""
    proofs: tuple[ProofChange, ...] = ()
    kept: bool = False
    reason: str = ""
    advice: str = ""
    new_keys: tuple[str, ...] = ()
    message: str = ""


class ChangedFile(msgspec.Struct, frozen=True):
    """A file with kept edits: the path as shown, the absolute path, and the bytes before and after."""

    name: str
    path: str
    before: bytes
    after: bytes


class Fixes(msgspec.Struct, frozen=True):
    """Result of `fix`.

    Attributes:
        state: Every tensor of the model before the edits.
        edits: A record for each defect, in the order of the lines.
        files: The files with kept edits.
        written: True if the files are to be written.
        not_checked: Checks that did not run, because there is no input.
        inconclusive: A line for each reason why checks ran without a result.
        notes: Facts about the files, a line each.
    """

    state: ModelState
    edits: tuple[Edit, ...] = ()
    files: tuple[ChangedFile, ...] = ()
    written: bool = False
    not_checked: tuple[str, ...] = ()
    inconclusive: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
