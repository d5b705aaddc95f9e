"""Read settings from JSON files of a checkpoint folder, such as the model's class and the training progress.

`config.json` and `adapter_config.json` are written by `save_pretrained` of transformers, diffusers and peft,
`trainer_state.json` by transformers' Trainer. A malformed file is reported as a note.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from statecli.core import quoting
from statecli.core.errors import UnreadableError
from statecli.core.model_state import ModelState, Oddity, Settings
from statecli.core.setting_paths import add_file
from statecli.core.units import format_number
from statecli.formats.torch.reading import Reading
from statecli.formats.torch.settings import collect_settings
from statecli.formats.torch.settings_digest import Digests
from statecli.formats.torch.tensor_decoder import TensorDecoder
from statecli.storage import files, json_object
from statecli.storage.byte_source import add_subject_to_errors, read_small_file
from statecli.storage.checkpoint_names import SETTINGS_FILES

#: Names of lists that peft makes from sets, so their order differs in each save.
_SET_NAMES = frozenset(["target_modules", "modules_to_save", "exclude_modules"])


def list_config_files(path: str, names: Collection[str]) -> list[str]:
    """List the config files in the folder `path`, given its file names."""
    return [files.join(path, f"{stem}.json") for stem in SETTINGS_FILES if f"{stem}.json" in names]


def add_config_files(path: str, state: ModelState) -> ModelState:
    """Add the settings in the config files of the folder `path` to the state. Prefix each with its file name."""
    settings = state.metadata
    oddities = []
    for stem, longest in SETTINGS_FILES.items():
        file_path = files.join(path, f"{stem}.json")
        if not files.is_file(file_path):
            continue
        try:
            settings = add_file(settings, stem, _parse_settings(stem, read_small_file(file_path, longest)))
        except UnreadableError as error:
            why = str(error).removeprefix("it ")
            because = f", because it {why}" if quoting.starts_with_verb(why) else f": {why}"
            oddities.append(Oddity("config-unread", f"{stem}.json was not read{because}"))
    if not settings.companion_names and not oddities:
        return state
    return replace(state, metadata=settings, oddities=(*state.oddities, *oddities))


def read_document(path: str, name: str) -> dict[str, Any]:
    """Return the object in the JSON file `name` of a folder. The message of an UnreadableError begins with `name`."""
    with add_subject_to_errors(name):
        raw = read_small_file(files.join(path, name), SETTINGS_FILES["config"])
    return json_object.parse_unique_object(raw, name)


def _parse_settings(stem: str, raw: bytes) -> Settings:
    entries = json_object.parse_object(raw, "it").document
    reading = Reading(TensorDecoder({}), [])
    history = entries.pop("log_history", None) if stem == "trainer_state" else None
    settings = collect_settings({key: _join_words(key, value) for key, value in entries.items()}, reading)
    if type(history) is list:
        summary = f"{len(history)} entries, {_describe_loss(history)}{Digests(reading).of(history, stem)}"
        return replace(settings, values={**settings.values, "log_history": summary})
    return settings


def _describe_loss(history: Sequence[object]) -> str:
    """Return the newest loss of a training log, as in `loss 1.8, `, or "" without a loss."""
    losses = (entry.get("loss") for entry in reversed(history) if isinstance(entry, Mapping))
    loss = next((loss for loss in losses if type(loss) in (int, float)), None)
    return "" if loss is None else f"loss {format_number(float(loss), 4)}, "


def _join_words(key: str, value: object) -> Any:
    """Return a list of up to 16 words, such as `architectures`, as one text. Return other values unchanged."""
    if type(value) is not list or not value or len(value) > 16:
        return value
    if not all(type(item) is str and item.isprintable() and "," not in item for item in value):
        return value
    return ", ".join(sorted(value) if key in _SET_NAMES else value)
