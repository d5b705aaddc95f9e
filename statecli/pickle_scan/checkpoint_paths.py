"""Check the paths in a checkpoint that a training library deletes or downloads when it resumes from the checkpoint.

Lightning takes the paths from the state of its ModelCheckpoint, MMEngine from the `runtime_info` of its message hub.
Sources: lightning/pytorch/callbacks/model_checkpoint.py of 2.6; mmengine/hooks/checkpoint_hook.py of 0.10;
fsspec/utils.py and implementations/local.py of 2025.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from statecli.core import quoting
from statecli.core.model_state import Hazard
from statecli.pickle_scan.text_values import COMPUTED_TEXT, read_text, split_call
from statecli.pickles.nodes import Obj, Value

#: Protocol of a path, as fsspec splits it off: what is before the first of these, also in the middle of the path.
_PROTOCOL = re.compile(r"(?s)(.*?)(://|::)")
#: The beginnings that fsspec replaces in a local path: the home folder, and `file:`. A drive has one letter.
_HOME, _PREFIX = "~", re.compile(r"[A-Za-z][\w+.-]+:")
#: Protocols of stores in which people keep checkpoints, and of tests.
_STORE_NAMES = (
    "s3 s3a gs gcs az abfs abfss adl wasb wasbs hdfs webhdfs viewfs dbfs oss oci cos obs hf lakefs swift memory"
)
_STORES = frozenset(_STORE_NAMES.split())
_PARENT = re.compile(r"(?:\A|[/\\])\.\.(?:[/\\]|\Z)")
#: The name of a file that MMEngine saves as the best one: `best_` before the metric and the name of a checkpoint.
_BEST_NAME = re.compile(r"(?:.*[/\\])?best_[^/\\]*\.pth", re.DOTALL)


def check_lightning_path(where: str, value: Value) -> Iterator[Hazard]:
    """Check a path opened and removed by Lightning's ModelCheckpoint.

    Lightning removes a plain path only in the user's own folder, found in the path's parents as written. Lightning
    writes no path with `..`, and none with `file://`, `file:` or `~` at the beginning.
    """
    text = _read_path(value)
    if text is COMPUTED_TEXT:
        yield describe_computed_text(where)
        return
    if type(text) is not str:
        return
    protocol = _PROTOCOL.match(text)
    name = protocol[1].lower() if protocol else ""
    if name in ("http", "https"):
        why = 'for ckpt_path="best", Lightning downloads and unpickles this file with weights_only=False'
    elif _PARENT.search(text):
        why = "Lightning deletes this path after the next save, although its `..` may leave the user's folder"
    elif name in _STORES and "::" not in text:
        yield Hazard(
            f"{where} is a remote path ({name}); Lightning deletes the file at this path after the next save",
            is_error=False,
        )
        return
    elif protocol:
        why = "Lightning deletes a path with a protocol after the next save, even a folder with all its files"
    elif text.startswith(_HOME) or _PREFIX.match(text):
        why = (
            "Lightning deletes another path after the next save, because fsspec replaces `~` and `file:`; Lightning "
            "checks only that this path is in the user's folder"
        )
    else:
        return
    yield Hazard(f"{where} is {_show_url(text, protocol)}; {why}")


def check_mmengine_path(where: str, value: Value) -> Iterator[Hazard]:
    """Check the path of the best checkpoint, which MMEngine deletes anywhere after it has saved a better one."""
    text = _read_path(value)
    if text is COMPUTED_TEXT:
        yield describe_computed_text(where)
    if type(text) is not str or not text:
        return
    protocol = _PROTOCOL.match(text)
    what = f"{where} is {_show_url(text, protocol)}; MMEngine deletes this path after it has saved a better checkpoint"
    if _PARENT.search(text):
        yield Hazard(f"{what}, although its `..` may leave the user's folder")
    elif _BEST_NAME.fullmatch(text):
        yield Hazard(what, is_error=False)
    else:
        why = "even a folder with all its files; MMEngine itself writes the name best_*.pth"
        help = "check the path before you resume from the file"
        yield Hazard(f"{what}, {why}", is_error=False, needs_review=True, help=help)


def check_mmengine_step(where: str, value: Value) -> Iterator[Hazard]:
    """Check the number of a saved checkpoint: MMEngine writes it into a path, and deletes that path."""
    text = _read_path(value)
    if text is COMPUTED_TEXT:
        yield describe_computed_text(where)
    elif type(text) is str and re.search(r"[/\\]", text):
        what = f"{where} is {quoting.quote(text)} instead of a number"
        yield Hazard(f"{what}; MMEngine deletes the path that it makes of the text, even a folder with all its files")


def describe_computed_text(where: str) -> Hazard:
    """Return the hazard of a text at a place that a loader uses, if only Python can tell the text."""
    return Hazard(f"{where} is a text that a call computes when the file is loaded, so statecli cannot check the text")


def _read_path(value: Value) -> Value:
    """Return the text of a path, also of a pathlib path; the value itself if neither."""
    name, args = split_call(value) if type(value) is Obj else ("", ())
    if not name.startswith("pathlib."):
        return read_text(value)
    parts = [read_text(part) for part in args]
    is_plain = value.state is None and all(type(part) is str for part in parts)
    return "/".join(parts) if is_plain else COMPUTED_TEXT


def _show_url(text: str, protocol: re.Match[str] | None) -> str:
    """Return a path for a message; of a URL its protocol, because the rest may hold a password."""
    return f"a URL ({quoting.name(protocol[0])}…)" if protocol else quoting.quote(text)
