"""Shared state of reading one file: the tensor decoder, the oddities, and a search for tensors in nested objects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from statecli.core.errors import MalformedError
from statecli.core.model_state import ByteRange, Evidence, Kind, NoteKind, Oddity
from statecli.core.oddity_kind import OddityKind
from statecli.formats.torch.tensor_decoder import TensorDecoder
from statecli.formats.torch.tensors import Tensor
from statecli.pickles.graph import LEAF_TYPES, is_module, iter_children
from statecli.pickles.nodes import Pickle

#: Maximum depth of nested containers; an oddity reports deeper containers.
MAX_DEPTH = 200
#: Maximum number of tensors of a file.
MAX_ROWS = 1_000_000
#: Maximum length of a container's path in characters, because each of its entries repeats the path.
MAX_PREFIX = 10_000
#: Maximum length of all names together in characters: ten times the length of a million rows of real models.
MAX_CHARACTERS = 300_000_000


class Contents(NamedTuple):
    """Contents of one file of torch.save: the object's pickle, each storage's byte range by key, and the oddities."""

    pickle: Pickle
    storages: dict[str, ByteRange]
    oddities: list[Oddity]


class ReachedNode(msgspec.Struct, gc=False):
    """Tensor or module found inside a pickled object, with its Python path. `tensor` is None for a module."""

    path: str
    node: Any
    tensor: Tensor | None


class DecodedTensor(msgspec.Struct, gc=False):
    """A decoded tensor before conversion to `TensorInfo`."""

    fqn: str
    tensor: Tensor
    kind: Kind = Kind.PARAMETER
    evidence: Evidence = Evidence.ASSUMED
    persistent: bool | None = None
    #: True for an entry of a checkpoint. Only a whole module has tensors that its state_dict would not save.
    saved: bool | None = True
    requires_grad: bool | None = None
    aliases: tuple[str, ...] = ()
    note: str | None = None
    within: str | None = None
    derived: str | None = None
    note_kind: NoteKind | None = None


def build_row(fqn: str, tensor: Tensor, kind: Kind, evidence: Evidence) -> DecodedTensor:
    """Build a tensor row of the given `kind`. An nn.Buffer among parameters becomes a buffer."""
    if kind is Kind.PARAMETER and tensor.is_parameter:
        evidence = Evidence.TYPE
    elif kind is Kind.PARAMETER and tensor.is_buffer:
        return DecodedTensor(
            fqn, tensor, Kind.BUFFER, Evidence.TYPE, tensor.persistent, requires_grad=tensor.requires_grad
        )
    # The tensors of a state_dict are detached, so requires_grad=False there means unknown.
    grad = tensor.requires_grad if tensor.is_parameter or tensor.requires_grad else None
    return DecodedTensor(fqn, tensor, kind, evidence, requires_grad=grad)


def mark_damaged(fqn: str, error: MalformedError, tensor: object = None) -> Tensor:
    """Return a damaged tensor with the error as the reason. If `tensor` is decoded, keep its dtype, shape and size."""
    why = str(error).removeprefix(f"{fqn}: ")
    tensor_read = tensor if type(tensor) is Tensor else Tensor("unknown", None, 0, 0, None, False)
    return msgspec.structs.replace(tensor_read, note=f"cannot be read: {why}", damage=f"{fqn}: {why}")


class Reading:
    """State shared by all code that reads one file."""

    def __init__(self, decoder: TensorDecoder, oddities: list[Oddity]) -> None:
        self.decoder = decoder
        self.oddities = oddities
        self.characters = 0

    def add_oddity(self, name: str, message: str, fqn: str | None = None) -> None:
        """Record content that is unusual but readable."""
        self.oddities.append(Oddity(name, message, fqn))

    def tensor(self, node: object, fqn: str) -> Tensor | None:
        """Decode a tensor as `TensorDecoder.tensor` does. A tensor that contradicts the file gets `damage`."""
        try:
            return self.decoder.tensor(node, fqn)
        except MalformedError as error:
            return mark_damaged(fqn, error, node)

    def walk(self, node: object, path: str, *, seen: set[int] | None = None) -> Iterator[ReachedNode]:
        """Yield the tensors and modules inside a pickled object, in file order. Each container is entered only once."""
        seen = set() if seen is None else seen
        stack = [(path, node, 0)]
        while stack:
            path, node, depth = stack.pop()
            if type(node) in LEAF_TYPES:
                continue
            tensor = self.tensor(node, path)
            if tensor is not None:
                yield ReachedNode(path, node, tensor)
                continue
            if id(node) in seen:
                continue
            seen.add(id(node))
            if is_module(node):
                yield ReachedNode(path, node, None)
                continue
            if depth == MAX_DEPTH:
                message = f"nesting is deeper than {MAX_DEPTH} levels; statecli does not list deeper levels"
                self.add_oddity(OddityKind.TOO_DEEP.value, message, path)
                continue
            if len(path) > MAX_PREFIX:
                raise MalformedError(
                    f"the name of a container has {len(path)} characters ({path[:40]!r}…), more "
                    f"than statecli's limit of {MAX_PREFIX}"
                )
            children = [
                (path + step, child, depth + 1) for step, child in self._limit_characters(path, iter_children(node))
            ]
            stack.extend(reversed(children))

    def _limit_characters(self, path: str, children: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Yield the children. Raises MalformedError if all paths together have more than MAX_CHARACTERS characters."""
        for step, child in children:
            self.characters += len(path)
            if self.characters > MAX_CHARACTERS:
                raise MalformedError(
                    f"the tensor names have more than {MAX_CHARACTERS} characters in total, the limit of statecli; the "
                    f"name beyond the limit begins with {path[:40]!r}"
                )
            yield step, child
