"""The commands: options in, exit code out. Both parsers, `shortcut` and `arguments`, end here."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

from msgspec.structs import replace

from statecli.cli import console, interrupts, output_files
from statecli.cli.output_files import Written
from statecli.commands.inspect.run import inspect as run_inspection
from statecli.core.error_causes import group_by_cause
from statecli.core.errors import StateError, UsageError
from statecli.core.exit_code import Verdict
from statecli.core.progress import Progress
from statecli.core.state import ModelState
from statecli.core.units import plural
from statecli.render import Output
from statecli.report import View, documents
from statecli.report import inspect as inspecting
from statecli.requests.inspect import requested
from statecli.requests.options import (
    AuditOptions,
    DiffOptions,
    InspectOptions,
    LockOptions,
    MergeOptions,
    VerifyOptions,
    refuse_empty,
    refuse_nothing,
)
from statecli.targets.load import spec_of

#: Lines on stderr of tensors that could not be read or compared; the result has each.
TOLD = 20


def run(options: InspectOptions | DiffOptions | VerifyOptions | AuditOptions | LockOptions | MergeOptions) -> int:
    """Whichever command these are the options of; the exit code."""
    _limit(options.timeout)
    with console.warnings_once():
        if isinstance(options, MergeOptions):
            return merge(options)
        if isinstance(options, LockOptions):
            return lock(options)
        if isinstance(options, AuditOptions):
            return audit(options)
        if isinstance(options, VerifyOptions):
            return verify(options)
        return diff(options) if isinstance(options, DiffOptions) else inspect(options)


def _limit(seconds: float | None) -> None:
    """Have the parent process end this one after so many seconds."""
    if seconds is None:
        return
    if not 0 < seconds < math.inf:
        raise UsageError(f"--timeout {seconds:g}: must be a number of seconds above 0")
    console.limit(seconds)


def _progress(
    options: InspectOptions | DiffOptions | AuditOptions | LockOptions, *, values: bool = True
) -> AbstractContextManager[Progress | None]:
    return console.progress(enabled=not options.no_progress, color=options.color.value, values=values)


def inspect(options: InspectOptions) -> int:
    """`statecli inspect`; the exit code."""
    refuse_empty(options)
    _refuse_both(options)
    written = output_files.asked(options)
    engine, share = _engine(options.executor), _share(options, "inspect")
    divided = _divided(options)
    if divided and (not options.stats or spec_of(options.target)):
        raise UsageError(f"{divided}: inspect reads values only for --stats of a checkpoint")
    console.keep_stdout()
    request = requested(options)
    reads = request.stats or request.to is not None
    with engine, share as mine, _progress(options, values=reads) as progress:
        found = run_inspection(request, progress)
    _refuse_overwriting(written, found.state)
    if mine is not None:
        return _part(mine, written[-1].path)
    report = inspecting.of_inspection(found, View(unfold=options.all, tree=options.tree, verbose=options.verbose))
    code = console.publish(report, written, options.color.value, options.quiet)
    return _complained(found.broken, "read", code)


def diff(options: DiffOptions, name: str | None = None) -> int:
    """`statecli diff`; the exit code. What could be compared is shown, whatever could not.

    `name` is what both sides are called, in place of where they lie.
    """
    # An inspection does without them, and starts the sooner.
    from statecli.commands.diff.run import compare
    from statecli.report import diff as diffing
    from statecli.requests import diff as asked

    refuse_empty(options)
    asked.check(options)
    written = output_files.asked(options)
    engine, share = _engine(options.executor), _share(options, "diff")
    console.keep_stdout()
    with engine, share as mine, _progress(options, values=not options.metadata_only) as progress:
        found = compare(asked.request(options), progress)
    _refuse_overwriting(written, found.before, found.after)
    if mine is not None:
        return _part(mine, written[-1].path, [one.message for one in found.broken])
    if name is not None:
        sides = replace(found.before, target=f"a/{name}"), replace(found.after, target=f"b/{name}")
        found = replace(found, before=sides[0], after=sides[1])
    view = asked.view(options)
    report = diffing.of_diff(found, view)
    if view.names is not None:
        written = (*written[:-1], replace(written[-1], output=Output.PLAIN))
    code = console.publish(report, written, options.color.value, options.quiet)
    if view.names is not None:
        console.tell(report.beside())
    return _complained(diffing.broken(found), "compared", code)


def verify(options: VerifyOptions) -> int:
    """`statecli verify`; the exit code. What could be proved is shown, whatever could not be told."""
    from statecli.commands.verify import run as proofs
    from statecli.commands.verify.result import Name
    from statecli.report import verify as verifying
    from statecli.requests import verify as asked

    refuse_empty(options)
    _refuse_both(options)
    written = output_files.asked(options)
    request = proofs.Request(
        target=options.target,
        checks=tuple(name for name in Name if name in options.check),
        device=options.device,
        dtype=options.dtype,
        optimizer=options.optimizer,
        input=options.input,
        inputs=options.inputs,
        init_device=options.init_device,
        include=options.include,
        exclude=options.exclude,
        kind=options.kind,
    )
    asked.check(request)
    console.keep_stdout()
    with console.steps(len(request.checks or Name), enabled=not options.no_progress, color=options.color.value) as step:
        found = proofs.run(request, lambda _: step())
    _refuse_overwriting(written, found.state)
    report = verifying.of_verification(found, View(unfold=options.all, verbose=options.verbose), options.check)
    code = console.publish(report, written, options.color.value, options.quiet)
    untold = verifying.untold(found, options.check)
    for message in untold:
        console.complain(message, debug=False)
    return 2 if untold and code == 0 else code


def audit(options: AuditOptions) -> int:
    """`statecli audit`; the exit code: 2 where a target could not be audited, or none was."""
    from statecli.commands.audit import baseline, run_notes
    from statecli.commands.audit import run as auditing
    from statecli.report import audit as reporting
    from statecli.requests import audit as asked
    from statecli.targets.outcome import Status

    refuse_empty(options)
    written, into = output_files.asked(options), options.write_baseline
    engine, share = _engine(options.executor, options.jobs), _share(options, "audit")
    if into is not None:
        output_files.refuse_place(into, "--write-baseline")
        output_files.refuse_twice((*written, Written(Output.JSON, into, f"--write-baseline {into}")))
    console.keep_stdout()
    configured = asked.loaded(options)
    for output in written:
        output_files.refuse_read(output, asked.inputs(options, configured))
    request = asked.request(options, configured)
    reads = request.values or request.lock is not None
    with engine, share as mine, _progress(options, values=reads) as progress:
        found = auditing.audit(request, progress=progress)
    if mine is not None:
        return _part(mine, written[-1].path)
    if into is not None:
        found, pieces = auditing.accept(found, into, options.reason or "", request)
        console.write(pieces, into)
    untold = reporting.untold(found, options.select, allow_empty=options.allow_empty)
    fixed, told = baseline.fixed(found), run_notes.told(found, request)
    report = reporting.of_audit(found, View(unfold=options.all, verbose=options.verbose), untold, [*fixed, *told])
    code = console.publish(report, written, options.color.value, options.quiet)
    failed = [one.reason or one.target for one in found.targets if one.status is Status.FAILED]
    bad = list(dict.fromkeys((*failed, *untold)))
    for message in bad if options.quiet or not console.on_screen(written[-1]) else ():
        console.complain(message, debug=False)
    if not options.quiet:
        console.tell([*([] if options.verbose else fixed), *told])
    return 2 if bad else code


def lock(options: LockOptions) -> int:
    """`statecli lock`; the exit code. Nothing is written unless all of it could be."""
    from statecli.commands.lock import lock_file
    from statecli.commands.lock import run as making

    refuse_empty(options)
    if options.jobs < 0:
        raise UsageError(f"--jobs {options.jobs}: must be 0 or more")
    engine, share = _engine(options.executor, options.jobs), _share(options, "lock")
    divided = _divided(options)
    if divided and all(map(spec_of, options.targets)):
        raise UsageError(f"{divided}: only values of checkpoints are locked, and these are classes")
    written = Written(
        Output.JSON, None if options.output == output_files.STDOUT else options.output, f"-o {options.output}"
    )
    output_files.refuse(written, options)
    console.keep_stdout()
    request = making.Request(
        options.targets,
        options.digest,
        options.jobs,
        options.init_device,
        options.include,
        options.exclude,
        options.kind,
        _folder(written.path if options.shard is None else None),
        options.weights_only,
    )
    with _progress(options, values=False):
        found = making.read(request)
    _refuse_overwriting((written,), *(one.state for one in found))
    with engine, share as mine, _progress(options) as progress:
        made = making.lock(found, request, progress)
    if mine is not None:
        return _part(mine, written.path)
    if not options.quiet:
        console.tell(list(making.without_values(found, made)))
    console.write(lock_file.written(made), written.path)
    return 0


def _folder(path: str | None) -> str:
    """Where a lock lies, from which it names its targets. All shares put them in one order, wherever a part lies."""
    return os.path.dirname(path or "") or "."


def merge(options: MergeOptions) -> int:
    """`statecli merge`; the exit code of the command that the parts are of."""
    from statecli.requests.merge import merging

    refuse_empty(options)
    output_files.asked(options)
    with merging(options) as command:
        return run(command)


def _share(options: Any, command: str) -> AbstractContextManager[Any]:
    """Around the work of which `--shard` says that only a share is to be done; None where it was not given."""
    if options.shard is None:
        return nullcontext()
    from statecli.workers.shards import shard as share

    share.check(options)
    return share.doing(options, command)


def _part(share: Any, path: str | None, broken: Sequence[str] = ()) -> int:
    """Writes what came of a share; the exit code: 2 where some of it could not be done, which the part says too."""
    console.write(share.part(broken), path)
    told = [message for message, _ in group_by_cause(dict.fromkeys(share.failed))]
    for message in told[:TOLD]:
        console.complain(message, debug=False)
    if len(told) > TOLD:
        console.complain(f"and {plural(len(told) - TOLD, 'more task')} that could not be done", debug=False)
    return 2 if told else 0


def _divided(options: Any) -> str:
    """Who is said to do the work on values, or a share of it; "" where nobody is."""
    executor = "" if options.executor is None else f"--executor {options.executor}"
    return executor or ("" if options.shard is None else f"--shard {options.shard}")


def _refuse_both(options: InspectOptions | VerifyOptions) -> None:
    """Either says what forward is called with."""
    if options.input and options.inputs:
        raise UsageError("--input and --inputs contradict each other; leave one of them out")


def _engine(executor: Any, jobs: int = 0) -> AbstractContextManager[None]:
    """Around the work that `--executor` says who is to do. Raises UsageError before anything is read."""
    if executor is None:
        return nullcontext()
    from statecli.workers import executors

    executors.check(executor, jobs=jobs)
    return executors.working(executor)


def _complained(broken: Sequence[tuple[str, str]], done: str, code: int) -> int:
    """The exit code after these were told, a line a file and cause: `code` where there are none."""
    causes = group_by_cause(broken)
    for message, _ in causes[:TOLD]:
        code = console.complain(message, debug=False)
    if rest := sum(count for _, count in causes[TOLD:]):
        console.complain(f"and {plural(rest, 'more tensor')} that could not be {done}", debug=False)
    return code


def _refuse_overwriting(written: Sequence[Written], *states: ModelState) -> None:
    """A file that was just read of, one that no option names, would be destroyed."""
    there = [one for one in written if one.path is not None and os.path.isfile(one.path)]
    for state in states if there else ():
        read = {where.path for tensor in state.tensors for where in tensor.ranges}
        for one, path in itertools.product(there, read):
            if os.path.exists(path) and os.path.samefile(path, str(one.path)):
                raise UsageError(f"{one.option}: {state.target} is read from it; write elsewhere")


def git_setup(everywhere: bool) -> int:
    """`statecli git setup`; the exit code."""
    from statecli.cli import git_driver

    console.out().text("".join(f"{line}\n" for line in git_driver.setup(everywhere=everywhere)))
    return 0


def git_textconv(path: str) -> int:
    """`statecli git textconv`; always 0, for git dies of anything else: what is wrong stands in the text."""
    from statecli.cli import git_driver

    sink = console.out()
    try:
        for line in git_driver.textconv(path):
            sink.text(f"{line}\n")
    except Exception as error:  # noqa: BLE001  # a bug of ours must not end somebody's git diff
        sink.text(f"{git_driver.failed(error)}\n")
    return 0


def git_difftool(before: str, after: str, name: str = "") -> int:
    """`statecli git difftool`; always 0, or git asks whether to go on."""
    from statecli.cli import git_driver

    # Asked for each time: a comparison keeps standard output for the results.
    try:
        for line in git_driver.difftool(before, after, _differ, name):
            console.out().text(f"{line}\n")
    except StateError as error:
        console.out().text(f"{error}\n")
    return 0


def _differ(before: str, after: str, name: str) -> int:
    """The difference of two files that git keeps, under the name that both have in the repository."""
    return diff(DiffOptions(before=before, after=after), name)


def rules(name: str | None, output_format: Output, output: str | None, color: str) -> int:
    """`statecli rules`; the exit code. For people, one rule is its explanation."""
    from statecli.report import rules as ruling

    refuse_nothing(output, "--output")
    texts = ruling.every() if name is None else (ruling.named(name),)
    path = None if output == output_files.STDOUT else output
    if name is not None and output_format in (Output.TABLE, Output.PLAIN):
        console.show(lambda width: ruling.explained(texts[0], width), path)
        return 0
    return console.publish(ruling.of_rules(texts), [Written(output_format, path, f"-o {path}")], color, quiet=False)


def config(path: str | None, no_config: bool, output_format: Output, output: str | None, color: str) -> int:
    """`statecli config`; the exit code."""
    from statecli.commands.audit.config import load
    from statecli.report import config as configuring
    from statecli.requests import audit as asked

    refuse_nothing(path, "--config")
    refuse_nothing(output, "--output")
    found = load(path, no_config=no_config)
    report = configuring.of_config(asked.in_force(found), found.path)
    where = None if output == output_files.STDOUT else output
    return console.publish(report, [Written(output_format, where, f"-o {where}")], color, quiet=False)


def schema(command: str) -> int:
    """`statecli schema`; the exit code."""
    console.out().utf8(documents.schema(command))
    return 0


def leave(run: Callable[[], int], debug: bool) -> NoReturn:
    """Run a command's body and leave with the promised code: a crash is never 1."""
    try:
        code = run()
        console.finish()
    except StateError as error:
        code = 130 if interrupts.came else console.complain(str(error), debug)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        console.silence()
        code = 141
    except OSError as error:
        code = console.system_error(error, debug)
    except MemoryError:
        code = console.complain("there is not enough memory; nothing was concluded", debug)
    except SystemExit as done:
        code = console.complain(f"model code raised SystemExit({done.code!r}); nothing was concluded", debug)
    except Exception as error:  # noqa: BLE001  # a bug of ours is told in one line and ends 2
        code = console.crash(error, debug)
    console.settle_errors()
    raise Verdict(130 if interrupts.came else code)
