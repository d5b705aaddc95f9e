"""Run the body of a command and exit with its status: 0, 1, 2, 130 after Ctrl-C, or 141 for a closed pipe."""

from __future__ import annotations

from collections.abc import Callable

from statecli.cli import interrupts, streams
from statecli.core.errors import StateError
from statecli.core.exit_code import CommandExit

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from typing import NoReturn


def run_body_and_exit(body: Callable[[], int], *, debug: bool) -> NoReturn:
    """Run the body of a command and exit with its status; a crash exits with 2, never with 1."""
    try:
        code = body()
        streams.flush_stdout()
    except StateError as error:
        code = 130 if interrupts.was_interrupted else streams.print_state_error(error, debug)
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        streams.discard_stdout()
        code = 141
    except OSError as error:
        code = streams.print_error(streams.describe_system_error(error), debug)
    except MemoryError:
        code = streams.print_error("not enough memory; there is no result", debug)
    except SystemExit as done:
        code = _print_exit(done, debug)
    except Exception as error:  # noqa: BLE001  # an internal error is one line and status 2
        # Python 3.11 wraps an exception of a signal handler that is raised while a class is created.
        cause = error.__cause__
        code = _print_exit(cause, debug) if isinstance(cause, SystemExit) else streams.print_crash(error, debug)
    streams.flush_stderr()
    raise CommandExit(130 if interrupts.was_interrupted else code)


def _print_exit(system_exit: SystemExit, debug: bool) -> int:
    return streams.print_error(f"model code raised SystemExit({system_exit.code!r}); there is no result", debug)
