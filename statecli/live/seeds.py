"""Seed the random generators of the process."""

from __future__ import annotations

import random
import sys
from typing import Any


def seed_cpu_generators(seed: int) -> None:
    """Seed torch on the CPU, Python and numpy. torch.manual_seed would also seed other devices when they start."""
    import torch

    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy: Any = sys.modules.get("numpy")
    if numpy:
        numpy.random.seed(seed % 2**32)
