"""Storages: unused bytes, sharing between tensors, and limits of the policy."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from msgspec import UNSET
from safetensors.torch import save_file, save_model

from statecli import formats
from statecli.commands.audit.run import Request, audit
from statecli.commands.verify.result import Name
from statecli.commands.verify.run import Request as Verification, run as verify
from statecli.core.finding import Severity
from statecli.core.model_state import ByteRange, TensorData
from statecli.core.selection import Selection
from statecli.rules.policy_config import Policy
from statecli.rules.storage import MIN_UNUSED_BYTES
from statecli.rules.storage_views import _view_of_piece, group_by_storage, have_common_byte
from statecli.targets.target_result import TargetStatus

from ..formats import zero

# --- oversized-storage -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("legacy", [False, True], ids=["zip", "legacy"])
def test_oversized_storage_finds_a_view_that_saves_its_whole_storage(run_rule, save_checkpoint, legacy):
    """The message gives both figures, 4 KB of 4 MB, and the place is the storage."""
    path = save_checkpoint({"w": torch.zeros(1 << 20)[:1024]}, _use_new_zipfile_serialization=not legacy)
    (finding,) = run_rule("oversized-storage", path)
    assert finding.message == "w: all 4,194,304 bytes of its storage are saved, but only 4,096 are used"
    assert (finding.fqn, finding.place.length, finding.severity.value) == ("w", 4 << 20, "warning")
    assert path.stat().st_size >= finding.place.offset + finding.place.length > 4 << 20


def test_oversized_storage_finds_a_column_of_a_matrix(run_rule, save_checkpoint):
    """The column reaches from end to end of the storage, but has only a thousandth of the elements."""
    (finding,) = run_rule("oversized-storage", save_checkpoint({"w": torch.zeros(1000, 1000)[:, :1]}))
    assert "but only 4,000 are used" in finding.message


def test_oversized_storage_adds_up_the_bytes_of_several_tensors(run_rule, save_checkpoint):
    """Two overlapping tensors count as their union, and an expanded tensor as its stored elements."""
    big = torch.zeros(1 << 16)
    state = {"a": big[:2000], "b": big[1000:3000], "c": big[3000:3001].expand(50_000)}
    (finding,) = run_rule("oversized-storage", save_checkpoint(state))
    assert "262,144 bytes of its storage are saved, but only 12,004 are used by 3 tensors" in finding.message


def test_oversized_storage_spares_tensors_that_share_a_storage_out(run_rule, save_checkpoint):
    """On a GPU, the weights of an LSTM lie in a single buffer and use the whole buffer."""
    big = torch.zeros(1 << 16)
    assert not run_rule("oversized-storage", save_checkpoint({str(n): part for n, part in enumerate(big.split(5000))}))


def test_oversized_storage_spares_a_few_unused_bytes(run_rule, save_checkpoint):
    """Less than a page is unused, or only a small share of a big storage, for example padding."""
    state = {"a": torch.zeros(MIN_UNUSED_BYTES // 4 + 9)[:10], "b": torch.zeros(100_000)[:95_000]}
    assert not run_rule("oversized-storage", save_checkpoint(state))


def test_oversized_storage_spares_bytes_of_a_filtered_tensor(run_rule, save_checkpoint):
    """A tensor left out by a selection still uses its bytes of the storage."""
    big = torch.zeros(1 << 16)
    path = save_checkpoint({"model": {"a": big[:5000]}, "ema": {"a": big[5000:]}})
    assert not run_rule("oversized-storage", f"{path}#model")
    halves_path = save_checkpoint({"a": big[:5000], "b": big[5000:]})
    assert not run_rule("oversized-storage", halves_path, selection=Selection(include=("a",)))


def test_oversized_storage_spares_sparse_and_quantized_tensors(run_rule, save_checkpoint):
    """Their parts are tensors in storages of their own."""
    sparse = torch.eye(200).to_sparse()
    scales = torch.rand(3000, dtype=torch.float64)
    channels = torch.quantize_per_channel(torch.rand(3000, 4), scales, torch.zeros(3000), 0, torch.qint8)
    assert not run_rule(
        "oversized-storage", save_checkpoint({"s": sparse, "c": torch.eye(500).to_sparse_csr(), "q": channels})
    )


def test_views_and_ties_of_a_class_are_reported(run_rule, tmp_path):
    """A parameter that is a row of a matrix saves the whole matrix."""
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.w = nn.Parameter(torch.zeros(1000, 1000)[0])\n"
        "        self.a = nn.Linear(9, 9)\n        self.b = nn.Linear(9, 9)\n        self.b.weight = self.a.weight\n"
    )
    (finding,) = run_rule("oversized-storage", f"{tmp_path}/net.py:Net")
    assert finding.fqn == "w"
    (finding,) = run_rule("tied-tensors", f"{tmp_path}/net.py:Net")
    assert "b.weight" in finding.message


# --- tied-tensors and shared-slices ----------------------------------------------------------------------------------


def test_tied_tensors_finds_two_names_of_one_tensor(run_rule, save_checkpoint):
    """The note gives both names and the number of bytes."""
    w = torch.zeros(3, 4)
    (finding,) = run_rule("tied-tensors", save_checkpoint({"embed": w, "x": torch.zeros(2), "head": w}))
    assert finding.message == "embed: shares all of its 48 bytes with head"
    assert finding.severity.value == "note"


def test_tied_tensors_finds_the_name_that_safetensors_dropped(run_rule, tmp_path):
    """save_model keeps a single name and writes the other name into the metadata."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    save_model(net, str(tmp_path / "a.safetensors"))
    (finding,) = run_rule("tied-tensors", tmp_path / "a.safetensors")
    assert {finding.fqn, finding.message.rpartition(" ")[2]} == {"0.weight", "1.weight"}


TIED_NET = """\
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids))
"""


def test_tied_tensors_names_the_same_remedy_as_verify(run_rule, save_checkpoint, tmp_path):
    """The target is a class or a state_dict, and save_file refuses both."""
    (tmp_path / "net.py").write_text(TIED_NET)
    spec = f"{tmp_path}/net.py:Net"
    verified = verify(Verification(spec, checks=(Name.SAVE,)))
    (refusal,) = (finding for finding in verified.findings if finding.rule == "shared-in-safetensors")
    remedy = refusal.help.partition("; assigned at ")[0]
    w = torch.zeros(3, 4)
    for target in (spec, save_checkpoint({"embed": w, "head": w})):
        (finding,) = run_rule("tied-tensors", target)
        assert finding.help == (
            f"intentional for tied weights; otherwise save a copy with .clone(); for safetensors, {remedy}"
        )


def test_tied_tensors_names_no_function_if_save_file_accepts_the_file(run_rule, save_checkpoint, tmp_path):
    """A safetensors file has a single name already, and two sections are two files."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    save_model(net, str(tmp_path / "a.safetensors"))
    w = torch.zeros(3, 4)
    for target in (tmp_path / "a.safetensors", save_checkpoint({"model": {"w": w}, "ema": {"w": w}})):
        (finding,) = run_rule("tied-tensors", target)
        assert finding.help == "intentional for tied weights; otherwise save a copy with .clone()"


def test_tied_tensors_spares_tensors_of_optimizer_and_callbacks(run_rule, save_checkpoint):
    """A pickled optimizer contains the model's own parameters, and callbacks store a score under several names."""
    net = torch.nn.Linear(3, 3)
    optimizer, score = torch.optim.Adam(net.parameters()), torch.tensor(0.5)
    callbacks = {"ModelCheckpoint{'monitor': 'loss'}": {"best_model_score": score, "best_k_models": {"/a.ckpt": score}}}
    state = {"state_dict": dict(net.named_parameters()), "callbacks": callbacks, "optimizer": optimizer}
    assert not run_rule("tied-tensors", save_checkpoint(state))


def test_tied_tensors_finds_a_tie_that_an_optimizer_shares(run_rule, save_checkpoint):
    """The finding has the two names in the model, not the name in the optimizer."""
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 3))
    net[1].weight = net[0].weight
    state = {"model": net.state_dict(keep_vars=True), "optimizer": torch.optim.Adam(net.parameters())}
    (finding,) = run_rule("tied-tensors", save_checkpoint(state))
    assert finding.message == "model.0.weight: shares all of its 36 bytes with model.1.weight"


def test_tied_tensors_spares_equal_tensors_and_slices_of_one_storage(run_rule, save_checkpoint):
    """Neither equal tensors nor slices share all their bytes."""
    big = torch.zeros(100)
    assert not run_rule(
        "tied-tensors", save_checkpoint({"a": big[:50], "b": big[50:], "c": torch.zeros(50), "t": torch.zeros(0)})
    )


def test_shared_slices_finds_views_that_overlap(run_rule, save_checkpoint):
    """The finding is at the later view, with both extents in bytes."""
    big = torch.zeros(100)
    (finding,) = run_rule("shared-slices", save_checkpoint({"a": big[:60], "b": big[40:]}))
    assert finding.message == "b: shares bytes with a (bytes 160 to 400 and bytes 0 to 240 of one storage)"


def test_shared_slices_gives_the_common_range_of_two_views_once(run_rule, save_checkpoint):
    """A matrix and its transpose are different tensors, so they are not tied."""
    matrix = torch.zeros(4, 4)
    path = save_checkpoint({"a": matrix, "b": matrix.t()})
    (finding,) = run_rule("shared-slices", path)
    assert finding.message == "b: shares bytes with a (both are bytes 0 to 64 of one storage)"
    assert not run_rule("tied-tensors", path)


def test_attributes_of_tensors_are_not_compared(run_rule, save_checkpoint):
    """No state_dict has the attributes of tensors: neither a tie nor a shared slice is reported."""
    matrix, other = torch.nn.Parameter(torch.ones(4, 4)), torch.nn.Parameter(torch.ones(4))
    other.peer, other.rows = matrix, [matrix.detach()[1], {"all": matrix.detach().t()}]
    path = save_checkpoint({"w": matrix, "b": other})
    assert not run_rule("shared-slices", path)
    assert not run_rule("tied-tensors", path)


def test_shared_slices_spares_separate_slices_and_tied_names(run_rule, save_checkpoint):
    """safetensors saves separate slices, and tied names belong to another rule."""
    big = torch.zeros(100)
    assert not run_rule(
        "shared-slices", save_checkpoint({"a": big[:50], "b": big[50:], "c": big[:50], "e": big[70:70]})
    )


INTERLEAVED_VIEWS = {
    "halves of the columns": lambda big: [big[:, :5], big[:, 5:]],
    "every other row": lambda big: [big[::2], big[1::2]],
    "a fused projection": lambda big: big.view(2, 4, 12).chunk(3, -1),
    "all columns": lambda big: big.view(8, 12).unbind(1),
    "rows beside columns": lambda big: [big.view(8, 12)[:, :4], big.view(8, 12)[::2, 4:8], big.view(8, 12)[:3, 8:]],
    "real and imaginary parts": lambda big: [big.view(48, 2)[:, 0], big.view(48, 2)[:, 1]],
}


@pytest.mark.parametrize("parts", INTERLEAVED_VIEWS.values(), ids=INTERLEAVED_VIEWS)
def test_shared_slices_spares_interleaved_views(run_rule, save_checkpoint, parts):
    """No byte is in two views, though each view reaches over the other views."""
    big = torch.zeros(8, 12)
    assert not run_rule("shared-slices", save_checkpoint(dict(zip("abcdefghijkl", parts(big), strict=False))))


def test_shared_slices_finds_an_overlap_of_one_column(run_rule, save_checkpoint):
    """Column 5 belongs to the left and to the right view."""
    big = torch.zeros(8, 12)
    (finding,) = run_rule("shared-slices", save_checkpoint({"a": big[:, :6], "b": big[:, 5:], "c": big[:, :5].clone()}))
    assert finding.fqn == "b"


def test_shared_slices_gives_a_note_for_undecided_views(run_rule, save_checkpoint, monkeypatch):
    """Undecided views give a note, neither a pass nor a warning. An overlap found without tries is still reported."""
    monkeypatch.setattr("statecli.rules.storage.MAX_SEARCH_STEPS", 1)
    flat = torch.zeros(10_000)
    gaps = {str(n): flat.as_strided((10, 10), (7, 70 + n), n) for n in range(5)}
    path = save_checkpoint(gaps | {"x": (big := torch.zeros(9))[:5], "y": big[4:]})
    note, clash = run_rule("shared-slices", path)
    assert (note.fqn, note.severity) == ("0", Severity.NOTE)
    assert note.message == (
        "0: statecli does not know whether the 5 views of its storage share bytes: too many views are interleaved"
    )
    assert (clash.fqn, clash.severity) == ("y", Severity.WARNING)


SLICE = st.tuples(st.integers(0, 20), st.integers(0, 20)).map(sorted)


@given(st.lists(SLICE, min_size=1, max_size=5))
def test_safetensors_refuses_exactly_the_states_with_findings(tmp_path_factory, slices):
    """save_file refuses a state exactly if tensors of the state are tied or overlap."""
    folder = tmp_path_factory.mktemp("s")
    big = torch.zeros(20)
    state = {str(n): big[a:b] for n, (a, b) in enumerate(slices)}
    torch.save(state, folder / "a.pt")
    (target,) = audit(Request((str(folder / "a.pt"),), select=("tied-tensors", "shared-slices"))).targets
    assert target.status is TargetStatus.AUDITED
    # save_file takes all empty tensors for tied.
    filled = {name: tensor for name, tensor in state.items() if tensor.numel()}
    expectation = pytest.raises(RuntimeError, match="share memory") if target.findings else nullcontext()
    with expectation:
        save_file(filled, folder / "a.safetensors")


@st.composite
def draw_views(draw):
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    strides = [draw(st.integers(0, 5)) for _ in shape]
    return shape, strides, draw(st.integers(0, 10))


@given(st.lists(draw_views(), min_size=1, max_size=4))
def test_unused_bytes_never_exceed_the_unmarked_bytes(tmp_path_factory, geometry):
    """Checked against torch: after all elements are marked, unused bytes are never more than the unmarked bytes."""
    path = tmp_path_factory.mktemp("u") / "a.pt"
    big = torch.zeros(100)
    state = {str(n): big.as_strided(*first) for n, first in enumerate(geometry)}
    torch.save(state, path)
    marked = torch.zeros(100)
    for view in geometry:
        marked.as_strided(*view).fill_(1)
    for storage in group_by_storage(formats.read(str(path))):
        assert storage.size == 400
        assert 0 <= storage.unused_bytes <= int((marked == 0).sum()) * 4


@given(draw_views(), draw_views(), st.sampled_from(["int32", "int64", "int8", "bool"]))
def test_views_share_a_byte_exactly_if_torch_sees_the_write(first, second, dtype):
    """Checked against torch: the elements of the first view are overwritten and then read through the second view."""
    big = torch.zeros(100, dtype=torch.int64)
    big.as_strided(*first).fill_(-1)
    is_seen = bool((big.view(torch.int8).view(getattr(torch, dtype)).as_strided(*second) != 0).any())
    assert have_common_byte(_build_view("int64", first), _build_view(dtype, second), [10_000]) is is_seen
    assert have_common_byte(_build_view(dtype, second), _build_view("int64", first), [10_000]) is is_seen


def _build_view(dtype, geometry):
    shape, strides, offset = geometry
    return _view_of_piece(TensorData(ByteRange("a", 0, 800), dtype, tuple(shape), offset, tuple(strides)))


# --- dtypes and sizes ------------------------------------------------------------------------------------------------


def test_mixed_dtypes_finds_parameters_of_two_types(run_rule, save_checkpoint):
    """The note has the counts and the first tensor of the rarer dtype."""
    state = {"a.weight": torch.zeros(2).bfloat16(), "b.weight": torch.zeros(2).bfloat16(), "n.weight": torch.zeros(2)}
    (finding,) = run_rule("mixed-dtypes", save_checkpoint(state))
    expected = "model: tensors have several dtypes: 2 bfloat16, 1 float32; n.weight is float32"
    assert (finding.message, finding.severity.value) == (expected, "note")


def test_mixed_dtypes_names_parameters_only_if_the_type_is_known(run_rule, save_checkpoint):
    """The type in the pickle shows a parameter; a name alone does not."""
    state = {"a": torch.nn.Parameter(torch.zeros(2)), "b": torch.nn.Parameter(torch.zeros(2).half())}
    assert run_rule("mixed-dtypes", save_checkpoint(state))[0].message.startswith(
        "model: parameters have several dtypes"
    )


def test_mixed_dtypes_spares_vectors_of_float32_among_matrices_of_16_bits(run_rule, save_checkpoint):
    """Mixed precision keeps vectors in float32. A float32 matrix or a vector of a third dtype is reported."""
    matrices = {"a.weight": torch.zeros(2, 2).bfloat16(), "b.weight": torch.zeros(2, 2).bfloat16()}
    norms = {"n.weight": torch.zeros(2), "n.bias": torch.zeros(2), "scale": torch.tensor(1.0)}
    assert not run_rule("mixed-dtypes", save_checkpoint({**matrices, **norms}))
    assert not run_rule(
        "mixed-dtypes", save_checkpoint({name: matrix.half() for name, matrix in matrices.items()} | norms)
    )
    for other_tensors in (
        {"c.weight": torch.zeros(2, 2)},
        {"c.bias": torch.zeros(2).double()},
        {"c.bias": torch.zeros(2).half()},
        {"c.weight": torch.zeros(2, 2).half()},
    ):
        assert len(run_rule("mixed-dtypes", save_checkpoint({**matrices, **norms, **other_tensors}))) == 1
    wide_matrices = {name: matrix.double() for name, matrix in matrices.items()}
    assert len(run_rule("mixed-dtypes", save_checkpoint({**wide_matrices, **norms}))) == 1


def test_mixed_dtypes_spares_the_parts_of_quantized_weights(run_rule, save_checkpoint):
    """The float32 scales of float8 weights do not count, but another float32 tensor does."""
    state = {"norm.weight": torch.ones(4, dtype=torch.bfloat16), "embed.weight": torch.ones(9, 4, dtype=torch.bfloat16)}
    for name in ("a", "b"):
        state[f"{name}.weight"] = torch.ones(4, 4).to(torch.float8_e4m3fn)
        state[f"{name}.weight_scale_inv"] = torch.ones(1, 1)
    assert not run_rule("mixed-dtypes", save_checkpoint(state))
    (finding,) = run_rule("mixed-dtypes", save_checkpoint({**state, "lora.weight": torch.ones(2, 4)}))
    assert "2 bfloat16, 1 float32; lora.weight is float32" in finding.message


def test_mixed_dtypes_spares_a_buffer_that_the_class_registers(save_checkpoint, tmp_path):
    """The file does not show that `table` is a buffer."""
    path = save_checkpoint(
        {"fc.weight": torch.zeros(2, 2), "fc.bias": torch.zeros(2), "table": torch.zeros(3).double()}
    )
    (tmp_path / "net.py").write_text(
        "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
        "        super().__init__()\n        self.fc = nn.Linear(2, 2)\n"
        '        self.register_buffer("table", torch.zeros(3, dtype=torch.float64))\n'
    )
    request = Request((str(path),), select=("mixed-dtypes",), model=f"{tmp_path}/net.py:Net")
    assert [target.findings for target in audit(request).targets] == [(), ()]


@pytest.mark.parametrize("stage", [2, 3])
def test_float32_copies_of_zero_do_not_count_as_model_dtypes(run_rule, tmp_path, stage):
    """The model trains in bfloat16, but the files have only float32 copies of the trained weights."""
    trained, frozen = {"w": torch.ones(3), "b": torch.ones(2)}, {"f": torch.ones(3, dtype=torch.bfloat16)}
    folder = zero.write(tmp_path / "zero", stage, [trained], frozen=frozen)
    assert not run_rule("mixed-dtypes", folder)
    assert not run_rule("unexpected-dtype", folder, policy=Policy(dtype=("bfloat16",)))
    mixed = zero.write(tmp_path / "mixed", stage, [trained], frozen={**frozen, "g": torch.ones(3).half()})
    (finding,) = run_rule("mixed-dtypes", mixed)
    assert "1 float16" in finding.message
    (finding,) = run_rule("unexpected-dtype", mixed, policy=Policy(dtype=("bfloat16",)))
    assert finding.fqn == "g"


def test_place_of_a_packed_storage_is_its_range_in_the_file(run_rule, tmp_path):
    """A packed storage is shorter in the file than in memory, and a storage in pieces has no single place."""
    np.savez_compressed(tmp_path / "a.npz", w=np.zeros(5000))
    (finding,) = run_rule("unexpected-dtype", tmp_path / "a.npz", policy=Policy(dtype=("float32",)))
    assert 0 < finding.place.length < 5000
    folder = zero.write(tmp_path / "zero", 3, [{"w": torch.ones(4)}], shared={"v": "w"})
    (finding,) = run_rule("tied-tensors", folder)
    assert finding.place is UNSET


def test_mixed_dtypes_spares_integers_and_other_sections(run_rule, save_checkpoint):
    """A model next to an average of another dtype, and a counter."""
    state = {"w": torch.zeros(2).half(), "n": torch.zeros(2, dtype=torch.int64)}
    assert not run_rule("mixed-dtypes", save_checkpoint({"model": state, "ema": {"w": torch.zeros(2)}}))


BF16 = Policy(dtype=("bfloat16",))


def test_unexpected_dtype_finds_dtypes_outside_the_policy(run_rule, save_checkpoint):
    """Each tensor gives an error."""
    path = save_checkpoint({"a": torch.zeros(2), "b": torch.zeros(2).bfloat16(), "c": torch.zeros(2).half()})
    assert [finding.message for finding in run_rule("unexpected-dtype", path, policy=BF16)] == [
        "a: dtype is float32, policy.dtype allows only bfloat16",
        "c: dtype is float16, policy.dtype allows only bfloat16",
    ]


def test_unexpected_dtype_spares_integers_and_optimizer_state(run_rule, save_checkpoint):
    """Moments are float32 for good reason."""
    net = torch.nn.BatchNorm1d(3).bfloat16()
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.rand(4, 3).bfloat16()).sum().backward()
    optimizer.step()
    state = optimizer.state_dict()
    state["state"] = {n: {k: v.float() for k, v in moments.items()} for n, moments in state["state"].items()}
    path = save_checkpoint({"model": net.state_dict(), "optimizer": state})
    assert not run_rule("unexpected-dtype", path, policy=BF16)
    assert not run_rule("unexpected-dtype", path, policy=Policy(dtype=("torch.bfloat16", "float32")))


def test_too_large_finds_more_bytes_than_the_policy_allows(run_rule, save_checkpoint):
    """Whole storages count, not the views of them."""
    path = save_checkpoint({"model": {"w": torch.zeros(1000)[:10]}, "optimizer": {"m": torch.zeros(100)}})
    (finding,) = run_rule("too-large", path, policy=Policy(max_bytes=4399))
    assert "take 4,400 bytes" in finding.message
    assert "allows 4,399" in finding.message


def test_too_large_spares_exactly_the_allowed_bytes(run_rule, save_checkpoint):
    """A shared storage counts once."""
    w = torch.zeros(1000)
    assert not run_rule("too-large", save_checkpoint({"w": w, "v": w}), policy=Policy(max_bytes=4000))


@pytest.mark.parametrize("rule", ["unexpected-dtype", "too-large"])
def test_a_rule_without_its_policy_is_skipped_with_the_reason(save_checkpoint, rule):
    """A tensor checked against nothing has not passed."""
    (target,) = audit(Request((str(save_checkpoint({"w": torch.zeros(2)})),), select=(rule,))).targets
    assert not target.ran
    assert "set policy." in target.skipped[0].reason
