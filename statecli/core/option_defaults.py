"""Defaults of options, for their help and for modules that must not import the table of options."""

from __future__ import annotations

from statecli.core.finding import Severity

#: Largest size of tensors, in bytes, whose values an audit reads without --values. With the C kernel, they take 0.06 s
#: (safetensors) to 0.14 s (zip, whose checksums are verified) of a core; from a disk that reads 500 MB/s, 0.5 s.
DEFAULT_VALUE_BYTES = 256_000_000
#: Largest number of tensors whose values an audit reads without --values. Each takes 0.1 to 0.2 ms, also a small one.
DEFAULT_VALUE_TENSORS = 5_000
#: Lowest severity of a finding that makes an audit fail.
AUDIT_FAIL_ON = Severity.WARNING
#: Default optimizers of the checks `step` and `resume`, by name in torch.optim.
STEP_OPTIMIZER, RESUME_OPTIMIZER = "sgd", "adamw"
