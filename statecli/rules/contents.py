"""Rules about checkpoints that lack their contents: no tensor at all, or weights without elements."""

from __future__ import annotations

from collections.abc import Iterator

from statecli.core.finding import Severity
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, ModelState, TensorInfo, TensorKey
from statecli.core.oddity_kind import OddityKind
from statecli.core.units import join_names, plural
from statecli.rules.audit_rule import Issue, report_tensor, rule
from statecli.rules.audit_subject import Subject, needs_file
from statecli.storage import checkpoint_folder, files
from statecli.targets.section_of_target import split_section

#: Keys under which training loops save a model's state_dict.
_MODEL_KEYS = ("state_dict", "model_state_dict", "model")
#: Last parts of names with shape [0] in sound models. Examples: e3nn's `bias` of a layer without bias, the range of a
#: torch observer without data, and parameters that only record the device of a module (`dummy_param`).
_PLACEHOLDER_NAME = compile_on_use(r"(?:^|\.)(?:bias\w*|m(?:in|ax)_val|\w*(?:dummy|device)\w*)$")
#: Buffer of e3nn's layers, whose `weight` has shape [0] if the weights are arguments of forward.
_E3NN_BUFFER = "output_mask"
#: Settings of DeepSpeed's ZeRO-3 that mean that the weights are in other files.
_ZERO3_SETTINGS = ("ds_version", "param_shapes", "ds_config")


@rule(Severity.ERROR, needs_file, cases={"settings or a program": Severity.NOTE})
def empty_checkpoint(subject: Subject) -> Iterator[Issue]:
    """A checkpoint contains no tensors, or its state_dict is empty.

    Why: a load with `strict=False`, or a load of an adapter, succeeds silently and does not change the model. Usually a
    filter of the keys matched nothing, or the saving process had no weights (FSDP, ZeRO-3). The finding is a note for a
    pickle with only settings, and for a TorchScript or torch.export program without weights. States that
    normally have no tensors are not reported: the state of a scheduler or a sampler, or of an optimizer before its
    first step or without momentum.

    Example: `adapter_model.safetensors` of 16 bytes, after `get_peft_model_state_dict` on a rank without parameters.

    Fix: save again on the rank with the weights, and check the number of tensors with `statecli inspect`.
    """
    state, path = subject.full_state, split_section(subject.target)[0]
    help = "save the checkpoint again from a process that has the weights"
    if state.tensors:
        for key in _find_empty_models(state) if not _has_model_tensors(state) else ():
            yield Issue(f"{key}: the state_dict is empty, so the checkpoint contains no model", help=help, about=key)
    elif not (_is_optimizer(state) or checkpoint_folder.COMPANIONS.match(files.get_name(path))):
        severity = _choose_severity(state)
        help = "no action is needed if the file should have no weights" if severity else help
        yield Issue("checkpoint contains no tensors", help=help, severity=severity)


def _is_optimizer(state: ModelState) -> bool:
    """Return True for an optimizer that has only settings, such as SGD without momentum."""
    return bool(state.optimizers) and not any(oddity.kind is OddityKind.NO_TENSORS for oddity in state.oddities)


def _choose_severity(state: ModelState) -> Severity | None:
    traits = state.traits
    is_settings = traits.may_hold_settings_alone and bool(state.metadata.values) and not _find_empty_models(state)
    return empty_checkpoint.cases["settings or a program"] if is_settings or traits.is_program else None


def _has_model_tensors(state: ModelState) -> bool:
    """Return True if a section such as `state_dict` has tensors. Then an empty dict elsewhere is only a configuration.

    Tensors next to an empty model are in a section called `model`, and the section then stands for the whole file.
    """
    empty_sections = set(_find_empty_models(state))
    whole_file = {
        state_dict.section for state_dict in state.state_dicts if empty_sections.intersection(state_dict.others)
    }
    return any(section in _MODEL_KEYS and section not in whole_file for section in state.sections)


def _find_empty_models(state: ModelState) -> list[str]:
    return [key for key in _MODEL_KEYS if state.metadata.values.get(key) == "{}"]


@rule(Severity.WARNING, needs_file, cases={"in partitions": Severity.NOTE})
def empty_tensor(subject: Subject) -> Iterator[Issue]:
    """A weight has no elements: its shape contains a 0.

    Why: the file has the names of these weights but not their values. DeepSpeed's ZeRO-3 and FSDP free the weights that
    a process does not need. A state_dict saved at this moment has weights of shape [0]. The finding is a note for a
    ZeRO-3 file with a record of the freed weights, because the weights are in the partitions next to the file.
    Some sound models have empty parameters as placeholders. Placeholders are not reported: names that begin with `bias`
    or contain `dummy` or `device` in the last part; `min_val` and `max_val` of an observer; `weight` next to an
    `output_mask` of e3nn. If more than half of a section's parameters are empty, placeholders are reported too. Buffers
    are reported only if all tensors of the checkpoint are empty.

    Example: `base_model.model.q_proj.lora_A.weight` of shape [0] in an adapter saved on a single rank of ZeRO-3.

    Fix: gather before saving: `accelerator.get_state_dict(model)`, `stage3_gather_16bit_weights_on_model_save`, or
    `zero_to_fp32.py`.
    """
    if all(tensor.elements or tensor.shape is None for tensor in subject.state.tensors):
        return
    is_elsewhere = subject.state.traits.is_partitioned or any(
        key == name or key.startswith(f"{name}.")
        for key in subject.full_state.metadata.values
        for name in _ZERO3_SETTINGS
    )
    present = {tensor.key for tensor in subject.full_state.tensors}
    has_elements = any(tensor.elements or tensor.shape is None for tensor in subject.full_state.tensors)
    for section in subject.state.sections:
        rows = [tensor for tensor in subject.state.tensors if tensor.section == section]
        if has_elements:
            rows = [tensor for tensor in rows if tensor.kind is Kind.PARAMETER]
        empty_tensors = [tensor for tensor in rows if tensor.shape is not None and not tensor.elements]
        reported = [tensor for tensor in empty_tensors if not _is_placeholder(tensor, present)]
        if len(empty_tensors) * 2 > len(rows):
            reported = empty_tensors
        if reported:
            names_text = join_names(tuple(map(subject.name_of, reported)))
            noun = "parameters" if has_elements else "tensors"
            message = f"{section}: {len(reported):,} of {len(rows):,} {noun} are empty (0 elements): {names_text}"
            help = "audit the files that contain the weights" if is_elsewhere else "gather the weights before saving"
            severity = empty_tensor.cases["in partitions"] if is_elsewhere else None
            yield Issue(message, None, section, help, severity)


def _is_placeholder(tensor: TensorInfo, present: set[TensorKey]) -> bool:
    owner, dot, name = tensor.fqn.rpartition(".")
    is_of_e3nn = name == "weight" and (tensor.section, f"{owner}{dot}{_E3NN_BUFFER}") in present
    return is_of_e3nn or _PLACEHOLDER_NAME.search(tensor.fqn) is not None


def _count_unlisted(subject: Subject) -> int:
    """Return the number of sparse tensors in pickles that the reader leaves out, such as tensors in dict keys."""
    count = sum(pickle.sparse_tensors for pickle in subject.pickles)
    rows = _list_sparse(subject.full_state) if count else ()
    return max(0, count - len({(tensor.layout, tensor.shape, tensor.parts) for tensor in rows}))


def _list_sparse(state: ModelState) -> Iterator[TensorInfo]:
    return (tensor for tensor in state.tensors if tensor.layout.startswith("sparse"))


def needs_unchecked_indices(subject: Subject) -> str | None:
    """Return a reason if the indices of all sparse tensors were checked; else None."""
    is_checked = subject.values is not None and not _count_unlisted(subject)
    return "the values were read, so the indices of sparse tensors were checked too" if is_checked else None


@rule(Severity.WARNING, needs_file, needs_unchecked_indices)
def unchecked_indices(subject: Subject) -> Iterator[Issue]:
    """The indices of a sparse tensor were not checked.

    Why: with wrong indices, operators read and write memory outside of the tensor, and `torch.load` does not check the
    indices. The rule `sparse-indices` checks them if the values are read, but only for listed tensors: not for an
    attribute of another tensor, of a key of a dict, or of the example inputs of an exported program.

    Example: an adjacency matrix in a checkpoint of 10,000 tensors, whose values are not read by default.

    Fix: audit with `--values`. For a tensor outside the list, call
    `torch.sparse.check_sparse_tensor_invariants.enable()` before `torch.load`.
    """
    for tensor in _list_sparse(subject.state) if subject.values is None else ():
        text = "the indices of the sparse tensor were not checked"
        yield report_tensor(subject, tensor, text, "add --values to check the indices")
    unlisted = _count_unlisted(subject)
    if unlisted:
        message = f"{plural(unlisted, 'sparse tensor')} in the pickles {'is' if unlisted == 1 else 'are'} not listed"
        help = "call torch.sparse.check_sparse_tensor_invariants.enable() before torch.load"
        yield Issue(f"{message}, so the indices were not checked", help=help)


RULES = (empty_checkpoint, empty_tensor, unchecked_indices)
