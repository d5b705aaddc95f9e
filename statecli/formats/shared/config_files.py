"""The JSON files beside a folder's weights, as settings: what class they are of, how far a training came.

`config.json` and `adapter_config.json` are written by `save_pretrained` of transformers, diffusers and peft,
`trainer_state.json` by transformers' Trainer. What is wrong with one of them is a note.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import UnreadableError
from statecli.core.state import ModelState, Oddity, Scalar, Settings
from statecli.formats.torch.digest import Digests
from statecli.formats.torch.reading import Reading
from statecli.formats.torch.settings import add_file, scalars
from statecli.formats.torch.tensors import Decoder
from statecli.storage import files, json_object
from statecli.storage.checkpoint_names import SETTINGS_FILES
from statecli.storage.source import small

#: What is said first of a folder, under the last part of its name.
TOLD = (
    "adapter_config.r",
    "adapter_config.lora_alpha",
    "adapter_config.target_modules",
    "config.quantization_config.quant_method",
    "trainer_state.global_step",
    "trainer_state.epoch",
    "trainer_state.best_metric",
)
#: Lists that peft makes of sets, in an order that is another each time.
_SETS = frozenset(["target_modules", "modules_to_save", "exclude_modules"])


def beside(path: str, names: Collection[str]) -> list[str]:
    """Those of the files that are in the folder `path`, which holds these names."""
    return [files.join(path, f"{stem}.json") for stem in SETTINGS_FILES if f"{stem}.json" in names]


def noted(path: str, state: ModelState) -> ModelState:
    """The state of the folder `path` with the settings in these files, each below the name of its file."""
    settings = state.metadata
    odd = []
    for stem, longest in SETTINGS_FILES.items():
        where = files.join(path, f"{stem}.json")
        if not files.isfile(where):
            continue
        try:
            settings = add_file(settings, stem, _settings(stem, small(where, longest)))
        except UnreadableError as error:
            why = str(error).removeprefix("it ")
            because = f", for it {why}" if quoting.is_predicate(why) else f": {why}"
            odd.append(Oddity("config-unread", f"{stem}.json: not read{because}"))
    if not settings.beside and not odd:
        return state
    return replace(state, metadata=settings, oddities=(*state.oddities, *odd))


def document(path: str, name: str) -> dict[str, Any]:
    """The object in a JSON file of the folder `path`. Raises UnreadableError; the message begins with the name."""
    try:
        raw = small(files.join(path, name), SETTINGS_FILES["config"])
    except UnreadableError as error:
        raise type(error)(quoting.with_reason(name, error)) from error.__cause__
    found, repeats = json_object.object_of(raw, name)
    json_object.refuse(repeats, name)
    return found


def _settings(stem: str, raw: bytes) -> Settings:
    found, _ = json_object.object_of(raw, "it")
    reading = Reading(Decoder({}), [])
    history = found.pop("log_history", None) if stem == "trainer_state" else None
    settings = scalars({key: _words(key, value) for key, value in found.items()}, reading)
    if type(history) is list:
        told = f"{len(history)} entries, {Digests(reading).of(history, stem)}"
        return replace(settings, values={**settings.values, "log_history": told})
    return settings


def _words(key: str, value: Any) -> Any:
    """A short list of words as one text: `architectures`, `target_modules`."""
    if type(value) is not list or not value or len(value) > 16:
        return value
    if not all(type(one) is str and one.isprintable() and "," not in one for one in value):
        return value
    return ", ".join(sorted(value) if key in _SETS else value)


def notes(settings: Settings) -> Iterator[tuple[str, str]]:
    """What a folder with these settings is, in words, each with a name: an adapter of what model, of what class."""
    values = settings.values
    if "adapter_config" in settings.beside:
        of, how = (values.get(f"adapter_config.{key}") for key in ("base_model_name_or_path", "peft_type"))
        yield "adapter", f"adapter{f' ({how})' if how else ''} of base model{f' {of}' if of else ': not recorded'}"
    if "config" in settings.beside:
        named = values.get("config.architectures") or values.get("config._class_name")
        if named:
            yield "architecture", f"architecture {named}"


def said(settings: Settings) -> dict[str, Scalar]:
    """What is to be said first of a folder with these settings, by short names; what is null is not said."""
    found = {key: settings.values.get(key) for key in TOLD if key.partition(".")[0] in settings.beside}
    return {key.rpartition(".")[2].strip("_"): value for key, value in found.items() if value is not None}
