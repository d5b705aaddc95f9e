"""Rules about values that contradict the checkpoint's records of its training."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from statecli.core.finding import Severity
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, ModelState, TensorInfo
from statecli.core.units import join_names, plural
from statecli.rules.audit_rule import Issue, report_tensor, rule
from statecli.rules.audit_subject import Subject, needs_values

if TYPE_CHECKING:
    from statecli.values.summary import Facts

#: Factor of an adapter that peft, diffusers and kohya's scripts initialize with zeros, so that training starts at the
#: base model: LoRA, LoRA of embeddings, AdaLoRA, LoHa, LoKr, OFT, BOFT, VeRA.
_ZERO_AT_START = compile_on_use(
    r"(?:^|\.)(?P<factor>lora_E|lora_B|lora_up|lora_embedding_A|hada_w2_a|lokr_w1|oft_[rR]|boft_R|vera_lambda_b)(?:\.|$)"
)
#: Names of settings in which trainers save the progress of a training.
_PROGRESS_SETTING = compile_on_use(r"(?:^|\.)(?:global_step|global_steps|step|steps|epoch|iteration|iter|_step_count)$")


@rule(Severity.WARNING, needs_values, cases={"may be intended": Severity.NOTE})
def untrained_adapter(subject: Subject) -> Iterator[Issue]:
    """An adapter has no effect: the factors that start at zero are still zero.

    Why: LoRA multiplies two factors, and `lora_B` starts at zero. If every `lora_B` is zero after training, no
    optimizer step reached the adapter: its parameters were not in the optimizer, or the run saved another copy of the
    parameters. The finding is a warning if the checkpoint has a sign of training. Signs are an optimizer's state in the
    file or folder, or a step or epoch above 0 in its settings or in `trainer_state.json`. Without a sign the finding is
    a note, because the adapter may have been saved before training. If only some of the factors are zero after
    training, the finding is a note, because some layers may get no gradient. Without a sign of training, some zero
    factors are not reported.

    Example: `adapter_model.safetensors` next to a `trainer_state.json` with `global_step` 500, each `lora_B` zero.

    Fix: check that `model.print_trainable_parameters()` is not 0 and that the optimizer was built after the adapter.
    """
    pairs = zip(subject.state.tensors, subject.values or (), strict=True)
    factors = [pair for pair in pairs if _ZERO_AT_START.search(pair[0].fqn) and pair[1].elements and not pair[1].reason]
    # AdaLoRA starts with zeros only in lora_E, and with random values in lora_B.
    ada = [pair for pair in factors if ".lora_E" in f".{pair[0].fqn}"]
    yield from _report_untrained(subject, ada or factors)


def _report_untrained(subject: Subject, factors: Sequence[tuple[TensorInfo, Facts]]) -> Iterator[Issue]:
    zero = [tensor for tensor, facts in factors if facts.zeros == facts.elements]
    sign = _find_sign_of_training(subject.full_state)
    if not zero or (len(zero) < len(factors) and sign is None):
        return
    names_text = join_names(tuple(map(subject.name_of, zero)))
    is_all = len(zero) == len(factors)
    count = f"all {plural(len(zero), 'factor')}" if is_all else f"{len(zero):,} of {len(factors):,} factors"
    after = f" after training ({sign})" if sign else ""
    message = f"{count} that start at zero are still zero{after}: {names_text}"
    help = "no action is needed if the adapter was not trained yet"
    if sign:
        help = "check that the optimizer has the adapter's parameters"
    severity = None if sign and is_all else untrained_adapter.cases["may be intended"]
    yield Issue(message, zero[0].fqn if len(zero) == 1 else None, zero[0].section, help, severity)


def _find_sign_of_training(state: ModelState) -> str | None:
    """Return a sign that the checkpoint was trained, such as `global_step 500`; else None."""
    for key, value in state.metadata.values.items():
        if (
            _PROGRESS_SETTING.search(key)
            and isinstance(value, (int, float))
            and not isinstance(value, bool)
            and value > 0
        ):
            return f"{key} {value:g}"
    has_optimizer = any(tensor.kind is Kind.OPTIMIZER for tensor in state.tensors)
    return "the checkpoint has optimizer state" if has_optimizer else None


#: Smallest number of elements of a tensor with an outlier.
MIN_ELEMENTS = 64
#: Smallest reported factor between the largest value and nearly all others: about 2 ** 10. A flipped bit of a float32's
#: exponent multiplies by 2 ** 16 or more for four of its eight bits. Single channels of norms and biases in published
#: language models reach some tens.
OUTLIER_FACTOR = 1000.0
#: Name of a tensor that may hold a number in place of minus infinity.
_MASK_NAME = compile_on_use(r"mask", re.IGNORECASE)


@rule(Severity.WARNING, needs_values)
def outlier(subject: Subject) -> Iterator[Issue]:
    """Very few values of a weight are a thousand times as large as all the other values.

    Why: training does not produce such values. The cause is a flipped bit of an exponent, faulty memory or a faulty
    disk, or an edit by hand. A single value of 50,000 among values of size 1 decides every output that uses the weight.
    The rule samples every 61st element of each block of 512 kB (of a small tensor, every element), and takes the fourth
    largest absolute value of each sample. The maximum of these numbers is the reference size. The rule compares it with
    the largest absolute value of the tensor. The rule checks floating-point parameters of 64 elements or more, but not
    masks, buffers and optimizer states. A region of many damaged values is not an outlier.
    The rule has no finding on 204 sound checkpoints of transformers and torch, with random weights and after three
    steps of training (`benchmarks/honest_checkpoints.py`).

    Example: `fc.weight`, drawn from N(0, 1), with a single value of 50,000.

    Fix: compare the tensor with another copy (`statecli diff`), and restore the tensor.
    """
    for tensor, facts in zip(subject.state.tensors, subject.values or (), strict=True):
        is_judged = tensor.kind is Kind.PARAMETER and not _MASK_NAME.search(tensor.fqn)
        if not is_judged or facts.reason is not None or facts.elements < MIN_ELEMENTS or not facts.typical:
            continue
        largest = max(facts.low or 0.0, facts.high or 0.0, key=abs)
        if abs(largest) >= OUTLIER_FACTOR * facts.typical:
            others = f"the absolute values of nearly all other elements are at most {facts.typical:.3g}"
            text = f"value {largest:.6g} is an outlier; {others}"
            yield report_tensor(subject, tensor, text, "compare the tensor with another copy, and restore it")


RULES = (untrained_adapter, outlier)
