"""Results of a pickle's graph: sections, names, kinds and geometries, compared with torch itself."""

from __future__ import annotations

import collections
import copyreg
import warnings

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import nn

from statecli import formats
from statecli.core.errors import MalformedError
from statecli.core.model_state import Evidence, Kind
from statecli.pickles import safe_globals
from statecli.targets import load
from statecli.values.read import read_all_values

from .attacks import Called


def read(tmp_path, checkpoint, **options):
    path = str(tmp_path / "file.pt")
    torch.save(checkpoint, path, **options)
    return formats.read(path)


def rows(state, section=None):
    return {t.fqn: t for t in state.tensors if section is None or t.section == section}


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.complex128,
    torch.complex64,
    torch.complex32,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_each_dtype_has_torchs_name_shape_and_size(tmp_path, legacy):
    """Every dtype that torch saves is listed as torch loads it, from both containers."""
    tensors = {str(dtype): torch.zeros(3, 4).to(dtype) for dtype in DTYPES}
    actual_rows = rows(read(tmp_path, tensors, _use_new_zipfile_serialization=not legacy))
    assert {name: (f"torch.{row.dtype}", row.shape, row.nbytes) for name, row in actual_rows.items()} == {
        name: (name, (3, 4), tensor.nbytes) for name, tensor in tensors.items()
    }
    assert [row.data.storage.length for row in actual_rows.values()] == [
        tensor.untyped_storage().nbytes() for tensor in tensors.values()
    ]


def test_a_packed_float4_has_torchs_shape(tmp_path):
    """The shape of float4_e2m1fn_x2 counts bytes of two values each, like the shape in torch."""
    tensor = torch.zeros(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    (row,) = read(tmp_path, {"w": tensor}).tensors
    assert (row.dtype, row.shape, row.nbytes) == ("float4_e2m1fn_x2", (16,), 16)


geometry = st.tuples(
    st.lists(st.integers(0, 4), min_size=0, max_size=4),
    st.integers(0, 5),
    st.permutations(range(4)),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(geometry, st.sampled_from(DTYPES)), min_size=1, max_size=4))
def test_views_agree_with_torch_load(tmp_path_factory, specs):
    """Any permuted view at any offset keeps torch's shape, strides and offset."""
    tensors = {}
    for number, ((shape, offset, order), dtype) in enumerate(specs):
        size = offset + max(1, torch.Size(shape).numel())
        flat = torch.zeros(size).to(dtype)
        view = flat[offset : offset + torch.Size(shape).numel()].view(shape)
        tensors[f"t{number}"] = view.permute([axis for axis in order if axis < len(shape)])
    path = str(tmp_path_factory.mktemp("views") / "views.pt")
    torch.save(tensors, path)
    loaded = torch.load(path, weights_only=True)
    for fqn, row in rows(formats.read(path)).items():
        assert row.shape == tuple(loaded[fqn].shape)
        assert row.data.offset == loaded[fqn].storage_offset()
        strides = row.data.strides
        if row.elements > 1:
            expected_strides = strides if strides is not None else torch.empty(row.shape).stride()
            used = [n for n, size in enumerate(row.shape) if size > 1]
            assert [expected_strides[n] for n in used] == [loaded[fqn].stride()[n] for n in used]


def test_shared_storage_is_tied(tmp_path):
    """Two names of a tensor, and two views of a storage, are tied to each other."""
    base = torch.randn(10)
    actual_rows = rows(read(tmp_path, {"a": base, "b": base, "head": base[:4], "own": torch.randn(10)}))
    assert set(actual_rows["a"].tied_to) == {"b", "head"}
    assert actual_rows["own"].tied_to == ()
    assert actual_rows["head"].note == "view: 4 of the 10 elements of its storage"


def test_expanded_tensor_has_a_note(tmp_path):
    """An expanded dimension has stride 0: the file stores 2 elements, not 10."""
    (row,) = read(tmp_path, {"w": torch.randn(2, 1).expand(2, 5)}).tensors
    assert row.note == "expanded: 10 elements share 2 stored elements"
    assert row.data.strides == (1, 0)


def test_lazy_conjugation_is_kept(tmp_path):
    """The stored bytes of a conjugate view are not conjugated yet."""
    (row,) = read(tmp_path, {"w": torch.randn(3, dtype=torch.complex64).conj()}).tensors
    assert row.data.conjugate
    assert not row.data.negative


def test_device_is_the_recorded_device(tmp_path):
    """`meta` tensors have no storage; the recorded device is shown unchanged."""
    (row,) = read(tmp_path, {"w": torch.empty(3, device="meta")}).tensors
    assert (row.device, row.shape, row.data) == ("meta", (3,), None)


def test_a_cuda_location_is_shown_without_cuda(tmp_path):
    """`cuda:3` is read on a machine without a GPU."""
    path = tmp_path / "cuda.pt"
    torch.save({"w": torch.ones(2)}, path, _use_new_zipfile_serialization=False)
    # The stream has no checksum: the location can be renamed in place, X(3) "cpu" -> X(6) "cuda:3".
    raw = path.read_bytes().replace(b"X\x03\x00\x00\x00cpu", b"X\x06\x00\x00\x00cuda:3")
    path.write_bytes(raw)
    (row,) = formats.read(str(path)).tensors
    assert row.device == "cuda:3"


def test_sparse_tensors_show_outer_shape_and_stored_parts(tmp_path):
    """COO and CSR tensors have the shape of the whole tensor and the bytes of the stored parts."""
    dense = torch.eye(4)
    actual_rows = rows(read(tmp_path, {"coo": dense.to_sparse(), "csr": dense.to_sparse_csr()}))
    assert (actual_rows["coo"].layout, actual_rows["coo"].shape) == ("sparse_coo", (4, 4))
    assert [name for name, _ in actual_rows["coo"].parts] == ["indices", "values"]
    assert actual_rows["coo"].nbytes == 4 * 4 + 2 * 4 * 8
    assert (actual_rows["csr"].layout, actual_rows["csr"].shape) == ("sparse_csr", (4, 4))
    assert [name for name, _ in actual_rows["csr"].parts] == ["compressed_indices", "plain_indices", "values"]


def test_quantized_tensors_keep_their_quantizer(tmp_path):
    """Scale, zero point and axis (per tensor and per channel) agree with torch."""
    tensor = torch.quantize_per_tensor(torch.randn(4, 3), 0.5, 3, torch.qint8)
    channel = torch.quantize_per_channel(
        torch.randn(4, 3), torch.ones(4).double(), torch.zeros(4).long(), 0, torch.quint8
    )
    actual_rows = rows(read(tmp_path, {"t": tensor, "c": channel}))
    quantizer = actual_rows["t"].data.quantizer
    assert (actual_rows["t"].dtype, actual_rows["t"].layout) == ("qint8", "quantized")
    assert (quantizer.scheme, quantizer.scale, quantizer.zero_point) == ("per_tensor_affine", 0.5, 3)
    assert actual_rows["c"].data.quantizer.axis == 0
    assert actual_rows["c"].data.quantizer.scales.shape == (4,)


def test_parameters_keep_type_and_requires_grad(tmp_path):
    """The type of an nn.Parameter in a dict gives its kind, and the pickle records requires_grad."""
    state = {"w": nn.Parameter(torch.randn(2)), "frozen": nn.Parameter(torch.randn(2), requires_grad=False)}
    actual_rows = rows(read(tmp_path, state))
    assert all(row.kind is Kind.PARAMETER and row.evidence is Evidence.TYPE for row in actual_rows.values())
    assert (actual_rows["w"].requires_grad, actual_rows["frozen"].requires_grad) == (True, False)


def test_a_state_dict_records_no_requires_grad(tmp_path):
    """state_dict() detaches the tensors, so the recorded False is not a setting."""
    actual_rows = rows(read(tmp_path, nn.Linear(2, 2).state_dict()))
    assert [row.requires_grad for row in actual_rows.values()] == [None, None]


def test_nn_buffer_is_recognised_in_a_bare_dict(tmp_path):
    """nn.Buffer is a buffer, persistent or not, even in a bare dict."""
    state = {"b": nn.Buffer(torch.randn(2)), "n": nn.Buffer(torch.randn(2), persistent=False)}
    actual_rows = rows(read(tmp_path, state))
    assert (actual_rows["b"].kind, actual_rows["b"].persistent) == (Kind.BUFFER, True)
    assert (actual_rows["n"].kind, actual_rows["n"].persistent) == (Kind.BUFFER, False)


class Holder:
    """A plain object that holds a tensor."""

    def __init__(self) -> None:
        self.table = torch.randn(3)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)
        self.register_parameter("nothing", None)
        self.tied = nn.Linear(3, 3)
        self.tied.weight = self.fc.weight
        self.table = torch.randn(5, 5)
        self.cache = {"cos": torch.randn(2), 3: torch.randn(1)}
        self.blocks = [nn.Linear(2, 2)]
        self.holder = Holder()
        self.rnn = nn.LSTM(2, 2)
        self.second_name = [self.fc.weight]
        self.view = self.norm.running_mean[:2]


def test_pickled_module_agrees_with_named_parameters(tmp_path):
    """Names and kinds from the pickle agree with named_parameters and named_buffers."""
    net = Net()
    net.fc.bias.requires_grad_(False)
    state = read(tmp_path, net)
    actual_rows = rows(state)
    for name, parameter in net.named_parameters(remove_duplicate=False):
        row = actual_rows.pop(name)
        assert (row.kind, row.evidence, row.requires_grad) == (
            Kind.PARAMETER,
            Evidence.REGISTERED,
            parameter.requires_grad,
        )
        assert row.shape == tuple(parameter.shape)
    for name, buffer in net.named_buffers(remove_duplicate=False):
        row = actual_rows.pop(name)
        assert (row.kind, row.shape, row.persistent) == (Kind.BUFFER, tuple(buffer.shape), name != "scratch")
        assert row.saved is (name in net.state_dict())
    assert set(actual_rows) == {
        "table",
        "cache['cos']",
        "cache[3]",
        "blocks[0].weight",
        "blocks[0].bias",
        "holder.table",
    }
    # The pickle has no code, so statecli cannot know whether the class saves these tensors itself.
    assert all(row.kind is Kind.UNREGISTERED and row.saved is None for row in actual_rows.values())
    assert [oddity.fqn for oddity in state.oddities if oddity.name == "none-parameter"] == ["nothing"]
    # Flat weights of an RNN, a parameter in a list and a view of a buffer are aliases, not unregistered tensors.
    registered = rows(state)
    assert "second_name[0]" in registered["fc.weight"].aliases
    assert registered["norm.running_mean"].aliases == ("view",)
    assert any(alias.startswith("rnn._flat_weights") for alias in registered["rnn.weight_ih_l0"].aliases)
    assert registered["fc.weight"].tied_to == ("tied.weight",)


def test_a_module_twice_registered_has_both_names(tmp_path):
    """Each tensor has a row under both names, and the two rows are tied."""
    layer = nn.Linear(2, 2)
    actual_rows = rows(read(tmp_path, nn.Sequential(layer, layer)))
    assert set(actual_rows) == {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert actual_rows["0.weight"].tied_to == ("1.weight",)


@pytest.mark.parametrize(
    "build_module",
    [
        lambda: nn.Transformer(16, 2, 1, 1, 32),
        lambda: nn.DataParallel(nn.Linear(2, 2)),
        lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU())),
        lambda: nn.LazyLinear(3),
        lambda: nn.MultiheadAttention(8, 2),
    ],
    ids=["transformer", "data-parallel", "fx", "lazy", "attention"],
)
def test_torch_modules_agree_with_the_live_module(tmp_path, build_module):
    """Names and kinds agree with the live module."""
    module = build_module()
    actual_rows = rows(read(tmp_path, module))
    registered = {name: row for name, row in actual_rows.items() if row.kind is not Kind.UNREGISTERED}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    assert {n for n, row in registered.items() if row.kind is Kind.PARAMETER} == set(parameters)
    assert {n for n, row in registered.items() if row.kind is Kind.BUFFER} == set(buffers)


def test_a_lazy_module_has_no_shape(tmp_path):
    """A note marks an uninitialized parameter as lazy."""
    row = rows(read(tmp_path, nn.LazyLinear(3)))["weight"]
    assert row.shape is None
    assert "lazy" in row.note


def train_optimizer(net, optimizer_of):
    optimizer = optimizer_of(net)
    for parameter in net.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return optimizer


def test_training_checkpoint_has_a_section_for_each_state(tmp_path):
    """Model, EMA, optimizer and scheduler are sections; a loose RNG tensor is in no named section."""
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    optimizer = train_optimizer(net, lambda net: torch.optim.AdamW(net.parameters()))
    state = read(
        tmp_path,
        {
            "model": net.state_dict(),
            "ema": {key: value.clone() for key, value in net.state_dict().items()},
            "optimizer": optimizer.state_dict(),
            "lr_scheduler": {"last": torch.ones(1)},
            "epoch": 3,
            "rng": torch.get_rng_state(),
        },
    )
    assert state.sections == ("", "model", "ema", "optimizer", "lr_scheduler")
    assert {t.kind for t in state.tensors if t.section in ("", "lr_scheduler")} == {Kind.OTHER}
    assert {t.kind for t in state.tensors if t.section == "optimizer"} == {Kind.OPTIMIZER}
    assert state.metadata.values["epoch"] == 3
    assert state.metadata.values["optimizer.param_groups.0.lr"] == 0.001


def test_each_optimizer_state_of_a_list_is_a_section(tmp_path):
    """Each state in a list of optimizer states is a section, named by its dotted path."""
    net = nn.Linear(2, 2)
    optimizer = train_optimizer(net, lambda net: torch.optim.SGD(net.parameters(), 0.1, momentum=0.9))
    state = read(
        tmp_path,
        {
            "epoch": 1,
            "pytorch-lightning_version": "2.6",
            "state_dict": net.state_dict(),
            "optimizer_states": [optimizer.state_dict()],
            "loops": {"fit": {"progress": 1}},
        },
    )
    assert state.sections == ("state_dict", "optimizer_states.0")


def test_two_models_under_one_key_are_two_sections(tmp_path):
    """The sections are `models.gen` and `models.disc`, not a single state with odd names."""
    models = {"gen": nn.Linear(2, 2).state_dict(), "disc": nn.Linear(2, 2).state_dict()}
    assert read(tmp_path, {"models": models, "step": 1}).sections == ("models.gen", "models.disc")


ONE_ELEMENT = torch.ones(1)
#: A state of a single model -> the names of its tensors, as in Python code.
UNIQUE_NAMES = {
    "nested dicts without a trace of training": (
        {"Dense_0": {"kernel": ONE_ELEMENT}, "Dense_1": {"kernel": ONE_ELEMENT}},
        ["Dense_0['kernel']", "Dense_1['kernel']"],
    ),
    "tensors of get_extra_state": (
        collections.OrderedDict({"fc.weight": ONE_ELEMENT, "fc._extra_state": {"scale": ONE_ELEMENT}}),
        ["fc.weight", "fc._extra_state['scale']"],
    ),
    "keys that are not text": ({2: ONE_ELEMENT, None: ONE_ELEMENT, "2": ONE_ELEMENT}, ["[2]", "[None]", "2"]),
    "names that collide when joined": ({"a.b": ONE_ELEMENT, "a": {"b": ONE_ELEMENT}}, ["a.b", "a['b']"]),
    "a tensor alone": (ONE_ELEMENT, ["tensor"]),
}


@pytest.mark.parametrize(("checkpoint", "names"), UNIQUE_NAMES.values(), ids=UNIQUE_NAMES)
def test_tensors_of_one_model_have_different_names(tmp_path, checkpoint, names):
    """The state is a single section, and each tensor has a name that no other path has."""
    state = read(tmp_path, checkpoint)
    assert (state.sections, list(rows(state))) == (("model",), names)


CONTAINER_CALLS = {
    "a tuple of tuples": (collections.OrderedDict, ((("a", torch.ones(1)), ("b.w", torch.ones(2))),)),
    "a tuple of lists": (collections.OrderedDict, ((["a", torch.ones(1)],),)),
    "a deque of pairs": (collections.OrderedDict, (collections.deque([("a", torch.ones(1))]),)),
    "an OrderedDict": (collections.OrderedDict, (collections.OrderedDict(a=torch.ones(1)),)),
    "a defaultdict of a dict": (collections.OrderedDict, (collections.defaultdict(None, a=torch.ones(1)),)),
    "a dict": (dict, ({"a": torch.ones(1)},)),
    "pairs in a dict": (dict, ((("a", torch.ones(1)),),)),
    "pairs in a defaultdict": (collections.defaultdict, (None, (("a", torch.ones(1)),))),
    "pairs and items": (
        collections.defaultdict,
        (None, (("a", torch.ones(1)),)),
        None,
        None,
        iter({"b": torch.ones(2)}.items()),
    ),
    "a list of a tuple": (list, (Called(tuple, ([torch.ones(1), torch.ones(2)],)),)),
    "a deque that forgets": (collections.deque, ([torch.ones(1), torch.ones(2), torch.ones(3)], 2)),
}


@pytest.mark.parametrize("call", CONTAINER_CALLS.values(), ids=list(CONTAINER_CALLS))
def test_computed_container_has_the_tensors_of_torch(tmp_path, call):
    """A container built from pairs, from another container or by a call has the names and tensors that torch loads."""
    state = read(tmp_path, Called(*call))
    loaded = torch.load(tmp_path / "file.pt", weights_only=False)
    entries = loaded.items() if isinstance(loaded, dict) else ((f"[{n}]", value) for n, value in enumerate(loaded))
    expected_shapes = {name: tuple(value.shape) for name, value in entries if isinstance(value, torch.Tensor)}
    assert {name: row.shape for name, row in rows(state).items()} == expected_shapes


class DictWithArguments(dict):
    """A dict that is pickled with arguments for its own class."""

    def __init__(self, argument):
        super().__init__(b=torch.ones(2))
        self.argument = argument

    def __reduce__(self):
        return DictWithArguments, (self.argument,), {"c": torch.ones(3)}, None, iter(self.items())


@pytest.mark.parametrize("nested", [False, True])
def test_tensors_in_constructor_arguments_are_listed(tmp_path, nested):
    """The class may do anything with its arguments: tensors in the arguments are listed next to the items."""
    container = DictWithArguments({"a": torch.ones(1)})
    state = read(tmp_path, {"state_dict": container} if nested else container)
    assert {name: row.shape for name, row in rows(state).items()} == {"b": (2,), "c": (3,), "__args__[0]['a']": (1,)}


def test_tensors_in_attributes_of_a_dict_are_listed(tmp_path):
    """An attribute of a checkpoint's dict is not an entry of the dict, but torch loads the attribute too."""
    checkpoint = collections.OrderedDict(model={"fc.weight": torch.ones(1)}, optimizer=None)
    checkpoint.extra = torch.ones(2)
    checkpoint.more = {"a": torch.ones(3)}
    shapes = {(row.section, row.fqn): row.shape for row in read(tmp_path, checkpoint).tensors}
    assert shapes == {("model", "fc.weight"): (1,), ("", "extra"): (2,), ("more", "a"): (3,)}


def test_checkpoint_without_tensors_is_an_error(tmp_path):
    """A file without tensors is read; if tensors are needed, the error describes the object in the file."""
    state = read(tmp_path, {"epoch": 3})
    assert (state.tensors, state.sections, state.metadata.values) == ((), (), {"epoch": 3})
    with pytest.raises(MalformedError, match=r"file\.pt: contains no tensor: the object is a dict of length 1"):
        load.read_checkpoint(str(tmp_path / "file.pt"))
    for value, name in ((3, "an int"), (0.5, "a float"), (None, "None")):
        (oddity,) = read(tmp_path, value).oddities
        assert oddity.message == f"contains no tensor: the object is {name}"


def test_optimizer_state_dict_is_the_section_optimizer(tmp_path):
    """optimizer.state_dict() saved by itself is the section `optimizer`."""
    optimizer = train_optimizer(nn.Linear(2, 2), lambda net: torch.optim.AdamW(net.named_parameters()))
    state = read(tmp_path, optimizer.state_dict())
    assert state.sections == ("optimizer",)
    assert state.optimizers[0].groups[0].names == ("weight", "bias")


def test_numpy_arrays_have_the_layout_numpy(tmp_path):
    """Arrays inside a checkpoint have a dtype and a shape, but are not tensors."""
    (row,) = read(tmp_path, {"w": np.ones((2, 3), dtype="float32")}).tensors
    assert (row.dtype, row.shape, row.layout, row.nbytes) == ("float32", (2, 3), "numpy", 24)


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize(
    "array",
    {
        "C": np.arange(6.0).reshape(2, 3),
        "Fortran": np.arange(6.0).reshape(2, 3).T,
        "permuted": np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2),
        "big-endian": np.arange(3, dtype=">f4"),
        "strided": np.arange(6.0)[::2],
        "zero-dimensional": np.array(2.5),
        "empty": np.zeros((0, 2)),
    }.values(),
    ids=lambda array: f"{array.dtype.str}{array.shape}",
)
def test_array_has_the_values_of_numpy_in_any_protocol(tmp_path, array, protocol):
    """numpy writes a contiguous array as a call of `_frombuffer` from protocol 5 on, and empty bytes as `bytes()`."""
    torch.save({"w": torch.ones(1), "a": array}, tmp_path / "a.pt", pickle_protocol=protocol)
    row = formats.read(str(tmp_path / "a.pt")).tensors[1]
    assert (row.fqn, row.shape, row.nbytes) == ("a", array.shape, array.nbytes)
    assert read_all_values(row.data).tolist() == array.reshape(-1).tolist()


def test_wrong_order_of_the_dimensions_of_an_array_is_damage(tmp_path):
    """numpy refuses an order of dimensions that does not name each dimension once."""
    function, args = np.arange(24).reshape(2, 3, 4).transpose(1, 0, 2).__reduce_ex__(5)
    torch.save({"a": Called(function, (bytes(args[0]), *args[1:4], (0, 0, 2)))}, tmp_path / "a.pt", pickle_protocol=5)
    (row,) = formats.read(str(tmp_path / "a.pt")).tensors
    assert "expected each dimension once" in row.damage


def test_foreign_globals_are_named_and_not_imported(tmp_path):
    """Names from outside torch are reported."""
    state = read(tmp_path, {"w": torch.ones(1), "args": Holder()})
    (oddity,) = [oddity for oddity in state.oddities if oddity.name == "foreign-globals"]
    assert "Holder" in oddity.message


def test_ordinary_state_dict_has_no_oddities(tmp_path):
    """A state_dict of torch's own modules has no oddities."""
    assert read(tmp_path, nn.Linear(2, 2).state_dict()).oddities == ()


def test_allow_list_equals_torch():
    """statecli's list of harmless globals equals the list of the installed torch."""
    from torch._weights_only_unpickler import _get_allowed_globals

    assert safe_globals.list_allowed_names() == set(_get_allowed_globals())


def test_a_shared_container_is_searched_once(tmp_path):
    """3,000 entries that share a list of 100,000 numbers do not cost a search of the list for each entry."""
    big = list(range(100_000))
    config = {f"k{n}": [big, big] for n in range(3000)}
    state = read(tmp_path, {"config": config, "model": {"fc.weight": torch.ones(1)}})
    assert [row.fqn for row in state.tensors] == ["fc.weight"]


class Views(nn.Module):
    """A module with slices of a plain tensor, and a buffer that is a view of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        base, full = torch.randn(10), torch.randn(100)
        self.a, self.b = base[:5], base[5:]
        self.register_buffer("buf", full[:10])
        self.full = full
        self.again = self.a
        self.part = self.buf[2:4]


def test_slices_of_an_unregistered_tensor_are_rows(tmp_path):
    """A view inside a registered tensor is an alias, and so is a second name of an object; other slices are rows."""
    actual_rows = rows(read(tmp_path, Views()))
    assert set(actual_rows) == {"buf", "a", "b", "full"}
    assert actual_rows["a"].tied_to == ("b",)
    assert actual_rows["full"].tied_to == ("buf",)
    assert actual_rows["buf"].aliases == ("part",)
    assert actual_rows["a"].aliases == ("again",)


def test_weight_of_the_old_weight_norm_has_a_note(tmp_path):
    """`weight` is computed from weight_g and weight_v before each forward."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        module = torch.nn.utils.weight_norm(nn.Linear(2, 2))
    module.weight = module.weight.detach()
    assert rows(read(tmp_path, module))["weight"].note == "derived from weight_g and weight_v"


def test_states_of_random_generators_are_not_a_model(tmp_path):
    """A file like the Trainer's rng_state.pth has no tensor that a model would register."""
    state = read(tmp_path, {"python": (3, (1, 2), None), "numpy": np.ones(624, "uint32"), "cpu": torch.get_rng_state()})
    assert {row.kind for row in state.tensors} == {Kind.OTHER}


def test_keys_that_cannot_be_written_are_numbered(tmp_path):
    """The state of an optimizer that is pickled whole has parameters as keys; its names still differ."""
    net = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.save(optimizer, tmp_path / "whole.pt")
    names = [tensor.fqn for tensor in formats.read(str(tmp_path / "whole.pt")).tensors]
    assert len(names) == len(set(names))
    assert "state[#1]['exp_avg']" in names
    torch.save({(1, 2): torch.ones(2), (3, 4): torch.ones(3)}, tmp_path / "tuples.pt")
    assert [t.fqn for t in formats.read(str(tmp_path / "tuples.pt")).tensors] == ["[(1, 2)]", "[(3, 4)]"]


# --- storages and nested tensors -------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_packed_quantized_tensor_has_torchs_values(tmp_path, legacy):
    """A storage of packed values counts its bytes, not its values, and other storages may follow."""
    tensor = torch.quantize_per_tensor(torch.randn(3, 5), 0.1, 3, torch.quint4x2)
    state_dict = {"packed": tensor, "w": torch.ones(2)}
    actual = read(tmp_path, state_dict, _use_new_zipfile_serialization=not legacy).tensors
    assert [row.damage for row in actual] == [None, None]
    assert read_all_values(actual[0].data).tolist() == tensor.dequantize().reshape(-1).tolist()
    assert read_all_values(actual[1].data).tolist() == [1, 1]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_empty_storage_may_have_two_dtypes(tmp_path, legacy):
    """torch creates an empty storage again for each of its dtypes."""
    tensor = torch.zeros(2, 0)
    state = read(tmp_path, {"a": tensor, "b": tensor.view(torch.uint8)}, _use_new_zipfile_serialization=not legacy)
    assert [(row.dtype, row.damage) for row in state.tensors] == [("float32", None), ("uint8", None)]


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_bare_storage_is_a_tensor_of_its_dtype(tmp_path, legacy):
    """A storage has one dimension; an untyped storage is bytes. A note names the storages."""
    storages = {
        "floats": torch.FloatStorage([1.0, 2.0]),
        "longs": torch.LongStorage([1, 2, 3]),
        "bytes": torch.FloatStorage([1.0, 2.0]).untyped(),
        "empty": torch.FloatStorage([]),
    }
    state = read(tmp_path, {"deep": [storages], "w": torch.ones(1)}, _use_new_zipfile_serialization=not legacy)
    actual = {
        name.split("'")[1]: (row.dtype, row.shape, row.nbytes) for name, row in rows(state).items() if "'" in name
    }
    assert actual == {
        name: (
            str(tensor.dtype).removeprefix("torch.") if name != "bytes" else "uint8",
            (len(tensor),),
            tensor.nbytes(),
        )
        for name, tensor in storages.items()
    }
    (oddity,) = (oddity for oddity in state.oddities if oddity.name == "bare-storage")
    assert oddity.message.endswith("deep[0]['floats'], deep[0]['longs'], deep[0]['bytes'], deep[0]['empty']")


def test_file_with_only_a_storage_is_read(tmp_path):
    """A storage may be the whole object of torch.save."""
    (row,) = read(tmp_path, torch.FloatStorage([1.0, 2.0])).tensors
    assert (row.fqn, row.shape, row.note) == ("tensor", (2,), "storage")


def test_a_storage_is_tied_to_the_tensor_over_it(tmp_path):
    """The storage and the tensor share their bytes."""
    storage = torch.FloatStorage([1.0, 2.0, 3.0])
    actual_rows = rows(read(tmp_path, {"w": torch.empty(0).set_(storage), "s": storage}))
    assert (actual_rows["w"].tied_to, actual_rows["s"].tied_to) == (("s",), ("w",))


def test_storage_and_array_are_not_tensors_of_a_state_dict(tmp_path):
    """A storage and an array have values, but are not a torch.Tensor."""
    state_dict = {"w": torch.ones(1), "s": torch.FloatStorage([1.0]), "n": torch.ones(1).numpy(), "x": 3}
    (actual,) = read(tmp_path, state_dict).state_dicts
    assert actual.others == ("s", "n", "x")


def ragged_tensor(layout, *lengths):
    return torch.nested.nested_tensor([torch.ones(n, 3) for n in lengths], layout=layout)


@pytest.mark.parametrize(
    ("layout", "name", "parts"),
    [
        (torch.jagged, "jagged", ["values", "offsets"]),
        (torch.strided, "nested", ["values", "sizes", "strides", "offsets"]),
    ],
)
def test_nested_tensor_has_parts_and_no_shape(tmp_path, layout, name, parts):
    """A nested tensor has its values and the start of each inner tensor, but no single shape."""
    nested = ragged_tensor(layout, 2, 4).requires_grad_(layout is torch.jagged)
    (row,) = read(tmp_path, {"w": nested}).tensors
    assert (row.layout, row.shape, row.dtype, row.elements, row.data) == (name, None, "float32", 18, None)
    assert [part for part, _ in row.parts] == parts
    assert row.requires_grad is (True if layout is torch.jagged else None)
    assert row.note.startswith("nested: ")


def test_jagged_tensor_with_holes_has_lengths(tmp_path):
    """A jagged tensor with holes also has the length of each inner tensor."""
    nested = torch.nested.nested_tensor_from_jagged(torch.ones(6, 3), torch.tensor([0, 2, 6]), torch.tensor([1, 3]))
    (row,) = read(tmp_path, {"w": nested}).tensors
    assert {name: data.shape for name, data in row.parts} == {"values": (6, 3), "offsets": (3,), "lengths": (2,)}


def test_diff_shows_the_shapes_of_nested_parts(statecli, tmp_path):
    """If parts of a nested tensor have other shapes, the table and the finding show the shapes of the parts."""
    for lengths, path in (((2, 4), tmp_path / "a.pt"), ((2, 5), tmp_path / "b.pt")):
        torch.save({"w": ragged_tensor(torch.jagged, *lengths)}, path)
    table = statecli("diff", tmp_path / "a.pt", tmp_path / "b.pt", "-f", "table").out
    assert "shape values [6,3], offsets [3] → values [7,3], offsets [3]" in " ".join(table.split())
    (finding,) = statecli("diff", tmp_path / "a.pt", tmp_path / "b.pt", "-f", "json").json["findings"]
    assert "shape values [6,3], offsets [3] → values [7,3], offsets [3]" in finding["message"]


@pytest.mark.parametrize("untyped", [False, True])
def test_diff_finds_a_changed_storage(statecli, tmp_path, untyped):
    """A changed value of a storage without a tensor is found, and a note names the storage."""
    for value, path in ((2.0, tmp_path / "a.pt"), (3.0, tmp_path / "b.pt")):
        storage = torch.FloatStorage([1.0, value])
        torch.save({"s": storage.untyped() if untyped else storage, "w": torch.ones(2)}, path)
    assert statecli("diff", tmp_path / "a.pt", tmp_path / "a.pt").code == 0
    result = statecli("diff", tmp_path / "a.pt", tmp_path / "b.pt")
    assert result.code == 1
    assert ("1 of 1 buffers changed" if untyped else "1 of 2 parameters changed") in result.out
    assert "b.pt: storages without a tensor are shown as one-dimensional tensors: s\n" in result.out


# --- modules with their own __reduce__ or __getstate__ ---------------------------------------------------------------


def _rebuilt(*values):
    """Rebuild an object of a class below."""
    module = nn.Module()
    for number, first in enumerate(values):
        setattr(module, f"m{number}", first)
    return module


class _ByState(nn.Linear):
    """A module whose `__reduce__` returns a tensor as argument and its own `__dict__` as state."""

    def __reduce__(self):
        return _rebuilt, (torch.ones(7),), self.__dict__


class _ByKeyword(nn.Linear):
    """A module whose `__reduce_ex__` returns a call with keywords."""

    def __reduce_ex__(self, protocol):
        return copyreg.__newobj_ex__, (type(self), (), {"size": torch.ones(5)}), self.__dict__


class _ByParts(nn.Module):
    """A module whose `__reduce__` returns its modules and tensors, and no state."""

    def __init__(self):
        super().__init__()
        self.fc, self.norm = nn.Linear(2, 3), nn.BatchNorm1d(4)
        self.register_buffer("table", torch.ones(6))

    def __reduce__(self):
        return _rebuilt, (self.fc, self.norm, self.table)


class _BySettings(nn.Module):
    """A module whose `__getstate__` returns a state_dict and a module under names of its own."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(2, 3)

    def __getstate__(self):
        return {"weights": self.state_dict(), "inner": [nn.Linear(5, 5)]}


@pytest.mark.parametrize("wrap", ["bare", "in a Sequential", "in a dict"])
@pytest.mark.parametrize("kind", [_ByState, _ByKeyword, _ByParts, _BySettings])
def test_all_tensors_of_a_module_with_own_reduce_are_listed(tmp_path, kind, wrap):
    """Each tensor that torch reads from the pickle has a name, whatever the rebuilding functions do."""
    module = kind(2, 3) if issubclass(kind, nn.Linear) else kind()
    objects = {"bare": module, "in a Sequential": nn.Sequential(module), "in a dict": {"model": module}}
    torch.save(objects[wrap], tmp_path / "f.pt")
    sizes = []

    def rebuild(storage, offset, size, *arguments):
        sizes.append(tuple(size))
        return torch.empty(size)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch._utils, "_rebuild_tensor_v2", rebuild)
        torch.load(tmp_path / "f.pt", weights_only=False)
    state = formats.read(str(tmp_path / "f.pt"))
    assert sorted(row.shape for row in state.tensors) == sorted(sizes)
    assert len({row.fqn for row in state.tensors}) == len(sizes)


def test_old_spectral_norm_weight_is_a_row_before_forward(tmp_path):
    """Until the first forward, `weight` shares the memory of `weight_orig`."""
    state = read(tmp_path, torch.nn.utils.spectral_norm(nn.Linear(2, 2)))
    (row,) = [row for row in state.tensors if row.fqn == "weight"]
    assert (row.kind, row.derived, row.tied_to) == (Kind.UNREGISTERED, "derived from weight_orig", ("weight_orig",))


class _WithMetadata:
    """A tensor saved with metadata that torch does not write."""

    def __init__(self, tensor, metadata):
        self.tensor, self.metadata = tensor, metadata

    def __reduce__(self):
        storage = torch.storage.TypedStorage(
            wrap_storage=self.tensor.untyped_storage(), dtype=self.tensor.dtype, _internal=True
        )
        shape = (tuple(self.tensor.shape), self.tensor.stride())
        return torch._utils._rebuild_tensor_v2, (storage, 0, *shape, False, collections.OrderedDict(), self.metadata)


@pytest.mark.parametrize("metadata", [{"neg": False}, {"neg": 1}, {b"neg": True}, {"conj": 0}, ["neg"]], ids=repr)
def test_metadata_that_torch_does_not_write_is_refused(tmp_path, metadata):
    """torch sets a flag if the key is present, whatever its value: a reader of the value gets opposite numbers."""
    torch.save({"w": _WithMetadata(torch.arange(1.0, 5.0), {"neg": True})}, tmp_path / "good.pt")
    (row,) = formats.read(str(tmp_path / "good.pt")).tensors
    assert row.data.negative
    assert torch.load(tmp_path / "good.pt")["w"].tolist() == [-1.0, -2.0, -3.0, -4.0]
    torch.save({"w": _WithMetadata(torch.arange(1.0, 5.0), metadata)}, tmp_path / "bad.pt")
    (row,) = formats.read(str(tmp_path / "bad.pt")).tensors
    assert "metadata of" in row.damage


def test_the_order_of_an_array_is_a_bool(tmp_path):
    """numpy takes any nonzero number for Fortran order."""
    constructor, args, state = np.arange(6.0).reshape(2, 3).__reduce__()
    for order, is_sound in ((False, True), (True, True), (1, False), (2, False)):
        torch.save({"w": Called(constructor, args, (*state[:3], order, *state[4:]))}, tmp_path / "a.pt")
        rows = formats.read(str(tmp_path / "a.pt")).tensors
        assert [row.damage is None for row in rows] == [is_sound]


PLAIN_STATE = (None, None, None, -1, -1, 0)
UNUSUAL_TYPES = {
    "of numpy's own": (("f4", False, False), (3, ">", *PLAIN_STATE)),
    "of numpy's own by the default": (("f4",), (3, ">", *PLAIN_STATE)),
    "with an order in bytes": (("f4", False, True), (3, b">", *PLAIN_STATE)),
    "with the state of an older numpy": (("f4", False, True), (">", None, None, -1, -1)),
    "with parts": (("f4", False, True), (3, "<", (np.dtype("u1"), (4,)), None, None, -1, -1, 0)),
}


def test_array_with_an_unusual_dtype_pickle_is_damage(tmp_path):
    """numpy ignores the state of its own types, and takes an order in bytes."""
    honest = [(args, (3, order, *PLAIN_STATE)) for args in (("f4", False, True), ("f4", 0, 1)) for order in "<>="]
    constructor, args, state = np.array([1.5, 2.5], "f4").__reduce__()
    for constructor_args, type_state in (*honest, *UNUSUAL_TYPES.values()):
        is_sound = (constructor_args, type_state) in honest
        dtype = Called(np.dtype, constructor_args, type_state)
        torch.save({"w": Called(constructor, args, (state[0], state[1], dtype, *state[3:]))}, tmp_path / "a.pt")
        (row,) = formats.read(str(tmp_path / "a.pt")).tensors
        assert (row.damage is None) == is_sound
        if is_sound:
            loaded = torch.load(tmp_path / "a.pt", weights_only=False)["w"]
            assert read_all_values(row.data).tolist() == loaded.tolist()


@pytest.mark.parametrize("name", UNUSUAL_TYPES)
def test_number_with_an_unusual_dtype_pickle_has_no_value(tmp_path, name):
    """A number whose type has an unusual pickle is an unknown call, not a value."""
    number = Called(np.float32(1).__reduce__()[0], (Called(np.dtype, *UNUSUAL_TYPES[name]), np.float32(1.5).tobytes()))
    torch.save({"w": torch.ones(1), "best": number}, tmp_path / "a.pt")
    assert formats.read(str(tmp_path / "a.pt")).metadata.values.get("best") != 1.5
