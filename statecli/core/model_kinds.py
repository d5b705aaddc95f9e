"""Classify the entries of a checkpoint as parameters or buffers, by the way in which a model class registers them.

Entries not accepted by `load_state_dict` of the class are returned as findings.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set

from msgspec import UNSET
from msgspec.structs import replace

from statecli.core import load_rules
from statecli.core.errors import NothingMatched
from statecli.core.finding import Finding, Wording
from statecli.core.model_state import REGISTERED_KINDS, Evidence, Kind, ModelState, Oddity, TensorInfo
from statecli.core.name_pairs import match_names
from statecli.core.parameter_or_buffer import MODEL_KINDS
from statecli.core.rule import Rule
from statecli.core.unstored_ties import mark_unstored_ties
from statecli.core.wrapper_prefix import PrefixedName, report_prefixes


def classify_by_model(
    state: ModelState, model: ModelState, renamed: Mapping[str, tuple[str, ...]] = {}
) -> tuple[ModelState, list[Finding]]:
    """Return the checkpoint with kinds (parameter, buffer) from the class, and a finding for each entry that fails.

    `model` is the state of the class. Entries of optimizer and other sections are unchanged. The prefix of a wrapper is
    stripped from names and reported, since loading would fail. `renamed` maps names of entries to the names expected by
    the class.

    Raises NothingMatched if the checkpoint contains no tensors of a model.
    """
    registered = {tensor.fqn: tensor for tensor in model.tensors if tensor.kind in REGISTERED_KINDS}
    findings: list[Finding] = []
    notes: list[Oddity] = _note_renames(renamed, model)
    tensors: list[TensorInfo] = list(state.tensors)
    entries = [
        n for n, tensor in enumerate(tensors) if tensor.kind in MODEL_KINDS and not _is_out_of_state_dict(tensor, state)
    ]
    if not entries:
        raise NothingMatched(f"{state.target}: contains no model tensors to compare with {model.target}")
    # A pickle records devices and shared memory; safetensors does not.
    records_devices = any(tensor.device is not None for tensor in tensors)
    for section in dict.fromkeys(tensors[n].section for n in entries):
        section_rows = [n for n in entries if tensors[n].section == section]
        names_by_row, prefixed = _pair_names(section_rows, tensors, registered, renamed)
        if prefixed:
            findings.append(_report_prefix(prefixed, [tensors[n].fqn for n in section_rows], state, section, model))
        occurrences = Counter(name for row_names in names_by_row.values() for name in row_names)
        present_names = occurrences.keys()
        for n in section_rows:
            registration = registered.get(names_by_row[n][0])
            if registration is not None and (len(names_by_row[n]) > 1 or occurrences[names_by_row[n][0]] > 1):
                registration = replace(registration, shape=None)
            tensors[n], entry_findings = _compare_entry(tensors[n], registration, state, model)
            findings.extend(entry_findings)
        ties = [] if records_devices else _list_ties_left_out(present_names, registered)
        notes += [_note_tie_left_out(name, kept_name, section) for name, kept_name in ties]
        for n in section_rows:
            if unstored_names := [name for name, kept_name in ties if kept_name in names_by_row[n]]:
                tensors[n] = mark_unstored_ties(tensors[n], unstored_names)
        noted_names = {note.fqn for note in notes}
        missing = {
            fqn: tensor for fqn, tensor in registered.items() if fqn not in present_names and fqn not in noted_names
        }
        findings.extend(_report_missing(missing, present_names, state, model, section))
    return replace(state, tensors=tuple(tensors), oddities=(*state.oddities, *notes)), findings


def _is_out_of_state_dict(tensor: TensorInfo, state: ModelState) -> bool:
    """Return True for a tensor that is not in the state_dict of a whole pickled module, so that no load reads it."""
    return tensor.saved is False or (tensor.kind is Kind.UNREGISTERED and tensor.section in state.whole_modules)


def _note_renames(renamed: Mapping[str, tuple[str, ...]], model: ModelState) -> list[Oddity]:
    for name, targets in renamed.items():
        example = f"{name} as {' and '.join(targets[:3])}"
        message = f"{model.target} renames {len(renamed)} entries when it loads them, for example {example}"
        return [Oddity("renamed-on-loading", message)]
    return []


def _pair_names(
    rows: Sequence[int],
    tensors: Sequence[TensorInfo],
    registered: Collection[str],
    renamed: Mapping[str, tuple[str, ...]],
) -> tuple[dict[int, tuple[str, ...]], list[PrefixedName]]:
    """Return the names in the class for each entry, and the entries whose names differ only by a wrapper's prefix."""
    names_by_row = {n: renamed.get(tensors[n].fqn) or (tensors[n].fqn,) for n in rows}
    matchable_rows = [n for n in rows if tensors[n].fqn not in renamed]
    renamed_names = {name for n in rows if tensors[n].fqn in renamed for name in names_by_row[n]}
    other_names = [name for name in registered if name not in renamed_names]
    prefixed = []
    for row_index, model_index, stripped_prefixes in match_names([tensors[n].fqn for n in matchable_rows], other_names):
        names_by_row[matchable_rows[row_index]] = (other_names[model_index],)
        if stripped_prefixes:
            prefixed.append(
                PrefixedName(tensors[matchable_rows[row_index]].fqn, other_names[model_index], *stripped_prefixes)
            )
    return names_by_row, prefixed


def _report_prefix(
    prefixed: Sequence[PrefixedName], names: Sequence[str], state: ModelState, section: str, model: ModelState
) -> Finding:
    differing = {item.name for item in prefixed}
    registered = {tensor.fqn for tensor in model.tensors}
    return report_prefixes(
        prefixed,
        names,
        target=state.target,
        state_dict=state.find_state_dict(section),
        kept_names=[name for name in names if name in registered and name not in differing],
        section_text=f" in section {section!r}" if len(state.sections) > 1 else "",
        model=model.target,
    )


def _compare_entry(
    tensor: TensorInfo, registration: TensorInfo | None, state: ModelState, model: ModelState
) -> tuple[TensorInfo, list[Finding]]:
    if registration is None:
        classified = replace(tensor, kind=Kind.UNREGISTERED, evidence=Evidence.REGISTERED, persistent=None)
        wording = Wording(f"unexpected: {model.target} does not register this tensor")
        return classified, [_report_entry(load_rules.UNEXPECTED_ENTRY, wording, state, tensor.section, tensor.fqn)]
    classified = replace(
        tensor,
        kind=registration.kind,
        evidence=Evidence.REGISTERED,
        persistent=registration.persistent,
        requires_grad=registration.requires_grad if tensor.requires_grad is None else tensor.requires_grad,
        origin=registration.origin,
    )
    findings = []
    if registration.persistent is False:
        wording = Wording(
            f"unexpected: {model.target} registers this buffer with persistent=False, so a strict load fails"
        )
        rule = load_rules.UNEXPECTED_ENTRY
        findings.append(_report_entry(rule, wording, state, tensor.section, tensor.fqn, registration))
    # torch < 0.4 had no scalars, so load_state_dict still accepts a tensor of shape (1,) for a scalar.
    if (
        tensor.shape != registration.shape
        and registration.shape is not None
        and (tensor.shape, registration.shape) != ((1,), ())
    ):
        shape, registered_shape = _format_shape(tensor), _format_shape(registration)
        wording = Wording(
            f"the shape is {shape} in {state.target}, but {registered_shape} in {model.target}",
            short=f"{shape}, but the class has {registered_shape}",
        )
        rule = load_rules.SHAPE_MISMATCH
        findings.append(_report_entry(rule, wording, state, tensor.section, tensor.fqn, registration))
    return classified, findings


def _report_entry(
    rule: Rule, wording: Wording, state: ModelState, section: str, fqn: str, registration: TensorInfo | None = None
) -> Finding:
    """Return a finding about an entry, at the source line that registers the tensor if the line is known."""
    wording = replace(wording, name=f"{section}: {fqn}" if len(state.sections) > 1 else fqn)
    origin = (registration.origin if registration else None) or UNSET
    return rule.finding(wording, target=state.target, fqn=fqn, section=section, origin=origin)


def _format_shape(tensor: TensorInfo) -> str:
    return str(list(tensor.shape)) if tensor.shape is not None else "no shape"


def _list_ties_left_out(present_names: Set[str], registered: dict[str, TensorInfo]) -> list[tuple[str, str]]:
    """Return each tied name that safetensors leaves out, and the tied name that safetensors keeps."""
    ties = []
    for fqn, tensor in registered.items():
        kept_name = next((name for name in tensor.tied_to if name in present_names), None)
        if fqn not in present_names and tensor.is_in_state_dict and kept_name:
            ties.append((fqn, kept_name))
    return ties


def _note_tie_left_out(fqn: str, kept_name: str, section: str) -> Oddity:
    message = (
        f"{section} does not have {fqn}, which is tied to {kept_name}; a strict load_state_dict reports a missing key"
    )
    return Oddity("tied-entry-left-out", message, fqn)


def _report_missing(
    missing: dict[str, TensorInfo], present_names: Set[str], state: ModelState, model: ModelState, section: str
) -> list[Finding]:
    findings = []
    location = f"{state.target}#{section}" if section and len(state.sections) > 1 else state.target
    for fqn, tensor in missing.items():
        if not tensor.is_in_state_dict:
            continue
        tie = next((f", tied to {name}, which is present" for name in tensor.tied_to if name in present_names), "")
        description = f"{tensor.kind.value} ({_format_shape(tensor)}{tie})"
        text = f"missing: {model.target} registers this {description}, but {location} does not contain this tensor"
        wording = Wording(text, owner=model.target, short=description)
        findings.append(_report_entry(load_rules.MISSING_ENTRY, wording, state, section, fqn, tensor))
    return findings
