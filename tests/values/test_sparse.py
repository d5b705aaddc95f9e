"""Comparison of sparse and nested tensors: each layout against the dense tensor, and contradictory files."""

from __future__ import annotations

import itertools
import json

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

torch = pytest.importorskip("torch")

from statecli import formats  # noqa: E402
from statecli.core.errors import ChecksumMismatch, MalformedError  # noqa: E402
from statecli.values import pair_plan, sparse  # noqa: E402
from statecli.values.compare import compare_pairs  # noqa: E402
from statecli.values.delta import CompareOptions, Delta  # noqa: E402
from statecli.values.pair_plan import NotCompared, Pair  # noqa: E402

from ..formats.attacks import Call  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")

#: A dense tensor of shape (4, 6) -> the same in each layout.
LAYOUTS = {
    "coo": lambda t: t.to_sparse(),
    "csr": lambda t: t.to_sparse_csr(),
    "csc": lambda t: t.to_sparse_csc(),
    "bsr": lambda t: t.to_sparse_bsr((2, 3)),
    "bsc": lambda t: t.to_sparse_bsc((2, 3)),
    "hybrid coo": lambda t: t.reshape(4, 3, 2).to_sparse(2),
    "hybrid csr": lambda t: t.reshape(4, 3, 2).to_sparse_csr(dense_dim=1),
    "hybrid bsc": lambda t: t.reshape(4, 3, 2).to_sparse_bsc((2, 3), dense_dim=1),
    "batch of csr": lambda t: torch.stack([t, t.flip(0)]).to_sparse_csr(),
    "batch of csc": lambda t: torch.stack([t, t.flip(1).roll(1)]).reshape(1, 2, 4, 6).to_sparse_csc(),
    "batch of bsr": lambda t: torch.stack([t, t.flip(0)]).to_sparse_bsr((2, 3)),
}


class Rebuilt(Call):
    """A pickled call of torch's rebuild function for sparse tensors, with valid or invalid parts."""

    def __init__(self, layout, *parts):
        arguments = (*parts[:-1], torch.Size(parts[-1])) + ((False,) * (len(parts) == 3))
        super().__init__(torch._utils._rebuild_sparse_tensor, getattr(torch, layout), arguments)


@pytest.fixture(scope="module")
def read(tmp_path_factory):
    """Save a tensor and return its row."""
    folder = tmp_path_factory.mktemp("sparse")
    count = iter(range(1 << 20))

    def row(tensor):
        path = folder / f"{next(count)}.pt"
        torch.save({"w": tensor}, path)
        return formats.read(str(path)).tensors[0]

    return row


@pytest.fixture(scope="module")
def compare_tensors(read):
    def outcome(before, after, **options):
        return compare_pairs([Pair(read(before), read(after))], CompareOptions(**options))[0]

    return outcome


def build_coo(places, values, size, dtype=torch.float32):
    return torch.sparse_coo_tensor(torch.tensor([places]), torch.tensor(values, dtype=dtype), (size,))


def build_csr_parts(*starts):
    return torch.tensor(starts), torch.tensor([0, 1]), torch.tensor([1.0, 3.0])


# --- layouts -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_sparse_tensor_is_compared_like_its_dense_tensor(compare_tensors, layout, seed):
    """Sparse tensors with different places or blocks give the same numbers as dense tensors, also the first index."""
    numbers = torch.Generator().manual_seed(seed)
    before, after = (
        torch.randint(-2, 3, (4, 6), generator=numbers).float() * (torch.rand(4, 6, generator=numbers) < 0.4)
        for _ in range(2)
    )
    # Each entry of a batch must store as many.
    if layout == "batch of bsr":
        before, after = before.abs() + 1, after.abs() + 1
    first, second = LAYOUTS[layout](before), LAYOUTS[layout](after)
    actual, dense = compare_tensors(first, second), compare_tensors(first.to_dense(), second.to_dense())
    assert (actual.elements, actual.changed, actual.first) == (dense.elements, dense.changed, dense.first)
    for name in ("max_abs", "mean_abs", "l2", "relative_l2", "cosine"):
        assert getattr(actual, name) == pytest.approx(getattr(dense, name))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_equal_parts_are_equal_tensors(compare_tensors, layout, monkeypatch):
    """The parts may have more values than the limit, and NaN."""
    monkeypatch.setattr(sparse, "MAX_STORED_VALUES", 1)
    tensor = LAYOUTS[layout](torch.ones(4, 6))
    tensor.values().fill_(float("nan")) if "coo" not in layout else tensor._values().fill_(float("nan"))
    assert compare_tensors(tensor, tensor.clone()) == Delta(elements=tensor.numel())


def test_sparse_tensor_above_the_limit_of_values_is_not_compared(compare_tensors, monkeypatch):
    """Above the limit of values kept in memory, the tensors are reported neither equal nor different."""
    monkeypatch.setattr(sparse, "MAX_STORED_VALUES", 3)
    actual = compare_tensors(build_coo([0, 1], [1, 2], 4), build_coo([0, 2], [1, 2], 4))
    assert isinstance(actual, NotCompared)
    assert "more than 3 indices and values" in actual.reason


def test_blocks_of_different_sizes_are_compared_by_value(compare_tensors):
    """The values are compared, and not the places where the values are stored."""
    dense = torch.arange(24.0).reshape(4, 6)
    assert compare_tensors(dense.to_sparse_bsr((2, 3)), dense.to_sparse_bsr((4, 2))).changed == 0


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("dtype", [torch.complex128, torch.float32, torch.int64])
def test_side_without_stored_values_counts_as_zeros(compare_tensors, dtype, bitwise):
    """A side without stored values is zero everywhere, of any type."""
    nothing, first = build_coo([], [], 4, dtype), build_coo([2], [1], 4, dtype)
    for pair in ((nothing, first), (first, nothing)):
        actual = compare_tensors(*pair, bitwise=bitwise)
        assert (actual.changed, actual.first, actual.max_abs) == (1, (2,), 1.0)


def test_int32_and_int64_indices_are_equal(compare_tensors):
    """int32 and int64 indices mean the same places."""
    wide = torch.eye(3).to_sparse_csr()
    narrow = torch.sparse_csr_tensor(wide.crow_indices().int(), wide.col_indices().int(), wide.values(), (3, 3))
    assert compare_tensors(wide, narrow).changed == 0
    assert compare_tensors(wide, narrow * 2).changed == 3


def test_duplicates_are_compared_only_with_equal_parts(compare_tensors):
    """torch adds several values at one index in any order, so their sum is not exact."""
    uncoalesced = build_coo([1, 1], [1.0, 2.0], 3)
    assert compare_tensors(uncoalesced, uncoalesced.clone()).changed == 0
    assert compare_tensors(uncoalesced, build_coo([1], [3.0], 3)) == NotCompared(
        "stores several values at one index; save the tensor after coalesce()"
    )


# --- damage ------------------------------------------------------------------------------------------------------

two, three = torch.tensor([1.0, 2.0]), torch.tensor([[0, 1, 2]])
DAMAGED = {
    "starts that fall": ("sparse_csr", *build_csr_parts(0, 2, 1), (2, 2)),
    "starts that fall and come back": ("sparse_csr", *build_csr_parts(0, 3, 2), (2, 2)),
    "starts beyond what is stored": ("sparse_csr", *build_csr_parts(0, 1, 300_000_000), (2, 2)),
    "starts after zero": ("sparse_csr", *build_csr_parts(1, 1, 2), (2, 2)),
    "starts that wrap around": (
        "sparse_csr",
        torch.tensor([0, 2**63 - 1, -(2**63), -1, 2]),
        torch.tensor([0, 1]),
        two,
        (4, 2),
    ),
    "too few starts": ("sparse_csr", *build_csr_parts(0, 2), (2, 2)),
    "starts of no dimension": ("sparse_csr", torch.tensor(0), *build_csr_parts(0, 2)[1:], (1, 2)),
    "a column outside": ("sparse_csr", torch.tensor([0, 2, 2]), torch.tensor([0, 2]), two, (2, 2)),
    "a column before the first": ("sparse_csr", torch.tensor([0, 1, 2]), torch.tensor([0, -1]), two, (2, 2)),
    "a row outside": ("sparse_csc", torch.tensor([0, 2, 2]), torch.tensor([0, 2]), two, (2, 2)),
    "columns of floats": ("sparse_csr", torch.tensor([0, 1, 2]), torch.tensor([0.5, 1]), two, (2, 2)),
    "fewer values than columns": ("sparse_csr", *build_csr_parts(0, 1, 2)[:2], torch.ones(1), (2, 2)),
    "one dimension": ("sparse_csr", *build_csr_parts(0, 1, 2), (2,)),
    "another batch": ("sparse_csr", *(part[None] for part in build_csr_parts(0, 1, 2)), (3, 2, 2)),
    "blocks that do not fit": ("sparse_bsr", torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 2, 3), (2, 4)),
    "blocks of nothing": ("sparse_bsr", torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 0, 2), (2, 2)),
    "blocks of one dimension": ("sparse_bsr", torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 2), (2, 2)),
    "more indices than values": ("sparse_coo", three, two, (4,)),
    "more index rows than dimensions": ("sparse_coo", torch.tensor([[0, 1]] * 3), two, (4, 4)),
    "a negative index": ("sparse_coo", torch.tensor([[-1, 1]]), two, (4,)),
    "an index outside": ("sparse_coo", torch.tensor([[9, 1]]), two, (4,)),
    "indices of floats": ("sparse_coo", torch.tensor([[0.5, 1]]), two, (4,)),
    "indices of bools": ("sparse_coo", torch.tensor([[True, False]]), two, (4,)),
    "indices of one dimension": ("sparse_coo", torch.tensor([0, 1]), two, (4,)),
    "values of another shape": ("sparse_coo", torch.tensor([[0, 1]]), torch.ones(2, 3), (4, 5)),
    "values of no dimension": ("sparse_coo", torch.tensor([[0, 1]]), torch.tensor(1.0), (4,)),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_error_of_a_damaged_tensor_has_file_and_name(read, case):
    """The pair has an error of one line, whichever side is damaged; the next pair is compared."""
    damaged, other = (
        read(Rebuilt(*DAMAGED[case])),
        read(LAYOUTS[DAMAGED[case][0].removeprefix("sparse_")](torch.eye(6))),
    )
    dense = [read(torch.zeros(3)), read(torch.ones(3))]
    for pair in (Pair(damaged, other), Pair(other, damaged)):
        error, delta = compare_pairs([pair, Pair(*dense)], CompareOptions())
        assert type(error) is MalformedError
        assert str(error).startswith(f"{damaged.parts[-1][1].storage.path}: w: ")
        assert "\n" not in str(error)
        assert delta.changed == 3


def test_column_index_outside_of_the_matrix_is_an_error(compare_tensors):
    """Column 2 of row 0 of a matrix of two columns is not column 0 of row 1."""
    valid = Rebuilt("sparse_csr", torch.tensor([0, 1, 2]), torch.tensor([0, 0]), two, (2, 2))
    assert type(compare_tensors(valid, Rebuilt(*DAMAGED["a column outside"]))) is MalformedError


ENDLESS = {
    "expanded": (torch.zeros(1, 1, dtype=torch.int64).expand(1, 1 << 40), torch.ones(1).expand(1 << 40), (4,)),
    "places of no dimension": (torch.zeros(0, 1 << 40, dtype=torch.int64), torch.zeros(1 << 40, 0), (0,)),
    "a dense part of nothing": (torch.zeros(1, 0, dtype=torch.int64), torch.zeros(0, 1 << 40), (4, 1 << 40)),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_sparse_tensor_of_a_claimed_huge_size_is_not_compared(compare_tensors, case):
    """A file of two kilobytes cannot cause an allocation of a terabyte: its tensor is not compared."""
    other = torch.sparse_coo_tensor(torch.tensor([[0]]), torch.ones(1), (4,))
    outcome = compare_tensors(other, Rebuilt("sparse_coo", *ENDLESS[case]))
    assert isinstance(outcome, NotCompared)


def test_damaged_indices_are_reported_as_a_wrong_checksum(read):
    """If the file recorded a checksum, damaged indices are reported as a wrong checksum."""
    row = read(torch.eye(3).to_sparse_csr())
    (where,) = (part.storage for name, part in row.parts if name == "plain_indices")
    with open(where.path, "r+b") as file:
        file.seek(where.offset)
        file.write(b"\xff")
    (pair,) = compare_pairs([Pair(row, read(torch.eye(3).to_sparse_csr() * 2))], CompareOptions())
    assert type(pair) is ChecksumMismatch
    assert "checksum wrong" in str(pair)


def test_tensor_with_indices_on_meta_is_not_compared(compare_tensors):
    """If the indices are on meta, the tensor is reported as not compared."""
    complete = Rebuilt("sparse_coo", torch.tensor([[0, 1]]), two, (4,))
    without_indices = Rebuilt("sparse_coo", torch.zeros(1, 2, dtype=torch.int64, device="meta"), two, (4,))
    assert compare_tensors(complete, without_indices) == NotCompared("its values or indices are missing from the file")


# --- nested ------------------------------------------------------------------------------------------------------


def nested_tensor(*shapes, fill=1.0, layout=torch.strided):
    return torch.nested.nested_tensor([torch.full(shape, fill) for shape in shapes], layout=layout)


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_statistics_of_a_nested_tensor_are_of_its_values(compare_tensors, layout):
    """Sizes, strides and offsets do not count as values: a dense tensor of the values has the same statistics."""
    before, after = (nested_tensor((2, 2), (3, 2), fill=fill, layout=layout) for fill in (1.0, 3.0))
    actual, dense = compare_tensors(before, after), compare_tensors(torch.ones(10), torch.full((10,), 3.0))
    names = ("elements", "changed", "max_abs", "mean_abs", "l2", "relative_l2", "cosine", "reason")
    assert [getattr(actual, name) for name in names] == [getattr(dense, name) for name in names]
    assert compare_tensors(before, before.clone()).changed == 0


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_of_different_inner_shapes_are_not_compared(compare_tensors, layout):
    """As many values in other rows are another shape, whatever the values."""
    actual = compare_tensors(
        *(nested_tensor(*shapes, layout=layout) for shapes in (((2, 2), (3, 2)), ((3, 2), (2, 2))))
    )
    assert actual == NotCompared("the shapes of its inner tensors differ", reshaped=True)


def test_nested_tensors_with_different_offsets_are_not_compared(compare_tensors):
    """With the same sizes and other offsets, the values cannot be assigned to inner tensors."""
    first, second = nested_tensor((2,), (2,)), nested_tensor((2,), (2,))
    parts = (
        second._nested_tensor_size(),
        second._nested_tensor_strides(),
        second._nested_tensor_storage_offsets().flip(0),
    )
    flipped = Call(torch._utils._rebuild_nested_tensor, second.values(), *parts)
    assert compare_tensors(first, flipped) == NotCompared("its inner tensors have another order than before")


def test_table_of_ragged_layouts_has_nested_and_jagged(read):
    """For each of torch's two kinds of nested tensors, the table has every part except the values."""
    rows = [read(nested_tensor((2, 2), (3, 2), layout=layout)) for layout in (torch.strided, torch.jagged)]
    assert {row.layout for row in rows} == pair_plan.RAGGED_PARTS.keys() == {"nested", "jagged"}
    for row in rows:
        assert {name for name, _ in row.parts} - {"values"} <= set(itertools.chain(*pair_plan.RAGGED_PARTS[row.layout]))


# --- the command -------------------------------------------------------------------------------------------------


@pytest.fixture
def diff(statecli, tmp_path):
    """Save two objects, run `statecli diff` on the files, and return the result and its JSON."""

    def run(before, after, *options):
        paths = [str(tmp_path / name) for name in ("a.pt", "b.pt")]
        for path, thing in zip(paths, (before, after), strict=True):
            torch.save(thing, path)
        result = statecli("diff", *paths, "-f", "json", *options)
        return result, json.loads(result.out)

    return run


@pytest.mark.parametrize("case", DAMAGED)
def test_damage_does_not_hide_the_other_tensors(diff, case):
    """The command exits with status 2, names the file in one line, and prints the other tensors on stdout."""
    *parts, values, shape = DAMAGED[case]
    after = {"w": Rebuilt(*parts, torch.ones(5), shape), "x": torch.zeros(3)}
    result, actual = diff({"w": Rebuilt(*parts, values, shape), "x": torch.ones(3)}, after)
    assert (result.code, result.err.count("\n")) == (2, 1)
    assert "a.pt: w: " in result.err
    assert "internal error" not in result.err
    assert [change["fqn"] for change in actual["changes"] if change["status"] == "changed"] == ["x"]


def test_a_copy_is_identical(diff):
    """`diff` exits with status 0 for the same sparse tensors in two files, and reports each changed tensor."""
    tensors = {layout: build(torch.ones(4, 6)) for layout, build in LAYOUTS.items()}
    assert diff(tensors, tensors)[0].code == 0
    result, actual = diff(tensors, {layout: tensor * 2 for layout, tensor in tensors.items()})
    assert result.code == 1
    assert {change["fqn"] for change in actual["changes"] if change["status"] == "changed"} == LAYOUTS.keys()


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_inner_shapes_are_a_change_of_shape(diff, statecli, tmp_path, layout):
    """The command exits with status 1 and reports the shape; with --ignore shape, the values are inconclusive."""
    first, second = (nested_tensor(*shapes, layout=layout) for shapes in (((2, 2), (3, 2)), ((3, 2), (2, 2))))
    result, target = diff({"w": first}, {"w": second})
    (change,) = target["changes"]
    assert (result.code, change["fields"], change["values"]) == (1, ["shape"], None)
    assert change["not_compared"] == "the shapes of its inner tensors differ"
    assert [finding["message"] for finding in target["findings"]] == ["w: the shape of its inner tensors differs"]
    table_result = statecli("diff", str(tmp_path / "a.pt"), str(tmp_path / "b.pt"))
    assert "the shape of its inner tensors differs" in table_result.out
    result, _ = diff({"w": first}, {"w": second}, "--ignore", "shape")
    assert (result.code, result.err.count("statecli does not know whether the values differ")) == (2, 1)
