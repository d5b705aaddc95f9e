"""The process's own streams: results to stdout or a file, everything else to stderr."""

from __future__ import annotations

import codecs
import io
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from statecli import render
from statecli.cli import interrupts, output_files
from statecli.core.errors import OutputError, UnreadableError, UsageError
from statecli.core.escaping import escape_line, truncate_middle
from statecli.core.finding import Finding
from statecli.core.progress import Progress
from statecli.render import RenderOptions
from statecli.render.plain import format_finding
from statecli.report import Report
from statecli.storage import prefetch_progress

if TYPE_CHECKING:
    from rich.console import Console

    from statecli.cli.output_files import Written

#: Characters of an error's one line; names inside can be megabytes long.
MAX_LINE = 2_000


#: How our own signs are written where the encoding has none: a bar cell for cell.
ASCII = {
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


def _written(error: UnicodeError) -> tuple[str, int]:
    """What a stream gets in the place of characters that it cannot hold."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    char = error.object[error.start]
    escaped = ASCII.get(char) or char.encode("ascii", "backslashreplace").decode("ascii")
    return escaped, error.start + 1


codecs.register_error("statecli", _written)

_kept: Stream | None = None


class Stream:
    """A `render.Sink` over a binary file. Text that the encoding cannot hold is written as escapes."""

    def __init__(self, raw: IO[bytes], encoding: str, columns: int | None = None, *, is_stdout: bool = True) -> None:
        """`columns`: the width where `raw` has no descriptor to ask."""
        self.is_stdout = is_stdout
        self.raw = raw
        self.encoding = encoding
        self.columns = columns

    def text(self, text: str) -> None:
        self.utf8(text.encode(self.encoding, "statecli"))

    def utf8(self, raw: bytes) -> None:
        if not self.is_stdout:
            self.raw.write(raw)
            return
        with _StdoutErrors():
            self.raw.write(raw)


class _StdoutErrors:
    """Context manager that raises OutputError where standard output cannot be written.

    BrokenPipeError passes: the reader has gone away. A class, because it is around every line and a generator costs
    four times as much.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            silence()
            raise OutputError(f"standard output cannot be written: {error.strerror}") from error


def keep_stdout() -> None:
    """Keep standard output for the results alone: whatever else the process prints, until it ends, goes to stderr.

    A model's own code may print from a thread, a finalizer or an exit handler, long after it was built. Where
    `sys.stdout` has been replaced, or is closed, the caller has seen to its output and nothing is changed.
    A supervised process has no descriptor of standard output at all: its parent writes the results.
    """
    global _kept
    stdout, stderr = sys.stdout, sys.stderr
    if _kept is not None or stdout is not sys.__stdout__ or stdout is None:
        return
    stdout.flush()
    parent = _parent()
    if parent is not None:
        _kept = Stream(parent.open_output(), stdout.encoding or "utf-8", parent.columns)
        if stderr is None:
            _to_nowhere(stdout)
        else:
            os.dup2(2, 1)
        return
    if stderr is None:
        return
    try:
        own = os.dup(stdout.fileno())
        os.dup2(stderr.fileno(), stdout.fileno())
    except (OSError, ValueError):  # a stream without a descriptor
        return
    _kept = Stream(os.fdopen(own, "wb"), stdout.encoding or "utf-8")


def _parent() -> Any:
    """The process that prints what this one sends; None where it prints itself."""
    supervisor = sys.modules.get("statecli.cli.supervisor")
    return supervisor.connection() if supervisor else None


def limit(seconds: float) -> None:
    """Have the parent end this process after so many seconds. Raises UsageError where there is no parent."""
    parent = _parent()
    if parent is None:
        raise UsageError(f"--timeout {seconds:g}: needs the command statecli on a system with os.fork (not Windows)")
    parent.limit(seconds)


def out() -> Stream:
    """Standard output."""
    if _kept is not None:
        return _kept
    if sys.stdout is None:
        raise UnreadableError("there is no standard output to write to; name a file with -o")
    return Stream(sys.stdout.buffer, sys.stdout.encoding or "utf-8")


@contextmanager
def _into(path: str | None) -> Iterator[Stream]:
    """stdout, or the file that `-o` or a report names, always UTF-8: whole when this ends, or what it was before."""
    if interrupts.came:
        raise KeyboardInterrupt
    if path is None:
        yield out()
        return
    number = output_files.descriptor(path)
    try:
        with output_files.replacing(path) if number is None else _open_already(number) as raw:
            yield Stream(raw, "utf-8", is_stdout=False)
            if interrupts.came:
                raise KeyboardInterrupt
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be written: {error.strerror}") from error


def _open_already(number: int) -> IO[bytes]:
    """An open file of the process by its number; that of standard output is where the results go."""
    if number == 1 and _kept is not None:
        parent = _parent()
        if parent is not None:
            opened: IO[bytes] = parent.open_output()
            return opened
        number = _kept.raw.fileno()
    return os.fdopen(os.dup(number), "wb")


def publish(report: Report, written: Sequence[Written], color: str, quiet: bool) -> int:
    """Write each output of the report where it belongs; the exit code it asks for. `quiet` is of the last one alone."""
    for one in written:
        with _into(one.path) as sink:
            terminal = one.path is None and sink.raw.isatty()
            look = RenderOptions(terminal, _width(sink), _color(color, terminal), quiet and one is written[-1])
            render.write(report, one.output, sink, look)
    return 1 if report.has_failed() else 0


def on_screen(one: Written) -> bool:
    """Whether a person has just read this output on the terminal to which standard error goes as well."""
    people = one.output in (render.Output.TABLE, render.Output.PLAIN) and one.path is None
    return people and sys.stderr is not None and sys.stderr.isatty() and out().raw.isatty()


def write(pieces: Iterable[bytes], path: str | None) -> None:
    """Write what is no report, a file of ours, where it belongs."""
    with _into(path) as sink:
        for piece in pieces:
            sink.utf8(piece)


def show(text: Callable[[int], str], path: str | None) -> None:
    """Write text that is laid out for its width."""
    with _into(path) as sink:
        sink.text(text(_width(sink)))


def _width(sink: Stream) -> int:
    if sink.columns is not None:
        return sink.columns
    try:
        return os.get_terminal_size(sink.raw.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def _color(choice: str, terminal: bool) -> bool:
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (terminal and os.environ.get("TERM") != "dumb")


def complain(message: str, debug: bool) -> int:
    """One line on stderr; the exit code for "could not do it"."""
    for line in _scrubbed(traceback.format_exc()).splitlines() if debug else ():
        _say(line)
    _say(f"statecli: {truncate_middle(message.rstrip(), MAX_LINE)}")
    return 2


def crash(error: Exception, debug: bool) -> int:
    """The same for a bug of ours; its message is of whoever raised it, and may hold anything."""
    message = f"internal error: {type(error).__name__}: {_scrubbed(str(error))} (please report it, with --debug)"
    return complain(message, debug)


def system_error(error: OSError, debug: bool) -> int:
    """One line about an error of the system that no reader has attributed to its file."""
    return complain(_describe_system_error(error), debug)


def _describe_system_error(error: OSError) -> str:
    reason = (error.strerror or type(error).__name__).lower()
    try:
        os.getcwd()
    except OSError:
        return "the working directory does not exist any more; change to another one"
    if error.filename:
        return f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, (str, bytes)) else reason
    return f"the system refused: {reason}; nothing was concluded"


def _scrubbed(text: str) -> str:
    from statecli.storage import redact as secrets

    return secrets.scrub(text)


def warn(message: str) -> None:
    """Write one line on stderr; the exit status stays what it is."""
    _say(f"statecli: warning: {message}")


def tell(findings: Sequence[Finding]) -> None:
    """Findings for which the output has no place, on stderr."""
    for finding in findings:
        _say(format_finding(finding))


def _say(text: str, *, direct: bool = False) -> None:
    """A line on stderr, if there is any; where it cannot be written, the exit code is all that is left to tell.

    A supervised process has its parent write the line, after the result that it belongs to; with `direct` it does not.
    """
    secrets = sys.modules.get("statecli.storage.redact")
    with suppress(OSError, ValueError):
        line = escape_line(secrets.remove_secrets(text) if secrets else text)
        parent = None if direct else _parent()
        if parent is not None:
            parent.write_error(line)
        elif sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


@contextmanager
def warnings_once() -> Iterator[None]:
    """Python's warnings on stderr, each once and in one line.

    A proof calls the same code many times, and Python forgets what it has shown whenever a filter changes.
    """
    before, shown = warnings.showwarning, set[str]()

    def show(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        text = f"{filename}:{lineno}: {category.__name__}: {message}"
        if text not in shown:
            shown.add(text)
            # rich prints above its progress bar what goes to sys.stderr.
            _say(truncate_middle(" ".join(text.split()), MAX_LINE), direct=True)

    warnings.showwarning = show  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = before


def finish() -> None:
    """Write out what is buffered, so that a full disk or a closed pipe is met here and not at exit."""
    with _StdoutErrors():
        if _kept is not None:
            _kept.raw.flush()
        if sys.stdout is not None:
            sys.stdout.flush()


def silence() -> None:
    """Python flushes stdout once more at exit; where nobody is left to write to, that goes nowhere."""
    raw: IO[str] | IO[bytes] | None = sys.stdout if _kept is None else _kept.raw
    if raw is not None:
        _to_nowhere(raw)


def settle_errors() -> None:
    """The same for stderr: the exit code is all that is left to tell, and Python would make 120 of it."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            _to_nowhere(sys.stderr)


def _to_nowhere(stream: IO[str] | IO[bytes]) -> None:
    with suppress(io.UnsupportedOperation):  # the parent of a supervised process writes
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def progress(*, enabled: bool, color: str, values: bool = True) -> Iterator[Progress | None]:
    """A bar on stderr, on a terminal only, drawn from the moment something is read; one for all that is read.

    Before it, one for the files whose headers are fetched from elsewhere; that one alone without `values`.
    """
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    with prefetch_progress.watch_prefetch(lambda total: _fetching(total, color)):
        if not values:
            yield None
            return
        with _values_read(color) as start:
            yield start


@contextmanager
def _fetching(total: int, color: str) -> Iterator[Callable[[], None]]:
    """A bar of so many files, while they are fetched."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("files"))
    with Progress(*columns, console=_beside(color), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


@contextmanager
def _values_read(color: str) -> Iterator[Progress]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    bar = Progress(*columns, console=_beside(color), transient=True)
    task = bar.add_task("", total=0)

    def start(total: int) -> Callable[[str, int], None]:
        bar.update(task, total=(bar.tasks[0].total or 0) + total)
        bar.start()
        return lambda _, done: bar.advance(task, done)

    try:
        yield start
    finally:
        bar.stop()


@contextmanager
def steps(total: int, *, enabled: bool, color: str) -> Iterator[Callable[[], None]]:
    """A bar of so many steps on stderr, on a terminal only; what it gives is called after each."""
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_beside(color), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


def _beside(color: str) -> Console:
    """rich's idea of stderr; colours as the results have them."""
    from rich.console import Console

    return Console(stderr=True, no_color=True if color == "never" else None)
