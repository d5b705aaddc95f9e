"""`statecli browse` of a remote file reads the header, and only the values that are shown."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from statecli.browse.peek import Versions, read_peek, read_statistics, reads_automatically
from statecli.commands.inspect.run import Request, inspect

pytest.importorskip("urllib3")


def test_first_values_of_a_remote_tensor_need_few_bytes(file_server):
    """Of 8 MB, the first values take less than 100 kB; the statistics read the whole tensor, and only on request."""
    save_file({"a": torch.arange(2e6), "b": torch.ones(2_000_000)}, file_server.folder / "m.safetensors")
    state = inspect(Request(file_server.url("m.safetensors"))).state
    after_header = file_server.sent
    tensor = next(tensor for tensor in state.tensors if tensor.fqn == "a")
    peek = read_peek(tensor, Versions({}))
    assert peek.values[:3] == (0.0, 1.0, 2.0)
    assert len(peek.raw) == 64
    assert file_server.sent - after_header < 100_000
    assert not reads_automatically(tensor)
    assert read_statistics(tensor, Versions({})).max == 2e6 - 1
    assert file_server.sent - after_header < 8_200_000
