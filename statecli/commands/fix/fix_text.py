"""The fix text that statecli prints for an unregistered tensor, split into its comments and its code."""

from __future__ import annotations

import msgspec

from statecli.live.attribute_site import AFTER_LAST_ASSIGNMENT, AFTER_SUPER_INIT, AT_END_OF_INIT

#: Reason for a fix that has no code.
BY_HAND_REASON = "statecli fix cannot make this change; make the change by hand"
#: Beginnings of the comments of a fix: instructions that `apply_code` follows, and explanations.
_KNOWN_COMMENTS = (
    AT_END_OF_INIT.strip(),
    "# at the end of __post_init__:",
    AFTER_LAST_ASSIGNMENT.strip(),
    AFTER_SUPER_INIT.strip(),
    "# delete ",
    "# first delete the class attribute",
    "# and read each tensor as getattr",
    "# and iterate over the items()",
    "# the keys must be strings without dots",
    "# and write ",
    "# and import torch.nn",
    "# older checkpoints",
    "# to save the value too",
    "# model.load_state_dict(",
)


class PrintedFix(msgspec.Struct, frozen=True):
    """A printed fix, split into its comments and its code; `code` is "" if the fix has only words."""

    comments: tuple[str, ...]
    code: str

    def find_comment(self, start: str) -> str | None:
        """Return the first comment that starts with `start`, or None."""
        return next((line for line in self.comments if line.startswith(start)), None)

    def is_editable(self) -> bool:
        """Return True if the fix has code and `apply_code` can follow all of its comments."""
        return bool(self.code) and all(comment.startswith(_KNOWN_COMMENTS) for comment in self.comments)


def read_fix(text: str) -> PrintedFix:
    """Return the parts of a printed fix."""
    lines = text.split("\n")
    comments = tuple(line for line in lines if line.startswith("#"))
    return PrintedFix(comments, "\n".join(line for line in lines if not line.startswith("#")))
