"""Run `statecli verify`: move, cast, save, copy, train and call the model, and report each tensor's state.

    spec or live model ──▶ ModelUnderTest ──▶ one proof after the other, each on instances of its own ──▶ Verification

`model_under_test.py` gives the instances, `inputs.py` the arguments of forward; `proofs/` has a module for each proof.
Without a GPU `live/fake_gpu.py` and `live/fake_gpu_values.py` fake one. Importing this package imports no torch.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from statecli import live
from statecli.commands import verify
from statecli.commands.verify import proofs
from statecli.commands.verify.result import DEFAULT_PROOFS, Check, Name, Verdict, Verification
from statecli.core import target_suggestions
from statecli.core.errors import ModelError, UnreadableError, UsageError
from statecli.core.progress import report_stage
from statecli.core.proof_names import OPTION_OF_PROOF
from statecli.core.selection import Selection, select
from statecli.core.target_suggestions import Suggestion
from statecli.live.model_errors import describe_model_error
from statecli.storage import checkpoint_folder, files
from statecli.targets import load

if TYPE_CHECKING:
    from torch import nn

    from statecli.commands.verify.model_under_test import ModelUnderTest

#: Fake CUDA device: tensors that claim to be on CUDA; no GPU is needed.
FAKE_CUDA = "fake-cuda"


class Request(msgspec.Struct, frozen=True):
    """Request for `verify`. Empty `checks` mean DEFAULT_PROOFS. `device` None means a GPU, or else a fake GPU.

    `optimizer`: a name in torch.optim, or a class; None for the default of each check. `input`: texts such as
    `int64:2x16<30522`; `inputs`: the name of a function. An option with several globs selects each name that any of the
    globs matches.
    """

    target: str
    checks: tuple[Name, ...] = ()
    device: str | None = None
    dtype: str | None = None
    optimizer: str | type | None = None
    input: tuple[str, ...] = ()
    inputs: str | None = None
    init_device: str | None = None
    selection: Selection = Selection()


def _prove(name: Name, subject: ModelUnderTest, request: Request) -> Check:
    prove: Callable[..., Check] = getattr(proofs, name.value).prove
    check = prove(subject, *_list_arguments(name, request))
    return proofs.step.skip_unreached(check) if name is Name.STEP and name not in request.checks else check


def _list_arguments(name: Name, request: Request) -> list[object]:
    """Return a list with the value of the proof's option, or [] if the proof uses its default."""
    option = OPTION_OF_PROOF.get(name)
    value = choose_device(request) if option == "device" else getattr(request, option) if option else None
    return [] if value is None else [value]


def choose_device(request: Request) -> str:
    """Return the device of the moves: the requested device, else a GPU, else a fake GPU."""
    if request.device is not None:
        return request.device
    import torch

    return "cuda" if torch.cuda.is_available() else FAKE_CUDA


def run(
    request: Request, on_check_done: Callable[[Check], None] = lambda _: None, python_inputs: object = None
) -> Verification:
    """Build the model and run the proofs. `on_check_done` is called after each proof.

    `python_inputs` replace `request.inputs`. Raises `StateError` if the model cannot be built, `NothingMatched` if the
    filters leave no tensor.
    """
    return verify_model(build_model_under_test(request, python_inputs), request, on_check_done)


def verify_model(
    subject: ModelUnderTest, request: Request, on_check_done: Callable[[Check], None] = lambda _: None
) -> Verification:
    """Run the proofs on a model under test."""
    state = select(subject.state, request.selection, request.target)
    names, checks = request.checks or DEFAULT_PROOFS, dict[Name, Check]()
    excluded = {tensor.fqn for tensor in subject.state.tensors} - {tensor.fqn for tensor in state.tensors}
    subject = dataclasses.replace(subject, excluded=frozenset(excluded))
    # `forward` comes first, because a tensor that does not move is harmless if forward ran on the moved model.
    for name in sorted(names, key=lambda name: name is not Name.FORWARD):
        report_stage(f"check {name.value}")
        checks[name] = _run_proof(name, subject, request)
        on_check_done(checks[name])
        if name is Name.FORWARD and checks[name].verdict is Verdict.PASSED:
            subject = dataclasses.replace(subject, forward_passed=True)
    return Verification(state, tuple(checks[name] for name in names), subject.state.oddities)


def _has_checkpoint(folder: str) -> bool:
    try:
        checkpoint_folder.choose_checkpoint(folder)
    except UnreadableError:
        return False
    return True


def explain_wrong_target(target: str) -> UsageError:
    """Return an error with the reason why a target is not a model class, and a suggestion."""
    if target.endswith(".py") and os.path.isfile(target):
        return target_suggestions.describe_python_file(target).build_error(UsageError, target)
    if files.is_remote(target) or os.path.exists(target):
        is_folder = os.path.isdir(target) and not _has_checkpoint(target)
        class_suggestion = target_suggestions.suggest_classes_in(target) if is_folder else Suggestion()
        if not class_suggestion.choices:
            class_suggestion = target_suggestions.suggest_classes_near("" if files.is_remote(target) else target)
        end = (
            ":"
            if class_suggestion.choices
            else ""
            if class_suggestion.advice
            else ", such as net.py:Net or package.module:Class"
        )
        kind = "a folder" if is_folder else "a checkpoint"
        return class_suggestion.build_error(UsageError, target, f"is {kind}; verify needs a model class{end}")
    suggestion = target_suggestions.suggest_for_missing(target)
    if suggestion == Suggestion():
        suggestion = Suggestion("write file.py:Class or package.module:Class")
    return suggestion.build_error(UsageError, target, "is not a model class")


def build_model_under_test(request: Request, python_inputs: object = None) -> ModelUnderTest:
    """Build the model of the request, with inputs for forward. See `run` for the errors."""
    spec = load.find_class_spec(request.target)
    if spec is None:
        raise explain_wrong_target(request.target)
    built_model = live.build.build(spec, init_device=request.init_device)
    if python_inputs is None:
        inputs_found, why_not = verify.inputs.find_inputs(request.input, request.inputs, built_model)
    else:
        inputs_found, why_not = verify.live_model.find_live_inputs(python_inputs, built_model)
    return verify.first_forward.add_inputs(
        verify.model_under_test.prepare_built_model(built_model, request.target), inputs_found, why_not
    )


def verify_live_model(model: nn.Module, request: Request, python_inputs: object = None) -> Verification:
    """Run the proofs on copies of a live model. `python_inputs`: see `live_model.find_live_inputs`."""
    with verify.live_model.keep_unchanged(model, cuda=(request.device or "").startswith("cuda")):
        subject = verify.model_under_test.prepare_live_model(model)
        inputs, why_not = verify.live_model.find_live_inputs(
            python_inputs, verify.model_under_test.wrap_live_model(model)
        )
        return verify_model(verify.first_forward.add_inputs(subject, inputs, why_not), request)


def _run_proof(name: Name, subject: ModelUnderTest, request: Request) -> Check:
    """Run a proof. An unexpected error of the model's code makes only this proof inconclusive."""
    if name is Name.STEP and subject.non_leaves:
        return Check(name, Verdict.INCONCLUSIVE, reason=_NON_LEAF_REASON.format(subject.non_leaves[0]))
    if subject.read_original is not None and name in _CALLING_PROOFS:
        return Check(name, Verdict.INCONCLUSIVE, reason=_READS_ORIGINAL_REASON.format(subject.read_original))
    # The proof `forward` calls a single instance, and does not compare it with another.
    if subject.name_mismatch and name is not Name.FORWARD:
        return Check(name, Verdict.INCONCLUSIVE, reason=subject.name_mismatch)
    inputs = tuple(row.fqn for row in subject.state.tensors if row.is_input)
    subject = dataclasses.replace(subject, sample_inputs=inputs)
    if inputs and name is not Name.FORWARD:  # the proof forward may find that forward reads the input
        state = replace(subject.state, tensors=tuple(row for row in subject.state.tensors if not row.is_input))
        subject = dataclasses.replace(subject, state=state)
    try:
        return _prove(name, subject, request)
    except ModelError as error:
        return Check(name, Verdict.INCONCLUSIVE, reason=str(error).removeprefix(f"{subject.target}: "))
    except Exception as error:
        # Operators called by a proof may run code of a tensor subclass.
        error_text = describe_model_error(error)
        if error_text is None:
            raise
        return Check(name, Verdict.INCONCLUSIVE, reason=error_text)


_READS_ORIGINAL_REASON = (
    "the forward of a copy of the model reads {} of the original model, for example through a global variable, so "
    "statecli cannot check the copy; pass the class of the model instead"
)
#: Proofs whose verdict depends on a call of forward.
_CALLING_PROOFS = (Name.STEP, Name.FORWARD, Name.EXPORT, Name.COMPILE, Name.SHARD, Name.RESUME)
_NON_LEAF_REASON = (
    "{} was computed from other tensors before the model was copied, so no gradient flows back through the copy"
)
