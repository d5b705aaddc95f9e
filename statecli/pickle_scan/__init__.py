"""Scan pickles and the code of models for harmful calls, large allocations and slow hashes during loading.

Modules that few runs need are imported when they are first used (`pickle_scan.one_pickle.begins_as_pickle(…)`).
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use

if TYPE_CHECKING:
    from statecli.pickle_scan import (
        archive_records as archive_records,
        known_names as known_names,
        one_pickle as one_pickle,
        yolo_activation as yolo_activation,
    )
else:
    __getattr__ = import_on_use(__name__)
