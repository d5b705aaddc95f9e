"""Rules about the devices that a checkpoint records."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from statecli.core import quoting
from statecli.core.finding import Severity
from statecli.core.model_state import REGISTERED_KINDS, TensorInfo
from statecli.core.units import plural
from statecli.rules.audit_rule import Issue, rule
from statecli.rules.audit_subject import Subject

#: Devices that every machine has.
UNIVERSAL_DEVICES = frozenset(["cpu", "meta"])


def _needs_recorded_devices(subject: Subject) -> str | None:
    has_devices = any(tensor.device is not None for tensor in subject.state.tensors)
    return None if has_devices else "the file format does not record devices"


def _group_by_device(tensors: Iterable[TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Group the tensors by device. `cuda` counts as `cuda:0`, because a process uses them as one device."""
    by_device: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        if tensor.device is not None:
            by_device.setdefault("cuda:0" if tensor.device == "cuda" else tensor.device, []).append(tensor)
    return by_device


@rule(
    Severity.NOTE,
    _needs_recorded_devices,
    cases={"outside of the policy": Severity.ERROR, "later GPU": Severity.WARNING},
)
def accelerator_device(subject: Subject) -> Iterator[Issue]:
    """Tensors are recorded on a device that is missing on some machines.

    Why: `torch.load` restores each tensor to its recorded device. On a machine without the device, the load raises an
    error unless `map_location` is given. The first GPU is a note. A later GPU (`cuda:3`) is a warning: few machines
    have so many GPUs, and a load may fill the wrong GPU. A device that is not in `policy.device` is an error. `cuda`
    without a number counts as the first GPU.

    Example: a checkpoint saved by rank 3 of a training run names `cuda:3` for each of its tensors.

    Fix: save `{name: tensor.cpu() for …}`, or load with `map_location="cpu"`.
    """
    allowed_devices = subject.policy.device
    for device, tensors in _group_by_device(subject.state.tensors).items():
        kind, _, index = device.partition(":")
        if {device, kind}.intersection(allowed_devices) or (not allowed_devices and kind in UNIVERSAL_DEVICES):
            continue
        names_shown = quoting.names([subject.name_of(tensor) for tensor in tensors])
        on_device = f"{plural(len(tensors), 'tensor')} on {device} ({names_shown})"
        if allowed_devices:
            case: str | None = "outside of the policy"
            reason = f"policy.device allows only {' or '.join(allowed_devices)}"
        else:
            case = "later GPU" if index not in ("", "0") else None
            reason = "torch.load fails on a machine without this device, unless map_location is given"
        severity = accelerator_device.cases[case] if case else None
        help = 'save the tensors on cpu, or load the file with map_location="cpu"'
        yield Issue(f"{on_device}: {reason}", None, help=help, severity=severity)


@rule(Severity.WARNING, _needs_recorded_devices)
def mixed_devices(subject: Subject) -> Iterator[Issue]:
    """The parameters and buffers of one model are on several devices.

    Why: the first operator that combines tensors of two devices raises an error. Common causes are a tensor created by
    forward, and an unregistered tensor that did not move when the model moved. A model split over GPUs on purpose is
    also reported.

    Example: all weights are on `cuda:0`, and `mask` is on the CPU.

    Fix: register the tensor left on the other device, or move the model before saving: `model.cpu()`.
    """
    for section in subject.state.sections:
        # An optimizer keeps its step counters on the CPU, and the state of a generator is always there.
        tensors = (
            tensor for tensor in subject.state.tensors if tensor.section == section and tensor.kind in REGISTERED_KINDS
        )
        by_device = _group_by_device(tensor for tensor in tensors if tensor.device != "meta")  # meta has no memory
        if len(by_device) > 1:
            rarest = min(by_device, key=lambda device: len(by_device[device]))
            message = f"{section}: {_describe_devices(subject, by_device, rarest)}"
            yield Issue(message, by_device[rarest][0].fqn, section, _HELP)


_HELP = "register the tensors that did not move, or move the model to one device before saving"


def _describe_devices(subject: Subject, by_device: Mapping[str, list[TensorInfo]], rarest: str) -> str:
    counts_text = ", ".join(
        f"{len(tensors):,} on {device}" for device, tensors in by_device.items() if device != rarest
    )
    names = [subject.name_of(tensor) for tensor in by_device[rarest]]
    return (
        f"tensors are on {len(by_device)} devices: {counts_text}, {len(names):,} on {rarest} ({quoting.names(names)})"
    )


RULES = (accelerator_device, mixed_devices)
