"""Select tensors by name and kind: the options `--include`, `--exclude` and `--kind`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

import msgspec
from msgspec.structs import replace

from statecli.core.errors import FilteredOut, option
from statecli.core.state import Kind, ModelState, TensorInfo


class Selection(msgspec.Struct, frozen=True):
    """Options that select tensors.

    Attributes:
        include: Globs; one must match the tensor's name. () selects every name.
        exclude: Globs; none may match.
        kind: Kinds to select. () selects every kind.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude or self.kind)

    def name_options(self) -> str:
        """Return the options as the user typed them, for the message of a UsageError."""
        globs = [("-i", glob) for glob in self.include] + [("-x", glob) for glob in self.exclude]
        options = [option(flag, glob, quoted=True) for flag, glob in globs]
        return " ".join(options + [option("--kind", kind.value) for kind in self.kind])

    def selects_name(self, names: tuple[str, ...]) -> bool:
        """Return True if the globs select a tensor or setting with these names; one matching name is enough."""
        return (not self.include or matches_any(names, self.include)) and not matches_any(names, self.exclude)

    def selects(self, tensor: TensorInfo, *, by_section: bool) -> bool:
        """Return True if the tensor's kind and name are selected. `by_section` as in `glob_names`."""
        if self.kind and tensor.kind not in self.kind:
            return False
        return self.selects_name(glob_names(tensor.fqn, tensor.section, by_section=by_section))


def select(state: ModelState, selection: Selection, target: str) -> ModelState:
    """Return the state with the selected tensors and their sections; the same object if nothing is filtered.

    Raises FilteredOut, which names `target`, if no tensor is selected.
    """
    if not selection:
        return state
    by_section = len(state.sections) > 1
    tensors = tuple(tensor for tensor in state.tensors if selection.selects(tensor, by_section=by_section))
    if not tensors:
        raise FilteredOut(f"{target}: {_describe_nothing_selected(selection, len(state.tensors))}")
    sections = {tensor.section for tensor in tensors}
    return replace(state, tensors=tensors, sections=tuple(name for name in state.sections if name in sections))


def glob_names(fqn: str, section: str | None, *, by_section: bool) -> tuple[str, ...]:
    """Return the names that a glob may match: the FQN and, if `by_section`, the FQN behind its section.

    Callers set `by_section` only for several sections, because `-x 'model.*'` must not exclude the `lm_head` of a
    state_dict whose only section is called `model`.
    """
    return (fqn, f"{section}.{fqn}") if by_section and section else (fqn,)


def matches_any(names: tuple[str, ...], globs: Sequence[str]) -> bool:
    """Return True if a glob matches a whole name. Brackets also match themselves, because names contain them."""
    return any(_matches(name, glob) for glob in globs for name in names)


def _matches(name: str, glob: str) -> bool:
    return fnmatchcase(name, glob) or ("[" in glob and fnmatchcase(name, glob.replace("[", "[[]")))


def _describe_nothing_selected(selection: Selection, count: int) -> str:
    wider = [f"*{glob.strip('*')}*" for glob in selection.include[:1] if glob != f"*{glob.strip('*')}*"]
    hint = f"; a glob matches the whole name: try {wider[0]!r}" if wider else ""
    return f"none of its {count} tensors matches {selection.name_options()}{hint}"
