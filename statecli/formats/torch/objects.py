"""Convert a pickle's object graph to a `ModelState` with tensors and names by section. Nothing is executed.

The parts are `sections.py` (containers with a model's or an optimizer's state), `tensor_decoder.py` (a rebuild call ->
one tensor, checked against the bytes of the file), `whole_module.py` (a pickled nn.Module, grouped by its own
__dict__), `optimizers.py` (the trained parameters), `state_dict.py` (a section as seen by load_state_dict) and
`settings.py` (other numbers and words).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from statecli.core import quoting
from statecli.core.dtypes import STORAGE_DTYPES
from statecli.core.errors import MalformedError
from statecli.core.format_traits import FormatTraits
from statecli.core.model_state import ByteRange, Evidence, Kind, ModelState, Oddity, TensorInfo
from statecli.core.oddity_kind import OddityKind
from statecli.formats.torch.optimizers import collect_optimizer_facts, has_training_facts
from statecli.formats.torch.reading import MAX_ROWS, DecodedTensor, Reading, build_row
from statecli.formats.torch.sections import Search, Section, find_sections
from statecli.formats.torch.settings import collect_settings
from statecli.formats.torch.state_dict import read_state_dict
from statecli.formats.torch.tensor_decoder import TensorDecoder, WholeTensor
from statecli.formats.torch.whole_module import collect_module_rows
from statecli.pickles import safe_globals
from statecli.pickles.graph import (
    LEAF_TYPES,
    as_mapping,
    format_subscript,
    get_attributes,
    get_name,
    iter_children,
    iter_non_items,
    strip_compile_wrapper,
)
from statecli.pickles.nodes import Obj, Pickle


def build_state(
    pickle: Pickle,
    storages: Mapping[str, ByteRange],
    *,
    target: str,
    format: str,
    traits: FormatTraits,
    oddities: list[Oddity],
    requested_section: str | None = None,
    dtypes: Mapping[str, str] = STORAGE_DTYPES,
    reads_all_storages: bool = False,
) -> ModelState:
    """Build the state of a pickled object: every tensor, grouped into sections.

    `requested_section` must be a section if given. `dtypes` are the dtypes of storage classes. A pickle without a
    tensor has the oddity `no-tensors`, unless it is the state of an optimizer. A tensor that contradicts the file's
    storages has `damage`. `reads_all_storages`: the loader also reads storages without a tensor, so a storage that
    contradicts the file raises MalformedError.
    """
    # Only for torch.load: torch.jit.load gives each tensor the type in its own description, not in the first
    # description of its storage.
    described = pickle.persistent if dtypes is STORAGE_DTYPES else ()
    reading = Reading(TensorDecoder(storages, dtypes, described), list(oddities))
    for key in pickle.duplicate_keys:
        key_text = format_subscript(key)[1:-1] or f"({type(key.value).__name__})"
        message = f"the key {key_text} is set twice; torch.load and statecli use the last value"
        reading.add_oddity("key-set-twice", message)
    sections = find_sections(pickle.root, Search(reading.decoder), requested_section)
    tensors: list[TensorInfo] = []
    for section in sections:
        tensors.extend(
            row if isinstance(row, TensorInfo) else build_info(row, section.path, target)
            for row in _build_rows(section, reading)
        )
        if len(tensors) > MAX_ROWS:
            raise MalformedError(f"contains more than {MAX_ROWS} tensors, the limit of statecli")
    # An optimizer has no tensors before its first step, or as SGD without momentum.
    if not tensors and not any(section.role == "optimizer" and section.node is pickle.root for section in sections):
        reading.add_oddity(OddityKind.NO_TENSORS.value, f"contains no tensor: the object is {_describe(pickle.root)}")
    if bare_storages := list(dict.fromkeys(reading.decoder.bare_storages)):
        names = quoting.names(bare_storages)
        reading.add_oddity("bare-storage", f"storages without a tensor are shown as one-dimensional tensors: {names}")
    if reads_all_storages and not any(tensor.damage for tensor in tensors):
        reading.decoder.check_storages(pickle.persistent)
    metadata = collect_settings(pickle.root, reading)
    state_dicts = tuple(read_state_dict(s, reading) for s in sections if s.role in ("model", "module"))
    name_globals(pickle, reading)
    sections_with_tensors = {tensor.section for tensor in tensors}
    return ModelState(
        target=target,
        format=format,
        tensors=tuple(tensors),
        sections=tuple(section.path for section in sections if section.path in sections_with_tensors),
        metadata=metadata,
        oddities=tuple(reading.oddities),
        globals=tuple((mention.qualified, mention.position) for mention in pickle.globals),
        optimizers=tuple(collect_optimizer_facts(s, reading) for s in sections if has_training_facts(s)),
        state_dicts=state_dicts,
        traits=traits,
    )


def _describe(node: Any) -> str:
    if type(node) is Obj:
        return f"an object of {get_name(node.cls) or 'an unknown class'}"
    if node is None:
        return "None"
    length = f" of length {len(node)}" if type(node) in (dict, list, tuple) else ""
    return f"{'an' if type(node) is int else 'a'} {type(node).__name__}{length}"


def name_globals(pickle: Pickle, reading: Reading) -> None:
    """Add an `Oddity` about a pickle's names outside torch, because torch.load would import or call these names."""
    names = safe_globals.find_foreign_names([mention.qualified for mention in pickle.globals])
    if names:
        name_list = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        noun = "a function or class" if len(names) == 1 else f"{len(names)} functions or classes"
        reading.add_oddity(
            OddityKind.FOREIGN_GLOBALS.value,
            f"torch.load(weights_only=False) imports or calls {noun} listed in this file: {name_list}; to check the "
            "file, run statecli audit",
        )


def _build_rows(section: Section, reading: Reading) -> Iterator[DecodedTensor | TensorInfo]:
    if section.role == "module":
        module = strip_compile_wrapper(section.node)
        return collect_module_rows(module, reading, prefix="_orig_mod." if module is not section.node else "")
    if section.role == "optimizer":
        return _build_optimizer_rows(section.node, reading)
    return _build_state_rows(section, reading, *_KINDS.get(section.role, (Kind.PARAMETER, Evidence.ASSUMED)))


#: Kind and evidence of the entries of a dict, by the role of its section.
_KINDS = {"moments": (Kind.OPTIMIZER, Evidence.OPTIMIZER), "other": (Kind.OTHER, Evidence.CONVENTION)}


def _build_state_rows(
    section: Section, reading: Reading, kind: Kind, evidence: Evidence
) -> Iterator[DecodedTensor | TensorInfo]:
    """Yield the entries of a dict with their keys as names, and nested tensors with their Python paths as names."""
    node, find_whole = section.node, reading.decoder.find_whole
    tensor = reading.tensor(node, "tensor")
    if tensor is not None:
        yield build_row("tensor", tensor, kind, evidence)
        return
    items = as_mapping(node)
    if items is None:
        named_children: Iterator[tuple[str, Any]] = (
            (step.removeprefix("."), child) for step, child in iter_children(node)
        )
    else:
        numbered = enumerate(items.items())
        entries = (
            (key if type(key) is str else format_subscript(key) or f"[#{i}]", child) for i, (key, child) in numbered
        )
        named_children = chain(entries, ((step.removeprefix("."), child) for step, child in iter_non_items(node)))
    tensor_of = reading.tensor
    seen = {id(node)}
    for path, child in named_children:
        whole_tensor = find_whole(child)
        if whole_tensor is not None:
            yield _build_whole_info(path, whole_tensor, section.path, kind, evidence)
            continue
        tensor = tensor_of(child, path)
        if tensor is not None:
            yield build_row(path, tensor, kind, evidence)
        elif type(child) not in LEAF_TYPES:
            yield from _build_nested_rows(path, child, reading, kind, evidence, seen)


def _build_nested_rows(
    path: str, node: object, reading: Reading, kind: Kind, evidence: Evidence, seen: set[int]
) -> Iterator[DecodedTensor]:
    for child in reading.walk(node, path, seen=seen):
        if child.tensor is None:
            yield from collect_module_rows(strip_compile_wrapper(child.node), reading, prefix=child.path + ".")
        else:
            yield build_row(child.path, child.tensor, kind, evidence)


def _build_optimizer_rows(node: object, reading: Reading) -> Iterator[DecodedTensor]:
    items = as_mapping(node)
    if items is None:
        items = get_attributes(node)
    seen = {id(node)}
    for key, value in items.items():
        if type(key) is not str or type(value) in LEAF_TYPES:
            continue
        for child in reading.walk(value, key, seen=seen):
            if child.tensor is not None:
                yield build_row(child.path, child.tensor, Kind.OPTIMIZER, Evidence.OPTIMIZER)


def _build_whole_info(fqn: str, tensor: WholeTensor, section: str, kind: Kind, evidence: Evidence) -> TensorInfo:
    """Build the tensor row of a state_dict entry. Such tensors are detached, so requires_grad=False means unknown."""
    dtype, device, length, shape, elements = tensor.layout
    return TensorInfo(
        fqn,
        dtype,
        shape,
        elements,
        length,
        section,
        kind,
        evidence,
        None,
        device,
        tensor.requires_grad or None,
        saved=True,
        storage=tensor.storage,
        storage_bytes=length,
        data=tensor.data,
    )


def build_info(row: DecodedTensor, section: str, target: str) -> TensorInfo:
    """Convert a decoded tensor to a `TensorInfo`."""
    tensor = row.tensor
    note = "; ".join(text for text in (row.note, tensor.note) if text) or None if row.note else tensor.note
    return TensorInfo(
        row.fqn,
        tensor.dtype,
        tensor.shape,
        tensor.elements,
        tensor.nbytes,
        section,
        row.kind,
        row.evidence,
        row.persistent,
        tensor.device,
        row.requires_grad,
        saved=row.saved,
        layout=tensor.layout,
        aliases=row.aliases,
        note=note,
        storage=tensor.storage,
        storage_bytes=tensor.storage_bytes,
        storage_offset=tensor.data.offset if tensor.data else 0,
        data=tensor.data,
        parts=tensor.parts,
        damage=f"{target}: {tensor.damage}" if tensor.damage else None,
        within=row.within,
        derived=row.derived,
        note_kind=row.note_kind or tensor.note_kind,
    )
