"""Select tensors by name, kind, dtype and shape: `--include`, `--exclude`, `--kind`, `--dtype` and `--shape`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from types import MappingProxyType

import msgspec
from msgspec.structs import replace

from statecli.core.errors import FilteredOut, UsageError, option
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind, ModelState, TensorInfo, TensorKey
from statecli.core.name_pattern import compile_name_pattern, has_braces
from statecli.core.quoting import names

#: Short spellings of dtypes that engineers type.
DTYPE_SPELLINGS = {"fp64": "float64", "fp32": "float32", "fp16": "float16", "half": "float16", "bf16": "bfloat16"}
_SIZE = compile_on_use(r"\*|\d{1,19}")


class Selection(msgspec.Struct, frozen=True):
    """Options that select tensors. An empty tuple selects every tensor.

    Attributes:
        include: Globs; at least one glob must match the tensor's name.
        exclude: Globs; none may match.
        kind: Kinds to select.
        dtype: Globs on dtypes: `float8*`.
        shape: Shapes like `2x3`, `*x768` (any number of rows) and `[]` (a scalar).
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    kind: tuple[Kind, ...] = ()
    dtype: tuple[str, ...] = ()
    shape: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.include or self.exclude or self.selects_by_tensor)

    @property
    def selects_by_tensor(self) -> bool:
        """Return True if the selection depends on kind, dtype or shape. Only tensors have these, settings do not."""
        return bool(self.kind or self.dtype or self.shape)

    def check(self) -> None:
        """Raise UsageError for a shape whose sizes are not numbers or `*`."""
        for text in self.shape:
            if not all(_SIZE.fullmatch(size) for size in split_sizes(text)):
                raise UsageError(f"{option('--shape', text)}: write sizes or * for any size, such as 768x3072 or *x768")

    def name_options(self) -> str:
        """Return the options as the user typed them, for the message of a UsageError."""
        options_with_values = [
            ("-i", self.include),
            ("-x", self.exclude),
            ("--dtype", self.dtype),
            ("--shape", self.shape),
        ]
        options = [option(flag, text, quoted=True) for flag, texts in options_with_values for text in texts]
        return " ".join(options + [option("--kind", kind.value) for kind in self.kind])

    def selects_name(self, names: tuple[str, ...]) -> bool:
        """Return True if a tensor or setting with these names is selected. One matching name is enough."""
        return (not self.include or matches_any(names, self.include)) and not matches_any(names, self.exclude)

    def selects_kind(self, kind: Kind) -> bool:
        """Return True if tensors of this kind are selected."""
        return not self.kind or kind in self.kind

    def selects_layout(self, tensor: TensorInfo) -> bool:
        """Return True if the tensor's dtype and shape are selected."""
        return (not self.dtype or any(_matches_dtype(tensor.dtype, glob) for glob in self.dtype)) and (
            not self.shape or any(_matches_shape(tensor.shape, text) for text in self.shape)
        )

    def selects(self, tensor: TensorInfo, *, by_section: bool) -> bool:
        """Return True if the tensor is selected. `by_section`: see `glob_names`."""
        return (
            self.selects_kind(tensor.kind)
            and self.selects_layout(tensor)
            and self.selects_name(glob_names(tensor.fqn, tensor.section, by_section=by_section))
        )


def select(
    state: ModelState,
    selection: Selection,
    target: str,
    weights: Mapping[TensorKey, TensorInfo] = MappingProxyType({}),
) -> ModelState:
    """Return the state with the selected tensors and their sections, or the same object if nothing is filtered.

    `weights` are the rows of quantized weights by section and name of each of their tensors: a selected weight has all
    of its tensors, a weight with an excluded name has none. Raises FilteredOut, with the name `target`, if no tensor is
    selected.
    """
    if not selection:
        return state
    by_section = len(state.sections) > 1

    def is_selected(tensor: TensorInfo) -> bool:
        weight = weights.get(tensor.key) if weights else None
        if weight is None:
            return selection.selects(tensor, by_section=by_section)
        names = glob_names(weight.fqn, weight.section, by_section=by_section)
        return selection.selects(weight, by_section=by_section) or (
            not matches_any(names, selection.exclude) and selection.selects(tensor, by_section=by_section)
        )

    tensors = tuple(filter(is_selected, state.tensors))
    if not tensors:
        raise FilteredOut(f"{target}: {_describe_nothing_selected(selection, state.tensors)}")
    sections = {tensor.section for tensor in tensors}
    return replace(state, tensors=tensors, sections=tuple(name for name in state.sections if name in sections))


def glob_names(fqn: str, section: str | None, *, by_section: bool) -> tuple[str, ...]:
    """Return the names to match with a glob: the FQN and, if `by_section`, also `section.FQN`.

    Callers set `by_section` only for several sections, because `-x 'model.*'` must not exclude the `lm_head` of a
    state_dict whose only section is called `model`.
    """
    return (fqn, f"{section}.{fqn}") if by_section and section else (fqn,)


def matches_any(names: tuple[str, ...], globs: Sequence[str]) -> bool:
    """Return True if one of the globs, such as `layers.{0..2}.*`, matches a whole name.

    Brackets and braces also match themselves, because names contain them.
    """
    return any(_matches_glob(name, glob) for glob in globs for name in names)


def suggest_glob(glob: str, names: Iterable[str]) -> str:
    """Return `; did you mean 'layers.0.*'?` if a name continues the glob `layers.0` after a dot, else return ""."""
    longer_glob = f"{glob.rstrip('.')}.*"
    return f"; did you mean {longer_glob!r}?" if matches_any(tuple(names), (longer_glob,)) else ""


def _matches_glob(name: str, glob: str) -> bool:
    spellings = (glob, glob.replace("[", "[[]")) if "[" in glob else (glob,)
    return any(fnmatchcase(name, spelling) for spelling in spellings) or (
        has_braces(glob) and any(compile_name_pattern(spelling).fullmatch(name) for spelling in spellings)
    )


def _matches_dtype(dtype: str, glob: str) -> bool:
    glob = glob.removeprefix("torch.").lower()
    return fnmatchcase(dtype.lower(), DTYPE_SPELLINGS.get(glob, glob))


def _matches_shape(shape: tuple[int, ...] | None, text: str) -> bool:
    sizes = split_sizes(text)
    if shape is None or len(shape) != len(sizes):
        return False
    return all(size_pattern in ("*", str(size)) for size_pattern, size in zip(sizes, shape, strict=True))


def split_sizes(text: str) -> list[str]:
    """Split `2x3`, `2,3`, `[2, 3]` or `(2, 3)` into sizes. `[]` and `()` have no sizes."""
    text = "".join(text.split())
    inner_text = text[1:-1].removesuffix(",") if text[:1] + text[-1:] in ("[]", "()") else text
    return re.split("[x,]", inner_text) if inner_text or not text else []


def _describe_nothing_selected(selection: Selection, tensors: Sequence[TensorInfo]) -> str:
    mismatch = f"none of its {len(tensors)} tensors matches" if len(tensors) > 1 else "its only tensor does not match"
    nothing = f"{mismatch} {selection.name_options()}"
    dtypes = {tensor.dtype for tensor in tensors}
    if selection.dtype and not any(_matches_dtype(dtype, glob) for glob in selection.dtype for dtype in dtypes):
        return f"{nothing}; the target has the dtypes {names(sorted(dtypes))}"
    shapes = dict.fromkeys(tensor.shape for tensor in tensors if tensor.shape is not None)
    if selection.shape and not any(_matches_shape(shape, text) for text in selection.shape for shape in shapes):
        return f"{nothing}; the target has the shapes {names(['x'.join(map(str, shape)) or '[]' for shape in shapes])}"
    fqns = [tensor.fqn for tensor in tensors]
    longer_hint = next(filter(None, (suggest_glob(glob, fqns) for glob in selection.include)), "")
    if longer_hint:
        return nothing + longer_hint
    wider_globs = [f"*{glob.strip('*')}*" for glob in selection.include[:1] if glob != f"*{glob.strip('*')}*"]
    return f"{nothing}; a glob matches the whole name: try {wider_globs[0]!r}" if wider_globs else nothing
