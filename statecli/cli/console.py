"""Streams of the process: results to stdout or a file, everything else to stderr."""

from __future__ import annotations

import codecs
import io
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from statecli import render
from statecli.cli import interrupts, output_files, pager
from statecli.core.errors import OutputError, StateError, UnreadableError, UsageError, option
from statecli.core.escaping import escape_line, truncate_middle
from statecli.core.finding import Finding
from statecli.core.progress import Progress, watch_stages
from statecli.core.terminal_width import get_requested_width, get_terminal_width
from statecli.render import RenderOptions
from statecli.render.plain import format_problem
from statecli.report import Report
from statecli.storage import prefetch_progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Task
    from rich.text import Text

    from statecli.cli.output_files import OutputTarget

#: Characters of the line of an error, because names can be megabytes long.
MAX_LINE_CHARACTERS = 2_000


#: Replacements of statecli's own signs in an encoding without them, cell for cell.
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
    """Return the replacement of a character missing in the encoding, and the position after the character."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    char = error.object[error.start]
    escaped = ASCII_SIGNS.get(char) or char.encode("ascii", "backslashreplace").decode("ascii")
    return escaped, error.start + 1


codecs.register_error("statecli", _escape_unencodable)

_result_stream: Stream | None = None


class Stream:
    """A `render.Sink` over a binary file. Characters missing in the encoding are written as escapes."""

    def __init__(self, raw: IO[bytes], encoding: str, columns: int | None = None, *, is_stdout: bool = True) -> None:
        """Write to `raw`. `columns`: the width, if `raw` has no descriptor."""
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
    """Context manager that raises OutputError if standard output cannot be written.

    BrokenPipeError passes, because the reader is gone. A class, because a generator costs four times as much and each
    line needs a context.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            discard_stdout()
            raise OutputError(f"cannot write to standard output: {error.strerror}") from error


def reserve_stdout() -> None:
    """Reserve standard output for results; everything else printed by the process goes to stderr.

    A model's code may print from a thread, a finalizer or an exit handler, long after the model was built. Nothing is
    changed if `sys.stdout` is closed or replaced, because the caller handles output then. A supervised process has no
    descriptor of standard output, because its parent writes the results.
    """
    global _result_stream
    stdout, stderr = sys.stdout, sys.stderr
    if _result_stream is not None or stdout is not sys.__stdout__ or stdout is None:
        return
    stdout.flush()
    parent = _find_parent()
    if parent is not None:
        _result_stream = Stream(parent.open_output(), stdout.encoding or "utf-8", parent.columns)
        if stderr is None:
            _redirect_to_null(stdout)
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
    _result_stream = Stream(os.fdopen(own, "wb"), stdout.encoding or "utf-8")


def _find_parent() -> Any:
    """Return the connection to the parent that prints; None if this process prints."""
    supervisor = sys.modules.get("statecli.cli.supervisor")
    return supervisor.get_connection() if supervisor else None


def limit_time(seconds: float) -> None:
    """Have the parent end this process after so many seconds. Raises UsageError without a parent."""
    parent = _find_parent()
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
def _open_sink(path: str | None) -> Iterator[Stream]:
    """Yield stdout, or the file at `path` in UTF-8, replaced only after the end of the block."""
    if interrupts.was_interrupted:
        raise KeyboardInterrupt
    if path is None:
        with _open_paged_stdout() as stdout:
            yield stdout
        return
    number = output_files.find_descriptor(path)
    try:
        with output_files.replace_file(path) if number is None else _reopen_descriptor(number) as raw:
            yield Stream(raw, "utf-8", is_stdout=False)
            if interrupts.was_interrupted:
                raise KeyboardInterrupt
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be written: {error.strerror}") from error


@contextmanager
def _open_paged_stdout() -> Iterator[Stream]:
    """Yield standard output; on a terminal, a stream whose text goes to the pager if it is longer than the screen.

    The parent of a supervised process pages the output.
    """
    stdout = open_stdout()
    if _find_parent() is not None or not stdout.raw.isatty() or pager.find_pager(stdout.raw.fileno()) is None:
        yield stdout
        return
    collected = _CollectedOutput(stdout.raw.fileno())
    try:
        yield Stream(collected, stdout.encoding, stdout.columns)
    finally:
        data = collected.getvalue()
        if not pager.show(data, stdout.raw.fileno()):
            stdout.utf8(data)


class _CollectedOutput(io.BytesIO):
    """Bytes for a later write to a terminal."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def isatty(self) -> bool:
        """Return True: the text is for a terminal."""
        return True

    def fileno(self) -> int:
        """Return the terminal's descriptor, used for its width."""
        return self._descriptor


def _reopen_descriptor(number: int) -> IO[bytes]:
    """Open a copy of an open descriptor; for standard output, the stream of results."""
    if number == 1 and _result_stream is not None:
        parent = _find_parent()
        if parent is not None:
            opened: IO[bytes] = parent.open_output()
            return opened
        number = _result_stream.raw.fileno()
    return os.fdopen(os.dup(number), "wb")


def write_report(
    report: Report, targets: Sequence[OutputTarget], color: str, *, quiet: bool, exit_status: int | None
) -> None:
    """Write each output of the report. `quiet` applies to the last."""
    for target in targets:
        with _open_sink(target.path) as sink:
            terminal = target.path is None and sink.raw.isatty()
            look = RenderOptions(
                terminal,
                _get_width(sink),
                _use_color(color, terminal),
                quiet and target is targets[-1],
                exit_status,
            )
            render.write(report, target.output, sink, look)


def print_summary(report: Report, path: str) -> None:
    """Print on stderr a summary of a report in a file, because a failed job would show nothing else."""
    page = (report.page_without_rows or report.page)()
    _print_line(f"statecli: {report.title}: {page.verdict}; see {path}")


def is_next_to_errors(target: OutputTarget) -> bool:
    """Return True if a person reads the output in the same place as standard error: a terminal, a pipe, a log."""
    for_people = target.output in (None, render.Output.TABLE, render.Output.PLAIN) and target.path is None
    if not for_people or sys.stderr is None:
        return False
    stdout = open_stdout().raw
    if sys.stderr.isatty() or stdout.isatty():
        return sys.stderr.isatty() and stdout.isatty()
    try:
        return os.path.sameopenfile(sys.stderr.fileno(), stdout.fileno()) and not _is_null(stdout.fileno())
    except (OSError, ValueError):  # a stream of Python without a file
        return False


def _is_null(descriptor: int) -> bool:
    return os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))


def write_pieces(pieces: Iterable[bytes], path: str | None) -> None:
    """Write bytes to stdout or the file at `path`."""
    with _open_sink(path) as sink:
        for piece in pieces:
            sink.utf8(piece)


def write_text(text: Callable[[int], str], path: str | None) -> None:
    """Write text laid out for the width of the output."""
    with _open_sink(path) as sink:
        sink.text(text(_get_width(sink)))


def write_help(text: Callable[[int, bool], str], color: str) -> None:
    """Write help to stdout: text for a width and with or without colours.

    COLUMNS is preferred to the terminal, as in man and git.
    """
    with _open_sink(None) as sink:
        width = get_requested_width() or _get_width(sink)
        sink.text(text(width, _use_color(color, sink.raw.isatty())))


def _get_width(sink: Stream) -> int:
    if sink.columns is not None:
        return sink.columns
    try:
        descriptor = sink.raw.fileno()
    except (OSError, ValueError):
        descriptor = -1
    return get_terminal_width(descriptor)


def _use_color(choice: str, terminal: bool) -> bool:
    if choice != "auto":
        return choice == "always"
    if os.environ.get("NO_COLOR"):
        return False
    return bool(os.environ.get("FORCE_COLOR")) or (terminal and os.environ.get("TERM") != "dumb")


def print_state_error(error: StateError, debug: bool) -> int:
    """Print an error on stderr: a line, a line for each choice, and the advice; return exit code 2."""
    message, *lines = error.list_lines()
    code = print_error(message, debug)
    for line in lines:
        _print_line(truncate_middle(line, MAX_LINE_CHARACTERS))
    return code


def print_error(message: str, debug: bool) -> int:
    """Print an error in a line on stderr; return exit code 2."""
    if debug:
        import traceback

        for line in _scrub(traceback.format_exc()).splitlines():
            _print_line(line)
    _print_line(f"statecli: {truncate_middle(message.rstrip(), MAX_LINE_CHARACTERS)}")
    return 2


def print_crash(error: Exception, debug: bool) -> int:
    """Print a bug of statecli in a line, without secrets in the message; return exit code 2."""
    message = (
        f"internal error: {type(error).__name__}: {_scrub(str(error))} (please report it with the output of --debug)"
    )
    return print_error(message, debug)


def print_system_error(error: OSError, debug: bool) -> int:
    """Print an error of the system that no reader has attributed to a file; return exit code 2."""
    return print_error(_describe_system_error(error), debug)


def _describe_system_error(error: OSError) -> str:
    reason = (error.strerror or type(error).__name__).lower()
    try:
        os.getcwd()
    except OSError:
        return "the working directory no longer exists; change to another directory"
    if error.filename:
        return f"{os.fsdecode(error.filename)}: {reason}" if isinstance(error.filename, (str, bytes)) else reason
    return f"the system reported an error: {reason}; there is no result"


def _scrub(text: str) -> str:
    from statecli.storage import redact as secrets

    return secrets.scrub(text)


def print_warning(message: str) -> None:
    """Print a warning on stderr."""
    _print_line(f"statecli: warning: {message}")


def print_findings(findings: Sequence[Finding]) -> None:
    """Print findings on stderr, each in a line."""
    for finding in findings:
        _print_line(format_problem(finding))


def _print_line(text: str, *, direct: bool = False) -> None:
    """Print a line on stderr, if there is a stderr; errors are ignored, because the exit code remains.

    A supervised process sends the line to its parent, to be printed after the result, unless `direct`.
    """
    secrets = sys.modules.get("statecli.storage.redact")
    with suppress(OSError, ValueError):
        line = escape_line(secrets.remove_secrets(text) if secrets else text)
        parent = None if direct else _find_parent()
        if parent is not None:
            parent.write_error(line)
        elif sys.stderr is not None:
            print(line, file=sys.stderr, flush=True)


@contextmanager
def show_warnings_once() -> Iterator[None]:
    """Print each of Python's warnings once, in a line on stderr.

    A proof calls the same code many times, and Python shows a warning again whenever a filter changes.
    """
    before, printed = warnings.showwarning, set[str]()

    def print_once(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        text = f"{filename}:{lineno}: {category.__name__}: {message}"
        if text not in printed:
            printed.add(text)
            # Not by the parent, because rich prints lines of sys.stderr above its progress bar.
            _print_line(truncate_middle(" ".join(text.split()), MAX_LINE_CHARACTERS), direct=True)

    warnings.showwarning = print_once  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = before


def flush_stdout() -> None:
    """Flush stdout, so that a full disk or a closed pipe raises here and not at exit."""
    with _StdoutErrors():
        if _result_stream is not None:
            _result_stream.raw.flush()
        if sys.stdout is not None:
            sys.stdout.flush()


def discard_stdout() -> None:
    """Redirect stdout to the null device, because Python flushes stdout again at exit, and the reader is gone."""
    raw: IO[str] | IO[bytes] | None = sys.stdout if _result_stream is None else _result_stream.raw
    if raw is not None:
        _redirect_to_null(raw)


def flush_stderr() -> None:
    """Flush stderr, or redirect it to the null device, because Python would exit with 120 for a failed flush."""
    try:
        if sys.stderr is not None:
            sys.stderr.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            _redirect_to_null(sys.stderr)


def _redirect_to_null(stream: IO[str] | IO[bytes]) -> None:
    with suppress(io.UnsupportedOperation):  # the parent of a supervised process writes
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@contextmanager
def show_progress(*, enabled: bool, color: str, values: bool = True) -> Iterator[Progress | None]:
    """Show progress bars on stderr if stderr is a terminal: of fetched files, then of read bytes if `values`.

    Yields the function to report bytes to, or None. A bar appears when the first byte is read.
    """
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield None
        return
    line = _StageLine()
    with (
        watch_stages(line.show),
        prefetch_progress.watch_prefetch(lambda total: _show_fetched_files(total, color, line)),
    ):
        try:
            if not values:
                yield None
                return
            with _show_read_bytes(color, line) as start:
                yield start
        finally:
            line.show("")


class _StageLine:
    """Line of stderr with the name of the present slow stage."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, text: str) -> None:
        """Show a stage in the place of the stage before; "" clears the line.

        The cursor stays at the start of the line, so that the next output takes the place of the text.
        """
        stream = sys.__stderr__  # a model's code may replace sys.stderr
        if stream is None or not (text or self._is_shown):
            return
        self._is_shown = bool(text)
        with suppress(OSError, ValueError):
            width = get_terminal_width(stream.fileno())
            line = f"{truncate_middle(escape_line(text), width - 2)} …" if text else ""
            stream.write(f"\r\x1b[2K{line}\r")
            stream.flush()


@contextmanager
def _show_fetched_files(total: int, color: str, line: _StageLine) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` files; yields the function to call after each."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    line.show("")
    columns = (TextColumn("reading headers"), BarColumn(), MofNCompleteColumn(), TextColumn("files"))
    with Progress(*columns, console=_create_console(color), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


class _ReadBytes:
    """Bytes of values read: of whole tensors, or received of remote files if this is more."""

    def __init__(self) -> None:
        self.total = self._done = self._done_before = self._fetched_before = 0

    def start(self, total: int) -> None:
        """Expect so many bytes more."""
        self.total += total
        self._done_before = self._done
        self._fetched_before = prefetch_progress.count_fetched_values().bytes

    def add(self, done: int) -> None:
        """Count the bytes of finished tensors."""
        self._done += done

    def count(self) -> int:
        """Return the bytes so far."""
        fetched = prefetch_progress.count_fetched_values().bytes - self._fetched_before
        return max(self._done, min(self.total, self._done_before + fetched))


@contextmanager
def _show_read_bytes(color: str, line: _StageLine) -> Iterator[Progress]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.text import Text

    class _Speed(TransferSpeedColumn):
        """The speed; nothing as long as there is none, where rich writes a red question mark."""

        def render(self, task: Task) -> Text:
            return Text("") if (task.finished_speed or task.speed) is None else super().render(task)

    columns = (TextColumn("reading values"), BarColumn(), DownloadColumn(), _Speed(), TimeRemainingColumn())
    read = _ReadBytes()

    class _Bar(Progress):
        """Bar with the bytes received so far at each drawing: a large tensor arrives in many pieces."""

        def get_renderables(self) -> Iterable[RenderableType]:
            for task in self.task_ids:
                self.update(task, completed=read.count(), total=read.total)
            return super().get_renderables()

    bar = _Bar(*columns, console=_create_console(color), transient=True, auto_refresh=True)
    bar.add_task("", total=0)

    def start(total: int) -> Callable[[str, int], None]:
        read.start(total)
        line.show("")
        bar.start()
        return lambda _, done: read.add(done)

    try:
        yield start
    finally:
        bar.stop()


@contextmanager
def show_steps(total: int, *, enabled: bool, color: str) -> Iterator[Callable[[], None]]:
    """Show a bar of `total` steps on a stderr terminal, next to the stage; yields the function to call after each."""
    if not enabled or sys.stderr is None or not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=_create_console(color), transient=True) as bar:
        task = bar.add_task("", total=total)
        with watch_stages(lambda text: bar.update(task, description=escape(escape_line(text)), refresh=True)):
            yield lambda: bar.advance(task)


def _create_console(color: str) -> Console:
    """Return a console of rich for stderr, with the same choice of colours as the results."""
    from rich.console import Console

    return Console(stderr=True, no_color=True if color == "never" else None)
