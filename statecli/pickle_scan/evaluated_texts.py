"""Check the texts that a loader takes from a checkpoint and passes to `eval`.

fairseq and the libraries that copied its models evaluate texts of the saved configuration, such as
`conv_feature_layers`. Composer evaluates the `repr` of each algorithm, after `algorithms.`, and Ultralytics the
activation in the YAML of a model. A text is clean if the text computes a small literal, or can call nothing. Sources:
fairseq 0.12 (models, criterions, utils.py), s3prl 0.4 (upstream), coqui-tts 0.28 (vc/layers/freevc/wavlm), composer
0.32 (core/state.py), ultralytics 8.4 (nn/tasks.py).
"""

from __future__ import annotations

import ast
import builtins
import warnings

from statecli.core import quoting, unicode_forms
from statecli.core.lazy_pattern import compile_on_use
from statecli.core.model_state import Hazard

#: Keys that only these libraries use.
_OWN_NAMES = (
    "conv_feature_layers conv_aggregator_layers extractor_conv_feature_layers override_encoder_layers feat_type "
    "adam_betas adamax_betas lamb_betas adafactor_eps character_filters wer_args w2l_conv_enc_config "
    "vggblock_enc_config transformer_enc_config transformer_dec_config conv_dec_config transformer_context "
    "transformer_sampling xformers_att_config left_pad_source left_pad_target decoder_zero_init "
    "pipeline_encoder_balance pipeline_decoder_balance pipeline_encoder_devices pipeline_decoder_devices"
)
OWN_KEYS = frozenset(_OWN_NAMES.split())
#: Keys that other libraries use too, for texts that are not evaluated.
_SHARED_NAMES = (
    "encoder_layers decoder_layers encoder_attention decoder_attention self_attention gated_attention project_input "
    "downsample pretrained"
)
KEYS = OWN_KEYS | frozenset(_SHARED_NAMES.split())

#: Text that calls nothing, formats nothing and computes nothing large, with any names in it.
_INERT_TEXT = compile_on_use(r"[^(\[{*<'\"]*")
#: The same for a text in YAML, where braces and brackets may stand for other values: `${model.activation}`.
_INERT_YAML_TEXT = compile_on_use(r"[^(*<'\"]*")
_LITERAL_NODES = (
    *(ast.Expression, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Load, ast.UnaryOp, ast.UAdd, ast.USub),
    *(ast.BinOp, ast.Add, ast.Mult),
)
#: Nodes of the arguments that Composer writes, with names and attributes: `apply_at=Event.AFTER_LOAD`.
_ARGUMENT_NODES = (*_LITERAL_NODES, ast.Call, ast.keyword, ast.Name, ast.Attribute)
#: The only call that Composer writes as an argument.
_ARGUMENT_CALL = "Time"
_MAX_CHARACTERS = 8192
#: Largest number of elements that a text may compute; the models have tens of layers.
_MAX_ELEMENTS = 10_000
_HELP = "do not load the file with this library unless you trust its author"


def check_text(where: str, key: str, text: str) -> Hazard | None:
    """Return the hazard of a text that fairseq evaluates; None for small literals and for text that calls nothing."""
    if _INERT_TEXT.fullmatch(text):
        return None
    tree, is_error = parse_expression(text), key in OWN_KEYS
    if tree is None:
        why = "is not an expression that statecli can parse"
    elif not all(isinstance(node, _LITERAL_NODES) for node in ast.walk(tree)):
        why, is_error = "has code other than numbers, strings, lists and dicts", True
    elif not _computes_small_value(tree):
        why, is_error = f"computes more than {_MAX_ELEMENTS:,} elements", True
    else:
        return None
    return Hazard(
        f"{where} {why}; fairseq evaluates the text as Python code", is_error=is_error, needs_review=True, help=_HELP
    )


def is_plain_activation(text: str) -> bool:
    """Return True for text that calls nothing, or that is written like `torch.nn.LeakyReLU(0.1)` or `leaky_relu(0.1)`.

    Other libraries write `leaky_relu(0.1)`: a call with numbers of a function that is not built into Python.
    """
    if _INERT_YAML_TEXT.fullmatch(text):
        return True
    tree = parse_expression(text)
    if tree is None or not isinstance(tree.body, ast.Call):
        return False
    nodes = [node for argument in _list_arguments(tree.body) for node in ast.walk(argument)]
    if not all(isinstance(node, _LITERAL_NODES) for node in nodes) or not _computes_small_value(tree):
        return False
    match tree.body.func:
        case ast.Name(id=name):
            has_text = any(isinstance(node, ast.Constant) and isinstance(node.value, str | bytes) for node in nodes)
            return not has_text and not hasattr(builtins, name)
        case ast.Attribute(value=ast.Name(id="nn") | ast.Attribute(value=ast.Name(id="torch"), attr="nn"), attr=name):
            return name[:1].isupper()
    return False


def check_representation(where: str, text: str) -> Hazard | None:
    """Return the hazard of a text that stands for a Composer algorithm; None for a single call with plain arguments."""
    # Python cannot parse `algorithms.<…`, so this text runs nothing: `<my.Algorithm object at 0x7f>`.
    if text.startswith("<"):
        return None
    tree = parse_expression(text)
    if tree is not None and _is_plain_call(tree.body) and _computes_small_value(tree):
        return None
    why = f"is {quoting.quote(text[:80])}, not a single call of an algorithm with plain arguments"
    return Hazard(f"{where} {why}; Composer evaluates the text as Python code", help=_HELP)


def parse_expression(text: str) -> ast.Expression | None:
    """Return the expression; None if the text is too long or this release of Python cannot parse the text."""
    if len(text) > _MAX_CHARACTERS or unicode_forms.has_too_many_marks(text):
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about escapes in strings
            return ast.parse(text.lstrip(" \t"), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


def _is_plain_call(call: ast.expr) -> bool:
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        return False
    nodes = [node for argument in _list_arguments(call) for node in ast.walk(argument)]
    callees = [node.func for node in nodes if isinstance(node, ast.Call)]
    return all(isinstance(node, _ARGUMENT_NODES) for node in nodes) and all(
        isinstance(function, ast.Name) and function.id == _ARGUMENT_CALL for function in callees
    )


def _list_arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def _computes_small_value(tree: ast.Expression) -> bool:
    """Return True if the expression computes no long list or text. Operands are visited before their operators."""
    numbers: dict[ast.AST, int] = {}
    lengths: dict[ast.AST, int] = {}
    for node in reversed([*ast.walk(tree)]):
        match node:
            case ast.Constant(value=int() as number):
                numbers[node] = number
            case ast.Constant(value=str() | bytes() as text):
                lengths[node] = len(text)
            case ast.Tuple(elts=elements) | ast.List(elts=elements):
                lengths[node] = len(elements)
            case ast.UnaryOp(operand=operand) if operand in numbers:
                numbers[node] = -numbers[operand] if isinstance(node.op, ast.USub) else numbers[operand]
            case ast.BinOp(left=left, right=right) if left in numbers and right in numbers:
                is_sum = isinstance(node.op, ast.Add)
                numbers[node] = numbers[left] + numbers[right] if is_sum else numbers[left] * numbers[right]
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                lengths[node] = lengths.get(left, 0) + lengths.get(right, 0)
            case ast.BinOp(left=left, right=right):
                factors = (numbers.get(left, lengths.get(left, 0)), numbers.get(right, lengths.get(right, 0)))
                lengths[node] = max(0, factors[0]) * max(0, factors[1])
        if lengths.get(node, 0) > _MAX_ELEMENTS:
            return False
    return True
