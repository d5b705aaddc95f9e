"""From a pickle's inert graph to a `ModelState`: where the sections are, and what each tensor in them is called.

A section is the dotted path of a container that holds one model's or one optimizer's state. A whole pickled module is
walked through the `__dict__` its pickle carries, so that its parameters, buffers and unregistered tensors are told
apart without its class.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import msgspec

from statecli.errors import MalformedError
from statecli.formats import _globals
from statecli.formats._pickle import Global, Obj, Pickle
from statecli.formats._tensors import Decoder, Tensor, attributes, children, key_path, mapping, name_of, sequence
from statecli.state import (
    ByteRange,
    Evidence,
    Kind,
    ModelState,
    Oddity,
    OptimizerFacts,
    OptimizerGroup,
    Scalar,
    TensorInfo,
)

#: Containers inside containers that are walked; deeper ones are said to be left out.
MAX_DEPTH = 200
#: Tensors one file may list.
MAX_ROWS = 1_000_000
#: Characters of a container's path: each of its entries repeats it.
MAX_PREFIX = 10_000
#: Characters of a settings container's path.
MAX_SETTING = 1_000
MAX_METADATA = 1_000
#: `models.generator.ema` and the like; deeper containers count as one section.
MAX_SECTION_DEPTH = 8

#: Keys under which training scripts keep a model's state, as whole words of the key.
MODEL_WORDS = re.compile(
    r"(?:^|[_.])(?:model|models|module|state_dict|net|network|weights?|params?|ema|teacher|student|generator|discriminator"
    r"|encoder|decoder|backbone|head|swa|averaged|shadow)(?:$|[_.\d])",
    re.IGNORECASE,
)
#: Keys that hold tensors of neither a model nor an optimizer.
OTHER_WORDS = re.compile(
    r"(?:^|_)(?:rng|random|seed|scheduler|schedulers|loops|callbacks|scaler|sampler)(?:$|_)", re.IGNORECASE
)

HOOKS = re.compile(r"^_(?:forward|backward|state_dict|load_state_dict)_.*hooks.*$|^_is_full_backward_hook$")


class Section(msgspec.Struct):
    """One container of state: its path, its node, and what is in it ("module", "optimizer", "model" or "other")."""

    path: str
    node: Any
    role: str


class Row(msgspec.Struct, gc=False):
    """A tensor that was found, before it is a `TensorInfo`."""

    fqn: str
    tensor: Tensor
    kind: Kind = Kind.PARAMETER
    evidence: Evidence = Evidence.ASSUMED
    persistent: bool | None = None
    #: An entry of a checkpoint is saved; only a whole module holds what its state_dict would not.
    saved: bool | None = True
    requires_grad: bool | None = None
    aliases: tuple[str, ...] = ()
    note: str | None = None


def state_of(
    pickle: Pickle, storages: Mapping[str, ByteRange], *, target: str, format: str, oddities: list[Oddity]
) -> ModelState:
    """Everything that is a tensor in the pickled object, grouped into sections.

    Raises `MalformedError` when a tensor contradicts the storages of the file, and when there is no tensor at all.
    """
    reading = _Reading(Decoder(storages), list(oddities))
    for key in pickle.duplicate_keys:
        reading.odd("key-set-twice", f"the key {key!r} is set twice: the last one counts, as in torch")
    sections = find_sections(pickle.root, reading)
    tensors: list[TensorInfo] = []
    for section in sections:
        tensors.extend(reading.infos(section))
    if not tensors:
        raise MalformedError(f"holds no tensor: the pickle is {_describe(pickle.root)}")
    metadata = scalars(pickle.root, _without_settings(pickle.root, sections), reading)
    reading.name_globals(pickle)
    held = {tensor.section for tensor in tensors}
    return ModelState(
        target=target,
        format=format,
        tensors=tuple(tensors),
        sections=tuple(section.path for section in sections if section.path in held),
        metadata=metadata,
        oddities=tuple(reading.oddities),
        globals=tuple((found.qualified, found.position) for found in pickle.globals),
        optimizers=tuple(optimizer_facts(s, reading.decoder) for s in sections if s.role == "optimizer"),
    )


def _without_settings(root: Any, sections: list[Section]) -> set[int]:
    """The containers whose scalars are no settings: models, but not the checkpoint around them."""
    return {id(section.node) for section in sections if section.role != "optimizer" and section.node is not root}


def _describe(node: Any) -> str:
    if type(node) is Obj:
        return f"an object of {name_of(node.cls) or 'an unknown class'}"
    return f"a {type(node).__name__}" + (f" of {len(node)}" if type(node) in (dict, list, tuple) else "")


def find_sections(root: Any, reading: _Reading) -> list[Section]:
    """The containers that hold state, in the order of the file. A lone state is the section `model`."""
    if is_module(root):
        return [Section("model", root, "module")]
    if is_optimizer(root):
        return [Section("optimizer", root, "optimizer")]
    if not _descends(root, reading):
        return [Section("model", root, "model")]
    return list(_sections("", root, reading, 0))


def _sections(path: str, node: Any, reading: _Reading, depth: int) -> Iterator[Section]:
    loose: dict[Any, Any] = {}
    below: list[Section] = []
    for key, child in _entries(node):
        role = _role(child, str(key), reading)
        where = _dotted(path, key)
        if role is None:
            loose[key] = child
        elif role == "other" or role == "model":
            nested = depth < MAX_SECTION_DEPTH and not OTHER_WORDS.search(str(key)) and _descends(child, reading)
            below.extend(_sections(where, child, reading, depth + 1) if nested else [Section(where, child, role)])
        else:
            below.append(Section(where, child, role))
    if any(reading.decoder.is_tensor(value) for value in loose.values()):
        yield Section(path, loose, "other")
    yield from below


def _entries(node: Any) -> Iterator[tuple[Any, Any]]:
    items = mapping(node)
    if items is not None:
        yield from items.items()
    else:
        yield from enumerate(sequence(node) or ())


def _dotted(path: str, key: Any) -> str:
    text = str(key) if type(key) in (str, int, bool) or key is None else key_path(key)
    return f"{path}.{text}" if path else text


def _role(node: Any, key: str, reading: _Reading) -> str | None:
    """What a container is; None for what is no container of tensors (a tensor, a scalar, a list of numbers)."""
    if is_module(node):
        return "module"
    if is_optimizer(node):
        return "optimizer"
    if mapping(node) is None and sequence(node) is None and type(node) is not Obj:
        return None
    if reading.decoder.is_tensor(node) or not reading.holds_tensor(node):
        return None
    if OTHER_WORDS.search(key):
        return "other"
    return "model" if _looks_like_state(node, key) else "other"


def _looks_like_state(node: Any, key: str) -> bool:
    if MODEL_WORDS.search(key) or (type(node) is Obj and "_metadata" in attributes(node)):
        return True
    names = [name for name in islice(mapping(node) or (), 64) if type(name) is str]
    return any("." in name or name in ("weight", "bias") for name in names)


def _descends(node: Any, reading: _Reading) -> bool:
    """Whether the entries of a container are sections of their own, rather than one model's nested state."""
    entries = list(islice(_entries(node), 4096)) if mapping(node) is not None or sequence(node) is not None else []
    for key, child in entries:
        if is_module(child) or is_optimizer(child):
            return True
        items = mapping(child)
        if items is None:
            if type(child) is list and any(is_optimizer(one) or is_module(one) for one in islice(child, 64)):
                return True
            continue
        if _is_extra_state(key) or not reading.holds_tensor(child):
            continue
        if _looks_like_state(child, str(key)) or OTHER_WORDS.search(str(key)):
            return True
    return False


def _is_extra_state(key: Any) -> bool:
    return type(key) is str and key.endswith("_extra_state")


def is_module(node: Any) -> bool:
    """Whether the object's pickled `__dict__` is that of an nn.Module."""
    if type(node) is not Obj:
        return False
    held = attributes(_unwrapped(node))
    return mapping(held.get("_parameters")) is not None and mapping(held.get("_modules")) is not None


def _unwrapped(node: Obj) -> Obj:
    """torch.compile pickles itself as a call on the module it wraps."""
    while (
        node.state is None
        and name_of(node.cls).endswith(".OptimizedModule")
        and node.args
        and type(node.args[0]) is Obj
    ):
        node = node.args[0]
    return node


def is_optimizer(node: Any) -> bool:
    """Whether this is `optimizer.state_dict()`, or an optimizer pickled whole."""
    items = mapping(node)
    if items is None:
        items = attributes(node)
    return (
        "param_groups" in items
        and mapping(items.get("state")) is not None
        and sequence(items["param_groups"]) is not None
    )


class _Reading:
    """One file's decoder, its oddities, and the walk that both module and dict need."""

    def __init__(self, decoder: Decoder, oddities: list[Oddity]) -> None:
        self.decoder = decoder
        self.oddities = oddities
        self.known: dict[int, bool] = {}
        self.rows = 0

    def odd(self, name: str, message: str, fqn: str | None = None) -> None:
        self.oddities.append(Oddity(name, message, fqn))

    def name_globals(self, pickle: Pickle) -> None:
        """Say which names of the pickle are not torch's own: loading it the usual way would import or call them."""
        names = _globals.foreign([found.qualified for found in pickle.globals])
        if names:
            shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
            what = "a name" if len(names) == 1 else f"{len(names)} names"
            self.odd("foreign-globals", f"torch.load(weights_only=False) would import or call {what} from it: {shown}")

    def holds_tensor(self, node: Any) -> bool:
        """Whether any tensor hangs below. Each container is searched once for a file, however often it is shared."""
        if id(node) not in self.known:
            self._search(node)
        return self.known.get(id(node), False)

    def _search(self, root: Any) -> None:
        above: list[Any] = []
        stack: list[tuple[Any, bool]] = [(root, False)]
        while stack:
            node, done = stack.pop()
            if done:
                above.pop()
                continue
            if self.known.get(id(node)) or self.decoder.is_tensor(node):
                self.known.update((id(one), True) for one in (*above, node))
                return
            if type(node) in _LEAVES or id(node) in self.known:
                continue
            self.known[id(node)] = False
            above.append(node)
            stack.append((node, True))
            stack.extend((child, False) for _, child in children(node) if type(child) not in _LEAVES)

    def below(self, node: Any, path: str, *, seen: set[int] | None = None) -> Iterator[tuple[str, Any, Any]]:
        """(path, node, Tensor or module node) of everything below, each container once, in the order of the file."""
        seen = set() if seen is None else seen
        stack = [(path, node, 0)]
        while stack:
            path, node, depth = stack.pop()
            if type(node) in _LEAVES:
                continue
            found = self.decoder.tensor(node, path)
            if found is not None:
                yield path, node, found
                continue
            if id(node) in seen:
                continue
            seen.add(id(node))
            if is_module(node):
                yield path, node, None
                continue
            if depth == MAX_DEPTH:
                self.odd("too-deep", f"nests more than {MAX_DEPTH} levels: what is below is not listed", path)
                continue
            if len(path) > MAX_PREFIX:
                raise MalformedError(f"a name of {len(path)} characters, {path[:40]!r}…, holds others: refused")
            stack.extend(reversed([(path + step, child, depth + 1) for step, child in children(node)]))

    def infos(self, section: Section) -> Iterator[TensorInfo]:
        for row in self._found(section):
            self.rows += 1
            if self.rows > MAX_ROWS:
                raise MalformedError(f"holds more than {MAX_ROWS} tensors")
            yield _info(row, section.path)

    def _found(self, section: Section) -> Iterator[Row]:
        if section.role == "module":
            return module_rows(
                _unwrapped(section.node),
                self,
                prefix="_orig_mod." if _unwrapped(section.node) is not section.node else "",
            )
        if section.role == "optimizer":
            return self._optimizer_rows(section.node)
        if mapping(section.node) is not None:
            return self._dict_rows(section)
        return self._loose_rows(section)

    def _dict_rows(self, section: Section) -> Iterator[Row]:
        kind = Kind.OTHER if section.role == "other" else Kind.PARAMETER
        evidence = Evidence.CONVENTION if section.role == "other" else Evidence.ASSUMED
        tensor_of = self.decoder.tensor
        seen = {id(section.node)}
        for key, node in (mapping(section.node) or {}).items():
            path = key if type(key) is str else key_path(key)
            tensor = tensor_of(node, path)
            if tensor is not None:
                yield _row(path, tensor, kind, evidence)
            elif type(node) not in _LEAVES:
                yield from self._nested_rows(path, node, kind, evidence, seen)

    def _nested_rows(self, path: str, node: Any, kind: Kind, evidence: Evidence, seen: set[int]) -> Iterator[Row]:
        for where, found, tensor in self.below(node, path, seen=seen):
            if tensor is None:
                yield from module_rows(_unwrapped(found), self, prefix=where + ".")
            else:
                yield _row(where, tensor, kind, evidence)

    def _loose_rows(self, section: Section) -> Iterator[Row]:
        kind = Kind.OTHER if section.role == "other" else Kind.PARAMETER
        evidence = Evidence.CONVENTION if section.role == "other" else Evidence.ASSUMED
        tensor = self.decoder.tensor(section.node, "tensor")
        if tensor is not None:
            yield _row("tensor", tensor, kind, evidence)
            return
        seen = {id(section.node)}
        for step, child in children(section.node):
            yield from self._nested_rows(step.removeprefix("."), child, kind, evidence, seen)

    def _optimizer_rows(self, node: Any) -> Iterator[Row]:
        items = mapping(node)
        if items is None:
            items = attributes(node)
        seen = {id(node)}
        for key, value in items.items():
            if type(key) is not str or type(value) in _LEAVES:
                continue
            for path, _, tensor in self.below(value, key, seen=seen):
                if tensor is not None:
                    yield _row(path, tensor, Kind.OPTIMIZER, Evidence.REGISTERED)


_LEAVES = frozenset([str, int, float, bool, bytes, type(None), Global])


def _row(fqn: str, tensor: Tensor, kind: Kind, evidence: Evidence) -> Row:
    if kind is Kind.PARAMETER and tensor.is_parameter:
        evidence = Evidence.TYPE
    elif kind is Kind.PARAMETER and tensor.is_buffer:
        return Row(fqn, tensor, Kind.BUFFER, Evidence.TYPE, tensor.persistent, requires_grad=tensor.requires_grad)
    # A state_dict is detached: False in it records nothing.
    grad = tensor.requires_grad if tensor.is_parameter or tensor.requires_grad else None
    return Row(fqn, tensor, kind, evidence, requires_grad=grad)


def _info(row: Row, section: str) -> TensorInfo:
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
    )


def module_rows(root: Obj, reading: _Reading, *, prefix: str = "") -> Iterator[Row]:
    """The rows of a pickled nn.Module, grouped as its own `__dict__` groups them.

    Registered tensors come first, in registration order and under every registered name. A tensor that plain
    attributes reach is unregistered, unless it shares a registered storage: then it is that row's alias.
    """
    walk = _ModuleWalk(reading)
    walk.registered(root, prefix)
    walk.plain()
    yield from walk.finished()


class _ModuleWalk:
    def __init__(self, reading: _Reading) -> None:
        self.reading = reading
        self.rows: list[Row] = []
        self.modules: list[tuple[str, Obj, bool]] = []
        self.seen: set[int] = set()
        self.storages: dict[Any, Row] = {}
        self.aliases: dict[int, list[str]] = {}

    def registered(self, root: Obj, prefix: str, *, outside: bool = False) -> None:
        """Parameters and buffers of a module and its submodules; `outside` for a module nobody registered."""
        stack: list[tuple[str, Any, frozenset[int]]] = [(prefix, root, frozenset())]
        while stack:
            path, node, above = stack.pop()
            held = attributes(node)
            if mapping(held.get("_parameters")) is None:
                self._opaque(path, node)
                continue
            self._own(path, held, outside)
            if id(node) not in self.seen:
                self.modules.append((path, node, outside))
            self.seen.add(id(node))
            if len(above) >= MAX_DEPTH:
                self.reading.odd("too-deep", f"nests more than {MAX_DEPTH} modules: what is below is not listed", path)
                continue
            below = [
                (f"{path}{name}.", _unwrapped(child), above | {id(node)})
                for name, child in (mapping(held.get("_modules")) or {}).items()
                if type(child) is Obj and id(_unwrapped(child)) not in above and child is not node
            ]
            stack.extend(reversed(below))
            if len(self.rows) > MAX_ROWS:
                raise MalformedError(f"holds more than {MAX_ROWS} tensors")

    def _own(self, path: str, held: Mapping[str, Any], outside: bool) -> None:
        kept_out = set(map(_text, sequence(held.get("_non_persistent_buffers_set")) or ()))
        groups = ((Kind.PARAMETER, "_parameters"), (Kind.BUFFER, "_buffers"))
        for kind, group in groups:
            for name, node in (mapping(held.get(group)) or {}).items():
                fqn = f"{path}{name}"
                tensor = self.reading.decoder.tensor(node, fqn)
                if tensor is None:
                    if node is None and kind is Kind.PARAMETER:
                        self.reading.odd("none-parameter", f"{fqn} is registered as None", fqn)
                    continue
                self.seen.add(id(node))
                persistent = None if kind is Kind.PARAMETER else name not in kept_out
                self._add(fqn, tensor, kind, persistent, outside)

    def _add(self, fqn: str, tensor: Tensor, kind: Kind, persistent: bool | None, outside: bool) -> None:
        note = f"{kind.value} of an unregistered module" if outside else None
        row = Row(
            fqn,
            tensor,
            Kind.UNREGISTERED if outside else kind,
            Evidence.REGISTERED,
            None if outside else persistent,
            saved=not outside and persistent is not False,
            requires_grad=tensor.requires_grad,
            note=note,
        )
        self.rows.append(row)
        if tensor.storage is not None:
            self.storages.setdefault(tensor.storage, row)

    def _opaque(self, path: str, node: Obj) -> None:
        """A class with its own `__reduce__` or `__getstate__`: what its tensors are is known to its code alone."""
        name = name_of(node.cls) or "a class"
        fqn = path.rstrip(".")
        self.reading.odd("opaque-class", f"{fqn}: {name} pickles itself: what its tensors are cannot be told", fqn)
        for where, _, tensor in self.reading.below(node, fqn, seen=self.seen):
            if tensor is not None:
                self.rows.append(_row(where, tensor, Kind.PARAMETER, Evidence.ASSUMED))

    def plain(self) -> None:
        """Plain attributes of every module, those of modules found in plain containers included."""
        for path, node, _ in self.modules:  # grows while it is walked
            for name, value in attributes(node).items():
                if name in _REGISTRIES or type(value) in _LEAVES or HOOKS.match(name):
                    continue
                for where, found, tensor in self.reading.below(value, f"{path}{name}", seen=self.seen):
                    self._reached(where, found, tensor)

    def _reached(self, where: str, node: Any, tensor: Tensor | None) -> None:
        if tensor is None:
            self.registered(_unwrapped(node), where + ".", outside=True)
            return
        owner = self.storages.get(tensor.storage) if tensor.storage is not None else None
        if id(node) in self.seen and owner is None:
            return
        self.seen.add(id(node))
        if owner is not None:
            self.aliases.setdefault(id(owner), []).append(where)
            return
        note = "parameter in a plain attribute" if tensor.is_parameter else None
        row = Row(where, tensor, Kind.UNREGISTERED, Evidence.REGISTERED, None, False, tensor.requires_grad, note=note)
        self.rows.append(row)
        if tensor.storage is not None:
            self.storages.setdefault(tensor.storage, row)

    def finished(self) -> Iterator[Row]:
        for row in self.rows:
            found = self.aliases.get(id(row))
            yield msgspec.structs.replace(row, aliases=tuple(found)) if found else row


_REGISTRIES = frozenset(["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"])


#: Optimizer state of the same shape as its parameter, by the names torch.optim and apex give it.
MOMENTS = ("exp_avg", "momentum_buffer", "exp_avg_sq", "square_avg", "grad_avg", "acc_delta", "sum", "prev", "ax", "mu")


def optimizer_facts(section: Section, decoder: Decoder) -> OptimizerFacts:
    """Which parameters an optimizer says it trains, as far as its `state_dict()` tells."""
    items = mapping(section.node)
    if items is None:
        items = attributes(section.node)
    state = mapping(items["state"]) or {}
    groups = []
    for node in sequence(items["param_groups"]) or ():
        group = mapping(node) or {}
        ids = tuple(one for one in sequence(group.get("params")) or () if type(one) in (int, str))
        names = tuple(one for one in sequence(group.get("param_names")) or () if type(one) is str)
        shapes = tuple(_moment_shape(mapping(state.get(one)), decoder) for one in ids)
        groups.append(OptimizerGroup(ids, names if names and len(names) == len(ids) else None, shapes))
    return OptimizerFacts(section.path, tuple(groups))


def _moment_shape(state: Mapping[Any, Any] | None, decoder: Decoder) -> tuple[int, ...] | None:
    for name in MOMENTS:
        moment = decoder.tensor((state or {}).get(name), name)
        if moment is not None:
            return moment.shape
    return None


def _text(value: Any) -> str:
    return value if type(value) is str else ""


def scalars(root: Any, skip: set[int], reading: _Reading) -> dict[str, Scalar]:
    """Numbers and words beside the tensors (epoch, step, lr), by dotted path; the models' own containers left out.

    Lists of more than 64 entries are data, not settings, and are passed over.
    """
    found: dict[str, Scalar] = {}
    seen: set[int] = set(skip)
    stack: list[tuple[str, Any, int]] = [("", root, 0)]
    while stack:
        path, node, depth = stack.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        below = []
        if len(path) > MAX_SETTING:
            reading.odd("metadata-cut", f"a name of {len(path)} characters holds settings, which are left out")
            continue
        for key, child in _entries(node):
            if type(child) in _SCALARS:
                if len(found) == MAX_METADATA:
                    reading.odd("metadata-cut", f"holds more than {MAX_METADATA} settings; the first of them are kept")
                    return found
                found[_dotted(path, key)] = _json_scalar(child)
            elif depth < MAX_SECTION_DEPTH and _is_settings(child):
                below.append((_dotted(path, key), child, depth + 1))
        stack.extend(reversed(below))
    return found


_SCALARS = frozenset([str, int, float, bool, type(None)])


def _is_settings(node: Any) -> bool:
    return mapping(node) is not None or (type(node) in (list, tuple) and len(node) <= 64)


def _json_scalar(value: Any) -> Scalar:
    if type(value) is float and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if type(value) is int and abs(value) >= 2**63:
        return f"an integer of {value.bit_length()} bits"
    if type(value) is str and len(value) > 1000:
        return value[:997] + "..."
    return value  # type: ignore[no-any-return]
