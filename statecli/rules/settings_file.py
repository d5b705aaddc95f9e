"""Contents of a settings file of a model folder, as far as rules need them."""

from __future__ import annotations

import msgspec

#: Key of `config.json` that names the class of the pipeline of each task.
PIPELINES = "custom_pipelines"


class CodeReference(msgspec.Struct, frozen=True):
    """Python class or file that transformers runs with `trust_remote_code=True`: `key` names it in the settings."""

    key: str
    text: str

    @property
    def repository(self) -> str | None:
        """Name of another repository that holds the code; None for a file of this folder."""
        return self.text.partition("--")[0] if "--" in self.text else None

    @property
    def file(self) -> str:
        """Name of the file with the code: transformers reads `module.py` for `module.Class`."""
        return f"{self.text.rpartition('--')[2].partition('.')[0]}.py"


class Template(msgspec.Struct, frozen=True):
    """A chat template and the name under which the file or the metadata has it."""

    name: str
    text: str


class SettingsFile(msgspec.Struct, frozen=True):
    """A file next to the weights. `unread_because`: the reason if the file is not read."""

    path: str
    code: tuple[CodeReference, ...] = ()
    templates: tuple[Template, ...] = ()
    unread_because: str | None = None
