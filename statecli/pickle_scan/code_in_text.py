"""Recognise JSON and YAML files from which a library builds objects by name, or unpickles text.

Such a file is not a checkpoint. statecli searches its text and reports the file, also if it has another format too.
Sources: ray 2.60 (train/_checkpoint.py, tune/analysis), torch 2.13 (utils/_pytree.py), gluonts 0.17 (core/serde),
hyperpyyaml 1.2 (core.py), PyYAML 6 (constructor.py), open_clip 3.3 (factory.py).
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from statecli import pickle_scan
from statecli.core.lazy_pattern import compile_on_use
from statecli.storage import files
from statecli.storage.byte_source import ByteSource

#: Largest text that is searched, in bytes; larger texts are reported, because they may hold anything.
_MAX_TEXT_BYTES = 64 << 20
#: Largest number of passes that decode escapes within escapes; texts of libraries need two.
_MAX_DECODINGS = 8
#: Names of Ray's files that hold pickles as digits: the state of an experiment and of its trials.
_RAY_STATES = ("experiment_state*.json", "trial_metadata.json")


#: Action of a library on a JSON file -> pattern of such a file.
_JSON_SIGNS = {
    "Ray unpickles text from this file": compile_on_use(rb"preprocessor_pkl|CLOUDPICKLE_FALLBACK"),
    "torch.utils._pytree imports any module that this file names": compile_on_use(rb"__enum__|default_factory_module"),
    "GluonTS calls any function that this file names": compile_on_use(rb'"__kind__"\s*:'),
    # Any true value counts, because open_clip passes the arguments of a tokenizer to transformers.
    "open_clip lets transformers run Python code from a repository (trust_remote_code)": compile_on_use(
        rb'"trust_remote_code"\s*:(?!\s*(?:false|null|""|0\s*[,}]))'
    ),
}
#: Tags of PyYAML for plain values, which are allowed: Lightning writes tuples into hparams.yaml.
_PLAIN_TAGS = b"none bool str unicode bytes int long float complex list tuple dict".split()
#: Classes of plain values that PyYAML creates from a mapping, or calls with a sequence of arguments. Lightning and
#: OmegaConf write such values into their configuration files.
_PLAIN_OBJECTS = (
    rb"object:argparse\.Namespace *\r?\n|object/apply:(?:collections\.OrderedDict"
    rb"|datetime\.(?:date|time|timedelta|timezone)|pathlib\.(?:_local\.)?(?:Pure)?(?:Posix|Windows)?Path) *\r?\n *- "
)
#: Tag of PyYAML that may import or call something; if it only names an object of Python or torch, with this name.
#: `%TAG` gives any tag another name. The pattern has no line anchor, because YAML has more line breaks than `re`.
_PYTHON_TAG = compile_on_use(
    rb"(?:!!|tag:yaml\.org,2002:)python(?!/(?:(?:%b)(?![\w/:])|%b))"
    rb"(?:/name:(?P<module>(?:torch|builtins)[\w.]*)\.(?P<name>\w+) ''\r?\n)?|%%TAG"
    % (b"|".join(_PLAIN_TAGS), _PLAIN_OBJECTS)
)
_YAML_SIGNS = {
    # `tuple`, `ref` and `copy` count too, because HyperPyYAML loads their texts again, and these may compute such a
    # tag.
    "HyperPyYAML calls any function that this file names": compile_on_use(
        rb"(?<![\w!/])!(?:(?:apply|applyref|new|name|module|include):|(?:tuple|ref|copy)(?!\w))"
    ),
}
_SUFFIXES = {".json": _JSON_SIGNS, ".yaml": _YAML_SIGNS, ".yml": _YAML_SIGNS}
#: Escape of a printable ASCII character in JSON, also in a text within a text. The character may be a backslash, so the
#: text is decoded repeatedly.
_ESCAPE = compile_on_use(rb"(?<!\\)\\+u00([2-7][0-9a-fA-F])")

#: Escape of a visible ASCII character in a YAML tag; HyperPyYAML decodes such escapes twice. An escaped space or line
#: break does not end a tag.
_TAG_ESCAPE = compile_on_use(rb"%(2[1-9a-fA-F]|[3-7][0-9a-fA-F])")


def _decode(text: bytes) -> bytes:
    """Convert the bytes of a text to UTF-8, because the file may be in UTF-16 or UTF-32, which libraries also read."""
    from json import detect_encoding  # imported here, because every command imports this module

    encoding = detect_encoding(text)
    return text if encoding.startswith("utf-8") else text.decode(encoding, "replace").encode()


def find_code_in_text(path: str, source: ByteSource) -> str | None:
    """Return how a library runs code from the file; None for other files."""
    name = files.get_name(path)
    if any(fnmatchcase(name, pattern) for pattern in _RAY_STATES):
        return "Ray unpickles text from this file"
    signs = _SUFFIXES.get(f".{name.rpartition('.')[2].lower()}")
    if signs is None:
        return None
    if source.size > _MAX_TEXT_BYTES:
        return f"statecli searches for code only in text of at most {_MAX_TEXT_BYTES >> 20} MB, and this file has more"
    content = source.read(0, source.size)
    if signs is _YAML_SIGNS and pickle_scan.yolo_activation.has_code(content):
        return "Ultralytics evaluates the value of `activation` as Python code"
    text = _decode(content)
    escape, replacement_count = _ESCAPE if signs is _JSON_SIGNS else _TAG_ESCAPE, 1
    for _ in range(_MAX_DECODINGS):
        text, replacement_count = escape.subn(lambda match: bytes([int(match[1], 16)]), text)
        if not replacement_count:
            break
    if replacement_count:
        return (
            f"this file has text within text, with nested escapes on more than {_MAX_DECODINGS} levels, the limit "
            "of statecli"
        )
    harm = next((harm for harm, pattern in signs.items() if pattern.search(text)), None)
    if harm is None and signs is _YAML_SIGNS and any(map(_may_call, _PYTHON_TAG.finditer(text))):
        return "PyYAML calls any function that this file names"
    return harm


def _may_call(tag: re.Match[bytes]) -> bool:
    """Return True for a tag of PyYAML, unless it only names a class or function that a checkpoint may name too."""
    if tag["module"] is None:
        return True
    return not pickle_scan.known_names.is_clean(tag["module"].decode(), tag["name"].decode())
