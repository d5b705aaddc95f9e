"""Load a target typed by the user into a ModelState."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec.structs import replace

from statecli import formats, live
from statecli.core import parameter_or_buffer
from statecli.core.errors import MalformedError, UnreadableError, UsageError, option
from statecli.core.model_state import ModelState
from statecli.core.oddity_kind import OddityKind
from statecli.live.spec import AUTO, ModelSpec, parse_spec
from statecli.storage import files
from statecli.targets.section_of_target import split_section

if TYPE_CHECKING:
    from statecli.live.built_model import BuiltModel

LoadedNames = dict[str, tuple[str, ...]]


def find_class_spec(text: str) -> ModelSpec | None:
    """Return the model class named by the text; None for a file, a folder or a URL."""
    if os.path.lexists(text):
        return None
    if files.is_remote(text):
        return None
    spec = parse_spec(text)
    if spec is None:
        return None
    from statecli.live import hf_auto

    return hf_auto.resolve_auto_spec(spec)


def resolve_auto_class(text: str, checkpoint: str) -> str:
    """Return the text of a model class. For `auto`, use the configuration next to the checkpoint.

    Raises as `hf_auto.build_spec_text` does.
    """
    if text != AUTO:
        return text
    from statecli.live import hf_auto

    return hf_auto.build_spec_text(split_section(checkpoint)[0])


def read_checkpoint(text: str) -> ModelState:
    """Read a checkpoint, or a section of a checkpoint (`train.ckpt#optimizer`), and classify its tensors.

    Raises MalformedError for a pickle without tensors, because there is nothing to list or compare.
    """
    state = read_whole_checkpoint(text)
    for oddity in state.oddities if not state.tensors else ():
        if oddity.kind is OddityKind.NO_TENSORS:
            raise MalformedError(f"{state.target}: {oddity.message}")
    return select_section(state, text)


def read_whole_checkpoint(text: str) -> ModelState:
    """Read all sections of the checkpoint and classify its tensors, even if the text names a single section.

    Another section may have evidence: the optimizer tells the model's parameters from buffers.
    """
    path, section = split_section(text)
    if not files.is_remote(path) and not files.exists(path):
        from statecli.core.target_suggestions import suggest_for_missing

        problem = "cannot be opened: no such file or directory"
        raise suggest_for_missing(path).build_error(UnreadableError, path, problem)
    if path.endswith(".py") and os.path.isfile(path):
        from statecli.core.target_suggestions import describe_python_file

        raise describe_python_file(path).build_error(UnreadableError, path)
    return parameter_or_buffer.classify_tensors(formats.read(path, section))


def select_section(state: ModelState, text: str) -> ModelState:
    """Return the section of `state` named by the text; all of `state` without a section in the text."""
    _, section = split_section(text)
    return replace(state if section is None else _filter_section(state, section), target=text)


def _filter_section(state: ModelState, section: str) -> ModelState:
    matching = tuple(name for name in state.sections if name == section or (section and name.startswith(section + ".")))
    if not matching:
        from difflib import get_close_matches

        close_matches = get_close_matches(section, state.sections, n=1)
        listed = ", ".join("#" + name for name in state.sections)
        inventory = f"the sections are {listed}" if state.sections[1:] else f"the only section is {listed}"
        inventory = inventory if state.sections else "it contains no tensors"
        hint = f"did you mean #{close_matches[0]}?" if close_matches else inventory
        raise UnreadableError(f"{state.target}: has no section {section!r}; {hint}")
    tensors = tuple(tensor for tensor in state.tensors if tensor.section in matching)
    return replace(state, sections=matching, tensors=tensors)


def build_model(spec: ModelSpec, *, init_device: str, values: bool) -> BuiltModel:
    """Build the module named by the spec; on meta if built from a configuration, which has no values."""
    from statecli.live import build, hf_auto

    return build.build(spec, init_device="meta" if hf_auto.is_auto(spec) else init_device, values=values)


def read_class_state(text: str, *, init_device: str, names: Sequence[str] = ()) -> tuple[ModelState, LoadedNames]:
    """Return the state of the class given with `--model`, and the `names` renamed on load by the class.

    Only a class of transformers with a configuration renames keys. Raises UsageError if the text names no class.
    """
    spec = find_class_spec(text)
    if spec is None:
        option_text = option("--model", text)
        raise UsageError(f"{option_text}: must be a class; write file.py:Class, package.module:Class or auto")
    from statecli.live import hf_auto

    built = build_model(spec, init_device=init_device, values=False)
    return live.read(built, text), hf_auto.map_loaded_names(built.module, names) if hf_auto.is_auto(spec) else {}
