"""Find the code run by loading a program of torch.export: in sizes, in names, in calls and in imports.

`torch.export.load` gives each `expr_str` of the program's JSON to `sympy.sympify`, an `eval` with Python's own
functions at hand: `__import__('os').system(...)` runs there, without any pickle. torch writes `srepr` of an expression,
or the expression as text (torch 2.5 and older). The graph becomes Python source, with the unchanged names of its
inputs, and is compiled at once: `y=__import__('os').system(...)` is a parameter with a default. The graph calls
operators; the nesting of its arguments names classes to import. The guards of the inputs are Python source too:
`ExportedProgram.module()` compiles them, and a call of the module runs them. Sources: torch/_export/serde/serialize.py
of torch 2.13 (`_parse_sym_expr`, `deserialize_graph`), torch/fx/graph.py, torch/export/_unlift.py
(`_convert_guards_code_to_fn`), torch/utils/_pytree.py, torch/utils/_sympy/functions.py, sympy/parsing/sympy_parser.py
of sympy 1.14.
"""

from __future__ import annotations

import ast
import builtins
import json
import re
import string
import unicodedata
from collections.abc import Callable, Collection, Iterator
from math import isinf, log2, prod
from typing import Any, NamedTuple

from statecli.core import quoting
from statecli.pickle_scan import operator_names, program_operators
from statecli.pickle_scan.export_arguments import TAKEN_NAMES, find_misuses
from statecli.pickle_scan.module_attributes import find_module_attribute
from statecli.pickle_scan.step_budget import Budget, Steps

#: What expressions are made of, by the names that sympy and torch have for them.
_EXPRESSION_FUNCTIONS = frozenset(
    re.findall(
        r"\w+",
        """
        Symbol Dummy Integer Rational Float Add Mul Pow Mod Max Min Abs And Or Not Xor Piecewise ExprCondPair
        Eq Ne Lt Le Gt Ge Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan floor ceiling
        FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural
        FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt
        RoundDecimal ToFloat Identity BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor
        OpaqueUnaryFn_sqrt OpaqueUnaryFn_cos OpaqueUnaryFn_cosh OpaqueUnaryFn_sin OpaqueUnaryFn_sinh
        OpaqueUnaryFn_tan OpaqueUnaryFn_tanh OpaqueUnaryFn_asin OpaqueUnaryFn_acos OpaqueUnaryFn_atan
        OpaqueUnaryFn_exp OpaqueUnaryFn_log OpaqueUnaryFn_asinh OpaqueUnaryFn_log2
        """,
    )
)
#: A number has no attribute, and so nothing behind its digits. sympy evaluates a text that is neither name nor number.
_TOKEN = re.compile(
    r"[A-Za-z]\w*(?!')|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![\w.])"
    r"|'(?:[A-Za-z_]\w*|[-+]?\d[\d_]*\.?[\d_]*(?:[eE][-+]?[\d_]+)?)'"
    r"|(?P<operator>[-+*/%<>=&|~^,(]|!=)|\)",
    re.ASCII,
)
_SPACE = re.compile(r"[ \t]*")
#: What an expression is made of for Python, which nothing of it may bind a name with.
_EXPRESSION_NODES = (
    *(ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.Starred),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop),
)
#: What guards are made of: sizes of inputs, and functions of numbers. A key of an input has no quote and no escape.
_GUARD_TOKEN = re.compile(
    r"L(?:\[(?:'[^'\"\\\r\n]*'|-?\d+)\]|\.(?:size|stride|storage_offset|item)\(\)|\.[A-Za-z]\w*(?![\w(]))+"
    r"|(?P<function>math\.(?!factorial|comb|perm)[a-z]\w*|torch\._?sym_\w+|float|int|bool|abs|max|min|round|floor|ceiling|Max|Min|Mod|FloorDiv"
    r"|IsNonOverlappingAndDenseIndicator|cast_symbool_to_symint_guardless)(?=\()"
    r"|(?P<operator>(?:not|and|or|is|in|if|else)(?!\w)|[-+*/%<>=&|~^,(]|!=)|\)|(?:None|True|False)(?!\w)"
    r"|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![\w.])",
    re.ASCII,
)


def iter_expressions(document: Any) -> Iterator[str]:
    """Yield every text under an `expr_str`."""
    stack = [document]
    while stack:
        node = stack.pop()
        if type(node) is dict:
            text = node.get("expr_str")
            if type(text) is str:
                yield text
            stack.extend(node.values())
        elif type(node) is list:
            stack.extend(node)


def is_plain_expression(text: str) -> bool:
    """Return True if the text calls only functions of expressions: no attribute, no other function, only names.

    `for` and `lambda` would give a function another meaning, and sympy has Python's own functions as values of names.
    """
    if not _consists_of(text, _TOKEN, lambda token: token[0] in _EXPRESSION_FUNCTIONS):
        return False
    if len(text) > _MAX_EXPRESSION_CHARACTERS or not text.strip():
        return True  # `describe_cost` refuses the one, sympy the other
    try:
        nodes = list(ast.walk(_parse_expression(text)))
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return False  # sympy may rewrite it to what Python takes
    return all(isinstance(node, _EXPRESSION_NODES) and _is_plain_name(node) for node in nodes)


def _parse_expression(text: str) -> ast.Expression:
    """Parse the text as sympy does, with `^` for a power."""
    return ast.parse(text.strip().replace("^", "**"), mode="eval")


def _is_plain_name(node: ast.AST) -> bool:
    name = node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.keyword) else None
    return name is None or name in _EXPRESSION_FUNCTIONS or not hasattr(builtins, name)


def is_plain_guard(text: str) -> bool:
    """Return True if the guard computes with sizes of inputs and calls only functions of numbers."""
    return _consists_of(text, _GUARD_TOKEN, lambda token: token["function"] is not None)


def _consists_of(text: str, token_of: re.Pattern[str], is_function: Callable[[re.Match[str]], bool]) -> bool:
    at, opens = 0, True
    while (at := _SPACE.match(text, at).end()) < len(text):  # type: ignore[union-attr]  # it matches nothing too
        token = token_of.match(text, at)
        if token is None or (token[0] == "(" and not opens):
            return False
        at, opens = token.end(), token["operator"] is not None or is_function(token)
    return True


#: Bits of the largest number that an expression may compute, and terms that it may have once it is multiplied out.
_MAX_BITS, _MAX_TERMS = 4096, 4096
#: Characters of one expression; those of real programs have some hundreds.
_MAX_EXPRESSION_CHARACTERS = 20_000
#: Degree of a sum and of a product: sizes are sums of products of some dimensions. sympy's common divisors and roots
#: of polynomials take minutes from a degree of some dozens.
_MAX_DEGREE_OF_SUM, _MAX_DEGREE = 10, 64
#: Functions and operators that look for a common divisor of their arguments, and how many pairs of terms these may
#: have: torch's own functions compute none of sums of more than 20 terms, and their arguments are often overestimated.
_DIVISIONS = re.compile(r".*(?:Div|Mod).*|%")
_MAX_PAIRS_OF_TERMS, _MAX_PAIRS_OF_SYMPY = 1024, 400
_DIVISIONS_OF_SYMPY = frozenset(["%", "CeilDiv"])
#: Functions and operators whose second argument is an exponent, or a number of digits.
_EXPONENT_FUNCTIONS = frozenset(
    ["Pow", "PowByNatural", "FloatPow", "LShift", "RShift", "Float", "RoundDecimal", "round", "pow"]
)
#: Whose terms are added up, in Python and in sympy.
_SUM_FUNCTIONS = frozenset(["Add", "Sub", "Max", "Min"])
#: Function -> keywords that sympy writes for it. Their values are assumptions, a number or bits.
_SYMBOL_KEYWORDS = frozenset(
    re.findall(
        r"\w+",
        """
        algebraic antihermitian commutative complex composite dummy_index even extended_negative extended_nonnegative
        extended_nonpositive extended_nonzero extended_positive extended_real finite hermitian imaginary infinite
        integer irrational negative noninteger nonnegative nonpositive nonzero odd positive prime rational real
        transcendental zero
        """,
    )
)
_KEYWORDS = {"Symbol": _SYMBOL_KEYWORDS, "Dummy": _SYMBOL_KEYWORDS, "Float": frozenset(["precision"])}
_NUMBER = re.compile(r"[-+]?[\d_]*\.?[\d_]*(?:[eE][-+]?([\d_]+))?")
#: An exponent that no float of Python has: such numbers are zero or infinite for Python, not for sympy.
_LONG_EXPONENT = re.compile(r"[\d.][eE][-+]?[\d_]{4}")


#: What follows from an expression that costs too much.
_SLOW = ", which may hang or fill the memory"


class _Unmeasurable(Exception):
    """The cost of an expression is not known, for the reason given."""


class _Cost(NamedTuple):
    """Upper bounds of the work of computing an expression.

    `bits` of its largest number, `terms` once multiplied out, its `degree`, and the degree of its `denominator`.
    `algebra`: why sympy takes too long with its polynomials; None otherwise.
    """

    bits: float
    terms: float = 1.0
    degree: float = 0.0
    denominator: float = 0.0
    algebra: str | None = None


def describe_cost(text: str, has_symbols: bool = True) -> str | None:
    """Return why computing a plain expression takes too long; None if the cost is acceptable.

    sympy computes expressions without symbols at once, even `9**9**9`; torch multiplies out expressions with symbols.
    A guard has none: Python computes it of the sizes of the inputs.
    """
    if len(text) > _MAX_EXPRESSION_CHARACTERS:
        return f"computes an expression of {len(text):,} characters{_SLOW}"
    try:
        cost = _measure_node(_parse_expression(text).body)
    except SyntaxError:
        return None  # of a guard, which torch parses in the same way
    except _Unmeasurable as error:
        return str(error)
    except (RecursionError, MemoryError, ValueError, OverflowError):
        return f"computes an expression that is nested too deeply to be checked{_SLOW}"
    if cost.bits > _MAX_BITS or _LONG_EXPONENT.search(text):
        return f"computes a number of more than {_MAX_BITS:,} bits{_SLOW}"
    if has_symbols and cost.terms > _MAX_TERMS:
        return f"multiplies out an expression to more than {_MAX_TERMS:,} terms{_SLOW}"
    return cost.algebra if has_symbols else None


def _measure_node(node: ast.AST) -> _Cost:
    """Return the cost of a node. Raises _Unmeasurable."""
    if isinstance(node, ast.Constant):
        return _Cost(_count_bits(node.value))
    if isinstance(node, (ast.Name, ast.Subscript)):  # a symbol; an input of a guard
        return _Cost(2, degree=1)
    if isinstance(node, ast.BinOp):
        operation = "%" if isinstance(node.op, ast.Mod) else type(node.op).__name__
        cost = _measure_operation(operation, [node.left, node.right])
    elif isinstance(node, ast.Call):
        cost = _measure_call(node)
    elif isinstance(node, ast.Starred):
        raise _Unmeasurable("unpacks the arguments of a function, which torch does not write")
    else:
        cost = _measure_operation("", list(ast.iter_child_nodes(node)))
    if cost.degree > (_MAX_DEGREE_OF_SUM if cost.terms > 1 else _MAX_DEGREE):
        return cost._replace(algebra=f"computes with polynomials of a degree above {_MAX_DEGREE_OF_SUM}{_SLOW}")
    return cost


def _measure_call(node: ast.Call) -> _Cost:
    """Return the cost of a call. sympy writes texts only as the name of a symbol and as the digits of a float."""
    name = ast.unparse(node.func).rpartition(".")[2]
    first = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
    bits = [2.0, *(_measure_keyword(name, keyword) for keyword in node.keywords)]
    if name in ("Symbol", "Dummy") and type(first) is str and len(node.args) == 1:
        return _Cost(max(bits), degree=1)
    if name == "Float" and type(first) is str and len(node.args) == 1:
        return _Cost(max(*bits, _count_digit_bits(first)))
    if name in ("size", "stride", "storage_offset", "item") and not node.args:  # of an input of a guard
        return _Cost(2, degree=1)
    cost = _measure_operation(name, [*node.args])
    return cost._replace(bits=max(cost.bits, *bits))


def _measure_keyword(function: str, keyword: ast.keyword) -> float:
    """Return the bits requested by a keyword. Raises _Unmeasurable for keywords not written by sympy."""
    value = keyword.value.value if type(keyword.value) is ast.Constant else None
    if keyword.arg not in _KEYWORDS.get(function, ()) or type(value) not in (bool, int):
        raise _Unmeasurable(f"calls {function} with an argument {keyword.arg or '**'}, which torch does not write")
    return float(str(value)) if keyword.arg == "precision" and type(value) is int else 0.0


def _measure_operation(operation: str, nodes: list[ast.AST | ast.expr]) -> _Cost:
    costs = [_measure_node(node) for node in nodes] or [_Cost(2)]
    algebra = next((cost.algebra for cost in costs if cost.algebra), None)
    terms, degrees = [cost.terms for cost in costs], [cost.degree for cost in costs]
    denominator = sum(cost.denominator for cost in costs)
    if operation in _EXPONENT_FUNCTIONS and len(costs) > 1:
        return _measure_power(costs, _find_literal(nodes[1]))._replace(algebra=algebra)
    bits = max(cost.bits for cost in costs) + log2(len(costs))
    if operation in ("Mult", "Mul"):
        return _Cost(sum(cost.bits for cost in costs), prod(terms), sum(degrees), denominator, algebra)
    if operation == "Div":
        return _Cost(bits, prod(terms), sum(degrees), denominator + degrees[1], algebra)
    limit = _MAX_PAIRS_OF_SYMPY if operation in _DIVISIONS_OF_SYMPY else _MAX_PAIRS_OF_TERMS
    if _DIVISIONS.fullmatch(operation) and prod(terms) > limit:
        algebra = f"computes the common divisor of polynomials of too many terms{_SLOW}"
    # sympy compares each argument of Max with all others.
    times = len(terms) if operation in ("Max", "Min") else 1
    total = times * sum(terms) if operation in _SUM_FUNCTIONS else max(terms)
    # A common denominator is the product of all.
    return _Cost(bits, total, max(degrees) + denominator, denominator, algebra)


def _measure_power(costs: list[_Cost], exponent: float | None) -> _Cost:
    base, power = costs[:2]
    factor = 2.0 ** min(power.bits, 64) if exponent is None else abs(exponent)
    # `2**(60*s0)` is the sixtieth power of `2**s0`.
    degree = factor * max(base.degree, float(exponent is None and power.degree > 0))
    terms = base.terms ** min(factor, 64)
    is_inverse = exponent is None or exponent < 0
    return _Cost(max(base.bits, 2) * factor, terms, degree, degree if is_inverse else base.denominator)


def _find_literal(node: ast.AST | ast.expr) -> float | None:
    """Return the value of a number, as Python or sympy writes it; None for other expressions."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Integer" and len(node.args) == 1:
        node = node.args[0]
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) in (int, float) and abs(value) >= 1 else None


def _count_bits(value: object) -> float:
    """Return the bits of a number. Raises _Unmeasurable for a text: sympy evaluates texts."""
    if isinstance(value, (str, bytes)):
        raise _Unmeasurable(f"evaluates the text {quoting.quote(str(value))}, which torch does not write")
    if isinstance(value, float):  # infinite for Python; a number of sympy has any exponent
        return 2.0**64 if isinf(value) else max(2.0, log2(abs(value) + 1))
    return max(2.0, log2(abs(value) + 1)) if type(value) is int else 2.0


def _count_digit_bits(digits: str) -> float:
    """Return the bits of a number in a text. Raises _Unmeasurable for other texts, because sympy evaluates them."""
    match = _NUMBER.fullmatch(digits)
    if match is None:
        raise _Unmeasurable(f"evaluates the text {quoting.quote(digits)}, which torch does not write")
    exponent = (match[1] or "0").replace("_", "")
    return 4.0 * (len(digits) + (int(exponent or 0) if len(exponent) <= _MAX_BITS else 2**64))


class ProgramCall(NamedTuple):
    """Name called or imported by loading a program, because of a text in the program.

    `why`: the known harm, unless the name tells the harm; `doer` as in a `ScannedPickle`.
    """

    text: str
    module: str
    name: str
    why: str | None = None
    called: bool = True
    doer: str | None = None


def find_program_calls(document: Any, steps: Steps) -> Iterator[ProgramCall]:
    """Yield the calls and imports of loading or calling the program, besides tensor computation. Raises OutOfSteps."""
    for text in dict.fromkeys(iter_expressions(document)):
        steps.take(Budget.TEXT, 1 + len(text))  # to parse and measure a character takes 4 to 10 µs
        if not is_plain_expression(text):
            yield ProgramCall(text, "sympy", "sympify")
        elif costs := describe_cost(text):
            yield ProgramCall(text, "sympy", "sympify", costs)
    for misuse in find_misuses(document, steps):
        module, _, name = misuse.target.removesuffix(".default").rpartition(".")
        yield ProgramCall(misuse.target, module, name, misuse.why, doer="the graph")
    bad: set[str] = set()
    texts = dict.fromkeys(_iter_texts(document, steps))
    yield from _find_nested_names([text for key, text in texts if key in _ATTRIBUTE_KEYS])
    for key, text in texts:
        call = _CHECKS[key](text) if key in _CHECKS else None
        if call:
            yield call
        elif text not in bad and not _is_valid_name(key, text):
            bad.add(text)
            why = f"compiles the graph with {quoting.quote(text)} in place of a name"
            yield ProgramCall(text, "builtins", "exec", why, doer="loading the file")


def _is_valid_name(key: str, text: str) -> bool:
    """Return True if the text stays a name wherever torch writes the text into source.

    Python normalizes names in source, so that one of other letters may come out as `self`.
    """
    if not text.isascii() and key not in _VALUE_KEYS and unicodedata.normalize("NFKC", text) != text:
        return False
    if key in _NAME_KEYS:
        is_taken = key == "forward_arg_names" and text.lstrip("*") in TAKEN_NAMES
        return _NAME.fullmatch(text) is not None and not is_taken
    if key == _MODULES_KEY:
        return not _BREAKS_OF_PATH.search(text)
    return key in _VALUE_KEYS or (key != _UNREAD_KEY and not _BREAKS.search(text))


#: Texts that torch writes into the source of `forward` as they are, or in quotes, before it compiles that as it loads.
_NAME_KEYS = frozenset(["name", "as_name", "forward_arg_names", "the member"])
_NAME = re.compile(r"\*{0,2}\w*")
_BREAKS = re.compile(r"[\"'\\\n\r]")
#: In the paths of modules torch itself writes the quotes of `L['self']`, and it puts them into double quotes.
_BREAKS_OF_PATH = re.compile(r"[\"\\\n\r]")
_OPERATOR = re.compile(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?", re.ASCII)
#: Attributes of a namespace, of an operator or of an overload, which torch takes for a name in an operator's path.
_ATTRIBUTE = re.compile(r"__.*|_dir")
_ATTRIBUTE_OF_OVERLOAD = re.compile(
    r"_.*|decompose|functorch_table|has_kernel_for_\w+|is_view|name|namespace|op|op_overloads|overloadpacket|overloads"
    r"|py_functionalize_impl|py_impl|py_kernels|python_key_table|redispatch|tags"
)
#: What torch's own verifier allows, and the classes of torch's arithmetic.
_ARITHMETIC = re.compile(
    r"_operator\.(?:getitem|add|mul|sub|truediv|floordiv|mod|pow|neg|pos|abs|[lr]shift|and_|or_|xor|not_|[gl][et]|eq|ne)"
    r"|math\.(?!factorial|comb|perm)[a-z]\w*|torch\._?sym_\w+|torch\.utils\._sympy\.functions\.(?P<function>[A-Z]\w*)|builtins\.round",
    re.ASCII,
)
#: Names in the signature by which torch assigns tensors and objects to the module.
_ATTRIBUTE_KEYS = ("parameter_name", "buffer_name", "tensor_constant_name", "custom_obj_name")
#: Parts of a name that are compared with other names.
_MAX_NAME_PARTS = 100
_GUARD_KEY = "guards_code"
#: Largest number of a symbol: programs have some thousands of symbols.
_MAX_SYMBOL_NUMBER = 10**6
#: JSON in texts of the JSON: how the arguments nest.
_SPEC_KEYS = frozenset(["in_spec", "out_spec", "context"])
#: Text that a trace left for people, and the keys of what has it: torch reads it as a dict of texts, and calls nothing.
#: Only the paths of modules in it become source, in `torch.export.unflatten`.
_REMARK_KEY, _REMARKED_KEYS = "metadata", frozenset(["nodes", "graph_module"])
#: Texts that reach no source: values of operators, and texts that have a check of their own.
_VALUE_KEYS = frozenset(["as_string", "as_strings", "expr_str", _GUARD_KEY])
#: Key of what `_iter_texts` yields for classes and for JSON that it cannot read; no key of the program has a space.
_CLASS_KEY, _MEMBER_KEY, _UNREAD_KEY, _ARGUMENT_KEY = "the class", "the member", "the nesting", "the argument"
_SYMBOL_KEY, _MODULES_KEY, _KEY_OF_INPUT, _TEXT_OF_INPUT = "the symbol", "the modules", "the key", "the text"
#: Keys of what holds the value of an input: torch writes a text and the keys of dicts into the source of guards. Other
#: texts under "as_string" are values of operators, of which torch writes Python's `repr`.
_KEYS_OF_INPUTS = frozenset(["inputs", "value"])
#: Dicts whose keys are names -> what their keys are judged as.
_KEYS_OF_NAMES = {"tensor_values": "name", "range_constraints": _SYMBOL_KEY}


class _NestingObject(list[tuple[str, Any]]):
    """JSON object with nested arguments, and its repeated keys.

    torch imports the class of each object as it parses the object, also where a later key replaces the object.
    """


def _iter_texts(document: Any, steps: Steps) -> Iterator[tuple[str, str]]:
    """Yield each text with its key; the text of a list has the key of the list, a key itself the key "the argument"."""
    stack: list[tuple[str, Any]] = [("", document)]
    while stack:
        key, node = stack.pop()
        steps.take(Budget.TEXT)
        if type(node) is dict:
            yield from _iter_class_texts(node)
            if key in _KEYS_OF_NAMES:
                stack.extend((_KEYS_OF_NAMES[key], child) for child in node)
            yield from ((_ARGUMENT_KEY, below) for below in node)
            remark = _REMARK_KEY if key in _REMARKED_KEYS else None
            yield from _iter_module_paths(node.get(remark))
            text_key = _TEXT_OF_INPUT if key in _KEYS_OF_INPUTS else "as_string"
            stack.extend(
                (text_key if below == "as_string" else below, child) for below, child in node.items() if below != remark
            )
        elif type(node) is _NestingObject:
            yield from _iter_class_texts(dict(node))
            yield from ((_ARGUMENT_KEY, below) for below, _ in node)
            stack.extend(node)
        elif type(node) is list:
            stack.extend((key, child) for child in node)
        elif type(node) is str:
            yield from _iter_spec_texts(key, node, stack, steps) if key in _SPEC_KEYS else [(key, node)]


def _iter_module_paths(remark: Any) -> Iterator[tuple[str, str]]:
    """Yield the paths of the modules around a node."""
    paths = remark.get("nn_module_stack") if type(remark) is dict else None
    if type(paths) is str:
        yield _MODULES_KEY, paths


def _iter_class_texts(node: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the class named by a JSON object, and its member."""
    if type(node.get("default_factory_module")) is str:
        yield _CLASS_KEY, f"{node['default_factory_module']}:{node.get('default_factory_name')}"
    if "__enum__" in node:
        yield _CLASS_KEY, str(node.get("fqn"))
        yield _MEMBER_KEY, str(node.get("name"))


def _iter_spec_texts(key: str, text: str, stack: list[tuple[str, Any]], steps: Steps) -> Iterator[tuple[str, str]]:
    """Yield the class texts in a text of nested arguments, and put its JSON on the stack."""
    steps.take(Budget.TEXT, len(text) // 8)
    try:
        spec = json.loads(text, object_pairs_hook=_NestingObject)
    except ValueError:  # torch reads it by the same parser
        yield key, text
    except RecursionError:
        yield _UNREAD_KEY, text
    else:
        names = _find_keyword_names(text) if key == "in_spec" else []
        yield from (("name", str(name)) for name in names)
        stack.append((_KEY_OF_INPUT if key == "context" else "", spec))


def _find_keyword_names(text: str) -> list[Any]:
    """Return the names of keyword arguments, written by torch into the source of `forward`."""
    try:
        names = json.loads(json.loads(text)[1]["children_spec"][1]["context"])
    except (TypeError, KeyError, IndexError, ValueError, RecursionError):
        return []
    return (
        names
        if type(names) is list
        else [names]
        if type(names) is str
        else list(names or ())
        if type(names) is dict
        else []
    )


#: What torch.export writes for torch.func.vmap and jvp. Other arguments than theirs crash the process.
_TRANSFORM = re.compile(r"torch\._functorch\.predispatch\.\w+")


def _check_operator(text: str) -> ProgramCall | None:
    match = _OPERATOR.fullmatch(text)
    if not match:
        module, _, name = text.rpartition(".")
        arithmetic = _ARITHMETIC.fullmatch(text)
        is_known = arithmetic and arithmetic["function"] in (None, *_EXPRESSION_FUNCTIONS)
        why = None if is_known else "is not an operator of torch"
        if _TRANSFORM.fullmatch(text):
            why = "takes levels and sizes that torch does not check; run_decompositions() exports a program without it"
        return ProgramCall(text, module or "torch", name, why, doer="the graph") if why else None
    operator = f"{match[1]}::{match[2]}"
    if _ATTRIBUTE_OF_OVERLOAD.fullmatch(match[3] or "") or _ATTRIBUTE.fullmatch(match[1]):
        return ProgramCall(text, f"torch.ops.{match[1]}", match[2], "is an attribute of an operator", doer="the graph")
    if match[1] == "aten" and match[2] in operator_names.ATEN_OF_EXPORT:
        return None
    if _ATTRIBUTE.fullmatch(match[2]):
        return ProgramCall(text, f"torch.ops.{match[1]}", match[2], "is an attribute of a namespace", doer="the graph")
    why = program_operators.describe_harm(operator)
    if why or not program_operators.is_listed(operator):
        return ProgramCall(text, f"torch.ops.{match[1]}", match[2], why, doer="the graph")
    return None


def _check_guard(text: str) -> ProgramCall | None:
    """Return the call of an unsafe input check, evaluated by a call of the program's module."""
    why = (
        describe_cost(text, has_symbols=False) if is_plain_guard(text) else f"compiles the guard {quoting.quote(text)}"
    )
    return ProgramCall(text, "builtins", "exec", why, doer="the module of the program") if why else None


def _check_import(text: str) -> ProgramCall:
    """Return the import of a dict or enumeration class in the nesting of arguments."""
    module, _, name = text.partition(":")
    return ProgramCall(name, module, name, called=False)


def _check_symbol(text: str) -> ProgramCall | None:
    """Return the call that counts to a symbol's number, as torch does in ones for sizes known only at runtime.

    The number is the value of Python's `int` for all characters after the letters.
    """
    try:
        number = int(text.lstrip(string.ascii_letters))
    except ValueError:
        return None
    why = f"counts one by one up to the value of the symbol {quoting.quote(text)}"
    return ProgramCall(text, "builtins", "range", why) if number > _MAX_SYMBOL_NUMBER else None


def _find_nested_names(names: Collection[str]) -> Iterator[ProgramCall]:
    """Yield a name below another tensor or object: torch takes the attribute of that object, such as a method."""
    known = frozenset(names)
    for name in names:
        parts = name.split(".")
        if any(".".join(parts[:end]) in known for end in range(1, min(len(parts), _MAX_NAME_PARTS))):
            why = f"takes the attribute {quoting.quote(name)} of an object of the file for a constant"
            yield ProgramCall(name, "builtins", "getattr", why, doer="loading the file")
            return


def _check_attribute(text: str) -> ProgramCall | None:
    """Return the assignment of an object of the file to an attribute that torch itself calls."""
    attribute = find_module_attribute(text)
    if attribute is None:
        return None
    why = f"replaces the attribute {quoting.quote(attribute)} of the module by an object of the file"
    return ProgramCall(text, "builtins", "setattr", why, doer="loading the file")


_CHECKS: dict[str, Callable[[str], ProgramCall | None]] = {
    **dict.fromkeys(_ATTRIBUTE_KEYS, _check_attribute),
    "target": _check_operator,
    "as_operator": _check_operator,
    _CLASS_KEY: _check_import,
    _GUARD_KEY: _check_guard,
    _SYMBOL_KEY: _check_symbol,
}
