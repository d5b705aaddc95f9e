"""Recognise casts to a narrower float type: was each value rounded, and how?"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence

from statecli.commands.diff.result import Change, Field, Rounding, Transformation, TransformationKind
from statecli.commands.diff.transformations.evidence import MIN_BITS, count_bits
from statecli.commands.diff.transformations.ordinary_training import was_replaced
from statecli.commands.diff.transformations.views import get_data, locate
from statecli.values.element_checks import CheckResult, CheckTask, Operation, can_cast, check_elements

#: Smallest number of rounded values if other tensors were replaced, because a few values are rounded by chance.
_MIN_ROUNDED = 8


def find_casts(changes: Sequence[Change], *, is_expected: bool, jobs: int) -> dict[int, Transformation]:
    """Return the casts, keyed by index in `changes`. The check tasks depend only on dtypes, so shards can plan them.

    A change of dtype is a cast if half of the tensors with rounded values follow the same rule: to the nearest value,
    or towards zero. The other tensors are casts with exceptions. If all tensors follow neither rule but have the
    nearest value above or below, the cast rounded to either neighbour. Replaced tensors do not count, because they may
    have moved. All tensors with the same two dtypes together must be evidence, unless a cast is expected.
    """
    tasks: dict[int, CheckTask] = {}
    for n, change in enumerate(changes):
        if Field.DTYPE not in change.fields:
            continue
        before, after = get_data(change.before), get_data(change.after)
        if before is None or after is None or before.shape != after.shape or not can_cast(before.dtype, after.dtype):
            continue
        tasks[n] = CheckTask(change.fqn, Operation.CAST, before, after)
    results = check_elements(list(tasks.values()), jobs=jobs, derived=False)
    by_types: dict[tuple[str, str], dict[int, CheckResult]] = {}
    replaced = {n for n in tasks if was_replaced(changes[n])}
    for (n, task), result in zip(tasks.items(), results, strict=True):
        if isinstance(result, CheckResult) and result.elements:
            by_types.setdefault((task.before.dtype, task.after.dtype), {})[n] = result
    groups = [_judge_group(group, replaced) for group in by_types.values()]
    return {n: cast for group in groups if is_expected or _is_evident(group, tasks) for n, cast in group.items()}


def _is_evident(casts: Mapping[int, Transformation], tasks: Mapping[int, CheckTask]) -> bool:
    """Return True if the tensors without exceptions cannot equal their rounded old values by chance."""
    bits = 0.0
    for n, cast in casts.items():
        if not cast.exceptions:
            bits += count_bits(locate(tasks[n].after, tasks[n].name), tasks[n].name, cast.elements, 0)
        if bits >= MIN_BITS:
            return True
    return False


def _judge_group(results: Mapping[int, CheckResult], replaced: Container[int]) -> dict[int, Transformation]:
    rounded_results = [result for result in results.values() if result.changed]
    if not rounded_results:  # every value exists in the narrower type
        return {n: _build_cast(result, None) for n, result in results.items()}
    voters = [r for n, r in results.items() if r.changed and not (n in replaced and r.not_neighbours)]
    for rounding in (Rounding.NEAREST, Rounding.TRUNCATED):
        fitting = [result for result in voters if not _count_exceptions(result, rounding)]
        is_evidence = len(voters) == len(rounded_results) or sum(result.changed for result in fitting) >= _MIN_ROUNDED
        if 2 * len(fitting) >= len(voters) > 0 and is_evidence:
            return {n: _build_cast(result, rounding) for n, result in results.items()}
    if any(result.not_neighbours for result in rounded_results):
        return {}
    return {n: _build_cast(result, Rounding.STOCHASTIC) for n, result in results.items()}


def _count_exceptions(result: CheckResult, rounding: Rounding | None) -> int:
    if rounding is Rounding.TRUNCATED:
        return result.not_truncated
    return result.not_neighbours if rounding is Rounding.STOCHASTIC else result.exceptions


def _build_cast(result: CheckResult, rounding: Rounding | None) -> Transformation:
    """Return the cast. Prefer `rounding`, the rule that most tensors follow, over a rule that fits only this tensor."""
    rules = (rounding, Rounding.NEAREST, Rounding.TRUNCATED, Rounding.STOCHASTIC)
    fitting_rule = next((rule for rule in rules if not _count_exceptions(result, rule)), None)
    exceptions = result.not_neighbours if fitting_rule is None and rounding is not None else 0
    fitting_rule = fitting_rule if result.changed and not exceptions else None
    return Transformation(TransformationKind.CAST, result.elements, exceptions, rounding=fitting_rule)
