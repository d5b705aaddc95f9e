"""Find code in a torch.export program (in sizes, names, calls and imports) that torch runs when it loads the program.

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
import re
import string
from collections.abc import Callable, Collection, Iterator
from math import isinf, log2, prod
from typing import NamedTuple

import msgspec

from statecli.core import quoting
from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import name_lists, program_operators, program_schema, program_texts
from statecli.pickle_scan.export_arguments import find_misuses
from statecli.pickle_scan.module_attributes import find_module_attribute
from statecli.pickle_scan.program_schema import ProgramText, TextRequirement
from statecli.pickle_scan.step_budget import Budget, Steps

#: Functions and classes in expressions, by the names that sympy and torch use.
_EXPRESSION_NAMES = """
    Symbol Dummy Integer Rational Float Add Mul Pow Mod Max Min Abs And Or Not Xor Piecewise ExprCondPair
    Eq Ne Lt Le Gt Ge Equality Unequality StrictLessThan LessThan StrictGreaterThan GreaterThan floor ceiling
    FloorDiv ModularIndexing Where PythonMod CleanDiv CeilToInt FloorToInt CeilDiv LShift RShift PowByNatural
    FloatPow FloatTrueDiv IntTrueDiv IsNonOverlappingAndDenseIndicator TruncToFloat TruncToInt RoundToInt
    RoundDecimal ToFloat Identity BitwiseFn_bitwise_and BitwiseFn_bitwise_or BitwiseFn_bitwise_xor
    OpaqueUnaryFn_sqrt OpaqueUnaryFn_cos OpaqueUnaryFn_cosh OpaqueUnaryFn_sin OpaqueUnaryFn_sinh
    OpaqueUnaryFn_tan OpaqueUnaryFn_tanh OpaqueUnaryFn_asin OpaqueUnaryFn_acos OpaqueUnaryFn_atan
    OpaqueUnaryFn_exp OpaqueUnaryFn_log OpaqueUnaryFn_asinh OpaqueUnaryFn_log2
"""
_EXPRESSION_FUNCTIONS = frozenset(_EXPRESSION_NAMES.split())
#: Token of an expression. Nothing may follow the digits of a number, because a number has attributes. A quoted text is
#: a name or a number, because sympy evaluates any other text.
_TOKEN = compile_on_use(
    r"[A-Za-z]\w*(?!')|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![\w.])"
    r"|'(?:[A-Za-z_]\w*|[-+]?\d[\d_]*\.?[\d_]*(?:[eE][-+]?[\d_]+)?)'"
    r"|(?P<operator>[-+*/%<>=&|~^,(]|!=)|\)",
    re.ASCII,
)
_SPACE = compile_on_use(r"[ \t]*")
#: Nodes of an expression in Python's syntax tree; none of them binds a name.
_EXPRESSION_NODES = (
    *(ast.Expression, ast.Call, ast.keyword, ast.Name, ast.Load, ast.Constant, ast.Tuple, ast.Starred),
    *(ast.BinOp, ast.UnaryOp, ast.Compare, ast.operator, ast.unaryop, ast.cmpop),
)
#: Token of a guard: sizes of inputs, and functions of numbers. The key of an input has no quote and no escape.
_GUARD_TOKEN = compile_on_use(
    r"L(?:\[(?:'[^'\"\\\r\n]*'|-?\d+)\]|\.(?:size|stride|storage_offset|item)\(\)|\.[A-Za-z]\w*(?![\w(]))+"
    r"|(?P<function>math\.(?!factorial|comb|perm)[a-z]\w*|torch\._?sym_\w+|float|int|bool|abs|max|min|round|floor|ceiling|Max|Min|Mod|FloorDiv"
    r"|IsNonOverlappingAndDenseIndicator|cast_symbool_to_symint_guardless)(?=\()"
    r"|(?P<operator>(?:not|and|or|is|in|if|else)(?!\w)|[-+*/%<>=&|~^,(]|!=)|\)|(?:None|True|False)(?!\w)"
    r"|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?(?![\w.])",
    re.ASCII,
)


def is_plain_expression(text: str) -> bool:
    """Return True if the expression has only names, numbers, operators and calls of sympy's or torch's functions.

    `for` and `lambda` would give a function another meaning, and sympy has Python's own functions as values of names.
    """
    if not _consists_of(text, _TOKEN, lambda token: token[0] in _EXPRESSION_FUNCTIONS):
        return False
    if len(text) > _MAX_EXPRESSION_CHARACTERS or not text.strip():
        return True  # `describe_cost` refuses a long text, sympy an empty text
    try:
        nodes = list(ast.walk(_parse_expression(text)))
    except (SyntaxError, RecursionError, MemoryError, ValueError):
        return False  # sympy may rewrite the text to valid Python
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
    while (at := _SPACE.match(text, at).end()) < len(text):  # type: ignore[union-attr]  # the pattern also matches an empty text
        token = token_of.match(text, at)
        if token is None or (token[0] == "(" and not opens):
            return False
        at, opens = token.end(), token["operator"] is not None or is_function(token)
    return True


#: Bits of the largest number that an expression may compute, and largest number of its terms once multiplied out.
_MAX_BITS, _MAX_TERMS = 4096, 4096
#: Longest expression, in characters; those of real programs have some hundreds.
_MAX_EXPRESSION_CHARACTERS = 20_000
#: Largest degrees of a sum and of a product, because sizes are sums of products of some dimensions. sympy's common
#: divisors and roots of polynomials take minutes from a degree of some dozens.
_MAX_DEGREE_OF_SUM, _MAX_DEGREE = 10, 64
#: Functions and operators that search for a common divisor of their arguments. The limits count pairs of terms in the
#: arguments, for torch and for sympy. The limit for torch is higher: torch's own functions compute no divisor of sums
#: of more than 20 terms. Also, statecli often overestimates the number of terms.
_DIVISIONS = compile_on_use(r".*(?:Div|Mod).*|%")
_MAX_PAIRS_OF_TERMS, _MAX_PAIRS_OF_SYMPY = 1024, 400
#: Functions and operators to which the limit of sympy applies.
_DIVISIONS_OF_SYMPY = frozenset(["%", "CeilDiv"])
#: Functions and operators whose second argument is an exponent, or a number of digits.
_EXPONENT_FUNCTIONS = frozenset(
    ["Pow", "PowByNatural", "FloatPow", "LShift", "RShift", "Float", "RoundDecimal", "round", "pow"]
)
#: Functions and operators whose terms are the sum of the terms of their arguments, in Python and in sympy.
_SUM_FUNCTIONS = frozenset(["Add", "Sub", "Max", "Min"])
#: Keywords that sympy writes for a symbol: assumptions, and the number of a dummy.
_SYMBOL_KEYWORD_NAMES = """
    algebraic antihermitian commutative complex composite dummy_index even extended_negative extended_nonnegative
    extended_nonpositive extended_nonzero extended_positive extended_real finite hermitian imaginary infinite
    integer irrational negative noninteger nonnegative nonpositive nonzero odd positive prime rational real
    transcendental zero
"""
_SYMBOL_KEYWORDS = frozenset(_SYMBOL_KEYWORD_NAMES.split())
#: Function -> keywords that sympy writes for it. Their values are assumptions, a number or bits.
_KEYWORDS = {"Symbol": _SYMBOL_KEYWORDS, "Dummy": _SYMBOL_KEYWORDS, "Float": frozenset(["precision"])}
_NUMBER = compile_on_use(r"[-+]?[\d_]*\.?[\d_]*(?:[eE][-+]?([\d_]+))?")
#: Exponent outside the range of a float: such numbers are zero or infinite for Python, not for sympy.
_LONG_EXPONENT = compile_on_use(r"[\d.][eE][-+]?[\d_]{4}")


#: End of the messages about an expression that costs too much.
_SLOW_SUFFIX = "; the process may hang or fill the memory"


class _Unmeasurable(Exception):
    """Error for an expression of unknown cost; its text is the reason."""


class _Cost(NamedTuple):
    """Upper bounds of the work to compute an expression.

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

    sympy computes expressions without symbols at once, even `9**9**9`; torch multiplies out expressions with symbols. A
    guard has no symbols: Python computes the guard from the sizes of the inputs.
    """
    if len(text) > _MAX_EXPRESSION_CHARACTERS:
        return f"evaluates an expression of {len(text):,} characters{_SLOW_SUFFIX}"
    try:
        cost = _measure_node(_parse_expression(text).body)
    except SyntaxError:
        return None  # torch cannot parse the guard either
    except _Unmeasurable as error:
        return str(error)
    except (RecursionError, MemoryError, ValueError, OverflowError):
        return f"evaluates an expression that is nested too deeply for statecli to check{_SLOW_SUFFIX}"
    if cost.bits > _MAX_BITS or _LONG_EXPONENT.search(text):
        return f"computes a number of more than {_MAX_BITS:,} bits{_SLOW_SUFFIX}"
    if has_symbols and cost.terms > _MAX_TERMS:
        return f"multiplies an expression out to more than {_MAX_TERMS:,} terms{_SLOW_SUFFIX}"
    return cost.algebra if has_symbols else None


def _measure_node(node: ast.AST) -> _Cost:
    """Return the cost of a node of the expression's syntax tree. Raises _Unmeasurable."""
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
        raise _Unmeasurable("unpacks the arguments of a function with `*`; torch never writes this")
    else:
        cost = _measure_operation("", list(ast.iter_child_nodes(node)))
    if cost.degree > (_MAX_DEGREE_OF_SUM if cost.terms > 1 else _MAX_DEGREE):
        return cost._replace(algebra=f"computes with polynomials of a degree above {_MAX_DEGREE_OF_SUM}{_SLOW_SUFFIX}")
    return cost


def _measure_call(node: ast.Call) -> _Cost:
    """Return the cost of a call. A text may only be the name of a symbol or the digits of a float."""
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
    """Return the bits of precision that a keyword argument requests. Raises _Unmeasurable if sympy never writes it."""
    value = keyword.value.value if type(keyword.value) is ast.Constant else None
    if keyword.arg not in _KEYWORDS.get(function, ()) or type(value) not in (bool, int):
        raise _Unmeasurable(f"calls {function} with the argument {keyword.arg or '**'}, which torch never writes")
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
        algebra = f"divides polynomials with too many terms for sympy{_SLOW_SUFFIX}"
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
    """Return a literal number whose absolute value is at least 1; None for other expressions."""
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "Integer" and len(node.args) == 1:
        node = node.args[0]
    try:
        value = ast.literal_eval(node)
    except ValueError:
        return None
    return value if type(value) in (int, float) and abs(value) >= 1 else None


def _count_bits(value: object) -> float:
    """Return the number of bits of a number. Raises _Unmeasurable for a text, because sympy evaluates texts."""
    if isinstance(value, (str, bytes)):
        raise _Unmeasurable(f"evaluates the text {quoting.quote(str(value))}, which torch never writes")
    if isinstance(value, float):  # infinite for Python; a number of sympy has any exponent
        return 2.0**64 if isinf(value) else max(2.0, log2(abs(value) + 1))
    return max(2.0, log2(abs(value) + 1)) if type(value) is int else 2.0


def _count_digit_bits(digits: str) -> float:
    """Return the bits of a number given as text. Raises _Unmeasurable for other texts, because sympy evaluates them."""
    match = _NUMBER.fullmatch(digits)
    if match is None:
        raise _Unmeasurable(f"evaluates the text {quoting.quote(digits)}, which torch never writes")
    exponent = (match[1] or "0").replace("_", "")
    return 4.0 * (len(digits) + (int(exponent or 0) if len(exponent) <= _MAX_BITS else 2**64))


class ProgramCall(msgspec.Struct, frozen=True):
    """Name that loading a program calls or imports, because of a text in the program.

    `why`: the known harm, unless the name shows the harm; `doer` as in a `ScannedPickle`.
    """

    text: str
    module: str
    name: str
    why: str | None = None
    called: bool = True
    doer: str | None = None


class UnknownText(msgspec.Struct, frozen=True):
    """Text under a key that the schema of torch.export does not have."""

    key: str
    text: str


#: Functions of torch that are misused by themselves -> their caller; the graph calls all other targets.
_DOERS = {"torch.export.load": "loading the file", "torch.export.unflatten": "unflattening the program"}


def find_program_calls(document: object, steps: Steps) -> Iterator[ProgramCall | UnknownText]:
    """Yield the calls and imports that loading or running a program causes, except tensor math. Raises OutOfSteps."""
    texts = list(dict.fromkeys(program_schema.iter_texts(document, steps)))
    for text in dict.fromkeys(_select_texts(texts, TextRequirement.EXPRESSION)):
        steps.take(Budget.TEXT, 1 + len(text))  # to parse and measure a character takes 4 to 10 µs
        if not is_plain_expression(text):
            yield ProgramCall(text, "sympy", "sympify")
        elif costs := describe_cost(text):
            yield ProgramCall(text, "sympy", "sympify", costs)
    for misuse in find_misuses(document, steps):
        module, _, name = misuse.target.removesuffix(".default").rpartition(".")
        yield ProgramCall(misuse.target, module, name, misuse.why, doer=_DOERS.get(misuse.target, "the graph"))
    yield from _find_nested_names(_select_texts(texts, TextRequirement.ATTRIBUTE), _list_modules(texts, steps), steps)
    if trace := program_texts.find_end_of_raw_string(_select_texts(texts, TextRequirement.TRACE)):
        yield _report_source(trace)
    reported_texts: set[str] = set()
    for judgement, text in dict.fromkeys(_expand_specs(texts, steps)):
        if judgement is TextRequirement.GUARD:
            steps.take(Budget.TEXT, 1 + len(text))  # parsed by Python's parser
        call = CHECKS[judgement](text) if judgement in CHECKS else None
        if call:
            yield call
        elif text not in reported_texts and not program_texts.is_valid(text, judgement):
            reported_texts.add(text)
            yield _report_source(text) if judgement in _COMPILER_TEXTS else _report_name(text, judgement)
    unknown = next(
        (text for text in texts if text.judgement is TextRequirement.UNKNOWN and text.text not in reported_texts), None
    )
    if unknown:
        yield UnknownText(unknown.key, unknown.text)


#: Requirements on the texts that inductor reads or writes into source.
_COMPILER_TEXTS = frozenset(
    [
        TextRequirement.VALUE,
        TextRequirement.TRACE,
        TextRequirement.FUNCTIONS,
        TextRequirement.ORIGINS,
        TextRequirement.ANNOTATIONS,
    ]
)


def _select_texts(texts: list[ProgramText], judgement: TextRequirement) -> list[str]:
    return [text.text for text in texts if text.judgement is judgement]


def _list_modules(texts: list[ProgramText], steps: Steps) -> list[str]:
    """Return the paths of the modules in the module call graph and in the module stacks of the nodes."""
    texts_of_stacks = _select_texts(texts, TextRequirement.MODULES)
    steps.take(Budget.TEXT, sum(map(len, texts_of_stacks)) // 8)
    stacks = map(program_texts.list_stack_paths, texts_of_stacks)
    paths = [*_select_texts(texts, TextRequirement.MODULE), *(path for stack in stacks for path in stack)]
    return list(dict.fromkeys(path for path in paths if path))


def _report_name(text: str, judgement: TextRequirement) -> ProgramCall:
    place = "a number" if judgement in (TextRequirement.NUMBER, TextRequirement.FLOAT) else "a name"
    why = f"compiles a graph in which {quoting.quote(text)} stands in place of {place}, so this text can run as code"
    return ProgramCall(text, "builtins", "exec", why, doer="loading the file")


def _report_source(text: str) -> ProgramCall:
    why = (
        f"uses {quoting.quote(text)} from the file as source code or as compiler options; torch never writes this text"
    )
    return ProgramCall(text, "torch._inductor", "compile", why, doer="compiling the program")


def _expand_specs(texts: list[ProgramText], steps: Steps) -> Iterator[tuple[TextRequirement, str]]:
    """Yield (requirement, text) for each text of the program, also for texts inside JSON that describes arguments."""
    for judgement, text, key in texts:
        if judgement is TextRequirement.SPEC:
            yield from program_texts.iter_spec_texts(text, key == "in_spec", steps)
        else:
            yield judgement, text


_OPERATOR = compile_on_use(r"torch\.ops\.(\w+)\.(\w+)(?:\.(\w+))?", re.ASCII)
#: Attributes of all operators, of a namespace and of an overload, which torch returns for these names in the path of an
#: operator.
_ATTRIBUTE = compile_on_use(r"__.*|_dir")
_ATTRIBUTE_OF_NAMESPACE = compile_on_use(r"__.*|_dir|name")
_ATTRIBUTE_OF_OVERLOAD = compile_on_use(
    r"_.*|cacheable|decompose|dispatch|divide_kwargs|fallthrough|functorch_table|gen_schema|has_kernel_for_\w+|is_view|name"
    r"|namespace|non_fallthrough_keys|op|op_overloads|overloadpacket|overloads|py_autograd_impl|py_functionalize_impl|py_impl"
    r"|py_kernels|python_key_table|redispatch|subgraph_indexes|tags"
)
#: Operators of `aten` whose arguments are checked in a graph, or whose names look like attributes.
_CHECKED_OPERATORS = name_lists.read_operators("exported")["aten"]
#: Functions that torch's own verifier allows, and the classes of torch's arithmetic.
_ARITHMETIC = compile_on_use(
    r"_operator\.(?:getitem|add|mul|sub|truediv|floordiv|mod|pow|neg|pos|abs|[lr]shift|and_|or_|xor|not_|[gl][et]|eq|ne)"
    r"|math\.(?!factorial|comb|perm)[a-z]\w*|torch\._?sym_\w+|torch\.utils\._sympy\.functions\.(?P<function>[A-Z]\w*)|builtins\.round",
    re.ASCII,
)
#: Largest number of parts in the name of a tensor.
_MAX_NAME_PARTS = 100
#: Largest number of a symbol: programs have some thousands of symbols.
_MAX_SYMBOL_NUMBER = 10**6


#: Operators that torch.export writes for torch.func.vmap and jvp; other arguments crash the process.
_TRANSFORM_OPERATOR = compile_on_use(r"torch\._functorch\.predispatch\.\w+")


def _check_operator(text: str) -> ProgramCall | None:
    match = _OPERATOR.fullmatch(text)
    if not match:
        module, _, name = text.rpartition(".")
        arithmetic = _ARITHMETIC.fullmatch(text)
        is_known = arithmetic and arithmetic["function"] in (None, *_EXPRESSION_FUNCTIONS)
        why = None if is_known else "is not an operator of torch"
        if _TRANSFORM_OPERATOR.fullmatch(text):
            why = (
                "takes levels and sizes of torch.func.vmap that torch does not check, and wrong numbers crash the "
                "process; to remove this operator, call run_decompositions() before you save the program"
            )
        return ProgramCall(text, module or "torch", name, why, doer="the graph") if why else None
    namespace, name, overload = match[1], match[2], match[3] or ""
    operator = f"{namespace}::{name}"
    # An operator on graphs has no overloads, so any further part of its path is an attribute.
    is_attribute = namespace == "higher_order" and overload != ""
    if is_attribute or _ATTRIBUTE_OF_OVERLOAD.fullmatch(overload) or _ATTRIBUTE.fullmatch(namespace):
        why = "is an attribute of an operator, not an operator; torch never writes this"
    elif namespace == "aten" and overload and name in _CHECKED_OPERATORS:
        return None
    elif _ATTRIBUTE_OF_NAMESPACE.fullmatch(name):
        why = "is an attribute of a namespace of operators, not an operator; torch never writes this"
    else:
        why = program_operators.describe_harm(operator)
        if program_operators.is_about_texts(operator, overload):
            why = why or (
                "computes a string or a list, which no exported program does; torch's compiler writes the result into "
                "source code"
            )
        if not overload and namespace != "higher_order":
            why = why or (
                "has no overload name such as .default, which torch always writes; without this name, torch does not "
                "match the arguments by name"
            )
    if why or not program_operators.is_listed(operator):
        return ProgramCall(text, f"torch.ops.{namespace}", name, why, doer="the graph")
    return None


def _check_guard(text: str) -> ProgramCall | None:
    """Return the `exec` call with which a program's module compiles an unsafe guard; None for a safe guard."""
    code = f"compiles the guard {quoting.quote(text)} as Python code"
    why = describe_cost(text, has_symbols=False) if is_plain_guard(text) else code
    return ProgramCall(text, "builtins", "exec", why, doer="the module of the program") if why else None


def _check_import(text: str) -> ProgramCall:
    """Return the import of a class that the text names (`module:name`), such as an enumeration."""
    module, _, name = text.partition(":")
    return ProgramCall(name, module, name, called=False)


def _check_symbol(text: str) -> ProgramCall | None:
    """Return a `range` call if torch would count up to a huge number in a symbol's name; else None.

    The number is the value of Python's `int` for all characters after the letters.
    """
    try:
        number = int(text.lstrip(string.ascii_letters))
    except ValueError:
        return None
    why = f"counts in steps of 1 up to the number in the symbol name {quoting.quote(text)}; the process may hang"
    return ProgramCall(text, "builtins", "range", why) if number > _MAX_SYMBOL_NUMBER else None


def _find_nested_names(tensors: Collection[str], modules: Collection[str], steps: Steps) -> Iterator[ProgramCall]:
    """Yield a `getattr` call for the first name `a.b` if `a` is a tensor, because torch reads `b` from the tensor.

    If a module has the name of a tensor, torch calls the tensor as the module.
    """
    tensor_parts = {name: _split_name(name) for name in tensors}
    tensor_names = {".".join(parts) for parts in tensor_parts.values()}
    reaches = [(name, parts, len(parts)) for name, parts in tensor_parts.items()]
    reaches += [(name, parts, len(parts) + 1) for name, parts in ((name, _split_name(name)) for name in modules)]
    for name, parts, reach in reaches:
        steps.take(Budget.TEXT, 1 + reach * len(name) // 1024)
        if len(parts) > _MAX_NAME_PARTS or any(".".join(parts[:end]) in tensor_names for end in range(1, reach)):
            why = (
                f"gets the attribute {quoting.quote(name)} of an object from the file, and the program uses this "
                "attribute as a constant"
            )
            yield ProgramCall(name, "builtins", "getattr", why, doer="loading the file")
            return


def _split_name(name: str) -> list[str]:
    return program_texts.strip_call_numbers(name).split(".", _MAX_NAME_PARTS)


def _check_attribute(text: str) -> ProgramCall | None:
    """Return a `setattr` call if the text names an attribute that torch calls on modules; else None."""
    attribute = find_module_attribute(program_texts.strip_call_numbers(text))
    if attribute is None:
        return None
    why = f"replaces the attribute {quoting.quote(attribute)} of the module with an object from the file"
    return ProgramCall(text, "builtins", "setattr", why, doer="loading the file")


def _check_module(text: str) -> ProgramCall | None:
    """Return a `getattr` call if a module's path contains an attribute that is not a submodule; else None."""
    attribute = program_texts.find_module_call(text)
    if attribute is None:
        return None
    why = (
        f"gets the attribute {quoting.quote(attribute)} of a module, and torch uses this attribute as a submodule "
        "and calls it"
    )
    return ProgramCall(text, "builtins", "getattr", why, doer="torch.export.unflatten")


def _check_module_stack(text: str) -> ProgramCall | None:
    calls = (_check_module(path) for path in program_texts.list_stack_paths(text) if path)
    return next(filter(None, calls), None)


CHECKS: dict[TextRequirement, Callable[[str], ProgramCall | None]] = {
    TextRequirement.ATTRIBUTE: _check_attribute,
    TextRequirement.MODULE: _check_module,
    TextRequirement.MODULES: _check_module_stack,
    TextRequirement.OPERATOR: _check_operator,
    TextRequirement.CLASS: _check_import,
    TextRequirement.GUARD: _check_guard,
    TextRequirement.SYMBOL: _check_symbol,
}
