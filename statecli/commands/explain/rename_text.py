"""Describe steps that rename the entries of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from statecli.commands.explain.renaming import Step, Substitution
from statecli.commands.explain.result import Cause, CauseEvidence
from statecli.core.units import plural


def describe_renames(names: Sequence[str], steps: Sequence[Step], model: str) -> Iterator[CauseEvidence]:
    """Yield a cause for each prefix that is removed or added, and one cause for all other renamed entries."""
    current = {name: name for name in names}
    texts: list[str] = []
    renamed_names: dict[str, str] = {}
    for step in steps:
        after = {name: step.apply(current_name) for name, current_name in current.items()}
        changed_names = [name for name in after if after[name] != current[name]]
        if _is_prefix(step) and changed_names:
            yield _describe_prefix(
                step, changed_names, len(names), model, f"{changed_names[0]} → {after[changed_names[0]]}"
            )
        elif changed_names:
            texts.append(_describe_step(step))
            renamed_names |= {name: after[name] for name in changed_names}
        current = after
    if texts:
        normed = all("weight_g" in text or "original" in text or "weight_v" in text for text in texts)
        first = next(iter(renamed_names))
        example = f"{first} → {current[first]}"
        if normed:
            message = (
                f"the file stores weight_norm as a parametrization (original0, original1), but {model} uses the "
                "older weight_norm"
            )
            yield CauseEvidence(Cause.WEIGHT_NORM, message, len(renamed_names), example)
        else:
            message = (
                f"{plural(len(renamed_names), 'name')} differ{'s' * (len(renamed_names) == 1)}: {', '.join(texts)}"
            )
            yield CauseEvidence(Cause.RENAMED, message, len(renamed_names), example)


def _is_prefix(step: Step) -> bool:
    if not isinstance(step, Substitution) or step.old is None:
        return False
    if step.at_start:
        return not step.new or not step.old
    return not step.new and step.old.startswith("_")


def _describe_prefix(step: Step, changed_names: Sequence[str], total: int, model: str, example: str) -> CauseEvidence:
    assert isinstance(step, Substitution)  # noqa: S101 - checked by _is_prefix
    count = "all" if len(changed_names) == total else f"{len(changed_names):,} of"
    names = f"{count} {plural(total, 'name')}"
    if step.new:
        message = f"{names} lack the prefix {step.new!r}, which {model} has"
    elif step.at_start:
        message = f"{names} have the prefix {step.old!r}, which {model} does not have"
    else:
        message = f"{names} contain {step.old!r}, which a wrapper adds; the names of {model} do not"
    return CauseEvidence(Cause.PREFIX, message, len(changed_names), example)


def _describe_step(step: Step) -> str:
    if not isinstance(step, Substitution):
        module = step.module.replace("\\d+", "N").replace("\\", "").strip(".")
        return f"the indices in the names of {module or 'the modules'} differ by {step.delta:+d}"
    old = step.old if step.old is not None else step.pattern.replace("\\", "").strip("^$")
    new = step.new if step.old is not None else step.replacement
    return f"{old.strip('.') or 'no prefix'} → {new.strip('.') or 'nothing'}"
