"""Find the quantized weights of a checkpoint: the tensors that together store a weight, by their names and shapes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from statecli.core.dtypes import INTEGER_DTYPES
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, TensorInfo
from statecli.core.quantized_codes import may_be_quantized
from statecli.core.quantized_layouts import (
    E8M0_DTYPES,
    LAYOUTS,
    NESTED,
    SCALED_DTYPES,
    LayoutNames,
    QuantizedLayout,
    QuantizedPart,
)


class QuantizedWeight(msgspec.Struct, frozen=True):
    """Weight stored as quantized codes. `fqn` is its name before quantization.

    Attributes:
        divisor: Divisor of the scales.
        square: Side of the square blocks that have one scale each, if the layout has such blocks.
        in_one_row: True if the parts are the inner tensors of one tensor.
        missing: Full names of tensors that the layout requires and the checkpoint lacks.
    """

    fqn: str
    layout: QuantizedLayout
    parts: Mapping[QuantizedPart, TensorInfo]
    divisor: float = 1.0
    square: int | None = None
    in_one_row: bool = False
    missing: tuple[str, ...] = ()

    @property
    def codes(self) -> TensorInfo:
        """The tensor with the codes."""
        return self.parts[QuantizedPart.CODES]


class LostCodes(msgspec.Struct, frozen=True):
    """Scales of a quantized weight whose codes are missing.

    Attributes:
        codes: Full name of the missing tensor.
        scales: The row of the scales.
        whole: Number of weights of the layout that have all tensors.
    """

    codes: str
    scales: TensorInfo
    whole: int


_INNER_TENSORS = {"qdata": QuantizedPart.CODES, "scale": QuantizedPart.SCALES, "zero_point": QuantizedPart.ZEROS}
_LAST_NAMES = frozenset(name for layout in LAYOUTS for name in (*layout.required, *layout.optional))
#: Last names that only codes have, unlike `weight`, which is also the name of unquantized weights.
_OWN_NAMES_OF_CODES = frozenset(["qweight", "weight_packed", "_weight_qdata", "_blocks"])
#: Parts that a library needs to load a weight, by layout. If no weight of the file has the part, the file may be of
#: another version.
_NEEDED_BY_LOADERS = {
    QuantizedLayout.BITSANDBYTES: QuantizedPart.STATE,
    QuantizedLayout.PACKED: QuantizedPart.SHAPE,
    QuantizedLayout.GPTQ: QuantizedPart.GROUPS,
}
_INDEX = compile_on_use(r"(?:(?<=\.)|^)\d+(?=\.|$)")


def find_quantized_weights(rows: Iterable[TensorInfo]) -> Iterator[QuantizedWeight]:
    """Yield the quantized weights among the tensors of a section."""
    for module, tensors_by_name in _group_by_module(rows).items():
        if (names := _find_layout(tensors_by_name)) is not None:
            yield _build_weight(module, tensors_by_name, names)


def find_all_quantized_weights(rows: Iterable[TensorInfo]) -> list[QuantizedWeight]:
    """Return the quantized weights of a section, including weights that lack tensors or whose tensors do not fit."""
    modules = _group_by_module(rows)
    layouts = {module: _find_layout(tensors_by_name) for module, tensors_by_name in modules.items()}
    whole_weights = _WholeWeights(modules, layouts)
    incomplete_layouts = {
        module: names
        for module, tensors_by_name in modules.items()
        if layouts[module] is None and (names := _choose_incomplete(tensors_by_name, whole_weights)) is not None
    }
    incomplete = Counter(map(id, incomplete_layouts.values()))
    for module, names in incomplete_layouts.items():
        if not _may_be_plain_float8(modules[module], names) or whole_weights.has_sibling(
            module, modules[module], names, incomplete[id(names)]
        ):
            layouts[module] = names
    return [
        _build_weight(module, modules[module], names, whole_weights.needed_name(names, modules[module]))
        for module, names in layouts.items()
        if names is not None
    ]


def find_lost_codes(tensors: Sequence[TensorInfo]) -> list[LostCodes]:
    """Return the scales whose codes are missing, in sections that have complete weights of the same layout."""
    lost_codes: list[LostCodes] = []
    for rows in _group_by_section(tensors).values():
        modules = _group_by_module(rows)
        layouts = {module: _find_layout(tensors_by_name) for module, tensors_by_name in modules.items()}
        counts = Counter(id(names) for names in layouts.values() if names is not None)
        if not counts:
            continue
        # A matrix outside all layouts may contain codes of an unknown layout.
        unmatched_rows = (
            row for row in rows if len(row.shape or ()) > 1 and _split_name(row.fqn)[1] not in _LAST_NAMES
        )
        matrices = {row.fqn.rpartition(".")[0] for row in unmatched_rows}
        for module in [module for module, names in layouts.items() if names is None and module not in matrices]:
            for names in (names for names in LAYOUTS if counts[id(names)] and names.owner):
                scales = next((name for name, part in names.required.items() if part is QuantizedPart.SCALES), "")
                if scales in modules[module] and names.codes not in modules[module]:
                    codes = f"{module}.{names.codes}".removeprefix(".")
                    lost_codes.append(LostCodes(codes, modules[module][scales], counts[id(names)]))
                    break
    return lost_codes


def find_quantized_by_section(tensors: Sequence[TensorInfo]) -> list[QuantizedWeight]:
    """Return the quantized weights of all model sections, also incomplete weights, or [] if no tensor holds codes."""
    rows_by_section = _group_by_section(tensors).values()
    return [weight for rows in rows_by_section for weight in find_all_quantized_weights(rows)]


def _group_by_section(tensors: Sequence[TensorInfo]) -> dict[str, list[TensorInfo]]:
    """Return the tensors of models by section, or {} if no tensor holds codes."""
    sections: dict[str, list[TensorInfo]] = {}
    if not may_be_quantized(tensors):
        return sections
    for tensor in tensors:
        if tensor.kind not in (Kind.OPTIMIZER, Kind.OTHER):
            sections.setdefault(tensor.section, []).append(tensor)
    return sections


class _WholeWeights:
    """Complete quantized weights of a section, with which incomplete weights are compared."""

    def __init__(
        self, modules: Mapping[str, Mapping[str, TensorInfo]], layouts: Mapping[str, LayoutNames | None]
    ) -> None:
        self.counts: Counter[int] = Counter()
        self._kinds: Counter[tuple[int, str]] = Counter()
        self._groups: set[tuple[int, str, str]] = set()
        self._needed: dict[int, Counter[str]] = {}
        for module, names in layouts.items():
            if names is None:
                continue
            tensors_by_name, layout = modules[module], id(names)
            self.counts[layout] += 1
            self._kinds[layout, tensors_by_name[names.codes].dtype] += 1
            self._groups.add((layout, tensors_by_name[names.codes].dtype, _name_group(module)))
            needed_part = _NEEDED_BY_LOADERS.get(names.layout)
            needed_names = (
                name for name, part in names.optional.items() if part is needed_part and name in tensors_by_name
            )
            self._needed.setdefault(layout, Counter()).update(needed_names)

    def has_sibling(
        self, module: str, tensors_by_name: Mapping[str, TensorInfo], names: LayoutNames, incomplete: int
    ) -> bool:
        """Return True if the block has a complete weight, or at least half of the layout's weights are complete."""
        dtype = tensors_by_name[names.codes].dtype
        is_same_block = (id(names), dtype, _name_group(module)) in self._groups
        return is_same_block or self._kinds[id(names), dtype] >= incomplete

    def needed_name(self, names: LayoutNames, tensors_by_name: Mapping[str, TensorInfo]) -> str | None:
        """Return the last name component of a missing tensor that loaders need and complete weights have, or None."""
        needed_part = _NEEDED_BY_LOADERS.get(names.layout)
        if needed_part is None or any(
            part is needed_part and name in tensors_by_name for name, part in names.optional.items()
        ):
            return None
        return next((name for name, _ in self._needed.get(id(names), Counter()).most_common(1)), None)


def _name_group(module: str) -> str:
    """Return the name of a module's block, with `*` for numbers: `layers.*.mlp` for `layers.3.mlp.up_proj`."""
    return _INDEX.sub("*", module.rpartition(".")[0])


def _may_be_plain_float8(tensors_by_name: Mapping[str, TensorInfo], names: LayoutNames) -> bool:
    """Return True if a weight is only a float8 tensor called `weight`, without other tensors of the layout."""
    is_alone = not any(name in tensors_by_name for name in (*names.required, *names.optional) if name != names.codes)
    return is_alone and names.codes == "weight" and tensors_by_name["weight"].dtype.startswith("float8")


def split_codes(row: TensorInfo) -> QuantizedWeight | None:
    """Return the quantized weight of a torchao tensor subclass, from its inner tensors, or None for other tensors."""
    if not row.parts:
        return None
    parts = {
        _INNER_TENSORS[name]: replace(
            row, fqn=f"{row.fqn}.{name}", dtype=data.dtype, shape=data.shape, data=data, parts=()
        )
        for name, data in row.parts
        if name in _INNER_TENSORS
    }
    if len(parts) < len(row.parts) or not {QuantizedPart.CODES, QuantizedPart.SCALES} <= parts.keys():
        return None
    is_scaled = parts[QuantizedPart.CODES].dtype in SCALED_DTYPES and parts[QuantizedPart.CODES].shape == row.shape
    return QuantizedWeight(row.fqn, QuantizedLayout.SCALED, parts, in_one_row=True) if is_scaled else None


def _group_by_module(rows: Iterable[TensorInfo]) -> dict[str, dict[str, TensorInfo]]:
    modules: dict[str, dict[str, TensorInfo]] = {}
    rows = list(rows)
    for row in rows:
        module, name = _split_name(row.fqn)
        if name in _LAST_NAMES:
            modules.setdefault(module, {})[name] = row
    owners = {module for module, tensors_by_name in modules.items() if "_scale_inv" in tensors_by_name}
    for row in rows if owners else ():
        if row.fqn in owners:
            modules[row.fqn][""] = row
    return modules


def _split_name(fqn: str) -> tuple[str, str]:
    """Split a tensor's name into its module and its last part, such as `weight.absmax` for bitsandbytes.

    `experts.down_proj_blocks` is `_blocks` of `experts.down_proj`.
    """
    start, middle, end = fqn.rpartition("weight.")
    if middle and (not start or start.endswith(".")):
        return start.rstrip("."), middle + end
    if fqn.endswith(("_blocks", "_scales")):
        return fqn[: -len("_blocks")], fqn[-len("_blocks") :]
    if fqn.endswith("_scale_inv") and not fqn.endswith("weight_scale_inv"):
        return fqn.removesuffix("_scale_inv"), "_scale_inv"
    module, _, name = fqn.rpartition(".")
    return module, name


def _find_layout(tensors_by_name: Mapping[str, TensorInfo]) -> LayoutNames | None:
    """Return the layout if a module has all of its required tensors, in possible shapes. Otherwise return None."""
    for names in LAYOUTS:
        parts = _take_parts(names, tensors_by_name) if tensors_by_name.keys() >= names.required.keys() else None
        if parts is not None and _has_layout(names.layout, parts):
            return names
    return None


def _build_weight(
    module: str, tensors_by_name: Mapping[str, TensorInfo], names: LayoutNames, needed_name: str | None = None
) -> QuantizedWeight:
    """Build a quantized weight. `needed_name`: last component of a missing tensor that other weights have."""
    separator = "" if names.owner == "" and names.codes in ("", "_blocks") else "." if module else ""
    parts = _take_parts(names, tensors_by_name) or {}
    missing_names = [
        name for name in (*names.required, *_list_nested_names(names, parts)) if name not in tensors_by_name
    ]
    missing_names += [needed_name] if needed_name is not None else []
    missing = tuple(f"{module}{separator}{name}" for name in missing_names)
    fqn = ".".join(filter(None, (module, names.owner)))
    return QuantizedWeight(fqn, names.layout, parts, names.divisor, names.square, missing=missing)


def _list_nested_names(names: LayoutNames, parts: Mapping[QuantizedPart, TensorInfo]) -> tuple[str, ...]:
    """Return the names of both tables for quantized scales, if bitsandbytes quantized the scales too, else ()."""
    if names.layout is not QuantizedLayout.BITSANDBYTES:
        return ()
    scales = parts.get(QuantizedPart.SCALES)
    is_nested = scales is not None and scales.dtype == "uint8"
    return tuple(NESTED) if is_nested or not parts.keys().isdisjoint(NESTED.values()) else ()


def _take_parts(
    names: LayoutNames, tensors_by_name: Mapping[str, TensorInfo]
) -> dict[QuantizedPart, TensorInfo] | None:
    """Return the tensors of the layout by role, or None if the codes are missing or have another dtype."""
    parts = {
        part: tensors_by_name[name]
        for name, part in {**names.required, **names.optional}.items()
        if name in tensors_by_name
    }
    return parts if QuantizedPart.CODES in parts and parts[QuantizedPart.CODES].dtype in names.dtypes else None


def _has_layout(layout: QuantizedLayout, parts: Mapping[QuantizedPart, TensorInfo]) -> bool:
    """Return True if the shapes of codes and scales fit the layout. GPTQ and AWQ differ in shapes, but not in names."""
    codes, scales = (parts[part].shape or () for part in (QuantizedPart.CODES, QuantizedPart.SCALES))
    if layout is QuantizedLayout.GPTQ:
        return len(codes) == len(scales) == 2 and codes[1] == scales[1]
    if layout is QuantizedLayout.AWQ:
        return len(codes) == len(scales) == 2 and codes[1] * 8 == scales[1] and codes[0] % max(scales[0], 1) == 0
    if layout is QuantizedLayout.BITSANDBYTES:
        return math.prod(codes) > 0
    if layout is QuantizedLayout.MXFP4:
        return len(codes) == 2 and parts[QuantizedPart.SCALES].dtype in E8M0_DTYPES
    if layout is QuantizedLayout.MXFP4_EXPERTS:
        return len(codes) > 2 and codes[-1] == 16
    return len(codes) >= 2 if layout is QuantizedLayout.SCALED else len(codes) == 2


def _choose_incomplete(tensors_by_name: Mapping[str, TensorInfo], whole_weights: _WholeWeights) -> LayoutNames | None:
    """Return the layout of a weight that lacks tensors or whose tensors do not fit. Return None for a plain weight.

    A tensor called `weight` is codes if other tensors of the layout belong to the tensor. It is also codes if its dtype
    is an integer or float8, and if whole weights have the layout.
    """

    def rank(names: LayoutNames) -> tuple[int, int]:
        return sum(name in tensors_by_name for name in (*names.required, *names.optional)), whole_weights.counts[
            id(names)
        ]

    candidates = [
        names
        for names in LAYOUTS
        if (parts := _take_parts(names, tensors_by_name)) is not None
        and len(parts[QuantizedPart.CODES].shape or ()) > 1
        and (
            names.codes in _OWN_NAMES_OF_CODES
            or rank(names)[0] > 1
            or _may_be_codes(parts[QuantizedPart.CODES], names, whole_weights)
        )
    ]
    return max(candidates, key=rank, default=None)


def _may_be_codes(tensor: TensorInfo, names: LayoutNames, whole_weights: _WholeWeights) -> bool:
    return bool(whole_weights.counts[id(names)]) and (
        tensor.dtype in INTEGER_DTYPES or tensor.dtype.startswith("float8")
    )
