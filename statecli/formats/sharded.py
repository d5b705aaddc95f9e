"""A checkpoint in several files: an index (`*.index.json`), or the folder that holds one.

Format: `save_pretrained` of transformers: {"metadata": {"total_size"}, "weight_map": {FQN: file name}}. The file names
come from the index, so they are untrusted: one path component, a regular file inside the folder, or the run stops.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from statecli.errors import MalformedError, UnreadableError
from statecli.formats._source import Source
from statecli.state import ModelState, Oddity, TensorInfo

NAME = "sharded"

MAX_INDEX = 256 * 1024 * 1024
#: What a model folder calls its weights when there is no index, in the order transformers and diffusers look.
SINGLE = (
    "model.safetensors",
    "diffusion_pytorch_model.safetensors",
    "adapter_model.safetensors",
    "pytorch_model.bin",
    "diffusion_pytorch_model.bin",
    "adapter_model.bin",
    "consolidated.safetensors",
)
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt")
#: Companions of weights in a training folder that are no weights themselves.
COMPANIONS = re.compile(r"^(?:optimizer|scheduler|scaler|rng_state.*|training_args|random_states.*|trainer_state)\.")
_SHARD = re.compile(r"^(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.\w+)$")


def sniff(path: str, head: bytes) -> bool:
    """Whether this is a folder, or a JSON file with a weight_map or the name of an index."""
    if os.path.isdir(path):
        return True
    start = head.lstrip(b"\xef\xbb\xbf \t\r\n")
    return start.startswith(b"{") and (path.endswith(".index.json") or b'"weight_map"' in head)


def read(path: str, read_file: Callable[[str], ModelState]) -> ModelState:
    """The union of all shards. `read_file` reads one of them; its errors already name the shard's path."""
    if not os.path.isdir(path):
        return _indexed(path, path, read_file, [])
    names = sorted(os.listdir(path))
    index, others = _choose(path, names)
    oddities = [Oddity("other-weights", f"{name} lies beside what was read, and was not read") for name in others]
    if index.endswith(".index.json"):
        return _indexed(os.path.join(path, index), path, read_file, oddities)
    if match := _SHARD.match(index):
        return _numbered(path, names, match, read_file, oddities)
    state = read_file(os.path.join(path, index))
    return replace(state, target=path, oddities=(*state.oddities, *oddities))


def _choose(path: str, names: list[str]) -> tuple[str, list[str]]:
    """The index or the weight file that the folder's name stands for, and the weight files left aside."""
    weights = [n for n in names if n.endswith(WEIGHTS) and not COMPANIONS.match(n)]
    indexes = [n for n in names if n.endswith(".index.json")]
    preferred = sorted(indexes, key=lambda n: ("safetensors" not in n, n))
    candidates = [n for n in SINGLE if n in names]
    if preferred:
        kept = set(_shards_named(os.path.join(path, preferred[0])))
        return preferred[0], [n for n in (*weights, *preferred[1:]) if n not in kept]
    if candidates:
        return candidates[0], [n for n in weights if n != candidates[0]]
    numbered = [n for n in weights if _SHARD.match(n)]
    stems = {(m["stem"], m["suffix"]) for n in numbered if (m := _SHARD.match(n))}
    if len(stems) == 1 and len(numbered) == len(weights):
        return numbered[0], []
    if len(weights) == 1:
        return weights[0], []
    if not weights:
        raise UnreadableError(
            "is a folder without a checkpoint: no *.safetensors, *.bin, *.pt and no *.index.json in it"
        )
    raise UnreadableError(
        f"is a folder with {len(weights)} weight files and no index; name one of them: {_some(weights)}"
    )


def _some(names: list[str]) -> str:
    return ", ".join(names[:4]) + (f", and {len(names) - 4} more" if len(names) > 4 else "")


def _numbered(
    path: str, names: list[str], first: re.Match[str], read_file: Callable[[str], ModelState], oddities: list[Oddity]
) -> ModelState:
    count = int(first["count"])
    expected = [f"{first['stem']}-{n:05d}-of-{count:05d}{first['suffix']}" for n in range(1, count + 1)]
    missing = [name for name in expected if name not in names]
    if missing:
        raise MalformedError(f"{missing[0]} is missing: {count - len(missing)} of {count} shards are here")
    oddities.append(Oddity("no-index", f"no index: all {count} numbered shards were read"))
    states = [(name, read_file(os.path.join(path, name))) for name in expected]
    return _merged(path, states, oddities)


def _indexed(index: str, target: str, read_file: Callable[[str], ModelState], oddities: list[Oddity]) -> ModelState:
    document = _document(index)
    weight_map = _weight_map(document)
    folder = os.path.dirname(os.path.abspath(index))
    shards = list(dict.fromkeys(weight_map.values()))
    for shard in shards:
        _check_name(folder, shard)
    shown = os.path.dirname(index)
    states = [(shard, read_file(os.path.join(shown, shard))) for shard in shards]
    state = _merged(target, states, oddities)
    _agree(weight_map, states)
    return replace(state, oddities=(*state.oddities, *_totals(document, state)), metadata=_metadata(document, state))


def _document(index: str) -> dict[str, Any]:
    where = os.path.basename(index)
    with Source(index) as source:
        if source.size > MAX_INDEX:
            raise MalformedError(f"{where}: {source.size} bytes, too long for an index")
        raw = source.read(0, source.size)
    try:
        document = json.loads(raw.decode("utf-8"), object_pairs_hook=lambda pairs: _unique(where, pairs))
    except RecursionError as error:
        raise MalformedError(f"{where}: nests too deep to be an index") from error
    except ValueError as error:
        raise MalformedError(f"{where}: is no valid JSON: {error}") from error
    if type(document) is not dict:
        raise MalformedError(f"{where}: is no JSON object")
    return document


def _unique(where: str, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise MalformedError(f"{where}: names {key!r} twice")
        found[key] = value
    return found


def _weight_map(document: dict[str, Any]) -> dict[str, str]:
    weight_map = document.get("weight_map")
    if type(weight_map) is not dict:
        raise MalformedError("the index has no weight_map")
    for fqn, shard in weight_map.items():
        if type(shard) is not str:
            raise MalformedError(f"{fqn}: the index maps it to something else than a file name")
    if not weight_map:
        raise MalformedError("the index's weight_map is empty")
    return weight_map


def _shards_named(index: str) -> list[str]:
    return list(_weight_map(_document(index)).values())


def _check_name(folder: str, shard: str) -> None:
    """Refuse any shard that is not a plain file name inside the folder; symbolic links into a cache are followed."""
    if (
        shard in ("", ".", "..")
        or shard != os.path.basename(shard)
        or any(c in shard for c in "\0\\:")
        or shard[0] == "~"
    ):
        raise MalformedError(f"the index points outside its folder: {shard!r}")
    if not os.path.lexists(os.path.join(folder, shard)):
        raise MalformedError(f"shard {shard} is missing: the index names it, the folder does not hold it")


def _merged(target: str, states: list[tuple[str, ModelState]], oddities: list[Oddity]) -> ModelState:
    owner: dict[tuple[str, str], str] = {}
    tensors: list[TensorInfo] = []
    for shard, state in states:
        for tensor in state.tensors:
            first = owner.setdefault((tensor.section, tensor.fqn), shard)
            if first != shard:
                raise MalformedError(f"{tensor.fqn}: is in two shards, {first} and {shard}")
            # Storage keys count from 0 in each file.
            storage = f"{shard}:{tensor.storage}" if tensor.storage is not None else None
            tensors.append(replace(tensor, storage=storage))
        oddities.extend(replace(odd, message=f"{shard}: {odd.message}") for odd in state.oddities)
    sections = tuple(dict.fromkeys(section for _, state in states for section in state.sections))
    found = tuple(dict.fromkeys(pair for _, state in states for pair in state.globals))
    formats = "+".join(dict.fromkeys(state.format for _, state in states))
    return ModelState(target, f"{NAME} {formats}", tuple(tensors), sections, {}, tuple(oddities), found)


def _agree(weight_map: dict[str, str], states: list[tuple[str, ModelState]]) -> None:
    """The index and the shards name the same tensors in the same files."""
    found = {tensor.fqn: shard for shard, state in states for tensor in state.tensors}
    for fqn, shard in weight_map.items():
        if fqn not in found:
            raise MalformedError(f"{fqn}: the index says it is in {shard}, it is in no shard")
        if found[fqn] != shard:
            raise MalformedError(f"{fqn}: the index says {shard}, it is in {found[fqn]}")
    for fqn, shard in found.items():
        if fqn not in weight_map:
            raise MalformedError(f"{fqn}: is in {shard}, the index does not name it")


def _totals(document: dict[str, Any], state: ModelState) -> list[Oddity]:
    metadata = document.get("metadata")
    claimed = metadata.get("total_size") if type(metadata) is dict else None
    seen: dict[Any, int] = {}
    for n, tensor in enumerate(state.tensors):
        seen[tensor.storage if tensor.storage is not None else n] = tensor.nbytes
    total = sum(seen.values())
    if type(claimed) not in (int, float) or claimed in (total, sum(t.nbytes for t in state.tensors)):
        return []
    return [Oddity("index-total", f"the index says {claimed} bytes in all, the tensors take {total}")]


def _metadata(document: dict[str, Any], state: ModelState) -> dict[str, Any]:
    metadata = document.get("metadata")
    plain = metadata if type(metadata) is dict else {}
    return {**state.metadata, **{k: v for k, v in plain.items() if type(v) in (str, int, float, bool)}}
