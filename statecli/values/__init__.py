"""Read and compare tensor values: find their bytes, decode the bytes, and copy the values to a device.

Importing this package does not import numpy. Its modules need numpy, which may not be installed, and are imported on
first use (`values.stats.fill_stats(…)` after `from statecli import values`):

    elements.py      stored bytes -> numbers: every element type torch can save
    ranges.py        a `ByteRange` -> its bytes: plain, compressed, quantized, or in pieces of several files
    read.py          a `TensorData` -> its values, chunk by chunk, in bounded memory
    ggml_blocks.py   blocks that ggml quantized -> the stored blocks, or float32 by the package gguf
    live_tensor.py   a live torch tensor -> the same view of its storage
    summary.py       `Facts` of some values: counts, range, moments; facts of parts merge
    stats.py         values -> `Stats`
    audit_facts.py         tensors of a checkpoint -> `Facts` for rules; facts_kernel.py: the same for one block
    digest.py        tensors -> digests for lock files
    to_device.py     checks whether tensors arrive on a device unchanged
    pair_plan.py     a pair of tensors -> tasks that compare the values, or why no task can
    compare.py       pairs of tensors -> how they differ, by tasks; compare_task.py: runs one task
    fingerprints.py  tensors -> CRC-32 of their elements; recorded_checksums.py: checks the bytes of archives
    neighbours.py    reads small adjacent tensors together; small_pairs.py: compares pairs of these
    sparse.py        compares two sparse tensors by value
    kernels.py       two blocks of values -> their `Tally` (tally.py), by _native.c or numpy; gpu_kernel.py: on a GPU
    histogram.py     two tensors -> histogram of their differences
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use
from statecli.values.require_numpy import require_numpy as _require_numpy  # the module has the same name

if TYPE_CHECKING:
    from statecli.values import (
        audit_facts as audit_facts,
        change_rank as change_rank,
        compare as compare,
        data_task as data_task,
        digest as digest,
        distribution as distribution,
        fingerprints as fingerprints,
        gpu_kernel as gpu_kernel,
        histogram as histogram,
        pair_plan as pair_plan,
        preview as preview,
        ranges as ranges,
        read as read,
        recorded_checksums as recorded_checksums,
        spectrum as spectrum,
        stats as stats,
        to_device as to_device,
    )
else:
    __getattr__ = import_on_use(__name__, _require_numpy)
