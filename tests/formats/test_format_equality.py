"""The same weights in every format that can store them: no difference, and the same lock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import save_file
from torch.distributed import checkpoint

from statecli import formats

from .test_gguf import write_gguf


def weights() -> dict[str, torch.Tensor]:
    """Return the weights of a small model in types that every format stores; the integers are exact as floats too."""
    generator = torch.Generator().manual_seed(7)
    return {
        "embed.weight": torch.randn(11, 8, generator=generator),
        "layers.0.norm.weight": torch.randn(8, generator=generator),
        "layers.0.proj.weight": torch.randn(16, 8, generator=generator).half(),
        "layers.0.proj.bias": torch.randn(16, generator=generator).half(),
        "scale": torch.tensor(3.5),
        "steps": torch.arange(6, dtype=torch.int64).reshape(2, 3),
    }


def safetensors(folder: Path) -> Path:
    """Write the safetensors file that the other formats are compared with."""
    save_file(weights(), folder / "model.safetensors")
    return folder / "model.safetensors"


def torch_zip(folder: Path) -> Path:
    """Save with `torch.save` of torch 1.6 or later."""
    torch.save(weights(), folder / "model.pt")
    return folder / "model.pt"


def torch_legacy(folder: Path) -> Path:
    """Save in the format of `torch.save` before torch 1.6."""
    torch.save(weights(), folder / "legacy.pt", _use_new_zipfile_serialization=False)
    return folder / "legacy.pt"


def write_deepspeed(folder: Path) -> Path:
    """Write a DeepSpeed folder with the model and without the optimizer's states."""
    (folder / "global_step1").mkdir()
    (folder / "latest").write_text("global_step1")
    torch.save({"module": weights()}, folder / "global_step1" / "mp_rank_00_model_states.pt")
    return folder


def dcp(folder: Path) -> Path:
    """Save with `torch.distributed.checkpoint.save` in a single process."""
    checkpoint.save(weights(), checkpoint_id=folder, no_dist=True)
    return folder


def gguf(folder: Path) -> Path:
    """Write a file that llama.cpp loads."""
    return write_gguf(folder / "model.gguf", {name: tensor.numpy() for name, tensor in weights().items()})


def dcp_safetensors(folder: Path) -> Path:
    """Write the shard of a single rank of `HuggingFaceStorageWriter`."""
    writer = checkpoint.HuggingFaceStorageWriter(str(folder), save_distributed=True)
    checkpoint.save(weights(), storage_writer=writer, no_dist=True)
    return folder


def npz(folder: Path) -> Path:
    """Save with `numpy.savez`."""
    numpy.savez(folder / "model.npz", **{name: tensor.numpy() for name, tensor in weights().items()})
    return folder / "model.npz"


def npz_deflated(folder: Path) -> Path:
    """Save with `numpy.savez_compressed`, in Fortran order where the order matters."""
    arrays = {name: tensor.numpy().copy("F") for name, tensor in weights().items()}
    numpy.savez_compressed(folder / "packed.npz", **arrays)
    return folder / "packed.npz"


def flax_msgpack(folder: Path) -> Path:
    """Save nested maps with `flax.serialization.to_bytes`."""
    library = pytest.importorskip("flax.serialization")
    tree: dict[str, Any] = {}
    for name, tensor in weights().items():
        *path, last = name.split(".")
        inner = tree
        for part in path:
            inner = inner.setdefault(part, {})
        inner[last] = tensor.numpy()
    (folder / "model.msgpack").write_bytes(library.to_bytes(tree))
    return folder / "model.msgpack"


def build_nested_module() -> torch.nn.Module:
    """Return a module whose state_dict is `weights()`."""
    root = torch.nn.Module()
    for name, tensor in weights().items():
        *path, last = name.split(".")
        module = root
        for part in path:
            if not hasattr(module, part):
                module.add_module(part, torch.nn.Module())
            module = getattr(module, part)
        if tensor.is_floating_point():
            module.register_parameter(last, torch.nn.Parameter(tensor))
        else:
            module.register_buffer(last, tensor)
    return root


def torchscript(folder: Path) -> Path:
    """Save with `torch.jit.save`."""
    torch.jit.save(torch.jit.script(build_nested_module()), folder / "script.pt")
    return folder / "script.pt"


def torch_export(folder: Path) -> Path:
    """Save with `torch.export.save`."""

    class Root(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, child in build_nested_module().named_children():
                self.add_module(name, child)
            self.scale = build_nested_module().scale
            self.register_buffer("steps", build_nested_module().steps)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.scale + self.steps.sum()

    torch.export.save(torch.export.export(Root(), (torch.ones(1),)), folder / "program.pt2")
    return folder / "program.pt2"


def shards(folder: Path) -> Path:
    """Write the files that `save_pretrained` writes for a large model."""
    tensors = weights()
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    index = {name: names[n % 2] for n, name in enumerate(tensors)}
    for file in names:
        save_file({name: tensors[name] for name in tensors if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text('{"architectures": ["Net"], "dtype": "float32"}')
    return folder


def trainer(folder: Path) -> Path:
    """Write the folder of a training; its schedule and counts are not tensors."""
    safetensors(folder)
    torch.save({"last_epoch": 3, "_last_lr": [0.1]}, folder / "scheduler.pt")
    (folder / "config.json").write_text('{"architectures": ["Net"], "dtype": "float32"}')
    (folder / "trainer_state.json").write_text('{"global_step": 3, "log_history": [{"loss": 1.5}]}')
    return folder


#: Functions that write `weights()` with the library of a format, into a separate folder, and return the path.
WRITERS = (
    torch_zip,
    torch_legacy,
    torchscript,
    torch_export,
    shards,
    trainer,
    dcp,
    dcp_safetensors,
    write_deepspeed,
    gguf,
    npz,
    npz_deflated,
    flax_msgpack,
)


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Path:
    """The safetensors file."""
    return safetensors(tmp_path_factory.mktemp("reference"))


@pytest.fixture(scope="module", params=WRITERS, ids=lambda function: function.__name__)
def other(request, tmp_path_factory) -> Path:
    """The same weights in each of the other formats."""
    return request.param(tmp_path_factory.mktemp("other"))


def test_weights_are_equal_in_all_formats(run, reference, other):
    """Every tensor is compared by its values, in either direction, and is equal."""
    for first, second in ((reference, other), (other, reference)):
        code, output = run("diff", first, second, "-f", "json")
        assert code == 0, output
        assert json.loads(output)["summary"]["identical"] == len(weights())


def test_diff_names_the_changed_tensor(run, other, tmp_path):
    """A single changed value of a tensor is enough, and only this tensor is named."""
    nudged = weights()
    nudged["layers.0.proj.weight"][3, 2] += 1
    save_file(nudged, tmp_path / "nudged.safetensors")
    code, output = run("diff", tmp_path / "nudged.safetensors", other, "-f", "plain")
    assert code == 1, output
    assert "layers.0.proj.weight" in output
    assert "embed.weight" not in output


def test_lock_of_one_format_passes_the_other(run, reference, other, tmp_path):
    """A lock of either format, with values, matches the file in the other format."""
    lock = tmp_path / "statecli.lock.json"
    for first, second in ((reference, other), (other, reference)):
        assert run("lock", first, "-o", lock)[0] == 0
        code, output = run("audit", second, "--lock", lock, "--select", "lock")
        assert code == 0, output


def test_audit_of_each_format_is_clean(run, other):
    """Ordinary weights give no warning, values and pickles included."""
    code, output = run("audit", other, "--values", "--ignore", "legacy-format")
    assert code == 0, output


def test_a_state_has_the_traits_of_its_format(reference, other):
    """Each reader fills the traits, and a lock finds them by the name of the format."""
    for path in (reference, other):
        state = formats.read(str(path))
        traits = formats.traits_of(state.format)
        traits = replace(traits, weights_are_optimizer_copies=state.format == "deepspeed zero-3")
        assert state.traits == traits != formats.traits_of("")
