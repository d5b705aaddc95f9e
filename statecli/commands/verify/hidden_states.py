"""Find recurrent modules that run one time step from a hidden state of zeros.

The weight that multiplies this state (`weight_hh`) then gets a zero gradient.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_iter

from statecli.commands.verify import training_rounds
from statecli.commands.verify.training_record import Training
from statecli.core.errors import ModelError

#: Part of the names of weights that multiply a hidden state.
HIDDEN_WEIGHT = "weight_hh"


def find_zero_states(run: Training) -> tuple[str, ...]:
    """Return the recurrent modules that forward calls only with a zero hidden state and a single time step."""
    modules = {
        name: module for name, module in run.module.named_modules() if isinstance(module, nn.RNNCellBase | nn.RNNBase)
    }
    called_names: set[str] = set()
    others: set[str] = set()

    def record(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        called_names.add(name)
        if not (_has_zero_state(args, kwargs) and _takes_one_step(module, args)):
            others.add(name)

    handles = [
        module.register_forward_pre_hook(functools.partial(record, name), with_kwargs=True)
        for name, module in modules.items()
    ]
    try:
        with training_rounds.start_round(run):
            training_rounds.call_forward(run)
    except ModelError:
        return ()
    finally:
        for handle in handles:
            handle.remove()
    return tuple(sorted(called_names - others))


def _has_zero_state(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    state = args[1] if len(args) > 1 else kwargs.get("hx")
    return not any(isinstance(leaf, torch.Tensor) and bool(leaf.detach().any()) for leaf in tree_iter(state))


def _takes_one_step(module: nn.Module, args: tuple[Any, ...]) -> bool:
    if isinstance(module, nn.RNNCellBase):
        return True
    sequence = args[0] if args else None
    if not isinstance(sequence, torch.Tensor):  # a PackedSequence, or an input by keyword
        return False
    return sequence.shape[1 if module.batch_first and sequence.dim() == 3 else 0] == 1
