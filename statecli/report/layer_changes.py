"""Changes of layers and of modules outside the layers, and outliers that changed many times more than the median."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from statecli.commands.diff.near_zero import find_near_zero
from statecli.commands.diff.result import Change
from statecli.core.grouping import group_by
from statecli.core.model_state import Kind
from statecli.core.units import format_fqn
from statecli.report.change_text import combine_relative_change

#: Smallest number of layers that show the usual change, and smallest ratio between an outlier and their median.
MIN_LAYERS = 4
MIN_RATIO = 10.0
#: Largest number of modules in a headline.
MAX_NAMES = 8


class ModuleChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Change of the parameters of a layer, or of a module outside the layers.

    Attributes:
        name: `blocks.3`, or `out` for `out.weight` and `out.bias`.
        section: Section of the parameters.
        relative_l2: L2 norm of all Δ over the L2 norm before; null if unknown.
        times_median: The change as a multiple of the median of the layers; left out if the module does not stand out.
        layers: Number of layers that the median is computed from.
    """

    name: str
    section: str
    relative_l2: float | None
    times_median: float | None = None
    layers: int | None = None


def split_module(fqn: str) -> tuple[str, str]:
    """Return the stack and the layer of a parameter: `("blocks", "blocks.3")`, or `("", "out")` outside of a stack."""
    parts = fqn.split(".")
    at = next((n for n, part in enumerate(parts[:-1]) if part.isascii() and part.isdecimal()), None)
    if at is None:
        return "", ".".join(parts[:-1]) or fqn
    return ".".join(parts[:at]) or "(layers)", ".".join(parts[: at + 1])


def list_module_changes(changes: Sequence[Change]) -> tuple[ModuleChange, ...]:
    """Return the modules with a changed parameter, in the order of the changes."""
    changed_parameters = [change for change in changes if change.kind is Kind.PARAMETER and change.values is not None]
    modules = group_by(changed_parameters, lambda change: (change.section, *split_module(change.fqn)))
    sizes = {key: combine_relative_change(rows) for key, rows in modules.items()}
    near_zero = find_near_zero(changes)
    unusual: dict[tuple[str, str], tuple[float, int]] = {}
    for section in dict.fromkeys(section for section, _, _ in sizes):
        section_sizes = {
            (stack, name): size
            for (of, stack, name), size in sizes.items()
            if of == section
            and size is not None
            and (stack or not near_zero.issuperset(map(id, modules[of, stack, name])))
        }
        unusual |= {(section, name): ratio for name, ratio in _find_unusual(section_sizes).items()}
    return tuple(
        ModuleChange(name, section, size, *unusual.get((section, name), ()))
        for (section, _, name), size in sizes.items()
    )


def describe_largest_layers(modules: Sequence[ModuleChange]) -> list[str]:
    """Describe the layers that stand out: `layers.7 changed 101 times as much as the median of 40 layers`."""
    groups: dict[tuple[str, int], list[ModuleChange]] = {}
    for module in sorted(modules, key=lambda module: -(module.times_median or 0.0)):
        if module.layers is not None:
            groups.setdefault((module.section, module.layers), []).append(module)
    return [_describe_unusual(group, layers) for (_, layers), group in groups.items()]


def _describe_unusual(modules: Sequence[ModuleChange], layers: int) -> str:
    names = [format_fqn(module.name) for module in modules[:MAX_NAMES]]
    times = [f"{module.times_median:,.0f} times" for module in modules[:MAX_NAMES]]
    parts = [f"{names[0]} changed {times[0]} as much as the median of {layers:,} layers"]
    parts += [f"{name} {ratio}" for name, ratio in zip(names[1:], times[1:], strict=True)]
    if len(modules) > MAX_NAMES:
        parts.append(f"{len(modules) - MAX_NAMES:,} more at least {MIN_RATIO:.0f} times")
    return ", ".join(parts)


def _find_unusual(sizes: Mapping[tuple[str, str], float]) -> dict[str, tuple[float, int]]:
    """Return, for each unusual module, its change divided by the median, and the number of layers in the median.

    A layer is compared with its stack, and any other module with the largest stack. `sizes` has keys (stack, name).
    """
    stacks: dict[str, dict[str, float]] = {}
    for (stack, name), size in sizes.items():
        stacks.setdefault(stack, {})[name] = size
    outside_sizes = stacks.pop("", {})
    stacks = {stack: stack_sizes for stack, stack_sizes in stacks.items() if len(stack_sizes) >= MIN_LAYERS}
    unusual: dict[str, tuple[float, int]] = {}
    for stack_sizes in stacks.values():
        ratios = _list_ratios(stack_sizes, stack_sizes)
        unusual |= ratios if len(ratios) <= len(stack_sizes) // MIN_LAYERS else {}
    return unusual | (_list_ratios(outside_sizes, max(stacks.values(), key=len)) if stacks else {})


def _list_ratios(sizes: Mapping[str, float], layers: Mapping[str, float]) -> dict[str, tuple[float, int]]:
    ordered_sizes = sorted(layers.values())
    median = ordered_sizes[(len(ordered_sizes) - 1) // 2]
    return {name: (size / median, len(layers)) for name, size in sizes.items() if 0 < MIN_RATIO * median <= size}
