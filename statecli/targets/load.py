"""What the user typed -> a ModelState."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from difflib import get_close_matches

from msgspec.structs import replace

from statecli import formats, live
from statecli.core import kinds
from statecli.core.errors import MalformedError, UnreadableError, UsageError
from statecli.core.oddity_kind import OddityKind
from statecli.core.state import ModelState
from statecli.live import hf_auto
from statecli.live.build import build
from statecli.live.built_model import BuiltModel
from statecli.live.spec import ModelSpec, parse_spec
from statecli.storage import files

Renamed = dict[str, tuple[str, ...]]


def spec_of(text: str) -> ModelSpec | None:
    """The model class that the text names, None where it names a file or a folder."""
    if os.path.lexists(text):
        return None
    if files.is_remote(text):
        return None
    spec = parse_spec(text)
    return spec and hf_auto.resolve_auto_spec(spec)


def class_for(text: str, checkpoint: str) -> str:
    """The same; where it is `auto`, what names the class that the configuration beside the checkpoint does.

    Raises as `auto.text_for` does.
    """
    return hf_auto.build_spec_text(split(checkpoint)[0]) if text == hf_auto.AUTO else text


def checkpoint(text: str, *, read: Callable[[str, str | None], ModelState] = formats.read) -> ModelState:
    """A file or folder, or one section of it (`train.ckpt#optimizer`), with kinds by the best evidence in it.

    Raises `MalformedError` for a pickle that holds no tensor, as nothing in it can be listed or compared.
    """
    state = whole(text, read=read)
    for odd in state.oddities if not state.tensors else ():
        if odd.kind is OddityKind.NO_TENSORS:
            raise MalformedError(f"{state.target}: {odd.message}")
    return part(state, text)


def whole(text: str, *, read: Callable[[str, str | None], ModelState] = formats.read) -> ModelState:
    """All of the file or folder that the text names, the section that it names not yet cut out.

    Evidence is looked for in all of it: the optimizer says what the model's parameters are.
    """
    return kinds.classify_tensors(read(*split(text)))


def part(state: ModelState, text: str) -> ModelState:
    """The section of `state`, which is `whole(text)`, that the text names; all of it where it names none."""
    _, section = split(text)
    return replace(state if section is None else _cut(state, section), target=text)


def split(text: str) -> tuple[str, str | None]:
    """The path and the section that the text names; None for the whole checkpoint."""
    if os.path.lexists(text) or "#" not in text or files.is_listed(files.make_absolute(text)):
        return text, None
    path, _, section = text.rpartition("#")
    return path, section


def _cut(state: ModelState, section: str) -> ModelState:
    held = tuple(s for s in state.sections if s == section or (section and s.startswith(section + ".")))
    if not held:
        near = get_close_matches(section, state.sections, n=1)
        there = f"it has {', '.join('#' + s for s in state.sections)}" if state.sections else "it holds no tensor"
        hint = f"did you mean #{near[0]}?" if near else there
        raise UnreadableError(f"{state.target}: has no section {section!r}; {hint}")
    tensors = tuple(tensor for tensor in state.tensors if tensor.section in held)
    return replace(state, sections=held, tensors=tensors)


def model(spec: ModelSpec, *, init_device: str, values: bool) -> BuiltModel:
    """The module that the spec names, built; one that a configuration describes without values, on meta."""
    return build(spec, init_device="meta" if hf_auto.is_auto(spec) else init_device, values=values)


def registered_by(text: str, *, init_device: str, names: Sequence[str] = ()) -> tuple[ModelState, Renamed]:
    """The state of a class given with `--model`, by which a checkpoint is grouped.

    With it those of `names` that it loads under others: a class of transformers that a configuration describes.
    """
    spec = spec_of(text)
    if spec is None:
        raise UsageError(f"--model {text}: names no class; write file.py:Class, package.module:Class or auto")
    built = model(spec, init_device=init_device, values=False)
    return live.read(built, text), hf_auto.map_loaded_names(built.module, names) if hf_auto.is_auto(spec) else {}
