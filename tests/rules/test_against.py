"""Rules that compare a checkpoint with a class or with another checkpoint."""

from __future__ import annotations

import runpy

import pytest
import torch
from safetensors.torch import save_model

from statecli.commands.audit.run import Request, audit

LINEAR_SPEC = "torch.nn:Linear(2, 2)"


@pytest.fixture
def write_checkpoint(tmp_path):
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


def build_linear_state(**overrides):
    return {"weight": torch.zeros(2, 2), "bias": torch.zeros(2)} | overrides


def drop_entry(name):
    return {key: value for key, value in build_linear_state().items() if key != name}


def test_missing_entry_finds_a_removed_bias(list_fqns, write_checkpoint):
    """The audited checkpoint lacks the bias of the class or of the other checkpoint."""
    assert list_fqns("missing-entry", write_checkpoint(**drop_entry("bias")), model=LINEAR_SPEC) == ["bias"]
    assert list_fqns(
        "missing-entry",
        write_checkpoint(**drop_entry("bias")),
        against=str(write_checkpoint("b", **build_linear_state())),
    ) == ["bias"]


def test_missing_entry_spares_a_new_entry(list_fqns, write_checkpoint):
    """A new entry is unexpected, not missing."""
    assert (
        list_fqns("missing-entry", write_checkpoint(**build_linear_state(new=torch.zeros(1))), model=LINEAR_SPEC) == []
    )


def test_unexpected_entry_finds_a_new_entry(list_fqns, write_checkpoint):
    """Neither the class nor the other checkpoint has the entry."""
    larger_path = write_checkpoint(**build_linear_state(new=torch.zeros(1)))
    assert list_fqns("unexpected-entry", larger_path, model=LINEAR_SPEC) == ["new"]
    assert list_fqns("unexpected-entry", larger_path, against=str(write_checkpoint("b", **build_linear_state()))) == [
        "new"
    ]


def test_unexpected_entry_spares_a_missing_entry(list_fqns, write_checkpoint):
    """`missing-entry` reports the bias that the checkpoint lacks."""
    assert list_fqns("unexpected-entry", write_checkpoint(**drop_entry("bias")), model=LINEAR_SPEC) == []


def test_shape_mismatch_finds_another_shape(list_fqns, write_checkpoint):
    """The bias has another shape than in the class or in the other checkpoint."""
    checkpoint = write_checkpoint(**build_linear_state(bias=torch.zeros(3)))
    assert list_fqns("shape-mismatch", checkpoint, model=LINEAR_SPEC) == ["bias"]
    assert list_fqns("shape-mismatch", checkpoint, against=str(write_checkpoint("b", **build_linear_state()))) == [
        "bias"
    ]


def test_shape_mismatch_spares_other_values(list_fqns, write_checkpoint):
    """Values belong to another rule."""
    checkpoint = write_checkpoint(**build_linear_state(bias=torch.ones(2)))
    assert list_fqns("shape-mismatch", checkpoint, against=str(write_checkpoint("b", **build_linear_state()))) == []


def test_dtype_mismatch_finds_one_layer_in_another_dtype(list_fqns, write_checkpoint):
    """The other checkpoint has the bias in another dtype."""
    checkpoint = write_checkpoint(**build_linear_state(bias=torch.zeros(2, dtype=torch.float64)))
    assert list_fqns("dtype-mismatch", checkpoint, against=str(write_checkpoint("b", **build_linear_state()))) == [
        "bias"
    ]


#: A class with four tensors.
LSTM_SPEC = "torch.nn:LSTM(2, 2)"


def build_lstm_state(**overrides):
    return dict(torch.nn.LSTM(2, 2).state_dict()) | overrides


def test_dtype_mismatch_finds_a_layer_that_a_load_casts(list_findings, write_checkpoint):
    """A single layer in another dtype gives a warning of its own."""
    path = write_checkpoint(**build_lstm_state(bias_hh_l0=torch.zeros(8, dtype=torch.float64)))
    assert list_findings("dtype-mismatch", path, model=LSTM_SPEC) == [
        (
            "warning",
            "bias_hh_l0",
            f"bias_hh_l0: the checkpoint has float64, but {LSTM_SPEC} expects float32; load_state_dict casts silently",
        )
    ]


def test_dtype_mismatch_gives_one_note_for_a_whole_model(list_findings, write_checkpoint):
    """A checkpoint in half precision for a class in float32 is ordinary, even if a norm stays in float32."""
    half_state = {name: tensor.half() for name, tensor in build_lstm_state().items()}
    summary = f"4 tensors are float16, but {LSTM_SPEC} expects float32; load_state_dict casts silently"
    assert list_findings("dtype-mismatch", write_checkpoint(**half_state), model=LSTM_SPEC) == [
        ("note", None, f"all {summary}")
    ]
    mixed = write_checkpoint("m", **(half_state | {"bias_hh_l0": torch.zeros(8)}))
    assert list_findings("dtype-mismatch", mixed, model=LSTM_SPEC) == [("note", None, "3 of " + summary)]


def test_dtype_mismatch_finds_integers_where_the_class_has_floats(list_findings, write_checkpoint):
    """All four tensors are integers, and each gives a warning."""
    path = write_checkpoint(**{name: tensor.int() for name, tensor in build_lstm_state().items()})
    assert [severity for severity, *_ in list_findings("dtype-mismatch", path, model=LSTM_SPEC)] == ["warning"] * 4


def test_dtype_mismatch_spares_another_shape(list_findings, write_checkpoint):
    """The dtype is that of the class, or of the other checkpoint, although the shape differs."""
    path = write_checkpoint(**build_lstm_state(bias_hh_l0=torch.zeros(3)))
    assert list_findings("dtype-mismatch", path, model=LSTM_SPEC) == []
    assert list_findings("dtype-mismatch", path, against=str(write_checkpoint("b", **build_lstm_state()))) == []


def test_broken_tie_finds_separate_tensors_that_the_class_ties(list_findings, write_checkpoint, tied_class):
    """Without the values the finding is a note; with the values, an error, because a load drops a tensor."""
    path = write_checkpoint(embed=torch.zeros(2, 2), head=torch.ones(2, 2))
    ((severity, fqn, message),) = list_findings("broken-tie", path, model=tied_class)
    assert (severity, fqn) == ("note", "embed")
    assert message == (
        f"embed: {tied_class} ties this tensor to head, but the checkpoint has 2 separate tensors; "
        "load_state_dict keeps only the last tensor; add --values to compare the values"
    )
    ((severity, _, message),) = list_findings("broken-tie", path, model=tied_class, values=True)
    assert severity == "error"
    assert "2 separate tensors with different bytes; load_state_dict silently keeps only the last tensor" in message


def test_broken_tie_notes_copies_of_the_same_values(list_findings, write_checkpoint, tied_class):
    """Copies of the same values load correctly; the only cost is the size of the file."""
    path = write_checkpoint(embed=torch.ones(2, 2), head=torch.ones(2, 2))
    ((severity, _, message),) = list_findings("broken-tie", path, model=tied_class, values=True)
    assert severity == "note"
    assert message.endswith("the checkpoint has 2 separate tensors with equal bytes")


def test_broken_tie_warns_of_tied_tensors_with_two_shapes(list_findings, write_checkpoint, tied_class):
    """The bytes of tensors with two shapes cannot be compared."""
    path = write_checkpoint(embed=torch.ones(2, 2), head=torch.ones(4, 1))
    ((severity, _, message),) = list_findings("broken-tie", path, model=tied_class, values=True)
    assert severity == "warning"
    assert message.endswith(
        "2 separate tensors whose values cannot be compared; load_state_dict keeps only the last tensor"
    )


def test_broken_tie_finds_tied_tensors_with_two_dtypes(list_findings, write_checkpoint, tied_class):
    """With `values`, the rule reports an error. A load casts the last tensor."""
    path = write_checkpoint(embed=torch.ones(2, 2), head=torch.ones(2, 2).half())
    assert [problem[0] for problem in list_findings("broken-tie", path, model=tied_class, values=True)] == ["error"]


def test_strict_load_keeps_the_last_tied_tensor(tied_class, write_checkpoint):
    """torch behaves as the message says: a load keeps the last tensor."""
    net = runpy.run_path(tied_class.partition(":")[0])["Net"]()
    net.load_state_dict(torch.load(write_checkpoint(embed=torch.zeros(2, 2), head=torch.ones(2, 2))))
    assert net.embed.tolist() == [[1.0, 1.0], [1.0, 1.0]]


def test_broken_tie_spares_ties_of_the_class(list_findings, write_checkpoint, tied_class, tmp_path):
    """The tied names share a storage, or the file has only a single name, as safetensors writes tied weights."""
    array = torch.zeros(2, 2)
    assert list_findings("broken-tie", write_checkpoint(embed=array, head=array), model=tied_class) == []
    net = runpy.run_path(tied_class.partition(":")[0])["Net"]()
    save_model(net, str(tmp_path / "a.safetensors"))
    assert list_findings("broken-tie", tmp_path / "a.safetensors", model=tied_class) == []


def test_broken_tie_spares_slices_of_one_storage(list_findings, write_checkpoint):
    """The weights of a flattened model share a storage, but a shared storage alone is not a tie."""
    state = build_lstm_state()
    flat = torch.zeros(48).split([tensor.numel() for tensor in state.values()])
    parts = {name: part.view(tensor.shape) for (name, tensor), part in zip(state.items(), flat, strict=True)}
    assert list_findings("broken-tie", write_checkpoint(**parts), model=LSTM_SPEC) == []


def test_broken_tie_finds_untied_weights(list_fqns, write_checkpoint):
    """The rule reports both names."""
    array = torch.zeros(2, 2)
    tied = write_checkpoint("b", embed=array, head=array)
    assert list_fqns("broken-tie", write_checkpoint(embed=array, head=array.clone()), against=str(tied)) == [
        "embed",
        "head",
    ]


def test_broken_tie_spares_ties_that_are_kept(list_fqns, write_checkpoint):
    """The tie may lie in another storage than in the reference."""
    array = torch.zeros(2, 2)
    other = torch.ones(2, 2)
    assert (
        list_fqns(
            "broken-tie",
            write_checkpoint(embed=other, head=other),
            against=str(write_checkpoint("b", embed=array, head=array)),
        )
        == []
    )


def build_training_checkpoint(**overrides):
    """A training checkpoint of a model, its optimizer and the state of callbacks, in the layout of Lightning."""
    module = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    score = torch.tensor(0.5)
    callback = {"best_model_score": score, "current_score": score, "best_k_models": {"/tmp/a.ckpt": score}}
    state = {"state_dict": module.state_dict(), "optimizer_states": [optimizer.state_dict()]}
    return {"epoch": 1, **state, "callbacks": {"ModelCheckpoint{'monitor': 'vl'}": callback}} | overrides


COMPARING_RULES = ("missing-entry", "unexpected-entry", "shape-mismatch", "dtype-mismatch", "broken-tie")


@pytest.fixture
def compare_states(write_checkpoint):
    """Rule, FQN and section of all findings of the five rules for a state and its reference."""

    def findings(target, reference):
        request = Request(
            (str(write_checkpoint("a", **target)),),
            select=COMPARING_RULES,
            against=str(write_checkpoint("b", **reference)),
        )
        (result,) = audit(request).targets
        assert result.status.value == "audited", result.reason
        assert result.ran == COMPARING_RULES
        return [(finding.rule, finding.fqn, finding.section) for finding in result.findings]

    return findings


def build_scores(path):
    """State of a callback from a later epoch: another key, and scores in separate storages."""
    first, second = torch.tensor(0.5), torch.tensor(0.25)
    return {
        "ModelCheckpoint{'monitor': 'vl'}": {"best_model_score": first, "current_score": second, path: {path: first}}
    }


def test_state_of_callbacks_is_not_compared(compare_states):
    """Neither a new best checkpoint nor scores in separate storages belong to the model."""
    assert (
        compare_states(build_training_checkpoint(callbacks=build_scores("/tmp/b.ckpt")), build_training_checkpoint())
        == []
    )
    assert (
        compare_states(build_training_checkpoint(), build_training_checkpoint(callbacks=build_scores("/tmp/b.ckpt")))
        == []
    )


def test_exported_model_is_compared_only_with_the_model(compare_states):
    """Optimizer and callbacks are not exported. A missing entry of the model is still reported."""
    reference = build_training_checkpoint()
    model = reference["state_dict"]
    assert compare_states(model, reference) == []
    assert compare_states({"weight": model["weight"]}, reference) == [("missing-entry", "bias", "state_dict")]


def test_training_checkpoint_may_have_more_sections_than_a_model(compare_states):
    """The optimizer does not belong to the entries of the model. An additional entry of the model is reported."""
    reference = build_training_checkpoint()["state_dict"]
    assert compare_states(build_training_checkpoint(), reference) == []
    larger_state = build_training_checkpoint(state_dict=build_linear_state(new=torch.zeros(1)))
    assert compare_states(larger_state, reference) == [("unexpected-entry", "new", "state_dict")]


def test_average_is_compared_only_with_an_average(compare_states):
    """An average on a single side is not compared. Two averages are compared with each other."""
    with_average = {
        "model": build_linear_state(),
        "model_ema": {f"module.{key}": value for key, value in build_linear_state().items()},
    }
    assert compare_states(build_linear_state(), with_average) == []
    assert compare_states(with_average, build_linear_state()) == []
    smaller_state = with_average | {"model_ema": {"module.weight": with_average["model_ema"]["module.weight"]}}
    assert compare_states(smaller_state, with_average) == [("missing-entry", "module.bias", "model_ema")]


def test_current_model_state_of_lightning_is_not_compared(compare_states):
    """Averaging in Lightning keeps the weights before averaging as `current_model_state` and loads `state_dict`."""
    averaged = build_training_checkpoint(current_model_state=build_linear_state())
    assert compare_states(build_linear_state(), averaged) == []
    assert compare_states(averaged, build_linear_state()) == []


def test_missing_second_model_is_reported(compare_states):
    """A generator alone does not replace a checkpoint with a generator and a discriminator."""
    two_models = {"generator": build_linear_state(), "discriminator": build_linear_state()}
    missed = [("missing-entry", name, "discriminator") for name in ("weight", "bias")]
    assert compare_states({"generator": build_linear_state()} | {"epoch": 1}, two_models) == missed


def test_missing_entry_is_named_with_its_section(write_checkpoint, list_findings):
    """If the reference has several sections, the message names the section of the reference."""
    reference = write_checkpoint("b", generator=build_linear_state(), discriminator=build_linear_state())
    ((_, fqn, message), *_) = list_findings(
        "missing-entry", write_checkpoint(generator=build_linear_state(), epoch=1), against=str(reference)
    )
    assert (fqn, message.partition(":")[0]) == ("weight", "discriminator.weight")


def test_optimizer_is_compared_with_an_optimizer(compare_states):
    """If the reference has no model, all entries of the reference are compared."""
    state = build_training_checkpoint()["optimizer_states"][0]
    smaller_state = {"state": {0: state["state"][0]}, "param_groups": state["param_groups"]}
    actual = compare_states(smaller_state, state)
    assert {rule for rule, _, _ in actual} == {"missing-entry"}
    assert {fqn[: len("state[1]")] for _, fqn, _ in actual} == {"state[1]"}


def get_failure_reason(target, **options):
    """Return the reason why the last target was not audited."""
    result = audit(Request((str(target),), **options)).targets[-1]
    assert result.status.value == "failed"
    return result.reason


def test_ambiguous_models_fail_the_target(write_checkpoint):
    """Ambiguous sections are not missing entries: the user must name the pairs."""
    reference = write_checkpoint("b", generator=build_linear_state(), critic=build_linear_state())
    reason = get_failure_reason(
        write_checkpoint(first=build_linear_state(), second=build_linear_state()), against=str(reference)
    )
    assert "does not know which sections belong together: " in reason
    assert "b.pt#generator" in reason


def test_inconclusive_load_state_dict_does_not_pass(write_checkpoint, tmp_path):
    """The class's own load code needs values, and statecli calls load_state_dict without values."""
    source = "import torch\n\n\nclass Net(torch.nn.Linear):\n    def _load_from_state_dict(self, state, *rest):\n"
    source += (
        "        state['weight'] * float(state['bias'].sum())\n        super()._load_from_state_dict(state, *rest)\n"
    )
    (tmp_path / "net.py").write_text(source)
    reason = get_failure_reason(write_checkpoint(**build_linear_state()), model=f"{tmp_path / 'net.py'}:Net(2, 2)")
    assert "cannot call load_state_dict" in reason


def test_damaged_reference_fails_under_any_name(write_checkpoint):
    """Values that cannot be compared pass, but not a file whose name says so."""
    reference = write_checkpoint("statecli does not know whether the values differ", **build_linear_state())
    reference.write_bytes(reference.read_bytes().replace(b"/data/0", b"/data/9"))
    assert reference.name in get_failure_reason(write_checkpoint(**build_linear_state()), against=str(reference))


WRAPPED_STATE = {f"_orig_mod.{key}": value for key, value in build_linear_state().items()}


def test_wrapper_prefix_is_not_a_missing_entry(compare_states):
    """Names are paired without the prefix, on either side. An entry missing under the prefix is still reported."""
    assert compare_states(build_linear_state(), WRAPPED_STATE) == []
    assert compare_states(WRAPPED_STATE, build_linear_state()) == []
    assert compare_states({"weight": build_linear_state()["weight"]}, WRAPPED_STATE) == [
        ("missing-entry", "_orig_mod.bias", "model")
    ]


def list_prefix_findings(target, reference):
    (result,) = audit(Request((str(target),), select=("wrapper-prefix",), against=str(reference))).targets
    return [(finding.severity.value, finding.message) for finding in result.findings]


def test_a_wrappers_prefix_in_the_reference_is_a_note(write_checkpoint):
    """The target has the plain names and loads."""
    plain_path, wrapped_path = write_checkpoint("a", **build_linear_state()), write_checkpoint("b", **WRAPPED_STATE)
    ((severity, message),) = list_prefix_findings(plain_path, wrapped_path)
    assert severity == "note"
    assert message.startswith("stripped the prefix '_orig_mod.' from the names of 2 tensors of")
    assert [severity for severity, _ in list_prefix_findings(wrapped_path, plain_path)] == ["warning"]


def test_a_reference_whose_name_ends_with_the_target_is_still_the_reference(write_checkpoint, tmp_path, monkeypatch):
    """The side decides, not the end of the message: `backup of a.pt` is not `a.pt`."""
    write_checkpoint("a", **build_linear_state()), write_checkpoint("backup of a", **WRAPPED_STATE)
    monkeypatch.chdir(tmp_path)
    assert [severity for severity, _ in list_prefix_findings("a.pt", "backup of a.pt")] == ["note"]


def test_attribute_prefix_missing_in_the_reference_is_reported(write_checkpoint):
    """`net.` is not the prefix of a known wrapper, but a strict load of the plain names fails all the same."""
    prefixed = {f"net.{key}": value for key, value in build_linear_state().items()}
    ((severity, message),) = list_prefix_findings(
        write_checkpoint("a", **prefixed), write_checkpoint("b", **build_linear_state())
    )
    assert severity == "warning"
    assert "'net.' from the names of 2 tensors" in message


def test_a_folder_of_several_checkpoints_is_no_reference(write_checkpoint, tmp_path):
    """The error asks for one of the files."""
    step = tmp_path / "step"
    step.mkdir()
    torch.save({"module": build_linear_state()}, step / "weights.pt")
    torch.save(build_linear_state(), step / "other.pt")
    assert "give one of the files" in get_failure_reason(write_checkpoint(**drop_entry("bias")), against=str(step))


def list_section_notes(target, **options):
    """Return the notes about sections of the last target."""
    result = audit(Request((str(target),), select=("missing-entry",), **options)).targets[-1]
    assert (result.status.value, result.findings) == ("audited", ())
    return [note.message for note in result.notes if note.name.startswith("sections")]


def test_compared_section_is_noted(write_checkpoint):
    """Notes name the section of the target loaded by a class, and the section of the reference."""
    averaged = write_checkpoint("b", **build_training_checkpoint(current_model_state=build_linear_state()))
    (note,) = list_section_notes(averaged, model=LINEAR_SPEC)
    assert note.startswith("statecli did not compare optimizer_states.0, callbacks, current_model_state of")
    assert note.endswith(f", because {LINEAR_SPEC} loads only state_dict")
    paired, left_out = list_section_notes(write_checkpoint(**build_linear_state()), against=str(averaged))
    assert paired == "section 'state_dict' is compared with section 'model'"
    assert "current_model_state" in left_out
    assert left_out.startswith("statecli did not compare these sections, because only ")
