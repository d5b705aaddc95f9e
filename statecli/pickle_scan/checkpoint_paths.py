"""Check the paths in a checkpoint that a training library deletes or downloads when resuming from the checkpoint.

Lightning takes the paths from the state of its ModelCheckpoint. MMEngine takes them from the `runtime_info` of its
message hub, MMCV 1 from the `hook_msgs` of its `meta`. These libraries also accept other objects than texts: fsspec
uses the attribute `path` of any object as the path, and Python opens bytes. So only a text, a path of pathlib and None
are clean. Sources: lightning/pytorch/callbacks/model_checkpoint.py of 2.6; mmengine/hooks/checkpoint_hook.py of 0.10;
mmcv/runner/hooks/evaluation.py of 1.7; fsspec/utils.py and implementations/local.py of 2025.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Hazard
from statecli.pickle_scan import random_states
from statecli.pickle_scan.step_budget import Budget, Steps
from statecli.pickle_scan.text_values import COMPUTED_TEXT, is_plain_text, read_text, split_call
from statecli.pickles.nodes import Key, Obj, Value

#: Protocol of a path as fsspec splits it: the text before the first `://` or `::`, also in the middle of the path.
_PROTOCOL = compile_on_use(r"(?s)(.*?)(://|::)")
#: Beginnings of a local path that fsspec replaces: the home folder, and a prefix such as `file:`. One letter before the
#: colon is a drive.
_HOME, _PREFIX = "~", re.compile(r"[A-Za-z][\w+.-]+:")
#: Protocols of the stores in which users keep checkpoints, and of `memory`, which tests use.
_STORE_NAMES = (
    "s3 s3a gs gcs az abfs abfss adl wasb wasbs hdfs webhdfs viewfs dbfs oss oci cos obs hf lakefs swift memory"
)
_STORES = frozenset(_STORE_NAMES.split())
_PARENT = compile_on_use(r"(?:\A|[/\\])\.\.(?:[/\\]|\Z)")
#: Name of the best checkpoint that MMEngine saves: `best_` before the metric and the name of a checkpoint.
_BEST_NAME = compile_on_use(r"(?:.*[/\\])?best_[^/\\]*\.pth", re.DOTALL)
#: Longest path that Linux opens, in characters; a longer text is reported without other checks.
_MAX_PATH_CHARACTERS = 4096


def check_lightning_path(where: str, value: Value, steps: Steps) -> Iterator[Hazard]:
    """Check a path that Lightning's ModelCheckpoint opens and removes.

    Lightning removes a plain path only in the user's own folder, found in the path's parents as written. Lightning
    never writes a path that contains `..` or begins with `file://`, `file:` or `~`.
    """
    text, hazard = _read_path(where, value, "Lightning opens and deletes", steps)
    if hazard:
        yield hazard
    if not text:
        return
    protocol = _PROTOCOL.match(text)
    name = protocol[1].lower() if protocol else ""
    is_parent = _PARENT.search(text) is not None
    if name in ("http", "https"):
        why = 'with ckpt_path="best", Lightning downloads and unpickles this file with weights_only=False'
    elif name in _STORES and "::" not in text and not is_parent:
        why = f"is a remote path ({name}); Lightning deletes the file at this path after the next save"
        yield Hazard(f"{where} {why}", is_error=False)
        return
    elif protocol or is_parent or text.startswith(_HOME) or _PREFIX.match(text):
        why = "Lightning deletes this path, or the path that fsspec reads it as, in any folder after the next save"
    else:
        return
    yield Hazard(f"{where} is {_show_url(text, protocol)}; {why}")


def check_mmengine_path(where: str, value: Value, steps: Steps, *, library: str = "MMEngine") -> Iterator[Hazard]:
    """Check the path of the best checkpoint, which MMEngine deletes in any folder after saving a better checkpoint.

    `library` is "MMCV" for the path in a checkpoint of MMCV 1, which deletes files only. Numbers are clean, because
    Python removes no file by a number.
    """
    if random_states.read_number(value) is not None:
        return
    text, hazard = _read_path(where, value, f"{library} deletes", steps)
    if hazard:
        yield hazard
    if not text:
        return
    protocol = _PROTOCOL.match(text)
    message = f"{where} is {_show_url(text, protocol)}; {library} deletes this path after saving a better checkpoint"
    if _PARENT.search(text):
        yield Hazard(f"{message}, and `..` in the path may lead outside the user's folder")
    elif _BEST_NAME.fullmatch(text):
        yield Hazard(message, is_error=False)
    else:
        extent = "a folder with files" if library == "MMEngine" else "one of your own files"
        why = f"even if the path is {extent}; the usual name is best_*.pth"
        help = "check the path before you resume from the file"
        yield Hazard(f"{message}, {why}", is_error=False, needs_review=True, help=help)


def explain_unsafe_step(value: Value) -> str | None:
    """Describe the step number that MMEngine puts into a path, if the value is not an int; else return None."""
    if type(random_states.read_number(value)) is int:
        return None
    text = read_text(value)
    return (
        f"{quoting.quote(text[:_MAX_PATH_CHARACTERS])} instead of an integer" if type(text) is str else "not an integer"
    )


def describe_computed_text(where: str) -> Hazard:
    """Return the hazard of a text that statecli cannot check, because the pickle computes the text."""
    return Hazard(f"{where} is a string that the pickle computes during loading, so statecli cannot check the string")


def _read_path(where: str, value: Value, use: str, steps: Steps) -> tuple[str | None, Hazard | None]:
    """Return (text, None) for a path, (None, hazard) for any other value, and (None, None) for None.

    `use`: the action of a loader on the path, as `X deletes`.
    """
    node = value.value if type(value) is Key else value
    is_pathlib = type(node) is Obj and split_call(node)[0].startswith("pathlib.")
    text = _read_pathlib(node) if is_pathlib else read_text(node)
    if node is None:
        return None, None
    if text is COMPUTED_TEXT:
        return None, describe_computed_text(where)
    if type(text) is not str or not (is_pathlib or is_plain_text(node)):
        return None, Hazard(f"{where} is neither a string nor a path, so statecli cannot check which file {use}")
    steps.take(Budget.TEXT, len(text))
    if len(text) > _MAX_PATH_CHARACTERS:
        why = f"has {len(text):,} characters, more than a path can have, so statecli does not check which file {use}"
        return None, Hazard(f"{where} {why}")
    return text, None


def _read_pathlib(node: Obj) -> Value:
    parts = [read_text(part) for part in split_call(node)[1]]
    is_plain = node.state is None and all(type(part) is str for part in parts)
    return "/".join(parts) if is_plain else COMPUTED_TEXT


def _show_url(text: str, protocol: re.Match[str] | None) -> str:
    """Return a path for a message. Only the protocol of a URL is shown, because the rest may hold a password."""
    return f"a URL ({quoting.name(protocol[0])}…)" if protocol else quoting.quote(text)
