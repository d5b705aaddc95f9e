"""Rules about code that a model folder or its metadata gives to other programs: Python files and chat templates."""

from __future__ import annotations

from collections.abc import Iterator

from statecli.core import quoting
from statecli.core.finding import Severity
from statecli.pickle_scan.template_code import describe_escape, find_escape
from statecli.rules.audit_rule import Issue, compute_text_digest, rule
from statecli.rules.audit_subject import Subject
from statecli.rules.settings_file import ATTENTION_KEYS, MODULES, PIPELINES, CodeReference
from statecli.storage import files


@rule(Severity.NOTE)
def remote_code(subject: Subject) -> Iterator[Issue]:
    """A settings file names Python code that a library runs with `trust_remote_code=True`.

    Why: `auto_map` in `config.json`, in `tokenizer_config.json` or in the settings of a processor names classes in
    Python files of the model, or of another repository (`owner/name--file.Class`). `from_pretrained` imports these
    files if `trust_remote_code` is set. In the same way `pipeline` imports the classes that `custom_pipelines` in
    `config.json` names, and `generate` runs `custom_generate/generate.py` if a call requests it. diffusers imports the
    classes in `model_index.json`, and sentence-transformers the classes in `modules.json`: before release 6 also from a
    local folder without `trust_remote_code`. `attn_implementation` in `config.json` can name a kernel in another
    repository, which transformers loads if the package `kernels` is installed. Such a file can do anything, and
    statecli does not check the code. The other repository can change after the audit. The finding is a note, because
    many good models have such code. A JSON file that is not read is reported too.

    Example: `"auto_map": {"AutoModel": "modeling_x.Model"}` in `config.json`.

    Fix: load the model without `trust_remote_code`; otherwise review the files, and pin `revision` and `code_revision`.
    """
    file = subject.settings_file
    if file is None:
        return
    name = files.get_name(file.path)
    if file.unread_because and name.endswith(".json"):  # a template names no files
        yield Issue(f"{name} was not searched for code: {file.unread_because}", help="review the file")
    for reference in dict.fromkeys(file.code):
        help = "load the model without trust_remote_code, or review the code first"
        yield Issue(_describe_reference(name, reference), help=help, about=reference.key)


def _describe_reference(name: str, reference: CodeReference) -> str:
    if reference.key == "custom_generate":
        return f"{name} is code that generate(custom_generate=…) runs with trust_remote_code=True"
    if reference.key.rpartition(".")[2] in ATTENTION_KEYS:
        code = (
            f"{quoting.name(reference.key)}: {name} names a kernel that from_pretrained loads from another repository"
        )
        return f"{code} if the package kernels is installed: {quoting.name(reference.text)}"
    is_pipeline = reference.key.startswith(f"{PIPELINES}.")
    function = "pipeline" if is_pipeline else "SentenceTransformer" if name == MODULES else "from_pretrained"
    code = f"{quoting.name(reference.key)}: {name} names code that {function} runs with trust_remote_code=True"
    if reference.repository is None:
        return f"{code}: {quoting.name(reference.file)}"
    return f"{code}: {quoting.name(reference.file)} of another repository, {quoting.name(reference.repository)}"


@rule(Severity.ERROR)
def template_code(subject: Subject) -> Iterator[Issue]:
    """A chat template reads attributes that give access to all of Python.

    Why: a chat template is a Jinja program. transformers renders the template in a sandbox, but other programs do not,
    and then `x.__init__.__globals__` runs any code (CVE-2024-34359 of llama-cpp-python). No chat template needs such
    attributes. The rule checks the metadata `tokenizer.chat_template` of GGUF files. In folders, and next to weights
    such as `model.safetensors` that are audited alone, it checks `chat_template.jinja` and the key `chat_template` of
    JSON files. It reports Python's attributes with double underscores, attributes of frames (`gi_frame`) and attributes
    of Jinja's own objects (`_environment`): after a dot, as a text, or in a field of `format`. It also reports a
    subscript that begins with two underscores, and the filter `attr` with anything other than a plain name. It does
    not find a name that a template computes in another way. A file that is not read is reported too.

    Example: `{{ cycler.__init__.__globals__.os.popen('…').read() }}` in `tokenizer_config.json`.

    Fix: do not use the template, and contact the publisher; if it must be used, render it only in Jinja's sandbox.
    """
    help = "do not use the template; contact its publisher"
    file = subject.settings_file
    if file is not None and file.unread_because:
        message = f"{files.get_name(file.path)} was not searched for attributes that give access to all of Python"
        yield Issue(f"{message}: {file.unread_because}", help=help)
    for template in (*subject.full_state.chat_templates, *(file.templates if file is not None else ())):
        escape = find_escape(template.text)
        if escape is not None:
            message = describe_escape(quoting.name(template.name), escape)
            yield Issue(message, help=help, content=compute_text_digest(template.text))


RULES = (remote_code, template_code)
