"""Find the state_dict entries of a checkpoint, and the files and keys from which Python code can read them."""

from __future__ import annotations

import ast
import glob
import os
from collections.abc import Iterator, Sequence, Set

import msgspec
from msgspec.structs import replace

from statecli import formats, live
from statecli.commands.explain.recipe import Loader, StateDictSource
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import ModelState, NoteKind, StateDict, TensorInfo
from statecli.core.parameter_or_buffer import is_copy, list_model_sections, select_loaded_sections
from statecli.storage.checkpoint_names import METADATA
from statecli.targets.section_of_target import split_section

#: Largest number of files that the printed code lists, because other files match each pattern.
MAX_LISTED_FILES = 8
#: Harmless classes that training scripts save next to the weights.
PLAIN_CLASSES = frozenset(["argparse.Namespace", "pathlib.PosixPath"])


class ModelEntries(msgspec.Struct, frozen=True):
    """Entries of one state_dict of a checkpoint.

    Attributes:
        rows: The tensors, in the order of the file.
        section: The section of the tensors.
        state_dict: Other keys, and the metadata.
        source: How code reads the state_dict; None if statecli knows no code for the format.
        refused: Names in the pickle that `weights_only=True` refuses.
        is_average: The section is an average of the weights, and the file has no other model.
        rivals: Other sections that fit the class as well.
    """

    rows: tuple[TensorInfo, ...]
    section: str
    state_dict: StateDict
    source: StateDictSource | None
    refused: tuple[str, ...] = ()
    is_average: bool = False
    rivals: tuple[str, ...] = ()

    @property
    def names(self) -> list[str]:
        """The keys of all entries."""
        return [row.fqn for row in self.rows]


def read_entries(state: ModelState, registered: Sequence[str]) -> ModelEntries | None:
    """Return the entries that a class with the registered names would load, or None if the file has no model."""
    sections = list_model_sections(state)
    if not sections:
        return None
    tails = {get_last_parts(name) for name in registered}
    counts = {
        name: sum(get_last_parts(tensor.fqn) in tails for tensor in state.tensors if tensor.section == name)
        for name in select_loaded_sections(sections)
    }
    section = max(counts, key=counts.__getitem__)
    rivals = tuple(name for name in counts if name != section and counts[name] == counts[section])
    state_dict = state.find_state_dict(section)
    below = tuple(f"{name}{mark}" for name in state_dict.holders for mark in "[.")
    rows = tuple(
        tensor
        for tensor in state.tensors
        if tensor.section == section
        and tensor.is_in_state_dict
        and tensor.note_kind is not NoteKind.STORED_ELSEWHERE
        and not (below and tensor.fqn.startswith(below))
    )
    if all(row.fqn.startswith("[") for row in rows) and state_dict.keys == ():
        state_dict, rows = _find_inner_entries(state, tails)
        section = state_dict.section
    if not rows:
        return None
    refused_names = (
        tuple(live.weights_only.list_refused_names(name for name, _ in state.globals)) if state.globals else ()
    )
    source = _find_source(state, rows, state_dict, refused_names)
    is_of_torch = source is not None and source.loader is Loader.TORCH
    if is_of_torch and "" not in state.metadata.kinds and len(state.tensors) == 1:
        return None  # the file of torch.save(tensor), whose tensor has no name
    is_average = is_copy(section) or "ema" in section.lower().split("_")
    return ModelEntries(rows, section, state_dict, source, refused_names, is_average, rivals)


_BRACKETS = compile_on_use(r"\[(?:'(?:[^'\\]|\\.)*'|\d+)\]")
_KEYS = compile_on_use(r"([^\[\]]*)((?:\['(?:[^'\\]|\\.)*'\]|\[\d+\])+)")


def _find_inner_entries(state: ModelState, tails: Set[tuple[str, ...]]) -> tuple[StateDict, tuple[TensorInfo, ...]]:
    """Return the nested dict that has the most registered names, such as `nets['generator']`, and its tensors."""
    rows: dict[tuple[str | int, ...], list[TensorInfo]] = {}
    for tensor in state.tensors:
        if match := _KEYS.fullmatch(tensor.fqn):
            path = [key for (key,) in map(ast.literal_eval, _BRACKETS.findall(match[2]))]
            *outer, last = [match[1], *path] if match[1] else path
            if isinstance(last, str):
                rows.setdefault(tuple(outer), []).append(replace(tensor, fqn=last))
    if not rows:
        return StateDict("", keys=()), ()
    keys = max(rows, key=lambda keys: sum(get_last_parts(row.fqn) in tails for row in rows[keys]))
    return StateDict(".".join(map(str, keys)), keys=keys), tuple(rows[keys])


def get_last_parts(name: str) -> tuple[str, ...]:
    """Return the last two components of a name."""
    return tuple(name.split(".")[-2:])


def _find_source(
    state: ModelState, rows: Sequence[TensorInfo], state_dict: StateDict, refused_names: Sequence[str]
) -> StateDictSource | None:
    path = split_section(state.target)[0]
    if not os.path.exists(path) or state.traits.has_own_loader or state.traits.is_program:
        return None
    paths = tuple(dict.fromkeys(byte_range.path for row in rows for byte_range in row.ranges if byte_range.path))
    if not paths and os.path.isfile(path):
        paths = (path,)  # a file with only empty tensors has no byte ranges
    if not paths:
        return None
    if all(formats.read_traits(name).is_header_and_tensors for name in paths):
        return _merge(paths, Loader.SAFETENSORS, (), ())
    if state_dict.keys is None:
        return None
    if state.traits.is_loaded_by_dcp:
        return _find_dcp_folder(path, state, rows, state_dict.keys)
    if any(row.fqn.startswith("[") for row in rows):
        return None  # a key that is not a string
    if state_dict.is_module:
        return _merge(paths, Loader.MODULE, state_dict.keys, ())
    return _merge(paths, Loader.TORCH, state_dict.keys, tuple(name for name in refused_names if name in PLAIN_CLASSES))


def _find_dcp_folder(
    path: str, state: ModelState, rows: Sequence[TensorInfo], keys: tuple[str | int, ...]
) -> StateDictSource | None:
    """Return the DCP folder if it is undamaged and `keys` select exactly the tensors of `rows`, else None."""
    prefix = "".join(f"{key}." for key in keys)
    paths = ((name := _join_keys(tensor.fqn), f"{tensor.section}.{name}") for tensor in state.tensors)
    is_exact = sum(any(name.startswith(prefix) for name in names) for names in paths) == len(rows)
    is_whole = os.path.isfile(os.path.join(path, METADATA)) and not any(row.damage for row in rows)
    return StateDictSource((path,), Loader.DCP, keys) if is_exact and is_whole else None


def _join_keys(name: str) -> str:
    """Return a name as DCP writes it: `nets.generator.weight` for `nets['generator'].weight`."""
    return _BRACKETS.sub(lambda match: f".{ast.literal_eval(match[0])[0]}", name)


def _merge(
    paths: tuple[str, ...], loader: Loader, keys: tuple[str | int, ...], allowed_names: tuple[str, ...]
) -> StateDictSource | None:
    if len(paths) == 1:
        return StateDictSource(paths, loader, keys, "", allowed_names)
    folder = os.path.dirname(paths[0])
    for pattern in _propose_patterns(folder, paths):
        if set(glob.glob(pattern)) == set(paths):
            return StateDictSource(paths, loader, keys, pattern, allowed_names)
    return StateDictSource(paths, loader, keys, "", allowed_names) if len(paths) <= MAX_LISTED_FILES else None


def _propose_patterns(folder: str, paths: Sequence[str]) -> Iterator[str]:
    end = os.path.splitext(paths[0])[1]
    start = os.path.commonprefix([os.path.basename(path) for path in paths]).rstrip("0123456789")  # noqa: RUF071 - of texts
    for name in (f"*{end}", f"{start}*{end}"):
        yield os.path.join(glob.escape(folder), name)
