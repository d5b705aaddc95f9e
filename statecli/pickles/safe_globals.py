"""Allow-list of Python names that torch's restricted unpickler admits in a checkpoint.

The list comes from `torch.load(weights_only=True)` (torch/_weights_only_unpickler.py, torch 2.13): an allow-list,
because every deny-list of known attacks has been bypassed. A test compares the list with the installed torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from statecli.core.dtypes import ELEMENT_BITS, STORAGE_DTYPES

_REBUILD_FUNCTIONS = (
    "device_tensor_from_cpu_tensor",
    "device_tensor_from_numpy",
    "meta_tensor_no_storage",
    "nested_tensor",
    "parameter",
    "parameter_with_state",
    "qtensor",
    "sparse_tensor",
    "tensor",
    "tensor_v2",
    "tensor_v3",
    "wrapper_subclass",
)
_OTHER_NAMES = (
    "_codecs.encode",
    "builtins.bytearray",
    "builtins.complex",
    "builtins.set",
    "collections.Counter",
    "collections.OrderedDict",
    "torch.Size",
    "torch.Tensor",
    "torch._tensor._rebuild_from_type_v2",
    "torch.device",
    "torch.nn.parameter.Parameter",
    "torch.per_channel_affine",
    "torch.per_channel_affine_float_qparams",
    "torch.per_channel_symmetric",
    "torch.per_tensor_affine",
    "torch.per_tensor_symmetric",
    "torch.serialization._get_layout",
    "torch.storage.TypedStorage",
    "torch.storage.UntypedStorage",
)
#: Names that `import torch` adds to the list with `torch.serialization.add_safe_globals`.
_ADDED_BY_TORCH = (
    "torch.distributed._mesh_layout._FlatLayout",
    "torch.distributed._mesh_layout._MeshLayout",
    "torch.nested._internal.nested_tensor.NestedTensor",
    "torch.nested._internal.nested_tensor._rebuild_njt",
)
#: Names that torch.load admits after `import torch.distributed.tensor`.
_ADDED_BY_DTENSOR = (
    "torch.distributed.device_mesh.DeviceMesh",
    "torch.distributed.tensor.DTensor",
    "torch.distributed.tensor._dtensor_spec.DTensorSpec",
    "torch.distributed.tensor._dtensor_spec.ShardOrderEntry",
    "torch.distributed.tensor._dtensor_spec.TensorMeta",
    "torch.distributed.tensor.placement_types.Partial",
    "torch.distributed.tensor.placement_types.Replicate",
    "torch.distributed.tensor.placement_types.Shard",
    "torch.distributed.tensor.placement_types._StridedShard",
)
_ADDED_BY_DYNAMO = ("torch._dynamo.decorators._DimRange",)


@lru_cache(maxsize=1)
def list_allowed_names() -> frozenset[str]:
    """Return every `module.name` admitted by torch's restricted unpickler, with Python 3's module names."""
    storages = [name for name in STORAGE_DTYPES if name != "UntypedStorage"]
    cuda_storages = [name for name in storages if not name.startswith("Q")]
    tensors = [name.replace("Storage", "Tensor") for name in cuda_storages]
    real_tensors = [name for name in tensors if not name.startswith(("Bool", "Complex"))]
    return frozenset(
        [f"torch._utils._rebuild_{name}" for name in _REBUILD_FUNCTIONS]
        + [
            f"torch.{name}"
            for name in (*ELEMENT_BITS, *storages, *tensors)
            if "Complex" not in name or "Storage" in name
        ]
        + [f"torch.cuda.{name}" for name in (*cuda_storages, *tensors) if "Complex" not in name or "Storage" in name]
        + [f"torch{device}.sparse.{name}" for device in ("", ".cuda") for name in real_tensors]
        + list(_OTHER_NAMES)
    )


def find_foreign_names(names: list[str]) -> list[str]:
    """Return the names that are not on the allow-list. Python 2's `__builtin__` counts as `builtins`."""
    return [name for name in names if name.replace("__builtin__.", "builtins.", 1) not in list_allowed_names()]


def find_refused_names(names: Iterable[str]) -> list[str]:
    """Return the names for which `torch.load(path)` refuses a file, each name once and in order.

    The names are as Python 3 calls them (`python2_names.rename_python2`).
    """
    return [name for name in dict.fromkeys(names) if name not in list_allowed_names() and name not in _ADDED_BY_TORCH]


def is_storage_class(name: str) -> bool:
    """Return True if `torch.load(path)` replaces the name by a storage type that cannot be called."""
    return (
        name in list_allowed_names()
        and name.startswith("torch.")
        and name.endswith("Storage")
        and ".storage." not in name
    )


def find_admitting_module(name: str) -> str | None:
    """Return the module of torch whose import makes `torch.load` admit the name; None if no module does."""
    if name in _ADDED_BY_DTENSOR:
        return "torch.distributed.tensor"
    return "torch._dynamo" if name in _ADDED_BY_DYNAMO else None
