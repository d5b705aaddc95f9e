"""The console script, and `python -m statecli`."""

from __future__ import annotations

import contextlib
import os
import sys


def main() -> None:
    """Everyday lines need no Typer; all others go to it."""
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
        raise


def _end(code: int) -> None:
    """Without waiting for threads that wait for processes that are gone, and without a word more on stdout."""
    with contextlib.suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
