"""The tensors of a target as columns, for a list on a page that the reader can filter and sort."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import msgspec

from statecli.core import sizes
from statecli.core.escaping import escape
from statecli.core.filter_language import LANGUAGE, FilterLanguage
from statecli.core.model_state import TensorInfo, TensorKey
from statecli.core.units import STATS_FIELDS, format_fqn, format_kind, format_origin, format_section, format_shape
from statecli.core.value_distribution import Distribution
from statecli.core.value_spectrum import Spectrum
from statecli.report.tensor_remarks import PROBLEM_WORDS, choose_mood


class Choices(msgspec.Struct, frozen=True):
    """A column of texts that occur several times: row `i` has the text `values[indices[i]]`."""

    values: tuple[str, ...]
    indices: tuple[int, ...]


class SharedStorage(msgspec.Struct, frozen=True, array_like=True):
    """Tensor that shares its storage, or uses an element of the storage more than once. Sums count each storage once.

    Attributes:
        row: Position of the tensor in the list.
        storage: Number of the storage; tensors with the same number share memory.
        view: Number of the part of the storage; tensors with the same number are the same elements.
        bytes: Size of the storage.
    """

    row: int
    storage: int
    view: int
    bytes: int


class OtherNames(msgspec.Struct, frozen=True, array_like=True):
    """Further names by which `-i` selects a row, such as the names of a quantized weight and of its tensors."""

    row: int
    names: tuple[str, ...]


class TensorList(msgspec.Struct, frozen=True):
    """Columns of the list of tensors: each has a value for every tensor, in the target's order. All texts are escaped.

    `bytes` and `elements` are the sums of the whole target with shared storage counted once. `stats` has a column for
    each statistic; `distributions` and `spectra` have an entry for each tensor. They are empty if the values were not
    read. A text of `problems` lists those words of `problem_words` that apply to a tensor.
    """

    bytes: int
    elements: int
    names: tuple[str, ...]
    sections: Choices
    kinds: Choices
    dtypes: Choices
    shapes: Choices
    devices: Choices
    origins: Choices
    remarks: Choices
    moods: Choices
    problems: Choices
    row_elements: tuple[int, ...]
    row_bytes: tuple[int, ...]
    shared: tuple[SharedStorage, ...] = ()
    stats: dict[str, tuple[float | int | str | None, ...]] = {}
    distributions: tuple[Distribution | None, ...] = ()
    other_names: tuple[OtherNames, ...] = ()
    #: Tied names that have no row; a filter finds the row by them.
    aliases: tuple[OtherNames, ...] = ()
    spectra: tuple[Spectrum | None, ...] = ()
    #: The command that reads the values, if they were not read and are worth reading.
    values_command: str = ""
    problem_words: tuple[str, ...] = PROBLEM_WORDS
    language: FilterLanguage = LANGUAGE


def build_tensor_list(
    tensors: Sequence[TensorInfo],
    describe_remark: Callable[[TensorInfo], str],
    list_problems: Callable[[TensorInfo], Sequence[str]],
    format_device: Callable[[TensorInfo], str],
    distributions: Mapping[TensorKey, Distribution],
    other_names: Mapping[TensorKey, Sequence[str]],
    spectra: Mapping[TensorKey, Spectrum],
) -> TensorList:
    """Return the list. The three functions describe a tensor as in the command's rows: its remark, problems and device.

    The keys of `distributions`, `other_names` and `spectra` are the section and name of a tensor.
    """
    totals = sizes.sum_by_kind(tensors)
    problems = [(tensor, list_problems(tensor)) for tensor in tensors]
    return TensorList(
        bytes=sizes.sum_bytes(tensors),
        elements=sum(total.elements for total in totals.values()),
        names=tuple(escape(format_fqn(tensor.fqn)) for tensor in tensors),
        sections=_build_choices(format_section(tensor.section) for tensor in tensors),
        kinds=_build_choices(map(format_kind, tensors)),
        dtypes=_build_choices(tensor.dtype for tensor in tensors),
        shapes=_build_choices(format_shape(tensor.shape) for tensor in tensors),
        devices=_build_choices(map(format_device, tensors)),
        origins=_build_choices(format_origin(t.origin) if t.origin else "" for t in tensors),
        remarks=_build_choices(map(describe_remark, tensors)),
        moods=_build_choices(choose_mood(t) or ("warn" if words else "") for t, words in problems),
        problems=_build_choices(", ".join(words) for _, words in problems),
        row_elements=tuple(tensor.elements for tensor in tensors),
        row_bytes=tuple(tensor.nbytes for tensor in tensors),
        shared=_list_shared_storages(tensors),
        stats=_build_stats(tensors),
        distributions=tuple(distributions.get(t.key) for t in tensors) if distributions else (),
        other_names=tuple(
            OtherNames(row, tuple(map(escape, other_names[t.key])))
            for row, t in enumerate(tensors)
            if t.key in other_names
        ),
        aliases=tuple(OtherNames(row, tuple(map(escape, t.aliases))) for row, t in enumerate(tensors) if t.aliases),
        spectra=tuple(spectra.get(t.key) for t in tensors) if spectra else (),
    )


def _build_choices(texts: Iterable[str]) -> Choices:
    numbers: dict[str, int] = {}
    indices = tuple([numbers.setdefault(text, len(numbers)) for text in texts])
    return Choices(tuple(map(escape, numbers)), indices)


def _list_shared_storages(tensors: Sequence[TensorInfo]) -> tuple[SharedStorage, ...]:
    storages: dict[Hashable, int] = {}
    views: dict[Hashable, int] = {}
    shared_storages = []
    for row, tensor in enumerate(tensors):
        size = tensor.storage_bytes if tensor.layout == "strided" and tensor.storage_bytes is not None else None
        is_expanded = size is not None and tensor.nbytes > size
        if not tensor.tied_to and not is_expanded:
            continue
        key: Hashable = (tensor.storage,) if tensor.tied_to else row
        storage = storages.setdefault(key, len(storages))
        view = views.setdefault((key, tensor.storage_offset, tensor.shape), len(views))
        shared_storages.append(SharedStorage(row, storage, view, tensor.nbytes if size is None else size))
    return tuple(shared_storages)


def _build_stats(tensors: Sequence[TensorInfo]) -> dict[str, tuple[float | int | str | None, ...]]:
    if all(tensor.stats is None for tensor in tensors):
        return {}
    return {name: tuple(getattr(tensor.stats, name, None) for tensor in tensors) for name in STATS_FIELDS}
