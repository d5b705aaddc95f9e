"""Rule about pickled modules: sizes of weights that contradict each other or the settings of their module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from statecli.core.finding import Severity
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Scalar, TensorInfo, TensorKey
from statecli.rules.audit_rule import Issue, report_tensor, rule
from statecli.rules.audit_subject import Subject

_Sizes = tuple[int, ...]
_RECURRENT = compile_on_use(
    r"(?P<module>(?:.*\.)?)(?P<what>weight_ih|weight_hh|weight_hr|bias_ih|bias_hh)_l(?P<layer>\d+)(?P<way>_reverse|)"
)
#: Item of `_flat_weights`, the list of weights that forward uses. The items are the weights themselves, unless a file
#: says otherwise.
_FLAT_WEIGHT = compile_on_use(r"(?P<module>(?:.*\.)?)_flat_weights\[(?P<at>\d{1,6})\]")
#: Number of rows of a recurrent cell's weights for each element of the hidden state, by the module's `mode`.
_GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}
_ATTENTION_HEADS = compile_on_use(r"(?:.*\.)?(?:num_heads|head_dim)")
_HELP = "do not call the module; contact its publisher"


def needs_module(subject: Subject) -> str | None:
    """Return a reason if the target does not contain a module that can be called; else None."""
    state = subject.full_state
    is_module = state.traits.is_program or any(section.is_module for section in state.state_dicts)
    return (
        None if is_module else "the target is not a pickled module; load_state_dict checks the shapes in a state_dict"
    )


@rule(Severity.ERROR, needs_module)
def inconsistent_module(subject: Subject) -> Iterator[Issue]:
    """In a pickled module, the size of a weight contradicts the module's settings or its other weights.

    Why: loading a whole module does not run its constructor, so nothing checks the sizes of the weights. The kernels of
    LSTM, GRU and weight_norm do not check the sizes either: a call of the module reads memory outside of the weight, or
    crashes. An attention module with 0 heads divides by zero.

    Example: an LSTM with `hidden_size` 4096 whose `weight_ih_l0` has 1 row.

    Fix: do not call the module. If the file is yours, save the module's state_dict, and build the class before loading.
    """
    state = subject.full_state
    sections = {section.section for section in state.state_dicts if section.is_module} or set(state.sections)
    rows = [row for row in state.tensors if row.section in sections and row.shape is not None]
    yield from _check_recurrent(subject, rows)
    yield from _check_flat_weights(subject, rows)
    yield from _check_weight_norm(subject, rows)
    for path, value in state.metadata.values.items():
        if _ATTENTION_HEADS.fullmatch(path) and type(value) is int and value < 1:
            message = f"{path} is {value}: the module divides by this number, so a call fails"
            yield Issue(message, help=_HELP, about=path)


def _check_recurrent(subject: Subject, rows: list[TensorInfo]) -> Iterator[Issue]:
    modules: dict[tuple[str, str], dict[tuple[str, int, str], TensorInfo]] = {}
    for row in rows:
        if match := _RECURRENT.fullmatch(row.fqn):
            key = match["what"], min(int(match["layer"][:9]), 2**20), match["way"]
            modules.setdefault((row.section, match["module"]), {})[key] = row
    for (_, module), weights in modules.items():
        settings = _find_settings(subject.full_state.metadata.values, module)
        for row, expected in _find_expected_sizes(weights, settings):
            if row.shape != expected:
                text = f"has shape {list(row.shape or ())}, but its module needs {list(expected)}"
                yield report_tensor(subject, row, text, _HELP)


def _check_flat_weights(subject: Subject, rows: list[TensorInfo]) -> Iterator[Issue]:
    """Check each list `_flat_weights` against the weights of the same module, in order."""
    shapes: dict[tuple[str, str], list[_Sizes | None]] = {}
    for row in rows:
        if match := _RECURRENT.fullmatch(row.fqn):
            shapes.setdefault((row.section, match["module"]), []).append(row.shape)
    for row in rows:
        if match := _FLAT_WEIGHT.fullmatch(row.fqn):
            expected = shapes.get((row.section, match["module"]), [])[int(match["at"]) :][:1]
            if row.shape not in expected:
                requirement = f"needs {list(expected[0] or ())}" if expected else "does not have this weight"
                text = f"has shape {list(row.shape or ())}, but its module {requirement}"
                yield report_tensor(subject, row, text, _HELP)


def _find_settings(values: Mapping[str, Scalar], module: str) -> dict[str, Scalar]:
    prefix = "".join(f"_modules.{part}." for part in module.split(".")[:-1])
    names = ("hidden_size", "input_size", "proj_size", "mode")
    return {name: values[prefix + name] for name in names if prefix + name in values}


def _find_expected_sizes(
    weights: Mapping[tuple[str, int, str], TensorInfo], settings: Mapping[str, Scalar]
) -> Iterator[tuple[TensorInfo, _Sizes]]:
    """Yield each weight of a recurrent module (LSTM, GRU, RNN) with the shape that the module needs."""
    first = {
        kind: row.shape or () for (kind, layer, direction), row in weights.items() if (layer, direction) == (0, "")
    }
    inputs, hiddens, projection = first.get("weight_ih", ()), first.get("weight_hh", ()), first.get("weight_hr", ())
    if len(inputs) != 2 or len(hiddens) != 2:
        return
    hidden_size = _get_int(settings, "hidden_size", (projection or hiddens)[-1])
    output = _get_int(settings, "proj_size", projection[0] if projection else 0) or hidden_size
    gates = next((gates for gates in _GATES.values() if gates * hidden_size == inputs[0]), _GATES["LSTM"])
    gates = _GATES.get(str(settings.get("mode")), gates)
    rows, directions = gates * hidden_size, 1 + any(direction for _, _, direction in weights)
    for (kind, layer, _), row in weights.items():
        columns = output * directions if layer else _get_int(settings, "input_size", inputs[1])
        shapes = {"weight_ih": (rows, columns), "weight_hh": (rows, output), "weight_hr": (output, hidden_size)}
        yield row, shapes.get(kind, (rows,))


def _get_int(settings: Mapping[str, Scalar], name: str, default: int) -> int:
    value = settings.get(name)
    return value if type(value) is int else default


def _check_weight_norm(subject: Subject, rows: list[TensorInfo]) -> Iterator[Issue]:
    """Check the norms of `weight_norm`: each dimension has size 1 or the weight's size, and not all have size 1."""
    by_name = {row.key: row for row in rows}
    for (section, name), row in by_name.items():
        stem, _, last = name.rpartition(".")
        norm_name = "original0" if last == "original1" else f"{last[:-2]}_g" if last.endswith("_v") else ""
        norm = by_name.get(TensorKey(section, f"{stem}.{norm_name}" if stem else norm_name))
        shape = row.shape or ()
        if not norm_name or norm is None or norm.shape is None or len(norm.shape) != len(shape) or len(shape) < 2:
            continue
        has_only_ones = [1] * len(shape) == list(norm.shape) and 1 not in shape
        has_wrong_size = any(size not in (1, full_size) for size, full_size in zip(norm.shape, shape, strict=True))
        if has_only_ones or (has_wrong_size and last != "original1"):
            sizes = f"has shape {list(norm.shape)}, which does not fit its weight of shape {list(shape)}"
            yield report_tensor(subject, norm, sizes, _HELP)


RULES = (inconsistent_module,)
