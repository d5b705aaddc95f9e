"""Checkpoints with every kind of tensor that values are read from, and a real Dask cluster on this machine."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

import pytest
import torch

# Workers of Dask are forks of a process that has imported Dask. Read when `distributed` is imported.
os.environ.setdefault("DASK_DISTRIBUTED__WORKER__MULTIPROCESSING_METHOD", "forkserver")

FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
OTHER_DTYPES = ("int64", "int32", "int8", "uint8", "bool", "complex64", "complex128")


def state(seed: int) -> dict[str, torch.Tensor]:
    """Every relevant dtype, NaN and infinities, strides, shared storage, sparse and quantized tensors. With another
    `seed`, each dtype's tensor has the same first half.
    """
    numbers, shared = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(99)
    tensors = {}
    for dtype in (*FLOAT_DTYPES, *OTHER_DTYPES):
        halves = [torch.randn(40, 50, generator=generator, dtype=torch.float64) * 3 for generator in (shared, numbers)]
        values = torch.cat(halves)
        values = values.abs() if dtype == "uint8" else values
        tensors[dtype] = (values > 0) if dtype == "bool" else values.to(getattr(torch, dtype))
    special_values = torch.randn(300, generator=numbers)
    special_values[:4] = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0])
    weight = torch.randn(90, 70, generator=numbers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantized = torch.quantize_per_tensor(weight, 0.02, 3, torch.qint8)
        channels = torch.quantize_per_channel(weight, torch.rand(90) + 0.1, torch.zeros(90), 0, torch.qint8)
        csr = (weight * (weight > 1)).to_sparse_csr()
    strided_tensors = {
        "odd": special_values,
        "t": weight.t(),
        "tied": weight,
        "again": weight,
        "expanded": torch.ones(1).expand(500),
    }
    sparse_and_quantized = {
        "coo": (weight * (weight > 1)).to_sparse(),
        "csr": csr,
        "quantized": quantized,
        "channels": channels,
    }
    return {
        **tensors,
        **strided_tensors,
        **sparse_and_quantized,
        "empty": torch.zeros(0, 3),
        f"renamed{seed}": torch.arange(5000.0),
    }


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Path:
    """A folder with `before.pt` and `after.pt`."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for seed, name in enumerate(("before.pt", "after.pt")):
        torch.save(state(seed), folder / name)
    return folder


@pytest.fixture
def dask_cluster():
    """A function that starts a real cluster. Each worker is a process with a nanny that restarts the worker."""
    from distributed import LocalCluster

    clusters = []

    def start_cluster(workers: int = 2, **options) -> LocalCluster:
        cluster = LocalCluster(
            n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50, **options
        )
        clusters.append(cluster)
        return cluster

    yield start_cluster
    for cluster in clusters:
        cluster.close()
