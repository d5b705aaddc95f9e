"""Describe the settings of a folder: the class of the model, or the base model of an adapter."""

from __future__ import annotations

from collections.abc import Iterator

from statecli.core.model_state import Scalar, Settings
from statecli.report import SettingGroup

#: Settings in the title of a folder. Each is shown by the last part of its name.
_HEADLINE_SETTINGS = (
    "adapter_config.r",
    "adapter_config.lora_alpha",
    "adapter_config.target_modules",
    "config.quantization_config.quant_method",
    "trainer_state.global_step",
    "trainer_state.epoch",
    "trainer_state.best_metric",
)


def describe_settings(settings: Settings) -> Iterator[tuple[str, str]]:
    """Describe a folder by its settings in words: its model class, or the base model of an adapter."""
    values = settings.values
    if "adapter_config" in settings.companion_names:
        base_model, adapter_type = (
            values.get(f"adapter_config.{key}") for key in ("base_model_name_or_path", "peft_type")
        )
        base = f" of base model {base_model}" if base_model else "; its base model is not recorded"
        yield "adapter", f"adapter{f' ({adapter_type})' if adapter_type else ''}{base}"
    if "config" in settings.companion_names:
        class_names = values.get("config.architectures") or values.get("config._class_name")
        if class_names:
            yield "architecture", f"architecture {class_names}"


def names_class(settings: Settings) -> bool:
    """Return True if `--model auto` can use the class in config.json. The class must not need the checkpoint's code."""
    values = settings.values
    is_named = any(isinstance(values.get(f"config.{key}"), str) for key in ("architectures", "_class_name"))
    return (
        "config" in settings.companion_names
        and is_named
        and not any(key.startswith("config.auto_map") for key in values)
    )


def group_settings(settings: Settings) -> tuple[SettingGroup, ...]:
    """Group the settings by their file in the folder. The settings of the checkpoint itself come first."""
    groups: dict[str, list[tuple[str, str]]] = {}
    for key, value in settings.values.items():
        file, _, name = key.partition(".")
        title, name = (f"{file}.json", name) if name and file in settings.companion_names else ("metadata", key)
        text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
        groups.setdefault(title, []).append((name, text))
    titles = sorted(groups, key=lambda title: title != "metadata")
    return tuple(SettingGroup(title, tuple(groups[title])) for title in titles)


def select_headline(settings: Settings) -> dict[str, Scalar]:
    """Return the headline settings of a folder, by short name. Null values are omitted."""
    headline = {
        key: settings.values.get(key) for key in _HEADLINE_SETTINGS if key.partition(".")[0] in settings.companion_names
    }
    return {key.rpartition(".")[2].strip("_"): value for key, value in headline.items() if value is not None}
