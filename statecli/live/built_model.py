"""A model from `build`, or a live model. It can build a second instance and run the model's code."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from statecli import live
from statecli.core.errors import ModelError
from statecli.live.model_errors import report_as_model_error
from statecli.live.spec import ModelSpec
from statecli.live.user_code import protect_process

if TYPE_CHECKING:
    from torch import nn

    from statecli.live.assignment_lines import Origins
    from statecli.live.import_model import LoadedObject
    from statecli.live.torch_settings import Settings


@dataclass(frozen=True)
class BuiltModel:
    """Model whose values `model_reader.read` and `move` may overwrite, because only statecli uses this instance.

    Attributes:
        origins: The line of each assignment.
        values: Whether large random initial values were drawn.
        make_instance: Function that builds another instance; its arguments are `values` and a seed.
        loaded: The object of the spec and its module; None if no spec was imported.
        settings_after_init: torch's settings as the constructor left them; None if no constructor was run.
        original: The live model copied to `module`: its tensors are listed, and only the copy is moved.
    """

    spec: ModelSpec
    module: nn.Module
    origins: Origins
    init_device: str
    values: bool
    make_instance: Callable[[bool, int], nn.Module]
    loaded: LoadedObject | None = field(default=None, kw_only=True)
    settings_after_init: Settings | None = field(default=None, kw_only=True)
    original: nn.Module | None = field(default=None, kw_only=True)

    @property
    def listed_module(self) -> nn.Module:
        """Model whose tensors are listed: the user's live model if there is one, otherwise `module`."""
        return self.module if self.original is None else self.original

    def build_again(self, *, values: bool | None = None, seed: int = 0) -> nn.Module:
        """Build another instance of the model, with the same or another seed.

        Raises ModelError if the spec names an object that exists only once.
        """
        with live.torch_settings.keep_settings_and_grad_mode():
            instance = self.make_instance(self.values if values is None else values, seed)
        if instance is self.module:
            raise ModelError(
                f"{self.spec.text}: does not build a new model, but this check needs a new model; name a class or "
                "another function"
            )
        return instance

    @contextmanager
    def user_code(self, doing: str) -> Iterator[None]:
        """Run the model's own code in the block. An exception becomes a one-line ModelError that contains `doing`.

        Prints go to stderr. sys.path is as at import, torch's settings are as the constructor left them.
        The model's `__torch_function__` is enabled, even if the caller has disabled it to read tensors.
        """
        import torch

        with (
            live.torch_settings.keep_settings(self.settings_after_init),
            protect_process(self.spec),
            report_as_model_error(self.spec, doing),
            torch._C._EnableTorchFunction(),
        ):
            yield
