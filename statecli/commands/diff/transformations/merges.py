"""Check whether the new weights are the old weights with a given LoRA adapter merged into them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from statecli.commands.diff.result import Broken, Change, Status, Transformation, TransformationKind
from statecli.commands.diff.transformations.lora import LoraUpdate, parse_adapter
from statecli.commands.diff.transformations.views import flatten, get_data, locate, permute
from statecli.core.dtypes import SPACING
from statecli.core.errors import StateError
from statecli.core.model_state import ModelState, TensorData, TensorInfo
from statecli.values.data_task import compute_derived
from statecli.values.element_checks import CheckResult, CheckTask, Operation, can_cast, check_elements
from statecli.values.merged_update import MergeResult, MergeTask


class MergeCheck(msgspec.Struct, frozen=True):
    """Result of a merge check: transformations keyed by index of the change, and pairs that could not be checked.

    Unchanged tensors have a transformation only if the adapter has an update larger than rounding.
    """

    transformations: dict[int, Transformation]
    broken_pairs: list[Broken]


def check_adapter(changes: Sequence[Change], base: ModelState, adapter: ModelState, *, jobs: int) -> MergeCheck:
    """Compare each new weight with the old weight plus the update of the adapter.

    Updates of tensors of the base that are not among the changes are left out: they were not selected.

    Raises:
        StateError: The adapter has no update.
    """
    adapter_weights = parse_adapter(adapter.tensors, adapter.metadata.values)
    if not adapter_weights.updates and not adapter_weights.unknown:
        raise StateError(f"{adapter.target}: contains no weights of a LoRA adapter (lora_A, lora_B)")
    numbers = {row.fqn: n for n, change in enumerate(changes) if (row := change.before) is not None}
    places = {row.fqn: n for n, row in enumerate(base.tensors)}
    merges: dict[int, Transformation] = {}
    broken_pairs: list[Broken] = []

    def report(number: int | None, row: TensorInfo, problem: str) -> None:
        fqn, section = (row.fqn, row.section) if number is None else (changes[number].fqn, changes[number].section)
        message = f"statecli cannot check whether this update was merged: {problem}"
        broken_pairs.append(Broken(fqn, section, f"{adapter.target}: {row.fqn}: {message}"))

    for module, row in adapter_weights.unknown.items():
        number = _find_number(numbers, f"{module}.weight")
        report(number, row, "statecli checks only plain LoRA, not DoRA or other variants")

    tasks: list[tuple[int, LoraUpdate, MergeTask]] = []
    for update in adapter_weights.updates:
        number = _find_number(numbers, f"{update.module}.weight")
        if number is None and _find_number(places, f"{update.module}.weight") is not None:
            continue
        update_tasks = (
            "the base model has no weight of this name" if number is None else _build_tasks(changes[number], update)
        )
        if number is None or isinstance(update_tasks, str):
            report(number, update.b, str(update_tasks))
        else:
            tasks += [(number, update, task) for task in update_tasks]
    for (number, update, _), result in zip(tasks, compute_derived([task for *_, task in tasks], jobs), strict=True):
        if isinstance(result, MergeResult):
            transformation = _build_transformation(update, result)
            if number not in merges or transformation.exceptions < merges[number].exceptions:
                merges[number] = transformation
        else:
            report(number, update.b, str(result or "a value is NaN or infinite"))

    copies = _list_copies(adapter_weights.replaced, numbers, changes)
    for (number, copy), outcome in zip(copies, check_elements([task for _, task in copies], jobs=jobs), strict=True):
        if isinstance(outcome, CheckResult):
            source = adapter_weights.replaced[copy.name].fqn
            merges[number] = Transformation(
                TransformationKind.MERGED, outcome.elements, outcome.exceptions, sources=(source,)
            )
        else:
            broken_pairs.append(Broken(copy.name, "", str(outcome)))
    reported_merges = {
        n: transformation
        for n, transformation in merges.items()
        if transformation.exceptions or changes[n].status is not Status.IDENTICAL
    }
    return MergeCheck(reported_merges, list(dict.fromkeys(broken_pairs)))  # a square weight is checked both ways


def _list_copies(
    replaced: Mapping[str, TensorInfo], numbers: Mapping[str, int], changes: Sequence[Change]
) -> list[tuple[int, CheckTask]]:
    """Return (index of the change, check) for each tensor that the adapter replaces."""
    return [
        (number, CheckTask(name, operation, *sides))
        for name, row in replaced.items()
        if (number := _find_number(numbers, name)) is not None and (sides := _pair(row, changes[number].after))
        for operation in (Operation.CAST if can_cast(sides[0].dtype, sides[1].dtype) else Operation.COPY,)
    ]


def _find_number(numbers: Mapping[str, int], name: str) -> int | None:
    """Return the index of the tensor `name`, or of the only tensor whose name differs from it by a prefix."""
    if name in numbers:
        return numbers[name]
    similar = [n for other, n in numbers.items() if other.endswith(f".{name}") or name.endswith(f".{other}")]
    return similar[0] if len(similar) == 1 else None


def _pair(before: TensorInfo | None, after: TensorInfo | None) -> tuple[TensorData, TensorData] | None:
    old, new = get_data(before), get_data(after)
    if before is None or after is None or old is None or new is None or old.shape != new.shape:
        return None
    return locate(old, before.fqn), locate(new, after.fqn)


def _build_tasks(change: Change, update: LoraUpdate) -> list[MergeTask] | str:
    """Return the checks of a merged weight, or the reason why the weight cannot be checked.

    The update of a Conv1D (GPT-2), whose weight is [in, out], is transposed. The configuration does not reliably show
    the affected layers, so a square weight is checked both ways.
    """
    pair = _pair(change.before, change.after)
    a, b = get_data(update.a), get_data(update.b)
    if pair is None or a is None or b is None:
        return f"{change.fqn} is not a float tensor of the same shape in both checkpoints"
    sides = [flatten(side) for side in (*pair, locate(a, update.a.fqn), locate(b, update.b.fqn))]
    if not all(data.dtype in SPACING for data in (*pair, a, b)):
        return f"the dtypes are {', '.join(dict.fromkeys(data.dtype for data in (*pair, a, b)))}"
    before, after, a, b = sides
    if before is None or after is None or a is None or b is None or a.shape[0] != b.shape[1]:
        return "the shapes of lora_A and lora_B do not match"
    shape = b.shape[0], a.shape[1]
    factor_pairs = [] if update.is_embedding or before.shape != shape else [(b, a)]
    factor_pairs += [(permute(a, (1, 0)), permute(b, (1, 0)))] if before.shape == shape[::-1] else []
    if not factor_pairs:
        return f"the update has the shape {list(shape)}, but {change.fqn} has {list(before.shape)}"
    return [MergeTask(change.fqn, before, after, *factors, update.scale) for factors in factor_pairs]


def _build_transformation(update: LoraUpdate, result: MergeResult) -> Transformation:
    return Transformation(
        TransformationKind.MERGED,
        result.elements,
        result.exceptions,
        sources=(update.a.fqn, update.b.fqn),
        factor=result.factor,
        rank=update.rank,
        max_abs=result.max_abs,
        fitting_factor=result.fitting_factor,
    )
