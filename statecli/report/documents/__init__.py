"""JSON of each command, as types for encoding; `statecli schema` prints their JSON Schema.

Rows of tensors are `Rows` in fields of type tuple, because each row is encoded only on writing.
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from statecli.report.documents import (
        inspect as inspect,
        schema_texts as schema_texts,
    )
else:
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)
