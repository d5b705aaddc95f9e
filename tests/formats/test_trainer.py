"""Training folders of the Trainer, accelerate and peft, compared with the results of these libraries."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli import formats
from statecli.core.model_state import Evidence, Kind
from statecli.targets import load
from statecli.values.read import read_all_values

from .attacks import Call

SIZES = {
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 50,
    "max_position_embeddings": 16,
}


class Rows(torch.utils.data.Dataset):
    """Eight inputs of four tokens."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, row: int) -> dict[str, torch.Tensor]:
        return {"input_ids": torch.arange(4), "labels": torch.tensor(row % 2)}


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """The output folder of a Trainer after two steps: `checkpoint-2` and the saved model."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("run") / "out"
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=2, save_steps=2, logging_steps=1, report_to=[], use_cpu=True
    )
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=Rows())
    trainer.train()
    trainer.save_model()
    return folder


@pytest.fixture
def step(run, tmp_path) -> Path:
    """A copy of the Trainer's `checkpoint-2`."""
    return shutil.copytree(run / "checkpoint-2", tmp_path / "checkpoint-2")


@pytest.fixture(scope="module", params=[True, False], ids=["safetensors", "bin"])
def accelerate_folder(tmp_path_factory, request) -> Path:
    """A folder of `save_state` with two models, two optimizers, a scheduler and an object of the user."""
    accelerate = pytest.importorskip("accelerate")
    folder = tmp_path_factory.mktemp("state")
    accelerator = accelerate.Accelerator(cpu=True)
    models = [torch.nn.Linear(4, 3), torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))]
    optimizers = [torch.optim.AdamW(model.parameters()) for model in models]
    scheduler = torch.optim.lr_scheduler.StepLR(optimizers[0], 2)
    accelerator.prepare(*models, *optimizers, scheduler)
    accelerator.register_for_checkpointing(Average())
    models[1](models[0](torch.ones(4, 4))).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
    accelerator.save_state(str(folder), safe_serialization=request.param)
    return folder


class Average:
    """An object that a user registers for checkpoints."""

    def state_dict(self) -> dict[str, object]:
        return {"ema": {"weight": torch.full((3,), 2.0)}, "decay": 0.9}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Do nothing, because the tests only save the object."""


def read_tensors(path: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the values of each tensor by section and name."""
    state = formats.read(str(path))
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for tensor in state.tensors:
        values = torch.from_numpy(read_all_values(tensor.data).copy()).reshape(tensor.shape)
        tensors.setdefault(tensor.section, {})[tensor.fqn] = values
    return tensors


# Checkpoints of the Trainer.


def test_weights_and_moments_equal_those_of_the_libraries(step):
    """Weights agree with `from_pretrained` of transformers; optimizer and generators agree with torch.

    Each file with tensors is a section with the name of the file; arguments and schedule have no tensor.
    """
    transformers = pytest.importorskip("transformers")
    state = formats.read(str(step))
    assert (state.format, state.target) == ("trainer safetensors+torch-zip", str(step))
    assert state.sections == ("model", "optimizer", "rng_state")
    actual = read_tensors(step)
    model = transformers.BertForSequenceClassification.from_pretrained(step).state_dict()
    assert actual["model"].keys() == model.keys()
    assert all(torch.equal(actual["model"][name], value) for name, value in model.items())
    moments = torch.load(step / "optimizer.pt")["state"]
    assert len(actual["optimizer"]) == sum(map(len, moments.values()))
    for number, entries in moments.items():
        for name, value in entries.items():
            assert torch.equal(actual["optimizer"][f"state[{number}]['{name}']"], value)
    states = torch.load(step / "rng_state.pth", weights_only=False)
    assert torch.equal(actual["rng_state"]["cpu"], states["cpu"])


def test_optimizer_determines_the_parameters(step):
    """safetensors sorts its entries, so the number of tensors of each shape decides; all tensors are trained."""
    state = load.read_checkpoint(str(step))
    kinds = {(tensor.section, tensor.kind, tensor.evidence) for tensor in state.tensors}
    assert kinds == {
        ("model", Kind.PARAMETER, Evidence.OPTIMIZER),
        ("optimizer", Kind.OPTIMIZER, Evidence.OPTIMIZER),
        ("rng_state", Kind.OTHER, Evidence.CONVENTION),
    }


def test_frozen_tensors_are_not_called_trained(tmp_path):
    """Tensors with a shape that trained and frozen tensors share stay undecided; the rest has exact kinds."""
    net = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 3), "b": torch.nn.Linear(5, 3), "c": torch.nn.Linear(3, 2)})
    net["b"].bias.requires_grad_(False)
    save_file(net.state_dict(), tmp_path / "model.safetensors")
    optimizer = torch.optim.AdamW([parameter for parameter in net.parameters() if parameter.requires_grad])
    net["c"](net["a"](torch.ones(1, 4)) + net["b"](torch.ones(1, 5))).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    state = load.read_checkpoint(str(tmp_path))
    evidences_by_fqn = {tensor.fqn: tensor.evidence for tensor in state.tensors if tensor.section == "model"}
    assert evidences_by_fqn == {
        **dict.fromkeys(["a.weight", "b.weight", "c.weight", "c.bias"], Evidence.OPTIMIZER),
        **dict.fromkeys(["a.bias", "b.bias"], Evidence.ASSUMED),
    }


def test_optimizer_of_another_model_is_ignored(step):
    """The optimizer is ignored if the model lacks a shape of the optimizer."""
    net = torch.nn.Linear(7, 5)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 7)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), step / "optimizer.pt")
    assert {tensor.evidence for tensor in load.read_checkpoint(str(step)).tensors if tensor.section == "model"} == {
        Evidence.ASSUMED
    }


def test_settings_are_listed_below_their_files(step):
    """Settings of run, class, optimizer, schedule and arguments are listed under the name of their file."""
    settings = formats.read(str(step)).metadata.values
    state = json.loads((step / "trainer_state.json").read_text())
    assert {key: settings[f"trainer_state.{key}"] for key in ("global_step", "epoch", "best_metric", "max_steps")} == {
        key: state[key] for key in ("global_step", "epoch", "best_metric", "max_steps")
    }
    losses = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    start = f"{len(state['log_history'])} entries, {f'loss {losses[-1]:.4g}, ' if losses else ''}sha256 "
    assert settings["trainer_state.log_history"].startswith(start)
    assert settings["config.architectures"] == "BertForSequenceClassification"
    assert settings["config.hidden_size"] == 16
    assert settings["optimizer.param_groups.0.weight_decay"] == 0.0
    assert settings["scheduler.last_epoch"] == 2
    assert settings["training_args.max_steps"] == 2
    assert settings["format"] == "pt"


def test_diff_with_the_model_file_compares_only_the_model(step, statecli):
    """In either direction only the model is compared, with a note; two folders are compared whole."""
    for pair in ((step, step / "model.safetensors"), (step / "model.safetensors", step)):
        result = statecli("diff", *pair, "-f", "json")
        assert (result.code, result.json["summary"]["identical"]) == (0, 41)
        (note,) = (note for note in result.json["notes"] if note["name"] == "sections-left-out")
        assert note["message"].startswith("statecli did not compare optimizer, rng_state of ")
    copied_step = shutil.copytree(step, step.parent / "other")
    assert statecli("diff", step, copied_step).code == 0
    moments = torch.load(copied_step / "optimizer.pt")
    moments["state"][3]["exp_avg"].view(-1)[0] += 1
    torch.save(moments, copied_step / "optimizer.pt")
    (copied_step / "trainer_state.json").write_text('{"global_step": 3}')
    result = statecli("diff", step, copied_step, "-f", "json")
    assert {change["section"] for change in result.json["changes"]} == {"optimizer"}
    assert ("trainer_state.global_step", 2, 3) in {
        (change["key"], change["before"], change["after"]) for change in result.json["metadata"]
    }


def test_section_of_the_folder_is_selected(step, statecli):
    """`checkpoint-2#optimizer` selects a section, as in a file."""
    result = statecli("inspect", f"{step}#optimizer", "-f", "json")
    assert (result.code, result.json["sections"]) == (0, ["optimizer"])


def test_saved_model_folder_has_the_training_arguments(run):
    """The folder of the saved model has no optimizer, and does not include the folders of the steps."""
    state = formats.read(str(run))
    assert state.sections == ("model",)
    assert state.metadata.values["training_args.max_steps"] == 2


def test_model_shards_and_rank_files_are_read(step):
    """A model in shards and a generator state for each rank are parts of the checkpoint."""
    weights = {name: value.clone() for name, value in read_tensors(step)["model"].items()}
    (step / "model.safetensors").unlink()
    names = sorted(weights)
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for file, part in zip(files, (names[:20], names[20:]), strict=True):
        save_file({name: weights[name] for name in part}, step / file)
    index = {name: files[n >= 20] for n, name in enumerate(names)}
    (step / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for rank in (0, 1):
        shutil.copy(step / "rng_state.pth", step / f"rng_state_{rank}.pth")
    (step / "rng_state.pth").unlink()
    state = formats.read(str(step))
    assert state.sections == ("model", "optimizer", "rng_state_0", "rng_state_1")
    assert set(formats.members(str(step))) >= {*files, "optimizer.pt", "rng_state_1.pth", "training_args.bin"}


# Checkpoints with an unreadable part.


def test_unreadable_file_leaves_the_rest_readable(step, statecli):
    """The rest is listed; the error names the file, and the exit status is 2."""
    raw = (step / "optimizer.pt").read_bytes()
    (step / "optimizer.pt").write_bytes(raw[: len(raw) // 2])
    result = statecli("inspect", step, "-f", "json")
    assert result.code == 2
    assert result.err.count("\n") == 1
    assert result.err.startswith(f"statecli: {step / 'optimizer.pt'}: ")
    assert len([tensor for tensor in result.json["tensors"] if tensor["section"] == "model"]) == 41
    assert statecli("audit", step).code == 2
    assert statecli("lock", step, "-o", step.parent / "l.json").code == 2
    # Without a readable model there is no checkpoint.
    (step / "model.safetensors").write_bytes(b"")
    result = statecli("inspect", step)
    assert (result.code, result.err) == (2, f"statecli: {step / 'model.safetensors'}: is an empty file\n")


def test_bare_pickle_next_to_the_weights_is_noted(step, statecli):
    """A bare pickle is not an archive of torch.save; audit reports its calls."""
    (step / "random_states_0.pkl").write_bytes(pickle.dumps(Call(print, "called")))
    result = statecli("inspect", step, "-f", "json")
    assert result.code == 0
    (message,) = (note["message"] for note in result.json["notes"] if note["name"] == "companions")
    assert message.startswith("random_states_0.pkl: not read, because it is a bare pickle")
    assert "unsafe-global" in {finding["rule"] for finding in statecli("audit", step, "-f", "json").json["findings"]}


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"[]", "is not a JSON object but a JSON list"),
        (b"[" * 100_000, "has lists and objects that are nested too deeply for statecli to read"),
        (b"\xff", "is not valid UTF-8"),
    ],
    ids=["list", "deep", "bytes"],
)
def test_invalid_configuration_is_noted(step, raw, reason):
    """The weights are read without the configuration."""
    (step / "config.json").write_bytes(raw)
    state = formats.read(str(step))
    (message,) = (oddity.message for oddity in state.oddities if oddity.name == "config-unread")
    assert message.startswith(f"config.json was not read, because it {reason}")
    assert len(state.tensors) == 166


# Folders of accelerate.


def test_a_state_of_accelerate_is_read_whole(accelerate_folder):
    """Models, optimizers, generators and the object of the user are read."""
    state = load.read_checkpoint(str(accelerate_folder))
    assert state.sections == (
        "model",
        "model_1",
        "custom_checkpoint_0.ema",
        "optimizer",
        "optimizer_1",
        "random_states_0",
    )
    kinds = {(tensor.section, tensor.fqn): (tensor.kind, tensor.evidence) for tensor in state.tensors}
    assert kinds["model", "weight"] == (Kind.PARAMETER, Evidence.OPTIMIZER)
    assert kinds["model_1", "0.weight"] == (Kind.PARAMETER, Evidence.OPTIMIZER)
    assert kinds["model_1", "1.running_mean"] == (Kind.BUFFER, Evidence.CONVENTION)
    assert kinds["random_states_0", "torch_manual_seed"] == (Kind.OTHER, Evidence.CONVENTION)
    tensors = read_tensors(accelerate_folder)
    assert torch.equal(tensors["custom_checkpoint_0.ema"]["weight"], torch.full((3,), 2.0))
    moments = torch.load(accelerate_folder / "optimizer_1.bin")["state"][0]["exp_avg"]
    assert torch.equal(tensors["optimizer_1"]["state[0]['exp_avg']"], moments)
    assert state.metadata.values["scheduler.step_size"] == 2
    assert state.metadata.values["custom_checkpoint_0.decay"] == 0.9


def test_audit_of_training_folders_is_clean(step, accelerate_folder, statecli):
    """Folders of the Trainer and of accelerate have no findings, also not about values."""
    for folder in (step, accelerate_folder):
        result = statecli("audit", folder, "--values", "-f", "json")
        assert (result.code, result.json["findings"]) == (0, [])


# Shards of FSDP.


@pytest.fixture(scope="module")
def fsdp_run(tmp_path_factory) -> Path:
    """A folder with `checkpoint-2` of the Trainer under FSDP with SHARDED_STATE_DICT, and the same tensors in files."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

    net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    net(torch.ones(4, 4)).sum().backward()
    optimizer.step()
    root = tmp_path_factory.mktemp("fsdp")
    folder = root / "checkpoint-2"
    folder.mkdir()
    for name, state in (
        ("pytorch_model_fsdp_0", {"model": get_model_state_dict(net)}),
        ("optimizer_0", {"optimizer": get_optimizer_state_dict(net, optimizer)}),
    ):
        checkpoint.save(state, storage_writer=checkpoint.FileSystemWriter(folder / name))
    torch.save(schedule.state_dict(), folder / "scheduler.pt")
    for rank in (0, 1):
        torch.save({"cpu": torch.get_rng_state()}, folder / f"rng_state_{rank}.pth")
    (folder / "trainer_state.json").write_text('{"global_step": 2}')
    save_file(net.state_dict(), root / "model.safetensors")
    torch.save(optimizer.state_dict(), root / "optimizer.pt")
    return root


@pytest.fixture
def fsdp_folder(fsdp_run, tmp_path) -> Path:
    """A copy of the checkpoint, next to the same tensors in files."""
    return shutil.copytree(fsdp_run, tmp_path / "fsdp") / "checkpoint-2"


def test_fsdp_shard_folders_are_sections(fsdp_folder):
    """Folders of shards are sections; the optimizer names its parameters, and settings have their usual keys."""
    state = load.read_checkpoint(str(fsdp_folder))
    assert state.format == "trainer dcp+torch-zip"
    assert state.sections == ("model", "optimizer", "rng_state_0", "rng_state_1")
    kinds = {tensor.fqn: (tensor.kind, tensor.evidence) for tensor in state.tensors if tensor.section == "model"}
    assert kinds["0.weight"] == (Kind.PARAMETER, Evidence.OPTIMIZER)
    assert kinds["1.running_mean"] == (Kind.BUFFER, Evidence.CONVENTION)
    assert state.metadata.values["optimizer.param_groups.0.lr"] == 0.01
    assert state.metadata.values["scheduler.step_size"] == 2
    assert state.metadata.values["trainer_state.global_step"] == 2
    tensors = read_tensors(fsdp_folder)
    moments = torch.load(fsdp_folder.parent / "optimizer.pt")["state"]
    for number, name in enumerate(["0.weight", "0.bias", "1.weight", "1.bias", "2.weight", "2.bias"]):
        for key in ("step", "exp_avg", "exp_avg_sq"):
            assert torch.equal(tensors["optimizer"][f"state['{name}']['{key}']"], moments[number][key])


def test_fsdp_folder_equals_the_weights_in_one_file(fsdp_folder, statecli):
    """The folder with the files in its folders is a single target of diff, lock and audit."""
    assert statecli("diff", fsdp_folder, fsdp_folder.parent / "model.safetensors").code == 0
    assert set(formats.members(str(fsdp_folder))) == {
        *(
            f"{name}/{file}"
            for name in ("pytorch_model_fsdp_0", "optimizer_0")
            for file in (".metadata", "__0_0.distcp")
        ),
        *("scheduler.pt", "rng_state_0.pth", "rng_state_1.pth"),
    }
    lock = fsdp_folder.parent / "l.json"
    assert statecli("lock", fsdp_folder, "-o", lock).code == 0
    result = statecli("audit", fsdp_folder, "--values", "--lock", lock, "-f", "json")
    assert (result.code, result.json["findings"]) == (0, [])
    assert len([target for target in result.json["targets"] if target["status"] != "skipped"]) == 1


def test_further_models_of_fsdp_are_numbered(fsdp_folder):
    """Models are numbered like in accelerate; an empty folder with the name of an optimizer is ignored."""
    shutil.copytree(fsdp_folder / "pytorch_model_fsdp_0", fsdp_folder / "pytorch_model_fsdp_1")
    shutil.copytree(fsdp_folder / "optimizer_0", fsdp_folder / "optimizer_1")
    (fsdp_folder / "optimizer_2").mkdir()
    state = formats.read(str(fsdp_folder))
    assert state.sections[:4] == ("model", "model_1", "optimizer", "optimizer_1")
    assert state.metadata.values["optimizer_1.param_groups.0.lr"] == 0.01


def test_weight_file_next_to_fsdp_shards_is_the_model(fsdp_folder):
    """The file is the model, and a note names the shards next to the file."""
    shutil.copy(fsdp_folder.parent / "model.safetensors", fsdp_folder)
    state = formats.read(str(fsdp_folder))
    assert (state.format, state.sections[:2]) == ("trainer safetensors+dcp+torch-zip", ("model", "optimizer"))
    messages = [oddity.message for oddity in state.oddities if oddity.name == "other-weights"]
    assert messages == ["statecli did not read other weights in the same folder: pytorch_model_fsdp_0"]


def test_a_whole_model_of_fsdp_is_one_file(fsdp_folder):
    """FULL_STATE_DICT writes `pytorch_model_fsdp.bin`, with a number from the second model on."""
    shutil.rmtree(fsdp_folder / "pytorch_model_fsdp_0")
    for name in ("pytorch_model_fsdp.bin", "pytorch_model_fsdp_1.bin"):
        torch.save({"w": torch.ones(2)}, fsdp_folder / name)
    assert formats.read(str(fsdp_folder)).sections[:3] == ("model", "model_1", "optimizer")


@pytest.mark.parametrize("part", ["pytorch_model_fsdp_0", "optimizer_0"], ids=["model", "optimizer"])
def test_missing_fsdp_shard_is_named_in_one_line(fsdp_folder, statecli, part):
    """The error line names the folder and the file; tensors keep their shapes, and the rest is listed."""
    (fsdp_folder / part / "__0_0.distcp").unlink()
    result = statecli("inspect", fsdp_folder, "-f", "json")
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert result.err.startswith(f"statecli: {fsdp_folder / part}: ")
    assert ": __0_0.distcp is missing: 0 of the 1 files that .metadata lists exist" in result.err
    shapes = [tensor["shape"] for tensor in result.json["tensors"] if tensor["section"] == "model"]
    assert (len(shapes), None in shapes) == (9, False)


# Adapters.


def test_an_adapter_names_its_base_model(tmp_path, statecli):
    """Names are as saved by peft; the heading has the base model, rank and targets, in a fixed order."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    base = transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES))
    base.save_pretrained(tmp_path / "base")
    base = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "base")
    adapted = peft.get_peft_model(base, peft.LoraConfig(r=4, lora_alpha=8, target_modules=["value", "query"]))
    adapted.save_pretrained(tmp_path / "adapter")
    state = formats.read(str(tmp_path / "adapter"))
    expected_tensors = peft.get_peft_model_state_dict(adapted)
    model = read_tensors(tmp_path / "adapter")["model"]
    assert model.keys() == expected_tensors.keys()
    assert all(torch.equal(model[name], value) for name, value in expected_tensors.items())
    expected = {
        "base_model_name_or_path": str(tmp_path / "base"),
        "peft_type": "LORA",
        "r": 4,
        "lora_alpha": 8,
        "target_modules": "query, value",
    }
    assert {key: state.metadata.values[f"adapter_config.{key}"] for key in expected} == expected
    text = statecli("inspect", tmp_path / "adapter", "-f", "markdown").out.replace("\\", "")
    assert "r=4, lora_alpha=8, target_modules=query, value" in text
    assert f"adapter (LORA) of base model {tmp_path / 'base'}" in text


# Model folders.


def test_unread_weights_in_the_folder_are_noted(tmp_path):
    """The note lists weights for any framework."""
    save_file({"w": torch.ones(1)}, tmp_path / "model.safetensors")
    torch.save({"w": torch.ones(1)}, tmp_path / "pytorch_model.bin")
    for name in ("flax_model.msgpack", "tf_model.h5"):
        (tmp_path / name).write_bytes(b"x")
    (oddity,) = formats.read(str(tmp_path)).oddities
    assert (
        oddity.message
        == "statecli did not read other weights in the same folder: flax_model.msgpack, pytorch_model.bin, tf_model.h5"
    )


def test_folder_with_only_keras_weights_is_refused(tmp_path, line):
    """statecli does not read Keras weights."""
    (tmp_path / "tf_model.h5").write_bytes(b"x")
    expected = "is a folder with only weights of other frameworks, which statecli does not read: tf_model.h5"
    assert line(tmp_path) == expected


def test_diff_with_a_weight_file_ignores_the_config(tmp_path, statecli):
    """A weight file has no settings of config.json, so only a diff of two folders compares them."""
    for folder, act in (("one", "gelu"), ("two", "relu")):
        (tmp_path / folder).mkdir()
        save_file({"w": torch.ones(1)}, tmp_path / folder / "model.safetensors")
        config = {"architectures": ["A"], "hidden_act": act, "quantization_config": {"quant_method": "fp8"}}
        (tmp_path / folder / "config.json").write_text(json.dumps(config))
    assert statecli("diff", tmp_path / "one", tmp_path / "one" / "model.safetensors").code == 0
    assert statecli("diff", tmp_path / "one" / "model.safetensors", tmp_path / "two").code == 0
    result = statecli("diff", tmp_path / "one", tmp_path / "two", "-f", "json")
    assert [change["key"] for change in result.json["metadata"]] == ["config.hidden_act"]
    assert formats.read(str(tmp_path / "one")).metadata.values["config.quantization_config.quant_method"] == "fp8"
