"""Tensors with all elements of their storage are decoded by the layout of an earlier tensor, with equal rows."""

from __future__ import annotations

import random
import zipfile

import pytest
import torch

from statecli.core.errors import UnreadableError
from statecli.formats import torch_zip
from statecli.formats.torch.tensor_decoder import TensorDecoder

from .test_fuzz import mutate, saved_pickle


def save(path, pickle: bytes, sizes: list[int], byteorder: bytes = b"little") -> None:
    """Write an archive of torch with this pickle, and a storage of each size."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle)
        archive.writestr("archive/byteorder", byteorder)
        for key, size in enumerate(sizes):
            archive.writestr(f"archive/data/{key}", bytes(size))
        archive.writestr("archive/version", b"3\n")


def read(path) -> object:
    try:
        return torch_zip.read(str(path))
    except UnreadableError as error:
        return str(error)


def tensors() -> dict[str, torch.Tensor]:
    """Four tensors of each kind: of few shapes, with gradients, expanded, offset, strided, conjugated, shared."""
    base = torch.zeros(4, 6)
    kinds = [
        lambda: torch.zeros(2, 3),
        lambda: torch.zeros(3, 2).t(),
        lambda: torch.zeros(2, 3, requires_grad=True),
        lambda: torch.zeros(()),
        lambda: torch.zeros(0, 3),
        lambda: torch.zeros(2, 3, dtype=torch.int8),
        lambda: torch.zeros(7)[1:],
        lambda: torch.zeros(1, 3).expand(2, 3),
        lambda: torch.zeros(3, dtype=torch.complex64).conj(),
        lambda: base[1:3],
        lambda: base.reshape(6, 4),
    ]
    return {f"{kind}.{n}": build_tensor() for n in range(4) for kind, build_tensor in enumerate(kinds)}


@pytest.fixture(scope="module")
def seeds():
    by_name = tensors()
    storages = {tensor.untyped_storage().data_ptr() or id(tensor): tensor for tensor in by_name.values()}
    assert len(storages) > 30
    return saved_pickle(by_name), [tensor.untyped_storage().nbytes() for tensor in storages.values()]


def test_rows_equal_those_of_the_slow_path(tmp_path, monkeypatch, seeds):
    """Both ways agree for mutants of the pickle, records of other sizes and another byte order."""
    rng = random.Random(5)  # noqa: S311 - nothing secret
    pickle, sizes = seeds
    path = tmp_path / "m.pt"
    plain = []
    match_layout, used = TensorDecoder._match_layout, []
    for n in range(300):
        changed_sizes = list(sizes)
        if n % 3 == 0:
            key = rng.randrange(len(changed_sizes))
            changed_sizes[key] = max(0, changed_sizes[key] + rng.choice((-1, 1, 8)))
        save(path, mutate(rng, [pickle]) if n % 2 else pickle, changed_sizes, b"big" if n % 7 == 1 else b"little")
        with monkeypatch.context() as changed:
            changed.setattr(TensorDecoder, "_match_layout", lambda *args: used.append(match_layout(*args)) or used[-1])
            fast_rows = read(path)
        with monkeypatch.context() as changed:
            changed.setattr(TensorDecoder, "_match_layout", lambda *_: None)
            slow_rows = read(path)
        assert fast_rows == slow_rows, n
        plain.append(isinstance(fast_rows, str))
    assert 0 < sum(plain) < len(plain)
    assert sum(tensor is not None for tensor in used) > 400
