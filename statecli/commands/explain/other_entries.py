"""Compare entries of a state_dict other than parameters and buffers: extra states, and values of a script."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from statecli import live
from statecli.commands.explain.recipe import Loader
from statecli.commands.explain.renaming import Step, apply_steps
from statecli.commands.explain.result import Cause, CauseEvidence
from statecli.commands.explain.source import ModelEntries
from statecli.core import quoting
from statecli.core.units import plural
from statecli.live.built_model import BuiltModel

#: Last component of the key of a module's extra state, as in torch.
EXTRA_STATE = "_extra_state"


class OtherEntries(msgspec.Struct, frozen=True):
    """Names of the file that the class does not have, new names of the other entries, and missing extra states."""

    unused: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()

    def list_causes(self, model: str) -> Iterator[CauseEvidence]:
        """Yield a cause for missing extra states, and a cause for unused entries."""
        for names, message in (
            (self.missing, f"the file lacks {plural(len(self.missing), 'extra state')} of {model}"),
            (self.unused, f"the file has {plural(len(self.unused), 'other value')} that {model} does not have"),
        ):
            if names:
                yield CauseEvidence(Cause.OTHER_PART, f"{message}: {quoting.names(names)}", len(names), names[0])

    def list_warnings(self) -> Iterator[str]:
        """Yield a warning if extra states are not loaded."""
        if self.missing:
            is_not = "is not" if len(self.missing) == 1 else "are not"
            yield f"{quoting.names(self.missing)} {is_not} loaded from the checkpoint, so the initial extra state stays"


def is_extra_state(name: str) -> bool:
    """Return True for the key of an extra state, whose value may be a tensor."""
    return name.rpartition(".")[2] == EXTRA_STATE


def list_other_names(entries: ModelEntries) -> list[str]:
    """Return the names of the entries other than parameters and buffers."""
    reads_only_tensors = entries.source is not None and entries.source.loader is Loader.DCP
    others = () if reads_only_tensors else entries.state_dict.others
    return [*others, *filter(is_extra_state, entries.names)]


def compare_other_entries(entries: ModelEntries, steps: Sequence[Step], built_model: BuiltModel) -> OtherEntries:
    """Compare the other entries of the file, under their new names, with the extra states of the class."""
    if entries.state_dict.is_module:  # a pickled module has the extra states of its class
        return OtherEntries()
    registered = live.load_state_dict.list_extra_states(built_model.module)
    new_names = {name: apply_steps(steps, name) for name in list_other_names(entries)}
    return OtherEntries(
        tuple(name for name, new in new_names.items() if new not in registered),
        tuple(new for new in new_names.values() if new in registered),
        tuple(name for name in registered if name not in new_names.values()),
    )
