"""Classify an operator that TorchScript or an exported program calls: listed, harmful or unknown.

Only the operators on the lists (`operators.txt`) are clean. Operators are harmful if they touch files or Python, or
read memory by unchecked indices, lengths or sizes; so are whole internal namespaces. All other operators, of torch and
other libraries, are unknown.
"""

from __future__ import annotations

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import name_lists

_LISTED_OPERATORS = name_lists.read_operators("listed")
#: Further namespaces of torch 2.13 and torchvision; saved programs need none of their operators.
_UNLISTED_NAMESPACES = {"_dtensor", "c10d", "export", "flex_lib", "fsdp", "mkl", "mkldnn", "streams", "video_reader"}
#: Namespaces of operators that torch's compilers, runtimes and tests call, and that no saved program needs: some of
#: them take offsets or lengths that they do not check.
_INTERNAL_NAMES = (
    "inductor inductor_prims _inductor_test symm_mem static_runtime tensorexpr debugprims debug_mode_ops _native _test"
)
_INTERNAL_NAMESPACES = frozenset(_INTERNAL_NAMES.split())
_INTERNAL_HARM = "is internal to torch, and may read or overwrite memory outside of tensors"
_UNCHECKED_HARM = (
    "uses sizes or indices that torch does not check, and may read or overwrite memory outside the tensors"
)
#: Operators that do more than compute -> their harm.
_HARMS = {
    "aten::from_file": "maps a file into memory, and can create or overwrite this file",
    "aten::save": "writes a file",
    "prim::PythonOp": "calls Python code",
    "prim::IgnoredPythonOp": "calls Python code",
    "debugprims::load_tensor": "reads a file",
    "higher_order::print": "formats a string from the file, and can thereby read any attribute of any object",
    "higher_order::wrap": "calls functions whose names are in its arguments",
    "higher_order::flex_attention": "has arguments that torch writes into source code and compiles",
    "higher_order::flex_attention_backward": "has arguments that torch writes into source code and compiles",
    "higher_order::inline_asm_elementwise": "compiles and runs machine code from the file",
    "aten::_reshape_alias": (
        "creates a view whose strides torch does not check, and may read or overwrite memory outside the tensor"
    ),
}
#: Operators that crashed the process for arguments that a program can create, and that torch writes into no program.
_UNCHECKED_OPERATORS = name_lists.read_operators("unchecked")["aten"]
#: Operators that compute gradients from indices and sizes of the forward pass, which torch trusts.
_GRADIENT_OPERATOR = compile_on_use(r"\w+::\w*_backward(?:_\w+)?")
_EMBEDDING_ROWS = compile_on_use(r"quantized::embedding_bag_\w*rowwise_offsets")
#: Operators that create sparse tensors; torch checks their indices only if a program requests this.
_SPARSE_OPERATOR = compile_on_use(
    r"aten::_sparse_\w+_tensor_(?:unsafe|with_dims_and_tensors)|aten::sparse_(?:coo|compressed|cs[rc]|bs[rc])_tensor"
)
_FILE_OPERATOR = compile_on_use(
    r"(?:image|video_reader|torchvision|torchaudio)::\w*(?:file|load|save|video|sox_io|stream)\w*"
)
#: Harmful operators of `aten` with an argument `self`, at any place: code can call them as methods of values.
HARMFUL_METHODS = name_lists.read_operators("methods")["aten"]


def describe_harm(operator: str) -> str | None:
    """Return the known harm of an operator, given its qualified name; None if unknown."""
    namespace, _, name = operator.partition("::")
    if operator in _HARMS:
        return _HARMS[operator]
    if namespace in _INTERNAL_NAMESPACES:
        return _INTERNAL_HARM
    if _SPARSE_OPERATOR.fullmatch(operator):
        return (
            "creates a sparse tensor whose indices torch does not check; an operation on this tensor may overwrite "
            "memory outside the tensor"
        )
    if (namespace == "aten" and name in _UNCHECKED_OPERATORS) or _EMBEDDING_ROWS.fullmatch(operator):
        return _UNCHECKED_HARM
    if _GRADIENT_OPERATOR.fullmatch(operator) and not is_listed(operator):
        return _UNCHECKED_HARM
    return "reads or writes a file" if _FILE_OPERATOR.fullmatch(operator) else None


#: Operators of TorchScript on texts, lists and dicts, by torch's schemas of 2.13.
_TEXT_OPERATORS = name_lists.read_operators("texts")["aten"]
#: Overloads on texts, lists and dicts, by the same schemas: `values` and `wait` have other overloads for a sparse
#: tensor or a stream than for a dict.
_TEXT_OVERLOAD = compile_on_use(r"str|any|list|dict|t|left_t|right_|(?:default_|Dict_)\w+")
_TENSOR_OVERLOADS = frozenset(["aten::values.default", "aten::values.Tensor_Dict"])


def is_about_texts(operator: str, overload: str) -> bool:
    """Return True for TorchScript's operators on texts, lists and dicts. Exported graphs do not need these."""
    namespace, _, name = operator.partition("::")
    if namespace not in ("aten", "prim") or f"{operator}.{overload}" in _TENSOR_OVERLOADS:
        return False
    return name in _TEXT_OPERATORS or _TEXT_OVERLOAD.fullmatch(overload) is not None


def is_listed(operator: str) -> bool:
    """Return True if the operator is on the list of operators that torch writes into programs."""
    namespace, _, name = operator.partition("::")
    return name in _LISTED_OPERATORS.get(namespace, ())


def is_shipped(operator: str) -> bool:
    """Return True if torch, torchvision or torchaudio defines operators in this namespace."""
    namespace = operator.partition("::")[0]
    return namespace in _LISTED_OPERATORS or namespace in _UNLISTED_NAMESPACES
