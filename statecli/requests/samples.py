"""Run `statecli samples`: copy the sample models of the tutorial out of the package."""

from __future__ import annotations

import os

from statecli.core.errors import StateError, UsageError
from statecli.requests.options import SamplesOptions
from statecli.requests.outcome import Caller, Outcome
from statecli.storage.replace_file import replace_file

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


def run(options: SamplesOptions, caller: Caller) -> Outcome[list[str]]:  # noqa: ARG001 - every command has the same signature
    """Copy the samples into the folder, which is created if it is missing. The outcome's text lists the files.

    An existing file stays unchanged. Raises UsageError if a file has another text, before anything is written, and
    OSError if the folder cannot be written.
    """
    source = _find_samples()
    names = sorted(name for name in os.listdir(source) if name.endswith(".py"))
    texts = {name: _read_file(os.path.join(source, name)) for name in names}
    for name in names:
        path = os.path.join(options.folder, name)
        if os.path.lexists(path) and (not os.path.isfile(path) or _read_file(path) != texts[name]):
            raise UsageError(f"{path}: exists already and differs from the sample; give another folder")
    os.makedirs(options.folder, exist_ok=True)
    for name in names:
        path = os.path.join(options.folder, name)
        if not os.path.exists(path):
            with replace_file(path) as file:
                file.write(texts[name])
    net = os.path.join(options.folder, "net.py")
    text = (
        f"{options.folder}: {len(names)} sample models; the first lines of each file describe the model\n"
        f"begin with: statecli inspect {net}:Net --to meta\n"
    )
    return Outcome(names, text=lambda _: text)


def _find_samples() -> str:
    """Return the folder of the samples. It is inside an installed package, but next to the package in a clone."""
    for path in (os.path.join(_PACKAGE, "samples"), os.path.join(os.path.dirname(_PACKAGE), "sample_models")):
        if os.path.isdir(path):
            return path
    raise StateError("the sample models are missing in this installation; install the package again")


def _read_file(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()
