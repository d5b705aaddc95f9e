"""The console script, and `python -m statecli`."""

from __future__ import annotations

import sys

from statecli import cli, shortcut


def main() -> None:
    """Everyday lines need no Typer; all others go to it."""
    try:
        options = shortcut.parse(sys.argv[1:])
        if options is not None:
            cli.leave(lambda: cli.inspect(options), options.debug)
        from statecli.arguments import app

        app()
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
