"""`statecli resume-check`: a script is interrupted and resumed, and each lost state is named."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from statecli.commands.resume_check import run as resume_run  # noqa: E402
from statecli.commands.resume_check.result import ResumeAnswer, State  # noqa: E402
from statecli.core.errors import ModelError  # noqa: E402

from ..forked_python import run_command  # noqa: E402

SCRIPT = Path(__file__).parent / "script.py"
HELP = {
    "unsaved_step": (
        "the checkpoint of step 2 has no step number: save the step number, and start the resumed loop there"
    ),
    "unsaved_optimizer": "the checkpoint of step 2 has no optimizer: save self.optimizer.state_dict(), and load it",
    "unsaved_scheduler": "the checkpoint of step 2 has no scheduler: save self.scheduler.state_dict(), and load it",
    "unsaved_average": (
        "the checkpoint of step 2 has no average of the weights: save self.average.state_dict(), and load it"
    ),
}
#: What to do for a saved state that is not an object with `load_state_dict`.
NEXT = {
    "step": "start the loop at this step",
    "data": "continue with the next batch: skip the batches that were already used",
    "random": (
        "call torch.set_rng_state(checkpoint['random'][0]) and random.setstate(checkpoint['random'][1]) and "
        "numpy.random.set_state(checkpoint['random'][2]) right before step 3"
    ),
}


@pytest.fixture(autouse=True)
def run_forked(monkeypatch):
    """Run the script in a fork of a process with torch imported, instead of a new process."""
    if not hasattr(os, "fork"):
        pytest.skip("needs POSIX")
    forked = SimpleNamespace(run=run_command, DEVNULL=subprocess.DEVNULL)
    monkeypatch.setattr(resume_run, "subprocess", forked)


def check(name: str, steps: int = 4):
    return resume_run.resume_check(resume_run.Request(f"{SCRIPT}::{name}", steps))


def test_a_complete_script_passes():
    """Every state equals the state of the uninterrupted training."""
    result = check("main")
    assert (result.answer, result.findings) == (ResumeAnswer.EQUAL, ())
    assert {row.state: row.resumed for row in result.states} == dict.fromkeys(State, True)


@pytest.mark.parametrize(
    "name", [*(f"drop_{state.value}" for state in State), "unsaved_step", "unsaved_optimizer", "unsaved_average"]
)
def test_each_lost_state_is_named(name):
    """Eight states that are not loaded, or not saved either: one finding, about the lost state."""
    result = check(name)
    assert result.answer is ResumeAnswer.DIFFERENT
    (finding,) = result.findings
    assert (finding.rule, finding.fqn) == ("not-resumed", name.partition("_")[2])
    state = finding.fqn
    load = f"call self.{state}.load_state_dict(checkpoint['{state}'])"
    dropped = (
        f"the checkpoint of step 2 has '{state}'; the script does not load this state, or changes this state before "
        f"step 3: {NEXT.get(state) or load}"
    )
    assert finding.help == HELP.get(name, dropped)


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("rng", "call torch.set_rng_state(checkpoint['rng']) right before step 3"),
        ("py", "call random.setstate(checkpoint['py']) right before step 3"),
        ("np", "call numpy.random.set_state(checkpoint['np']) right before step 3"),
        ("pos", "continue with the next batch: skip the batches that were already used"),
    ],
)
def test_a_saved_state_is_named_by_its_key(name, end):
    """The checkpoint has the state under a name of the script, and the script does not load the state."""
    (finding,) = check(f"own_{name}").findings
    start = (
        f"the checkpoint of step 2 has '{name}'; the script does not load this state, or changes this state before "
        "step 3"
    )
    assert finding.help == f"{start}: {end}"


@pytest.mark.parametrize(
    ("name", "state", "end"),
    [
        ("generator_data", "data", "has 'g'; {}: call g.set_state(checkpoint['g']) before the first batch"),
        ("generator_noise", "random", "has 'g'; {}: call g.set_state(checkpoint['g']) right before step 3"),
        ("generator_torch", "random", "has 'rng'; {}: call torch.set_rng_state(checkpoint['rng']) right before step 3"),
    ],
)
def test_a_generator_of_the_script_has_its_own_call(name, state, end):
    """The key has the name of the variable; another key of the same form has the state of torch itself."""
    (finding,) = check(name).findings
    assert finding.fqn == state
    assert finding.help.endswith(end.format("the script does not load this state, or changes this state before step 3"))


def test_a_generator_that_is_loaded_is_resumed():
    """Nothing differs."""
    assert check("generator_both").findings == ()


def test_several_lost_states_are_several_findings():
    """Only the step and the position are loaded. Another model has other gradients, so further states are unknown."""
    result = check("ignoring")
    assert [finding.fqn for finding in result.findings] == ["model", "optimizer", "scheduler", "scaler", "average"]


def test_a_script_without_a_seed_is_inconclusive():
    """Two runs without an interruption differ, so nothing is known about the resume."""
    result = check("chance")
    assert (result.answer, result.findings) == (ResumeAnswer.INCONCLUSIVE, ())
    assert result.reason.startswith(
        "two uninterrupted runs differ (the gradients differ at step 1), so statecli cannot check the resumed run"
    )


def test_only_generators_that_are_drawn_from_are_named():
    """The states of Python's and numpy's generators differ between any two processes."""
    (finding,) = check("dropping").findings
    assert finding.message == "random: not resumed (other random numbers: torch)"


@pytest.mark.parametrize("call", ["none", "metric", "closure"])
@pytest.mark.parametrize(
    ("drop", "messages"),
    [
        ("nothing", []),
        ("model", ["model: not resumed (weight, bias)"]),
        ("head", ["model: not resumed (head: weight, bias)"]),
        ("data", ["data: not resumed (the first batch is the batch of step 1)"]),
    ],
)
def test_calls_after_a_step_are_no_difference(call, drop, messages):
    """A second model, a metric and a closure call forward after the hook of a step; a lost state is still named."""
    assert [finding.message for finding in check(f"two_models_{call}_{drop}").findings] == messages


def test_skipped_batches_of_a_step_are_a_difference():
    """The last of four batches is equal, but the gradients are not, so the data is not called equal."""
    assert check("accumulating").findings == ()
    result = check("accumulating_less")
    assert result.answer is ResumeAnswer.DIFFERENT
    assert {row.state: row.resumed for row in result.states}[State.DATA] is not True
    assert {row.state: row.resumed for row in result.states}[State.MODEL] is True
    assert result.findings[0].message.endswith(
        "differs after step 4: the calls of forward and the gradients already differ in step 3"
    )


def test_a_lost_second_model_is_loaded_from_its_own_key():
    """The checkpoint has a key for each model."""
    (finding,) = check("two_models_none_head").findings
    assert finding.help.endswith("call head.load_state_dict(checkpoint['head'])")


@pytest.mark.parametrize(
    ("name", "lost_pattern"),
    [("ensemble", r"nets\[1\]"), ("hidden_ensemble", "Linear( 2)?"), ("loaded_ensemble", None)],
)
def test_models_of_one_class_are_compared_separately(name, lost_pattern):
    """Only the second of three models in a list is lost; without a variable, it is named by its class."""
    messages = [finding.message for finding in check(name).findings]
    assert len(messages) == (lost_pattern is not None)
    assert all(re.fullmatch(rf"model: not resumed \({lost_pattern}: weight, bias\)", message) for message in messages)


def test_random_numbers_that_no_step_uses_may_differ():
    """The random state is neither saved nor needed."""
    result = check("plain")
    assert (result.answer, result.findings) == (ResumeAnswer.EQUAL, ())
    assert {row.state: row.resumed for row in result.states}[State.RANDOM] is None


def test_a_difference_without_a_cause_is_named_by_its_first_tensor():
    """A list of losses is not a known state; the last checkpoints differ."""
    (finding,) = check("uses_losses").findings
    assert (finding.rule, finding.fqn) == ("resumed-differently", "weight")


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("flat", "model"),
        ("scale", "model"),
        *((kind, "optimizer") for kind in ("array", "set", "object", "circle", "model")),
    ],
)
def test_values_in_unusual_objects_are_compared(name, state):
    """Inner tensors of a subclass, scales of a quantized tensor, arrays of numpy, and attributes of an object."""
    assert [finding.fqn for finding in check(f"unsaved_{name}").findings] == [state]
    assert check(f"same_{name}").answer is ResumeAnswer.EQUAL


@pytest.mark.parametrize(
    ("name", "state"),
    [
        ("opaque", "buffers['model']['extra'] (Opaque)"),
        ("slots", "groups['0.extra'] (Settings)"),
    ],
)
def test_values_that_cannot_be_read_are_inconclusive(name, state):
    """No state that can be read differs, so nothing proves that the runs are equal."""
    for start in ("unsaved", "same"):
        result = check(f"{start}_{name}")
        assert (result.answer, result.states) == (ResumeAnswer.INCONCLUSIVE, ())
        assert result.reason.startswith(f"statecli cannot read the values of {state}, so a difference in these ")


def test_state_with_too_many_paths_ends():
    """Twenty objects that all refer to each other: the first numbers differ, or nothing proves that all are equal."""
    assert [finding.fqn for finding in check("unsaved_web").findings] == ["optimizer"]
    assert check("same_web").answer is ResumeAnswer.INCONCLUSIVE


def test_a_dict_of_averages_is_an_average():
    """The keys and shapes of the dict are those of the model."""
    (finding,) = check("forgetful").findings
    assert finding.help.endswith("has no average of the weights: save shadow, and copy the saved tensors into shadow")
    assert (finding.fqn, finding.message) == ("average", "average: not resumed (shadow: weight, bias)")


def test_copies_for_saving_and_changing_settings_are_no_lost_state():
    """A dict of the saved weights, the folder of the checkpoints and the number of the process differ."""
    result = check("carrying_without_nothing")
    assert (result.answer, result.findings) == (ResumeAnswer.EQUAL, ())


@pytest.mark.parametrize(
    ("name", "message", "end"),
    [
        ("g", "model: not resumed (weight, bias)", "call g.load_state_dict(checkpoint['g'])"),
        ("d", "model: not resumed (d: weight, bias)", "call d.load_state_dict(checkpoint['d'])"),
        (
            "og",
            "optimizer: not resumed (step, exp_avg, exp_avg_sq and 1 more)",
            "call og.load_state_dict(checkpoint['og'])",
        ),
        ("od", "optimizer: not resumed (od: step, exp_avg, exp_avg_sq)", "call od.load_state_dict(checkpoint['od'])"),
        ("schedule", "scheduler: not resumed (schedule)", "call schedule.load_state_dict(checkpoint['schedule'])"),
        (
            "generator",
            "random: not resumed (other random numbers: generator)",
            "call generator.setstate(checkpoint['generator']) right before step 3",
        ),
        (
            "rng",
            "random: not resumed (other random numbers: rng)",
            """call setattr(rng.bit_generator, "state", checkpoint['rng']) right before step 3""",
        ),
        ("ema", "average: not resumed (ema.shadow: weight, bias)", "copy the saved tensors into ema.shadow"),
        (
            "seen",
            "seen: differs between the checkpoints of step 4 of the uninterrupted and of the resumed run: 8 → 4",
            "load the value from the checkpoint of step 2 before step 3",
        ),
    ],
)
def test_each_state_of_a_larger_script_is_named_with_its_remedy(name, message, end):
    """Every state has a single finding, also a state that no later step uses."""
    (finding,) = check(f"carrying_without_{name}").findings
    assert (finding.message, finding.help.rpartition(": ")[2]) == (message, end)


def test_the_state_of_another_object_is_not_suggested():
    """The checkpoint has one of two optimizers, and no average."""
    (optimizer,), (average,) = (check(f"carrying_unsaved_{name}").findings for name in ("og", "ema"))
    assert optimizer.help.endswith("save og.state_dict(), and load it")
    assert average.help.endswith("save ema.shadow, and copy the saved tensors into ema.shadow")


@pytest.mark.parametrize("name", ["loader", "keyword_loader"])
def test_a_loader_that_begins_again_is_named(name):
    """The first batch after the resume is the batch of the first step."""
    (finding,) = check(name).findings
    assert finding.message == "data: not resumed (the first batch is the batch of step 1)"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("silent", "the script saved no checkpoint of step 2; the folder that statecli passes as `save_to` is empty"),
        ("raises_on_resume", "the resumed training raised ValueError: no such key (script.py:"),
        ("short", "the function took 1 step of the optimizer, but must take 4"),
        (
            "few",
            "the script defines few(steps, save_to), but statecli passes steps, save_every, save_to, "
            "checkpoint to few as keyword arguments: got an unexpected keyword argument 'save_every'; "
            "write `def few(steps, save_every, save_to, checkpoint):`",
        ),
        ("many", "missing a required argument: 'rate'; write `def many(steps, save_every, save_to, checkpoint):`"),
        ("STATES", "the script has no function STATES"),
        ("nothing", "the script has no function nothing; its functions: main, chance, plain, uses_losses, "),
    ],
)
def test_wrong_script_is_an_error_line(name, message):
    """The error names the problem, and the requirement for the function."""
    with pytest.raises(ModelError) as caught:
        check(name)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("script",),
            "is not a function of a file; write FILE.py::FUNCTION, such as train.py::main, and define a function "
            "main(steps,",
        ),
        (("missing.py::main",), "missing.py: no such file"),
        (("missing.py",), "missing.py: no such file"),
        ((str(SCRIPT),), "choose a function of the file, and run: statecli resume-check\n"),
        ((f"{SCRIPT}::",), f"\n  {SCRIPT}::main\n"),
        ((f"{SCRIPT}::main", "--steps", "3"), "--steps 3: must be an even number, 2 or more"),
    ],
)
def test_wrong_command_line_is_refused(statecli, monkeypatch, words, message):
    """Before the script runs."""
    runs = []
    monkeypatch.setattr(resume_run.subprocess, "run", lambda command, **_: runs.append(command))
    result = statecli("resume-check", *words)
    assert (result.code, runs) == (2, [])
    assert message in result.err


def test_missing_function_of_a_script_is_explained(statecli, tmp_path):
    """The error lists the functions of the file, or the line of a syntax error."""
    (tmp_path / "few.py").write_text("def few(steps): pass\n")
    (tmp_path / "bad.py").write_text("\ndef bad(:\n")
    missing_error, syntax_error = (statecli("resume-check", str(tmp_path / name)).err for name in ("few.py", "bad.py"))
    assert "no function of the file takes steps, save_every, save_to, checkpoint (it defines: few)" in missing_error
    assert "bad.py: has a syntax error in line 2: " in syntax_error
    assert missing_error.count("\n") == syntax_error.count("\n") == 1


def test_lost_state_exits_with_status_1(statecli):
    """The table, the finding and the line to write."""
    result = statecli("resume-check", f"{SCRIPT}::unsaved_scheduler")
    assert result.code == 1
    assert "error[not-resumed]: scheduler: not resumed (self.scheduler)" in result.out
    assert HELP["unsaved_scheduler"] in result.out


def test_json_has_each_state(statecli):
    """The document fits its schema, and has the answer."""
    result = statecli("resume-check", f"{SCRIPT}::plain", "-f", "json")
    assert (result.code, result.json["schema"], result.json["answer"]) == (0, "statecli.resume-check/1", "equal")
    assert [row["state"] for row in result.json["states"]] == [state.value for state in State]


def test_prints_of_the_script_go_to_standard_error(statecli, capfd):
    """Standard output has only the table. tests/test_windows.py runs a script in new processes."""
    result = statecli("resume-check", f"{SCRIPT}::printing", "-f", "plain")
    assert result.code == 0
    assert result.out.startswith("state")
    assert "a training run resumed from step 2 of 4 equals the uninterrupted run" in result.out
    assert "print of the script" not in result.out
    assert capfd.readouterr() == ("", "print of the script\n" * 2)
