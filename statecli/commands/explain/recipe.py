"""Describe how to load a checkpoint: the Python code, and the names and entries that this code loads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

import msgspec

from statecli.commands.explain.renaming import Shift, Step, Substitution, apply_steps, format_raw, format_text

#: Largest width of a printed line in columns, if possible.
LINE_WIDTH = 100
#: Largest number of names listed in a printed line.
MAX_LISTED_NAMES = 4
#: Largest number of names deleted one by one in a printed line.
MAX_DELETED_NAMES = 2


class Loader(Enum):
    """The function that reads the checkpoint file, in the printed code."""

    TORCH = "torch.load"
    MODULE = "torch.load of a pickled module"
    SAFETENSORS = "safetensors.torch.load_file"
    DCP = "torch.distributed.checkpoint.load"


class StateDictSource(msgspec.Struct, frozen=True):
    """The files of a checkpoint, and the keys that lead from the loaded object to the state_dict inside.

    `pattern`: a glob that matches exactly these files; "" for a single file, or for files that the code lists.
    `allowed`: classes that `weights_only=True` must allow.
    """

    files: tuple[str, ...]
    loader: Loader
    keys: tuple[str | int, ...] = ()
    pattern: str = ""
    allowed: tuple[str, ...] = ()


class ModelCode(msgspec.Struct, frozen=True):
    """Code that builds a model: imports, lines that read its configuration, and the expression of the model.

    `doubt`: why the lines may build another model than the model that statecli tested.
    """

    imports: tuple[str, ...]
    expression: str
    lines: tuple[str, ...] = ()
    doubt: str = ""


class Rest(Enum):
    """Entries that the printed code leaves out because the class does not have their names (or their shapes)."""

    UNKNOWN = "names that the class does not have"
    OF_OTHER_SHAPE = "names that the class does not have, and tensors of another shape"


class LeftOut(msgspec.Struct, frozen=True):
    """Entries that are not loaded. The code finds these entries by comparison with the class (`rest`) or by name."""

    names: tuple[str, ...] = ()
    rest: Rest | None = None

    def format_code(self) -> tuple[str, ...]:
        """Return the code that removes the entries from the dict `state`."""
        items = "name: tensor for name, tensor in state.items()"
        if self.rest is Rest.UNKNOWN:
            return "known = set(model.state_dict())", f"state = {{{items} if name in known}}"
        if self.rest is Rest.OF_OTHER_SHAPE:
            shape = 'getattr(tensor, "shape", None)'
            shapes = f"shapes = {{name: {shape} for name, tensor in model.state_dict().items()}}"
            return shapes, f"state = {{{items} if name in shapes and shapes[name] == {shape}}}"
        if len(self.names) > MAX_DELETED_NAMES:
            return f"for name in {_format_tuple(self.names)}:", "    del state[name]"
        return (f"del {', '.join(f'state[{format_text(name)}]' for name in self.names)}",) if self.names else ()


class Recipe(msgspec.Struct, frozen=True):
    """A way to load a checkpoint into a class.

    Attributes:
        model: Code that builds the class; None if only an error text is known.
        steps: Steps that rename the entries.
        in_order: Names of the class in order, given to the entries in order; used instead of steps.
        left_out: Entries left out, under their new names.
        ties: Names of the class filled from another entry, because they share its storage.
        initial: Names of the class that keep their initial values; if not empty, the code uses strict=False.
        transposed: All parameters of the class whose rows and columns are exchanged in the checkpoint.
    """

    source: StateDictSource
    model: ModelCode | None = None
    steps: tuple[Step, ...] = ()
    in_order: tuple[str, ...] = ()
    left_out: LeftOut = LeftOut()
    ties: tuple[tuple[str, str], ...] = ()
    initial: tuple[str, ...] = ()
    transposed: tuple[str, ...] = ()

    @property
    def rebuilds_dict(self) -> bool:
        """Return True if the code builds a new dict. A new dict lacks the attribute `_metadata`."""
        return bool(self.steps or self.in_order or self.left_out.rest or self.source.files[1:]) or (
            self.source.loader is Loader.DCP
        )

    def rename_entries(self, names: Iterable[str]) -> dict[str, str]:
        """Return the entries that the printed code loads: name in the model -> name in the checkpoint."""
        if self.in_order:
            renamed_names = dict(zip(self.in_order, names, strict=True))
        else:
            renamed_names = {apply_steps(self.steps, name): name for name in names}
        left_out = set(self.left_out.names)
        entries = {new: name for new, name in renamed_names.items() if new not in left_out}
        entries.update((name, entries[tied_name]) for name, tied_name in self.ties)
        return entries

    # --- the printed lines -------------------------------------------------------------------------------------------

    def format_code(self) -> tuple[str, ...]:
        """Return the Python code that loads the checkpoint, as lines."""
        lines = [*self._format_imports()]
        if self.model is not None:
            lines += [*self.model.lines, f"model = {self.model.expression}"]
        lines += _format_source(self.source)
        lines += self._format_renaming()
        lines += self._format_transposition()
        lines += self.left_out.format_code()
        lines += [f"state[{format_text(name)}] = state[{format_text(tied_name)}]" for name, tied_name in self.ties]
        if self.initial:
            lines.append(f"model.load_state_dict(state, strict=False)  # initial values: {_list_modules(self.initial)}")
        else:
            lines.append("model.load_state_dict(state, strict=True)")
        return tuple(lines)

    def _format_transposition(self) -> Iterable[str]:
        if len(self.transposed) > MAX_LISTED_NAMES:
            yield "for name, tensor in model.named_parameters(remove_duplicate=False):"
            yield "    if name in state and state[name].shape == tensor.shape[::-1] != tensor.shape:"
            yield "        state[name] = state[name].T"
        elif self.transposed:
            yield f"for name in {_format_tuple(self.transposed)}:"
            yield "    state[name] = state[name].T"

    def _format_imports(self) -> Iterable[str]:
        modules = []
        if self.source.pattern:
            modules.append("import glob")
        if self.model is not None and any("json.load(" in line for line in self.model.lines):
            modules.append("import json")
        if any("re.sub" in step.format_code("name") for step in self.steps) or _list_rules(self.steps):
            modules.append("import re")
        modules += [f"import {name.rpartition('.')[0]}" for name in self.source.allowed]
        if self.source.loader is not Loader.SAFETENSORS:
            modules.append("import torch")
        if self.source.loader is Loader.DCP:
            modules.append("import torch.distributed.checkpoint as dcp")
        if self.source.loader is Loader.SAFETENSORS:
            modules.append("from safetensors.torch import load_file")
        return dict.fromkeys((*modules, *(self.model.imports if self.model is not None else ())))

    def _format_renaming(self) -> Iterable[str]:
        if self.in_order:
            yield "state = dict(zip(model.state_dict(), state.values(), strict=True))"
            return
        if rules := _list_rules(self.steps):
            line = f"rules = [{', '.join(rules)}]"
            yield from [line] if len(line) <= LINE_WIDTH else ["rules = [", *(f"    {rule}," for rule in rules), "]"]
            yield "for pattern, new in rules:"
            yield "    state = {re.sub(pattern, new, name): tensor for name, tensor in state.items()}"
            return
        expression, pending = "name", False
        for step in self.steps:
            longer = step.format_code(expression)
            if pending and (isinstance(step, Shift) or len(longer) > LINE_WIDTH - 50):
                yield _rename(expression)
                longer = step.format_code("name")
            expression, pending = longer, True
            if isinstance(step, Shift):
                yield _rename(expression)
                expression, pending = "name", False
        if pending:
            yield _rename(expression)


def _list_rules(steps: Sequence[Step]) -> list[str]:
    """Return the steps as code of `(pattern, replacement)` pairs for a loop. Return [] if a loop does not fit."""
    substitutions = [step for step in steps if isinstance(step, Substitution)]
    if len(steps) < 3 or len(substitutions) < len(steps):
        return []
    return [f"({format_raw(step.pattern)}, {format_raw(step.replacement)})" for step in substitutions]


def _rename(expression: str) -> str:
    return f"state = {{{expression}: tensor for name, tensor in state.items()}}"


def _format_tuple(texts: Sequence[str]) -> str:
    return f"({', '.join(map(format_text, texts))}{',' if len(texts) == 1 else ''})"


def _format_source(source: StateDictSource) -> list[str]:
    if source.loader is Loader.DCP:
        return _format_dcp_folder(source)
    keys = "".join(f"[{format_text(key) if isinstance(key, str) else key}]" for key in source.keys)
    lines = [f"torch.serialization.add_safe_globals([{', '.join(source.allowed)}])"] if source.allowed else []
    if source.loader is Loader.SAFETENSORS:
        load = "load_file({})"
    elif source.loader is Loader.MODULE:
        load = 'torch.load({}, map_location="cpu", weights_only=False)'
    else:
        load = 'torch.load({}, map_location="cpu", weights_only=True)'
    if len(source.files) > 1:
        paths = f"glob.glob({format_text(source.pattern)})" if source.pattern else _format_tuple(source.files)
        merge = f"state |= {load.format('path')}{keys}"
        return [*lines, "state = {}", f"for path in {paths}:", f"    {merge}"]
    suffix = ".state_dict()  # runs code of the file" if source.loader is Loader.MODULE else ""
    return [*lines, f"state = {load.format(format_text(source.files[0]))}{keys}{suffix}"]


def _format_dcp_folder(source: StateDictSource) -> list[str]:
    """Return code that reads a DCP folder. If keys are given, read only tensors whose names begin with the keys."""
    folder, prefix = format_text(source.files[0]), format_text("".join(f"{key}." for key in source.keys))
    test = f" and name.startswith({prefix})" if source.keys else ""
    lines = [
        f"metadata = dcp.FileSystemReader({folder}).read_metadata().state_dict_metadata",
        "state = {",
        "    name: torch.empty(tensor.size, dtype=tensor.properties.dtype)",
        "    for name, tensor in metadata.items()",
        f"    if isinstance(tensor, dcp.TensorStorageMetadata){test}",
        "}",
        f"dcp.load(state, checkpoint_id={folder})",
    ]
    return [*lines, _rename(f"name.removeprefix({prefix})")] if source.keys else lines


def _list_modules(names: Sequence[str]) -> str:
    if len(names) <= MAX_LISTED_NAMES:
        return ", ".join(names)
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    remainder_text = f" and {len(modules) - MAX_LISTED_NAMES} more" if len(modules) > MAX_LISTED_NAMES else ""
    return f"{len(names)} tensors of {', '.join(modules[:MAX_LISTED_NAMES])}{remainder_text}"
