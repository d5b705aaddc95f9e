"""The console script, and `python -m statecli`."""

from __future__ import annotations

import contextlib
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from threading import Thread


def main() -> None:
    """Everyday lines need no Typer; all others go to it."""
    before = _threads()
    try:
        # Imported here, so that Ctrl-C during the imports ends as it does anywhere else.
        from statecli import interrupts

        interrupts.listen()
        from statecli import cli, shortcut

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
        if isinstance(done.code, int) and _outlived_by(_threads() - before):
            _end(done.code)
        raise


#: Seconds that the threads which a model has begun have to end. Python itself would wait for ever.
PATIENCE = 2.0


def _threads() -> set[Thread]:
    """Those that Python waits for at its end, but for the main one. Whoever begins any has imported `threading`."""
    threading = sys.modules.get("threading")
    if threading is None:
        return set()
    return {one for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()}


def _outlived_by(threads: set[Thread]) -> bool:
    """Whether one of `threads` goes on, after each had its time to end."""
    for one in threads:
        one.join(PATIENCE / len(threads))
    return any(one.is_alive() for one in threads)


def _end(code: int) -> None:
    """Without waiting for threads; after an interrupt without a word more on stdout."""
    for stream in (sys.stdout, sys.stderr) if code != 130 else (sys.stderr,):
        with contextlib.suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
