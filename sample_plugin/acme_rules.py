"""Rules of the company Acme: a plugin of `statecli audit`."""

from __future__ import annotations

from collections.abc import Iterator

from statecli.plugin import Issue, Severity, Subject, needs_file, needs_values, rule

#: Largest magnitude of a weight that Acme's accelerators take.
MAX_WEIGHT = 1000


@rule(Severity.ERROR, needs_file)
def acme_missing_owner(subject: Subject) -> Iterator[Issue]:
    """The metadata of a checkpoint does not name the team that owns the checkpoint.

    Why: nobody answers questions about the checkpoint, and nobody deletes it.

    Example: a file of `safetensors.torch.save_file(state, path)` without `metadata`.

    Fix: save the checkpoint with `metadata={"owner": "vision"}`.
    """
    if not subject.full_state.metadata.values.get("owner"):
        yield Issue("owner: missing from the metadata", help="save the name of the team in the metadata")


@rule(Severity.WARNING, needs_values)
def acme_large_weight(subject: Subject) -> Iterator[Issue]:
    """A tensor has a value that Acme's accelerators clip.

    Why: the accelerators clip weights to ±1,000, and the model then computes other outputs than in training.

    Example: an output layer that diverged has a weight of 5,000.

    Fix: train with weight decay, or rescale the layer.
    """
    for tensor, facts in zip(subject.state.tensors, subject.values or (), strict=True):
        if facts.high is not None and facts.low is not None and max(facts.high, -facts.low) > MAX_WEIGHT:
            message = f"{subject.name_of(tensor)}: has values from {facts.low:g} to {facts.high:g}"
            yield Issue(message, tensor.fqn, tensor.section, help="rescale the layer")


RULES = (acme_missing_owner, acme_large_weight)
