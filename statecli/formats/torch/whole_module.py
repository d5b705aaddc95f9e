"""Tensor rows of a whole pickled nn.Module. Its `__dict__` shows parameters and buffers; no class is imported.

`_parameters`, `_buffers`, `_non_persistent_buffers_set` and `_modules` list the registered names; plain attributes are
not registered.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from statecli.core.errors import MalformedError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Evidence, Kind, NoteKind
from statecli.core.oddity_kind import OddityKind
from statecli.formats.torch.reading import MAX_DEPTH, MAX_ROWS, DecodedTensor, ReachedNode, Reading, build_row
from statecli.formats.torch.tensors import Tensor
from statecli.pickles.graph import (
    GRAPH_MODULE,
    LEAF_TYPES,
    as_mapping,
    as_sequence,
    get_attributes,
    get_name,
    strip_compile_wrapper,
)
from statecli.pickles.nodes import Obj

HOOKS = compile_on_use(r"^_(?:forward|backward|state_dict|load_state_dict)_.*hooks.*$|^_is_full_backward_hook$")


def collect_module_rows(root: Obj, reading: Reading, *, prefix: str = "") -> Iterator[DecodedTensor]:
    """Yield the tensor rows of a pickled nn.Module. Its `__dict__` shows which tensors are registered.

    Registered tensors come first, in registration order and under every registered name. A tensor in a plain attribute
    is unregistered, or an alias if a registered row shares its storage.
    """
    walk = _ModuleWalk(reading)
    walk.walk_registered(root, prefix)
    walk.walk_plain()
    yield from walk.build_rows()


class _ModuleWalk:
    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self.rows: list[DecodedTensor] = []
        self.modules: list[tuple[str, Obj, bool]] = []
        self.seen: set[int] = set()
        self.paths = 0
        self.storages: dict[Any, DecodedTensor] = {}
        #: Rows of unregistered tensors by the id of their node, to find a second name of the same object.
        self.nodes: dict[int, DecodedTensor] = {}
        self.aliases: dict[int, list[str]] = {}

    def walk_registered(self, root: Obj, prefix: str, *, is_unregistered: bool = False) -> None:
        """Add the parameters and buffers of a module tree. `is_unregistered`: no module has registered `root`."""
        stack: list[tuple[str, Any, frozenset[int]]] = [(prefix, root, frozenset())]
        while stack:
            path, node, ancestors = stack.pop()
            self.paths += 1
            if self.paths > MAX_ROWS:
                raise MalformedError(
                    f"many modules share their submodules, so the modules have more than {MAX_ROWS} names, the limit "
                    "of statecli"
                )
            module_attributes = get_attributes(node)
            if as_mapping(module_attributes.get("_parameters")) is None:
                self._note_opaque(path, node)
                continue
            self._add_own(path, module_attributes, is_unregistered)
            if id(node) not in self.seen:
                self.modules.append((path, node, is_unregistered))
            self.seen.add(id(node))
            if len(ancestors) >= MAX_DEPTH:
                self.reading.add_oddity(
                    OddityKind.TOO_DEEP.value,
                    f"modules are nested more than {MAX_DEPTH} levels deep; statecli does not list deeper modules",
                    path,
                )
                continue
            children = [
                (f"{path}{name}.", strip_compile_wrapper(child), ancestors | {id(node)})
                for name, child in (as_mapping(module_attributes.get("_modules")) or {}).items()
                if type(child) is Obj and id(strip_compile_wrapper(child)) not in ancestors and child is not node
            ]
            stack.extend(reversed(children))
            if len(self.rows) > MAX_ROWS:
                raise MalformedError(f"contains more than {MAX_ROWS} tensors, the limit of statecli")

    def _add_own(self, path: str, attributes: Mapping[str, Any], is_unregistered: bool) -> None:
        non_persistent_names = set(map(_read_text, as_sequence(attributes.get("_non_persistent_buffers_set")) or ()))
        groups = ((Kind.PARAMETER, "_parameters"), (Kind.BUFFER, "_buffers"))
        for kind, group in groups:
            for name, node in (as_mapping(attributes.get(group)) or {}).items():
                fqn = f"{path}{name}"
                tensor = self.reading.tensor(node, fqn)
                if tensor is None:
                    if node is None and kind is Kind.PARAMETER:
                        self.reading.add_oddity(OddityKind.NONE_PARAMETER.value, f"{fqn} is registered as None", fqn)
                    continue
                self.seen.add(id(node))
                persistent = None if kind is Kind.PARAMETER else name not in non_persistent_names
                self._add(fqn, tensor, kind, persistent, is_unregistered)

    def _add(self, fqn: str, tensor: Tensor, kind: Kind, persistent: bool | None, is_unregistered: bool) -> None:
        note = f"{kind.value} of an unregistered module" if is_unregistered else None
        row = DecodedTensor(
            fqn,
            tensor,
            Kind.UNREGISTERED if is_unregistered else kind,
            Evidence.REGISTERED,
            None if is_unregistered else persistent,
            saved=None if is_unregistered else persistent is not False,
            requires_grad=tensor.requires_grad,
            note=note,
            within=fqn.rpartition(".")[0] if is_unregistered else None,
        )
        self.rows.append(row)
        if tensor.storage is not None:
            self.storages.setdefault(tensor.storage, row)

    def _note_opaque(self, path: str, node: Obj) -> None:
        """Note a class with its own pickling, because its pickled state does not show which tensors are registered."""
        name = get_name(node.cls) or "a class"
        fqn = path.rstrip(".")
        self.reading.add_oddity(
            OddityKind.OPAQUE_CLASS.value,
            f"{fqn}: {name} defines its own pickling, so its parameters and buffers cannot be identified",
            fqn,
        )
        for child in self.reading.walk(node, fqn, seen=self.seen):
            if child.tensor is not None:
                self.rows.append(build_row(child.path, child.tensor, Kind.PARAMETER, Evidence.ASSUMED))
            else:
                self.seen.discard(id(child.node))  # because `walk_registered` adds the child again
                self.walk_registered(strip_compile_wrapper(child.node), child.path + ".")

    def walk_plain(self) -> None:
        """Add the tensors in the unregistered attributes of every module, including modules in lists and dicts."""
        for path, node, _ in self.modules:  # the list grows during the loop
            module_attributes = get_attributes(node)
            states, is_packed = _list_metric_states(module_attributes), get_name(node.cls).startswith(_PACKING_MODULES)
            for name, value in module_attributes.items():
                if name in _REGISTRIES or type(value) in LEAF_TYPES or HOOKS.match(name):
                    continue
                derived = _find_source(name, module_attributes)
                is_metric = name in states and not is_packed
                note = _PACKED_NOTE if is_packed else _METRIC_NOTE if is_metric else derived
                kind = NoteKind.METRIC_STATE if is_metric else None
                for child in self.reading.walk(value, f"{path}{name}", seen=self.seen):
                    self._add_reached(child, note, derived, kind, is_known=not is_packed)
            for child in self._walk_arguments(path, node):
                self._add_reached(child, _ARGUMENT_NOTE, None, None, is_known=False)

    def _walk_arguments(self, path: str, node: Obj) -> Iterator[ReachedNode]:
        """Yield tensors in the constructor arguments that `__reduce__` or `__newobj_ex__` saves besides `__dict__`."""
        if get_name(node.cls) == GRAPH_MODULE:
            return  # its `__dict__` is an argument
        arguments = [(f"__args__[{index}]", value) for index, value in enumerate(node.args)]
        arguments += [(f"__kwargs__[{name!r}]", value) for name, value in (node.kwargs or {}).items()]
        if type(node.cls) is Obj:  # a partial of the class's __new__: pickle's form of keyword arguments
            arguments.append(("__func__", node.cls))
        for label, value in arguments:
            yield from self.reading.walk(value, f"{path}{label}", seen=self.seen)

    def _add_reached(
        self,
        child: ReachedNode,
        note: str | None,
        derived: str | None,
        note_kind: NoteKind | None,
        *,
        is_known: bool,
    ) -> None:
        path, node, tensor = child.path, child.node, child.tensor
        if tensor is None:
            self.walk_registered(strip_compile_wrapper(node), path + ".", is_unregistered=True)
            return
        owner = self.storages.get(tensor.storage) if tensor.storage is not None else None
        earlier_row = self.nodes.get(id(node))
        # Not an alias: a derived tensor (computed by a hook before each forward) shares memory only until the first
        # forward. An alias also has at most as many elements as the registered tensor.
        is_alias = owner is not None and derived is None and tensor.elements <= owner.tensor.elements
        if earlier_row is not None or is_alias:
            self.aliases.setdefault(id(earlier_row or owner), []).append(path)
            return
        if id(node) in self.seen:
            return
        self.seen.add(id(node))
        note = note or ("parameter in a plain attribute" if tensor.is_parameter else None)
        # `saved` is unknown (None), because the class's own state_dict() or get_extra_state() may save the tensor, and
        # its code is not in the file.
        row = DecodedTensor(
            *(path, tensor, Kind.UNREGISTERED, Evidence.REGISTERED if is_known else Evidence.ASSUMED),
            *(None, None, tensor.requires_grad),
            note=note,
            derived=derived,
            note_kind=note_kind,
        )
        self.rows.append(row)
        self.nodes[id(node)] = row

    def build_rows(self) -> Iterator[DecodedTensor]:
        for row in self.rows:
            names = self.aliases.get(id(row))
            yield msgspec.structs.replace(row, aliases=tuple(names)) if names else row


_REGISTRIES = frozenset(["_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"])
#: Packages of torch's quantized modules. They keep weights in plain attributes, mostly packed by C++, and save them
#: with their own code.
_PACKING_MODULES = ("torch.ao.nn.", "torch.nn.quantized.", "torch.nn.intrinsic.quantized.")
_PACKED_NOTE = "stored and saved by a quantized module of torch"
#: Note for a tensor among the arguments of the function that builds a module.
_ARGUMENT_NOTE = "an argument of the function that builds the module"
#: Note for a tensor that torchmetrics keeps in a plain attribute.
_METRIC_NOTE = "state of a torchmetrics metric; the metric itself moves this state between devices"


def _list_metric_states(attributes: Mapping[str, Any]) -> frozenset[str]:
    """List the attributes that a torchmetrics.Metric moves by its own code: states, their defaults and results."""
    defaults, reductions = as_mapping(attributes.get("_defaults")), as_mapping(attributes.get("_reductions"))
    if defaults is None or reductions is None or "_forward_cache" not in attributes:
        return frozenset()
    return frozenset([*map(_read_text, defaults), "_defaults", "_computed", "_forward_cache"])


#: Registered names, with the attribute's name for {}, from which a hook computes the attribute before each forward (old
#: weight_norm, spectral_norm and pruning).
_SOURCE_NAMES = (("{}_g", "{}_v"), ("{}_orig",))


def _find_source(name: str, attributes: Mapping[str, Any]) -> str | None:
    registered = {*(as_mapping(attributes.get("_parameters")) or ()), *(as_mapping(attributes.get("_buffers")) or ())}
    for forms in _SOURCE_NAMES:
        names = [form.format(name) for form in forms]
        if registered.issuperset(names):
            return f"derived from {' and '.join(names)}"
    return None


def _read_text(value: object) -> str:
    return value if type(value) is str else ""
