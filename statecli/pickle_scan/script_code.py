"""Find calls in the code of a TorchScript archive that use files, Python or operators of another library.

`torch.jit.load`, and `torch.load` of such an archive, compile the text in `code/` and run each `__setstate__` in this
text. All other code runs when the module is called. The functions can call torch's operators, and a few of these read
and write files. The text is searched, not parsed. A path to such an operator begins with `torch` or `ops`, and to a
class of C++ with `__torch__`. Any other name for these is reported, because torch's printer never writes other names.
Methods of values are aten operators with an argument called `self`; other methods have a `def` in the archive. Sources:
torch/csrc/jit of torch 2.13 (serialization/import_source.cpp, frontend/lexer.h, frontend/sugared_value.cpp).
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice, pairwise
from typing import NamedTuple

from statecli.core.grouping import group_by
from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import packed_weights, program_operators
from statecli.pickle_scan.step_budget import Budget, Steps

#: Namespaces of C++ classes in which torch's own archives keep packed weights.
_PACKED_NAMESPACES = frozenset(["quantized", "rnn", "sparse", "mkldnn", "xnnpack", "vulkan", "metal", "_nnapi"])
_CPP_CLASS_PATH = ("__torch__", "torch", "classes")
_RENAMED_HARM = "gets a second name in the code, so statecli cannot check calls by the second name"
#: White space and comments, except type comments, which are tokens.
_SPACE = r"(?:\s|\\\n|\#(?! type:)[^\n]*\n)*"
_SPACES = rf"(?:\s|\\\n|\#(?! type:)[^\n]*\n){_SPACE}"
#: Words that cannot be methods, because a dot before such a word ends a number.
_KEYWORD = (
    "(?:is|not|in|and|or|if|else|elif|for|while|as|with|return|lambda|assert|raise|pass|del|global|import|class|def)"
)
#: Places that are inspected, and strings and comments, whose contents are skipped.
_MENTION = compile_on_use(
    r"""(?P<quote>\"\"\"|\'\'\'|["\'])"""
    r"|(?P<comment>\#(?! type:)[^\n]*)"
    rf"|(?<![\w.])(?P<path>(?:torch|ops|__torch__)\b(?:{_SPACE}\.{_SPACE}\w+)*)(?P<after>{_SPACE}(?::|=(?!=)))?"
    # After white space, a root of a path is not a method: the dot ends a number (`1.`).
    rf"|\.(?!{_SPACES}(?:torch|ops|__torch__)\b){_SPACE}(?!{_KEYWORD}\b)(?P<method>[A-Za-z_]\w*)(?P<called>{_SPACE}\()?"
    # torch's lexer reads `is not` as one token before a letter too: `1 is nottorch.save` is `1 is not torch.save`.
    r"|(?P<glued>(?:is not|not in)(?=\w))"
    # The dot belongs to the number and begins no method: `1. is not`.
    r"|(?<![\w.])\d[\d.]*(?:[eE][-+]?\d+)?j?(?P<glued_to_number>(?=[A-Za-z_])(?![eE][-+]?\d|j(?!\w)))?",
    re.ASCII,
)
_GLUED_HARM = "has no space before the next word; torch never writes this, and scanners may miss the next word"
#: Stops of the search in a string, by its quotes: an escape, the end of the string, the end of its line.
_STRING_STOPS = {
    '"': re.compile(r'\\.|"|\n', re.DOTALL),
    "'": re.compile(r"\\.|'|\n", re.DOTALL),
    '"""': re.compile(r'\\.|"""', re.DOTALL),
    "'''": re.compile(r"\\.|'''", re.DOTALL),
}
#: Longest text joined from adjacent strings, in characters, because getattr takes the name of a method from them.
_MAX_JOINED_CHARACTERS = 200
_ESCAPE = compile_on_use(r"\\(?:([0-7]{3})|x([0-9a-fA-F]{2})|\n)")
_ONLY_SPACE = compile_on_use(_SPACE)
#: Methods of the C++ classes with packed weights, and of all classes.
_METHODS_OF_CLASSES = frozenset(["unpack", "__getstate__", "__setstate__", "__init__", "__new__"])
_DEFINED_FUNCTION = compile_on_use(rb"\bdef\s+([A-Za-z_]\w*)")
_WORD = compile_on_use(r"\w+", re.ASCII)
_COMMENT = compile_on_use(r"\#[^\n]*")
_DEF = compile_on_use(r"^[^\S\n]*def (\w+)", re.MULTILINE | re.ASCII)
#: Name of an operator in the bytecode of the lite interpreter: a string of its pickle, with any opcode. After a length,
#: only that many bytes are the name.
_BYTECODE_OPERATOR = compile_on_use(rb"(?:X(.)\0\0\0|\x8c(.)|\x8d(.)\0{7}|(?<!\w))(\w+::\w+)", re.DOTALL)


_SETSTATE, _GETSTATE = "__setstate__", "__getstate__"
#: Strings, and comments except type comments.
_STRING_OR_COMMENT = compile_on_use(r"""(?P<quote>\"\"\"|\'\'\'|["\'])|\#(?! type:)[^\n]*""")
_FUNCTION = compile_on_use(r"\bdef\s+(\w+)", re.ASCII)
_CLASS = compile_on_use(r"\bclass\s+(\w+)", re.ASCII)
#: Operations in a function: a call of a method of `self`, another call, a loop, an operator between values, a call of a
#: nameless value.
_CALL_OR_LOOP = compile_on_use(
    r"\(\s*self\s*\)\s*\.\s*(?P<own>\w+)\s*\("
    r"|(?P<odd>\b(?:while|for|with|lambda|getattr)\b|(?<!\.)\bself\s*=(?!=)|[)\]]\s*\((?!\))|\*\*|<<|>>|[+*/%@&^~]"
    r"|(?<=[\w)\]])\s+-(?!>))"
    # The whole path, called or not, because matches from its second word on would read a long path again and again.
    r"|(?<!\bdef )(?<!\bclass )(?<![\w.])(?P<path>(?:\w+\s*\.\s*)*\w+)(?P<called>\s*\()?"
    r"|\.\s*(?P<method>\w+)\s*\(",
    re.ASCII,
)
#: Characters of code that are read in one step, even if each character is a token.
CHARACTERS_PER_STEP = 6
#: Parameter `self` of a class that the archive defines.
_SELF = compile_on_use(r"\(\s*self\s*:\s*__torch__\s*\.(?!\s*torch\s*\.\s*classes\b)")
#: Functions that unpack a state, compare and raise errors. They read no memory by an index in a tensor, and create no
#: such index.
_HARMLESS_BUILTIN_NAMES = (
    "if elif else return in not and or is assert raise annotate unchecked_cast uninitialized isinstance int float bool "
    "str"
)
_HARMLESS_BUILTINS = frozenset(_HARMLESS_BUILTIN_NAMES.split())
_HARMLESS_METHOD_NAMES = (
    "eq ne lt le gt ge len __is__ __isnot__ __not__ __contains__ __getitem__ format list dim dtype device detach clone "
    "contiguous t to unpack"
)
_HARMLESS_METHODS = frozenset(_HARMLESS_METHOD_NAMES.split())
_PACKING_OPERATOR = compile_on_use(
    r"(?:quantized|_quantized|prepacked|mkldnn_prepacked|xnnpack|rnn)::\w*(?:prepack|unpack|make_\w+_params)\w*"
    r"|prim::(?:RaiseException|unchecked_cast|dtype|device|data)"
)
#: Whole call that packs a convolution.
_PACK_CALL = compile_on_use(r"\bops\.quantized\.conv\w*_prepack\((?P<args>[^()]*)\)", re.ASCII)
#: Assignment to an attribute that packing divides by. A match begins at the last such target, because matches from the
#: other targets would read a long line again and again.
_DIVISOR_ASSIGNMENT = compile_on_use(
    r"\.\s*(?:stride|dilation|groups)\s*(?:,(?:(?!\.\s*(?:stride|dilation|groups)\b)[^=\n])*)?=(?!=)", re.ASCII
)
#: The same assignment from a number of the state, as torch writes it.
_ASSIGNMENT_FROM_STATE = compile_on_use(
    r"^[ \t]*self\.(?P<name>stride|dilation|groups) = \(state\)\[(?P<place>\d{1,2})\][ \t]*$", re.ASCII | re.MULTILINE
)
_CONVOLUTION_MODULE = compile_on_use(r"quantized\W+(?:dynamic\W+)?modules\W+conv", re.ASCII | re.IGNORECASE)
_STATE = compile_on_use(r"(?<![\w.])state\b", re.ASCII)
#: Names separated by commas, and the equals sign if a value is assigned to them.
_NAMES = compile_on_use(r"(?<![\w.])(?P<names>\w+(?: *, *\w+)*) *,? *(?P<assigned>=(?!=))?", re.ASCII)
#: Longest line, and longest arguments of a call that packs a convolution, in characters; torch writes some dozens.
_MAX_PACKING_CHARACTERS = 1000
_DIVISOR_CONSTANT = compile_on_use(r"\b(?:stride|dilation|groups)\s*:\s*Final", re.ASCII)
#: Largest number of variables through which a number is followed.
_MAX_ASSIGNMENTS = 8
_OTHER_NUMBERS_HARM = (
    "may get other numbers from __setstate__ than the file saves for the quantized convolution; statecli checked "
    "only the saved numbers"
)
_MAX_LISTED_CALLS = 8
#: The type of a parameter with a default.
_ANNOTATION = compile_on_use(r":[\w.,\[\]\s]*(?==)")
_BRACKET = compile_on_use(r"[()]")
#: Declaration of a class constant, up to its value; and brackets and line ends, which may end the value.
_CONSTANT = compile_on_use(r"\bFinal\b(?:(?!\bFinal\b)[^=])*=(?!=)", re.ASCII)
_END_OF_STATEMENT = compile_on_use(r"[()\[\]{}\n]")
_RUNS_HARM = "__setstate__ runs during loading, although __setstate__ should only pack weights"
_DEFAULT_HARM = "computes the default value of a parameter during loading"
_CONSTANT_HARM = "computes a constant of a class during loading"
_UNBOUNDED_HARM = (
    "__setstate__ runs during loading, and statecli cannot predict whether this code ends or what it computes"
)


class Call(NamedTuple):
    """Call that the code mentions at byte `at`, in line `line`.

    `why` is None for an unknown operator; `on_load`: loading runs the function with this mention.
    """

    module: str
    name: str
    at: int
    line: int
    why: str | None
    on_load: bool


def list_functions(codes: Iterable[bytes]) -> frozenset[str]:
    """Return the names of all functions of an archive's code."""
    return frozenset(match[1].decode() for code in codes for match in _DEFINED_FUNCTION.finditer(code))


def find_calls(code: bytes, steps: Steps, defined_names: Collection[str] | None = None) -> Iterator[Call]:
    """Yield each call that may do more than compute. Repeated calls are yielded once. Raises OutOfSteps.

    `defined_names` has the names of all functions of the archive; None for the functions of this text.
    """
    defined_names = list_functions([code]) if defined_names is None else defined_names
    text = code.decode("latin-1")  # the names are ASCII, and each byte becomes a character
    yielded_names: set[tuple[str, str]] = set()
    functions = _DEF.finditer(text)
    function, next_function = "", next(functions, None)
    line, counted_to = 1, 0
    for module, name, at, why in _iter_mentions(text, steps, defined_names):
        if (module, name) not in yielded_names:
            yielded_names.add((module, name))
            while next_function and next_function.end() <= at:
                steps.take(Budget.TEXT)
                function, next_function = next_function[1], next(functions, None)
            line, counted_to = line + text.count("\n", counted_to, at), at
            yield Call(module, name, at, line, why, function == _SETSTATE)


def find_calls_on_load(codes: Sequence[bytes], steps: Steps, records: Sequence[str] = ()) -> Iterator[tuple[int, Call]]:
    """Yield the operators and loops that loading may run, except those that pack weights.

    These calls are in defaults of parameters, in constants of classes, and in functions called by a `__setstate__`.

    Yields pairs (number of the text, call). `codes` are all texts of an archive, `records` their names. A function may
    run if `__setstate__` or another special method mentions its name, in any meaning. Raises OutOfSteps.
    """
    sources = [_Source(code.decode("latin-1")) for code in codes]
    texts = [source.text for source in sources]
    has_setstate = any(_SETSTATE in text for text in texts)
    functions = [
        function
        for n, text in enumerate(texts)
        if has_setstate or ("=" in text and (_FUNCTION.search(text) or "Final" in text))
        for function in _split_functions(n, Strings(text, steps))
    ]
    for function in functions:
        for part, why in _iter_evaluated_parts(function):
            steps.take(Budget.TEXT, 1 + len(part.text) // CHARACTERS_PER_STEP)
            calls_of_part = islice(_find_computing_calls(part, sources[function.number], ()), 1)
            yield from ((function.number, call._replace(why=why)) for call in calls_of_part)
    if not has_setstate:
        return
    by_name = group_by(functions, lambda function: function.name)
    classes = {calls[1] for function in functions for calls in _CLASS.finditer(function.text)}
    defined_names = by_name.keys() | classes
    waiting = [name for name in by_name if name.startswith("__") and name != _GETSTATE]
    reached_names = set(waiting)
    while waiting:
        for function in by_name[waiting.pop()]:
            steps.take(Budget.TEXT, 1 + len(function.text) // 8)
            words = set(_WORD.findall(function.text)) & by_name.keys()
            waiting.extend(words - reached_names)
            reached_names |= words
            steps.take(Budget.TEXT, len(function.text) // CHARACTERS_PER_STEP)
            calls = list(_find_computing_calls(function, sources[function.number], defined_names))
            record = records[function.number] if records else ""
            calls.extend(_find_packing_calls(function, sources[function.number], record, steps))
            if calls:
                others = list(dict.fromkeys(f"{call.module}.{call.name}" for call in calls[1:]))
                yield function.number, calls[0]._replace(why=f"{calls[0].why}{_list_other_calls(others)}")


def _list_other_calls(names: list[str]) -> str:
    more = f" and {len(names) - _MAX_LISTED_CALLS} more" if len(names) > _MAX_LISTED_CALLS else ""
    return f"; loading also runs {', '.join(names[:_MAX_LISTED_CALLS])}{more}" if names else ""


class _Source:
    """Text of a code record. Its line ends are searched once for all calls."""

    def __init__(self, text: str) -> None:
        self.text = text

    @cached_property
    def _line_ends(self) -> list[int]:
        return [match.start() for match in re.finditer("\n", self.text)]

    def find_line(self, at: int) -> int:
        """Return the line number of the character at `at`, from 1 on."""
        return bisect_left(self._line_ends, at) + 1

    @cached_property
    def has_divisor_constant(self) -> bool:
        """True if a class in the text declares a constant that a convolution divides by."""
        return _DIVISOR_CONSTANT.search(self.text) is not None


class _Function(NamedTuple):
    """Function in text `number` of an archive, from byte `at` on. `text` has the words of strings and no comments."""

    number: int
    name: str
    at: int
    text: str


def blank_strings(text: str, steps: Steps) -> str:
    """Return the text with spaces in place of strings and comments. Raises OutOfSteps.

    A string of several lines, which torch never writes, keeps its first quote.
    """
    strings, parts, at = Strings(text, steps), [], 0
    while match := _STRING_OR_COMMENT.search(text, at):
        end = strings.find_end(match["quote"], match.start()) if match["quote"] else match.end()
        opaque = text[match.start() : end]
        is_long = match["quote"] is not None and (len(match["quote"]) > 1 or "\n" in opaque)
        parts += [text[at : match.start()], match["quote"][0] if is_long else " ", " " * (len(opaque) - 1)]
        at = end
    return "".join([*parts, text[at:]])


def _split_functions(number: int, strings: Strings) -> Iterator[_Function]:
    """Yield each function with the text up to the next function; code before the first function has no name."""
    words, blank, at = [], [], 0
    while match := _STRING_OR_COMMENT.search(strings.text, at):
        end = strings.find_end(match["quote"], match.start()) if match["quote"] else match.end()
        space = " " * (end - match.start())
        # A string may be the name of an attribute, but defines no function.
        word_text = re.sub(r"\W", " ", strings.text[match.start() : end]) if match["quote"] else space
        code = strings.text[at : match.start()]
        words += [code, word_text]
        blank += [code, space]
        at = end
    text = "".join([*words, strings.text[at:]]).replace("\\\n", "  ")
    code = "".join([*blank, strings.text[at:]]).replace("\\\n", "  ")
    starts = [(0, ""), *((match.start(), match[1]) for match in _FUNCTION.finditer(code)), (len(text), "")]
    for (start, name), (end, _) in pairwise(starts):
        yield _Function(number, name, start, text[start:end])


def _iter_evaluated_parts(function: _Function) -> Iterator[tuple[_Function, str]]:
    """Yield the parts of a function that loading evaluates, each with the harm of a call in this part.

    These parts are the defaults of parameters, and constants of classes: `k : Final[int] = len(...)`. Every value in a
    list of parameters is a default. `float("inf")` counts as a value, not as a call.
    """
    parameters = _extract_parameters(function.text) if function.name else ""
    if "=" in parameters:
        defaults = _ANNOTATION.sub(lambda match: " " * len(match[0]), parameters)
        yield function._replace(text=defaults), _DEFAULT_HARM
    end = 0
    while match := _CONSTANT.search(function.text, end):
        statement = _extract_statement(function.text, match.end())
        end = match.end() + len(statement)
        yield function._replace(at=function.at + match.end(), text=statement), _CONSTANT_HARM


def _extract_statement(text: str, start: int) -> str:
    """Return the rest of a statement from `start`, up to the end of a line outside of brackets."""
    depth = 0
    for match in _END_OF_STATEMENT.finditer(text, start):
        if match[0] == "\n" and depth <= 0:
            return text[start : match.start()]
        depth += {"\n": 0}.get(match[0], 1 if match[0] in "([{" else -1)
    return text[start:]


def _extract_parameters(text: str) -> str:
    """Return the beginning of a function's text, up to the end of its parameters."""
    depth = 0
    for bracket in _BRACKET.finditer(text):
        depth += 1 if bracket[0] == "(" else -1
        if depth == 0:
            return text[: bracket.end()]
    return text


def _find_computing_calls(function: _Function, source: _Source, names: Collection[str]) -> Iterator[Call]:
    """Yield the calls of a function that do more than unpack a state or pack weights.

    `names` are the names defined by the archive.
    """
    has_self = _SELF.search(function.text) is not None
    assigned = _list_assignments(function.text).keys()
    for match in _CALL_OR_LOOP.finditer(function.text):
        if match["path"] and not match["called"]:
            continue
        at = function.at + match.start()
        line = source.find_line(at)
        if match["odd"]:
            yield Call("TorchScript", match["odd"].strip(), at, line, _UNBOUNDED_HARM, on_load=True)
            continue
        *path, name = re.findall(r"\w+", match["own"] or match["path"] or match["method"])
        is_own = (match["own"] and has_self) or (path == ["self"] and has_self) or path[:1] == ["__torch__"]
        if not ((is_own and name in names) or _is_harmless_call(path, name, assigned, is_method=bool(match["method"]))):
            yield Call(
                ".".join(path) if path[:1] in (["torch"], ["ops"]) else "torch", name, at, line, _RUNS_HARM, True
            )


def _find_packing_calls(function: _Function, source: _Source, record: str, steps: Steps) -> Iterator[Call]:
    """Yield calls that may pack a convolution with numbers that are not from the state of its module.

    Numbers of the state are checked where the pickle is read (`packed_weights`), by the module's name.
    """
    packing = [word for word in _WORD.finditer(function.text) if "_prepack" in word[0].partition("conv")[2]]
    is_convolution = packed_weights.defines_convolution(record)
    if packing and not is_convolution:
        at = function.at + packing[0].start()
        yield Call("torch.ops.quantized", packing[0][0], at, source.find_line(at), _OTHER_NUMBERS_HARM, on_load=True)
    if not is_convolution:
        targets = [match.start() for match in _DIVISOR_ASSIGNMENT.finditer(function.text)]
        if any(not function.text.endswith("self", 0, at) for at in targets) or (
            targets and _CONVOLUTION_MODULE.search(function.text)
        ):
            at = function.at + targets[0]
            yield Call("TorchScript", "groups", at, source.find_line(at), _OTHER_NUMBERS_HARM, on_load=True)
        return
    steps.take(Budget.TEXT, 1 + len(function.text) // 8)
    assignments = _list_assignments(function.text)
    own_packings = [
        match for match in _PACK_CALL.finditer(function.text) if _has_own_numbers(match["args"], assignments, steps)
    ]
    assignments_from_state = _ASSIGNMENT_FROM_STATE.finditer(function.text) if function.name == _SETSTATE else ()
    positions = packed_weights.DIVISOR_POSITIONS
    assigned = [match for match in assignments_from_state if positions[match["name"]] == int(match["place"])]
    states = len(_STATE.findall(function.text)) - function.text.count("(state)[") - (function.name == _SETSTATE)
    counts = len(own_packings), len(assigned), function.name == _SETSTATE and states
    if counts != (len(packing), len(_DIVISOR_ASSIGNMENT.findall(function.text)), 0) or source.has_divisor_constant:
        yield Call("torch.ops.quantized", "conv_prepack", function.at, 1, _OTHER_NUMBERS_HARM, on_load=True)


#: Name -> values that are assigned to it, to the end of their lines; None if other code stands before it on the line.
_Assignments = dict[str, list[str | None]]


def _list_assignments(text: str) -> _Assignments:
    assignments: _Assignments = {}
    for line in text.split("\n"):
        is_short = len(line) <= _MAX_PACKING_CHARACTERS
        for match in _NAMES.finditer(line):
            if match["assigned"]:
                value = line[match.end() :] if is_short and not line[: match.start()].strip(" \t") else None
                for name in _WORD.findall(match["names"]):
                    assignments.setdefault(name, []).append(value)
    return assignments


def _has_own_numbers(arguments: str, assignments: _Assignments, steps: Steps) -> bool:
    """Return True if the call takes its stride, dilation and groups from attributes of the module."""
    if len(arguments) > _MAX_PACKING_CHARACTERS:
        return False
    parts = [part.strip() for part in re.split(r",(?![^\[]*\])", arguments)]
    if len(parts) not in (6, 7):
        return False
    numbers = {"stride": parts[2], "dilation": parts[-2], "groups": parts[-1]}
    return all(
        _is_from_attribute(expression, f"self.{name}", assignments, steps) for name, expression in numbers.items()
    )


def _is_from_attribute(
    expression: str, attribute: str, assignments: _Assignments, steps: Steps, depth: int = 0
) -> bool:
    """Return True if all values of an expression, a list or a variable come from this attribute of the module."""
    steps.take(Budget.TEXT, 1 + len(expression) // 8)
    expression = expression.strip().rstrip(",").strip()
    if expression.startswith("[") and expression.endswith("]"):
        sources: list[str | None] = [*expression[1:-1].split(",")]
    elif expression == attribute:
        return True
    else:
        is_name = re.fullmatch(r"[A-Za-z_]\w*", expression, re.ASCII) is not None
        sources = assignments.get(expression, []) if is_name and depth <= _MAX_ASSIGNMENTS else []
    return bool(sources) and all(
        source is not None and _is_from_attribute(source, attribute, assignments, steps, depth + 1)
        for source in sources
    )


def _is_harmless_call(path: list[str], name: str, assigned: Collection[str], *, is_method: bool) -> bool:
    if path[:1] == ["ops"]:
        return len(path) == 2 and _PACKING_OPERATOR.fullmatch(f"{path[1]}::{name}") is not None
    if not path and not is_method:  # any name may stand for an operator
        return name in _HARMLESS_BUILTINS and name not in assigned
    return len(path) < 2 and name in _HARMLESS_METHODS


def find_bytecode_calls(data: bytes, steps: Steps) -> Iterator[Call]:
    """Yield calls of harmful or unknown operators in bytecode. Raises OutOfSteps."""
    yielded_operators: set[str] = set()
    for match in _BYTECODE_OPERATOR.finditer(data):
        steps.take(Budget.TEXT)
        length = match[1] or match[2] or match[3]
        operator = (match[4][: length[0]] if length else match[4]).decode()
        why = program_operators.describe_harm(operator)
        if (why or not program_operators.is_listed(operator)) and operator not in yielded_operators:
            yielded_operators.add(operator)
            yield Call(*_split_operator(operator), match.start(4), 0, why, on_load=False)


def _iter_mentions(
    text: str, steps: Steps, defined_names: Collection[str]
) -> Iterator[tuple[str, str, int, str | None]]:
    strings, at = Strings(text, steps), 0
    joined_text, end_of_string = "", -1
    while match := _MENTION.search(text, at):
        steps.take(Budget.TEXT)
        at = strings.find_end(match["quote"], match.start()) if match["quote"] else match.end()
        if match["quote"]:
            follows = end_of_string >= 0 and _ONLY_SPACE.fullmatch(text, end_of_string, match.start())
            part = text[match.end() : at].removesuffix(match["quote"])
            joined_text, end_of_string = (
                (joined_text + part if follows and len(joined_text) < _MAX_JOINED_CHARACTERS else part),
                at,
            )
        method = match["method"] or (
            _ESCAPE.sub(_unescape, joined_text[:_MAX_JOINED_CHARACTERS]) if match["quote"] else ""
        )
        if method in program_operators.HARMFUL_METHODS or (
            match["called"] and _is_foreign_method(method, defined_names)
        ):
            yield "torch", method, match.start(), program_operators.describe_harm(f"aten::{method}")
        if match["glued"] or match["glued_to_number"] is not None:
            yield "TorchScript", match[0], match.start(), _GLUED_HARM
        names = _WORD.findall(_COMMENT.sub("", match["path"])) if match["path"] else []
        # A parameter, an attribute or an argument may have any name.
        if len(names) > 1 or (names and not match["after"]):
            mention = _resolve_path(names)
            if mention:
                yield (*mention[:2], match.start(), mention[2])


def _is_foreign_method(name: str, defined_names: Collection[str]) -> bool:
    """Return True if the called method belongs to neither the archive, nor values, nor torch's own classes."""
    return not (name in defined_names or name in _METHODS_OF_CLASSES or program_operators.is_listed(f"aten::{name}"))


def _unescape(escape: re.Match[str]) -> str:
    return chr(int(escape[1], 8) if escape[1] else int(escape[2], 16)) if escape[1] or escape[2] else ""


class Strings:
    """Finder of the ends of strings in a text. Each character is read once, even if many strings have no end.

    If a string has no end, no string that begins in it with the same quotes has one, because escapes pair the same way.
    """

    def __init__(self, text: str, steps: Steps) -> None:
        self.text = text
        self.steps = steps
        #: Offset up to which no string has an end, by its quotes.
        self._endless: dict[str, int] = {}

    def find_end(self, quote: str, at: int) -> int:
        """Return the offset after a string, or after its quote if it does not end (after two of three quotes)."""
        if at >= self._endless.get(quote, 0):
            place = at + len(quote)
            while stop := _STRING_STOPS[quote].search(self.text, place):
                self.steps.take(Budget.TEXT)
                if stop[0] == quote:
                    return stop.end()
                if stop[0] == "\n":
                    break
                place = stop.end()
            self._endless[quote] = stop.start() if stop else len(self.text)
        return at + 2 if len(quote) == 3 else at + 1


def _resolve_path(names: list[str]) -> tuple[str, str, str | None] | None:
    """Return the module, the name and the harm of a dotted name; None for an operator that only computes."""
    if names[0] == "__torch__":
        return _resolve_class(names)
    space, steps = ("aten", names[1:]) if names[0] == "torch" else (".".join(names[1:2]), names[2:])
    nested = next((at for at, name in enumerate(steps) if name != "autograd"), len(steps))
    if nested:  # a path through `autograd` leads to torch's own operators in any namespace
        space, steps = "aten", steps[nested:]
    if not steps:
        return ".".join(names), "*", _RENAMED_HARM
    operator = f"{space}::{steps[0]}"
    why = program_operators.describe_harm(operator)
    return (*_split_operator(operator), why) if why or not program_operators.is_listed(operator) else None


def _split_operator(operator: str) -> tuple[str, str]:
    space, _, name = operator.partition("::")
    return "torch" if space == "aten" else f"torch.ops.{space}", name


def _resolve_class(names: list[str]) -> tuple[str, str, str | None] | None:
    if tuple(names) == _CPP_CLASS_PATH[: len(names)] or (tuple(names[:3]) == _CPP_CLASS_PATH and len(names) == 4):
        return ".".join(names), "*", _RENAMED_HARM
    if tuple(names[:3]) == _CPP_CLASS_PATH and names[3] not in _PACKED_NAMESPACES:
        return f"torch.classes.{names[3]}", names[4], None
    return None
