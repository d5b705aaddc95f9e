"""Code that registers a tensor as a buffer or a parameter, and the comments that belong to the code."""

from __future__ import annotations

import ast
from dataclasses import replace

import torch

from statecli.live.attribute_site import AT_END_OF_INIT, Site, is_write
from statecli.live.attribute_source import AttributeUse
from statecli.live.rebuild import Rebuild


def format_registration(tensor: torch.Tensor, site: Site, rebuild: Rebuild, is_disjoint: bool = False) -> str:
    """Return code that registers the tensor of an attribute, at its assignment or at the end of the constructor."""
    source = site.source
    if source is None or is_disjoint or (tensor.requires_grad and any(_is_refused_by_leaf(use) for use in site.uses)):
        value = f'self.__dict__.pop("{site.name}")' + ".clone()" * is_disjoint
        registration = _format_buffer_or_parameter(tensor, site, value, rebuild)
        return f"{AT_END_OF_INIT}{registration}"
    if tensor.requires_grad:
        names = [
            replace(site, name=target.removeprefix(f"{source.owner}.")).get_key()
            for target in source.targets
            if target.startswith(f"{source.owner}.")
        ]
        value = source.text if _is_parameter_call(source.value) else f"nn.Parameter({source.text})"
        text = f"{' = '.join(source.targets)} = {value}"
        return add_loading(text, ", ".join(dict.fromkeys(names)) or site.get_key())
    further_targets = "".join(f"\n{target} = {source.targets[0]}" for target in source.targets[1:])
    return _format_buffer(site, source.owner, source.text, rebuild, further_targets)


def _is_parameter_call(value: ast.expr) -> bool:
    """Return True if the expression is `nn.Parameter(…)`. In a class body, no module registers this parameter."""
    return isinstance(value, ast.Call) and getattr(value.func, "attr", getattr(value.func, "id", "")) == "Parameter"


def _is_refused_by_leaf(use: AttributeUse) -> bool:
    """Return True if the constructor changes the tensor in place, which torch refuses for a parameter."""
    return use.constructs and (use.action in ("item", "augment") or is_write(use))


def _format_buffer(site: Site, owner: str, value: str, rebuild: Rebuild, further_lines: str = "") -> str:
    """Return code that registers a buffer: persistent for a random value, not persistent for any other value."""
    if rebuild is Rebuild.DIFFERENT:
        return add_loading(f'{owner}.register_buffer("{site.name}", {value}){further_lines}', site.get_key())
    text = f'{owner}.register_buffer("{site.name}", {value}, persistent=False){further_lines}'
    return text if rebuild is Rebuild.IDENTICAL else f"{text}\n{SAVING_COMMENT}"


#: Comment below a buffer if statecli does not know whether the constructor rebuilds the value.
SAVING_COMMENT = (
    "# to save the value too, delete persistent=False, and load older checkpoints with\n"
    "# model.load_state_dict(state, strict=False)"
)


def add_loading(text: str, keys: str) -> str:
    """Add the comment on how to load older checkpoints, which lack the keys that the fix adds."""
    return f"{text}\n# older checkpoints lack {keys}; load_state_dict(state, strict=False) keeps initial values"


def describe_registration(tensor: torch.Tensor, rebuild: Rebuild) -> str:
    """Return the registration that fits the tensor: an nn.Parameter, or a buffer that is persistent or not."""
    if tensor.requires_grad:
        return "an nn.Parameter"
    return "a buffer" if rebuild is Rebuild.DIFFERENT else "a buffer with persistent=False"


def add_loading_if_new(text: str, tensor: torch.Tensor, rebuild: Rebuild) -> str:
    """Add the comment on older checkpoints if the registration adds a key to the state_dict."""
    is_new = tensor.requires_grad or rebuild is Rebuild.DIFFERENT
    return add_loading(text, "its key") if is_new else text


def _format_buffer_or_parameter(tensor: torch.Tensor, site: Site, value: str, rebuild: Rebuild) -> str:
    """Return code that registers `value` as a parameter if the tensor requires grad, and else as a buffer."""
    if tensor.requires_grad:
        return add_loading(f"self.{site.name} = nn.Parameter({value})", site.get_key())
    return _format_buffer(site, "self", value, rebuild)
