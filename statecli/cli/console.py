"""Output of a command: reports go to stdout or files, and findings, warnings and progress to stderr."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import IO, TYPE_CHECKING, Any

from statecli import render, storage
from statecli.cli import interrupts, output_files, streams
from statecli.core.errors import UnreadableError
from statecli.core.escaping import escape_line, truncate_middle
from statecli.core.finding import Finding
from statecli.core.progress import Progress, watch_stages
from statecli.core.terminal_width import get_terminal_width
from statecli.render import RenderOptions
from statecli.report import Report
from statecli.storage import prefetch_progress

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Task
    from rich.text import Text

    from statecli.cli.output_files import OutputTarget


@contextmanager
def _open_sink(path: str | None) -> Iterator[streams.Stream]:
    """Yield stdout, or a UTF-8 stream whose text replaces the file at `path` when the block ends."""
    if path is None:
        with streams.open_paged_stdout() as stdout:
            yield stdout
        return
    if interrupts.was_interrupted:
        raise KeyboardInterrupt
    number = output_files.find_descriptor(path)
    try:
        with storage.replace_file.replace_file(path) if number is None else _reopen_descriptor(number) as raw:
            yield streams.Stream(raw, "utf-8", is_stdout=False)
            if interrupts.was_interrupted:
                raise KeyboardInterrupt
    except BrokenPipeError:
        raise
    except OSError as error:
        raise UnreadableError(f"{path}: cannot be written: {error.strerror}") from error


def _reopen_descriptor(number: int) -> IO[bytes]:
    """Open a copy of a descriptor. Descriptor 1 means the stream that `reserve_stdout` keeps for results."""
    results = streams.get_result_stream()
    if number == 1 and results is not None:
        parent = streams.find_parent()
        if parent is not None:
            parent_output: IO[bytes] = parent.open_output()
            return parent_output
        number = results.raw.fileno()
    return os.fdopen(os.dup(number), "wb")


def write_report(
    report: Report, targets: Sequence[OutputTarget], color: str, *, quiet: bool, exit_status: int | None
) -> None:
    """Write each output of the report. `quiet` applies only to the last output."""
    for target in targets:
        with _open_sink(target.path) as sink:
            terminal = target.path is None and sink.is_terminal
            look = RenderOptions(
                terminal,
                streams.get_width(sink),
                streams.use_color(color, terminal),
                quiet and target is targets[-1],
                exit_status,
            )
            render.write(report, target.output, sink, look)


def print_summary(report: Report, path: str) -> None:
    """Print on stderr the summary of a report that is in a file. Otherwise the log of a failed job would be empty."""
    page = (report.page_without_rows or report.page)()
    streams.print_line(f"statecli: {report.title}: {page.verdict}; see {path}")


def is_next_to_errors(target: OutputTarget) -> bool:
    """Return True if a human-readable output goes to the same place as stderr: a terminal, a pipe or a log."""
    for_people = target.output in (None, render.Output.TABLE, render.Output.PLAIN) and target.path is None
    if not for_people or sys.stderr is None:
        return False
    stdout = streams.open_stdout()
    if sys.stderr.isatty() or stdout.is_terminal:
        return sys.stderr.isatty() and stdout.is_terminal
    try:
        descriptor = stdout.raw.fileno()
        return os.path.sameopenfile(sys.stderr.fileno(), descriptor) and not _is_null(descriptor)
    except (OSError, ValueError):  # the stream was replaced by an object without a file
        return False


def _is_null(descriptor: int) -> bool:
    return os.path.samestat(os.fstat(descriptor), os.stat(os.devnull))


def write_pieces(pieces: Iterable[bytes], path: str | None) -> None:
    """Write bytes to stdout or the file at `path`."""
    with _open_sink(path) as sink:
        for piece in pieces:
            sink.utf8(piece)


def write_text(text: Callable[[int], str], path: str | None) -> None:
    """Write text to stdout or the file at `path`. `text` returns the text for a width in columns."""
    with _open_sink(path) as sink:
        sink.text(text(streams.get_width(sink)))


def print_on_terminal(text: str) -> None:
    """Print a line on stderr if stderr is a terminal."""
    if sys.stderr is not None and sys.stderr.isatty():
        streams.print_line(text)


def print_findings(findings: Sequence[Finding]) -> None:
    """Print findings on stderr, each in a line."""
    if not findings:
        return
    from statecli.render.plain import format_problem

    for finding in findings:
        streams.print_line(format_problem(finding))


@contextmanager
def show_warnings_once() -> Iterator[None]:
    """Print each of Python's warnings once, in a line on stderr.

    A check of verify calls the same code many times, and Python shows a warning again whenever a filter changes.
    """
    before, printed_texts = warnings.showwarning, set[str]()

    def print_once(message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any) -> None:
        text = f"{filename}:{lineno}: {category.__name__}: {message}"
        if text not in printed_texts:
            printed_texts.add(text)
            # Printed in this process, because rich prints lines of sys.stderr above its progress bar.
            streams.print_line(truncate_middle(" ".join(text.split()), streams.MAX_LINE_CHARACTERS), direct=True)

    warnings.showwarning = print_once  # type: ignore[assignment]
    try:
        yield
    finally:
        warnings.showwarning = before


@contextmanager
def show_progress(*, enabled: bool, color: str, values: bool = True) -> Iterator[Progress | None]:
    """Show progress bars on stderr if it is a terminal: for fetched files and, if `values`, for bytes of values.

    Yields the function that takes the total of bytes, or None if no bar is shown. A bar appears when reading starts.
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
    """Line on stderr with the name of the current slow stage."""

    def __init__(self) -> None:
        self._is_shown = False

    def show(self, text: str) -> None:
        """Replace the name of the stage on the line, or clear the line for "".

        The cursor stays at the start of the line, so that the next output takes the place of the text.
        """
        stream = sys.__stderr__  # code of a model may replace sys.stderr
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
    """Show a bar of `total` files. Yields the function to call after each file."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    line.show("")
    columns = (TextColumn("reading headers"), BarColumn(), MofNCompleteColumn(), TextColumn("files"))
    with Progress(*columns, console=_create_console(color), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda: bar.advance(task)


class _ReadBytes:
    """Counter of value bytes: the bytes of finished tensors or the bytes received from remote files, if more."""

    def __init__(self) -> None:
        self.total = self._finished_bytes = self._finished_before = self._fetched_before = 0

    def start(self, total: int) -> None:
        """Expect `total` more bytes."""
        self.total += total
        self._finished_before = self._finished_bytes
        self._fetched_before = prefetch_progress.count_fetched_values().bytes

    def add(self, size: int) -> None:
        self._finished_bytes += size

    def count(self) -> int:
        fetched_bytes = prefetch_progress.count_fetched_values().bytes - self._fetched_before
        return max(self._finished_bytes, min(self.total, self._finished_before + fetched_bytes))


@contextmanager
def _show_read_bytes(color: str, line: _StageLine) -> Iterator[Progress]:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
    from rich.text import Text

    class _Speed(TransferSpeedColumn):
        """Column with the speed. An unknown speed is empty, where rich would show a red question mark."""

        def render(self, task: Task) -> Text:
            return Text("") if (task.finished_speed or task.speed) is None else super().render(task)

    columns = (TextColumn("reading values"), BarColumn(), DownloadColumn(), _Speed(), TimeRemainingColumn())
    read_bytes = _ReadBytes()

    class _Bar(Progress):
        """Progress bar that reads the number of received bytes at each redraw, also while a large tensor arrives."""

        def get_renderables(self) -> Iterable[RenderableType]:
            for task in self.task_ids:
                self.update(task, completed=read_bytes.count(), total=read_bytes.total)
            return super().get_renderables()

    bar = _Bar(*columns, console=_create_console(color), transient=True, auto_refresh=True)
    bar.add_task("", total=0)

    def start(total: int) -> Callable[[str, int], None]:
        read_bytes.start(total)
        line.show("")
        bar.start()
        return lambda _, size: read_bytes.add(size)

    try:
        yield start
    finally:
        bar.stop()


@contextmanager
def show_steps(total: int, *, enabled: bool, color: str) -> Iterator[Callable[[], None]]:
    """Show a bar of steps and the current stage, if stderr is a terminal. Yields the function to call after a step."""
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
    """Return a console of rich for stderr that has colours unless --color is never."""
    from rich.console import Console

    return Console(stderr=True, no_color=True if color == "never" else None)
