"""Tensor values at memory speed: where their bytes are, what the bytes mean, and how values arrive on a device.

Importing this package does not import numpy. Its modules need numpy, which may not be installed, and are imported on
first use (`values.stats.fill_stats(…)` after `from statecli import values`):

    elements.py      stored bytes -> numbers: every element type torch can save
    ranges.py        a `ByteRange` -> its bytes: plain, compressed, quantized, or in pieces of several files
    read.py          a `TensorData` -> its values, chunk by chunk, in bounded memory
    ggml_blocks.py   blocks that ggml quantized, as they are stored or as float32, by the package gguf
    live_tensor.py   a live torch tensor -> the same view of its storage
    summary.py       `Facts` of some values: counts, range, moments; facts of parts merge
    stats.py         values -> `Stats`
    facts.py         tensors of a checkpoint -> `Facts` for rules; facts_kernel.py: of one block, _native.c or numpy
    digest.py        tensors -> digests for lock files
    to_device.py     tensors of a checkpoint -> a device, and back, compared
    compare.py       pairs of tensors -> how they differ: the plan, and adding it up; compare_task.py: one task
    neighbours.py    small tensors next to each other in a file, by one read; small_pairs.py: pairs of these
    sparse.py        two sparse tensors by value
    kernels.py       two blocks of values -> their `Tally` (tally.py): _native.c where compiled, numpy
                     otherwise; gpu_kernel.py: the same on a GPU
    histogram.py     how the differences of one tensor are spread
"""

from __future__ import annotations

from statecli.core.import_on_use import TYPE_CHECKING, import_on_use
from statecli.values.require_numpy import require_numpy as _require_numpy  # the module has the same name

if TYPE_CHECKING:
    from statecli.values import (
        change_rank as change_rank,
        compare as compare,
        data_task as data_task,
        digest as digest,
        distribution as distribution,
        facts as facts,
        gpu_kernel as gpu_kernel,
        histogram as histogram,
        preview as preview,
        ranges as ranges,
        read as read,
        spectrum as spectrum,
        stats as stats,
        to_device as to_device,
    )
else:
    __getattr__ = import_on_use(__name__, _require_numpy)
