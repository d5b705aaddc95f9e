"""The names of a module are the names that Python lists."""

from __future__ import annotations

import pytest
from torch import nn

from statecli.live.module_names import list_names


def test_list_names_returns_the_names_of_dir():
    transformers = pytest.importorskip("transformers")
    for value in (transformers, transformers.models.bert, nn, nn.Linear):
        assert list_names(value) == dir(value)
