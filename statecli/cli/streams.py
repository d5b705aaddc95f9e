"""Standard streams of the process: results to stdout, errors to stderr. Does not import the commands."""

from __future__ import annotations

import codecs
import io
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from statecli import storage
from statecli.cli import interrupts, pager
from statecli.core.errors import OutputError, StateError, UnreadableError, UsageError, option
from statecli.core.escaping import escape_line, truncate_middle
from statecli.core.terminal_width import get_requested_width, get_terminal_width

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from typing import IO, Any

#: Largest number of characters in a line about an error, because names can be megabytes long.
MAX_LINE_CHARACTERS = 2_000

#: ASCII replacements of statecli's signs, for encodings that lack the signs.
ASCII_SIGNS = {
    "→": "->",
    "…": "...",
    "Δ": "d",
    "↳": ">",
    "✓": "+",
    "✗": "x",
    "–": "-",
    "×": "x",
    **dict.fromkeys("█▉▊▋▌▍▎▏", "#"),
}


def _escape_unencodable(error: UnicodeError) -> tuple[str, int]:
    """Return the replacement for a character missing in the encoding, and the next position, for Python's encoder."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    char = error.object[error.start]
    escaped_char = ASCII_SIGNS.get(char) or char.encode("ascii", "backslashreplace").decode("ascii")
    return escaped_char, error.start + 1


codecs.register_error("statecli", _escape_unencodable)

_result_stream: Stream | None = None


class Stream:
    """A `render.Sink` over a binary file. Characters missing in the encoding are written as escapes."""

    def __init__(
        self,
        raw: IO[bytes],
        encoding: str,
        *,
        columns: int | None = None,
        is_terminal: bool | None = None,
        is_stdout: bool = True,
    ) -> None:
        """Write to `raw`. `columns` and `is_terminal` describe the stream to which a buffer `raw` is copied later."""
        self.is_stdout = is_stdout
        self.raw = raw
        self.encoding = encoding
        self.columns = columns
        self.is_terminal = raw.isatty() if is_terminal is None else is_terminal

    def text(self, text: str) -> None:
        self.utf8(text.encode(self.encoding, "statecli"))

    def utf8(self, raw: bytes) -> None:
        if not self.is_stdout:
            self.raw.write(raw)
            return
        with _StdoutErrors():
            self.raw.write(raw)


class _StdoutErrors:
    """Context manager that raises OutputError if standard output cannot be written.

    BrokenPipeError passes, because the reader is gone. This is a class, because every line enters the context, and a
    generator would cost four times as much.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            discard_stdout()
            raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def reserve_stdout() -> None:
    """Reserve standard output for results. Everything else that the process prints goes to stderr.

    A model's code may print from a thread, a finalizer or an exit handler, long after the model was built. Nothing is
    changed if `sys.stdout` is closed or replaced, because the caller handles output then. A supervised process has no
    descriptor of standard output, because its parent writes the results.
    """
    global _result_stream
    stdout, stderr = sys.stdout, sys.stderr
    if _result_stream is not None or stdout is not sys.__stdout__ or stdout is None:
        return
    stdout.flush()
    parent = find_parent()
    if parent is not None:
        encoding = stdout.encoding or "utf-8"
        _result_stream = Stream(parent.open_output(), encoding, columns=parent.columns, is_terminal=parent.is_terminal)
        if stderr is None:
            _redirect_to_null(stdout)
        else:
            os.dup2(2, 1)
        return
    if stderr is None:
        return
    try:
        descriptor = os.dup(stdout.fileno())
        os.dup2(stderr.fileno(), stdout.fileno())
    except (OSError, ValueError):  # a stream without a descriptor
        return
    # The stream stays open until the process ends, like standard output.
    _result_stream = Stream(os.fdopen(descriptor, "wb", closefd=False), stdout.encoding or "utf-8")


def get_result_stream() -> Stream | None:
    """Return the stream that `reserve_stdout` created, or None if it did not create a stream."""
    return _result_stream


def find_parent() -> Any:
    """Return the connection to the parent process, which prints the output, or None if this process prints."""
    supervisor = sys.modules.get("statecli.cli.supervisor")
    return supervisor.get_connection() if supervisor else None


def limit_time(seconds: float) -> None:
    """Make the parent end this process after `seconds`. Raises UsageError if no parent supervises this process."""
    parent = find_parent()
    if parent is None:
        raise UsageError(
            f"{option('--timeout', seconds)}: works only in the statecli command on Linux or macOS; leave the option "
            "out"
        )
    parent.limit_time(seconds)


def open_stdout() -> Stream:
    """Return the stream of results: standard output."""
    if _result_stream is not None:
        return _result_stream
    if sys.stdout is None:
        raise UnreadableError("standard output is closed; write to a file with -o FILE")
    return Stream(sys.stdout.buffer, sys.stdout.encoding or "utf-8")


@contextmanager
def open_paged_stdout() -> Iterator[Stream]:
    """Yield standard output. On a terminal, yield a stream that sends text to the pager if the screen is too short.

    The parent of a supervised process pages the output.
    """
    if interrupts.was_interrupted:
        raise KeyboardInterrupt
    stdout = open_stdout()
    if find_parent() is not None or not stdout.is_terminal or pager.find_pager(stdout.raw.fileno()) is None:
        yield stdout
        return
    output = io.BytesIO()
    try:
        yield Stream(output, stdout.encoding, columns=get_width(stdout), is_terminal=True)
    finally:
        data = output.getvalue()
        if not pager.show(data, stdout.raw.fileno()):
            stdout.utf8(data)


def write_help(text: Callable[[int, bool], str], color: str) -> None:
    """Write help to stdout. `text` returns the help for a width, with or without colours.

    COLUMNS overrides the width of the terminal, as in man and git.
    """
    with open_paged_stdout() as sink:
        width = get_requested_width() or get_width(sink)
        sink.text(text(width, use_color(color, sink.is_terminal)))


def get_width(sink: Stream) -> int:
    """Return the width for a stream in columns: its `columns`, else the width of the terminal, else COLUMNS."""
    if sink.columns is not None:
        return sink.columns
    try:
        descriptor = sink.raw.fileno()
    except (OSError, ValueError):
        descriptor = -1
    return get_terminal_width(descriptor)


def use_color(choice: str, is_terminal: bool) -> bool:
    """Return whether an output has colours, as --color and the environment decide."""
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (is_terminal and os.environ.get("TERM") != "dumb")


def print_state_error(error: StateError, debug: bool) -> int:
    """Print an error on stderr: its message, a line for each possible choice, and its advice. Return exit code 2."""
    message, *lines = error.list_lines()
    code = print_error(message, debug)
    for line in lines:
        print_line(truncate_middle(line, MAX_LINE_CHARACTERS))
    return code


def print_error(message: str, debug: bool) -> int:
    """Print an error in a line on stderr; return exit code 2."""
    if debug:
        import traceback

        for line in storage.redact.scrub(traceback.format_exc()).splitlines():
            print_line(line)
    print_line(f"statecli: {truncate_middle(message.rstrip(), MAX_LINE_CHARACTERS)}")
    return 2


def print_crash(error: Exception, debug: bool) -> int:
    """Print a line about a crash of statecli on stderr, without the secrets in its message. Return exit code 2."""
    message = f"{type(error).__name__}: {storage.redact.scrub(str(error))}"
    return print_error(f"internal error: {message} (please report it with the output of --debug)", debug)


def describe_system_error(error: OSError) -> str:
    """Describe an error of the operating system that no reader has attributed to a file."""
    reason = (error.strerror or type(error).__name__).lower()
    try:
        os.getcwd()
    except OSError:
        return "the working directory no longer exists; change to another directory"
    if error.filename:
        return f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, (str, bytes)) else reason
    return f"the system reported an error: {reason}; there is no result"


def print_line(text: str, *, direct: bool = False) -> None:
    """Print a line on stderr, if stderr exists. Ignore errors, because the exit code still reports a failure.

    A supervised process sends the line to its parent, to be printed after the result, unless `direct`.
    """
    secrets = sys.modules.get("statecli.storage.redact")
    with suppress(OSError, ValueError):
        line = escape_line(secrets.remove_secrets(text) if secrets else text)
        parent = None if direct else find_parent()
        if parent is not None:
            parent.write_error(line)
        elif sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


def flush_stdout() -> None:
    """Flush stdout, so that a full disk or a closed pipe raises here and not at exit."""
    with _StdoutErrors():
        if _result_stream is not None:
            _result_stream.raw.flush()
        if sys.stdout is not None:
            sys.stdout.flush()


def discard_stdout() -> None:
    """Redirect stdout to the null device after its reader is gone, because Python flushes stdout again at exit."""
    raw: IO[str] | IO[bytes] | None = sys.stdout if _result_stream is None else _result_stream.raw
    if raw is not None:
        _redirect_to_null(raw)


def flush_stderr() -> None:
    """Flush stderr. If this fails, redirect stderr to the null device, because Python would exit with 120."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            _redirect_to_null(sys.stderr)


def _redirect_to_null(stream: IO[str] | IO[bytes]) -> None:
    with suppress(io.UnsupportedOperation):  # the parent of a supervised process writes the result
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
