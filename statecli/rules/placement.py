"""What is wrong with the devices that a checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from statecli.core import quoting
from statecli.core.finding import Severity
from statecli.core.state import Kind, TensorInfo
from statecli.rules.rule import Found, rule
from statecli.rules.subject import Subject

#: Devices that every machine has.
ANYWHERE = frozenset(["cpu", "meta"])
#: An optimizer keeps its step counters on the CPU, and a generator's state is always there.
MODEL = (Kind.PARAMETER, Kind.BUFFER)


def _names_devices(subject: Subject) -> str | None:
    known = any(tensor.device is not None for tensor in subject.state.tensors)
    return None if known else "its format records no device"


def _by_device(tensors: Iterator[TensorInfo]) -> dict[str, list[TensorInfo]]:
    found: dict[str, list[TensorInfo]] = {}
    for tensor in tensors:
        if tensor.device is not None:
            found.setdefault(tensor.device, []).append(tensor)
    return found


def _once(found: Mapping[str, list[TensorInfo]]) -> dict[str, list[TensorInfo]]:
    """`cuda` is the device that is current when it is loaded: `cuda:0` unless the program says otherwise."""
    merged: dict[str, list[TensorInfo]] = {}
    for device, tensors in found.items():
        first = f"{device}:0"
        merged.setdefault(first if first in found else device, []).extend(tensors)
    return merged


def _shown_on(subject: Subject, device: str, tensors: list[TensorInfo]) -> str:
    return f"{len(tensors):,} on {device} ({quoting.names([subject.called(tensor) for tensor in tensors])})"


@rule(Severity.NOTE, _names_devices)
def accelerator_device(subject: Subject) -> Iterator[Found]:
    """Tensors are recorded on a device that not every machine has.

    Why: `torch.load` puts a tensor back where it was: on a machine without that device it raises, unless
    `map_location` is given. The first GPU is told as a note; a later one (`cuda:3`) is a warning, since few machines
    have it and what loads there fills the wrong GPU; what policy `device` does not name is an error. `cuda` without a
    number is the first one unless the program that loads it has chosen another.

    Example: a checkpoint that rank 3 of a training run saved names `cuda:3` for each of its tensors.

    Fix: save `{name: tensor.cpu() for …}`, or load with `map_location="cpu"`.
    """
    allowed = subject.policy.device
    for device, tensors in _once(_by_device(iter(subject.state.tensors))).items():
        kind, _, index = device.partition(":")
        names = {device, kind, device if index else f"{device}:0"}
        if names.intersection(allowed) or (not allowed and kind in ANYWHERE):
            continue
        shown = _shown_on(subject, device, tensors)
        if allowed:
            severity, why = Severity.ERROR, f"the policy says {' or '.join(allowed)}"
        else:
            severity = Severity.WARNING if index not in ("", "0") else Severity.NOTE
            why = "torch.load fails where there is none, unless map_location is given"
        help = 'save it from the CPU, or load it with map_location="cpu"'
        yield Found(f"{shown}: {why}", None, help=help, severity=severity)


@rule(Severity.WARNING, _names_devices)
def mixed_devices(subject: Subject) -> Iterator[Found]:
    """The parameters and buffers of one model lie on several devices.

    Why: the first operator that meets both raises an error. It is what a tensor leaves behind that was created in a
    forward or kept out of `register_buffer` while the model moved; a model split over GPUs on purpose is also told.

    Example: all weights are on `cuda:0`, and `mask` is on the CPU.

    Fix: register what stayed behind, or move the model before saving: `model.cpu()`.
    """
    for section in subject.state.sections:
        held = (one for one in subject.state.tensors if one.section == section and one.kind in MODEL)
        found = _together(_by_device(held))
        if len(found) > 1:
            rarest = min(found, key=lambda device: len(found[device]))
            yield Found(f"{section}: {_told(subject, found, rarest)}", found[rarest][0].fqn, section, _HELP)


def _together(found: Mapping[str, list[TensorInfo]]) -> dict[str, list[TensorInfo]]:
    """`cuda` is `cuda:0` to one process, and what is on meta is nowhere yet."""
    merged: dict[str, list[TensorInfo]] = {}
    for device, tensors in found.items():
        if device != "meta":
            merged.setdefault(device if ":" in device or device == "cpu" else f"{device}:0", []).extend(tensors)
    return merged


_HELP = "register what stayed behind, or move the model to one device before saving"


def _told(subject: Subject, found: Mapping[str, list[TensorInfo]], rarest: str) -> str:
    rest = ", ".join(f"{len(tensors):,} on {device}" for device, tensors in found.items() if device != rarest)
    return f"its tensors lie on {len(found)} devices: {rest}, {_shown_on(subject, rarest, found[rarest])}"


RULES = (accelerator_device, mixed_devices)
