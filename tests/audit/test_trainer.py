"""A Trainer's folder is one target: the model is compared with references, every file is audited and locked."""

from __future__ import annotations

import json
import os
import pickle
import random
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR
from transformers import BertConfig, BertForSequenceClassification, TrainingArguments
from transformers.trainer_pt_utils import AcceleratorConfig
from transformers.trainer_utils import HubStrategy, IntervalStrategy, SchedulerType

from ..formats.attacks import Call

SIZES = dict(  # noqa: C408 - as a call has them
    hidden_size=16,
    num_hidden_layers=2,
    num_attention_heads=2,
    intermediate_size=32,
    vocab_size=50,
    max_position_embeddings=16,
)
CLASS_SOURCE = f"""
from transformers import BertConfig, BertForSequenceClassification
def build():
    return BertForSequenceClassification(BertConfig(**{SIZES!r}))
"""
#: Files that a Trainer writes next to the model.
COMPANION_FILES = ["optimizer.pt", "rng_state.pth", "scheduler.pt", "training_args.bin"]


def write_trainer_checkpoint(folder):
    """Write the files of `Trainer._save_checkpoint` with the same calls."""
    model = BertForSequenceClassification(BertConfig(**SIZES))
    model.save_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = LambdaLR(optimizer, lambda step: 1.0)
    model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.sum().backward()
    optimizer.step()
    scheduler.step()
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.random.get_rng_state()}
    torch.save(optimizer.state_dict(), folder / "optimizer.pt")
    torch.save(scheduler.state_dict(), folder / "scheduler.pt")
    torch.save(states, folder / "rng_state.pth")
    torch.save(build_training_arguments(), folder / "training_args.bin")
    (folder / "trainer_state.json").write_text(json.dumps({"global_step": 1, "log_history": []}))


def build_training_arguments():
    """Return TrainingArguments. Without accelerate the constructor fails, so the attributes are set directly."""
    try:
        return TrainingArguments(output_dir="out")
    except ImportError:
        arguments = TrainingArguments.__new__(TrainingArguments)
        vars(arguments).update(output_dir="out", learning_rate=5e-5, device=torch.device("cpu"))
        vars(arguments).update(eval_strategy=IntervalStrategy.NO, lr_scheduler_type=SchedulerType.LINEAR)
        vars(arguments).update(hub_strategy=HubStrategy.EVERY_SAVE, accelerator_config=AcceleratorConfig())
        return arguments


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trainer")
    write_trainer_checkpoint(folder)
    return folder


@pytest.fixture(autouse=True)
def _trainer_folder(checkpoint, in_tmp_path):
    shutil.copytree(checkpoint, "ck")
    Path("net.py").write_text(CLASS_SOURCE)


def change_tensor(path, *keys):
    """Change the first element of the tensor at `keys`."""
    checkpoint = tensor = torch.load(path, weights_only=False)
    for key in keys:
        tensor = tensor[key]
    tensor.view(-1)[0] += 1
    torch.save(checkpoint, path)


def map_statuses(result):
    return {target["target"]: target["status"] for target in result.json["targets"]}


def test_trainer_folder_is_one_target(statecli):
    """The folder is one target with all tensors; none of its files is reported as a separate target."""
    result = statecli("audit", "ck", "-f", "json")
    assert (result.code, result.err, result.json["findings"]) == (0, "", [])
    assert [name for name, status in map_statuses(result).items() if status == "audited"] == ["ck"]
    inspected = statecli("inspect", "ck", "-f", "json").json
    assert inspected["sections"] == ["model", "optimizer", "rng_state"]
    (target,) = (target for target in result.json["targets"] if target["target"] == "ck")
    assert target["tensors"] == len(inspected["tensors"])


@pytest.mark.parametrize("name", COMPANION_FILES)
def test_every_pickle_of_the_folder_is_audited(statecli, name):
    """A call in any of the files is a finding that names the file."""
    torch.save({"x": Call(os.system, "exit 0"), "y": torch.ones(1)}, f"ck/{name}")
    result = statecli("audit", "ck", "-f", "json")
    assert result.code == 1
    (target,) = (finding for finding in result.json["findings"] if finding["rule"] == "unsafe-global")
    assert target["target"] == "ck"
    assert name in json.dumps(target)


def test_lock_covers_every_section_of_the_folder(statecli):
    """Every section is locked; the locked folder and a copy of the folder match the lock."""
    result = statecli("lock", "ck", "-o", "l.json")
    assert (result.code, result.err) == (0, "")
    (locked,) = json.loads(Path("l.json").read_text())["targets"]
    assert {tensor["section"] for tensor in locked["tensors"]} == {"model", "optimizer", "rng_state"}
    shutil.copytree("ck", "copy")
    for folder in ("ck", "copy"):
        audited = statecli("audit", folder, "--lock", "l.json", "-f", "json")
        assert (audited.code, audited.err, audited.json["findings"]) == (0, "", [])


def test_changed_optimizer_tensor_is_named(statecli):
    """The only finding names the target and the tensor."""
    statecli("lock", "ck", "-o", "l.json")
    change_tensor("ck/optimizer.pt", "state", 3, "exp_avg")
    result = statecli("audit", "ck", "--lock", "l.json", "-f", "json")
    assert result.code == 1
    (finding,) = result.json["findings"]
    assert (finding["rule"], finding["target"], finding["fqn"]) == (
        "lock-mismatch",
        "ck",
        "state[3]['exp_avg']",
    )
    assert finding["message"].startswith("optimizer.state[3]['exp_avg']: values differ")


def test_emptied_or_deleted_optimizer_does_not_match_the_lock(statecli):
    """An optimizer's state that lost all its tensors is not treated as a file without tensors."""
    statecli("lock", "ck", "-o", "l.json")
    torch.save({"state": {}, "param_groups": []}, "ck/optimizer.pt")
    empty = statecli("audit", "ck", "--lock", "l.json", "-f", "json")
    Path("ck/optimizer.pt").unlink()
    for result in (empty, statecli("audit", "ck", "--lock", "l.json", "-f", "json")):
        assert result.code == 1
        assert {finding["section"] for finding in result.json["findings"]} == {"optimizer"}


def test_lock_of_a_model_skips_training_files_next_to_the_model(statecli):
    """An optimizer's state is skipped with a note; an unlocked model is an error. If nothing was compared, the audit
    exits with status 2.
    """
    for name in COMPANION_FILES:
        Path("ck", name).rename(name)
    statecli("lock", "ck", "-o", "l.json")
    for name in ("scheduler.pt", "optimizer.pt"):
        Path(name).rename(Path("ck", name))
    result = statecli("audit", "ck", "--lock", "l.json", "-f", "json")
    assert result.code == 0
    assert "lock-mismatch" not in {finding["rule"] for finding in result.json["findings"]}
    text = statecli("audit", "ck", "--lock", "l.json").out
    assert "optimizer: not part of a model and not in the lock, so not compared" in text
    shutil.copy("ck/model.safetensors", "ck/other.safetensors")
    result = statecli("audit", "ck", "--lock", "l.json")
    assert (result.code, result.err) == (
        2,
        "statecli: ck/other.safetensors: is not in the lock, which has only one target: if you expect this target, run "
        "`statecli lock` again; otherwise leave the target out, or delete the file\n",
    )
    Path("ck/other.safetensors").unlink()
    Path("ck/model.safetensors").unlink()
    result = statecli("audit", "ck", "--lock", "l.json")
    assert (result.code, result.err) == (
        2,
        "statecli: no target was compared with the lock: ck/optimizer.pt contains only the state of an optimizer\n",
    )


def test_only_the_model_is_compared_with_a_reference(statecli):
    """Optimizers that differ give no finding."""
    shutil.copytree("ck", "before")
    change_tensor("ck/optimizer.pt", "state", 3, "exp_avg")
    torch.save({"last_epoch": 7}, "ck/scheduler.pt")
    Path("before/rng_state.pth").unlink()
    for reference in ("before", "before/model.safetensors"):
        result = statecli("audit", "ck", "--against", reference, "-f", "json")
        assert (result.code, result.err, result.json["findings"]) == (0, "", [])
        assert "missing-entry" in result.json["ran"]


def test_only_the_model_is_compared_with_a_class(statecli):
    """The class matches the model and gives no finding."""
    result = statecli("audit", "ck", "--model", "net.py:build", "--ignore", "non-persistent-buffer", "-f", "json")
    assert (result.code, result.json["findings"]) == (0, []), result.err
    assert "missing-entry" in result.json["ran"]


def test_removed_model_entry_is_reported(statecli):
    """The model of the folder is really compared."""
    shutil.copytree("ck", "before")
    from safetensors.torch import load_file, save_file

    state = load_file("ck/model.safetensors")
    del state["classifier.bias"]
    save_file(state, "ck/model.safetensors")
    for options in (("--against", "before"), ("--model", "net.py:build", "--ignore", "non-persistent-buffer")):
        result = statecli("audit", "ck", *options, "-f", "json")
        assert [(finding["rule"], finding["target"], finding["fqn"]) for finding in result.json["findings"]] == [
            ("missing-entry", "ck", "classifier.bias")
        ]


def test_policy_checks_only_the_model(statecli):
    """The policy does not check the optimizer for changes or metadata, and no note says so."""
    shutil.copytree("ck", "before")
    Path("statecli.toml").write_text(
        '[policy]\nreference = "before"\nmust-not-change = ["bert.*"]\nrequire-metadata = ["format"]\n'
    )
    result = statecli("audit", "ck", "-f", "json")
    assert (result.code, result.err, result.json["findings"]) == (0, "", [])
    assert {"changed-tensor", "missing-metadata"} <= set(result.json["ran"])


def test_optimizer_named_as_target_is_compared(statecli):
    """An optimizer's state that is named as a target is compared with another optimizer's state."""
    shutil.copytree("ck", "before")
    words = ("audit", "ck/optimizer.pt", "--against", "before/optimizer.pt", "-f", "json")
    assert statecli(*words).code == 0
    torch.save({"state": {0: {"step": torch.ones(())}}, "param_groups": []}, "ck/optimizer.pt")
    assert statecli(*words).code == 1


def test_each_training_step_is_compared(statecli):
    """In a folder of plain checkpoints, the models are compared; in a folder of Trainer's steps, every step is."""
    Path("run").mkdir()
    for name in ("step-1.pt", "step-2.pt"):
        torch.save({"w": torch.ones(2)}, f"run/{name}")
    torch.save({"v": torch.ones(2)}, "run/other.pt")
    torch.save(torch.optim.SGD([torch.ones(1)]).state_dict(), "run/scheduler.pt")
    shutil.copytree("ck", "runs/checkpoint-1")
    shutil.copytree("ck", "runs/checkpoint-2")
    plain = statecli("audit", "run", "--against", "run/step-1.pt", "-f", "json")
    assert {finding["target"] for finding in plain.json["findings"]} == {"run/other.pt"}
    steps = statecli("audit", "runs", "--against", "ck", "-f", "json")
    assert (steps.code, steps.json["findings"]) == (0, [])
    assert "runs/checkpoint-2" not in {
        finding["target"] for finding in steps.json["skipped"] if finding["rule"] == "missing-entry"
    }


def test_part_of_a_model_is_not_compared_but_a_training_step_is(statecli):
    """A sentence-transformer has a subfolder for its dense layer; a training has a subfolder for each step."""
    from safetensors.torch import save_file

    shutil.copytree("ck", "out/checkpoint-1")
    for name in ("model.safetensors", "config.json"):
        shutil.copy(f"ck/{name}", "out")
    Path("out/2_Dense").mkdir()
    save_file({"linear.weight": torch.ones(2, 2)}, "out/2_Dense/model.safetensors")
    for words in (("out",), ("--as-found", "out/2_Dense/model.safetensors", "out/model.safetensors")):
        result = statecli("audit", *words, "--against", "ck", "-f", "json")
        assert result.code == 0
        reasons = {
            finding["target"]: finding["reason"]
            for finding in result.json["skipped"]
            if finding["rule"] == "missing-entry"
        }
        (part,) = (target for target in reasons if "2_Dense" in target)
        assert reasons[part] == (
            "is in the folder of a model but is not a training step; to compare this folder, give its path as a target"
        )
        assert "out/checkpoint-1" not in reasons
    assert statecli("audit", "out/2_Dense", "--against", "ck").code == 1
    state = torch.ones(3)
    save_file({"classifier.bias": state}, "out/checkpoint-1/model.safetensors")
    assert statecli("audit", "out", "--against", "ck").code == 1


def test_separate_checkpoint_next_to_a_model_is_not_compared(statecli):
    """The file has model tensors, but only the user knows whether the reference is meant for this file."""
    shutil.copytree("ck", "before")
    torch.save({"head.weight": torch.ones(2)}, "ck/probe.pt")
    result = statecli("audit", "ck", "--against", "before", "-f", "json")
    assert result.code == 0
    reasons = {
        finding["target"]: finding["reason"] for finding in result.json["skipped"] if finding["rule"] == "missing-entry"
    }
    assert (
        reasons["ck/probe.pt"]
        == "is next to a model but not part of the model; to compare this file, give its path as a target"
    )
    assert statecli("audit", "ck/probe.pt", "--against", "before").code == 1


def test_reference_without_a_compared_target_fails(statecli):
    """--against was compared with no target."""
    Path("run").mkdir()
    shutil.copy("ck/optimizer.pt", "run")
    result = statecli("audit", "run", "--against", "ck")
    assert result.code == 2
    assert (
        result.err
        == "statecli: --against ck: was not compared with any target: run/optimizer.pt contains only the state of an "
        "optimizer\n"
    )


# What contains no tensors.


@pytest.mark.parametrize(
    ("build_state", "code"),
    [(dict, 1), (torch.nn.ReLU().state_dict, 1), (lambda: torch.optim.SGD([torch.ones(1)]).state_dict(), 0)],
)
def test_empty_state_dict_is_an_error_and_empty_optimizer_is_not(statecli, build_state, code):
    """An empty state_dict is an error and cannot be listed or compared; an empty optimizer still has settings."""
    for legacy in (True, False):
        torch.save(build_state(), "a.pt", _use_new_zipfile_serialization=not legacy)
        result = statecli("audit", "a.pt", "--values", "-f", "json")
        assert (result.code, map_statuses(result)) == (code, {"a.pt": "audited"})
        codes = [statecli(*words).code for words in (("lock", "a.pt"), ("inspect", "a.pt"), ("diff", "a.pt", "a.pt"))]
        assert codes == ([2] * 3 if code else [2, 0, 0])
        assert ("contains no tensor" in statecli("inspect", "a.pt").err) == bool(code)


def test_filter_does_not_fail_a_file_without_tensors(statecli):
    """A filter does not fail a target that has no tensors."""
    torch.save({"lr": 0.1}, "run.pt")
    assert statecli("audit", "run.pt", "-i", "*.weight").code == 0


def test_missing_section_error_gives_the_reason(statecli):
    """The error gives the reason: the checkpoint contains no tensors."""
    torch.save({"model": {}}, "a.pt")
    result = statecli("audit", "a.pt#model")
    assert (result.code, result.err) == (
        2,
        "statecli: a.pt: has no section 'model'; the checkpoint contains no tensors\n",
    )


# Paths.


def test_paths_do_not_start_with_a_dot(statecli):
    """In an audit and in a lock, paths do not start with `./`."""
    result = statecli("audit", ".", "-f", "json")
    assert not [name for name in map_statuses(result) if name.startswith("./")]
    assert statecli("lock", ".", "-o", "-").json["targets"][0]["target"] == "ck"


# Work is done once.


def test_a_class_is_built_and_a_reference_read_once_in_a_run(statecli, monkeypatch):
    """All targets share the class and the reference, and each target is read once."""
    from statecli import formats
    from statecli.live import build

    Path("run").mkdir()
    for n in range(3):
        torch.save({"weight": torch.ones(2, 2), "bias": torch.ones(2)}, f"run/{n}.pt")
    built_specs, read_paths = [], []
    build_class, read_file = build.build, formats._read_with_path
    monkeypatch.setattr(
        build, "build", lambda *spec, **options: built_specs.append(spec) or build_class(*spec, **options)
    )
    monkeypatch.setattr(
        formats, "_read_with_path", lambda path, *arguments: read_paths.append(path) or read_file(path, *arguments)
    )
    result = statecli("audit", "run", "--model", "torch.nn:Linear(2, 2)", "--against", "run/0.pt", "-f", "json")
    assert (result.code, result.json["findings"]) == (0, [])
    assert len(built_specs) == 1
    assert sorted(read_paths) == ["run/0.pt", "run/0.pt", "run/1.pt", "run/2.pt"]


def test_lazy_class_is_built_again_for_each_target(statecli):
    """Loading gives a lazy class the shapes of one checkpoint; the next checkpoint has other shapes."""
    Path("run").mkdir()
    for n in (2, 3):
        torch.save({"weight": torch.ones(4, n), "bias": torch.ones(4)}, f"run/{n}.pt")
    result = statecli("audit", "run", "--model", "torch.nn:LazyLinear(4)", "-f", "json")
    assert [finding for finding in result.json["findings"] if finding["rule"] == "shape-mismatch"] == []


def test_a_class_that_cannot_be_built_is_tried_once(statecli):
    """Every target to compare with the class fails with the reason."""
    Path("bad.py").write_text("def build():\n    print('tried')\n    raise ValueError('no')\n")
    result = statecli("audit", "ck", "--model", "bad.py:build", "-f", "json")
    assert result.code == 2
    assert result.err.count("tried\n") == 1
    assert map_statuses(result)["ck"] == map_statuses(result)["bad.py:build"] == "failed"


def test_pickle_names_the_class_of_the_training_arguments():
    """The folder's pickles name the classes that a Trainer's pickles name; torch does not list the arguments' class."""
    assert b"TrainingArguments" in Path("ck/training_args.bin").read_bytes()
    assert pickle.loads(pickle.dumps(build_training_arguments())).output_dir == "out"


# Filters.


def test_filter_of_model_tensors_still_checks_all_pickles(statecli):
    """A call in `optimizer.pt` is reported although the filter matches only weights of the model."""
    torch.save({"x": Call(os.system, "exit 0"), "y": torch.ones(1)}, "ck/optimizer.pt")
    result = statecli("audit", "ck", "-i", "*.weight", "-f", "json")
    assert result.code == 1
    assert {finding["rule"] for finding in result.json["findings"]} == {"unsafe-global"}
    assert statecli("audit", "ck/rng_state.pth", "-i", "*.weight").code == 2
    assert statecli("audit", "ck", "-i", "no.such").code == 2


def test_filter_of_model_tensors_locks_only_the_model(statecli):
    """A file named as a target must have a tensor that matches the filter."""
    assert statecli("lock", "ck", "-i", "*.weight", "-o", "l.json").code == 0
    (locked,) = json.loads(Path("l.json").read_text())["targets"]
    assert {tensor["section"] for tensor in locked["tensors"]} == {"model"}
    assert statecli("audit", "ck", "--lock", "l.json", "-i", "*.weight").code == 0
    assert statecli("lock", "ck", "ck/rng_state.pth", "-i", "*.weight", "-o", "l.json").code == 2
    assert statecli("lock", "ck", "-i", "no.such", "-o", "l.json").code == 2


def test_frozen_only_checks_the_frozen_part_of_the_model(statecli):
    """Files next to the model need not have frozen tensors; the model must have some."""
    statecli("lock", "ck", "-o", "l.json")
    words = ("audit", "ck", "--lock", "l.json", "--frozen-only", "-f", "json")
    assert statecli(*words).code == 2
    Path("statecli.toml").write_text('[policy]\nfrozen = ["bert.embeddings.*"]\n')
    assert statecli(*words).code == 0
    change_tensor("ck/optimizer.pt", "state", 3, "exp_avg")
    assert statecli(*words).code == 0
