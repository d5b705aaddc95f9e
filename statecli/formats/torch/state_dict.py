"""Parts of a section that `load_state_dict` reads besides tensors: keys of other values, and `_metadata`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from statecli.core.model_state import StateDict
from statecli.formats.torch.reading import Reading
from statecli.formats.torch.sections import Section
from statecli.formats.torch.settings_digest import SCALARS
from statecli.pickles.graph import LEAF_TYPES, as_mapping, get_attributes


def read_state_dict(section: Section, reading: Reading) -> StateDict:
    """Read the keys of values that are not tensors, and the `_metadata` that `Module.state_dict()` adds to its dict."""
    if section.role == "module":
        return StateDict(section.path, is_module=True, keys=section.keys)
    items = as_mapping(section.node) or {}
    others = [key for key, value in items.items() if type(key) is str and not reading.decoder.is_torch(value)]
    holders = [key for key in others if type(items[key]) not in LEAF_TYPES]
    recorded = as_mapping(get_attributes(section.node).get("_metadata"))
    metadata = None if recorded is None else _read_metadata(recorded, reading)
    return StateDict(section.path, metadata, tuple(others), tuple(holders), keys=section.keys)


def _read_metadata(recorded: Mapping[Any, Any], reading: Reading) -> dict[str, dict[str, Any]]:
    """Return the metadata of each module by its path. Equal dicts {"version": 1} are one object, to save memory."""
    shared_metadata: dict[int, dict[str, Any]] = {}
    metadata: dict[str, dict[str, Any]] = {}
    for path, node in recorded.items():
        local = as_mapping(node)
        if type(path) is not str or local is None:
            reading.add_oddity(
                "state-dict-metadata",
                "an entry of the state_dict's _metadata does not map a module name to a dict, so statecli skips the "
                "entry",
            )
            continue
        version = local.get("version")
        if len(local) == 1 and type(version) is int:
            metadata[path] = shared_metadata.setdefault(version, {"version": version})
        else:
            metadata[path] = _read_local(path, local, reading)
    return metadata


def _read_local(path: str, local: Mapping[Any, Any], reading: Reading) -> dict[str, Any]:
    """Return a module's entry of `_metadata` as plain values: {"spectral_norm": {"weight.version": 1}}."""
    attributes: dict[str, Any] = {}
    for key, value in local.items():
        inner_items = as_mapping(value)
        if type(key) is str and type(value) in SCALARS:
            attributes[key] = value
        elif type(key) is str and inner_items is not None and all(_is_plain(*item) for item in inner_items.items()):
            attributes[key] = dict(inner_items)
        else:
            message = f"_metadata of {path or 'the model'} contains a value that statecli does not read"
            reading.add_oddity("state-dict-metadata", message, path)
    return attributes


def _is_plain(key: object, value: object) -> bool:
    return type(key) is str and type(value) in SCALARS
