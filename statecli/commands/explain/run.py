"""Run `statecli explain`: read both targets, and explain why the checkpoint does not load."""

from __future__ import annotations

import msgspec

from statecli import live
from statecli.commands.explain import special_files
from statecli.commands.explain.diagnose import build_subject, diagnose, find_untied, is_loaded_as_is
from statecli.commands.explain.resize import find_resized
from statecli.commands.explain.result import Diagnosis, Explanation
from statecli.core.errors import ModelError
from statecli.core.model_state import ModelState
from statecli.live.built_model import BuiltModel
from statecli.live.spec import ModelSpec
from statecli.targets import load


class Request(msgspec.Struct, frozen=True):
    """A request: the class and the checkpoint, as typed."""

    model: str
    checkpoint: str


def explain_targets(request: Request, spec: ModelSpec) -> Explanation:
    """Explain why the checkpoint does not load into the class. Raises StateError if one of them cannot be read."""
    checkpoint = load.read_checkpoint(request.checkpoint)
    built_model = build_on_meta(spec)
    model = live.model_reader.read(built_model, request.model)
    return explain_states(model, built_model, checkpoint)


def build_on_meta(spec: ModelSpec) -> BuiltModel:
    """Build the class on meta, or on the CPU if its constructor reads values."""
    try:
        return live.build.build(spec, init_device="meta")
    except ModelError:
        return live.build.build(spec)


def explain_states(model: ModelState, built_model: BuiltModel, checkpoint: ModelState) -> Explanation:
    """Explain why a checkpoint does not load into a built class."""
    explanation = Explanation(model.target, checkpoint.target, states=(model, checkpoint))
    subject = build_subject(model, built_model, checkpoint)
    if subject is None:
        return msgspec.structs.replace(explanation, diagnosis=special_files.diagnose_without_model(checkpoint))
    if is_loaded_as_is(subject):
        return msgspec.structs.replace(explanation, loads=True, untied=find_untied(subject))
    diagnosis = diagnose(subject)
    resized = find_resized(subject, diagnosis)
    diagnoses: tuple[Diagnosis, ...] = (diagnosis,) if resized is None else (resized, diagnosis)
    return msgspec.structs.replace(explanation, diagnosis=diagnoses[0], alternatives=diagnoses[1:])
