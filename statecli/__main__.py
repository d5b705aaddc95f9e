"""The console script, and `python -m statecli`."""

from __future__ import annotations

import sys


def main() -> None:
    """Everyday lines need no Typer; all others go to it."""
    try:
        # Imported here, so that Ctrl-C during the imports ends as it does anywhere else.
        from statecli import cli, shortcut

        options = shortcut.parse(sys.argv[1:])
        if options is not None:
            cli.leave(lambda: cli.run(options), options.debug)
        from statecli.arguments import run

        cli.leave(run, debug=False)
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
