"""Types and functions to import in a plugin of `statecli audit`, a module with your own rules.

    from collections.abc import Iterator

    from statecli.plugin import Issue, Severity, Subject, needs_file, rule

    @rule(Severity.ERROR, needs_file)
    def acme_missing_owner(subject: Subject) -> Iterator[Issue]:
        \"\"\"The metadata of a checkpoint does not name an owner.

        Why: nobody answers questions about the checkpoint.

        Example: `__metadata__` without `owner`.

        Fix: save the checkpoint with `metadata={"owner": "vision"}`.
        \"\"\"
        if "owner" not in subject.full_state.metadata.values:
            yield Issue("owner: missing from the metadata")

    RULES = (acme_missing_owner,)

A rule is a function from a Subject to Issues. It reads no files, because a Subject has all that statecli has read. The
functions `needs_…` declare needs of a rule. The rule is skipped on a Subject that lacks them, and a run with `--select`
does not pass if the rule never ran. A need can also be your own function: it returns why the rule cannot run, or None.

Names of this module are stable: a later version of statecli does not remove them, or the fields of these types, without
a note under "Changed" in the changelog.
"""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.model_state import Kind, ModelState, Place, TensorInfo
from statecli.rules.audit_rule import AuditRule, Issue, Need, rule
from statecli.rules.audit_subject import (
    Subject,
    needs_class_or_reference,
    needs_file,
    needs_lock,
    needs_module,
    needs_values,
)

__all__ = [
    "AuditRule",
    "Issue",
    "Kind",
    "ModelState",
    "Need",
    "Place",
    "Severity",
    "Subject",
    "TensorInfo",
    "needs_class_or_reference",
    "needs_file",
    "needs_lock",
    "needs_module",
    "needs_values",
    "rule",
]
