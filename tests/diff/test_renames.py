"""Tensors of equal bytes under another name."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed.checkpoint as dcp

from statecli.commands.diff import renames
from statecli.commands.diff.request import Request
from statecli.commands.diff.result import Field, Status
from statecli.commands.diff.run import compare_targets
from statecli.core.model_state import TensorInfo
from statecli.core.selection import Selection

from .conftest import list_findings, map_changes


def list_renames(result) -> dict[str, str | None]:
    """Map the name after of each renamed tensor to its name before."""
    return {c.fqn: c.renamed_from for c in result.changes if c.status is Status.RENAMED}


def build_ramp(n: int, start: float = 0.0) -> torch.Tensor:
    """Return elements that no other tensor of these tests has."""
    return torch.arange(start, start + n)


def test_equal_bytes_under_another_name_are_a_rename(diff):
    """A tensor with equal bytes under another name is renamed, which is a difference; none is added or removed."""
    actual_diff = diff(
        {"encoder.w": build_ramp(8), "a": build_ramp(3)}, {"backbone.weight": build_ramp(8), "a": build_ramp(3)}
    )
    assert list_renames(actual_diff) == {"backbone.weight": "encoder.w"}
    assert list_findings(actual_diff) == [("renamed", "backbone.weight")]


def test_renames_are_found_across_formats_and_layouts(diff):
    """The elements count, not their layout: a transposed view in one file equals a plain tensor in the other."""
    transposed = build_ramp(6).view(2, 3).t()
    assert list_renames(diff({"x.w": transposed}, {"y.v": transposed}, names=("a.pt", "b.safetensors"))) == {
        "y.v": "x.w"
    }


def test_no_renames_option_reports_added_and_removed(diff):
    """The two tensors have equal bytes."""
    actual_diff = diff({"x.w": build_ramp(8)}, {"y.v": build_ramp(8)}, renames=False)
    assert list_findings(actual_diff) == [("removed", "x.w"), ("added", "y.v")]


@pytest.mark.parametrize("prefix", ["module.", "net."])
def test_no_renames_option_keeps_wrapper_prefixes(prefix, statecli, save):
    """With --no-renames the prefix is not stripped on either side, and a `--map` rule that strips it is suggested."""
    plain_state, wrapped_state = ({f"{head}{name}.w": build_ramp(8) for name in "abc"} for head in ("", prefix))
    first, second = save(plain_state, "a.pt"), save(wrapped_state, "b.pt")
    for words in ((first, second), (second, first)):
        assert statecli("diff", *words).code == 0
        result = statecli("diff", *words, "--no-renames")
        assert result.code == 1
        assert "3 parameters added, 3 removed" in result.out
        assert "note[wrapper-prefix]" not in result.out
        assert "note[prefix-apart]" in result.out


def test_no_renames_option_keeps_the_prefix_finding_of_a_class(statecli, source, save):
    """--no-renames does not change the result of the check for a strict load."""
    net = source("self.fc = nn.Linear(2, 2)")
    path = save({"module.fc.weight": torch.ones(2, 2), "module.fc.bias": torch.ones(2)}, "net.pt")
    for words in ((), ("--no-renames",)):
        result = statecli("diff", net, path, "-f", "json", *words)
        assert (result.code, [finding["rule"] for finding in result.json["findings"]]) == (1, ["wrapper-prefix"])


@pytest.mark.parametrize(
    "after", [build_ramp(8).double(), build_ramp(8).view(2, 4), build_ramp(8) + 1], ids=["dtype", "shape", "values"]
)
def test_tensor_with_other_dtype_shape_or_value_is_not_renamed(after, diff):
    """The old name is removed and the new name is added."""
    assert list_findings(diff({"x.w": build_ramp(8)}, {"y.v": after})) == [("removed", "x.w"), ("added", "y.v")]


def test_negative_zero_is_not_a_rename_of_zero(diff):
    """-0.0 and 0.0 differ here, because equal bytes are the evidence."""
    before, after = torch.tensor([0.0, 1.0, 2.0]), torch.tensor([-0.0, 1.0, 2.0])
    assert not list_renames(diff({"x.w": before}, {"y.v": after}))


@pytest.mark.parametrize(("value", "shape"), [(0.0, (64,)), (-3.5, (3, 5)), (float("nan"), (1, 7))])
def test_constant_tensor_is_renamed_only_with_the_same_suffix(value, shape, diff):
    """A constant tensor is paired only if the last component agrees: a bias of zeros is not a mean of zeros."""
    full = torch.full(shape, value)
    assert list_renames(diff({"x.bias": full}, {"y.bias": full})) == {"y.bias": "x.bias"}
    assert not list_renames(diff({"x.bias": full}, {"y.running_mean": full}))


@pytest.mark.parametrize("position", [0, 1, 2, 700, 1199])
def test_one_different_element_makes_a_tensor_distinctive(position, diff):
    """Zeros with a single 1 are paired although their last components differ."""
    nearly_zeros = torch.zeros(30, 40)
    nearly_zeros.view(-1)[position] = 1
    assert list_renames(diff({"x.a": nearly_zeros}, {"y.b": nearly_zeros})) == {"y.b": "x.a"}


def test_constant_tensor_of_a_distributed_checkpoint_is_not_renamed(tmp_path):
    """Zeros of a distributed checkpoint are as weak as evidence as zeros of any other file."""
    for name, fqn in (("before", "x.w"), ("after", "y.v")):
        dcp.save({fqn: torch.zeros(2, 3), f"{fqn}.r": build_ramp(5)}, checkpoint_id=tmp_path / name, no_dist=True)
    diff = compare_targets(Request(str(tmp_path / "before"), str(tmp_path / "after")))
    assert list_renames(diff) == {"y.v.r": "x.w.r"}


def test_tensor_constant_along_one_dimension_is_renamed(diff):
    """A tensor that repeats along only one dimension is not constant."""
    rows = torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 4).contiguous()
    for tensor in (rows, rows.t().contiguous()):
        assert list_renames(diff({"x.a": tensor}, {"y.b": tensor})) == {"y.b": "x.a"}


def test_scalars_and_empty_tensors_are_not_renamed(diff):
    """A tensor of one element or of zero elements is as weak as evidence as a constant tensor."""
    for tensor in (torch.tensor(7), torch.zeros(0, 3)):
        assert not list_renames(diff({"x.steps": tensor, "k": build_ramp(2)}, {"y.count": tensor, "k": build_ramp(2)}))


def test_longest_common_suffix_decides(diff):
    """Equal tensors are paired by the most common last components, then in order."""
    before = {"old.1.fc.w": build_ramp(4), "old.0.fc.w": build_ramp(4), "old.0.norm.w": build_ramp(4)}
    after = {"new.0.norm.w": build_ramp(4), "new.0.fc.w": build_ramp(4), "new.1.fc.w": build_ramp(4)}
    assert list_renames(diff(before, after)) == {
        "new.0.norm.w": "old.0.norm.w",
        "new.0.fc.w": "old.0.fc.w",
        "new.1.fc.w": "old.1.fc.w",
    }


def test_equal_tensor_without_a_partner_is_removed(diff):
    """Of several equal tensors, the tensors without a partner are added or removed."""
    actual_diff = diff({"a.x": build_ramp(4), "b.x": build_ramp(4)}, {"c.x": build_ramp(4)})
    assert sorted(change.status.value for change in map_changes(actual_diff).values()) == ["removed", "renamed"]
    assert list_renames(actual_diff) == {"c.x": "a.x"}


def test_renamed_tensor_may_differ_in_other_fields(diff):
    """The bytes are equal and only requires_grad differs."""
    weight = torch.nn.Parameter(build_ramp(4))
    frozen = torch.nn.Parameter(build_ramp(4), requires_grad=False)
    change = map_changes(diff({"x.w": weight}, {"y.w": frozen}))["y.w"]
    assert (change.status, change.fields) == (Status.RENAMED, (Field.REQUIRES_GRAD,))


def test_renames_stay_within_a_section(diff):
    """A tensor that moves from the model to another section was not renamed."""
    before = {"model": {"fc.w": build_ramp(4), "k.w": build_ramp(2)}, "ema": {"k.w": build_ramp(2)}}
    after = {"model": {"k.w": build_ramp(2)}, "ema": {"k.w": build_ramp(2), "fc.w": build_ramp(4)}}
    assert list_findings(diff(before, after)) == [("removed", "fc.w"), ("added", "fc.w")]


def test_excluded_tensors_are_not_read(diff, monkeypatch):
    """The bytes of tensors that a glob leaves out are not read."""
    from statecli.values import fingerprints

    read_names: list[str] = []
    compute_fingerprints = fingerprints.compute_fingerprints
    monkeypatch.setattr(
        fingerprints,
        "compute_fingerprints",
        lambda rows, **options: read_names.extend(row.fqn for row in rows) or compute_fingerprints(rows, **options),
    )
    before, after = (
        {"x.w": build_ramp(4), "x.v": build_ramp(5), "k": build_ramp(2)},
        {"y.w": build_ramp(4), "y.v": build_ramp(5), "k": build_ramp(2)},
    )
    assert list_renames(diff(before, after, selection=Selection(include=("x.w", "k")))) == {"y.w": "x.w"}
    assert read_names == ["x.w", "y.w"]


def test_equal_fingerprints_do_not_prove_a_rename(diff, monkeypatch):
    """Tensors with equal fingerprints and different bytes are not renamed."""
    from statecli.values import fingerprints

    monkeypatch.setattr(fingerprints, "compute_fingerprints", lambda rows, **_: [0] * len(rows))
    assert not list_renames(diff({"x.w": build_ramp(4)}, {"y.w": build_ramp(4, start=1.0)}))


def test_names_of_many_parts_are_paired_in_one_second():
    """The ends of names are compared up to a maximum number of parts."""
    before, after = ([TensorInfo(f"{part}." * 100_000 + "w", "uint8", (1,), 1, 1)] for part in "ab")
    started = time.process_time()
    assert list(renames.pair_by_suffix(before, after)) == [(before[0], after[0])]
    assert time.process_time() - started < 1


def test_suffixes_take_linear_time():
    """20,000 equal tensors on either side are paired at once."""
    rows = [[TensorInfo(f"{side}.{n}.w", "float32", (1,), 1, 4) for n in range(20_000)] for side in "ab"]
    by_suffix = list(renames.pair_by_suffix(rows[0], rows[1][::-1]))
    assert len(by_suffix) == 20_000
    assert all(tensor.fqn[1:] == other_tensor.fqn[1:] for tensor, other_tensor in by_suffix)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", ["to_sparse", "to_sparse_csr"])
def test_sparse_tensors_are_renamed_only_if_all_parts_are_equal(layout, diff):
    """Sparse tensors are matched only if the bytes of all their parts are equal."""
    before, other = (getattr(build_ramp(12, start).view(3, 4), layout)() for start in (1, 2))
    assert list_renames(diff({"x.a": before}, {"y.b": before})) == {"y.b": "x.a"}
    assert not list_renames(diff({"x.a": before}, {"y.b": other}))


@pytest.mark.filterwarnings("ignore")
def test_empty_sparse_tensor_is_not_renamed(diff):
    """Such a tensor is as weak as evidence as a constant tensor."""
    empty = torch.zeros(3, 4).to_sparse()
    assert not list_renames(diff({"x.a": empty}, {"y.b": empty}))


def test_lazy_conjugate_is_not_a_rename(diff):
    """Equal bits with a pending conjugation have other values and are not a rename."""
    plain, lazy = (
        torch.view_as_complex(build_ramp(8).view(4, 2)),
        torch.view_as_complex(build_ramp(8).view(4, 2)).conj(),
    )
    assert not list_renames(diff({"x.a": plain}, {"y.b": lazy}))
