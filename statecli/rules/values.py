"""Rules about values. All rules use the facts from a single pass over the bytes (`--values`)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from statecli.core.finding import Severity
from statecli.core.grouping import group_by
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import REGISTERED_KINDS, Evidence, Kind, TensorInfo
from statecli.core.units import format_size, join_names
from statecli.rules.audit_rule import Issue, report_tensor, rule
from statecli.rules.audit_subject import Subject, needs_values

if TYPE_CHECKING:
    from statecli.values.summary import Facts

#: Smallest reported share of denormals. On a current x86 core, a product with such a float32 matrix takes 11 to 22
#: times as long. With a tenth of this share, the product takes 2 to 3 times as long.
MIN_DENORMAL_SHARE = 0.01
#: Smallest reported number of denormals. Each denormal costs about 34 ns for each row of the input, so fewer take less
#: than 0.15 ms, whatever their share. Training leaves some denormals in any small tensor at rest.
MIN_DENORMALS = 4096
#: Smallest size in bytes of a tensor that is reported as saved twice or as constant.
MIN_REPORTED_BYTES = 1 << 10
#: Names of weights that start at zero, at a single value, or alike in each layer: adapters, tables of positions, A of
#: Mamba.
_UNIFORM_AT_START = compile_on_use(
    r"(?:^|\.)(?:lora_(?:B|E|up|embedding_A)|hada_w2_a|lokr_w1|oft_[rR]|boft_R|ia3_l|A_log|final_logits_bias|cls_token"
    r"|pos(?:ition)?_embed\w*|rel_pos_[hw]|relative_position_bias_table|(?:zero_conv|controlnet_)\w*)(?:\.|$)"
)
#: By floating-point type, the limit above which values do not round to a finite value: half a step above the largest
#: value. The second item is whether the limit itself rounds down, because a tie goes to the even neighbour. The float8
#: types without infinity round to NaN. Newer versions of torch round float8_e4m3fn to its largest number.
OVERFLOW_LIMITS = {
    "float16": (65520.0, False),
    "bfloat16": ((2 - 2**-8) * 2.0**127, False),
    "float32": ((2 - 2**-24) * 2.0**127, False),
    "float8_e5m2": (61440.0, False),
    "float8_e4m3fn": (464.0, True),
    "float8_e4m3fnuz": (248.0, False),
    "float8_e5m2fnuz": (61440.0, False),
}


def _list_facts(subject: Subject) -> Iterator[tuple[TensorInfo, Facts]]:
    """Yield the tensors whose values were read, with facts about the values. Tied tensors appear once."""
    seen_places = set()
    for tensor, facts in zip(subject.state.tensors, subject.values or (), strict=True):
        place = (tensor.data, tensor.parts)
        if facts.elements and place not in seen_places:
            yield tensor, facts
        if tensor.data is not None or tensor.parts:
            seen_places.add(place)


def _describe_count(count: int, facts: Facts, value_name: str) -> str:
    if facts.elements == 1:
        return f"the only value is {value_name}"
    return f"{count:,} of {facts.elements:,} values {'is' if count == 1 else 'are'} {value_name}"


def _describe_all(facts: Facts, value_name: str) -> str:
    return (
        _describe_count(1, facts, value_name)
        if facts.elements == 1
        else f"all {facts.elements:,} values are {value_name}"
    )


@rule(Severity.ERROR, needs_values, cases={"outside of a model and an optimizer": Severity.NOTE})
def nan(subject: Subject) -> Iterator[Issue]:
    """A tensor has values that are not a number.

    Why: NaN spreads. A NaN in a weight makes every output that uses the weight NaN; a NaN in an optimizer's state makes
    the weight NaN at the next step. A checkpoint with NaN usually comes from a diverged training. Outside of a model
    and an optimizer the finding is a note: for example, a best metric is NaN before the first evaluation.

    Example: `fc.weight` of a run in float16 whose loss scale was too high: 12 of 4,096 values are NaN.

    Fix: go back to the last checkpoint without NaN. Look for a division by zero, an overflow of the loss, or a batch
    with NaN. Clip gradients, or train in bfloat16.
    """
    for tensor, facts in _list_facts(subject):
        if facts.nan:
            severity = nan.cases["outside of a model and an optimizer"] if tensor.kind is Kind.OTHER else None
            yield report_tensor(subject, tensor, _describe_count(facts.nan, facts, "NaN"), _HELP[severity], severity)


_HELP = {
    Severity.NOTE: "no action is needed if these values are intended",
    None: "go back to a checkpoint without these values",
}


@rule(Severity.ERROR, needs_values, cases={"in a buffer": Severity.WARNING, "intended": Severity.NOTE})
def inf(subject: Subject) -> Iterator[Issue]:
    """A tensor has infinite values.

    Why: infinity times zero and infinity minus infinity are NaN, so outputs become NaN as well. In a weight or an
    optimizer's state, infinity is an overflow. In a buffer, infinity may be intended: a mask of zeros and -inf, or a
    minimum that starts at infinity, is a note. Any other infinity in a buffer is a warning. Outside of a model and an
    optimizer the finding is a note. A single number is not reported: a best score may start at infinity.

    Example: `fc.weight` cast to float16 with a value of 70,000: 1 of 4,096 values is infinite.

    Fix: go back to a checkpoint without these values, or cast to a dtype with the range of float32, such as bfloat16.
    """
    for tensor, facts in _list_facts(subject):
        is_score = tensor.kind is Kind.OTHER and facts.elements == 1
        if facts.inf and not is_score:
            severity = _choose_infinity_severity(tensor, facts)
            help = _HELP.get(severity, _HELP[None])
            yield report_tensor(subject, tensor, _describe_count(facts.inf, facts, "infinite"), help, severity)


@rule(Severity.ERROR, needs_values)
def sparse_indices(subject: Subject) -> Iterator[Issue]:
    """The indices of a sparse tensor lie outside its shape.

    Why: `torch.load` does not check the indices. Operators such as `to_dense()` then read and write memory outside of
    the tensor, and the file chooses the place and the value.

    Example: a tensor of shape [4] whose only index is 1,000,000,000.

    Fix: do not use the tensor; save the tensor again from the original checkpoint or run. To check while loading, call
    `torch.sparse.check_sparse_tensor_invariants.enable()` before `torch.load`.
    """
    for tensor, facts in _list_facts(subject):
        if facts.contradiction:
            help = "save the tensor again from the checkpoint or the run that it came from"
            yield report_tensor(subject, tensor, facts.contradiction, help)


def _choose_infinity_severity(tensor: TensorInfo, facts: Facts) -> Severity | None:
    is_mask = facts.minus_inf == facts.inf and facts.low == facts.high is not None and not facts.nan
    if is_mask or tensor.kind is Kind.OTHER:
        return inf.cases["intended"]
    is_extreme = tensor.shape == () and tensor.evidence is Evidence.ASSUMED
    if tensor.kind in (Kind.PARAMETER, Kind.OPTIMIZER) and not is_extreme:
        return None
    return inf.cases["in a buffer" if facts.only is None else "intended"]


@rule(Severity.NOTE, needs_values, cases={"all weights": Severity.WARNING})
def all_zero(subject: Subject) -> Iterator[Issue]:
    """All values of a weight of two dimensions or more are zero.

    Why: zeros may be intended, for example in a residual branch that starts at zero. Or the weights were never written:
    a sharded save gathered nothing, or the file has holes. Biases, norms, counters, buffers and tensors smaller than 1
    kB are zero in many sound checkpoints and are not reported. Weights that usually start at zero (B of a LoRA, tables
    of positions) are not reported either. If all weights are zero, the finding is a warning.

    Example: `layers.3.mlp.weight` of a checkpoint whose third shard was gathered on the wrong rank.

    Fix: if the zeros are not intended, save again, and compare with `statecli diff`.
    """
    weights = [(tensor, facts) for tensor, facts in _list_facts(subject) if _is_weight(tensor) and not facts.reason]
    zero = [(tensor, facts) for tensor, facts in weights if facts.zeros == facts.elements]
    is_all = len(zero) == len(weights) > 1
    reported = [
        (tensor, _describe_all(facts, "zero"))
        for tensor, facts in zero
        if is_all or tensor.nbytes >= MIN_REPORTED_BYTES
    ]
    help = "check that the weights were loaded and gathered before saving"
    severity = all_zero.cases["all weights"] if is_all else None
    yield from _report_by_section(subject, reported, "all zero", help, severity)


@rule(Severity.NOTE, needs_values)
def constant(subject: Subject) -> Iterator[Issue]:
    """All values of a weight of two dimensions or more are the same number, not zero.

    Why: with equal rows, all outputs of the layer are equal and learn the same. The weight was never initialized, or is
    a placeholder. Weights that are often constant in sound checkpoints are not reported: norms, biases and counters
    (one-dimensional), scales of channels (a single dimension larger than 1), and tensors smaller than 1 kB.

    Example: `head.weight`, created with `torch.full` for a test, in a checkpoint that goes to production.

    Fix: initialize the weight at random; no action is needed if the value is intended (a mask of ones).
    """
    reported = []
    for tensor, facts in _list_facts(subject):
        is_one = facts.only is not None and facts.low == facts.high
        if is_one and facts.low and tensor.nbytes >= MIN_REPORTED_BYTES and _is_weight(tensor):
            reported.append((tensor, _describe_all(facts, f"{facts.low:.6g}")))
    help = "initialize and train the weight, unless the value is intended"
    yield from _report_by_section(subject, reported, "constant", help)


def _is_weight(tensor: TensorInfo) -> bool:
    """Return True for a matrix parameter that is usually not initialised with a single value, such as zero."""
    is_matrix = sum(size > 1 for size in tensor.shape or ()) > 1
    return tensor.kind is Kind.PARAMETER and is_matrix and not _UNIFORM_AT_START.search(tensor.fqn)


def _report_by_section(
    subject: Subject,
    tensors: list[tuple[TensorInfo, str]],
    description: str,
    help: str,
    severity: Severity | None = None,
) -> Iterator[Issue]:
    """Yield an issue for each section: about a single tensor, or with the number and first names of several tensors."""
    sections = group_by(tensors, lambda pair: pair[0].section)
    for section, pairs in sections.items():
        if len(pairs) == 1:
            yield report_tensor(subject, *pairs[0], help, severity)
            continue
        names_text = join_names(tuple(subject.name_of(tensor) for tensor, _ in pairs))
        yield Issue(f"{section}: {len(pairs):,} tensors are {description}: {names_text}", None, section, help, severity)


@rule(Severity.WARNING, needs_values, cases={"not multiplied": Severity.NOTE})
def denormal(subject: Subject) -> Iterator[Issue]:
    """Many values of a tensor are denormal: smaller than the smallest normal number of the dtype.

    Why: a CPU takes about a hundred times longer for a denormal operand. With 1 % of them, a matrix product takes ten
    times as long or more, although these values are practically zero. Denormal values come from weight decay on weights
    without a gradient. A tensor is reported if at least 1 % and at least 4,096 of its values are denormal; fewer values
    cost less than 0.15 ms a row. Tensors that are not multiplied are a note: biases, and an optimizer's moments,
    because moments decay without a gradient. float16 and smaller dtypes are not reported, because they are widened
    before a computation.

    Example: `embed.weight`, of which 30 % have decayed to 1e-40.

    Fix: set values below the smallest normal number to zero, or call `torch.set_flush_denormal(True)`.
    """
    for tensor, facts in _list_facts(subject):
        widened = tensor.dtype.startswith(("float16", "float8", "float4"))
        if not widened and facts.denormal >= max(MIN_DENORMALS, MIN_DENORMAL_SHARE * facts.elements):
            is_factor = tensor.kind in REGISTERED_KINDS and len(tensor.shape or ()) > 1
            text = _describe_count(facts.denormal, facts, "denormal")
            severity = None if is_factor else denormal.cases["not multiplied"]
            help = "set these values to zero, or call torch.set_flush_denormal(True)"
            yield report_tensor(subject, tensor, text, help, severity)


def _needs_known_dtype(subject: Subject) -> str | None:
    dtypes = [dtype for dtype in subject.policy.dtype if dtype in OVERFLOW_LIMITS]
    return None if dtypes else "no floating-point dtype is configured: set policy.dtype"


@rule(Severity.ERROR, needs_values, _needs_known_dtype)
def overflows_dtype(subject: Subject) -> Iterator[Issue]:
    """A value is too large for the dtype required by the policy: a cast gives infinity, NaN or the largest number.

    Why: `model.to(torch.float16)` silently turns a value of 70,000 into infinity, and then forward gives infinity or
    NaN. The limit is half a step above the dtype's largest number: 65,520 for float16. A float8 dtype without infinity
    gives NaN instead, or the largest number. An optimizer's state is not cast with the model and is not checked.

    Example: `policy.dtype = ["float16"]` and a weight with a value of -81,250.

    Fix: cast to bfloat16, which has the range of float32, or scale the weight down.
    """
    policy_dtypes = subject.policy.dtype
    for tensor, facts in _list_facts(subject):
        is_float = "float" in tensor.dtype and tensor.kind is not Kind.OPTIMIZER
        if not is_float or tensor.dtype in policy_dtypes or facts.low is None or facts.high is None:
            continue
        furthest = max(facts.low, facts.high, key=abs)
        if all(overflows(furthest, dtype) for dtype in policy_dtypes):
            text = f"value {furthest:.6g} overflows {' and '.join(policy_dtypes)}"
            yield report_tensor(subject, tensor, text, "cast to a dtype with the range of float32, such as bfloat16")


def overflows(value: float, dtype: str) -> bool:
    """Return whether a finite value rounds to infinity or NaN in `dtype`; False for an unknown dtype."""
    limit, includes_limit = OVERFLOW_LIMITS.get(dtype, (math.inf, True))
    return abs(value) > limit if includes_limit else abs(value) >= limit


@rule(Severity.NOTE, needs_values)
def duplicate_values(subject: Subject) -> Iterator[Issue]:
    """Tensors have the same bytes, shape and dtype, but are not tied.

    Why: each copy takes space, and weights that were tied in the model are trained separately after a load. Copies may
    be intended: copied layers start equal. Constants, buffers, tensors smaller than 1 kB and values computed by each
    layer in the same way (`A_log` of Mamba) are not reported. Tensors of two sections (a model and its average) are not
    compared.

    Example: `lm_head.weight` and `embed.weight` are tied in the model, but were cloned before saving.

    Fix: tie the tensors in the model, or save a single tensor and tie the other when loading.
    """
    groups: dict[object, list[TensorInfo]] = {}
    for tensor, facts in _list_facts(subject):
        is_reported = (
            tensor.kind is not Kind.BUFFER
            and tensor.nbytes >= MIN_REPORTED_BYTES
            and not _UNIFORM_AT_START.search(tensor.fqn)
        )
        if is_reported and facts.digest and facts.only is None:
            groups.setdefault((tensor.section, tensor.dtype, tensor.shape, facts.digest), []).append(tensor)
    sections: dict[str, list[list[TensorInfo]]] = {}
    for group in groups.values():
        if len(group) > 1:
            sections.setdefault(group[0].section, []).append(group)
    for section, section_groups in sections.items():
        yield _build_duplicates_issue(subject, section, section_groups)


def _build_duplicates_issue(subject: Subject, section: str, groups: list[list[TensorInfo]]) -> Issue:
    """Return an issue for a section's duplicates: names of one group, or number and first pairs of several groups."""
    first, *others = groups[0]
    size = sum(group[0].nbytes * (len(group) - 1) for group in groups)
    copies_text, help = f"{format_size(size)} saved more than once", "tie the tensors, or keep one of them"
    if len(groups) == 1:
        names_text = join_names(tuple(map(subject.name_of, others)))
        text = f"has the same values as {names_text}: {copies_text}"
        return report_tensor(subject, first, text, help)
    pairs = tuple(f"{subject.name_of(group[1])} duplicates {subject.name_of(group[0])}" for group in groups)
    count = sum(map(len, groups)) - len(groups)
    text = f"{count:,} tensors duplicate the values of others, {copies_text}: {join_names(pairs)}"
    return Issue(f"{section}: {text}", None, section, help)


@rule(Severity.WARNING, needs_values, cases={"expected": Severity.NOTE})
def unread_values(subject: Subject) -> Iterator[Issue]:
    """The values of a tensor could not be read as numbers, so rules have not checked the values.

    Why: a rule that did not run has not passed. The finding is a warning for a non-numeric dtype, a quantized tensor
    without its scale, and a view with too many overlapping elements. The finding is a note for text, and for a tensor
    on meta, because meta has no values. Without `--values`, the finding is always a note, and the verdict counts the
    tensors. Unreadable bytes are not a finding: the target fails, and no option or baseline accepts the failure.

    Example: `codes` of dtype bits8.

    Fix: inspect the tensor with the tool that wrote the file, or exclude the tensor with `-x`.
    """
    for tensor, facts in zip(subject.state.tensors, subject.values or (), strict=True):
        if facts.reason is not None and not facts.damaged:
            has_none = tensor.device == "meta" or tensor.dtype.startswith("numpy") or tensor.shape is None
            severity = unread_values.cases["expected"] if has_none or not subject.values_requested else None
            text = f"values not read: {facts.reason}"
            yield report_tensor(subject, tensor, text, "exclude the tensor with -x", severity)


RULES = (nan, inf, sparse_indices, all_zero, constant, denormal, overflows_dtype, duplicate_values, unread_values)
