"""Find arguments for which the class has the same shapes and number of layers as the checkpoint."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations, islice, product

from msgspec.structs import replace

from statecli import live
from statecli.commands.explain.diagnose import LoadSubject, build_subject, diagnose
from statecli.commands.explain.model_code import change_argument, list_integer_arguments
from statecli.commands.explain.result import Cause, CauseEvidence, Diagnosis
from statecli.commands.explain.source import get_last_parts
from statecli.core.errors import ModelError, UsageError
from statecli.live.spec import ModelSpec

#: Largest number of models built to try other arguments.
MAX_BUILDS = 12

Change = tuple[str, int, int]


def find_resized(subject: LoadSubject, diagnosis: Diagnosis) -> Diagnosis | None:
    """Find arguments with which the class loads the whole checkpoint. Return a diagnosis with them, or None."""
    causes = {evidence.cause for evidence in diagnosis.causes}
    if not causes & {Cause.WIDTH, Cause.OTHER_PART, Cause.OTHER_MODEL}:
        return None
    spec = subject.built_model.spec
    changes = list(_propose_changes(subject, spec))
    for number, tried_changes in enumerate((*((change,) for change in changes), *combinations(changes, 2))):
        if number >= MAX_BUILDS:
            break
        if len({name for name, _, _ in tried_changes}) < len(tried_changes):
            continue
        resized = _try(subject, spec, tried_changes)
        if resized is not None:
            return resized
    return None


def _propose_changes(subject: LoadSubject, spec: ModelSpec) -> Iterator[Change]:
    """Yield (argument, value, size in checkpoint) for each argument whose value is a differing size of the class."""
    sizes = _count_sizes(subject)
    for name, value in list_integer_arguments(spec, subject.built_model.loaded):
        for (old, new), _ in sizes.most_common():
            if old == value:
                yield name, value, new


def _count_sizes(subject: LoadSubject) -> Counter[tuple[int, int]]:
    """Count the pairs of differing sizes (class, checkpoint): tensor dimensions and numbers of layers."""
    counts: Counter[tuple[int, int]] = Counter()
    tails: dict[tuple[str, ...], list[tuple[int, ...]]] = {}
    for name, row in subject.registered.items():
        tails.setdefault(get_last_parts(name), []).append(row.shape or ())
    for row in subject.entries.rows:
        for shape in tails.get(get_last_parts(row.fqn), ()):
            if row.shape is not None and len(shape) == len(row.shape):
                counts.update((old, new) for old, new in zip(shape, row.shape, strict=True) if old != new)
    # A head with another name has the same last component: `fc.weight` for `head.weight`.
    counts.update(dict.fromkeys(_list_other_sizes(subject), 1))
    registered_counts, stored_counts = (_count_children(names) for names in (subject.registered, subject.entries.names))
    layers = {
        (old, new) for old in set(registered_counts.values()) for new in set(stored_counts.values()) if old != new
    }
    counts.update(layers)
    return counts


def _list_other_sizes(subject: LoadSubject) -> Iterator[tuple[int, int]]:
    """Yield (size in class, size in checkpoint) for missing and extra tensors whose shapes differ in one dimension."""
    names = set(subject.entries.names)
    missing_tensors = [(name, row.shape) for name, row in subject.registered.items() if name not in names]
    extra_tensors = [(row.fqn, row.shape) for row in subject.entries.rows if row.fqn not in subject.registered]
    for (name, shape), (extra_name, other_shape) in islice(product(missing_tensors, extra_tensors), 10_000):
        if (
            shape
            and other_shape
            and len(shape) == len(other_shape)
            and name.rpartition(".")[2] == extra_name.rpartition(".")[2]
        ):
            differing = [pair for pair in zip(shape, other_shape, strict=True) if pair[0] != pair[1]]
            if len(differing) == 1:
                yield differing[0]


def _count_children(names: Iterable[str]) -> dict[str, int]:
    """Map each module that has numbered children to the count of these children."""
    numbers: dict[str, set[str]] = {}
    for name in names:
        parts = name.split(".")
        for n, part in enumerate(parts):
            if part.isdigit():
                numbers.setdefault(".".join(parts[:n]), set()).add(part)
    return {module: len(module_numbers) for module, module_numbers in numbers.items()}


def _try(subject: LoadSubject, spec: ModelSpec, changes: Sequence[Change]) -> Diagnosis | None:
    for name, _, value in changes:
        spec = change_argument(spec, subject.built_model.loaded, name, value)
    try:
        built_model = live.build.build(spec, init_device="meta", loaded=subject.built_model.loaded)
        model = live.model_reader.read(built_model, spec.text)
        resized_subject = build_subject(model, built_model, subject.checkpoint)
    except (ModelError, UsageError):
        return None
    if resized_subject is None:
        return None
    diagnosis = diagnose(resized_subject)
    if not diagnosis.loads or diagnosis.initial or diagnosis.unused:
        return None
    texts = [f"{name} {old} → {new}" for name, old, new in changes]
    depth = all(new in _count_children(subject.entries.names).values() for _, _, new in changes)
    cause = Cause.DEPTH if depth else Cause.WIDTH
    message = f"the saved model was built with other arguments than {subject.model.target}: {', '.join(texts)}"
    return replace(diagnosis, causes=(CauseEvidence(cause, message, len(changes), texts[0]), *diagnosis.causes))
