"""Real classes of transformers, built small from their configs, are compared with torch's own functions."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from statecli.core.model_state import Kind

from ..zoo import SMALL, make
from .test_oracles import list_registered_rows, oracle


@pytest.mark.parametrize("name", SMALL)
def test_the_rows_are_the_tensors_of_torch(name, read_live):
    """Names, kinds, dtypes, shapes, requires_grad and saving agree with torch; all tensors are registered and move."""
    state = read_live(lambda: make(name))
    assert list_registered_rows(state) == oracle(make(name))
    assert [t.fqn for t in state.tensors if t.moves is not True or t.kind is Kind.UNREGISTERED] == []
    assert {oddity.name for oddity in state.oddities} <= {"none-parameter"}
    if name == "GPT2LMHeadModel":
        assert [t.tied_to for t in state.tensors if t.fqn == "lm_head.weight"] == [("transformer.wte.weight",)]


@pytest.mark.parametrize("name", ["BertModel", "LlamaForCausalLM"])
def test_skipped_random_values_give_the_same_rows(name, read_live):
    """A model without drawn values of large parameters shows the same rows."""
    from statecli.live.skip_random_init import SkippedFills, skip_random_fills

    def build_without_draws() -> nn.Module:
        with skip_random_fills(SkippedFills()):
            return make(name)

    torch.manual_seed(0)
    assert read_live(build_without_draws).tensors == read_live(lambda: make(name)).tensors
