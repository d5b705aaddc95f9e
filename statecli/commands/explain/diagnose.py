"""Find the reason why a checkpoint does not load into a class, and test the code that loads it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from msgspec.structs import replace

from statecli.commands.explain import special_files
from statecli.commands.explain.align import align_names
from statecli.commands.explain.certainty import Matching, list_undecided_pairs
from statecli.commands.explain.computed_weights import find_computed_weights
from statecli.commands.explain.initial_values import describe_initial_values
from statecli.commands.explain.model_code import build_model_code
from statecli.commands.explain.other_entries import compare_other_entries, is_extra_state, list_other_names
from statecli.commands.explain.proof import LoadResult, load_as_is, try_recipe
from statecli.commands.explain.recipe import MAX_DELETED_NAMES, LeftOut, Loader, Recipe, Rest
from statecli.commands.explain.rename_text import describe_renames
from statecli.commands.explain.renaming import Step, apply_steps, find_steps
from statecli.commands.explain.result import NO_CODE, Cause, CauseEvidence, Diagnosis
from statecli.commands.explain.source import ModelEntries, read_entries
from statecli.commands.explain.wrong_value_risks import list_doubts_about_rest
from statecli.core import quoting
from statecli.core.dtypes import is_floating
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import REGISTERED_KINDS, Kind, ModelState, TensorInfo
from statecli.core.units import plural
from statecli.live.built_model import BuiltModel

#: Smallest fraction of the class's tensors in the checkpoint. With fewer, the checkpoint is of another model.
MIN_SHARE = 0.3
#: Largest number of examples, and of other fitting sections, in a sentence.
MAX_EXAMPLES = 3
_WEIGHT_NORM = compile_on_use(r"parametrizations\.(\w+)\.original([01])$")
_GAINS = ("g", "v")


class LoadSubject(msgspec.Struct, frozen=True):
    """A class and the checkpoint to load into it, with their states, the built module and the checkpoint's entries."""

    model: ModelState
    built_model: BuiltModel
    checkpoint: ModelState
    entries: ModelEntries
    registered: dict[str, TensorInfo]


def build_subject(model: ModelState, built_model: BuiltModel, checkpoint: ModelState) -> LoadSubject | None:
    """Return the class and the checkpoint as a LoadSubject, or None if the checkpoint has no model."""
    rows = (row for row in model.tensors if row.kind in REGISTERED_KINDS and row.is_in_state_dict)
    registered = {row.fqn: row for row in rows}
    entries = read_entries(checkpoint, list(registered))
    return None if entries is None else LoadSubject(model, built_model, checkpoint, entries, registered)


def is_loaded_as_is(subject: LoadSubject) -> bool:
    """Return True if plain code loads the file: torch.load or load_file, then a strict load_state_dict."""
    source = subject.entries.source
    has_plain_source = source is None or (source.loader is not Loader.MODULE and not source.keys and not source.allowed)
    is_plain = has_plain_source and not subject.entries.refused and not _list_codes(subject)
    return is_plain and load_as_is(subject.entries, subject.built_model).is_accepted


def find_untied(subject: LoadSubject, pairs: Mapping[str, str] | None = None) -> tuple[tuple[str, ...], ...]:
    """Return the names that share a tensor in the class, but have separate tensors in the checkpoint.

    `pairs`: the name in the class for each name in the checkpoint, if the names differ.
    """
    stored = {row.fqn if pairs is None else pairs.get(row.fqn): row for row in subject.entries.rows}
    groups: dict[object, list[str]] = {}
    for tensor in subject.model.tensors:
        if tensor.storage is not None and tensor.nbytes and tensor.fqn in stored:
            groups.setdefault((tensor.storage, tensor.storage_offset, tensor.elements), []).append(tensor.fqn)
    return tuple(
        tuple(names)
        for names in groups.values()
        if len({(stored[name].storage, stored[name].storage_offset) for name in names}) > 1
    )


def _list_codes(subject: LoadSubject) -> list[TensorInfo]:
    """Return integer tensors that are floating-point in the class: quantized values whose scale is unknown."""
    return [
        row
        for row in subject.entries.rows
        if (registered_row := subject.registered.get(row.fqn))
        and is_floating(registered_row.dtype)
        and "int" in row.dtype
    ]


def diagnose(subject: LoadSubject) -> Diagnosis:
    """Return the causes, the code that loads the checkpoint, and the result of testing this code."""
    special = special_files.recognize(subject.checkpoint, subject.entries.names, subject.built_model)
    if special is not None:
        return special
    codes = _list_codes(subject)
    if codes:
        message = (
            f"{plural(len(codes), 'tensor')} {'has' if len(codes) == 1 else 'have'} the dtype {codes[0].dtype}, but "
            f"{subject.model.target} registers floating-point tensors: load_state_dict would copy the quantized "
            "values as if they were weights"
        )
        evidence = CauseEvidence(Cause.QUANTIZED, message, len(codes), codes[0].fqn)
        return Diagnosis((evidence,), proof=f"{NO_CODE}: the scales of the quantized values are not known")
    matching = _match(subject)
    matched_count = len(matching.pairs) + len(matching.mismatched) + len(matching.ties)
    if matched_count < MIN_SHARE * len(subject.registered) or not matched_count:
        return _diagnose_other_model(subject, matched_count)
    return _explain_computed_weights(subject, matching) or _build_diagnosis(subject, matching)


def _explain_computed_weights(subject: LoadSubject, matching: Matching) -> Diagnosis | None:
    """Return a diagnosis if only the file or only the class has the inputs of computed weights."""
    pairs = matching.pairs | matching.mismatched
    computed_weights = find_computed_weights(pairs, set(subject.entries.names), subject.registered)
    target = subject.model.target
    for weights, holder, other_side in (
        (computed_weights.in_file, "the file", target),
        (computed_weights.in_class, target, "the file"),
    ):
        if weights:
            names = [weight.name for weight in weights]
            functions = ", ".join(dict.fromkeys(weight.function for weight in weights))
            message = (
                f"{holder} stores the tensors from which {functions} computes {plural(len(names), 'weight')}, but "
                f"{other_side} stores the computed weights: {_list_modules(names)}"
            )
            advice = (
                f"apply {functions} to the modules of {target}, then load the file"
                if weights is computed_weights.in_file
                else f"load the file first, then apply {functions} to the modules"
            )
            evidence = CauseEvidence(Cause.WEIGHT_NORM, message, len(names), f"{weights[0].part}: {weights[0].name}")
            return Diagnosis((evidence,), proof=f"{NO_CODE}; {advice}")
    return None


def _match(subject: LoadSubject) -> Matching:
    names = [name for name in subject.entries.names if not is_extra_state(name)]
    stored_names = {_join_weight_norm(name): name for name in names}
    registered_names = {_join_weight_norm(name): name for name in subject.registered}
    if len(stored_names) < len(names) or len(registered_names) < len(subject.registered):
        stored_names, registered_names = (
            {name: name for name in names},
            {name: name for name in subject.registered},
        )
    rows = {row.fqn: row for row in subject.entries.rows}
    alignment = align_names(
        {name: rows[full_name].shape for name, full_name in stored_names.items()},
        {name: subject.registered[full_name].shape for name, full_name in registered_names.items()},
        has_order=subject.checkpoint.traits.keeps_order,
    )
    partners = {stored_names[name]: registered_names[registered] for name, registered in alignment.names.items()}
    pairs, transposed, mismatched = dict[str, str](), dict[str, str](), dict[str, str]()
    for name, registered in partners.items():
        row, target = rows[name], subject.registered[registered]
        if _is_transposed(row, target):
            transposed[name] = registered
        is_fitting = name in transposed or _has_shape(row, target)
        (pairs if is_fitting else mismatched)[name] = registered
    filled = set(pairs.values())
    shapes = {name: row.shape for name, row in subject.registered.items()}
    own_shapes = {name: row.shape for name, row in rows.items()}
    own_shapes |= {name: shapes[registered] for name, registered in transposed.items()}
    missing = [registered_names[name] for name in alignment.missing]
    ties = [
        (name, tied_name)
        for name in missing
        if (tied_name := next((t for t in subject.registered[name].tied_to if t in filled), None)) is not None
    ]
    tied_names = {name for name, _ in ties}
    return Matching(
        pairs,
        transposed,
        mismatched,
        tuple(stored_names[name] for name in alignment.unexpected),
        tuple(name for name in missing if name not in tied_names),
        tuple(ties),
        own_shapes,
        shapes,
    )


def _join_weight_norm(name: str) -> str:
    """Replace the new names of weight_norm by the old names: `…parametrizations.weight.original0` by `…weight_g`."""
    return _WEIGHT_NORM.sub(lambda match: f"{match[1]}_{_GAINS[int(match[2])]}", name)


def _is_transposed(row: TensorInfo, registered: TensorInfo) -> bool:
    shape = row.shape or ()
    return registered.kind is Kind.PARAMETER and len(shape) == 2 and shape != shape[::-1] == registered.shape


def _has_shape(row: TensorInfo, registered: TensorInfo) -> bool:
    return None in (row.shape, registered.shape) or row.shape == registered.shape


# --- the lines -------------------------------------------------------------------------------------------------------


def _build_diagnosis(subject: LoadSubject, matching: Matching) -> Diagnosis:
    pairs = matching.pairs | matching.mismatched
    names = {name: _choose_new_name(name, registered) for name, registered in pairs.items()}
    steps = find_steps(names, (*matching.unexpected, *list_other_names(subject.entries)))
    in_order: tuple[str, ...] = ()
    other_entries = compare_other_entries(subject.entries, steps or (), subject.built_model)
    causes = (*_list_causes(subject, matching, steps), *other_entries.list_causes(subject.model.target))
    if steps is None:
        causes = (_describe_other_names(names), *causes)
        if not _is_in_order(subject, matching):
            return Diagnosis(causes, proof=NO_CODE)
        steps, in_order = (), tuple(subject.registered)
    initial = (*matching.mismatched.values(), *matching.missing)
    unused = (*matching.mismatched, *matching.unexpected, *other_entries.unused)
    if 2 * len(initial) > len(subject.registered):
        reason = f"{len(initial)} of {len(subject.registered)} tensors would keep their initial values"
        return Diagnosis(causes, maps=_list_maps(steps), proof=f"{NO_CODE}: {reason}")
    source = subject.entries.source
    if source is None:
        reason = "statecli cannot write code that reads this format"
        return Diagnosis(causes, maps=_list_maps(steps), proof=f"{NO_CODE}: {reason}")
    model_code = build_model_code(subject.built_model.spec, subject.built_model.loaded)
    initial += other_entries.missing
    recipe = Recipe(
        source,
        model_code,
        steps,
        in_order,
        _leave_out(subject, matching, steps, unused),
        matching.ties,
        initial,
        tuple(names[name] for name in matching.transposed),
    )
    result = try_recipe(recipe, subject.entries, subject.built_model)
    diagnosis = Diagnosis(causes, recipe.format_code(), _list_maps(steps), not initial, initial, unused)
    diagnosis = replace(diagnosis, warnings=tuple(other_entries.list_warnings()))
    return _judge(diagnosis, subject, matching, result, model_code.doubt)


def _leave_out(subject: LoadSubject, matching: Matching, steps: Sequence[Step], unused: Sequence[str]) -> LeftOut:
    """Describe how to leave out the unused entries: by comparison with the class if that gives exactly these entries.

    A comparison of names cannot keep an old name of weight_norm, which the class does not have.
    """
    dropped_names = tuple(apply_steps(steps, name) for name in unused)
    unknown_names = dropped_names[len(matching.mismatched) :]
    is_comparable = all(_choose_new_name(*pair) == pair[1] for pair in matching.pairs.items())
    if len(dropped_names) <= MAX_DELETED_NAMES or not is_comparable or set(unknown_names) & set(subject.registered):
        return LeftOut(dropped_names)
    return LeftOut(dropped_names, Rest.OF_OTHER_SHAPE if matching.mismatched else Rest.UNKNOWN)


def _describe_other_names(names: Mapping[str, str]) -> CauseEvidence:
    examples = [f"{name} → {new}" for name, new in names.items() if name != new]
    message = (
        f"{plural(len(examples), 'name')} differ{'s' * (len(examples) == 1)}, and statecli found no short rules that "
        "turn the names of the file into the names of the class"
    )
    return CauseEvidence(Cause.OTHER_NAMES, message, len(examples), examples[0])


def _choose_new_name(name: str, registered: str) -> str:
    """Return the name under which to load the entry. Old names of weight_norm stay, because torch converts them."""
    return registered if _WEIGHT_NORM.search(name) else _join_weight_norm(registered)


def _is_in_order(subject: LoadSubject, matching: Matching) -> bool:
    is_complete = len(matching.pairs) == len(subject.entries.rows) and not list_other_names(subject.entries)
    return is_complete and list(matching.pairs.values()) == list(subject.registered)


def _list_maps(steps: Sequence[Step]) -> tuple[str, ...]:
    return tuple(rule for step in steps for rule in step.rules)


def _judge(
    diagnosis: Diagnosis, subject: LoadSubject, matching: Matching, result: LoadResult, doubt_about_model: str
) -> Diagnosis:
    if result.error:
        return replace(diagnosis, proof=f"the load on the meta device failed: {result.error}")
    if not result.is_accepted:
        return replace(diagnosis, proof=_describe_objections(result))
    initial = [row for name in diagnosis.initial if (row := subject.registered.get(name))]
    elements = sum(row.elements for row in subject.registered.values())
    warnings = describe_initial_values(initial, subject.built_model, elements)
    diagnosis = replace(diagnosis, loads=True, warnings=(*warnings, *diagnosis.warnings))
    doubts = [*filter(None, [doubt_about_model]), *_list_doubts(subject, matching)]
    if doubts:
        return replace(diagnosis, proof=f"a load with this code succeeds on the meta device, but {'; '.join(doubts)}")
    is_renamed = any(name != registered for name, registered in matching.pairs.items())
    strict = (
        "a strict load with this code succeeds on the meta device"
        if diagnosis.strict
        else "a load with this code succeeds on the meta device, and only the keys with initial values are missing"
    )
    unique = (
        "; by shape and by the words in the name, each tensor fits only one tensor of the class" if is_renamed else ""
    )
    return replace(diagnosis, proved=True, proof=strict + unique)


def _list_doubts(subject: LoadSubject, matching: Matching) -> Iterable[str]:
    """Yield the reasons why the printed code may load wrong values although the shapes match."""
    tied_names = (name for name, _ in matching.ties)
    undecided = list_undecided_pairs(replace(matching, missing=(*matching.missing, *tied_names)))
    if undecided:
        pair = undecided[0]
        rivals = quoting.names(list(dict.fromkeys(pair.rivals)))
        yield (
            f"statecli guessed {plural(len(undecided), 'pair')} of names: {pair.name} is loaded as {pair.registered}, "
            f"but {rivals} {'has' if len(set(pair.rivals)) == 1 else 'have'} the same shape"
        )
    yield from list_doubts_about_rest(matching)
    for tied_group in find_untied(subject, matching.pairs)[:1]:
        yield (
            f"{quoting.names(tied_group)} share a tensor in the class, and have separate tensors in the file: the "
            "model keeps only the last of these tensors"
        )
    if subject.entries.rivals:
        yield (
            f"{quoting.names(subject.entries.rivals)} of {subject.checkpoint.target} could be loaded instead of "
            f"{quoting.name(subject.entries.section)}"
        )
    source = subject.entries.source
    refused_names = [name for name in subject.entries.refused if name not in source.allowed] if source else []
    if subject.entries.state_dict.is_module:
        yield "statecli does not run the code in the file"
    elif refused_names:
        names = quoting.names(refused_names)
        yield f"torch.load(weights_only=True) refuses {names} in the file; scan the file with statecli audit"


def _describe_objections(result: LoadResult) -> str:
    answer = result.answer
    parts = [
        f"{label}: {quoting.names(names)}"
        for label, names in (
            ("missing", answer.missing),
            ("unexpected", answer.unexpected),
            ("of another shape", answer.mismatched),
            ("refused", [message for _, message in answer.refused]),
        )
        if names
    ]
    return f"a load on the meta device still fails: {'; '.join(parts)}"


# --- the causes ------------------------------------------------------------------------------------------------------


def _list_causes(subject: LoadSubject, matching: Matching, steps: Sequence[Step] | None) -> tuple[CauseEvidence, ...]:
    names = list(matching.pairs | matching.mismatched)
    return (
        *special_files.list_file_causes(subject.checkpoint, subject.entries),
        *describe_renames(names, steps or (), subject.model.target),
        *_list_ties(matching),
        *_list_shapes(subject, matching),
        *_list_parts(subject, matching),
    )


def _list_ties(matching: Matching) -> Iterable[CauseEvidence]:
    if matching.ties:
        name, tied_name = matching.ties[0]
        message = (
            f"{plural(len(matching.ties), 'name')} of tied weights left out: {name} shares the storage of {tied_name}"
        )
        yield CauseEvidence(Cause.TIED, message, len(matching.ties), f"{name} = {tied_name}")


def _list_shapes(subject: LoadSubject, matching: Matching) -> Iterable[CauseEvidence]:
    rows = {row.fqn: row for row in subject.entries.rows}
    transposed, mismatched = matching.transposed, matching.mismatched
    for cause, pairs, description in (
        (Cause.TRANSPOSED, transposed, plural(len(transposed), "transposed weight")),
        (Cause.WIDTH, mismatched, f"{plural(len(mismatched), 'tensor')} of another shape"),
    ):
        if pairs:
            stored_name, name = next(iter(pairs.items()))
            shapes = f"{list(rows[stored_name].shape or ())} → {list(subject.registered[name].shape or ())}"
            yield CauseEvidence(cause, f"{description}, such as {name}", len(pairs), f"{name}: {shapes}")


def _list_parts(subject: LoadSubject, matching: Matching) -> Iterable[CauseEvidence]:
    target = subject.model.target
    if names := matching.missing:
        message = f"the file lacks {plural(len(names), 'tensor')} of {target}: {_list_modules(names)}"
        yield CauseEvidence(Cause.OTHER_PART, message, len(names), names[0])
    if names := matching.unexpected:
        message = f"the file has {plural(len(names), 'tensor')} that {target} does not have: {_list_modules(names)}"
        yield CauseEvidence(Cause.OTHER_PART, message, len(names), names[0])


def _list_modules(names: Sequence[str]) -> str:
    if len(names) <= MAX_EXAMPLES:
        return ", ".join(names)
    modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
    remainder_text = f" and {len(modules) - MAX_EXAMPLES} more modules" if len(modules) > MAX_EXAMPLES else ""
    return f"{', '.join(modules[:MAX_EXAMPLES])}{remainder_text}"


def _diagnose_other_model(subject: LoadSubject, matched_count: int) -> Diagnosis:
    total = len(subject.registered)
    message = (
        f"only {matched_count} of the {plural(total, 'tensor')} of {subject.model.target} match a tensor of "
        f"{subject.checkpoint.target} ({plural(len(subject.entries.rows), 'tensor')}): the checkpoint is probably of "
        "another model"
    )
    example = f"{subject.entries.names[0]}, {next(iter(subject.registered), 'no tensor')}"
    return Diagnosis((CauseEvidence(Cause.OTHER_MODEL, message, matched_count, example),), proof=NO_CODE)
