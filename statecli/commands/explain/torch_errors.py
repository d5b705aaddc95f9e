"""Explain the error text of `load_state_dict`, `torch.load` or safetensors. The resulting code is not tested."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import msgspec

from statecli.commands.explain import special_files
from statecli.commands.explain.align import align_names
from statecli.commands.explain.name_words import split_meaningful_words
from statecli.commands.explain.recipe import MAX_DELETED_NAMES, LeftOut, Loader, Recipe, Rest, StateDictSource
from statecli.commands.explain.rename_text import describe_renames
from statecli.commands.explain.renaming import apply_steps, find_steps
from statecli.commands.explain.result import NO_CODE, Cause, CauseEvidence, Diagnosis, Explanation
from statecli.commands.explain.source import PLAIN_CLASSES
from statecli.core import quoting
from statecli.core.errors import UnreadableError
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.units import plural

#: Largest number of characters read from standard input.
MAX_CHARACTERS = 16 << 20
NOT_PROVED = "not tested; to test the code, run: statecli explain CLASS CHECKPOINT"
_MISSING = compile_on_use(r'Missing key\(s\) in state_dict: ((?:"[^"\n]*"(?:, )?)+)')
_UNEXPECTED = compile_on_use(r'Unexpected key\(s\) in state_dict: ((?:"[^"\n]*"(?:, )?)+)')
_MISMATCH = compile_on_use(
    r"size mismatch for (\S+): copying a param with shape (?:torch\.Size\()?\[([\d, ]*)\]\)? from checkpoint, "
    r"the shape in current model is (?:torch\.Size\()?\[([\d, ]*)\]"
)
_FILLED_SUFFIX = ".num_batches_tracked"
_CLASS = compile_on_use(r"Error\(s\) in loading state_dict for (\w+):")
_FILE = compile_on_use(r"(?:torch\.load|load_file)\(\s*[rf]?([\"'])([^\"'\n{}]+)\1")
#: Keys of the state_dict and of other values in files of training scripts.
_STATE_KEYS = (
    "state_dict",
    "model_state_dict",
    "model",
    "module",
    "net",
    "network",
    "params_ema",
    "params",
    "model_ema",
    "ema",
)


def explain_text(text: str) -> Explanation:
    """Return the cause that the error text shows. Raises UnreadableError if the text has no known error."""
    for find_cause in (_read_keys, _read_refused_names, _read_file_errors):
        diagnosis = find_cause(text)
        if diagnosis is not None:
            return Explanation(diagnosis=diagnosis)
    raise UnreadableError(
        "standard input: contains no known error of load_state_dict, torch.load or safetensors; pipe the "
        "whole error text, or give a class and a checkpoint"
    )


def _read_keys(text: str) -> Diagnosis | None:
    missing = [name for match in _MISSING.finditer(text) for name in _split_names(match[1])]
    unexpected = [name for match in _UNEXPECTED.finditer(text) for name in _split_names(match[1])]
    mismatched = {m[1]: (_read_shape(m[2]), _read_shape(m[3])) for m in _MISMATCH.finditer(text)}
    if not (missing or unexpected or mismatched):
        return None
    missing, unexpected = list(dict.fromkeys(missing)), list(dict.fromkeys(unexpected))
    model = match[1] if (match := _CLASS.search(text)) else "model"
    nested = _find_nested_key(missing, unexpected)
    if nested is not None:
        others = f", next to {plural(len(unexpected) - 1, 'other key')}" if len(unexpected) > 1 else ""
        message = f"the loaded object has the state_dict under the key {nested!r}{others}"
        evidence = CauseEvidence(Cause.NESTED, message, len(unexpected), f"torch.load(…)[{nested!r}]")
        return _build((evidence,), Recipe(_find_source(text, (nested,))))
    if _are_keys_of_script(missing, unexpected):
        message = (
            "the unexpected keys do not look like names of tensors, and the state_dict may be under one of these "
            f"keys: {quoting.names(unexpected)}"
        )
        evidence = CauseEvidence(Cause.NESTED, message, len(unexpected), unexpected[0])
        return Diagnosis((evidence,), proof=f"{NO_CODE}; {_FIND_STATE}")
    return _recognize_names(model, missing, unexpected) or _explain_names(text, model, missing, unexpected, mismatched)


def _recognize_names(model: str, missing: Sequence[str], unexpected: Sequence[str]) -> Diagnosis | None:
    """Return the diagnosis if the names show quantized weights or an adapter, which renaming cannot load."""
    quantized = special_files.find_quantized_names(unexpected)
    if quantized is not None:
        evidence = CauseEvidence(Cause.QUANTIZED, quantized.describe(), len(quantized.names), quantized.names[0])
        return Diagnosis((evidence,), proof=f"{NO_CODE}; build the class with the layers of {quantized.library}")
    quantized = special_files.find_quantized_names(missing)
    if quantized is not None:
        message = (
            f"{model} has quantized layers ({quantized.library}), but the weights of the checkpoint are not quantized "
            "in this way"
        )
        evidence = CauseEvidence(Cause.QUANTIZED, message, len(quantized.names), quantized.names[0])
        return Diagnosis((evidence,), proof=f"{NO_CODE}; load the file into {model} without quantized layers")
    adapter = special_files.list_adapter_names(unexpected)
    if adapter:
        message = f"the checkpoint has a LoRA adapter: {plural(len(adapter), 'tensor')} such as {adapter[0]}"
        evidence = CauseEvidence(Cause.ADAPTER, message, len(adapter), adapter[0])
        return Diagnosis((evidence,), proof=f"{NO_CODE}; load the adapter with PEFT (PeftModel.from_pretrained)")
    return None


def _split_names(names_text: str) -> list[str]:
    return re.findall(r'"([^"\n]*)"', names_text)


def _read_shape(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number.strip())


def _find_nested_key(missing: Sequence[str], unexpected: Sequence[str]) -> str | None:
    """Return the key of the state_dict if the unexpected keys look like keys of a training checkpoint."""
    if not missing or any("." in name for name in unexpected):
        return None
    return next((key for key in _STATE_KEYS if key in unexpected), None)


def _are_keys_of_script(missing: Sequence[str], unexpected: Sequence[str]) -> bool:
    """Return True if the unexpected keys look like variables of a script, not like names of tensors.

    All missing names have dots. No unexpected key has a dot, or a word of a missing name.
    """
    if not (missing and unexpected and all("." in name for name in missing)):
        return False
    words = split_meaningful_words(".".join(missing))
    return not any("." in name or words & split_meaningful_words(name) for name in unexpected)


def _explain_names(
    text: str,
    model: str,
    missing: Sequence[str],
    unexpected: Sequence[str],
    mismatched: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]],
) -> Diagnosis:
    alignment = align_names(dict.fromkeys(unexpected), dict.fromkeys(missing), has_order=True)
    steps = find_steps(alignment.names, alignment.unexpected)
    causes = list(describe_renames(list(alignment.names), steps or (), model))
    if mismatched:
        name, (stored_shape, registered_shape) = next(iter(mismatched.items()))
        shapes = f"{list(stored_shape)} in the checkpoint, {list(registered_shape)} in {model}"
        message = f"{plural(len(mismatched), 'tensor')} of another shape, such as {name}: {shapes}"
        causes.append(
            CauseEvidence(
                Cause.WIDTH, message, len(mismatched), f"{name}: {list(stored_shape)} → {list(registered_shape)}"
            )
        )
    missing_names = missing if steps is None else alignment.missing
    # torch does not report missing counters of batch norm, because the layer fills them in.
    extra_names = (
        unexpected
        if steps is None
        else [
            name
            for name in alignment.unexpected
            if not name.endswith(_FILLED_SUFFIX) or apply_steps(steps, name) == name
        ]
    )
    for names, description in (
        (missing_names, f"the checkpoint lacks {plural(len(missing_names), 'tensor')} of {model}"),
        (extra_names, f"the checkpoint has {plural(len(extra_names), 'tensor')} that {model} does not have"),
    ):
        if names:
            message = f"{description}: {quoting.names(names)}"
            causes.append(CauseEvidence(Cause.OTHER_PART, message, len(names), names[0]))
    steps = steps or ()
    dropped_names = [apply_steps(steps, name) for name in (*mismatched, *extra_names)]
    # The text does not list the fitting names, so a prefix may also be the prefix of a fitting name.
    rest = Rest.OF_OTHER_SHAPE if mismatched else Rest.UNKNOWN
    left_out = LeftOut(names=tuple(dropped_names), rest=rest if len(dropped_names) > MAX_DELETED_NAMES else None)
    initial = (*mismatched, *missing_names)
    return _build(tuple(causes), Recipe(_find_source(text), None, steps, (), left_out, (), initial))


def _find_source(text: str, keys: tuple[str | int, ...] = ()) -> StateDictSource:
    match = _FILE.search(text)
    path = match[2] if match else "checkpoint.pt"
    return StateDictSource((path,), Loader.SAFETENSORS if path.endswith(".safetensors") else Loader.TORCH, keys)


def _build(causes: tuple[CauseEvidence, ...], recipe: Recipe) -> Diagnosis:
    return Diagnosis(
        causes,
        recipe.format_code(),
        tuple(rule for step in recipe.steps for rule in step.rules),
        not recipe.initial,
        recipe.initial,
        recipe.left_out.names,
        proof=NOT_PROVED,
    )


# --- errors of torch.load and safetensors ----------------------------------------------------------------------------

_REFUSED = compile_on_use(
    r"(?:Unsupported global: GLOBAL|Unsupported class|Trying to load unsupported GLOBAL|GLOBAL) ([\w.]+)"
)


def _read_refused_names(text: str) -> Diagnosis | None:
    names = list(dict.fromkeys(_REFUSED.findall(text))) if "eights only" in text or "weights_only" in text else []
    if not names:
        return None
    message = f"torch.load(weights_only=True) refuses {quoting.names(names)} in the file"
    evidence = CauseEvidence(Cause.UNSAFE_FILE, message, len(names), names[0])
    if not set(names) <= PLAIN_CLASSES:
        advice = "scan the file with statecli audit before you allow these names or use weights_only=False"
        return Diagnosis((evidence,), proof=f"no safe code; {advice}")
    source = _find_source(text)
    return _build((evidence,), Recipe(StateDictSource(source.files, source.loader, (), "", tuple(names))))


_FIND_STATE = "print the loaded object, and pass the state_dict in it to load_state_dict"
_AGAIN = "download or copy the file again, and compare the size with the size at the source"


class _FileError(msgspec.Struct, frozen=True):
    """An error message about a file: the pattern of its text, the cause, and the remedy."""

    pattern: str
    cause: Cause
    message: str
    advice: str = _AGAIN


_FILE_ERRORS = (
    _FileError(
        "invalid load key, 'v'|Unsupported operand 118",
        Cause.GIT_LFS,
        "the file is probably a git-lfs pointer: its first byte is v, as in 'version https://git-lfs'",
        "run: git lfs pull",
    ),
    _FileError(
        "invalid load key, '<'|Unsupported operand 60",
        Cause.NOT_A_CHECKPOINT,
        "the file is probably a web page",
    ),
    _FileError(
        "invalid load key", Cause.NOT_A_CHECKPOINT, "the file is not a pickle: it has another format or is damaged"
    ),
    _FileError(
        "failed finding central directory|failed reading zip archive|not a ZIP archive|BadZipFile",
        Cause.TRUNCATED,
        "the file ends before the central directory of the zip archive: a download or write was interrupted",
    ),
    _FileError(
        "unexpected EOF|Ran out of input|MetadataIncompleteBuffer|(?i:Header ?Too ?Small)|(?i:incomplete metadata)",
        Cause.TRUNCATED,
        "the file ends before the end of the data: a download or write was interrupted",
    ),
    _FileError(
        "(?i)Header ?Too ?Large|Invalid ?Header|invalid UTF-8 in header",
        Cause.NOT_A_CHECKPOINT,
        "the header is not a safetensors header; the file may be a git-lfs pointer or a web page",
    ),
    _FileError(
        r"Expected state_dict to be dict-like, got <class '\w+\.[\w.]+'>",
        Cause.WHOLE_MODULE,
        "the file is a pickled module, not a state_dict",
    ),
    _FileError(
        r"Expected state_dict to be dict-like, got <class '\w+'>",
        Cause.NESTED,
        "the loaded object is not a state_dict, and may contain a state_dict",
        _FIND_STATE,
    ),
)


def _read_file_errors(text: str) -> Diagnosis | None:
    for error in _FILE_ERRORS:
        match = re.search(error.pattern, text)
        if match is None:
            continue
        evidence = CauseEvidence(error.cause, error.message, 0, match[0])
        if error.cause is Cause.WHOLE_MODULE:
            source = StateDictSource(_find_source(text).files, Loader.MODULE)
            return _build((evidence,), Recipe(source))
        return Diagnosis((evidence,), proof=f"{NO_CODE}; {error.advice}")
    return None
