"""Data that rules need from a settings file of a model folder."""

from __future__ import annotations

import msgspec

from statecli.core.model_state import ChatTemplate

#: Key of `config.json` that names the class of the pipeline of each task.
PIPELINES = "custom_pipelines"
#: Keys of `config.json` that may name an attention kernel in a repository.
ATTENTION_KEYS = ("attn_implementation", "_attn_implementation")
#: File that names the classes of a diffusers pipeline, and file that names the modules of sentence-transformers.
MODEL_INDEX, MODULES = "model_index.json", "modules.json"


class CodeReference(msgspec.Struct, frozen=True):
    """A Python class or file that a library runs with `trust_remote_code=True`. `key`: the setting that names it."""

    key: str
    text: str

    @property
    def repository(self) -> str | None:
        """Name of another repository that holds the code; None if the code is in this folder."""
        return self.text.partition("--")[0] if "--" in self.text else None

    @property
    def file(self) -> str:
        """Name of the file with the code: for `module.Class`, transformers reads `module.py`."""
        return f"{self.text.rpartition('--')[2].partition('.')[0]}.py"


class SettingsFile(msgspec.Struct, frozen=True):
    """A settings file next to the weights. `unread_because` says why the file was not read."""

    path: str
    code: tuple[CodeReference, ...] = ()
    templates: tuple[ChatTemplate, ...] = ()
    unread_because: str | None = None
