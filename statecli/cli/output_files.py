"""What is written where: `-f` to `-o`, and each `--report FORMAT=FILE` beside it. Refused before anything is read.

A file is replaced by a whole one, or stays what it was.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from difflib import get_close_matches
from typing import IO, Any

import msgspec

from statecli.core.errors import UsageError
from statecli.formats import FORMATS
from statecli.render import Output
from statecli.storage import files
from statecli.storage.source import Source
from statecli.targets import location
from statecli.targets.expand import CHECKPOINT_SUFFIXES

#: The options that name what is read.
READ = ("target", "before", "after", "targets", "parts", "model", "inputs", "lock", "against", "baseline", "config")
#: What the process has open already: no file of the user's.
STDOUT = "-"


class Written(msgspec.Struct, frozen=True):
    """One output and its file, None for stdout; `option` is how it was asked for."""

    output: Output
    path: str | None
    option: str


def requested(options: Any) -> tuple[Written, ...]:
    """Return the outputs of a run, that of `-f` last: it may go to a pipe that is closed before its end.

    Raises UsageError for an unknown format, a report without a file, two outputs in one file, a file in a folder that
    is not there, and a file that is read.
    """
    reports = [_report(text) for text in getattr(options, "report", ())]
    output = getattr(options, "output", None)
    path = None if output == STDOUT else output
    outputs = (*reports, Written(getattr(options, "output_format", Output.JSON), path, f"-o {output}"))
    baseline = getattr(options, "write_baseline", None)
    if baseline is not None:
        refuse_place(baseline, "--write-baseline")
    refuse_twice((*outputs, Written(Output.JSON, baseline, f"--write-baseline {baseline}")))
    for one in outputs:
        refuse(one, options)
    return outputs


def _report(text: str) -> Written:
    form, equals, path = text.partition("=")
    option = f"--report {text}"
    forms = [output.value for output in Output]
    if form not in forms:
        near = get_close_matches(form, forms, n=1)
        hint = f"did you mean {near[0]}?" if near else f"those that there are: {', '.join(forms)}"
        raise UsageError(f"{option}: {form!r} is no format; {hint}")
    if not equals or not path:
        raise UsageError(f"{option}: names no file; write --report {form}=FILE")
    if path == STDOUT:
        raise UsageError(f"{option}: a report goes to a file; for standard output write -f {form}")
    return Written(Output(form), path, option)


def refuse_twice(everything: Sequence[Written]) -> None:
    """Raises UsageError for two outputs in one file."""
    known: dict[str, Written] = {}
    for one in everything:
        if one.path is None:
            continue
        other = known.setdefault(os.path.realpath(one.path), one)
        if other is not one:
            raise UsageError(f"{one.option}: {other.option} is written to the same file; name another")


def _read(options: Any) -> Iterator[str]:
    """The files and folders that the command line names to be read."""
    for name in READ:
        value = getattr(options, name, None)
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                yield from (text, location.find_file(text))
                yield from () if os.path.lexists(text) else _matches(text)


def _matches(text: str) -> Iterator[str]:
    """Yield the local files that a glob matches, as far as it is one."""
    if files.is_glob(text) and not files.is_remote(text):
        yield from files.match_glob(text)


def refuse(one: Written, options: Any) -> None:
    """Raises UsageError for a file in no folder, and for one that is read."""
    if one.path is None:
        return
    refuse_place(one.path, one.option)
    refuse_read(one, _read(options) if os.path.isfile(one.path) else ())


def refuse_read(one: Written, texts: Iterable[str]) -> None:
    """Raises UsageError where a file of these, or one of a folder's that hold its model, would be written to."""
    if one.path is None or not os.path.isfile(one.path):
        return
    for text in texts:
        if os.path.exists(text) and (os.path.samefile(text, one.path) or _is_part(one.path, text)):
            raise UsageError(f"{one.option}: {text} is read from it; write elsewhere")


def refuse_place(path: str, option: str) -> None:
    """Raises UsageError for a folder, and for a file in a folder that is not there."""
    if files.is_remote(path):
        raise UsageError(f"{option}: cannot be written: it is a URL; write a file and copy it there")
    folder = os.path.dirname(path)
    if os.path.isdir(path) or (folder and not os.path.isdir(folder)):
        why = "is a folder" if os.path.isdir(path) else f"there is no folder {folder}"
        raise UsageError(f"{option}: cannot be written: {why}")


def _is_part(path: str, folder: str) -> bool:
    """Whether a file is one of a folder's that hold its model: what was written there before is none."""
    inside = os.path.isdir(folder) and os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), ""))
    if not inside:
        return False
    name = os.path.basename(path)
    if name == ".metadata" or name.endswith((".index.json", *CHECKPOINT_SUFFIXES)):
        return True
    with Source(path) as source:
        return any(one.sniff(path, source.head) for one in FORMATS)


@contextmanager
def replacing(path: str) -> Iterator[IO[bytes]]:
    """A file to write, which takes the place of `path` once all of it is written; until then that is what it was.

    It keeps the mode and the owner, and a link leads to it as before. What is no regular file, and a file in a folder
    that takes no other, is written to as it is. Raises OSError.
    """
    try:
        known = os.stat(path)
    except FileNotFoundError:
        known = None
    made = _beside(os.path.realpath(path), known)
    if made is None:
        with open(path, "wb") as file:
            yield file
        return
    try:
        with open(made, "wb") as file:
            yield file
        _put(made, os.path.realpath(path), known)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(made)


def _beside(path: str, known: os.stat_result | None) -> str | None:
    """An empty file in the folder of `path`, for its new content; None where that is written in place."""
    if known is not None:
        if not stat.S_ISREG(known.st_mode):
            return None
        os.close(os.open(path, os.O_WRONLY))  # what may not be written may not be replaced either
    made = os.path.join(os.path.dirname(path), f".statecli-{os.urandom(8).hex()}")
    try:
        os.close(os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    except PermissionError:
        if known is None:
            raise
        return None
    return made


def _put(made: str, path: str, known: os.stat_result | None) -> None:
    """Rename; or copy, where the file has other names that are to have it too, or is a mount of its own."""
    if known is not None:
        with suppress(OSError, AttributeError):  # another's file, a system without owners
            os.chown(made, known.st_uid, known.st_gid)
        with suppress(OSError):
            os.chmod(made, stat.S_IMODE(known.st_mode))
    if known is None or known.st_nlink == 1:
        try:
            os.replace(made, path)
            return
        except OSError as error:
            if error.errno != errno.EBUSY:
                raise
    with open(made, "rb") as new, open(path, "wb") as file:
        while piece := new.read(1 << 20):
            file.write(piece)


def descriptor(path: str) -> int | None:
    """Which of the process's open files a path is, as `/dev/stdout` and `/dev/fd/63` are; None for any other."""
    for _ in range(40):  # links may go round in a circle
        folder, name = os.path.split(path)
        if name.isdecimal() and os.path.realpath(folder) == os.path.realpath("/dev/fd"):
            return int(name)
        if not os.path.islink(path):
            return None
        path = os.path.join(folder, os.readlink(path))
    return None
