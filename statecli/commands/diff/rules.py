"""Rules of `diff`: differences, and failed expectations (`--may-change`, `--must-not-change`, `--must-change`,
`--cast`, `--adapter`).

Without expectations each difference is a finding. Entries that a class refuses to load are in `core/load_rules.py`.
"""

from __future__ import annotations

from statecli.core.finding import Severity
from statecli.core.rule import Rule


def _build_rule(name: str, summary: str, why: str, example: str, fix: str, heading: str = "") -> Rule:
    return Rule(name, "diff", ("diff",), Severity.ERROR, summary, why, example, fix, heading=heading)


ADDED = _build_rule(
    "added",
    summary="A tensor is only in the second checkpoint.",
    why="a strict load fails if the class does not define the tensor.",
    example="a fine-tuned checkpoint has `lora_A` and `lora_B` for each layer; its base model has neither.",
    fix="check that the tensor belongs to the model. If the new tensor is expected, allow it with `--may-change GLOB`.",
)
REMOVED = _build_rule(
    "removed",
    summary="A tensor is only in the first checkpoint.",
    why="""a strict load of the second checkpoint fails. With `strict=False` the tensor keeps its
initial values.""",
    example="`head.bias` is in the first checkpoint and not in the second.",
    fix="save the second checkpoint again with the tensor. If only the name differs, use `--map OLD=NEW`.",
)
CHANGED = _build_rule(
    "changed",
    summary="A tensor differs: its values, dtype, shape, kind or device.",
    why="the model computes other results, or needs another amount of memory. The finding lists the differences.",
    example="`encoder.weight` was float32 and is float16 after a conversion.",
    fix="""check that the change is intended. Use `--ignore FIELD` for a field that may differ, `--atol` and `--rtol`
for rounding, and `--may-change GLOB` for tensors that may change.""",
)
RENAMED = _build_rule(
    "renamed",
    summary="A tensor has another name.",
    why="`load_state_dict` matches tensors by name: it reports the old name as missing and the new name as unexpected.",
    example="`fc.weight` of the first checkpoint has the same bytes as `head.weight` of the second.",
    fix="rename the key before loading. Use `--map OLD=NEW` to compare the two tensors.",
)
METADATA = _build_rule(
    "metadata",
    summary="A setting in the checkpoint differs (its config, step or hyperparameters).",
    why="the same weights can give another result with another setting, such as a learning rate or the model's config.",
    example="`epoch` is 3 in the first checkpoint and 4 in the second.",
    fix=(
        "check that the change is intended. List the settings that may change: `--may-change 'head.*' --may-change "
        "epoch`."
    ),
)
OUTSIDE_ONLY = _build_rule(
    "outside-only",
    summary="A tensor or setting changed, although `--may-change` does not allow the change.",
    why="the training or conversion changed more than `--may-change` allows.",
    example="`--may-change 'head.*'` is given, and `encoder.bias` differs.",
    heading="{} tensors differ, but do not match {}",
    fix="""freeze the other layers with `requires_grad_(False)` and `eval()`, or allow an
intended change with another `--may-change GLOB`.""",
)
FROZEN_CHANGED = _build_rule(
    "frozen-changed",
    summary="A tensor that matches `--must-not-change` has changed.",
    why="a layer that should be frozen was trained, or was saved from another run.",
    example="`--must-not-change 'backbone.*'` is given, and the running mean of a BatchNorm in the backbone differs.",
    heading="{} tensors differ, but match {}",
    fix="call `requires_grad_(False)` and `eval()` on the frozen layers. BatchNorm updates its statistics in "
    "train mode.",
)
UNCHANGED = _build_rule(
    "unchanged",
    summary="None of the tensors that match a glob of `--must-change` has changed.",
    why="the layer that should be trained was not: it is frozen, not in the optimizer, or not saved.",
    example="`--must-change 'head.*'` is given, and all tensors of the head are identical.",
    fix="run `statecli verify --check step` on the class: it reports parameters without a gradient or an update.",
)
INEXACT_CAST = _build_rule(
    "inexact-cast",
    summary="A tensor differs by more than the rounding of the cast that `--cast` allows.",
    why="""the export has values of another run, was not rounded to the nearest values, or changed values that the
new dtype can represent.""",
    example="of 39 tensors cast from float32 to bfloat16, one has the values of an older step.",
    fix="export the checkpoint again from the same weights with `tensor.to(dtype)`, which rounds to the nearest value.",
)
NOT_MERGED = _build_rule(
    "not-merged",
    summary="A merged tensor is not the sum of the base tensor and the update of `--adapter`.",
    why="the merge left out a layer, used another scale, or started from another base model than the training "
    "of the adapter.",
    example="the merged checkpoint has the update of `q_proj` in three of four layers.",
    fix="merge again with peft's `merge_and_unload()`, from the base model given in `adapter_config.json`.",
)
LOAD_REFUSED = _build_rule(
    "load-refused",
    summary="The class refuses to load the checkpoint.",
    why="`load_state_dict` raises for a reason other than names and shapes, so no weight is loaded reliably.",
    example="a hook of the class raises because the checkpoint has an old version number.",
    fix="read the error in the message; convert the checkpoint, or load it with the version of the code that wrote it.",
)

#: Rule of a difference by the status of the tensor, as in the documents.
BY_STATUS = {rule.name: rule for rule in (ADDED, REMOVED, CHANGED, RENAMED)}
RULES = (*BY_STATUS.values(), METADATA, OUTSIDE_ONLY, FROZEN_CHANGED, UNCHANGED, INEXACT_CAST, NOT_MERGED, LOAD_REFUSED)
