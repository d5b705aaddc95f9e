"""The console script, and `python -m statecli`."""

from __future__ import annotations

import _thread
import gc
import os
import sys
import time

from statecli import cli, storage
from statecli.core import posix
from statecli.core.early_flags import PLUGIN_FLAG, TIMEOUT_FLAG, VERBOSE_FLAGS, VERSION_FLAGS
from statecli.core.exit_code import CommandExit
from statecli.core.installed_package import describe_unusable_installation
from statecli.core.safe_search_path import drop_relative_entries
from statecli.core.version import __version__

TYPE_CHECKING = False  # typing takes a tenth of the shortest start
if TYPE_CHECKING:
    from collections.abc import Sequence

#: Seconds that threads, processes and exit handlers of a model may take to end, because Python would wait for ever.
EXIT_TIMEOUT_S = 2.0
#: Seconds after which a new thread has started and sleeps.
THREAD_START_S = 0.001
#: New objects between two garbage collections if no model code runs, because a command makes few reference cycles.
GC_THRESHOLD = 50_000


def command() -> None:
    """Run `main` and exit with its code; a command line that names model code runs in a supervised child process.

    Every crash gives exit code 2. Only a failed start of Python, before the first line here, gives 1.
    """
    drop_relative_entries()
    if sys.argv[1:2] == ["__complete"]:
        cli.completion.answer(sys.argv[2:])
        return
    has_model_code = names_model_code(sys.argv[1:])
    if posix.CAN_FORK and (has_model_code or _is_memory_limited()):
        raise SystemExit(_run_supervised())
    if not has_model_code:
        gc.set_threshold(GC_THRESHOLD)
    try:
        main()
    except SystemExit as done:
        # The system frees the memory of the process; a search for cycles at the exit takes a tenth of a short command.
        if not has_model_code:
            gc.freeze()
        # Limit the time of the exit, because Python waits for threads.
        if isinstance(done.code, int) and "threading" in sys.modules:
            _limit_exit_time(done.code)
        raise


def names_model_code(words: Sequence[str]) -> bool:
    """Return True if the words may name code of the user, or set a time limit. May be True for other words too."""
    return any(
        ":" in word.partition("://")[0]
        or word == "auto"
        or word.endswith("=auto")
        or word.startswith((TIMEOUT_FLAG, PLUGIN_FLAG))
        for word in words
    )


def _is_memory_limited() -> bool:
    """Return True if `ulimit -v` is set, because libraries in C may then exit with status 1, as OpenBLAS does."""
    import resource

    return resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY


def _run_supervised() -> int:
    try:
        return cli.supervisor.run(main)
    except Exception as error:  # noqa: BLE001  # no process, or no memory for the import: a crash never exits with 1
        _complain(error)
        return 2


def _limit_exit_time(code: int) -> None:
    started = _thread.allocate_lock()
    started.acquire()
    try:
        _thread.start_new_thread(_exit_after_timeout, (code, started))
    except RuntimeError:  # the system cannot start threads, so Python waits for none
        return
    # Python 3.11.2 sometimes crashes (SIGSEGV) if it ends while a thread starts.
    started.acquire()
    time.sleep(THREAD_START_S)


def main() -> None:
    """Run the command line. Raises SystemExit; an interrupt ends the process."""
    try:
        _run()
    except KeyboardInterrupt:
        _exit_process(130)
    except SystemExit as done:
        if not isinstance(done, CommandExit):
            raise SystemExit(2) from done
        if done.code == 130:
            _exit_process(130)
        raise
    except BaseException as error:  # noqa: BLE001  # an import that fails, no memory, no thread: a crash never exits with 1
        _complain(error)
        raise SystemExit(2) from None


#: Words that request the version.
_VERSION_WORDS = frozenset([*VERSION_FLAGS, "version"])


def _run() -> None:
    problem = describe_unusable_installation()
    if problem is not None:
        sys.stderr.write(f"statecli: {problem}\n")
        raise SystemExit(2)
    if len(sys.argv) == 2 and sys.argv[1] in _VERSION_WORDS and _print_version():
        raise CommandExit(0)
    # First of all imports, so that Ctrl-C during the imports exits with 130 too.
    cli.interrupts.handle_interrupts()
    words = sys.argv[1:]
    may_have_secrets = any(":" in word for word in words)
    if not may_have_secrets:
        _answer_early(words)
    if not names_model_code(words):
        cli.import_msgspec.import_msgspec()
    if len(words) == 2 and _VERSION_WORDS & set(words) and set(words) & set(VERBOSE_FLAGS):
        cli.process_exit.run_body_and_exit(cli.command_runner.show_installation, debug=False)

    storage.files.forget_command()
    # Before anything can print a URL, which may hold a password or a signature.
    sys.argv[1:] = words = [*map(storage.files.mask_urls, words)]
    if may_have_secrets:
        _answer_early(words)
    if any("://" in word for word in words):
        posix.use_one_malloc_arena()  # many threads read a remote file
    cli.process_exit.run_body_and_exit(lambda: _run_line(words), debug="--debug" in words)


def _answer_early(words: Sequence[str]) -> None:
    """Exit with the requested help, which does not need an import of the commands."""
    command = cli.help_page.find_help_request(words)
    if command is not None and cli.help_page.find_ambiguous_word(words) is None:
        cli.process_exit.run_body_and_exit(lambda: cli.help_page.show_help(command, words), debug=False)


def _run_line(words: Sequence[str]) -> int:
    """Run a command line, and return its exit code. Raises UsageError for a mistake."""
    if cli.help_page.lacks_command(words):
        return cli.help_page.show_missing_command(words)
    if len(words) == 1 and words[0] in _VERSION_WORDS:
        cli.streams.open_stdout().text(f"statecli {__version__}\n")
        return 0
    try:
        options = cli.parser.parse(words)
    except cli.parser.HelpRequested as request:
        return cli.help_page.show_help(request.command, words)
    return cli.command_runner.execute(options)


def _print_version() -> bool:
    """Print the version; return False if that fails, so that the command reports the error."""
    try:
        sys.stdout.write(f"statecli {__version__}\n")
        sys.stdout.flush()
    except (AttributeError, OSError, ValueError):
        return False
    return True


def _complain(error: BaseException) -> None:
    """Write a line about an error of the process, with as little code and memory as possible."""
    try:
        if isinstance(error, MemoryError):
            os.write(2, b"statecli: not enough memory; there is no result\n")
        else:
            text = " ".join(f"{type(error).__name__}: {error}".split())[:1000]
            os.write(2, f"statecli: cannot run: {text}\n".encode("ascii", "backslashreplace"))
    except BaseException:  # noqa: BLE001  # the exit status remains
        return


def _exit_after_timeout(code: int, started: _thread.LockType) -> None:
    started.release()
    time.sleep(EXIT_TIMEOUT_S)
    _exit_process(code)


def _exit_process(code: int) -> None:
    """Exit without waiting for threads or processes; after an interrupt, stdout is not flushed."""
    supervisor = sys.modules.get("statecli.cli.supervisor")
    parent = supervisor.get_connection() if supervisor else None
    if parent is not None:
        parent.conclude(code)
    for stream in (sys.stdout, sys.stderr) if code != 130 else (sys.stderr,):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):  # closed, or broken: the exit status remains
            continue
    _kill_children()
    os._exit(code)


def _kill_children() -> None:
    """Kill the processes of multiprocessing, because Python and readers of our streams would wait for them."""
    multiprocessing = sys.modules.get("multiprocessing")
    for child in multiprocessing.active_children() if multiprocessing else ():
        child.kill()


if __name__ == "__main__":
    command()
