"""The command audit: check checkpoints and model classes against rules.

    targets ──▶ Subject (the input of rules) ──▶ rules ──▶ Audit

`run.py` is a run, `request.py` its arguments, `config.py` the project's configuration, `result.py` the types of the
result. `references.py`, `lock_check.py` and `baseline.py` compare targets with a class or another checkpoint, with a
lock, and with accepted findings. The rules are in `statecli/rules/`.

Modules that few audits need are imported when they are first used (`audit.import_plugin.import_plugins(…)` after
`from statecli.commands import audit`).
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.commands.audit import config as config, import_plugin as import_plugin, plugins as plugins
else:
    __getattr__ = import_on_use(__name__)
