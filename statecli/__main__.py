"""The console script, and `python -m statecli`."""

from __future__ import annotations

import _thread
import contextlib
import os
import sys
import time

#: Seconds that what a model has begun (threads, processes, exit handlers) has to end. Python would wait for ever.
PATIENCE = 2.0
#: Those after which a thread that has begun sleeps.
SETTLED = 0.001


def command() -> None:
    """`main`, and the end of the process with its exit code, whatever goes on in it."""
    try:
        main()
    except SystemExit as done:
        # Without threads, and without what a model has imported, there is nobody whom Python would wait for.
        if isinstance(done.code, int) and "threading" in sys.modules:
            _wait_no_longer_than_patience(done.code)
        raise


def _wait_no_longer_than_patience(code: int) -> None:
    begun = _thread.allocate_lock()
    begun.acquire()
    _thread.start_new_thread(_end_late, (code, begun))
    # Python takes down a thread that is not at rest yet when it ends, and 3.11.2 dies of that now and then (SIGSEGV).
    begun.acquire()
    time.sleep(SETTLED)


def main() -> None:
    """Everyday lines need no Typer; all others go to it. Raises SystemExit; an interrupt ends the process."""
    try:
        # Imported here, so that Ctrl-C during the imports ends as it does anywhere else.
        from statecli import interrupts

        interrupts.listen()
        from statecli import cli, files, shortcut

        files.forget()
        # Before anything can show it: a URL may hold a password or a signature.
        sys.argv[1:] = map(files.shown, sys.argv[1:])
        options = shortcut.parse(sys.argv[1:])
        if options is not None:
            cli.leave(lambda: cli.run(options), options.debug)
        from statecli.arguments import run

        cli.leave(run, debug=False)
    except KeyboardInterrupt:
        _end(130)
    except SystemExit as done:
        if done.code == 130:
            _end(130)
        raise


def _end_late(code: int, begun: _thread.LockType) -> None:
    begun.release()
    time.sleep(PATIENCE)
    _end(code)


def _end(code: int) -> None:
    """Without waiting for anybody; after an interrupt without a word more on stdout."""
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
