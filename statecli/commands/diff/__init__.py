"""`statecli diff`: compare two states.

    names ──▶ metadata ──▶ values ──▶ equal bytes under another name ──▶ expectations

`run.py` does these steps in order. `pairing.py` pairs tensors by name, `changed_fields.py` compares their metadata,
`settings.py` compares numbers and texts, `renames.py` finds equal bytes under other names, `suggest_map.py` suggests a
`--map`, `load_check.py` compares a class with a checkpoint, `expectations.py` decides the exit status.
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.commands.diff import change_ranks as change_ranks
else:
    __getattr__ = import_on_use(__name__)
