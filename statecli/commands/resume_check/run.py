"""Run `statecli resume-check`: run the script in child processes, with and without an interruption, and compare."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile

import msgspec
from msgspec.structs import replace

from statecli.commands.diff import request as diff_request
from statecli.commands.diff.result import Diff, ScalarChange, Status
from statecli.commands.diff.run import compare_targets
from statecli.commands.diff.settings import format_values
from statecli.commands.resume_check import rules
from statecli.commands.resume_check.compare import compare_runs, describe_missing, find_run_difference, list_unreadable
from statecli.commands.resume_check.record import RunRecord, StepRecord
from statecli.commands.resume_check.result import ResumeAnswer, ResumeCheck, StateRow
from statecli.commands.resume_check.saved_keys import read_keys
from statecli.core import python_names
from statecli.core.errors import ModelError, UsageError
from statecli.core.finding import Finding
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Kind
from statecli.core.units import join_names, plural

#: Last whole number in the name of a checkpoint: its step.
_STEP = compile_on_use(r"(\d+)(?=\D*$)")
_CHILD = "import sys; from statecli.commands.resume_check import recorder; recorder.main(sys.argv[1:])"
#: Arguments that the function of the script must take, and a description of this function.
ARGUMENTS = ("steps", "save_every", "save_to", "checkpoint")
CONTRACT = f"a function main({', '.join(ARGUMENTS)})"
#: Largest number of functions of a script in an error.
_MAX_FUNCTIONS = 5
#: Setting that every checkpoint of Lightning has, and its counters of loops, which begin again after a resume.
_LIGHTNING_VERSION, _LIGHTNING_PROGRESS = "pytorch-lightning_version", "loops."
#: Setting with the losses of the run, as transformers' Trainer logs them.
_TRAINING_LOG = "trainer_state.log_history"
#: Largest number of characters of the values in a message.
MAX_VALUE_CHARACTERS = 80
#: Largest number of states in a reason.
_MAX_NAMES = 3


class Request(msgspec.Struct, frozen=True):
    """Request for a check: `target` is FILE.py::FUNCTION, `steps` is an even number of optimizer steps."""

    target: str
    steps: int = 4


def check_target(target: str) -> None:
    """Raise UsageError for a target that is not a function of a file."""
    file, separator, name = target.replace("::", ":").rpartition(":")
    if not separator or not name.isidentifier():
        file = target.rstrip(":")
        if file.endswith(".py"):
            raise _build_no_function_error(file) if os.path.isfile(file) else UsageError(f"{file}: no such file")
        raise UsageError(
            f"{target}: is not a function of a file; write FILE.py::FUNCTION, such as train.py::main, and define "
            f"{CONTRACT}"
        )
    if file.endswith(".py") and not os.path.isfile(file):
        raise UsageError(f"{file}: no such file")


def _build_no_function_error(file: str) -> UsageError:
    """Return the error for a target without a function. The error lists the functions that the user can choose."""
    error = python_names.find_syntax_error(file)
    if error is not None:
        return UsageError(f"{file}: has a syntax error in line {error.lineno}: {error.msg}")
    names = list(python_names.list_functions_that_take(file, ARGUMENTS))
    if names:
        choices = [f"{file}::{name}" for name in names]
        return UsageError(f"{file}: choose a function of the file, and run: statecli resume-check", choices=choices)
    defined = join_names([*python_names.list_definitions(file)], _MAX_FUNCTIONS) or "none"
    return UsageError(
        f"{file}: no function of the file takes {', '.join(ARGUMENTS)} (it defines: {defined}); write {CONTRACT}, and "
        f"type: statecli resume-check {file}::main"
    )


def resume_check(request: Request) -> ResumeCheck:
    """Run the script twice, and a third time if the trainings differ. Raises ModelError if the script fails."""
    with tempfile.TemporaryDirectory(prefix="statecli-") as folder:
        return _Comparison(request, folder).compare()


class _Comparison:
    def __init__(self, request: Request, folder: str) -> None:
        self._target = request.target
        self._steps = request.steps
        self._saved_at = request.steps // 2
        self._folder = folder

    def compare(self) -> ResumeCheck:
        full_run = self._run("whole")
        if len(full_run.steps) < self._steps:
            steps_text = plural(len(full_run.steps), "step")
            raise ModelError(
                f"{self._target}: the function took {steps_text} of the optimizer, but must take {self._steps}, "
                "the value of `steps`"
            )
        checkpoint = self._find_checkpoint("whole", self._saved_at)
        last = self._find_checkpoint("whole", self._steps)
        resumed = self._run("resumed", checkpoint)
        if not resumed.steps:
            raise ModelError(f"{self._target}: the resumed training took no step of the optimizer")
        rows = tuple(compare_runs(full_run, resumed, self._saved_at))
        findings = [self._build_finding(row, full_run, checkpoint) for row in rows if row.resumed is False]
        settings: list[ScalarChange] = []
        if not findings:
            diff = self._compare_last(last, "resumed")
            findings = self._describe_tensor(diff, full_run.steps[self._saved_at], resumed.steps[0])
            settings = self._list_differing_settings(diff, last)
        result = ResumeCheck(self._target, self._steps, self._saved_at, ResumeAnswer.EQUAL, rows)
        if not findings and not settings:
            return self._confirm(result, full_run, resumed)
        difference = find_run_difference(full_run, self._run("again"))
        if difference is not None:
            reason = (
                f"two uninterrupted runs differ ({difference}), so statecli cannot check the resumed run; seed every "
                "random generator, and call torch.use_deterministic_algorithms(True)"
            )
            return replace(result, answer=ResumeAnswer.INCONCLUSIVE, states=(), reason=reason)
        if not findings:
            variable_keys = {change.key for change in self._compare_last(last, "again").scalars}
            findings = [self._describe_setting(change) for change in settings if change.key not in variable_keys][:1]
        if not findings:
            return self._confirm(result, full_run, resumed)
        return replace(result, answer=ResumeAnswer.DIFFERENT, findings=tuple(findings))

    def _confirm(self, result: ResumeCheck, full_run: RunRecord, resumed: RunRecord) -> ResumeCheck:
        """Return the result of equal runs, inconclusive if values were unreadable."""
        unreadable = list_unreadable(full_run.steps[self._saved_at]) or list_unreadable(resumed.steps[0])
        return _call_inconclusive(result, unreadable) if unreadable else result

    # --- the script ----------------------------------------------------------------------------------------------

    def _run(self, name: str, checkpoint: str | None = None) -> RunRecord:
        folder, path = os.path.join(self._folder, name), os.path.join(self._folder, f"{name}.json")
        os.mkdir(folder)
        record = run_child([self._target, str(self._steps), str(self._saved_at), folder, checkpoint or "", path])
        if record.error is not None:
            run_name = "the resumed training" if checkpoint else "the script"
            raise ModelError(f"{self._target}: {run_name} {record.error}")
        return record

    def _find_checkpoint(self, name: str, step: int) -> str:
        folder = os.path.join(self._folder, name)
        entries = sorted(os.listdir(folder))
        for entry in entries:
            number = _STEP.search(os.path.splitext(entry)[0])
            if number and int(number[1]) == step:
                return os.path.join(folder, entry)
        wrote = f"contains {', '.join(entries[:5])}" if entries else "is empty"
        raise ModelError(
            f"{self._target}: the script saved no checkpoint of step {step}; the folder that statecli passes as "
            f"`save_to` {wrote}. In this folder, save a checkpoint every `save_every` steps, and end its name with "
            f"the step number: step-{step}.pt"
        )

    # --- findings ------------------------------------------------------------------------------------------------

    def _build_finding(self, row: StateRow, full_run: RunRecord, checkpoint: str) -> Finding:
        message = f"{row.state.value}: not resumed ({row.evidence})"
        help = describe_missing(row, full_run, read_keys(checkpoint), self._saved_at)
        return rules.NOT_RESUMED.finding(message, target=self._target, fqn=row.state.value, help=help)

    def _compare_last(self, last: str, name: str) -> Diff:
        """Compare the last checkpoints of the first run and of the run `name`."""
        return compare_targets(diff_request.Request(last, self._find_checkpoint(name, self._steps), renames=False))

    def _describe_tensor(self, diff: Diff, before: StepRecord, after: StepRecord) -> list[Finding]:
        """Return a finding about the first tensor that differs after equal states at the first step."""
        kinds = (Kind.PARAMETER, Kind.BUFFER, Kind.OPTIMIZER)
        compared = (change for change in diff.changes if change.not_compared is None and change.kind in kinds)
        name = next((change.fqn for change in compared if change.status is not Status.IDENTICAL), None)
        if name is None:
            return []
        step = self._saved_at + 1
        if before.batches != after.batches and before.gradients != after.gradients:
            explanation = f": the calls of forward and the gradients already differ in step {step}"
        else:
            explanation = f", although all states are equal in step {step}"
        message = f"{name}: differs after step {self._steps}{explanation}"
        return [rules.RESUMED_DIFFERENTLY.finding(message, target=self._target, fqn=name)]

    def _list_differing_settings(self, diff: Diff, last: str) -> list[ScalarChange]:
        """Return the differing settings, without random states, logs, progress of a loop, and paths of this check."""
        excluded_paths = read_keys(last).list_random_paths()
        if _LIGHTNING_VERSION in diff.before.metadata.values:
            excluded_paths += (_LIGHTNING_PROGRESS,)
        return [
            change
            for change in diff.scalars
            if not f"{change.key}.".startswith(excluded_paths)
            and not change.key.endswith(_TRAINING_LOG)
            and self._folder not in f"{change.before} {change.after}"
        ]

    def _describe_setting(self, change: ScalarChange) -> Finding:
        values = format_values(change, MAX_VALUE_CHARACTERS)
        message = (
            f"{change.key}: differs between the checkpoints of step {self._steps} of the uninterrupted and of the "
            f"resumed run: {values}"
        )
        help = f"load the value from the checkpoint of step {self._saved_at} before step {self._saved_at + 1}"
        return rules.RESUMED_DIFFERENTLY.finding(message, target=self._target, fqn=change.key, help=help)


def _call_inconclusive(result: ResumeCheck, unreadable: list[str]) -> ResumeCheck:
    """Turn the result into `inconclusive`: the runs are equal, but statecli cannot read some of their values."""
    reason = (
        f"statecli cannot read the values of {join_names(unreadable, _MAX_NAMES)}, so a difference in these values "
        "would not be seen; statecli reads numbers, strings, tensors, arrays, containers of these, and Tensor "
        "subclasses with __tensor_flatten__"
    )
    return replace(result, answer=ResumeAnswer.INCONCLUSIVE, states=(), reason=reason)


def run_child(arguments: list[str]) -> RunRecord:
    """Run the recorder in a new process, with its output on standard error. Raises ModelError if the process dies."""
    command = [sys.executable, "-c", _CHILD, *arguments]
    stderr = 2
    process = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=stderr, check=False)  # noqa: S603 - as asked for
    path = arguments[-1]
    if process.returncode or not os.path.exists(path):
        raise ModelError(f"{arguments[0]}: the process of the script exited with status {process.returncode}")
    with open(path, "rb") as file:
        return msgspec.json.decode(file.read(), type=RunRecord)
