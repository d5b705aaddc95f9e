"""The callbacks: real trainings with the Trainer of transformers and of Lightning, and the check used by both."""

from __future__ import annotations

import warnings
from collections import OrderedDict

import pytest
import torch
from torch import nn

from statecli.callbacks import training_check
from statecli.callbacks.training_check import StatecliWarning, TrainingCheck


@pytest.fixture(autouse=True)
def _hide_warnings(monkeypatch):
    """A finding is asserted, not shown."""
    warnings.simplefilter("ignore")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def build():
    return nn.Sequential(
        OrderedDict(base=nn.Linear(3, 3), norm=nn.BatchNorm1d(3), adapter=nn.Linear(3, 3), head=nn.Linear(3, 1))
    )


def error(output):
    """A loss whose gradients are larger than rounding noise."""
    return (output - torch.randn_like(output) * 3).square().mean()


def train(model, optimizer, steps=1, loss=lambda model: error(model(torch.randn(4, 3)))):
    """The lines reported over some steps."""
    check = TrainingCheck(fail=False)
    check.start(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        check.record_rates([optimizer])
        optimizer.step()
        check.finish_step(model)
    check.finish(model)
    return check.findings


def test_a_sound_training_reports_nothing():
    """Every trainable parameter got an update; running statistics of a trained module may move."""
    model = build()
    assert train(model, torch.optim.AdamW(model.parameters(), 0.1), 3) == []


def test_a_module_that_the_optimizer_lacks_is_named_once():
    """The whole module by a glob."""
    model = build()
    others = [p for name, p in model.named_parameters() if not name.startswith("adapter")]
    assert train(model, torch.optim.AdamW(others, 0.1)) == ["adapter.* got no update: not in the optimizer"]


def test_lazy_parameters_do_not_end_the_training():
    """A parameter without a shape is not in the snapshot, so nothing is reported about its update."""
    model = nn.Sequential(nn.Linear(3, 3), nn.LazyLinear(1))
    assert train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2) == []


def test_a_module_without_a_gradient_is_named():
    """Forward does not use the module."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    lines = train(model, optimizer, loss=lambda m: error(m.head(m.norm(m.base(torch.randn(4, 3))))))
    assert lines == ["adapter.* got no update: no gradient in step 1"]


def test_experts_that_take_turns_are_not_a_finding():
    """Each step trains another module, so the first step gives the other modules no gradient."""
    model = nn.ModuleList(nn.Linear(3, 3) for _ in range(4))
    turns = iter([0, 1, 2, 0, 1])
    lines = train(
        model, torch.optim.SGD(model.parameters(), 0.1), 5, lambda m: error(m[next(turns)](torch.randn(4, 3)))
    )
    assert lines == ["3.* got no update: no gradient in 5 steps"]


def test_frozen_parameters_that_move_are_named():
    """Weight decay of an old optimizer changes frozen parameters; a normalization in training mode changes buffers."""
    model = build()
    model.norm.requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def loss(model):
        with torch.no_grad():
            model.norm.weight += 1
        return error(model(torch.randn(4, 3)))

    moved, buffers = train(model, optimizer, loss=loss)
    assert moved == "norm.weight changed, although these parameters are frozen"
    assert buffers.startswith("norm.*: these buffers of a frozen module changed; call .eval()")
    model.norm.eval()
    assert train(model, optimizer) == []


class Nested(nn.Module):
    """A model in the attribute `net` of another module, as trainers wrap models."""

    def __init__(self) -> None:
        super().__init__()
        self.net = build()

    def forward(self, data):
        return self.net(data)


def find_moved_buffers(model):
    """The lines about buffers, after a step of all trainable parameters."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [line for line in train(model, torch.optim.SGD(trainable, 0.1)) if "these buffers" in line]


def test_finding_about_moved_buffers_names_only_the_frozen_module():
    """`net` has trainable parameters, so `.eval()` belongs to `net.norm`."""
    model = Nested()
    model.net.norm.requires_grad_(requires_grad=False)
    (line,) = find_moved_buffers(model)
    assert line == "net.norm.*: these buffers of a frozen module changed; call .eval() on the module"


def test_moved_buffers_name_the_whole_frozen_module():
    """One glob names a module whose parameters are all frozen; modules in evaluation mode are not named."""
    model = Nested()
    model.net = nn.Sequential(OrderedDict(frozen=build()[:3], calm=nn.BatchNorm1d(3), head=nn.Linear(3, 1)))
    model.net[:2].requires_grad_(requires_grad=False)
    model.net.calm.eval()
    (line,) = find_moved_buffers(model)
    assert line.startswith("net.frozen.*: ")


def test_zero_learning_rate_in_warmup_is_not_a_finding():
    """A scheduler often begins at zero: the check waits for the first update."""
    model = build()
    optimizer = torch.optim.AdamW(model.parameters(), 0.0)
    calls = []

    def loss(model):
        calls.append(None)
        optimizer.param_groups[0]["lr"] = 0.0 if len(calls) < 3 else 0.1
        return error(model(torch.randn(4, 3)))

    assert train(model, optimizer, 4, loss) == []
    optimizer.param_groups[0]["lr"] = 0.0
    assert train(model, optimizer, 2) == [
        "no parameter got an update in 2 steps: the gradient or the learning rate is zero or too small"
    ]


def test_lora_factor_without_a_gradient_in_step_1_is_not_a_finding():
    """B is zero at first, so the gradient of A is zero too; in step 2 the gradient is not zero."""
    model = nn.ParameterDict({"A": torch.randn(2, 3), "B": torch.zeros(3, 2)})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def loss(m):
        return (torch.randn(4, 3) @ m["A"].T @ m["B"].T - 1).square().mean()

    assert train(model, optimizer, 2, loss) == []
    model["B"].data.zero_()
    assert train(model, optimizer, 1, loss) == [
        "A got no update in step 1: the gradient or the learning rate is zero or too small"
    ]


def test_an_update_that_rounding_removes_is_named():
    """bfloat16 has 8 bits: 1 + 1e-4 is 1."""
    model = nn.ParameterDict({"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros(3)})
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    lines = train(model, optimizer, loss=lambda m: (m["a"].sum() + m["b"].sum()) ** 2)
    assert lines == ["a got no update: the update is too small for the precision of bfloat16"]


def test_updates_that_are_all_rounded_away_are_not_called_zero():
    """The learning rate and the gradients are small numbers."""
    model = nn.ParameterDict({"a": torch.ones(3, dtype=torch.bfloat16)})
    lines = train(model, torch.optim.SGD(model.parameters(), 1e-4), loss=lambda m: m["a"].sum() ** 2)
    assert lines == ["no parameter got an update in step 1: the gradient or the learning rate is zero or too small"]


def test_a_finding_warns_or_raises():
    """`fail=True` ends the training."""
    with pytest.warns(StatecliWarning, match="statecli: adapter"):
        TrainingCheck(fail=False).report(["adapter.* got no update"])
    with pytest.raises(AssertionError, match="statecli: adapter"):
        TrainingCheck(fail=True).report(["adapter.* got no update"])


def test_joined_globs_match_exactly_the_names():
    """`a.*` stands for all names of `a`, and `a.b.*` for a part of them."""
    join = training_check._join_globs
    names = ["a.w", "a.b.w", "a.b.v", "c"]
    assert join({"a.w", "a.b.w", "a.b.v"}, names) == "a.*"
    assert join({"a.b.w", "a.b.v", "c"}, names) == "a.b.*, c"
    assert join({"a.b.w"}, names) == "a.b.w"


# --- files ----------------------------------------------------------------------------------------------------------


def test_a_saved_file_is_compared_with_the_model(tmp_path):
    """Three cases: a missing tensor, a changed value, and a complete file."""
    model = build()
    state = model.state_dict()
    torch.save(state, tmp_path / "a.pt")
    check = TrainingCheck(fail=False)
    check.check_file(str(tmp_path / "a.pt"), model)
    assert check.findings == []
    damaged_state = {name: tensor.clone() for name, tensor in state.items() if not name.startswith("head")}
    damaged_state["base.bias"] += 1
    torch.save(damaged_state, tmp_path / "b.pt")
    check.check_file(str(tmp_path / "b.pt"), model)
    assert check.findings == [
        f"head.*: missing in {tmp_path / 'b.pt'}",
        f"base.bias: differs between {tmp_path / 'b.pt'} and the model",
    ]
    check.check_file(str(tmp_path / "c.pt"), model)
    assert check.findings[-1].startswith("cannot check the saved file: ")


# --- transformers ---------------------------------------------------------------------------------------------------


def train_with_transformers(folder, spoil, trial="", **arguments):
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    from statecli.callbacks.transformers import StatecliCallback

    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16, n_positions=8)
    model = transformers.GPT2LMHeadModel(config)
    callback = StatecliCallback(**arguments)
    extra = spoil(model, transformers) or []
    options = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=3, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        learning_rate=0.01, warmup_steps=1, per_device_train_batch_size=2,
    )  # fmt: skip
    ids = torch.arange(8) % 16
    data = [{"input_ids": ids, "labels": ids}] * 8
    trainer = transformers.Trainer(model, options, train_dataset=data, callbacks=[*extra, callback])
    if trial:  # as in a trial of `hyperparameter_search`
        trainer._get_output_dir = lambda *_, **__: str(folder / trial)
        save = trainer._save_checkpoint

        def save_trial(*words, **options):
            trainer.state.is_hyper_param_search = True
            save(*words, **options)

        trainer._save_checkpoint = save_trial
    trainer.train()
    return callback.check.findings


def test_transformers_trains_without_a_finding(tmp_path):
    """The learning rate is zero in step 1, the file has tied weights once, and the trainer saves."""
    assert train_with_transformers(tmp_path, lambda model, _: None) == []


def test_transformers_finds_the_files_of_a_search_for_hyperparameters(tmp_path):
    """Each trial saves in a folder of its own."""
    assert train_with_transformers(tmp_path, lambda model, _: None, trial="run-7") == []
    assert (tmp_path / "run-7" / "checkpoint-2").is_dir()


def test_transformers_with_a_frozen_module_that_moves(tmp_path):
    """A callback of the user changes the frozen module."""

    def spoil(model, transformers):
        model.transformer.ln_f.requires_grad_(False)

        class Moves(transformers.TrainerCallback):
            def on_pre_optimizer_step(self, args, state, control, **_):
                model.transformer.ln_f.weight.data += 1
                model.transformer.ln_f.bias.data += 1

        return [Moves()]

    assert train_with_transformers(tmp_path, spoil) == [
        "transformer.ln_f.* changed, although these parameters are frozen"
    ]


def test_transformers_with_a_file_that_lacks_a_tensor(tmp_path):
    """The save of the model drops a tensor, and the training ends with `fail=True`."""

    def spoil(model, _):
        save = model.save_pretrained

        def save_less(folder, state_dict=None, **options):
            state = dict(state_dict or model.state_dict())
            state["transformer.ln_f.bias"] = state["transformer.ln_f.bias"] + 1
            save(folder, state_dict=state, **options)

        model.save_pretrained = save_less

    lines = train_with_transformers(tmp_path, spoil)
    assert [line.replace(str(tmp_path), "") for line in lines] == [
        f"transformer.ln_f.bias: differs between /checkpoint-{step}/model.safetensors and the model" for step in (2, 3)
    ]
    with pytest.raises(AssertionError, match=r"transformer\.ln_f\.bias"):
        train_with_transformers(tmp_path / "b", spoil, fail=True)


# --- Lightning ------------------------------------------------------------------------------------------------------


def train_with_lightning(
    folder, trained=lambda module: module.parameters(), *, saves=None, max_steps=4, resume_from=None, **hooks
):
    lightning = pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import ModelCheckpoint

    from statecli.callbacks.lightning import StatecliCallback

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = build()

        def training_step(self, batch, _):
            self.log("step", float(self.trainer.global_step))
            return self.net(batch).square().mean()

        def configure_optimizers(self):
            return torch.optim.AdamW(trained(self), 0.1)

    for name, hook in hooks.items():
        setattr(Module, name, hook)
    callback = StatecliCallback()
    checkpoints = ModelCheckpoint(**{"dirpath": folder, "every_n_train_steps": 2, "save_last": True} | (saves or {}))
    trainer = lightning.Trainer(
        max_steps=max_steps, accelerator="cpu", logger=False, callbacks=[callback, checkpoints],
        enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    data = torch.utils.data.DataLoader(torch.randn(16, 3), batch_size=4)
    trainer.fit(Module(), data, ckpt_path=resume_from)
    assert list(folder.glob("*.ckpt"))
    return callback


def test_lightning_trains_without_a_finding(tmp_path):
    """All files were compared."""
    callback = train_with_lightning(tmp_path)
    assert callback.check.findings == []
    assert {path.rpartition("/")[2] for path in callback._checked} >= {"last.ckpt"}


def test_lightning_with_a_module_outside_the_optimizer(tmp_path):
    """`configure_optimizers` may list modules by hand and forget a module."""
    callback = train_with_lightning(
        tmp_path, lambda module: [p for name, p in module.named_parameters() if "adapter" not in name]
    )
    assert callback.check.findings == ["net.adapter.* got no update: not in the optimizer"]


def test_lightning_with_a_hook_that_drops_a_tensor(tmp_path):
    """`on_save_checkpoint` of the module changes the state_dict before it is written."""

    def drop(self, checkpoint):
        del checkpoint["state_dict"]["net.head.bias"]

    findings = train_with_lightning(tmp_path, on_save_checkpoint=drop).check.findings
    assert findings
    assert all(line.startswith("net.head.bias: missing in ") for line in findings)


def test_lightning_waits_for_the_step_of_each_optimizer(tmp_path):
    """A GAN may train its generator only after several steps of its discriminator."""

    def training_step(self, batch, number):
        first, second = self.optimizers()
        for optimizer, is_due in ((second, True), (first, number % 2 == 1)):
            if is_due:
                optimizer.zero_grad()
                self.manual_backward(error(self.net(batch)))
                optimizer.step()

    def configure_optimizers(self):
        self.automatic_optimization = False
        head = self.net.head.parameters()
        others = [p for name, p in self.net.named_parameters() if "head" not in name]
        return [torch.optim.AdamW(others, 0.1), torch.optim.AdamW(head, 0.1)], []

    hooks = {"training_step": training_step, "configure_optimizers": configure_optimizers}
    assert train_with_lightning(tmp_path, **hooks).check.findings == []


def test_lightning_does_not_compare_the_files_of_an_earlier_fit(tmp_path):
    """`ModelCheckpoint` restores the path of the best file, which has the values of an earlier step."""
    best = {"monitor": "step", "mode": "min"}
    train_with_lightning(tmp_path, saves=best)
    callback = train_with_lightning(tmp_path, saves=best, max_steps=8, resume_from=tmp_path / "last.ckpt")
    assert callback.check.findings == []


def test_lightning_compares_a_file_that_is_not_the_best(tmp_path):
    """Every new file of `ModelCheckpoint(save_top_k=3)` is compared."""

    def drop(self, checkpoint):
        if self.trainer.global_step == 4:
            del checkpoint["state_dict"]["net.head.bias"]

    saves = {"monitor": "step", "mode": "min", "save_top_k": 3, "save_last": False}
    (line,) = train_with_lightning(tmp_path, saves=saves, on_save_checkpoint=drop).check.findings
    assert line.startswith("net.head.bias: missing in ")


def test_lightning_runs_next_to_a_checkpoint_callback_without_a_best_file(tmp_path):
    """`OnExceptionCheckpoint` is a checkpoint callback, and names no files."""
    pytest.importorskip("lightning")
    from lightning.pytorch.callbacks import OnExceptionCheckpoint

    callback = train_with_lightning(tmp_path, configure_callbacks=lambda _: [OnExceptionCheckpoint(tmp_path)])
    assert callback.check.findings == []


def run_accelerator(tmp_path, make_optimizer, freeze=(), change=lambda model: None):
    """Two steps with accelerate's own Accelerator, and a save; the findings."""
    accelerate = pytest.importorskip("accelerate")
    from statecli.callbacks.accelerate import StatecliTracker

    model = build()
    for name in freeze:
        model.get_submodule(name).requires_grad_(False)
    optimizer = make_optimizer(model)
    tracker = StatecliTracker(model, optimizer)
    accelerator = accelerate.Accelerator(log_with=tracker, cpu=True)
    prepared, prepared_optimizer = accelerator.prepare(model, optimizer)
    accelerator.init_trackers("run", config={"lr": 0.1})
    for step in range(2):
        accelerator.backward(error(prepared(torch.randn(4, 3))))
        prepared_optimizer.step()
        prepared_optimizer.zero_grad()
        accelerator.log({"loss": 1.0}, step=step)
    accelerator.save_state(str(tmp_path / "saved"))
    change(model)
    tracker.check_saved(tmp_path / "saved")
    accelerator.end_training()
    accelerator.free_memory()
    return tracker.check.findings


def test_accelerate_reports_nothing_for_a_sound_training(tmp_path):
    """The tracker hears of each step from the optimizer, and the saved file holds the model."""
    assert run_accelerator(tmp_path, lambda model: torch.optim.AdamW(model.parameters(), 0.1)) == []


def test_accelerate_names_untrained_and_differing_tensors(tmp_path):
    """The optimizer lacks a module, and the value of a tensor in the file differs from the model."""

    def make_optimizer(model):
        return torch.optim.AdamW([p for name, p in model.named_parameters() if not name.startswith("adapter")], 0.1)

    accelerator = run_accelerator(tmp_path, make_optimizer, change=lambda model: model.head.bias.data.add_(1))
    assert accelerator[0] == "adapter.* got no update: not in the optimizer"
    assert accelerator[1:] == [f"head.bias: differs between {tmp_path}/saved/model.safetensors and the model"]


def test_accelerate_waits_for_the_step_of_each_optimizer():
    """The order of the optimizers in the tracker need not be the order of their steps."""
    pytest.importorskip("accelerate")
    from statecli.callbacks.accelerate import StatecliTracker

    model = build()
    head = torch.optim.AdamW(model.head.parameters(), 0.1)
    others = torch.optim.AdamW([p for name, p in model.named_parameters() if "head" not in name], 0.1)
    for optimizers in ((head, others), (others, head)):
        tracker = StatecliTracker(model, *optimizers)
        tracker.start()
        for optimizer in (head, others):
            model.zero_grad()
            error(model(torch.randn(4, 3))).backward(inputs=optimizer.param_groups[0]["params"])
            optimizer.step()
        tracker.finish()
        assert tracker.check.findings == []
