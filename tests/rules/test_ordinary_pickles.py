"""Checkpoints written by the real libraries in training give no finding of the rules about pickles."""

from __future__ import annotations

import argparse
import array
import copy
import copyreg
import datetime
import decimal
import functools
import http
import importlib
import ipaddress
import math
import pathlib
import pickletools
import random
import re
import signal
import socket
import types
import typing
import uuid
import zipfile
import zoneinfo
from collections import ChainMap, Counter, OrderedDict, UserDict, UserList, defaultdict, deque
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils import prune

from statecli.commands.audit.run import Request, audit
from statecli.file_scan.scan import scan_pickles
from statecli.pickle_scan.known_names import CLASSES, is_clean

from ..formats.attacks import build, call_function, global_name, records, state_dict, tensor, text
from .test_pickles import RULES


def build_model():
    """Weights, buffers, tied parameters."""
    sequential = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    sequential[2].weight = sequential[0].weight
    return sequential


def train_optimizer(optimizer, **options):
    """The optimizer after a step."""
    net = build_model()
    instance = optimizer(net.parameters(), **options)
    net(torch.randn(3, 4)).sum().backward()
    instance.step()
    return instance


def build_scheduler_state(scheduler, *args, **options):
    """State of the scheduler."""
    return scheduler(torch.optim.SGD(build_model().parameters(), 0.1), *args, **options).state_dict()


def build_lightning_checkpoint():
    """A checkpoint with the keys of Lightning's Trainer, and the state of a callback under its state_key."""
    return {
        "epoch": 3,
        "global_step": 7,
        "pytorch-lightning_version": "2.5.0",
        "state_dict": build_model().state_dict(),
        "loops": {"fit_loop": {"state_dict": {}, "epoch_progress": {"total": {"ready": 4}}}},
        "callbacks": {
            "ModelCheckpoint{'monitor': 'loss', 'mode': 'min'}": {
                "best_model_score": torch.tensor(0.5),
                "best_k_models": {"/tmp/a.ckpt": torch.tensor(0.5)},
            }
        },
        "optimizer_states": [train_optimizer(torch.optim.Adam, lr=0.1).state_dict()],
        "lr_schedulers": [build_scheduler_state(torch.optim.lr_scheduler.StepLR, 2)],
        "hparams_name": "kwargs",
        "hyper_parameters": {"lr": 0.1, "data": pathlib.PurePosixPath("data"), "args": argparse.Namespace(a=1)},
    }


def build_rng_state():
    """The content of rng_state.pth by transformers."""
    return {"python": random.getstate(), "numpy": np.random.get_state(), "cpu": torch.get_rng_state()}


def build_settings():
    """Settings of the kinds that scripts save next to their weights."""
    return {
        "config": argparse.Namespace(lr=np.float32(0.1), steps=np.int64(3), ok=np.bool_(True), out=pathlib.Path("a")),
        "space": types.SimpleNamespace(a=1),
        "when": datetime.datetime(2024, 1, 2, tzinfo=datetime.timezone.utc),
        "day": datetime.date(2024, 1, 2),
        "took": datetime.timedelta(seconds=3),
        "exact": [decimal.Decimal("0.1"), Fraction(1, 3), 1 + 2j],
        "run": uuid.UUID(int=7),
        "sets": [{1, 2}, frozenset("ab"), slice(1, 2), range(3)],
        "raw": [b"abc", bytearray(b"abc")],
        "counts": [Counter("aab"), deque([1, 2], 3), defaultdict(list, a=[1]), defaultdict(int), OrderedDict(a=1)],
        "kinds": [torch.float32, torch.device("cpu"), torch.Size([1]), torch.strided],
        "weights": torch.zeros(2),
    }


def build_arrays():
    """Objects of numpy, of each kind."""
    return {
        "array": np.arange(6, dtype=np.float64).reshape(2, 3),
        "fortran": np.asfortranarray(np.ones((2, 3), np.float32)),
        "objects": np.array([1, "a", None], dtype=object),
        "text": np.array(["ab", "c"]),
        "record": np.zeros(2, dtype=[("a", "i4"), ("b", "f8")]),
        "records": np.array([(1, "a", (2.0, None))], dtype=[("a", "i4"), ("b", "O"), ("c", [("d", "f8"), ("e", "O")])]),
        "pairs": np.zeros(2, dtype=[("a", "f4", (2, 2)), ("b", "O", (2,))]),
        "aligned": np.zeros(2, dtype=np.dtype([("a", "i1"), ("b", "f8")], align=True)),
        "dates": np.array(["2024-01-02"], dtype="datetime64[D]"),
        "scalars": [np.float64(1.5), np.int32(3), np.str_("a"), np.complex64(1j)],
        "dtype": np.dtype("float32"),
        "generator": np.random.default_rng(3),
        "state": np.random.RandomState(3),
        "matrix": np.matrix([[1.0, 2.0]]),
        "polynomial": np.poly1d([1.0, 2.0]),
        "strings": np.array(["ab", "c"], "T") if hasattr(getattr(np, "dtypes", None), "StringDType") else None,
        "classes": [type(np.dtype("f4")), type(np.dtype("O"))],
        "weights": torch.zeros(2),
    }


def build_quantized_tensors():
    """Quantized tensors, by tensor and by channel."""
    return {
        "w": torch.quantize_per_tensor(torch.randn(2, 2), 0.1, 3, torch.qint8),
        "c": torch.quantize_per_channel(torch.randn(2, 2), torch.ones(2), torch.zeros(2), 0, torch.qint8),
    }


def build_unusual_tensors():
    """Every kind of tensor with its own pickle form in torch."""
    return {
        "sparse": torch.eye(3).to_sparse(),
        "csr": torch.eye(3).to_sparse_csr(),
        "meta": torch.empty(2, device="meta"),
        "complex": torch.zeros(2, dtype=torch.complex64).conj(),
        "bfloat16": torch.zeros(2, dtype=torch.bfloat16),
        "float8": torch.zeros(2, dtype=torch.float8_e4m3fn),
        "parameter": nn.Parameter(torch.zeros(2)),
        "buffer": nn.Buffer(torch.zeros(2)),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "jagged": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged),
        "strided": torch.zeros(4, 4)[::2, 1:],
        "storage": torch.zeros(3).untyped_storage(),
        "generator": torch.Generator().get_state(),
    }


def build_averaged_model():
    """An exponential moving average, next to the averaged model."""
    net = build_model()
    ema = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    ema.update_parameters(net)
    return {"model": net.state_dict(), "ema": ema.state_dict()}


def build_weight_norms():
    """Old and new weight_norm."""
    return {
        "old": nn.utils.weight_norm(nn.Linear(2, 2)).state_dict(),
        "new": nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)).state_dict(),
    }


def build_hyperparameters():
    """Hyperparameters that users pass to trainers and trainers save."""
    return {
        "state_dict": build_model().state_dict(),
        "losses": [functional.cross_entropy, functional.mse_loss, functional.linear, functional.conv2d, np.mean],
        "later": [functools.partial(torch.optim.AdamW, lr=0.1), functools.partial(nn.init.normal_, std=0.02)],
        "nested": defaultdict(functools.partial(defaultdict, list)),
        "types": [typing.Optional[int], typing.List[int], list[int], int | str, type(None), type(...)],  # noqa: UP006, UP045
        "signal": signal.SIGTERM,
        "zone": datetime.datetime(2024, 1, 2, tzinfo=zoneinfo.ZoneInfo("UTC")),
        "array": array.array("d", [1.0]),
        "masked": np.ma.array([1, 2], mask=[True, False]),
        "records": np.recarray((1,), dtype=[("a", "f4")]),
        "failed": ValueError("x"),
        "data": torch.utils.data.TensorDataset(torch.ones(3)),
        "prior": torch.distributions.Normal(torch.zeros(2), torch.ones(2)),
    }


def build_loop_objects():
    """Objects saved whole next to the weights."""
    return {
        "state_dict": build_model().state_dict(),
        "torch_version": torch.__version__,
        "scaler": torch.amp.GradScaler("cpu"),
        "generator": torch.Generator().manual_seed(3),
    }


def build_standard_values():
    """Values of Python's own library, and its functions in a configuration."""
    return {
        "weights": torch.zeros(2),
        "enumerations": [http.HTTPStatus.OK, re.IGNORECASE, socket.AF_INET, signal.Handlers.SIG_DFL],
        "addresses": [ipaddress.ip_address("1.1.1.1"), ipaddress.ip_network("::/8"), ipaddress.ip_interface("1.1.1.1")],
        "generator": random.Random(3),  # noqa: S311
        "functions": [math.sqrt, print, len, sorted, max],
        "spaces": types.SimpleNamespace(score=max, items=[1], values=np.zeros(2)),
        "mappings": [ChainMap({"a": 1}, {}), UserDict(act=functional.relu), UserList([1])],
    }


def build_partials():
    """Partials in configurations: of functions of tensors and of modules, with plain values."""
    partials = [
        functools.partial(functional.relu, inplace=True),
        functools.partial(functional.interpolate, scale_factor=2.0, mode="bilinear"),
        functools.partial(functional.softmax, dim=-1, dtype=torch.float32),
        functools.partial(functional.cross_entropy, weight=torch.ones(2), reduction="sum"),
        functools.partial(nn.init.kaiming_normal_, mode="fan_out", nonlinearity="relu"),
        functools.partial(nn.init.constant_, val=0.0),
        functools.partial(np.mean, axis=0, dtype=np.float32),
        functools.partial(np.sum, dtype=float, initial=np.float64(1.0)),
        functools.partial(nn.LayerNorm, (4,), eps=1e-6),
        functools.partial(nn.GELU, approximate="tanh"),
        functools.partial(torch.optim.lr_scheduler.StepLR, step_size=3),
        functools.partial(nn.TransformerEncoderLayer, 8, 2, activation=functional.gelu, device=torch.device("cpu")),
        functools.partial(defaultdict, functools.partial(defaultdict, int)),
        functools.partial(torch.linalg.norm, ord="fro"),
    ]
    space = argparse.Namespace(norm=partials[6], normalize=functools.partial(functional.normalize, dim=1))
    return {
        "w": torch.zeros(1),
        "partials": partials,
        "space": space,
        "factory": [defaultdict(functools.partial(deque, maxlen=20)), defaultdict(type(None))],
    }


def build_annotations():
    """Types of fields in dataclasses and configurations."""
    return {
        "w": torch.zeros(1),
        "types": [
            *(typing.Literal["a", 1, None], typing.Callable[[int, str], bool], typing.Annotated[int, "metres", 3]),
            *(typing.Union[int, list[str]], dict[str, typing.Optional[list[int]]], list[int] | None),  # noqa: UP007, UP045
            *(typing.Tuple[int, ...], tuple[int, ...]),  # noqa: UP006
        ],
    }


def build_distributions():
    """Distributions built from other distributions and from transforms."""
    normal = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
    steps = [torch.distributions.ExpTransform(), torch.distributions.AffineTransform(0.0, 2.0)]
    return {
        "w": torch.zeros(1),
        "mixed": torch.distributions.Independent(normal, 1),
        "moved": torch.distributions.TransformedDistribution(normal, [torch.distributions.ComposeTransform(steps)]),
        "scheduled": torch.optim.lr_scheduler.LambdaLR(train_optimizer(torch.optim.SGD, lr=0.1), math.sqrt),
    }


ADAM = {"lr": 0.1}
ORDINARY = {
    "state_dict": lambda: build_model().state_dict(),
    "dict of Parameters": lambda: dict(build_model().named_parameters()),
    "SGD with momentum": lambda: train_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9).state_dict(),
    "AdamW": lambda: train_optimizer(torch.optim.AdamW, fused=False, **ADAM).state_dict(),
    "Adam with amsgrad and a tensor for lr": lambda: train_optimizer(
        torch.optim.Adam, lr=torch.tensor(0.1), amsgrad=True
    ).state_dict(),
    "Adagrad": lambda: train_optimizer(torch.optim.Adagrad, **ADAM).state_dict(),
    "RMSprop": lambda: train_optimizer(torch.optim.RMSprop, **ADAM).state_dict(),
    "Adafactor": lambda: train_optimizer(torch.optim.Adafactor, **ADAM).state_dict(),
    "OneCycleLR": lambda: build_scheduler_state(torch.optim.lr_scheduler.OneCycleLR, 0.1, 10) | {"t": torch.zeros(1)},
    "CosineAnnealingLR": lambda: (
        build_scheduler_state(torch.optim.lr_scheduler.CosineAnnealingLR, 10) | {"t": torch.zeros(1)}
    ),
    "MultiStepLR": lambda: build_scheduler_state(torch.optim.lr_scheduler.MultiStepLR, [1, 2]) | {"t": torch.zeros(1)},
    "CyclicLR": lambda: build_scheduler_state(torch.optim.lr_scheduler.CyclicLR, 0.1, 0.2) | {"t": torch.zeros(1)},
    "GradScaler": lambda: {"scaler": torch.amp.GradScaler("cpu").state_dict(), "t": torch.zeros(1)},
    "Lightning": build_lightning_checkpoint,
    "rng_state": build_rng_state,
    "settings": build_settings,
    "numpy": build_arrays,
    "quantized": build_quantized_tensors,
    "odd tensors": build_unusual_tensors,
    "an average": build_averaged_model,
    "parametrized": build_weight_norms,
    "hyperparameters": build_hyperparameters,
    "what loops keep": build_loop_objects,
    "everyday values": build_standard_values,
    "calls put off": build_partials,
    "annotations": build_annotations,
    "distributions": build_distributions,
    "an optimizer pickled whole": lambda: {"o": train_optimizer(torch.optim.AdamW, **ADAM), "w": torch.zeros(1)},
    "every optimizer pickled whole": lambda: {
        kind.__name__: train_optimizer(kind, lr=0.1)
        for kind in vars(torch.optim).values()
        if isinstance(kind, type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind.__name__ not in ("Optimizer", "SparseAdam", "LBFGS", "Muon")
    },
    "averaging schedulers pickled whole": lambda: {
        strategy: torch.optim.swa_utils.SWALR(
            torch.optim.SGD(build_model().parameters(), 0.1), 0.1, anneal_strategy=strategy
        )
        for strategy in ("cos", "linear")
    },
    "a scheduler pickled whole": lambda: {
        "s": torch.optim.lr_scheduler.StepLR(torch.optim.SGD(build_model().parameters(), 0.1), 3)
    },
}
WRITERS = {
    "zip": {},
    "legacy": {"_use_new_zipfile_serialization": False},
    **{f"protocol {n}": {"pickle_protocol": n} for n in (3, 4, 5)},
}


@functools.cache
def build_checkpoint(name):
    """Build an ordinary checkpoint or a whole module once for all its files."""
    return (ORDINARY | WHOLE)[name]()


def list_findings(path):
    """Rule and message of each finding of the rules about pickles."""
    return [(finding.rule, finding.message) for finding in audit(Request((str(path),), select=RULES)).findings]


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_checkpoint_is_clean(name, save_checkpoint, monkeypatch):
    """The checkpoint is a zip archive, a legacy stream, or an archive with each protocol of torch.save."""
    # After an import of Dask, exceptions are pickled in another way.
    monkeypatch.delitem(copyreg.dispatch_table, ValueError, raising=False)
    for writer, options in WRITERS.items():
        assert list_findings(save_checkpoint(build_checkpoint(name), **options)) == [], writer


def set_weights(*modules):
    """Set the weights of quantized modules: torch leaves them as the memory is, which may hold a pickle."""
    for module in modules:
        weight = module.weight()
        ones = torch.ones(weight.shape)
        if isinstance(module, torch.ao.nn.quantized.Embedding):
            scales, zeros = torch.ones(len(ones)), torch.zeros(len(ones))
            module.set_weight(torch.quantize_per_channel(ones, scales, zeros, 0, weight.dtype))
        else:
            module.set_weight_bias(torch.quantize_per_tensor(ones, 1.0, 0, weight.dtype), module.bias())
    return nn.Sequential(*modules)


WHOLE = {
    "Sequential": build_model,
    "Transformer": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 8, activation="gelu"), 1),
    "LSTM": lambda: nn.LSTM(2, 2),
    "weight_norm": lambda: nn.utils.weight_norm(nn.Linear(2, 2)),
    "spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(2, 2)),
    "quantized linear": lambda: torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(2, 2))),
    "a loss among settings": lambda: argparse.Namespace(loss=nn.CrossEntropyLoss()),
    "hooks": lambda: nn.utils.spectral_norm(nn.utils.weight_norm(nn.Linear(2, 2), "bias", None)),
    "pruned": lambda: prune.l1_unstructured(nn.Linear(2, 2), "weight", 1),
    "a copy": lambda: copy.deepcopy(build_model()),
    "lazy": lambda: nn.Sequential(nn.LazyLinear(3), nn.LazyConv2d(3, 1), nn.LazyBatchNorm2d()),
    "quantized embedding": lambda: set_weights(torch.ao.nn.quantized.Embedding(10, 12)),
    "quantized convolutions": lambda: set_weights(
        torch.ao.nn.quantized.Conv1d(2, 2, 1),
        torch.ao.nn.quantized.Conv2d(4, 4, 3, stride=2, padding=1, groups=2),
        torch.ao.nn.quantized.Conv3d(2, 2, 1),
        torch.ao.nn.quantized.ConvTranspose2d(4, 4, 3, output_padding=1, stride=2),
        torch.ao.nn.quantized.dynamic.Conv2d(2, 2, 1),
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WHOLE)
def test_module_of_torch_is_only_a_whole_module_pickle(name, save_checkpoint):
    """All classes, hooks and activations of the module are torch's own."""
    path = save_checkpoint({"net": build_checkpoint(name)})
    assert [rule for rule, _ in list_findings(path)] == ["whole-module-pickle"]


def iter_distributed_data_parallel():
    """Yield a DistributedDataParallel of a single process."""
    from torch import distributed

    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield nn.parallel.DistributedDataParallel(build_model())
    finally:
        distributed.destroy_process_group()


def iter_module_with_hook():
    """Yield a module with the handle of its hook as an attribute."""
    module = build_model()
    module.handle = module.register_forward_hook(functional.relu)
    module.removed = module.register_forward_pre_hook(print)
    module.removed.remove()
    yield module


def iter_data_parallel():
    """Yield a DataParallel."""
    yield nn.DataParallel(build_model())


def iter_compiled_modules():
    """Yield modules wrapped by torch.compile, with and without settings."""
    yield torch.compile(build_model())
    yield from (torch.compile(build_model(), backend=backend) for backend in ("eager", "aot_eager"))
    yield {
        "a": torch.compile(build_model(), mode="max-autotune"),
        "b": torch.compile(build_model(), dynamic=True, fullgraph=True),
    }


@pytest.mark.parametrize(
    "iter_wrappers", [iter_distributed_data_parallel, iter_module_with_hook, iter_data_parallel, iter_compiled_modules]
)
def test_wrapper_of_torch_is_only_a_whole_module_pickle(iter_wrappers, tmp_path):
    """torch's own wrappers keep the module and plain settings; a handle keeps a number."""
    for wrapper in iter_wrappers():
        torch.save(wrapper, tmp_path / "a.pt")
        (target,) = audit(Request((str(tmp_path / "a.pt"),), select=RULES)).targets
        assert {finding.rule for finding in target.findings} <= {"whole-module-pickle", "needs-weights-only-false"}


def compile_with_command():
    """A compiled module with a command in its settings. The first call runs the command."""
    return torch.compile(build_model(), options={"cpp.cxx": ("touch PWNED;",)})


def compile_with_function():
    """A compiled module with a function as its backend."""
    return torch.compile(build_model(), backend=functional.relu)


def compile_with_contexts():
    """A compiled module and a context without a module."""
    return [torch.compile(build_model()), torch.compile(build_model()).dynamo_ctx]


@pytest.mark.parametrize("compile_module", [compile_with_command, compile_with_function, compile_with_contexts])
def test_compiled_module_with_code_in_its_settings_is_unsafe(compile_module, tmp_path):
    """A call of the module would run code from the file."""
    torch.save(compile_module(), tmp_path / "a.pt")
    (target,) = audit(Request((str(tmp_path / "a.pt"),), select=RULES)).targets
    assert "unsafe-global" in {finding.rule for finding in target.findings}


def test_trainer_of_transformers_writes_only_data(tmp_path):
    """training_args.bin contains an object. Unpickling its class sets attributes and runs no code."""
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        vocab_size=8, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, intermediate_size=4
    )
    net = transformers.BertForSequenceClassification(config)
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, save_steps=1, report_to=[], use_cpu=True, save_strategy="steps"
    )
    rows = [{"input_ids": [1, 2, 3], "attention_mask": [1, 1, 1], "labels": 1}] * 2
    transformers.Trainer(net, arguments, train_dataset=rows).train()
    saved_paths = sorted(
        path for path in (tmp_path / "checkpoint-1").iterdir() if path.suffix in (".pt", ".pth", ".bin")
    )
    assert {path.name for path in saved_paths} == {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin"}
    assert [list_findings(path) for path in saved_paths] == [[]] * 4
    assert list_findings(tmp_path / "checkpoint-1") == []


def test_placements_are_data(save_checkpoint):
    """Placements of each kind in torch.distributed are data."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    places = [distributed.Shard(1), distributed.Replicate(), distributed.Partial(), distributed.Partial("avg")]
    assert list_findings(save_checkpoint({"w": torch.zeros(2), "places": places, "more": tuple(places)})) == []


def test_the_handle_of_a_hook_is_data(tmp_path):
    """Handles saved next to the module of their hooks are data."""
    net = nn.Linear(2, 2)
    handles = [net.register_forward_pre_hook(functional.relu), net.register_forward_hook(functional.relu)]
    torch.save({"net": net, "handles": handles}, tmp_path / "a.pt")
    assert {rule for rule, _ in list_findings(tmp_path / "a.pt")} == {"whole-module-pickle"}


def test_a_distributed_tensor_is_data(tmp_path):
    """A DTensor carries its mesh and its placements."""
    distributed = pytest.importorskip("torch.distributed.tensor")
    from torch.distributed import destroy_process_group, init_process_group

    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        torch.save(
            {"w": distributed.distribute_tensor(torch.randn(4, 2), mesh, [distributed.Shard(0)])}, tmp_path / "a.pt"
        )
    finally:
        destroy_process_group()
    assert list_findings(tmp_path / "a.pt") == []


def write_distributed_checkpoint(folder):
    """Write weights and optimizer with torch.distributed.checkpoint, from a single process."""
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    net = build_model()
    adam_w = torch.optim.AdamW(net.parameters(), lr=0.1)
    net(torch.randn(3, 4)).sum().backward()
    adam_w.step()
    state = {"model": net.state_dict(), "optim": adam_w.state_dict(), "epoch": 3, "rng": torch.get_rng_state()}
    checkpoint.save(state, checkpoint_id=folder)


@pytest.mark.filterwarnings("ignore")
def test_the_files_of_a_distributed_checkpoint_are_data(tmp_path):
    """The index consists of plain data classes, and the data file of consecutive archives."""
    write_distributed_checkpoint(tmp_path / "dcp")
    index, tensors = (
        scan_pickles(str(tmp_path / "dcp" / ".metadata")),
        scan_pickles(str(tmp_path / "dcp" / "__0_0.distcp")),
    )
    assert {"Metadata", "_StorageInfo", "_MEM_FORMAT_ENCODING"} <= {
        name.name for pickle in index for name in pickle.names
    }
    assert len(tensors) > 10
    assert list_findings(tmp_path / "dcp") == []


@pytest.mark.filterwarnings("ignore")
def test_an_archive_among_the_archives_of_a_distributed_checkpoint_is_read(tmp_path):
    """A call in any of the archives is found at its place in the file."""
    write_distributed_checkpoint(tmp_path / "dcp")
    archive = (tmp_path / "dcp" / "__0_0.distcp").read_bytes()
    harmful = build(records(state_dict(w=tensor(), x=call_function(global_name("os", "system"), text("true")))))
    for data in (harmful + archive, archive + harmful, archive + harmful + archive):
        (tmp_path / "a.distcp").write_bytes(data)
        (finding,) = audit(Request((str(tmp_path / "a.distcp"),), select=("unsafe-global",))).findings
        assert data[finding.place.offset :].startswith(b"cos\nsystem")


def test_archives_with_bytes_between_them_are_unscanned(tmp_path):
    """A single byte outside the archives is enough."""
    archive = build(records())
    for data in (archive + b"x" + archive, b"x" + archive + archive, archive + archive[1:]):
        (tmp_path / "a.distcp").write_bytes(data)
        assert "unscanned-pickle" in {rule for rule, _ in list_findings(tmp_path / "a.distcp")}
    (tmp_path / "a.distcp").write_bytes(archive + archive)
    assert list_findings(tmp_path / "a.distcp") == []


@pytest.mark.filterwarnings("ignore")
def test_a_masked_tensor_is_data(save_checkpoint):
    """Its values and its mask are tensors."""
    masked = pytest.importorskip("torch.masked")
    assert list_findings(save_checkpoint({"w": masked.masked_tensor(torch.zeros(2), torch.ones(2) > 0)})) == []


TORCHAO = [
    *("Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig", "Float8WeightOnlyConfig"),
    *("IntxWeightOnlyConfig", "Int8DynamicActivationIntxWeightConfig"),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config", TORCHAO)
def test_a_model_quantized_by_torchao_is_data(config, save_checkpoint):
    """The state_dict has quantized tensors and their settings."""
    quantization = pytest.importorskip("torchao.quantization")
    net = nn.Sequential(nn.Linear(64, 64)).bfloat16()
    quantization.quantize_(net, getattr(quantization, config)())
    assert list_findings(save_checkpoint(net.state_dict())) == []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["AdamW8bit", "AdamW4bit", "AdamWFp8"])
def test_an_optimizer_of_torchao_is_data(name, save_checkpoint):
    """Its moments are tensors of fewer bits."""
    weight = nn.Parameter(torch.randn(64, 256))
    optimizer = getattr(pytest.importorskip("torchao.optim"), name)([weight])
    weight.sum().backward()
    optimizer.step()
    assert list_findings(save_checkpoint(optimizer.state_dict())) == []


class Norms(nn.Module):
    """A module with functions of torch as attributes."""

    def __init__(self):
        super().__init__()
        self.norm, self.transform, self.gate = torch.linalg.norm, torch.fft.rfft, torch.special.expit


def test_functions_that_a_module_keeps_are_data(save_checkpoint):
    """A pickle names functions of linear algebra, Fourier transforms and special functions, but calls no function."""
    assert {rule for rule, _ in list_findings(save_checkpoint(Norms()))} == {"whole-module-pickle"}


def test_clean_functions_of_torch_have_an_aten_schema():
    """Each clean function of the installed torch has an aten schema: tensors in, tensors out."""
    for part in ("linalg", "fft", "special"):
        module = importlib.import_module(f"torch._C._{part}")
        names = [name for name in vars(module) if is_clean(module.__name__, name)]
        assert len(names) > 10
        schemas = {schema.name for schema in torch._C._jit_get_all_schemas()}
        assert [name for name in names if f"aten::{name}" not in schemas] == []


def test_safe_globals_of_torch_are_clean():
    """The names added to torch's restricted unpickler on import of torch's packages are clean."""
    importlib.import_module("torch.distributed.tensor")
    names = [(global_.__module__, global_.__qualname__) for global_ in torch.serialization.get_safe_globals()]
    assert len(names) > 10
    assert [name for name in names if not is_clean(*name)] == []


def iter_defined(table):
    """Yield each name of the table with its object in the installed torch; None for a name missing from torch."""
    for path in table:
        module, _, name = path.rpartition(".")
        try:
            yield path, getattr(importlib.import_module(module), name, None)
        except ImportError:
            yield path, None


@pytest.mark.filterwarnings("ignore")
def test_every_class_of_the_table_is_defined_in_its_module():
    """No class is a metaclass. Except in torch.cuda.amp and torch.nn.utils.rnn, each name is the class's own name."""
    actual = {path: class_ for path, class_ in iter_defined(CLASSES) if class_ is not None}
    assert len(actual) > 400
    moved = {path for path, class_ in actual.items() if f"{class_.__module__}.{class_.__qualname__}" != path}
    assert {name for name in moved if not name.startswith(("torch.cuda.amp.", "torch.nn.utils.rnn."))} == set()
    assert not [path for path, class_ in actual.items() if not isinstance(class_, type) or issubclass(class_, type)]


@pytest.mark.parametrize("package", [nn.modules, torch.optim, torch.optim.lr_scheduler])
def test_every_module_and_optimizer_of_torch_is_in_the_table(package):
    """A new class of the installed torch fails here first."""
    kinds = (nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
    classes = [class_ for class_ in vars(package).values() if isinstance(class_, type) and issubclass(class_, kinds)]
    assert len(classes) > 10
    assert [class_ for class_ in classes if f"{class_.__module__}.{class_.__qualname__}" not in CLASSES] == []


def find_compiler_settings(pickle):
    """Memo index of a compiler's settings, and the position of the end of the pickle."""
    opcodes = list(pickletools.genops(pickle))
    position = next(n for n, (_, value, _) in enumerate(opcodes) if value == "config")
    index = next(value for code, value, _ in opcodes[opcodes.index(opcodes[position]) + 2 :] if code.name == "BINPUT")
    return index, opcodes[-1][2]


@pytest.mark.parametrize("late", ["replaced", "stated twice"])
def test_command_replaced_later_in_the_pickle_is_found(late, tmp_path):
    """The object had the command before the end of the pickle."""
    torch.save(compile_with_command(), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        pickle = archive.read("a/data.pkl")
    index, end = find_compiler_settings(pickle)
    replacement = b"h" + bytes([index]) + text("cpp.cxx") + b"\x88s0"
    if late == "stated twice":
        operations = list(pickletools.genops(pickle))
        start = next(n for n, (_, value, _) in enumerate(operations) if value == "torch _TorchCompileInductorWrapper")
        memo_index = next(value for code, value, _ in operations[start + 3 :] if code.name == "BINPUT")
        replacement = b"h" + bytes([memo_index]) + b"}b0"
    (tmp_path / "b.pt").write_bytes(build(records(pickle[:end] + replacement + b".")))
    (target,) = audit(Request((str(tmp_path / "b.pt"),), select=RULES)).targets
    assert "unsafe-global" in {finding.rule for finding in target.findings}


USES = {
    "getattr that rebuilds": call_function(
        global_name("torch._tensor", "_rebuild_from_type_v2"),
        global_name("__builtin__", "getattr"),
        global_name("builtins", "dict"),
        b"(" + global_name("torch.nn.functional", "relu") + text("__builtins__") + b"t",
        b"}",
    ),
    "getattr in a list": b"]" + global_name("__builtin__", "getattr") + b"a",
    "getattr as a method": global_name("argparse", "Namespace")
    + b")\x81}"
    + text("a")
    + global_name("__builtin__", "getattr")
    + b"sb",
    "the context of nothing": b"]" + global_name("contextlib", "nullcontext") + b"a",
    "a part of a context": b"]" + global_name("torch._dynamo.convert_frame", "CatchErrorsWrapper") + b"a",
}


@pytest.mark.parametrize("use", USES)
def test_names_of_a_compiled_module_are_unsafe_in_other_uses(use, tmp_path):
    """Another use of the same name in the same pickle is found."""
    torch.save(torch.compile(build_model()), tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        pickle = archive.read("a/data.pkl")
    (tmp_path / "b.pt").write_bytes(build(records(pickle[:-1] + USES[use] + b"\x86.")))
    (target,) = audit(Request((str(tmp_path / "b.pt"),), select=RULES)).targets
    assert "unsafe-global" in {finding.rule for finding in target.findings}


def test_safetensors_has_no_pickle(tmp_path):
    """The first bytes of the data may look like a pickle."""
    from safetensors.torch import save_file

    save_file({"w": torch.tensor([0x80, 2, 0x63], dtype=torch.uint8)}, tmp_path / "a.safetensors")
    assert list_findings(tmp_path / "a.safetensors") == []


def test_configurations_of_transformers_are_data(save_checkpoint):
    """Each configuration is pickled as an object of its own class."""
    transformers = pytest.importorskip("transformers")
    configs = [transformers.BertConfig(dtype=torch.float16), transformers.GenerationConfig(), transformers.CLIPConfig()]
    assert list_findings(save_checkpoint({"w": torch.zeros(1), "config": configs})) == []


@pytest.mark.parametrize("length", [16, 300])
def test_an_integer_that_begins_like_a_pickle_is_not_a_pickle(length, tmp_path):
    """One of 3,000 random UUIDs begins with an opcode and has the byte of an import. No loader unpickles an integer."""
    data = b"\x80\x04\x95" + b"\x7f" * (length - 3)
    (tmp_path / "a.pkl").write_bytes(b"\x80\x04\x8b" + length.to_bytes(4, "little") + data + b".")
    (target,) = audit(Request((str(tmp_path / "a.pkl"),), select=("unscanned-pickle",))).targets
    assert [finding.message for finding in target.findings] == []
