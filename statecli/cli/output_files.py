"""Find the output files of `-o` and of `--report FORMAT=FILE`, and check them before the command reads anything."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

import msgspec

from statecli.core.errors import UsageError, option
from statecli.formats import find_format
from statecli.live.spec import split_class_options
from statecli.render import Output
from statecli.requests.options import Options
from statecli.requests.parameters import list_texts
from statecli.storage import files
from statecli.storage.byte_source import ByteSource
from statecli.storage.checkpoint_names import CHECKPOINT_SUFFIXES, SETTINGS_FILES
from statecli.targets import location

#: Value of `-o` for standard output.
STDOUT = "-"


class OutputTarget(msgspec.Struct, frozen=True):
    """Format and path of an output. `output` None means a table on a terminal, and plain rows elsewhere.

    `path` None means stdout. `option_text` is the option that gives the output, for the message of a UsageError.
    """

    output: Output | None
    path: str | None
    option_text: str


def list_outputs(options: Options) -> tuple[OutputTarget, ...]:
    """Return the outputs of a run. `-o` or stdout is last, because the command ends if stdout is a closed pipe.

    Raises UsageError for an unknown format, a report without a file, two outputs in the same file and a missing folder.
    Also raises UsageError for a file that the command reads.
    """
    reports = [_parse_report(text) for text in getattr(options, "report", ())]
    output = getattr(options, "output", None)
    path = None if output == STDOUT else output
    outputs = (*reports, OutputTarget(getattr(options, "output_format", Output.JSON), path, option("-o", str(output))))
    path = getattr(options, "write_baseline", None)
    baseline = OutputTarget(Output.JSON, path, option("--write-baseline", str(path)))
    if path is not None:
        check_place(path, option("--write-baseline"))
    check_distinct((*outputs, baseline))
    for target in outputs:
        check_output(target, options)
    # A run may read the baseline that it writes.
    check_not_read(baseline, _list_inputs(options, other_than="baseline"))
    return outputs


def _parse_report(text: str) -> OutputTarget:
    form, equals, path = text.partition("=")
    option_text = option("--report", text)
    forms = [output.value for output in Output]
    if form not in forms:
        from difflib import get_close_matches

        similar_forms = get_close_matches(form, forms, n=1)
        hint = f"did you mean {similar_forms[0]}?" if similar_forms else f"choose one of: {', '.join(forms)}"
        raise UsageError(f"{option_text}: {form!r} is not a format; {hint}")
    if not equals or not path:
        raise UsageError(f"{option_text}: the file name is missing; write {option('--report', f'{form}=FILE')}")
    if path == STDOUT:
        raise UsageError(
            f"{option_text}: needs the name of a file; to write the report to standard output, give "
            f"{option('-f', form)}"
        )
    return OutputTarget(Output(form), path, option_text)


def check_distinct(targets: Sequence[OutputTarget]) -> None:
    """Raise UsageError for two outputs in the same file."""
    first_by_path: dict[object, OutputTarget] = {}
    for target in targets:
        if target.path is None:
            continue
        first = first_by_path.setdefault(_identify(target.path), target)
        if first is not target:
            raise UsageError(f"{target.option_text}: {first.option_text} writes to the same file; give another file")


def _identify(path: str) -> object:
    """Return a value that is the same for all paths and hard links of a file."""
    if os.path.isfile(path) and (file_status := os.stat(path)).st_ino:
        return file_status.st_dev, file_status.st_ino
    return os.path.realpath(path)


def _list_inputs(options: Options, other_than: str = "") -> Iterator[str]:
    """Yield the input files and folders on the command line, except those of the option field `other_than`."""
    for text in list_texts(options, lambda each: each.reads_file and each.field != other_than):
        yield from _list_files(text)


def _list_files(text: str) -> Iterator[str]:
    """Yield the paths that a text can name: as a path, glob, class with options, `script.py::main` or module."""
    file = location.find_file(text)
    configuration = split_class_options(text)[1].config_json
    yield from (text, file, *(() if configuration is None else (configuration,)))
    module = file.removesuffix(".py") if ":" in text else text.replace(".", os.sep)
    yield from (f"{module}.py", os.path.join(module, "__init__.py"))
    if files.is_glob(text) and not files.is_remote(text) and not os.path.lexists(text):
        yield from files.match_glob(text)


def check_output(target: OutputTarget, options: Options) -> None:
    """Raise UsageError if the output cannot be written at its path, or if the command reads that file."""
    if target.path is None:
        return
    check_place(target.path, target.option_text)
    check_not_read(target, _list_inputs(options) if os.path.isfile(target.path) else ())


def check_not_read(target: OutputTarget, paths: Iterable[str]) -> None:
    """Raise UsageError if the output would overwrite a file of `paths`, or a model file in a folder of `paths`."""
    if target.path is None or not os.path.isfile(target.path):
        return
    for text in paths:
        if _is_same_file(text, target.path) or (os.path.isdir(text) and _is_part(target.path, text)):
            raise UsageError(f"{target.option_text}: the command also reads this file; write to another file")


def _is_same_file(text: str, path: str) -> bool:
    if os.path.exists(text):
        return os.path.samefile(text, path)
    if text != files.STANDARD_INPUT:
        return False
    with suppress(OSError):  # standard input is closed
        return os.path.samestat(os.fstat(0), os.stat(path))
    return False


def check_place(path: str, option_text: str) -> None:
    """Raise UsageError for a URL, a folder, and a file in a missing folder."""
    if files.is_remote(path):
        raise UsageError(f"{option_text}: statecli cannot write to a URL; write a local file and upload it")
    folder = os.path.dirname(path)
    if os.path.isdir(path) or (folder and not os.path.isdir(folder)):
        reason = "is a folder" if os.path.isdir(path) else f"the folder {folder} does not exist"
        raise UsageError(f"{option_text}: cannot be written: {reason}")


def _is_part(path: str, folder: str) -> bool:
    """Return True for a file of the model in `folder`, but not for other files there, such as an earlier report."""
    if not os.path.realpath(path).startswith(os.path.join(os.path.realpath(folder), "")):
        return False
    name = os.path.basename(path)
    stem, suffix = os.path.splitext(name)
    if name == ".metadata" or name.endswith((".index.json", ".py", *CHECKPOINT_SUFFIXES)):
        return True
    if suffix == ".json" and stem in SETTINGS_FILES:
        return True
    with ByteSource(path) as source:
        return find_format(path, source.head) is not None


def find_descriptor(path: str) -> int | None:
    """Return the open descriptor of a path like `/dev/stdout` or `/dev/fd/63`, or None for any other path."""
    for _ in range(40):  # links may go round in a circle
        folder, name = os.path.split(path)
        if name.isdecimal() and os.path.realpath(folder) == os.path.realpath("/dev/fd"):
            return int(name)
        if not os.path.islink(path):
            return None
        path = os.path.join(folder, os.readlink(path))
    return None
