"""Find tensors that keep their initial values after the load and make the model differ from the saved model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from statecli import live
from statecli.core.errors import ModelError, UsageError
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.units import join_names
from statecli.live.built_model import BuiltModel

#: Largest number of names in a sentence.
MAX_NAMES = 3
#: Largest number of elements of a model that is built again on the CPU.
MAX_BUILT_ELEMENTS = 1 << 26


def describe_initial_values(initial: Sequence[TensorInfo], built_model: BuiltModel, elements: int) -> Iterator[str]:
    """Yield separate warnings for weights, running statistics and random tensors that keep their initial values.

    `elements` is the number of elements of the whole model.
    """
    weights = [row.fqn for row in initial if row.kind is Kind.PARAMETER and row.requires_grad is not False]
    others = [row for row in initial if row.fqn not in set(weights)]
    if weights:
        are, them = ("are weights", "these weights") if len(weights) > 1 else ("is a weight", "this weight")
        names = join_names(weights, MAX_NAMES)
        yield f"{names} {are} and not loaded from the checkpoint: the loaded model has initial values in {them}"
    statistics = _list_statistics(others, built_model)
    if statistics:
        are = "are running statistics" if len(statistics) > 1 else "is a running statistic"
        yield (
            f"{join_names(statistics, MAX_NAMES)} {are} and not loaded from the checkpoint: in eval mode, the loaded "
            "model normalizes with the initial values"
        )
    drawn, unknown = _split_by_rebuilding(
        [row for row in others if row.fqn not in set(statistics)], built_model, elements
    )
    if drawn:
        is_drawn, is_loaded = ("are drawn", "are not") if len(drawn) > 1 else ("is drawn", "is not")
        yield (
            f"{join_names(drawn, MAX_NAMES)} {is_drawn} at random by the constructor and {is_loaded} loaded from the "
            "checkpoint: the loaded model has other values than the saved model"
        )
    if unknown:
        keep = "keep" if len(unknown) > 1 else "keeps"
        names = join_names(unknown, MAX_NAMES)
        yield f"{names} {keep} initial values, and statecli did not check whether the constructor draws random values"


def _list_statistics(tensors: Sequence[TensorInfo], built_model: BuiltModel) -> list[str]:
    """Return the running means and variances of layers that track them, such as BatchNorm."""
    layers = {
        name for name, module in built_model.module.named_modules() if getattr(module, "track_running_stats", False)
    }
    names = [row.fqn.rpartition(".") for row in tensors]
    return ["".join(name) for name in names if name[0] in layers and name[2] in ("running_mean", "running_var")]


def _split_by_rebuilding(
    tensors: Sequence[TensorInfo], built_model: BuiltModel, elements: int
) -> tuple[list[str], list[str]]:
    """Return the tensors that differ between two CPU builds of the model, and the tensors that cannot be compared."""
    names = [row.fqn for row in tensors]
    if not names:
        return [], []
    if elements > MAX_BUILT_ELEMENTS:
        return [], names
    try:
        on_cpu = (
            live.build.build(built_model.spec, init_device="cpu", values=True)
            if built_model.init_device == "meta"
            else built_model
        )
        rebuilds = live.rebuild.compare_builds(
            lambda seed: on_cpu.build_again(values=True, seed=seed), {row.fqn: row.elements for row in tensors}
        )
    except (ModelError, UsageError):
        return [], names
    kinds = live.rebuild.Rebuild
    drawn = [name for name in names if rebuilds[name] is kinds.DIFFERENT]
    return drawn, [name for name in names if rebuilds[name] in (kinds.ABSENT, kinds.UNKNOWN)]
