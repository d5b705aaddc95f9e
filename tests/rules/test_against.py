"""Rules that compare a checkpoint with a class or with another checkpoint."""

from __future__ import annotations

import runpy

import pytest
import torch
from safetensors.torch import save_model

from statecli.commands.audit.run import Request, audit

LIN = "torch.nn:Linear(2, 2)"


@pytest.fixture
def pt(tmp_path):
    """Write a checkpoint of the given tensors and return its path."""

    def write(name="a", **tensors):
        torch.save(tensors, tmp_path / f"{name}.pt")
        return tmp_path / f"{name}.pt"

    return write


@pytest.fixture
def tied_class(tmp_path):
    """The spec of a class whose `head` is the same parameter as its `embed`."""
    source = "import torch\nfrom torch import nn\n\n\nclass Net(nn.Module):\n    def __init__(self):\n"
    source += "        super().__init__()\n        self.embed = nn.Parameter(torch.zeros(2, 2))\n"
    (tmp_path / "net.py").write_text(source + "        self.head = self.embed\n")
    return f"{tmp_path / 'net.py'}:Net"


@pytest.fixture
def list_findings(tmp_path):
    """Severity, FQN and message of the findings of a rule for a checkpoint with a class or a reference."""

    def findings(rule, target, **options):
        result = audit(Request((str(target),), select=(rule,), **options)).targets[-1]
        assert result.ran == (rule,), result.skipped
        return [(finding.severity.value, finding.fqn, finding.message) for finding in result.findings]

    return findings


def linear(**others):
    return {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)} | others


def without(name):
    return {key: value for key, value in linear().items() if key != name}


def test_missing_entry_finds_what_the_class_registers(list_fqns, pt):
    """The audited checkpoint lacks the bias of the class or of the other checkpoint."""
    assert list_fqns("missing-entry", pt(**without("bias")), model=LIN) == ["bias"]
    assert list_fqns("missing-entry", pt(**without("bias")), against=str(pt("b", **linear()))) == ["bias"]


def test_missing_entry_spares_an_entry_that_is_new(list_fqns, pt):
    """A new entry is unexpected, not missing."""
    assert list_fqns("missing-entry", pt(**linear(new=torch.zeros(1))), model=LIN) == []


def test_unexpected_entry_finds_what_nobody_registers(list_fqns, pt):
    """Neither the class nor the other checkpoint has the entry."""
    more = pt(**linear(new=torch.zeros(1)))
    assert list_fqns("unexpected-entry", more, model=LIN) == ["new"]
    assert list_fqns("unexpected-entry", more, against=str(pt("b", **linear()))) == ["new"]


def test_unexpected_entry_spares_one_that_is_missing(list_fqns, pt):
    """A missing entry is not an unexpected entry."""
    assert list_fqns("unexpected-entry", pt(**without("bias")), model=LIN) == []


def test_shape_mismatch_finds_another_shape(list_fqns, pt):
    """The bias has another shape than in the class or in the other checkpoint."""
    other = pt(**linear(bias=torch.zeros(3)))
    assert list_fqns("shape-mismatch", other, model=LIN) == ["bias"]
    assert list_fqns("shape-mismatch", other, against=str(pt("b", **linear()))) == ["bias"]


def test_shape_mismatch_spares_other_values(list_fqns, pt):
    """Values belong to another rule."""
    other = pt(**linear(bias=torch.ones(2)))
    assert list_fqns("shape-mismatch", other, against=str(pt("b", **linear()))) == []


def test_dtype_mismatch_finds_one_layer_in_another_dtype(list_fqns, pt):
    """The other checkpoint has the bias in another dtype."""
    other = pt(**linear(bias=torch.zeros(2, dtype=torch.float64)))
    assert list_fqns("dtype-mismatch", other, against=str(pt("b", **linear()))) == ["bias"]


#: A class with four tensors.
FOUR = "torch.nn:LSTM(2, 2)"


def four(**others):
    return dict(torch.nn.LSTM(2, 2).state_dict()) | others


def test_dtype_mismatch_finds_what_a_load_into_the_class_casts(list_findings, pt):
    """A single layer in another dtype gives a warning of its own."""
    path = pt(**four(bias_hh_l0=torch.zeros(8, dtype=torch.float64)))
    assert list_findings("dtype-mismatch", path, model=FOUR) == [
        (
            "warning",
            "bias_hh_l0",
            f"bias_hh_l0: the checkpoint has float64, but {FOUR} expects float32; load_state_dict casts silently",
        )
    ]


def test_dtype_mismatch_notes_once_that_a_whole_model_is_cast(list_findings, pt):
    """A checkpoint in half precision for a class in float32 is ordinary, even if a norm stays in float32."""
    half = {name: tensor.half() for name, tensor in four().items()}
    said_once = f"4 tensors are float16, but {FOUR} expects float32; load_state_dict casts silently"
    assert list_findings("dtype-mismatch", pt(**half), model=FOUR) == [("note", None, f"all {said_once}")]
    mixed = pt("m", **(half | {"bias_hh_l0": torch.zeros(8)}))
    assert list_findings("dtype-mismatch", mixed, model=FOUR) == [("note", None, "3 of " + said_once)]


def test_dtype_mismatch_finds_integers_where_the_class_has_floats(list_findings, pt):
    """All four tensors are integers, and each gives a warning."""
    path = pt(**{name: tensor.int() for name, tensor in four().items()})
    assert [severity for severity, *_ in list_findings("dtype-mismatch", path, model=FOUR)] == ["warning"] * 4


def test_dtype_mismatch_spares_what_the_class_registers(list_findings, pt):
    """The dtype is that of the class, or of the other checkpoint, although the shape differs."""
    path = pt(**four(bias_hh_l0=torch.zeros(3)))
    assert list_findings("dtype-mismatch", path, model=FOUR) == []
    assert list_findings("dtype-mismatch", path, against=str(pt("b", **four()))) == []


def test_broken_tie_finds_what_the_class_ties_and_the_checkpoint_has_apart(list_findings, pt, tied_class):
    """Without the values the finding is a note; with the values, an error, because a load drops a tensor."""
    path = pt(embed=torch.zeros(2, 2), head=torch.ones(2, 2))
    ((severity, fqn, message),) = list_findings("broken-tie", path, model=tied_class)
    assert (severity, fqn) == ("note", "embed")
    assert message == (
        f"embed: {tied_class} ties this tensor to head, but the checkpoint has 2 separate tensors "
        "(add --values to compare them); load_state_dict keeps the last one"
    )
    ((severity, _, message),) = list_findings("broken-tie", path, model=tied_class, values=True)
    assert severity == "error"
    assert "2 separate tensors with different bytes; load_state_dict silently keeps the last one" in message


def test_broken_tie_notes_copies_of_the_same_values(list_findings, pt, tied_class):
    """Copies of the same values load correctly; the only cost is the size of the file."""
    path = pt(embed=torch.ones(2, 2), head=torch.ones(2, 2))
    ((severity, _, message),) = list_findings("broken-tie", path, model=tied_class, values=True)
    assert severity == "note"
    assert message.endswith("the checkpoint has 2 separate tensors with equal bytes")


def test_broken_tie_warns_where_the_values_were_read_and_are_no_numbers_to_compare(list_findings, pt, tied_class):
    """The bytes of tensors with two shapes cannot be compared."""
    path = pt(embed=torch.ones(2, 2), head=torch.ones(4, 1))
    ((severity, _, message),) = list_findings("broken-tie", path, model=tied_class, values=True)
    assert severity == "warning"
    assert message.endswith("2 separate tensors whose values cannot be compared; load_state_dict keeps the last one")


def test_broken_tie_finds_tied_names_of_two_dtypes_whose_bytes_cannot_be_the_same(list_findings, pt, tied_class):
    """With `values`, the rule reports an error. A load casts the last tensor."""
    path = pt(embed=torch.ones(2, 2), head=torch.ones(2, 2).half())
    assert [problem[0] for problem in list_findings("broken-tie", path, model=tied_class, values=True)] == ["error"]


def test_a_strict_load_keeps_the_last_of_what_the_class_ties(tied_class, pt):
    """torch behaves as the message says: a load keeps the last tensor."""
    net = runpy.run_path(tied_class.partition(":")[0])["Net"]()
    net.load_state_dict(torch.load(pt(embed=torch.zeros(2, 2), head=torch.ones(2, 2))))
    assert net.embed.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_broken_tie_spares_what_the_class_ties_and_the_checkpoint_too(list_findings, pt, tied_class, tmp_path):
    """The tied names share a storage, or the file has only a single name, as safetensors writes tied weights."""
    array = torch.zeros(2, 2)
    assert list_findings("broken-tie", pt(embed=array, head=array), model=tied_class) == []
    net = runpy.run_path(tied_class.partition(":")[0])["Net"]()
    save_model(net, str(tmp_path / "a.safetensors"))
    assert list_findings("broken-tie", tmp_path / "a.safetensors", model=tied_class) == []


def test_broken_tie_spares_slices_of_one_storage_that_the_class_has_apart(list_findings, pt):
    """The weights of a flattened model share a storage, but a shared storage alone is not a tie."""
    state = four()
    flat = torch.zeros(48).split([tensor.numel() for tensor in state.values()])
    parts = {name: part.view(tensor.shape) for (name, tensor), part in zip(state.items(), flat, strict=True)}
    assert list_findings("broken-tie", pt(**parts), model=FOUR) == []


def test_broken_tie_finds_tied_weights_that_were_parted(list_fqns, pt):
    """The rule reports both names."""
    array = torch.zeros(2, 2)
    tied = pt("b", embed=array, head=array)
    assert list_fqns("broken-tie", pt(embed=array, head=array.clone()), against=str(tied)) == ["embed", "head"]


def test_broken_tie_spares_ties_that_are_kept(list_fqns, pt):
    """The tie may lie in another storage than in the reference."""
    array = torch.zeros(2, 2)
    other = torch.ones(2, 2)
    assert list_fqns("broken-tie", pt(embed=other, head=other), against=str(pt("b", embed=array, head=array))) == []


def training(**others):
    """A training checkpoint of a model, its optimizer and the state of callbacks, in the layout of Lightning."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    score = torch.tensor(0.5)
    kept = {"best_model_score": score, "current_score": score, "best_k_models": {"/tmp/a.ckpt": score}}
    state = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    return {"epoch": 1, **state, "callbacks": {"ModelCheckpoint{'monitor': 'vl'}": kept}} | others


HOLDING = ("missing-entry", "unexpected-entry", "shape-mismatch", "dtype-mismatch", "broken-tie")


@pytest.fixture
def against(pt):
    """Rule, FQN and section of all findings of the five rules for a state and its reference."""

    def findings(target, reference):
        request = Request((str(pt("a", **target)),), select=HOLDING, against=str(pt("b", **reference)))
        (result,) = audit(request).targets
        assert result.status.value == "audited", result.reason
        assert result.ran == HOLDING
        return [(finding.rule, finding.fqn, finding.section) for finding in result.findings]

    return findings


def scores(path):
    """State of a callback from a later epoch: another key, and scores in separate storages."""
    first, second = torch.tensor(0.5), torch.tensor(0.25)
    return {
        "ModelCheckpoint{'monitor': 'vl'}": {"best_model_score": first, "current_score": second, path: {path: first}}
    }


def test_what_callbacks_keep_is_held_to_nothing(against):
    """Neither a new best checkpoint nor scores in separate storages belong to the model."""
    assert against(training(callbacks=scores("/tmp/b.ckpt")), training()) == []
    assert against(training(), training(callbacks=scores("/tmp/b.ckpt"))) == []


def test_an_exported_model_owes_its_training_checkpoint_the_model_alone(against):
    """Optimizer and callbacks are not exported. A missing entry of the model is still reported."""
    reference = training()
    model = reference["state_dict"]
    assert against(model, reference) == []
    assert against({"weight": model["weight"]}, reference) == [("missing-entry", "bias", "state_dict")]


def test_a_training_checkpoint_may_have_more_than_the_plain_model_that_it_is_held_to(against):
    """The optimizer does not belong to the entries of the model. An additional entry of the model is reported."""
    reference = training()["state_dict"]
    assert against(training(), reference) == []
    more = training(state_dict=linear(new=torch.zeros(1)))
    assert against(more, reference) == [("unexpected-entry", "new", "state_dict")]


def test_an_average_beside_the_model_is_held_to_an_average_alone(against):
    """An average on a single side is not compared. Two averages are compared with each other."""
    both = {"model": linear(), "model_ema": {f"module.{key}": value for key, value in linear().items()}}
    assert against(linear(), both) == []
    assert against(both, linear()) == []
    less = both | {"model_ema": {"module.weight": both["model_ema"]["module.weight"]}}
    assert against(less, both) == [("missing-entry", "module.bias", "model_ema")]


def test_what_lies_beside_lightnings_state_dict_is_no_second_model(against):
    """Averaging in Lightning keeps the weights before averaging as `current_model_state` and loads `state_dict`."""
    averaged = training(current_model_state=linear())
    assert against(linear(), averaged) == []
    assert against(averaged, linear()) == []


def test_a_second_model_that_is_no_average_is_missed(against):
    """A generator alone does not replace a checkpoint with a generator and a discriminator."""
    both = {"generator": linear(), "discriminator": linear()}
    missed = [("missing-entry", name, "discriminator") for name in ("weight", "bias")]
    assert against({"generator": linear()} | {"epoch": 1}, both) == missed


def test_a_missing_entry_is_named_behind_its_section(pt, list_findings):
    """If the reference has several sections, the message names the section of the reference."""
    reference = pt("b", generator=linear(), discriminator=linear())
    ((_, fqn, message), *_) = list_findings("missing-entry", pt(generator=linear(), epoch=1), against=str(reference))
    assert (fqn, message.partition(":")[0]) == ("weight", "discriminator.weight")


def test_an_optimizer_is_held_to_an_optimizer(against):
    """If the reference has no model, all entries of the reference are compared."""
    state = training()["optimizer_states"][0]
    less = {"state": {0: state["state"][0]}, "param_groups": state["param_groups"]}
    actual = against(less, state)
    assert {rule for rule, _, _ in actual} == {"missing-entry"}
    assert {fqn[: len("state[1]")] for _, fqn, _ in actual} == {"state[1]"}


def failure_reason(target, **options):
    """Return the reason why the last target was not audited."""
    result = audit(Request((str(target),), **options)).targets[-1]
    assert result.status.value == "failed"
    return result.reason


def test_two_models_beside_two_others_cannot_be_told_apart(pt):
    """Ambiguous sections are not missing entries: the user must name the pairs."""
    reference = pt("b", generator=linear(), critic=linear())
    why = failure_reason(pt(first=linear(), second=linear()), against=str(reference))
    assert "does not know which sections belong together: " in why
    assert "b.pt#generator" in why


def test_what_load_state_dict_says_and_cannot_be_told_is_no_pass(pt, tmp_path):
    """The class's own load code needs values, and statecli calls load_state_dict without values."""
    source = "import torch\n\n\nclass Net(torch.nn.Linear):\n    def _load_from_state_dict(self, state, *rest):\n"
    source += (
        "        state['weight'] * float(state['bias'].sum())\n        super()._load_from_state_dict(state, *rest)\n"
    )
    (tmp_path / "net.py").write_text(source)
    why = failure_reason(pt(**linear()), model=f"{tmp_path / 'net.py'}:Net(2, 2)")
    assert "cannot call load_state_dict" in why


def test_a_damaged_reference_fails_the_audit_whatever_its_name_is(pt):
    """Values that cannot be compared pass, but not a file whose name says so."""
    reference = pt("statecli does not know whether the values differ", **linear())
    reference.write_bytes(reference.read_bytes().replace(b"/data/0", b"/data/9"))
    assert reference.name in failure_reason(pt(**linear()), against=str(reference))


WRAPPED = {f"_orig_mod.{key}": value for key, value in linear().items()}


def test_a_wrappers_prefix_alone_is_no_missing_entry(against):
    """Names are paired without the prefix, on either side. An entry missing under the prefix is still reported."""
    assert against(linear(), WRAPPED) == []
    assert against(WRAPPED, linear()) == []
    assert against({"weight": linear()["weight"]}, WRAPPED) == [("missing-entry", "_orig_mod.bias", "model")]


def prefixes(target, reference):
    (result,) = audit(Request((str(target),), select=("wrapper-prefix",), against=str(reference))).targets
    return [(finding.severity.value, finding.message) for finding in result.findings]


def test_a_wrappers_prefix_in_the_reference_is_a_note(pt):
    """The target has the plain names and loads."""
    plain, wrapped = pt("a", **linear()), pt("b", **WRAPPED)
    ((severity, message),) = prefixes(plain, wrapped)
    assert severity == "note"
    assert message.startswith("stripped the prefix '_orig_mod.' from the names of 2 tensors of")
    assert [severity for severity, _ in prefixes(wrapped, plain)] == ["warning"]


def test_a_reference_whose_name_ends_with_the_target_is_still_the_reference(pt, tmp_path, monkeypatch):
    """The side decides, not the end of the message: `backup of a.pt` is not `a.pt`."""
    pt("a", **linear()), pt("backup of a", **WRAPPED)
    monkeypatch.chdir(tmp_path)
    assert [severity for severity, _ in prefixes("a.pt", "backup of a.pt")] == ["note"]


def test_an_attributes_prefix_that_the_reference_lacks_is_told(pt):
    """`net.` is not the prefix of a known wrapper, but a strict load of the plain names fails all the same."""
    named = {f"net.{key}": value for key, value in linear().items()}
    ((severity, message),) = prefixes(pt("a", **named), pt("b", **linear()))
    assert severity == "warning"
    assert "'net.' from the names of 2 tensors" in message


def test_the_only_model_in_a_folder_without_index_is_the_reference(pt, tmp_path):
    """The optimizer state next to the model is not a candidate. With two models the reference is ambiguous."""
    step = tmp_path / "step"
    step.mkdir()
    torch.save({"module": linear()}, step / "weights.pt")
    torch.save(training()["optimizer_states"][0], step / "moments.pt")
    target = pt(**without("bias"))
    (result,) = audit(Request((str(target),), select=("missing-entry",), against=str(step))).targets
    (finding,) = result.findings
    assert finding.message == f"bias: missing; {step / 'weights.pt'} has this tensor"
    (step / "more.pt").write_bytes((step / "weights.pt").read_bytes()[:-9])
    assert "give one of the files" in failure_reason(target, against=str(step))
    (step / "more.pt").unlink()
    torch.save(linear(), step / "other.pt")
    assert "give one of the files" in failure_reason(target, against=str(step))


def notes(target, **options):
    """Return the notes about sections of the last target."""
    result = audit(Request((str(target),), select=("missing-entry",), **options)).targets[-1]
    assert (result.status.value, result.findings) == ("audited", ())
    return [note.message for note in result.notes if note.name.startswith("sections")]


def test_the_section_that_was_taken_is_noted(pt):
    """Notes name the section of the target loaded by a class, and the section of the reference."""
    averaged = pt("b", **training(current_model_state=linear()))
    (said,) = notes(averaged, model=LIN)
    assert said.startswith("statecli did not compare optimizer_states.0, callbacks, current_model_state of")
    assert said.endswith(f", because {LIN} loads only state_dict")
    paired, left = notes(pt(**linear()), against=str(averaged))
    assert paired == "section 'state_dict' is compared with section 'model'"
    assert "current_model_state" in left
    assert left.startswith("statecli did not compare these sections, because only ")
