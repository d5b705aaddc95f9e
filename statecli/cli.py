"""The commands: options in, exit code out. Both parsers, `shortcut` and `arguments`, end here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NoReturn

from statecli import console, interrupts
from statecli.errors import StateError, UsageError
from statecli.inspection import Request, device
from statecli.inspection import inspect as run_inspection
from statecli.options import DiffOptions, InspectOptions, VerifyOptions
from statecli.render import Output
from statecli.report import View, documents, fold, inspecting
from statecli.report.text import plural
from statecli.state import ModelState

#: Lines on stderr of tensors that could not be read or compared; the result has each.
TOLD = 20


def run(options: InspectOptions | DiffOptions | VerifyOptions) -> int:
    """Whichever command these are the options of; the exit code."""
    with console.warnings_once():
        if isinstance(options, VerifyOptions):
            return verify(options)
        return diff(options) if isinstance(options, DiffOptions) else inspect(options)


def inspect(options: InspectOptions) -> int:
    """`statecli inspect`; the exit code."""
    if options.input and options.inputs:
        raise UsageError("--input and --inputs contradict each other; leave one of them out")
    console.keep_stdout()
    request = Request(
        target=options.target,
        to=device(options.to, options.cuda),
        model=options.model,
        stats=options.stats,
        include=options.include,
        exclude=options.exclude,
        kind=options.kind,
        init_device=options.init_device,
        input=options.input,
        inputs=options.inputs,
    )
    reads = request.stats or request.to is not None
    with console.progress(enabled=reads and not options.no_progress, color=options.color.value) as progress:
        found = run_inspection(request, progress)
    _refuse_overwriting(options.output, found.state)
    report = inspecting.of_inspection(found, View(unfold=options.all, tree=options.tree, verbose=options.verbose))
    code = console.publish(report, options.output_format, options.output, options.color.value, options.quiet)
    return _complained(found.broken, "read", code)


def diff(options: DiffOptions) -> int:
    """`statecli diff`; the exit code. What could be compared is shown, whatever could not."""
    # An inspection does without them, and starts the sooner.
    from statecli import asked
    from statecli.comparison.run import compare
    from statecli.report import diffing

    asked.check(options)
    console.keep_stdout()
    values = not options.metadata_only
    with console.progress(enabled=values and not options.no_progress, color=options.color.value) as progress:
        found = compare(asked.request(options), progress)
    _refuse_overwriting(options.output, found.before, found.after)
    view = asked.view(options)
    report = diffing.of_diff(found, view)
    output = options.output_format if view.names is None else Output.PLAIN
    code = console.publish(report, output, options.output, options.color.value, options.quiet)
    if view.names is not None:
        console.tell(report.beside())
    return _complained(diffing.broken(found), "compared", code)


def verify(options: VerifyOptions) -> int:
    """`statecli verify`; the exit code. What could be proved is shown, whatever could not be told."""
    from statecli import proofs
    from statecli.proofs import asked
    from statecli.proofs.result import Name
    from statecli.report import verifying

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
    _refuse_overwriting(options.output, found.state)
    report = verifying.of_verification(found, View(unfold=options.all, verbose=options.verbose))
    code = console.publish(report, options.output_format, options.output, options.color.value, options.quiet)
    untold = verifying.untold(found, options.check)
    for message in untold:
        console.complain(message, debug=False)
    return 2 if untold and code == 0 else code


def _complained(broken: Sequence[tuple[str, str]], done: str, code: int) -> int:
    """The exit code after these were told, a line a file and cause: `code` where there are none."""
    causes = fold.causes(broken)
    for message, _ in causes[:TOLD]:
        code = console.complain(message, debug=False)
    if rest := sum(count for _, count in causes[TOLD:]):
        console.complain(f"and {plural(rest, 'more tensor')} that could not be {done}", debug=False)
    return code


def _refuse_overwriting(output: str | None, *states: ModelState) -> None:
    """`-o` naming a file that was just read, or one beside it in a model's folder, would destroy it."""
    if output is None or not os.path.isfile(output):
        return
    for state in states:
        target = state.target
        read = {target, target.rpartition("#")[0], target.partition(":")[0]}
        read |= {tensor.data.storage.path for tensor in state.tensors if tensor.data is not None}
        if os.path.isdir(target):
            read.add(os.path.join(target, os.path.basename(output)))
        if any(os.path.exists(path) and os.path.samefile(path, output) for path in read):
            raise UsageError(f"-o {output}: {target} is read from it; write elsewhere")


def schema(command: str) -> int:
    """`statecli schema`; the exit code."""
    console.out(None).utf8(documents.schema(command))
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
        # Readers name their files themselves; what is left is the output.
        console.silence()
        code = console.complain(f"the output cannot be written: {error.strerror}", debug)
    except Exception as error:  # noqa: BLE001  # a bug of ours is told in one line and ends 2
        code = console.complain(
            f"internal error: {type(error).__name__}: {error} (please report it, with --debug)", debug
        )
    raise SystemExit(130 if interrupts.came else code)
