"""Python files and chat templates that a model folder gives to other programs."""

from __future__ import annotations

import json
import time

import jinja2
import pytest
import torch
from safetensors.torch import save_file

from statecli.commands.audit import settings_files
from statecli.commands.audit.run import Request, audit
from statecli.core.finding import Severity
from statecli.formats import gguf
from statecli.pickle_scan.template_code import find_escape

from ..formats.test_gguf import VALUES, write_gguf


@pytest.fixture
def find(tmp_path):
    """Return the findings about a folder with a model and the given files, by file name."""

    def audit_files(**contents):
        save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
        for name, content in contents.items():
            path = tmp_path / name
            path.parent.mkdir(exist_ok=True)
            path.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
        return [finding for target in audit(Request((str(tmp_path),))).targets for finding in target.findings]

    return audit_files


# --- remote-code -----------------------------------------------------------------------------------------------------


def test_remote_code_finds_the_file_that_auto_map_names(find, tmp_path, statecli):
    """The note names the file; the audit does not fail."""
    (finding,) = find(**{"config.json": {"auto_map": {"AutoModel": "modeling_x.M"}}, "modeling_x.py": "x = 1"})
    assert (finding.rule, finding.severity) == ("remote-code", Severity.NOTE)
    assert "config.json names code that from_pretrained runs with trust_remote_code=True" in finding.message
    assert finding.message.endswith("modeling_x.py")
    result = statecli("audit", tmp_path)
    assert result.code == 0
    assert "modeling_x.py" in result.out


@pytest.mark.parametrize(
    ("file", "content", "text"),
    [
        ("config.json", {"auto_map": {"AutoModel": "evil/repo--modeling_x.M"}}, "modeling_x.py of another repository"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["tok.Slow", None]}}, "tok.py"),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": [None, "a/b--tok.Fast"]}}, "'a/b'"),
        ("preprocessor_config.json", {"auto_map": {"AutoProcessor": "proc.P"}}, "proc.py"),
        ("video_preprocessor_config.json", {"auto_map": {"AutoVideoProcessor": "proc.P"}}, "proc.py"),
        ("custom_generate/generate.py", "def generate(): ...", "generate.py is code that generate("),
        (
            "config.json",
            {"attn_implementation": "evil/kernel"},
            "names a kernel that from_pretrained loads from",
        ),
        ("config.json", {"text_config": {"_attn_implementation": {"": "evil/k@main:f"}}}, "evil/k@main:f"),
        ("config.4.0.0.json", {"auto_map": {"AutoModel": "m.M"}}, "m.py"),
        ("model_index.json", {"_class_name": ["my_pipeline", "P"]}, "from_pretrained runs with"),
        ("modules.json", [{"type": "my_module.M"}], "SentenceTransformer runs with"),
        ("config.json", {"custom_pipelines": {"t": {"impl": "evil.P"}}}, "code that pipeline runs with"),
        ("config.json", {"custom_pipelines": {"t": {"impl": "a/b--evil.P", "pt": ["M"]}}}, "evil.py of another"),
    ],
)
def test_code_of_other_settings_is_named(find, file, content, text):
    """A tokenizer has a slow and a fast class; `owner/name--file.Class` is in another repository."""
    (finding,) = find(**{file: content})
    assert text.replace("'", "") in finding.message.replace("'", "")


def test_a_component_of_a_pipeline_is_in_a_file_of_its_folder(find):
    """diffusers takes the first name for a module of a library if the folder lacks the file."""
    index = {"_class_name": "P", "unet": ["my_unet", "U"], "vae": ["my_vae", "V"]}
    (finding,) = find(**{"model_index.json": index, "unet/my_unet.py": "x = 1"})
    assert finding.message.endswith("unet/my_unet.py")


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("config.json", {"model_type": "llama", "auto_map": {}}),
        ("config.json", {"attn_implementation": "sdpa", "_attn_implementation": "kernels-community/flash-attn2"}),
        ("config.json", {"custom_pipelines": {"t": {"pt": ["AutoModel"]}, "u": "evil.P"}}),
        ("config.json", '{"auto_map": '),
        ("config.json", [1]),
        ("data.json", {"auto_map": {"AutoModel": "modeling_x.M"}}),
        ("model_index.json", {"_class_name": "P", "unet": ["diffusers", "UNet"], "x": [None, None], "n": [1]}),
        ("modules.json", [{"type": "sentence_transformers.models.Transformer"}, {"type": 1}, 2]),
        ("modules.json", {"type": "my_module.M"}),
        ("generate.py", "x = 1"),
    ],
)
def test_remote_code_spares_settings_without_code(find, file, content):
    """Also a file that transformers cannot read, and a file that it does not look for."""
    assert not find(**{file: content})


def test_settings_that_are_nested_too_deeply_are_reported(find):
    """A program with a smaller stack than statecli's may read the file."""
    findings = find(**{"config.json": '{"auto_map": {"AutoModel": "m.M"}, "x": ' + "[" * 5000 + "]" * 5000 + "}"})
    assert [finding.rule for finding in findings] == ["remote-code", "template-code"]
    assert all("nested too deeply" in finding.message for finding in findings)


# --- template-code ---------------------------------------------------------------------------------------------------

POPEN = "{{ cycler.__init__.__globals__.os.popen('touch MARK').read() }}"
#: Templates that leave the sandbox.
ESCAPES = [
    POPEN,
    "{{ lipsum['__globals__']['os'].system('true') }}",
    '{{ lipsum["\\x5f\\x5fglobals\\x5f\\x5f"]["os"].system("true") }}',
    "{{ lipsum | attr('__globals__') }}",
    "{{ lipsum|attr('__glo' ~ 'bals__') }}",
    "{{ lipsum['__glo' ~ 'bals__'] }}",
    "{% set g = (messages|select).gi_frame.f_builtins %}{{ g['exec']('1') }}",
    "{{ messages|map(attribute='__class__')|list }}",
    "{{ '{0.__class__}'.format(messages) }}",
    "{{ x.\n  __class__ }}",
    "{# {{ ' #}{{ x.__class__.__mro__ }}",
    "{% raw %}{{ ' {% endraw %}{{ x.__class__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ ([lipsum]|map(attribute='__globals__.os')|first).popen('id').read() }}",
    "{{ [x]|map(attribute='__init__.__globals__')|first }}",
    r"{{ lipsum['__\N{LATIN SMALL LETTER G}lobals__'] }}",
    r"{{ lipsum['__\N{latin small letter g}lobals__'] }}",
    "{{ lipsum['__glo\\\nbals__'] }}",
    "{{ lipsum['__glo\\\r\nbals__'] }}",
    "{{ x.__init__['__globals__'] }}",
    "{{ (x.__init__)['__globals__'] }}",
    "{{ '{0.__init__.__globals__}'.format(x) }}",
    "{% macro m() %}{% endmacro %}{{ m._environment.template_class }}",
    "{% macro m() %}{% endmacro %}{{ m['_environment'].template_class }}",
    "{% block b %}{{ self.b._context.environment }}{% endblock %}",
]


def test_a_template_runs_code_without_a_sandbox(tmp_path, monkeypatch):
    """llama-cpp-python rendered templates in this way."""
    monkeypatch.chdir(tmp_path)
    jinja2.Environment().from_string(POPEN).render()
    assert (tmp_path / "MARK").exists()


def test_a_macro_runs_code_without_a_dunder(tmp_path, monkeypatch):
    """A macro has an environment, which compiles any Python code."""
    monkeypatch.chdir(tmp_path)
    code = "open('MARK', 'w'); root = iter; blocks = {}; name = debug_info = ''"
    compiled = f'm._environment._compile("{code}", "x")'
    call = f"m._environment.template_class.from_code(m._environment, {compiled}, {{}})"
    jinja2.Environment().from_string(f"{{% macro m() %}}{{% endmacro %}}{{{{ {call} }}}}").render()
    assert (tmp_path / "MARK").exists()


@pytest.mark.parametrize("template", ESCAPES)
def test_template_code_finds_attributes_out_of_the_sandbox(find, template):
    """No chat template needs the attributes."""
    (finding,) = find(**{"tokenizer_config.json": {"chat_template": template}})
    assert (finding.rule, finding.severity) == ("template-code", Severity.ERROR)


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("chat_template.jinja", POPEN),
        ("additional_chat_templates/tool.jinja", POPEN),
        ("tool_chat_template_x.jinja", POPEN),
        ("chat_template.json", {"chat_template": POPEN}),
        ("processor_config.json", {"chat_template": POPEN}),
        ("tokenizer_config.json", {"chat_template": [{"name": "tool", "template": POPEN}]}),
        ("tokenizer_config.json", {"chat_template": {"tool": POPEN}}),
    ],
)
def test_templates_are_found_in_every_file_of_a_folder(find, file, content):
    """transformers reads all of them."""
    (finding,) = find(**{file: content})
    assert finding.rule == "template-code"


def test_settings_next_to_weights_that_are_named_alone_are_checked(find, tmp_path, statecli):
    """`from_pretrained` of the folder loads both."""
    find(**{"tokenizer_config.json": {"chat_template": POPEN}, "additional_chat_templates/x.jinja": POPEN})
    (tmp_path / "config.json").write_text("{}")
    result = statecli("audit", tmp_path / "model.safetensors", "-f", "json")
    assert result.code == 1
    assert {finding["target"].rpartition("/")[2] for finding in result.json["findings"]} == {
        "tokenizer_config.json",
        "x.jinja",
    }
    (tmp_path / "model.safetensors").rename(tmp_path / "a.safetensors")
    assert statecli("audit", tmp_path / "a.safetensors").code == 0


@pytest.mark.parametrize(
    ("file", "rules"),
    [("chat_template.jinja", ["template-code"]), ("tokenizer_config.json", ["remote-code", "template-code"])],
)
def test_padding_does_not_hide_a_template(find, monkeypatch, file, rules):
    """A file too large to be searched is as bad as a file with such attributes."""
    monkeypatch.setattr(settings_files, "_MAX_BYTES", 100)
    findings = find(**{file: " " * 100 + POPEN})
    assert [finding.rule for finding in findings] == rules
    assert findings[-1].severity is Severity.ERROR
    assert f"{file} was not searched for attributes that give access to all of Python: is too" in findings[-1].message


def test_template_of_a_web_page_is_not_a_chat_template(find):
    """A template for a page of documents may use any attribute."""
    assert not find(**{"page.jinja": "{{ cls.__name__ }}", "templates/page.jinja": "{{ cls.__doc__ }}"})


@pytest.mark.parametrize("padding", [0, 100_000])
def test_template_of_a_gguf_file_is_searched_to_its_end(padding, tmp_path):
    """Also a template that is too long to be shown."""
    template = "{# " + "a" * padding + " #}" + POPEN
    write_gguf(tmp_path / "a.gguf", {"w": VALUES}, chat_template=template)
    (target,) = audit(Request((str(tmp_path / "a.gguf"),))).targets
    assert [finding.rule for finding in target.findings] == ["template-code"]


def test_template_in_a_shard_is_named_with_its_file(tmp_path):
    """Only the first file of a split model has the metadata."""
    write_gguf(tmp_path / "m.gguf", {"v": VALUES, "w": VALUES}, split=1, chat_template=POPEN)
    findings = [finding for target in audit(Request((str(tmp_path),))).targets for finding in target.findings]
    (message,) = [finding.message for finding in findings if finding.rule == "template-code"]
    assert "m-00001-of-00002.gguf: tokenizer.chat_template" in message


def test_an_audit_parses_the_header_of_a_gguf_file_once(tmp_path, monkeypatch):
    """The reader of the tensors keeps the whole templates."""
    write_gguf(tmp_path / "a.gguf", {"w": VALUES}, chat_template=POPEN)
    read_counts, calls = gguf._read_counts, []
    monkeypatch.setattr(gguf, "_read_counts", lambda header: calls.append(header) or read_counts(header))
    (target,) = audit(Request((str(tmp_path / "a.gguf"),))).targets
    assert [finding.rule for finding in target.findings] == ["template-code"]
    assert len(calls) == 1


def test_only_an_audit_searches_templates(tmp_path, monkeypatch, statecli):
    """inspect and diff do not compile the patterns."""
    monkeypatch.setattr("statecli.pickle_scan.template_code._ESCAPE", None)
    path = write_gguf(tmp_path / "a.gguf", {"w": VALUES}, chat_template=POPEN)
    assert statecli("inspect", path).code == statecli("diff", path, path).code == 0
    assert "template-code" not in statecli("inspect", path).out


HEADER = "<|start_header_id|>"
#: Templates of ordinary models.
ORDINARY = {
    "ChatML": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "Llama 3": "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '"
    + HEADER
    + "' + "
    "message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}"
    "{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}",
    "Llama 3.1": "{%- if not date_string is defined %}{%- if strftime_now is defined %}{%- set date_string = "
    "strftime_now('%d %b %Y') %}{%- endif %}{%- endif %}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}"
    "{%- set tool_call = message.tool_calls[0].function %}{{- '\"parameters\": ' }}{{- tool_call.arguments | tojson }}",
    "Llama 2": "{% if messages[0]['role'] == 'system' %}{% set system_message = messages[0]['content'] %}{% endif %}"
    "{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate!') }}"
    "{% endif %}{{ '<<SYS>>\n' + system_message + '\n<</SYS>>\n\n' }}",
    "Mistral": '{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}'
    "{%- set ns = namespace(index=0) %}{%- for message in loop_messages %}{%- if not (message.tool_calls is defined) %}"
    "{%- set ns.index = ns.index + 1 %}{%- endif %}{%- endfor %}{%- for key, val in tool.items() if key != 'return' %}"
    "{%- if val is string %}{{- '\"' + key + '\": \"' + val + '\"' }}{%- endif %}{%- endfor %}",
    "Qwen 2.5": "{%- if tools %}{{- '<|im_start|>system\\n' }}{%- endif %}{%- if (message.role == 'user') or (message."
    "role == 'assistant' and not message.tool_calls) %}{%- endif %}{%- if loop.last or (messages[loop.index0 + 1].role "
    "!= 'tool') %}{{- '<|im_end|>\\n' }}{%- endif %}",
    "Qwen 3": "{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}{%- for message in "
    "messages[::-1] %}{%- set index = (messages|length - 1) - loop.index0 %}{%- if ns.multi_step_tool and not("
    "message.content.startswith('<tool_response>')) %}{%- endif %}{%- endfor %}{%- set content = message.content.split("
    "'</think>')[-1].lstrip('\\n') %}{%- set r = message.content.split('</think>')[0].split('<think>')[-1] %}",
    "DeepSeek": "{%- if not add_generation_prompt is defined %}{% set x = false %}{% endif %}"
    "{% set ns = namespace(is_first=false) %}{{'<｜tool▁calls▁begin｜>' + tool['type'] + '<｜tool▁sep｜>' + '\\n'}}",
    "Gemma": "{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}",
    "Phi 3": "{{'<|' + message['role'] + '|>' + '\n' + message['content'] + '<|end|>\n' }}{{ eos_token }}",
    "Command R": "{%- macro json_to_python_type(json_spec) %}{%- set types = {'string': 'str'} %}"
    "{%- if types[json_spec.type] is defined %}{{- types[json_spec.type] }}{%- elif json_spec.type == 'array' %}"
    "{{- 'List[' + json_to_python_type(json_spec['items']) + ']'}}{%- endif %}{%- endmacro %}"
    "{{ '<|START_OF_TURN_TOKEN|>' }}{%- for n, fields in tool.parameter_definitions|dictsort %}{{ n }}{% endfor %}",
    "Hermes": "{%- for p in tool.parameters.properties | items %}{{ p[0] ~ p[1]|default({}, true) }}{% endfor %}",
    "Zephyr": "{% if message['role'] == 'user' %}\n{{ '<|user|>\n' + message['content'] + eos_token }}\n{% endif %}",
    "Falcon": "{{ message['role']|capitalize + ': ' + message['content']|replace('\r\n', '\n')|replace('__', '_') }}",
    "Vision": "{% for content in message['content'] %}{% if content['type'] == 'image' or 'image' in content or "
    "'image_url' in content %}{% set image_count.value = image_count.value + 1 %}{{ '<__media__>' }}{% endif %}"
    "{% endfor %}{{ message['content']|map(attribute='text')|join('__') }}{{ _private }}",
    "Granite": "{%- set documents = documents | selectattr('title') | map(attribute='doc_id') | join(', ') %}"
    "{%- generation %}{{ message['content'] }}{%- endgeneration %}",
    "Code": "In Python, write if __name__ == '__main__'. {{ messages[0]['content'] }} Use `def __init__(self)`.",
    "Classes": "{{ 'Call super().__init__() first, and print type(x).__name__ or f.__doc__.' }}"
    "{{ 'Create \"__init__.py\".' }}\\N{NO SUCH NAME}",
    "gpt-oss": "{%- macro render_typescript_type(param_spec, is_nullable=false) -%}{%- if param_spec.enum is defined "
    "and param_spec.enum|length > 0 -%}{{- param_spec['enum']|join('\" | \"') -}}{%- endif -%}{%- endmacro -%}"
    "{%- if param_spec.oneOf[0].type == 'object' %}{{- model_identity or 'You are ChatGPT' }}{% endif %}",
}


@pytest.mark.parametrize("name", ORDINARY)
def test_template_code_spares_templates_of_ordinary_models(find, name):
    """The templates use macros, `namespace`, filters and methods of texts."""
    assert not find(**{"tokenizer_config.json": {"chat_template": ORDINARY[name]}})


@pytest.mark.parametrize("part", [". " * 4, "{a" * 4, "['__", "| attr ", "_A__", "\\N{", "\\N{A", "'__init__.", "\\\r"])
def test_a_long_template_is_searched_in_linear_time(part):
    """Repeated beginnings of the patterns do not slow the search down: four times the text takes four times as long."""
    short, long = (min(_measure_search(part * count) for _ in range(3)) for count in (10_000, 40_000))
    assert long < 10 * short + 0.05


def _measure_search(template):
    start = time.process_time()
    assert find_escape(template) is None
    return time.process_time() - start
