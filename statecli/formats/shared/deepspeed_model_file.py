"""Model file of a DeepSpeed rank: its records about parameters, and the kinds and values of its tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
from msgspec.structs import replace

from statecli.core.dtypes import INTEGER_DTYPES
from statecli.core.model_state import Evidence, Kind, TensorInfo
from statecli.formats.shared.deepspeed_zero import Owner, Rank, Shape, read_shapes
from statecli.pickles.graph import as_sequence, get_text_items

#: Note for a parameter in no group of the optimizer: stage 1 does not record frozen parameters.
NOT_TRAINED_NOTE = "not trained by the optimizer"


class ModelFileFacts(msgspec.Struct, frozen=True):
    """DeepSpeed's records in a model file: shapes of trained and frozen parameters, buffer names, shared parameters.

    `trained` has a dict for each optimizer group. `buffers` is None if the file does not list the buffers.
    `shared` maps the name of a shared parameter to the name under which DeepSpeed records its shape.
    """

    trained: list[dict[str, Shape]]
    frozen: dict[str, Shape]
    buffers: frozenset[str] | None
    shared: dict[str, str]

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shape of each parameter by name. A shared parameter has the shape of the parameter that it shares."""
        own_shapes = {name: shape for shapes in (*self.trained, self.frozen) for name, shape in shapes.items()}
        return own_shapes | {
            name: own_shapes[partner] for name, partner in self.shared.items() if partner in own_shapes
        }


def read_facts(rank: Rank) -> ModelFileFacts:
    """Read DeepSpeed's records in a rank's model file."""
    groups = rank.items.get("param_shapes")
    trained = [read_shapes(child, f"{rank.name}: param_shapes") for child in as_sequence(groups) or ()]
    frozen = read_shapes(rank.items.get("frozen_param_shapes"), f"{rank.name}: frozen_param_shapes")
    names = as_sequence(rank.items.get("buffer_names"))
    buffers = None if names is None else frozenset(name for name in names if type(name) is str)
    shared = get_text_items(rank.items.get("shared_params"))
    return ModelFileFacts(trained, frozen, buffers, {alias: two for alias, two in shared.items() if type(two) is str})


class ModelSection:
    """Section `module` of a model file. It sets the kinds of tensors, and adds the values of tensors saved empty."""

    def __init__(self, rank: Rank, facts: ModelFileFacts, owner: Owner) -> None:
        self.rank, self.facts, self.owner = rank, facts, owner
        self.trained = frozenset(name for group in facts.trained for name in group)
        self.shapes = facts.shapes
        of_module = [
            tensor for tensor in rank.state.tensors if tensor.section == "module" and tensor.storage is not None
        ]
        #: Storages that hold a group's parameters, and the positions of trained parameters in them.
        self.flat_storages = {tensor.storage for tensor in of_module if tensor.fqn in self.trained}
        self.learning = {_locate(tensor) for tensor in of_module if tensor.fqn in self.trained}

    @property
    def copied_names(self) -> Iterator[str]:
        """Names of parameters with a float32 copy in the optimizer: the listed names, or else all possible names."""
        if self.facts.trained:
            yield from (name for group in self.facts.trained for name in group)
            return
        uncopied = {*(self.facts.buffers or ()), *self.facts.shared, *self.facts.frozen}
        for tensor in self.rank.state.tensors:
            is_number = tensor.dtype not in INTEGER_DTYPES and not tensor.fqn.endswith("_extra_state")
            if tensor.section == "module" and is_number and tensor.fqn not in uncopied:
                yield tensor.fqn

    def build_rows(self, masters: Mapping[str, TensorInfo], frozen: Mapping[str, TensorInfo]) -> Iterator[TensorInfo]:
        """Yield all tensors of the file. An empty tensor gets the values of its float32 copy or frozen fragments."""
        for tensor in self.rank.state.tensors:
            if tensor.section == "module":
                tensor = self._classify(self._fill(tensor, masters, frozen))
            if tensor.section != "frozen_param_fragments":
                storage = None if tensor.storage is None else f"{self.rank.name}:{tensor.storage}"
                yield replace(tensor, section=f"{self.owner.prefix}{tensor.section}", storage=storage)

    def _fill(
        self, tensor: TensorInfo, masters: Mapping[str, TensorInfo], frozen: Mapping[str, TensorInfo]
    ) -> TensorInfo:
        """Return the tensor. If ZeRO-3 saved it empty, add its real shape and the values from another file."""
        stored_name = self.facts.shared.get(tensor.fqn, tensor.fqn)
        shape = self.shapes.get(stored_name)
        if tensor.shape != (0,) or shape in (None, (0,)):
            return tensor
        master = masters.get(stored_name)
        source = master or frozen.get(stored_name)
        if source is None:
            reason = "its values are in the missing files of other ranks; copy the missing files"
            damage = f"{self.owner.target}: {tensor.fqn}: {reason}"
            return replace(tensor, shape=shape, data=None, note=f"cannot be read: {reason}", damage=damage)
        copy = f"the optimizer's {source.dtype} copy" if master else None
        trains = f"{tensor.dtype} in training" if tensor.dtype != source.dtype else None
        note = "; ".join(filter(None, (copy, source.note, trains))) or None
        return replace(
            source,
            fqn=tensor.fqn,
            section=tensor.section,
            belongs_to=None,
            note=source.note if source.damage else note,
            storage=stored_name,
            damage=source.damage and source.damage.replace(f" {stored_name}: ", f" {tensor.fqn}: ", 1),
        )

    def _classify(self, tensor: TensorInfo) -> TensorInfo:
        """Set the tensor's kind. If DeepSpeed lists the buffers, other tensors except extra states are parameters."""
        facts, stored_name = self.facts, self.facts.shared.get(tensor.fqn, tensor.fqn)
        if facts.buffers is not None and tensor.fqn in facts.buffers:
            return replace(tensor, kind=Kind.BUFFER, evidence=Evidence.REGISTERED, persistent=True)
        is_trained = stored_name in self.trained or _locate(tensor) in self.learning
        tensor = self._keep_apart(tensor)
        if (
            not is_trained
            and stored_name not in facts.frozen
            and (facts.buffers is None or tensor.fqn.endswith("_extra_state"))
        ):
            return tensor
        grad = True if is_trained else False if stored_name in facts.frozen else None
        note = tensor.note if grad is not None or not self.trained else tensor.note or NOT_TRAINED_NOTE
        return replace(tensor, kind=Kind.PARAMETER, evidence=Evidence.REGISTERED, requires_grad=grad, note=note)

    def _keep_apart(self, tensor: TensorInfo) -> TensorInfo:
        """Give a tensor its own storage, because ZeRO packs tensors together. Tensors at the same place stay tied."""
        if tensor.storage not in self.flat_storages:
            return tensor
        note = None if tensor.nbytes < (tensor.storage_bytes or 0) else tensor.note  # drop the note on the view
        position = f"{tensor.storage}+{tensor.storage_offset}"
        return replace(tensor, storage=position, storage_bytes=tensor.nbytes, note=note)


def _locate(tensor: TensorInfo) -> tuple[object, int, Shape | None]:
    return tensor.storage, tensor.storage_offset, tensor.shape
