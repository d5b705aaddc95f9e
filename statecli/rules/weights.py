"""Rules about values that contradict what a checkpoint says of its training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from statecli.auditing.rule import Found, rule
from statecli.auditing.subject import Subject, the_values
from statecli.finding import Severity
from statecli.report.text import names, plural
from statecli.state import Kind, ModelState, TensorInfo

if TYPE_CHECKING:
    from statecli.values.scan import Facts

#: The factor of an adapter that peft, diffusers and kohya's scripts initialize with zeros, so that training starts at
#: the base model: LoRA, LoRA of embeddings, AdaLoRA, LoHa, LoKr, OFT, BOFT, VeRA.
_ZERO_AT_START = re.compile(
    r"(?:^|\.)(?P<factor>lora_E|lora_B|lora_up|lora_embedding_A|hada_w2_a|lokr_w1|oft_[rR]|boft_R|vera_lambda_b)(?:\.|$)"
)
#: Names under which trainers save how far a training came.
_STEPS = re.compile(r"(?:^|\.)(?:global_step|global_steps|step|steps|epoch|iteration|iter|_step_count)$")


@rule(Severity.WARNING, the_values)
def untrained_adapter(subject: Subject) -> Iterator[Found]:
    """An adapter is zero throughout, so that the model with it computes what its base model computes.

    Why: LoRA multiplies two factors, and `lora_B` starts at zero. If all of them are zero after training, no optimizer
    step reached the adapter: its parameters were not in the optimizer, or the run saved another copy of them.
    It is a warning if the checkpoint says that it was trained: an optimizer's state in the file or folder, or a step
    or epoch above 0 in its settings or in `trainer_state.json`. Without such a sign it is a note: the adapter may
    have been saved before training. If only some of the factors are zero it is a note after training, since not every
    layer needs to get a gradient, and no finding before.

    Example: `adapter_model.safetensors` next to a `trainer_state.json` with `global_step` 500, each `lora_B` zero.

    Fix: check that `model.print_trainable_parameters()` is not 0 and that the optimizer was built after the adapter.
    """
    pairs = zip(subject.state.tensors, subject.values or (), strict=True)
    found = [pair for pair in pairs if _ZERO_AT_START.search(pair[0].fqn) and pair[1].elements and not pair[1].reason]
    # AdaLoRA has zeros in lora_E alone, and values at random in lora_B.
    ada = [pair for pair in found if ".lora_E" in f".{pair[0].fqn}"]
    yield from _untrained(subject, ada or found)


def _untrained(subject: Subject, factors: Sequence[tuple[TensorInfo, Facts]]) -> Iterator[Found]:
    zero = [tensor for tensor, facts in factors if facts.zeros == facts.elements]
    sign = _sign_of_training(subject.everything)
    if not zero or (len(zero) < len(factors) and sign is None):
        return
    called = names(tuple(map(subject.called, zero)))
    is_all = len(zero) == len(factors)
    of = (
        f"all {plural(len(zero), 'factor')} that start at zero are"
        if is_all
        else (f"{len(zero):,} of {len(factors):,} factors that start at zero are")
    )
    message = f"{of} zero{f' after training ({sign})' if sign else ''}: {called}"
    help = "check that the optimizer has the adapter's parameters" if sign else "no action if it was not trained yet"
    severity = None if sign and is_all else Severity.NOTE
    yield Found(message, zero[0].fqn if len(zero) == 1 else None, zero[0].section, help, severity)


def _sign_of_training(state: ModelState) -> str | None:
    """Return what in the checkpoint says that it was trained; None if nothing does."""
    for key, value in state.metadata.values.items():
        if _STEPS.search(key) and isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
            return f"{key} {value:g}"
    has_optimizer = any(tensor.kind is Kind.OPTIMIZER for tensor in state.tensors)
    return "it holds an optimizer's state" if has_optimizer else None


RULES = (untrained_adapter,)
