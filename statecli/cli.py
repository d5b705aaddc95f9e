"""The commands: options in, exit code out. Both parsers, `shortcut` and `arguments`, end here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn

from statecli import console
from statecli.errors import StateError, UsageError
from statecli.inspection import Inspection, Request, device
from statecli.inspection import inspect as run_inspection
from statecli.options import InspectOptions
from statecli.report import View, documents, inspecting


def inspect(options: InspectOptions) -> int:
    """`statecli inspect`; the exit code."""
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
    )
    reads = request.stats or request.to is not None
    with console.progress(enabled=reads and not options.no_progress) as progress:
        found = run_inspection(request, progress)
    _refuse_overwriting(options, found)
    report = inspecting.of_inspection(found, View(unfold=options.all, tree=options.tree, verbose=options.verbose))
    return console.publish(report, options.output_format, options.output, options.color.value, options.quiet)


def _refuse_overwriting(options: InspectOptions, found: Inspection) -> None:
    """`-o` naming a file that was just read, or one beside it in a model's folder, would destroy it."""
    if options.output is None or not os.path.isfile(options.output):
        return
    target = options.target
    read = {target, target.rpartition("#")[0], target.partition(":")[0]}
    read |= {tensor.data.storage.path for tensor in found.state.tensors if tensor.data is not None}
    if os.path.isdir(target):
        read.add(os.path.join(target, os.path.basename(options.output)))
    if any(os.path.exists(path) and os.path.samefile(path, options.output) for path in read):
        raise UsageError(f"-o {options.output}: {target} is read from it; write elsewhere")


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
        code = console.complain(str(error), debug)
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
    raise SystemExit(code)
