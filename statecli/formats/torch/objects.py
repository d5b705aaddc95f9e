"""From a pickle's inert graph to a `ModelState`: each section's tensors, and what they are called.

_graph.py         what is a mapping, a sequence, an object's attributes
_tensors.py       a rebuild call -> one tensor, checked against the bytes of the file
_sections.py      which containers hold a model's or an optimizer's state
_whole_module.py  a pickled nn.Module, grouped by its own __dict__
_training.py      what the optimizers train
_state_dict.py    what a model's section is to load_state_dict, beside its tensors
_settings.py      numbers and words beside the tensors
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from statecli.core import quoting
from statecli.core.dtypes import STORAGE_DTYPES
from statecli.core.errors import MalformedError
from statecli.core.state import ByteRange, Evidence, Kind, ModelState, Oddity, TensorInfo
from statecli.formats.torch.optimizers import optimizer_facts, tells_of_training
from statecli.formats.torch.reading import MAX_ROWS, Reading, Row, row_of
from statecli.formats.torch.sections import Search, Section, find_sections
from statecli.formats.torch.settings import scalars
from statecli.formats.torch.state_dict import state_dict_of
from statecli.formats.torch.tensors import Decoder
from statecli.formats.torch.whole_module import module_rows
from statecli.pickles import safe_globals
from statecli.pickles.graph import LEAVES, attributes, beside, children, key_path, mapping, name_of, unwrapped
from statecli.pickles.machine import Obj, Pickle


def state_of(
    pickle: Pickle,
    storages: Mapping[str, ByteRange],
    *,
    target: str,
    format: str,
    oddities: list[Oddity],
    wanted: str | None = None,
    dtypes: Mapping[str, str] = STORAGE_DTYPES,
) -> ModelState:
    """Everything that is a tensor in the pickled object, grouped into sections, of which `wanted` is to be one.

    `dtypes` are those of its storages' classes. A pickle without a tensor has the oddity `no-tensors`. One that
    contradicts the storages of the file has `damage`.
    """
    reading = Reading(Decoder(storages, dtypes), list(oddities))
    for key in pickle.duplicate_keys:
        reading.odd("key-set-twice", f"the key {key!r} is set twice: the last one counts, as in torch")
    sections = find_sections(pickle.root, Search(reading.decoder), wanted)
    tensors: list[TensorInfo] = []
    for section in sections:
        tensors.extend(info_of(row, section.path, target) for row in _rows(section, reading))
        if len(tensors) > MAX_ROWS:
            raise MalformedError(f"holds more than {MAX_ROWS} tensors")
    if not tensors:
        reading.odd("no-tensors", f"holds no tensor: the pickle is {_describe(pickle.root)}")
    if bare := list(dict.fromkeys(reading.decoder.bare)):
        reading.odd("bare-storage", f"saved as a storage, shown as a tensor of one dimension: {quoting.names(bare)}")
    metadata = scalars(pickle.root, reading)
    state_dicts = tuple(state_dict_of(s, reading) for s in sections if s.role in ("model", "module"))
    name_globals(pickle, reading)
    held = {tensor.section for tensor in tensors}
    return ModelState(
        target=target,
        format=format,
        tensors=tuple(tensors),
        sections=tuple(section.path for section in sections if section.path in held),
        metadata=metadata,
        oddities=tuple(reading.oddities),
        globals=tuple((found.qualified, found.position) for found in pickle.globals),
        optimizers=tuple(optimizer_facts(s, reading) for s in sections if tells_of_training(s)),
        state_dicts=state_dicts,
    )


def _describe(node: Any) -> str:
    if type(node) is Obj:
        return f"an object of {name_of(node.cls) or 'an unknown class'}"
    return f"a {type(node).__name__}" + (f" of {len(node)}" if type(node) in (dict, list, tuple) else "")


def name_globals(pickle: Pickle, reading: Reading) -> None:
    """Say which names of the pickle are not torch's own: loading it the usual way would import or call them."""
    names = safe_globals.foreign([found.qualified for found in pickle.globals])
    if names:
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        what = "a name" if len(names) == 1 else f"{len(names)} names"
        reading.odd("foreign-globals", f"torch.load(weights_only=False) would import or call {what} from it: {shown}")


def _rows(section: Section, reading: Reading) -> Iterator[Row]:
    if section.role == "module":
        inner = unwrapped(section.node)
        return module_rows(inner, reading, prefix="_orig_mod." if inner is not section.node else "")
    if section.role == "optimizer":
        return _optimizer_rows(section.node, reading)
    if section.role == "moments":
        return _state_rows(section.node, reading, Kind.OPTIMIZER, Evidence.OPTIMIZER)
    if section.role == "other":
        return _state_rows(section.node, reading, Kind.OTHER, Evidence.CONVENTION)
    return _state_rows(section.node, reading, Kind.PARAMETER, Evidence.ASSUMED)


def _state_rows(node: Any, reading: Reading, kind: Kind, evidence: Evidence) -> Iterator[Row]:
    """The entries of a dict under their own keys; what lies deeper as Python would reach it."""
    tensor = reading.tensor(node, "tensor")
    if tensor is not None:
        yield row_of("tensor", tensor, kind, evidence)
        return
    items = mapping(node)
    if items is None:
        named: Iterator[tuple[str, Any]] = ((step.removeprefix("."), child) for step, child in children(node))
    else:
        numbered = enumerate(items.items())
        entries = ((key if type(key) is str else key_path(key) or f"[#{i}]", child) for i, (key, child) in numbered)
        named = chain(entries, ((step.removeprefix("."), child) for step, child in beside(node)))
    tensor_of = reading.tensor
    seen = {id(node)}
    for path, child in named:
        tensor = tensor_of(child, path)
        if tensor is not None:
            yield row_of(path, tensor, kind, evidence)
        elif type(child) not in LEAVES:
            yield from _nested_rows(path, child, reading, kind, evidence, seen)


def _nested_rows(
    path: str, node: Any, reading: Reading, kind: Kind, evidence: Evidence, seen: set[int]
) -> Iterator[Row]:
    for where, found, tensor in reading.below(node, path, seen=seen):
        if tensor is None:
            yield from module_rows(unwrapped(found), reading, prefix=where + ".")
        else:
            yield row_of(where, tensor, kind, evidence)


def _optimizer_rows(node: Any, reading: Reading) -> Iterator[Row]:
    items = mapping(node)
    if items is None:
        items = attributes(node)
    seen = {id(node)}
    for key, value in items.items():
        if type(key) is not str or type(value) in LEAVES:
            continue
        for path, _, tensor in reading.below(value, key, seen=seen):
            if tensor is not None:
                yield row_of(path, tensor, Kind.OPTIMIZER, Evidence.OPTIMIZER)


def info_of(row: Row, section: str, target: str) -> TensorInfo:
    """The row as one of a state's tensors."""
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
    )
