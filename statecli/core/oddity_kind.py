"""Oddities (unusual facts about a target) that change the behaviour of a command. All other oddities are only shown.

This module imports no other module of statecli.
"""

from __future__ import annotations

from enum import Enum


class OddityKind(Enum):
    """Oddity (an unusual fact about a target) that changes a command's behaviour. The value is its name in reports."""

    # Contents that a reader could not list or compare.
    NO_TENSORS = "no-tensors"
    TOO_DEEP = "too-deep"
    NOT_SEARCHED = "not-searched"
    OPAQUE_CLASS = "opaque-class"
    PACKED_PARAMS = "packed-params"
    SCRIPT_MODULE = "script-module"
    METADATA_CUT = "metadata-cut"
    NONE_PARAMETER = "none-parameter"

    # Layout of the bytes of a file.
    PREFIXED = "prefixed"
    SUFFIXED = "suffixed"
    GAP = "gap"
    ZIP_COMMENT = "zip-comment"
    PICKLE_TRAILING = "pickle-trailing"
    UNUSED_STORAGES = "unused-storages"
    UNUSED_RECORDS = "unused-records"
    MISPLACED_STORAGE = "misplaced-storage"
    CASE_ONLY_NAMES = "case-only-names"
    CHECKSUM_MISMATCH = "checksum-mismatch"

    # Parts of a checkpoint in several files.
    MISSING_RANK = "missing-rank"
    MISSING_SHARD = "missing-shard"
    NO_OPTIMIZER = "no-optimizer"
    ONE_PART = "one-part"
    NOT_IN_INDEX = "not-in-index"
    INDEX_TOTAL = "index-total"
    UNNAMED_SHARDS = "unnamed-shards"
    FOREIGN_GLOBALS = "foreign-globals"

    # Results of a move of a model.
    NOT_MEASURED = "not-measured"
    RECOMPUTED = "recomputed"
    STALE_VIEW = "stale-view"
    UNTIED_BY_MOVE = "untied-by-move"
    UNLIKE_COPY = "unlike-copy"

    # Results of a comparison or a load.
    SECTIONS_PAIRED = "sections-paired"
    SECTIONS_LEFT_OUT = "sections-left-out"
    SECTIONS_APART = "sections-apart"
    PREFIX_APART = "prefix-apart"
    COMPONENTS_APART = "components-apart"
    NOT_LOCKED = "not-locked"
    VALUES_NOT_COMPARED = "values-not-compared"
    NOT_SAVED_BY_CLASS = "not-saved-by-class"
    NOT_READ_BY_CLASS = "not-read-by-class"
    CONVERTED_ON_LOAD = "converted-on-load"
    BASELINE_FIXED = "baseline-fixed"
