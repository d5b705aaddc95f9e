"""Recognise files that renaming cannot load, such as adapters, and causes that the file alone shows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence

import msgspec

from statecli.commands.explain.model_code import build_model_code
from statecli.commands.explain.recipe import Loader
from statecli.commands.explain.result import NO_CODE, Cause, CauseEvidence, Diagnosis
from statecli.commands.explain.source import ModelEntries
from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import REGISTERED_KINDS, Kind, ModelState
from statecli.core.units import plural
from statecli.live.built_model import BuiltModel
from statecli.storage.checkpoint_folder import CONFIG
from statecli.targets.section_of_target import split_section

NOT_RUN = "not tested: statecli does not run {}"
#: Dtypes of blocks of codes with a common scale, for example in GGUF.
_BLOCK_DTYPE = compile_on_use(r"i?q\d|tq\d|mxfp|nvfp", re.IGNORECASE)
_ADAPTER = compile_on_use(
    r"(?:^|\.)(?:lora_(?:A|B|down|up|embedding_A|embedding_B|magnitude_vector)|hada_w\d_[ab]|ia3_l)(?:\.|$)"
)
#: Libraries by the last components of names that only their quantised weights have.
_QUANTIZED = {
    re.compile(r"\.(?:qweight|qzeros|g_idx)$"): "GPTQ or AWQ",
    re.compile(
        r"\.(?:absmax|quant_map|nested_absmax|nested_quant_map|SCB|weight_format)$|\.quant_state\."
    ): "bitsandbytes",
    re.compile(r"\.(?:weight_packed|weight_scale|weight_scale_inv|weight_zero_point)$"): "compressed-tensors or FP8",
    re.compile(r"\._packed_params(?:\.|$)"): "torch.ao.quantization",
}


def recognize(state: ModelState, names: Sequence[str], built_model: BuiltModel) -> Diagnosis | None:
    """Return the diagnosis of an adapter or of quantised weights, or None for other files."""
    adapter = list_adapter_names(names)
    if adapter:
        return _diagnose_adapter(state, names, adapter, built_model)
    quantized = find_quantized_names(names)
    if quantized is not None:
        return _diagnose_quantized(state, quantized.names, quantized.library)
    codes = [tensor for tensor in state.tensors if tensor.layout == "quantized" or _BLOCK_DTYPE.match(tensor.dtype)]
    if codes:
        return _diagnose_quantized(state, [tensor.fqn for tensor in codes], codes[0].dtype)
    return None


class QuantizedNames(msgspec.Struct, frozen=True):
    """Names that only quantised weights have, and the library that writes these names."""

    names: list[str]
    library: str

    def describe(self) -> str:
        """Return the cause as text."""
        some = f"{plural(len(self.names), 'tensor')} such as {quoting.name(self.names[0])}"
        return f"the weights are quantized ({self.library}): {some}"


def find_quantized_names(names: Iterable[str]) -> QuantizedNames | None:
    """Return the names that only quantised weights have, or None if the file has no such names."""
    names = list(names)
    for pattern, library in _QUANTIZED.items():
        quantized = [name for name in names if pattern.search(name)]
        if quantized:
            return QuantizedNames(quantized, library)
    return None


def list_adapter_names(names: Iterable[str]) -> list[str]:
    """Return the names that only an adapter has."""
    return [name for name in names if _ADAPTER.search(name)]


def _diagnose_adapter(
    state: ModelState, names: Sequence[str], adapter: Sequence[str], built_model: BuiltModel
) -> Diagnosis:
    is_only_adapter = len(adapter) == len(names)
    description = f"the file has a LoRA adapter {'without' if is_only_adapter else 'and'} the base model"
    message = f"{description}: {plural(len(adapter), 'tensor')} of {len(names)}"
    evidence = CauseEvidence(Cause.ADAPTER, message, len(adapter), adapter[0])
    folder = _find_folder(state, "adapter_config.json")
    if folder is None or not is_only_adapter:
        reason = (
            ": the folder has no adapter_config.json"
            if is_only_adapter
            else "; merge the adapter with PEFT (merge_and_unload) and save the model again"
        )
        return Diagnosis((evidence,), proof=f"{NO_CODE}{reason}")
    model = build_model_code(built_model.spec, built_model.loaded)
    code = (
        "from peft import PeftModel",
        *model.imports,
        *model.lines,
        f"model = {model.expression}  # with the weights of the base model",
        f"model = PeftModel.from_pretrained(model, {folder!r})",
    )
    return Diagnosis((evidence,), code, proof=NOT_RUN.format("PEFT"))


def _diagnose_quantized(state: ModelState, names: Sequence[str], library: str) -> Diagnosis:
    message = QuantizedNames(list(names), library).describe()
    evidence = CauseEvidence(Cause.QUANTIZED, message, len(names), names[0])
    folder = _find_folder(state, CONFIG)
    if folder is None:
        return Diagnosis((evidence,), proof=f"{NO_CODE}; build the class with the layers of {library}")
    code = (
        "from transformers import AutoModelForCausalLM",
        f"model = AutoModelForCausalLM.from_pretrained({folder!r})  # needs the quantization library",
    )
    return Diagnosis((evidence,), code, proof=NOT_RUN.format("quantized layers"))


def _find_folder(state: ModelState, file: str) -> str | None:
    path = split_section(state.target)[0]
    folder = path if os.path.isdir(path) else os.path.dirname(path) or "."
    return folder if os.path.isfile(os.path.join(folder, file)) else None


def diagnose_without_model(state: ModelState) -> Diagnosis:
    """Return the diagnosis of a checkpoint that has no tensors of a model."""
    kinds = sorted({tensor.kind.value for tensor in state.tensors if tensor.kind is not Kind.OTHER}) or ["other"]
    contents = "no tensors"
    if any(tensor.kind in REGISTERED_KINDS for tensor in state.tensors):
        contents = f"tensors without names, not a state_dict: {state.tensors[0].fqn}"
    elif state.tensors:
        contents = f"no tensors of a model, only tensors of these kinds: {', '.join(kinds)}"
    message = f"{state.target} contains {contents}"
    evidence = CauseEvidence(
        Cause.OPTIMIZER, message, len(state.tensors), state.tensors[0].fqn if state.tensors else ""
    )
    return Diagnosis((evidence,), proof=f"{NO_CODE}; give the file that contains the model")


def list_file_causes(state: ModelState, entries: ModelEntries) -> Iterable[CauseEvidence]:
    """Yield the causes that the file alone shows, such as a nested state_dict, averaged weights or a pickled module."""
    source = entries.source
    if source is not None and source.loader is Loader.MODULE:
        yield CauseEvidence(
            Cause.WHOLE_MODULE, f"{state.target} is a pickled module, not a state_dict", len(entries.rows)
        )
    elif entries.state_dict.keys:
        keys = "".join(f"[{key!r}]" for key in entries.state_dict.keys)
        message = f"{state.target} has the state_dict under the key {keys}"
        example = keys if state.traits.is_loaded_by_dcp else f"torch.load(…){keys}"
        yield CauseEvidence(Cause.NESTED, message, len(entries.rows), example)
    if entries.is_average:
        message = f"the weights in {entries.section} are an average (EMA)"
        yield CauseEvidence(Cause.AVERAGED, message, len(entries.rows), entries.section)
    elif "n_averaged" in entries.names:
        yield CauseEvidence(
            Cause.AVERAGED, "the weights are an average (AveragedModel)", len(entries.rows), "n_averaged"
        )
    if entries.refused and not entries.state_dict.is_module:
        message = f"torch.load(weights_only=True) refuses {quoting.names(entries.refused)} in {state.target}"
        yield CauseEvidence(Cause.UNSAFE_FILE, message, 0, entries.refused[0])
