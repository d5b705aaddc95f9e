"""Claims of a pickle about a tensor, checked against the bytes in the file."""

from __future__ import annotations

import pytest

from statecli.core.errors import MalformedError
from statecli.core.model_state import ByteRange
from statecli.formats import torch_zip
from statecli.formats.torch.objects import build_state
from statecli.pickles.machine import read_pickle

from .attacks import build_pickle, number, numbers, state_dict, tensor, text

STORAGES = {"0": ByteRange("file.pt", 64, 16)}


def read(body, storages=STORAGES):
    return build_state(
        read_pickle(body), storages, target="file.pt", format="torch-zip", traits=torch_zip.TRAITS, oddities=[]
    )


def find_refusal(**wrong_fields):
    """Return the error line for a tensor `w` over 16 bytes with these wrong fields."""
    return read_only_row(state_dict(w=tensor(**wrong_fields)))


def read_only_row(body):
    """Return the line, without its file, for the only tensor of a body."""
    (row,) = read(body).tensors
    assert (row.dtype, row.shape, row.data, row.parts) == ("unknown", None, None, ())
    assert "\n" not in row.damage
    assert row.damage.startswith("file.pt: ")
    return row.damage.removeprefix("file.pt: ")


def test_an_honest_tensor_is_read():
    """The builder's defaults contradict nothing."""
    (row,) = read(state_dict(w=tensor())).tensors
    assert (row.fqn, row.shape, row.data.storage) == ("w", (4,), STORAGES["0"])


@pytest.mark.parametrize(
    ("wrong_fields", "message"),
    [
        ({"size": (-1,)}, "w: its shape contains -1; expected integers from 0 to 2^63 - 1"),
        (
            {"size": (2**62, 2**62), "stride": (1, 1)},
            "w: shape [4611686018427387904, 4611686018427387904] is impossible",
        ),
        (
            {"numel": 400},
            ("w: storage 0 has 16 bytes in the file, but the pickle claims 1600; copy or download the file again"),
        ),
        ({"numel": -1}, "w: storage '0' claims -1 elements; expected an integer of 0 or more"),
        (
            {"numel": 2**62},
            (
                "w: storage 0 has 16 bytes in the file, but the pickle claims an integer of 65 bits; copy or download "
                "the file again"
            ),
        ),
        ({"size": (5,)}, "w: shape [5] at offset 0 needs 5 elements, but storage 0 has 4 float32 elements"),
        ({"offset": 1}, "w: shape [4] at offset 1 needs 5 elements, but storage 0 has 4 float32 elements"),
        ({"offset": -1}, "w: its offset into storage 0 is -1; expected an integer of 0 or more"),
        ({"stride": (2,)}, "w: shape [4] at offset 0 needs 7 elements, but storage 0 has 4 float32 elements"),
        ({"stride": (-1,)}, "w: its stride contains -1; expected integers from 0 to 2^63 - 1"),
        ({"stride": (1, 1)}, "w: its shape has 1 sizes, but there are 2 strides"),
        ({"key": "9"}, "w: storage '9' is not in the file; copy the file again, or save the checkpoint again"),
        (
            {"key": "../../../etc/passwd"},
            "w: storage '../../../etc/passwd' is not in the file; copy the file again, or save the checkpoint again",
        ),
        (
            {"kind": "Nope"},
            ("w: its storage is not recorded in the form that torch writes ('torch.Nope'); save the checkpoint again"),
        ),
        (
            {"size": (1,) * 1025, "stride": (1,) * 1025},
            "w: its shape has 1025 dimensions, more than statecli's limit of 1024",
        ),
    ],
)
def test_false_claim_is_reported_with_both_numbers(wrong_fields, message):
    """torch.load(mmap=True) accepts several of these fields and shows the bytes of an adjacent storage."""
    assert find_refusal(**wrong_fields).startswith(message)


def build_quantized(scales, *, size):
    """Return a tensor of four stored 8-bit numbers with these scales, which are also the zero points."""
    storage = b"(" + text("storage") + b"ctorch\nQInt8Storage\n" + text("q") + text("cpu") + number(4) + b"tQ"
    scheme = b"(" + b"ctorch\nper_channel_affine_float_qparams\n" + scales + scales + number(1) + b"t"
    geometry = number(0) + numbers(*size) + numbers(1, 1) + scheme
    return b"ctorch._utils\n_rebuild_qtensor\n(" + storage + geometry + b"\x89ccollections\nOrderedDict\n)RtR"


def test_repeated_scales_of_a_quantized_tensor_are_damage():
    """Scales are read whole: 2**28 scales over 4 bytes took 6 GB for a tensor without elements."""
    storages = {**STORAGES, "q": ByteRange("file.pt", 128, 4)}
    (row,) = read(state_dict(w=build_quantized(tensor(), size=(1, 4))), storages).tensors
    assert row.data.quantizer.scales.shape == (4,)
    (row,) = read(state_dict(w=build_quantized(tensor(size=(2**28,), stride=(0,)), size=(0, 2**28))), storages).tensors
    message = "its quantizer needs 1073741824 bytes for 268435456 numbers, but the storage has 16"
    assert row.damage == f"file.pt: w: {message}"


def test_missing_strides_mean_contiguous():
    """torch reads the tensor as contiguous too."""
    (row,) = read(state_dict(w=tensor(size=(2, 2), stride=()))).tensors
    assert row.data.strides is None


def test_a_huge_expansion_is_listed_and_not_walked():
    """2^40 elements over four stored floats give one row at once."""
    (row,) = read(state_dict(w=tensor(size=(2**20, 2**20), stride=(0, 0)))).tensors
    assert row.note == "expanded: 1099511627776 elements share 4 stored elements"


@pytest.mark.parametrize("offset", [0, 4, 5, 2**40])
def test_empty_tensor_may_have_any_offset(offset):
    """A tensor without elements reads no bytes, so the offset may lie behind the four elements of the storage."""
    (row,) = read(state_dict(w=tensor(size=(0, 3), stride=(3, 1), offset=offset))).tensors
    assert (row.shape, row.elements, row.nbytes, row.damage) == ((0, 3), 0, 0, None)


def test_requires_grad_must_be_a_bool():
    """torch raises an error for the value, so statecli reports the tensor as damaged."""
    body = state_dict(w=tensor()).replace(b"\x89", b"K\x07")
    assert read_only_row(body) == "w: requires_grad is recorded as 7, not as a bool"


def test_key_set_twice_is_reported():
    """The last value counts, as in torch, and the report shows that the key is set twice."""
    body = build_pickle(b"}(" + text("w") + tensor() + text("w") + tensor(size=(2,)) + b"u")
    state = read(body)
    assert [row.shape for row in state.tensors] == [(2,)]
    assert [oddity.name for oddity in state.oddities] == ["key-set-twice"]


def test_plain_object_as_a_storage_is_damage():
    """A tensor over a plain object is malformed and does not crash the reader."""
    body = build_pickle(b"}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n(NK\x00(K\x04t(K\x01t\x89NtRs")
    assert (
        read_only_row(body) == "w: its storage is not recorded in the form that torch writes; save the checkpoint again"
    )


def test_rebuild_call_without_arguments_is_damage():
    """The error has the number of arguments."""
    body = build_pickle(b"}" + text("w") + b"ctorch._utils\n_rebuild_tensor_v2\n)Rs")
    assert read_only_row(body).startswith("w: the call that rebuilds this tensor has 0 arguments")


def test_dicts_that_contain_each_other_are_walked_once():
    """A cycle does not give an endless list."""
    body = build_pickle(b"}q\x00(" + text("w") + tensor() + text("self") + b"h\x00u")
    assert [row.fqn for row in read(body).tensors] == ["w"]


def test_a_billion_paths_are_one_row():
    """Shared containers are expanded once: 2^40 paths to a tensor give one row."""
    doubled = b"]" + tensor() + b"a" + b"".join(b"q%c0](h%ch%ce" % (n, n, n) for n in range(1, 41))
    assert len(read(build_pickle(b"}" + text("w") + doubled + b"s")).tensors) == 1


def test_omission_below_the_depth_limit_is_reported():
    """Levels below the limit of 200 are not listed, and the omission is reported."""
    nested_list = b"]" * 301 + tensor() + b"a" * 301
    body = build_pickle(b"}(" + text("w") + tensor() + text("deep") + nested_list + b"u")
    state = read(body)
    assert [row.fqn for row in state.tensors] == ["w"]
    assert "too-deep" in [oddity.name for oddity in state.oddities]


def test_long_names_and_objects_never_print_whole():
    """A message quotes scalars, cut short, and types of everything else."""
    name = "'" + "k" * 57 + "...'"
    assert find_refusal(key="k" * 10_000).startswith(f"w: storage {name} is not in the file; ")
    assert find_refusal(key="k" * 10_000, numel=-1).startswith(f"w: storage {name} claims -1 elements; ")
    storages = {"k" * 10_000: STORAGES["0"]}
    for wrong_fields in ({"numel": 400}, {"size": (5,)}, {"offset": -1}):
        (row,) = read(state_dict(w=tensor(key="k" * 10_000, **wrong_fields)), storages).tensors
        assert "storage kkk" in row.damage
        assert len(row.damage) < 500


def test_nested_rebuild_calls_are_limited():
    """Twenty thousand Parameters around a tensor are reported as damage, without recursion."""
    call = b"ctorch._utils\n_rebuild_parameter\n"
    nested_calls = b"q\x01" + call + b"q\x020" + tensor() + b"q\x030"
    body = b"".join(b"h\x02h\x03\x88N\x87Rq\x030" for _ in range(20_000))
    damage = read_only_row(build_pickle(b"}" + nested_calls[2:] + body + text("w") + b"h\x03s"))
    assert damage == "w: nests tensors more than 16 levels deep, the limit of statecli"


def test_shared_parts_are_decoded_once():
    """Sparse tensors built of the same sparse tensor twice, over and over, take no exponential time."""
    layout = b"ctorch.serialization\n_get_layout\n(" + text("torch.sparse_coo") + b"tRq\x020"
    rebuild = b"ctorch._utils\n_rebuild_sparse_tensor\nq\x040"
    start = layout + rebuild + tensor() + b"q\x030"
    fields = b"(h\x03h\x03(K\x04t\x88t"
    body = start + b"".join(b"h\x04h\x02" + fields + b"\x86Rq\x030" for _ in range(14))
    (row,) = read(build_pickle(b"}" + body + text("w") + b"h\x03s")).tensors
    assert row.layout == "sparse_coo"


def test_a_long_name_over_many_entries_is_refused():
    """A prefix of a megabyte and a thousand entries do not take a gigabyte of names."""
    entries = b"(" + b"".join(text(str(n)) + tensor() for n in range(1000)) + b"u"
    with pytest.raises(MalformedError, match="the name of a container has 1000000 characters"):
        read(build_pickle(b"}(" + text("w") + tensor() + text("k" * 1_000_000) + b"}" + entries + b"u"))
