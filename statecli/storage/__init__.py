"""Bytes of files on disk, behind URLs and in archives, and the names of files in a checkpoint folder.

Modules that few runs need are imported when they are first used (`storage.masked_url.mask_url(…)`).
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.storage import (
        files as files,
        masked_url as masked_url,
        minimum_speed as minimum_speed,
        object_store as object_store,
        redact as redact,
        remote as remote,
        replace_file as replace_file,
        standard_input as standard_input,
    )
else:
    __getattr__ = import_on_use(__name__)
