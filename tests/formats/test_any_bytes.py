"""A reader reads any bytes or refuses them with one line, for every format, file or folder."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from statecli import formats
from statecli.core.errors import UnreadableError

from . import test_format_equality, test_megatron, zero


def write_zero_2(folder: Path) -> Path:
    """Write a ZeRO-2 folder of three ranks, whose partitions follow each other."""
    return zero.write(
        folder / "zero", 2, PARTITIONED_GROUPS, buffers={"n": torch.arange(2)}, frozen={"f": torch.ones(3)}, ranks=3
    )


def write_zero_3(folder: Path) -> Path:
    """Write a ZeRO-3 folder: two ranks have partitions of each parameter."""
    return zero.write(
        folder / "zero", 3, PARTITIONED_GROUPS, buffers={"n": torch.arange(2)}, frozen={"f": torch.ones(3)}
    )


def write_accelerate_state(folder: Path) -> Path:
    """Write two models, an optimizer, random states and a custom object."""
    save_file({"weight": torch.ones(2, 3)}, folder / "model.safetensors")
    save_file({"bias": torch.ones(3)}, folder / "model_1.safetensors")
    net = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(net.parameters())
    net(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    torch.save(optimizer.state_dict(), folder / "optimizer.bin")
    torch.save({"step": 1, "torch_manual_seed": torch.ones(4, dtype=torch.uint8)}, folder / "random_states_0.pkl")
    torch.save({"ema": {"weight": torch.ones(3)}}, folder / "custom_checkpoint_0.pkl")
    (folder / "adapter_config.json").write_text('{"r": 4, "target_modules": ["b", "a"], "rank_pattern": {}}')
    return folder


def write_megatron(folder: Path) -> Path:
    """Write a Megatron folder of two tensor-parallel ranks."""
    return test_megatron.write(folder / "run")


PARTITIONED_GROUPS = [{"a": torch.ones(3, 3), "b": torch.ones(2)}, {"c": torch.ones(5)}]

#: Functions that write a small checkpoint of a format and return its path: a file or a folder.
SEEDS = (
    test_format_equality.safetensors,
    *test_format_equality.WRITERS,
    write_zero_2,
    write_zero_3,
    write_megatron,
    write_accelerate_state,
)
#: Number of damaged copies of each checkpoint.
DAMAGED_COPIES = 60


def read_or_refuse(target: Path) -> None:
    """Read the target: the result is a state, or an error of one line that begins with the path."""
    try:
        state = formats.read(str(target))
    except UnreadableError as error:
        text = str(error)
        assert len(text.splitlines()) == 1, text
        assert text.startswith(str(target)), text
        assert len(text) < 2000, text[:300]
    else:
        assert state.format


def list_files(target: Path) -> list[Path]:
    """Return the files that may be damaged: the files of a folder, or the target itself."""
    return sorted(path for path in target.rglob("*") if path.is_file()) if target.is_dir() else [target]


def damage_bytes(raw: bytes, dice: random.Random) -> bytes:
    """Return the bytes with some bytes changed, a piece cut out, doubled or zeroed, or the end cut off."""
    data = bytearray(raw)
    for _ in range(dice.choice((1, 1, 1, 3, 12))):
        position = dice.randrange(len(data)) if data else 0
        length = dice.choice((1, 1, 2, 4, 8, 64))
        kind = dice.randrange(6)
        if kind == 0:
            data[position : position + 1] = bytes([dice.randrange(256)])
        elif kind == 1:
            del data[position : position + length]
        elif kind == 2:
            data[position:position] = data[position : position + length]
        elif kind == 3:
            data[position : position + length] = bytes(min(length, len(data) - position))
        elif kind == 4:
            data[position : position + length] = b"\xff" * min(length, len(data) - position)
        else:
            del data[position:]
    return bytes(data)


@pytest.fixture(scope="module", params=SEEDS, ids=lambda function: function.__name__)
def valid_target(request, tmp_path_factory) -> Path:
    """Return a checkpoint of each format; a test that damages a file writes the file again."""
    return request.param(tmp_path_factory.mktemp("good"))


def test_damaged_copy_is_refused_in_one_line_or_read(valid_target):
    """Many copies of a file or folder are damaged, one file at a time: each is read or refused with one line."""
    dice = random.Random(20261121)  # noqa: S311 - the same damage in every run
    files = list_files(valid_target)
    originals = {path: path.read_bytes() for path in files}
    for _ in range(DAMAGED_COPIES):
        path = dice.choice(files)
        path.write_bytes(damage_bytes(originals[path], dice))
        read_or_refuse(valid_target)
        path.write_bytes(originals[path])
    assert formats.read(str(valid_target)).tensors


def test_a_missing_or_truncated_file_is_refused_in_one_line_or_read(valid_target):
    """Each file is removed, replaced by a folder, and truncated: a download may stop at any byte.

    Large files, and each of many files, are truncated at fewer places.
    """
    files = list_files(valid_target)
    cuts = max(10, 40 // len(files))
    for path in files:
        content = path.read_bytes()
        path.unlink()
        read_or_refuse(valid_target)
        path.mkdir()
        read_or_refuse(valid_target)
        path.rmdir()
        for end in range(0, len(content), max(1, len(content) // cuts)):
            path.write_bytes(content[:end])
            read_or_refuse(valid_target)
        path.write_bytes(content)
    assert formats.read(str(valid_target)).tensors
