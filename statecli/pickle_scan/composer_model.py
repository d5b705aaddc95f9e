"""Check the model and the tokenizer that Composer saves for transformers, in `state["integrations"]["huggingface"]`.

`HuggingFaceModel.hf_from_composer_checkpoint` writes each file of the tokenizer under its name in the checkpoint, calls
the class of the model, and gives the entries of the configuration to `AutoConfig.from_pretrained` as arguments. Source:
composer/models/huggingface.py of 0.32.
"""

from __future__ import annotations

from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Hazard
from statecli.pickle_scan import texts_as_code

#: Keys that lead to the files and to the configuration; and the keys of a file and of a configuration.
INTEGRATIONS, HUGGINGFACE, TOKENIZER, MODEL, CONFIG = "integrations", "huggingface", "tokenizer", "model", "config"
EXTENSION, CLASS, CONTENT = "file_extension", "class", "content"
#: Key of the entry that lets transformers run Python files of the repository named in the configuration.
TRUST = "trust_remote_code"

_FILE_NAME = compile_on_use(r"[^/\\:\0]+")
_PYTHON = ".py"
#: Model classes of these libraries, which Composer calls with a configuration.
_MODEL_CLASS = compile_on_use(r"(?:transformers|peft)(?:\.[a-z]\w*)*\.[A-Z]\w*")
_HELP = "do not load the file with hf_from_composer_checkpoint unless you trust its author"


def check_file(where: str, name: str, extension: object) -> Hazard | None:
    """Return the hazard of a tokenizer's file; None for a plain file name without the extension .py."""
    if not _FILE_NAME.fullmatch(name) or name in (".", ".."):
        message = f"{where} has the file {quoting.quote(name[:200])}, which is not a plain file name"
        return Hazard(f"{message}; Composer writes to this path and may overwrite one of your own files", help=_HELP)
    if name.endswith(_PYTHON) or extension == _PYTHON:
        message = f"{where} has the Python file {quoting.quote(name[:200])}"
        why = "Composer writes the file next to the user's files, where transformers or Python may run this file"
        return Hazard(f"{message}; {why}", is_error=False, needs_review=True, help=_HELP)
    return None


def check_class(where: str, name: str) -> Hazard | None:
    """Return the hazard of a model's class; None for classes of transformers and PEFT."""
    return None if _MODEL_CLASS.fullmatch(name) else texts_as_code.judge_call(f"{where} is", name, "Composer", _HELP)


def describe_trust(where: str) -> Hazard:
    """Return the hazard of a configuration with `trust_remote_code`, which runs the code of a repository."""
    message = f"{where} is set, so transformers runs Python files from the model repository given in the configuration"
    return Hazard(message, help=_HELP)
