"""Compare the versions of modules in `_metadata`: an older version makes torch convert or rename tensors on load."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from statecli.commands.diff.result import ScalarChange, Status
from statecli.core.model_state import ModelState, StateDict

_METADATA = "_metadata"


def compare_versions(before: ModelState, after: ModelState, paired: Mapping[str, str]) -> Iterator[ScalarChange]:
    """Yield the differing versions of modules recorded by both sides; `paired` maps sections of before to after."""
    theirs = {state_dict.section: state_dict for state_dict in after.state_dicts}
    for state_dict in before.state_dicts:
        other = theirs.get(paired.get(state_dict.section, state_dict.section))
        if other is not None and state_dict.metadata and other.metadata:
            prefix = _name_metadata(after, other)
            for path, local in state_dict.metadata.items():
                for change in _compare_module(local, other.metadata.get(path, local)):
                    yield replace(change, key=".".join(filter(None, (prefix, path, change.key))))


def _name_metadata(state: ModelState, state_dict: StateDict) -> str:
    return _METADATA if len(state.sections) < 2 else f"{state_dict.section}.{_METADATA}"


def _compare_module(old: Mapping[str, Any], new: Mapping[str, Any]) -> Iterator[ScalarChange]:
    """Yield the differences between two modules; a dict of versions as text."""
    import json

    for name in dict.fromkeys((*old, *new)):
        before, after = (
            json.dumps(value) if isinstance(value, dict) else value for value in (old.get(name), new.get(name))
        )
        status = Status.ADDED if name not in old else Status.REMOVED if name not in new else Status.CHANGED
        if status is not Status.CHANGED or before != after:
            yield ScalarChange(name, status, before, after)
