"""A class against a checkpoint: what `load_state_dict` would find there, whichever of the two comes first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from statecli import kinds
from statecli.diff.pairing import Match, counted
from statecli.diff.result import Field
from statecli.errors import NothingMatched, UsageError
from statecli.finding import Finding, Severity
from statecli.state import Kind, ModelState, Oddity, TensorInfo


def is_class(state: ModelState) -> bool:
    """Whether the state is that of a live model class."""
    return state.format == "module"


def expected(state: ModelState) -> tuple[ModelState, list[Oddity]]:
    """A class's or a pickled module's state without what no state_dict of it holds.

    That is its non-persistent buffers and its unregistered tensors.
    """
    kept = tuple(tensor for tensor in state.tensors if _is_expected(tensor))
    left_out = len(state.tensors) - len(kept)
    if not left_out:
        return state, []
    message = f"{counted(left_out)} of {state.target} are in none of its state_dicts, and not looked for"
    return replace(state, tensors=kept), [Oddity("not-expected", message)]


def _is_expected(tensor: TensorInfo) -> bool:
    return tensor.kind is not Kind.UNREGISTERED and tensor.persistent is not False and tensor.saved is not False


def of_model(state: ModelState, model: ModelState) -> tuple[ModelState, list[Oddity]]:
    """The one section of a checkpoint that a class could load.

    Raises NothingMatched where it holds no model, UsageError where it holds several and none is called `model`.
    """
    held = list(dict.fromkeys(tensor.section for tensor in state.tensors if tensor.kind in kinds.MODEL_KINDS))
    if not held:
        raise NothingMatched(f"{state.target}: holds no model's tensors that {model.target} could load")
    if len(held) > 1 and "model" not in held:
        names = ", ".join(f"{state.target}#{section}" for section in held[:4])
        raise UsageError(f"{state.target}: holds {len(held)} models' states; name the one that is meant: {names}")
    section = "model" if "model" in held else held[0]
    others = [other for other in state.sections if other != section]
    if not others:
        return state, []
    tensors = tuple(tensor for tensor in state.tensors if tensor.section == section)
    message = f"{', '.join(others)} of {state.target}: left out, {model.target} loads {section}"
    return replace(state, sections=(section,), tensors=tensors), [Oddity("sections-left-out", message)]


def findings(
    matches: Sequence[Match], before: ModelState, after: ModelState, model: ModelState, ignore: Sequence[Field]
) -> list[Finding]:
    """What a strict load of the checkpoint would object to, in the words of `kinds.by_model`.

    `matches` are all of them, whatever the globs leave: a strict load sees the whole. `model` is the class's whole
    state, `before` and `after` what was compared.
    """
    checkpoint = after if is_class(before) else before
    looked_through = Counter[str]()
    rows: list[TensorInfo] = []
    for match in matches:
        one, two = (match.after, match.before) if is_class(before) else (match.before, match.after)
        if one is None:
            continue
        rows.append(replace(one, fqn=two.fqn) if two else one)
        if match.stripped and two:
            looked_through[_longer(match.stripped)] += 1
    _, found = kinds.by_model(replace(checkpoint, tensors=tuple(rows), sections=(rows[0].section,)), model)
    wrapped = [_wrapped(prefix, count, checkpoint, model) for prefix, count in looked_through.items()]
    return [*wrapped, *(one for one in found if Field.SHAPE not in ignore or one.rule != "shape-mismatch")]


def _longer(stripped: tuple[str, str]) -> str:
    return max(stripped, key=len)


def _wrapped(prefix: str, count: int, checkpoint: ModelState, model: ModelState) -> Finding:
    message = f"the names of {counted(count)} differ by {prefix!r} from those that {model.target} registers"
    help = f"rename them before load_state_dict, which matches names exactly: {prefix!r} is a wrapper's prefix"
    return Finding("wrapper-prefix", Severity.ERROR, message, checkpoint.target, None, help)
