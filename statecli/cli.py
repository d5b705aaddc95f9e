"""The commands: options in, exit code out. Both parsers, `shortcut` and `arguments`, end here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NoReturn

from statecli import console
from statecli.errors import StateError
from statecli.inspection import Request, device
from statecli.inspection import inspect as run_inspection
from statecli.options import InspectOptions
from statecli.report import View, documents, inspecting


def inspect(options: InspectOptions) -> int:
    """`statecli inspect`; the exit code."""
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
    report = inspecting.of_inspection(found, View(unfold=options.all, tree=options.tree, verbose=options.verbose))
    return console.publish(report, options.output_format, options.output, options.color.value, options.quiet)


def schema(command: str) -> int:
    """`statecli schema`; the exit code."""
    console.out(None).utf8(documents.schema(command))
    return 0


def leave(run: Callable[[], int], debug: bool) -> NoReturn:
    """Run a command's body and leave with the promised code: a crash is never 1."""
    try:
        code = run()
        sys.stdout.flush()
    except StateError as error:
        code = console.complain(str(error), debug)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # Python flushes stdout once more at exit; there is nobody left to write to.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except Exception as error:  # noqa: BLE001  # a bug of ours is told in one line and ends 2
        code = console.complain(
            f"internal error: {type(error).__name__}: {error} (please report it, with --debug)", debug
        )
    raise SystemExit(code)
