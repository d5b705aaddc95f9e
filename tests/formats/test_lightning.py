"""Lightning's own checkpoint: sections have its names, and two optimizers together give the kinds of the weights."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from statecli import formats
from statecli.core.model_state import Evidence, Kind
from statecli.core.parameter_or_buffer import classify_tensors
from statecli.values.read import read_all_values


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Checkpoint of a generator and a discriminator after an epoch, with early stopping and averaged weights."""
    lightning = pytest.importorskip("lightning")
    callbacks = pytest.importorskip("lightning.pytorch.callbacks")
    if not hasattr(callbacks, "EMAWeightAveraging"):
        pytest.skip("needs a newer Lightning: averages of weights")

    class Net(lightning.LightningModule):
        def __init__(self, hidden: int = 8, act: str = "gelu"):
            super().__init__()
            self.save_hyperparameters()
            self.automatic_optimization = False
            self.gen = nn.Sequential(nn.Linear(4, hidden), nn.BatchNorm1d(hidden), nn.Linear(hidden, 4))
            self.disc = nn.Linear(4, 1)

        def training_step(self, batch, _):
            for optimizer in self.optimizers():
                loss = self.disc(self.gen(batch[0])).mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            self.log("loss", loss)

        def configure_optimizers(self):
            first, second = torch.optim.AdamW(self.gen.parameters()), torch.optim.SGD(self.disc.parameters(), 0.1, 0.9)
            return [first, second], [torch.optim.lr_scheduler.StepLR(first, 1)]

    out = tmp_path_factory.mktemp("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    saving = callbacks.ModelCheckpoint(out, filename="one", monitor="loss")
    other_callbacks = [
        callbacks.EMAWeightAveraging(decay=0.9),
        callbacks.EarlyStopping("loss", check_on_train_epoch_end=True),
    ]
    quiet_options = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_epochs=1, accelerator="cpu", default_root_dir=out, callbacks=[saving, *other_callbacks], **quiet_options
        )
        data = torch.utils.data.TensorDataset(torch.randn(16, 4))
        trainer.fit(Net(), torch.utils.data.DataLoader(data, 8))
    return out / "one.ckpt"


def test_sections_have_the_names_of_lightning(checkpoint):
    """Each section has the values that torch.load finds under its name."""
    state = formats.read(str(checkpoint))
    models = ["state_dict", "current_model_state"]
    assert {*models, "optimizer_states.0", "optimizer_states.1", "callbacks"} <= set(state.sections)
    loaded = torch.load(checkpoint, weights_only=False)
    for name in models:
        rows = {tensor.fqn: tensor for tensor in state.tensors if tensor.section == name}
        assert list(rows) == list(loaded[name])
        for fqn, tensor in loaded[name].items():
            assert torch.equal(torch.from_numpy(read_all_values(rows[fqn].data)).reshape(tensor.shape), tensor)


def test_both_optimizers_determine_the_parameters(checkpoint):
    """A single optimizer trains too little of the model to be evidence; the averages get the same kinds."""
    state = classify_tensors(formats.read(str(checkpoint)))
    for name in ("state_dict", "current_model_state"):
        rows = {tensor.fqn: tensor for tensor in state.tensors if tensor.section == name}
        learned = {fqn for fqn, tensor in rows.items() if tensor.kind is Kind.PARAMETER}
        assert learned == {"gen.0.weight", "gen.0.bias", "gen.1.weight", "gen.1.bias", "gen.2.weight", "gen.2.bias"} | {
            "disc.weight",
            "disc.bias",
        }
        assert {rows[fqn].evidence for fqn in learned} == {Evidence.OPTIMIZER}


def test_settings_have_hyper_parameters_and_version(checkpoint):
    """The settings have the epoch, Lightning's version and the hyper-parameters."""
    metadata = formats.read(str(checkpoint)).metadata.values
    assert metadata["hyper_parameters.hidden"] == 8
    assert metadata["hyper_parameters.act"] == "gelu"
    assert metadata["pytorch-lightning_version"]


def test_metadata_file_next_to_shards_is_noted(tmp_path):
    """Saved in shards, the checkpoint is a folder: the epoch and the hyper_parameters are in a separate file."""
    file = pytest.importorskip("lightning.fabric.strategies.fsdp")._METADATA_FILENAME
    dcp.save({"state_dict": {"w": torch.ones(3)}}, checkpoint_id=tmp_path / "a.ckpt", no_dist=True)
    assert not formats.read(str(tmp_path / "a.ckpt")).oddities
    torch.save({"epoch": 1, "hyper_parameters": {"h": 3}}, tmp_path / "a.ckpt" / file)
    (oddity,) = formats.read(str(tmp_path / "a.ckpt")).oddities
    assert (oddity.name, file in oddity.message) == ("unread-settings", True)
    assert formats.read(str(tmp_path / "a.ckpt" / file)).metadata.values["hyper_parameters.h"] == 3


def test_audit_of_a_checkpoint_is_clean(statecli, checkpoint):
    """The audit includes values and pickles."""
    assert statecli("audit", str(checkpoint), "--values").code == 0
