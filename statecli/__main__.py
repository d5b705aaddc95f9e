"""The console script, and `python -m statecli`."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import time
from typing import TYPE_CHECKING

from statecli.live import search_path

if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds that what a model has begun (threads, processes, exit handlers) has to end. Python would wait for ever.
PATIENCE = 2.0
#: Those after which a thread that has begun sleeps.
SETTLED = 0.001


def command() -> None:
    """Run `main` and exit with its code. A line that names model code is run in a supervised child process.

    Every crash is exit code 2. What fails before the first line here, such as Python's own start, is not: Python exits
    with 1 then.
    """
    search_path.drop_relative_entries()
    if hasattr(os, "fork") and (names_model_code(sys.argv[1:]) or _is_memory_limited()):
        raise SystemExit(_run_supervised())
    try:
        main()
    except SystemExit as done:
        # Without threads there is nobody whom Python would wait for.
        if isinstance(done.code, int) and "threading" in sys.modules:
            _wait_no_longer_than_patience(done.code)
        raise


def names_model_code(words: Sequence[str]) -> bool:
    """Whether a command line may name code of the user's, or sets a time limit; some others do as well."""
    return any(
        ":" in word.partition("://")[0] or word == "auto" or word.endswith("=auto") or word.startswith("--timeout")
        for word in words
    )


def _is_memory_limited() -> bool:
    """Whether `ulimit -v` is set: libraries in C may then end the process with status 1, as OpenBLAS does."""
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _run_supervised() -> int:
    try:
        from statecli.cli import supervisor

        return supervisor.run(main)
    except Exception as error:  # noqa: BLE001  # no process, or no memory for the import: a crash is never 1
        _complain(error)
        return 2


def _wait_no_longer_than_patience(code: int) -> None:
    begun = _thread.allocate_lock()
    begun.acquire()
    try:
        _thread.start_new_thread(_end_late, (code, begun))
    except RuntimeError:  # the system starts none, so that none was started that Python would wait for
        return
    # Python takes down a thread that is not at rest yet when it ends, and 3.11.2 dies of that now and then (SIGSEGV).
    begun.acquire()
    time.sleep(SETTLED)


def main() -> None:
    """Everyday lines need no Typer; all others go to it. Raises SystemExit; an interrupt ends the process."""
    try:
        _run()
    except KeyboardInterrupt:
        _end(130)
    except SystemExit as done:
        from statecli.core.exit_code import Verdict

        if not isinstance(done, Verdict):
            raise SystemExit(2) from done
        if done.code == 130:
            _end(130)
        raise
    except BaseException as error:  # noqa: BLE001  # an import that fails, no memory, no thread: a crash is never 1
        _complain(error)
        raise SystemExit(2) from None


def _run() -> None:
    # Imported here, so that Ctrl-C during the imports ends as it does anywhere else.
    from statecli.cli import interrupts

    interrupts.listen()
    from statecli.cli import commands, parser
    from statecli.storage import files

    files.forget_command()
    # Before anything can show it: a URL may hold a password or a signature.
    sys.argv[1:] = map(files.mask_urls, sys.argv[1:])
    options = parser.parse(sys.argv[1:])
    if options is not None:
        commands.leave(options)
    from statecli.cli.typer_app import run

    commands.leave_with(run, debug=False)


def _complain(error: BaseException) -> None:
    """Write one line about an error of the process itself, with as little as that can be done with."""
    with contextlib.suppress(BaseException):
        if isinstance(error, MemoryError):
            os.write(2, b"statecli: there is not enough memory; nothing was concluded\n")
        else:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            os.write(2, f"statecli: cannot run: {text}\n".encode("ascii", "backslashreplace"))


def _end_late(code: int, begun: _thread.LockType) -> None:
    begun.release()
    time.sleep(PATIENCE)
    _end(code)


def _end(code: int) -> None:
    """Without waiting for anybody; after an interrupt without a word more on stdout."""
    supervisor = sys.modules.get("statecli.cli.supervisor")
    parent = supervisor.connection() if supervisor else None
    if parent is not None:
        parent.conclude(code)
    for stream in (sys.stdout, sys.stderr) if code != 130 else (sys.stderr,):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    _end_children()
    os._exit(code)


def _end_children() -> None:
    """Those that Python would wait for. They hold our streams open, and whoever reads those would wait for them too."""
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing else ():
        child.kill()


if __name__ == "__main__":
    command()
