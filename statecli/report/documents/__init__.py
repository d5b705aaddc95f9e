"""JSON documents of the commands, as types for encoding; `statecli schema` prints their JSON Schema.

Rows of tensors are `Rows` in fields of type tuple, because each row is encoded only on writing.
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.report.documents import inspect as inspect
else:
    __getattr__ = import_on_use(__name__)
