"""Find attributes (numbers, strings and containers) that forward changes, such as a step counter.

The changed value is state outside every `state_dict()`. torch.export stores the value at the time of the export, and
torch.compile captures the model again for each new value. Only attributes of registered modules, and of plain objects
in these attributes, are read.
"""

from __future__ import annotations

import copy
from contextlib import suppress
from dataclasses import dataclass

from torch import nn

from statecli.commands.verify import check_builder, kept_values, rules
from statecli.commands.verify.kept_values import Slot
from statecli.commands.verify.model_under_test import ModelUnderTest
from statecli.commands.verify.proof import Proof
from statecli.core.errors import ModelError
from statecli.live.metric_states import CALL_OUTSIDE_HELP, is_metric


@dataclass(frozen=True, eq=False)
class ChangedAttribute:
    """Plain attribute that forward changes at each call.

    Attributes:
        slot: Its place in the model.
        initial: Value before the first call.
        before: Value after the first call.
        after: Value after the second call.
        owner: Class of the module.
    """

    slot: Slot
    initial: object
    before: object
    after: object
    owner: type

    @property
    def fqn(self) -> str:
        """Dotted name of the attribute, such as `blocks.0.step`."""
        return self.slot.fqn

    def set(self, module: nn.Module, value: object) -> None:
        """Set the attribute of an instance to a copy of `value`."""
        vars(module.get_submodule(self.slot.path))[self.slot.name] = copy.deepcopy(value)


def find_changed_attributes(subject: ModelUnderTest) -> list[ChangedAttribute]:
    """Return the plain attributes whose value changes in the second call of forward, in eval or train mode.

    An attribute that only the first call sets is left out. Raises ModelError if forward raises in eval mode.
    """
    changed_attributes: dict[str, ChangedAttribute] = {}
    for training in (False, True):
        module = subject.build_used(values=not subject.rebuilds)
        initial = _copy_attributes(module)
        try:
            with check_builder.keep_class_attributes(module):
                subject.call(module, training=training)
                before, values = kept_values.read_attributes(module), _copy_attributes(module)
                subject.call(module, seed=1, training=training)
        except ModelError:
            if training:
                continue
            raise
        after = kept_values.read_attributes(module)
        for slot in before.keys() & after.keys():
            if before[slot] != after[slot] and slot in values:
                owner = module.get_submodule(slot.path)
                value = vars(owner)[slot.name]
                attribute = ChangedAttribute(slot, initial.get(slot), values[slot], value, type(owner))
                changed_attributes.setdefault(attribute.fqn, attribute)
    return sorted(changed_attributes.values(), key=lambda attribute: attribute.fqn)


def _copy_attributes(module: nn.Module) -> dict[Slot, object]:
    copies = {}
    for slot, value in kept_values.iter_attributes(module):
        with suppress(Exception):  # an object without a copy is not compared
            copies[slot] = copy.deepcopy(value)
    return copies


def report_changed_attribute(proof: Proof, attribute: ChangedAttribute, message: str) -> None:
    """Report an attribute that forward changes. The severity is note if a torchmetrics metric owns the attribute."""
    rule, is_of_metric = rules.CHANGING_ATTRIBUTE, is_metric(attribute.owner)
    help = CALL_OUTSIDE_HELP if is_of_metric else _build_fix(attribute)
    proof.report(rule, message, attribute.fqn, help=help, severity=rule.cases["of a metric"] if is_of_metric else None)


def _build_fix(attribute: ChangedAttribute) -> str:
    """Return the fix for the changing attribute: a `register_buffer` line for a number, or advice for other values."""
    name, value = attribute.slot.name, attribute.initial
    if type(value) in (bool, int, float):
        fix = f'self.register_buffer("{name}", torch.tensor({value!r}))  # and change the buffer in place in forward'
    else:
        fix = (
            f"do not change {name} in forward: pass {name} as an input and return the next value, or register a buffer"
        )
    return check_builder.address_to_library(attribute.owner, fix)
