"""Tensors that a metric of torchmetrics resets, moves, saves and synchronizes by its own code."""

from __future__ import annotations

from torch import nn

#: Attributes in which the base class of metrics keeps defaults, results and counts.
_OWN_ATTRIBUTES = frozenset(
    ("_defaults", "_computed", "_forward_cache", "_cache", "_update_count", "_is_synced", "_to_sync", "_should_unsync")
)
#: Reasons why a check of verify leaves a state out.
SYNCHRONIZED_REASON = "a metric of torchmetrics synchronizes its states over the ranks in compute()"
SAVED_ON_REQUEST_REASON = "a metric of torchmetrics saves its states only after metric.persistent(True)"
#: Remedies.
MAKE_PERSISTENT_HELP = "call persistent(True) on the metric in __init__, so that state_dict() contains its states"
CALL_OUTSIDE_HELP = "call the metric outside of the compiled or exported model"


def is_metric(kind: type) -> bool:
    """Return True for a metric class of torchmetrics or a subclass by the user. Does not import torchmetrics."""
    return any(base.__name__ == "Metric" and base.__module__ == "torchmetrics.metric" for base in kind.__mro__)


class MetricStates:
    """Names of the states of all torchmetrics metrics in a model and its submodules."""

    def __init__(self, module: nn.Module) -> None:
        metrics = [(path, vars(part)) for path, part in module.named_modules() if is_metric(type(part))]
        self._names = {path: _OWN_ATTRIBUTES.union(attributes["_defaults"]) for path, attributes in metrics}
        self._local = {path for path, attributes in metrics if not attributes.get("sync_on_compute", True)}

    def has(self, fqn: str) -> bool:
        """Return True if `fqn` is a metric state (`accuracy.tp`, `auroc.preds[0]`), or the metric's copy of a state."""
        path, name = _split_name(fqn)
        return name in self._names.get(path, ())

    def is_synchronized(self, fqn: str) -> bool:
        """Return True if the metric synchronizes the state `fqn` over ranks, as metrics do by default."""
        return self.has(fqn) and _split_name(fqn)[0] not in self._local


def _split_name(fqn: str) -> tuple[str, str]:
    path, _, name = fqn.partition("[")[0].rpartition(".")
    return path, name
