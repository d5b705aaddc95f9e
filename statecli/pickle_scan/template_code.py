"""Find attributes in a chat template that lead out of Jinja's sandbox.

A chat template is a Jinja program. Without a sandbox, `x.__init__.__globals__` gives a template every function of
Python (CVE-2024-34359 of llama-cpp-python). The search does not parse the template, so that no error of a parser hides
an attribute. It finds a name after a dot and a text in quotes that is the name or begins with the name and a dot. It
also finds a name in a field of `format`. It does not find a name that the template computes from shorter texts.
"""

from __future__ import annotations

import re
import unicodedata
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType, TracebackType

from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use

#: Types that a template reaches without computing a name.
_TYPES = (object, type, BuiltinFunctionType, FunctionType, MethodType, ModuleType, TracebackType, dict, list, str, int)
#: Dunder attributes of modules and functions, attributes of macros and blocks that lead to Jinja's environment (it
#: compiles and runs any Python code), and attributes without an underscore that Jinja's sandbox refuses.
_FURTHER_NAMES = (
    "_environment _context"
    " __builtins__ __import__ __loader__ __spec__ __file__ __path__ __wrapped__"
    " gi_frame gi_code cr_frame cr_code ag_frame ag_code f_back f_builtins f_globals f_locals tb_frame tb_next"
    " func_globals func_code func_closure im_func im_self"
)
#: Names that prompts about Python mention (`super().__init__()`, `"__init__.py"`). Only a second attribute leads on.
_MENTIONED_NAMES = frozenset(["__init__", "__name__", "__doc__"])
_ALL_NAMES = {*(name for cls in _TYPES for name in dir(cls) if name.startswith("__")), *_FURTHER_NAMES.split()}
_NAMES = "|".join(sorted(_ALL_NAMES))
_TELLING_NAMES = "|".join(sorted(_ALL_NAMES - _MENTIONED_NAMES))
_SIGNS = (
    compile_on_use(rf"\.\s*(?P<name>{_TELLING_NAMES}|_[A-Z]\w+__\w+)(?!\w)"),
    compile_on_use(rf"['\"](?P<name>(?:{_NAMES})(?=['\"])|(?:{_TELLING_NAMES})(?=\.))"),
    compile_on_use(rf"\{{\w*[.\[](?P<name>{_NAMES})(?!\w)"),
    # A text of the filter `attr` that is not a plain name, such as `'__cl' ~ 'ass__'` or a variable.
    compile_on_use(r"\|\s*(?P<name>attr)\s*\(\s*(?!['\"][A-Za-z]\w*['\"]\s*[,)])"),
    # The first half of a name in a subscript.
    compile_on_use(r"\[\s*['\"](?P<name>__\w*)['\"]"),
)
#: Escapes in the texts of a template; a line break after a backslash is dropped.
_ESCAPE = compile_on_use(
    r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|N\{([^{}\\]{1,100})\}|([0-7]{2,3})|\r\n|\r|\n)"
)


def find_escape(template: str) -> str | None:
    """Return the first attribute or filter in a template that gives access to all of Python; else None."""
    text = _ESCAPE.sub(_decode_escape, template)
    for sign in _SIGNS:
        match = sign.search(text)
        if match is not None:
            return match["name"]
    return None


def describe_escape(name: str, escape: str) -> str:
    """Return text that explains the danger of a template with the attribute or filter `escape`."""
    return f"{name}: the chat template uses {quoting.name(escape)}, which gives access to all functions of Python"


def _decode_escape(match: re.Match[str]) -> str:
    if match[4]:
        try:
            return unicodedata.lookup(match[4])
        except KeyError:
            return match[0]
    digits = match[1] or match[2] or match[3]
    if not digits and not match[5]:
        return ""
    code = int(digits, 16) if digits else int(match[5], 8)
    return chr(code) if code < 0x110000 else match[0]
