"""Find the calls, allocations and hashes caused by loading a pickle or the code next to a pickle.

Modules that few runs need are imported when they are first used (`pickle_scan.one_pickle.begins_as_pickle(…)`).
"""

from __future__ import annotations

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from statecli.pickle_scan import (
        archive_records as archive_records,
        known_names as known_names,
        one_pickle as one_pickle,
        yolo_activation as yolo_activation,
    )
else:
    from statecli.core.import_on_use import import_on_use

    __getattr__ = import_on_use(__name__)
