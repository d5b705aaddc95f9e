"""The names of a module are the names that Python lists."""

from __future__ import annotations

import pytest
from torch import nn

from statecli.live.module_names import list_names


def test_the_names_of_a_module_and_a_class_are_those_of_dir():
    transformers = pytest.importorskip("transformers")
    for value in (transformers, transformers.models.bert, nn, nn.Linear):
        assert list_names(value) == dir(value)
