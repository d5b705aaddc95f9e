"""Judge an operator called by TorchScript or an exported program: listed, known harm, or unknown.

Only the operators on the lists (`operator_names`) are clean. The harm is known of operators that touch files or Python
or read memory by unchecked indices, lengths or sizes, and of whole internal namespaces. All other operators, of torch
and other libraries, are unknown.
"""

from __future__ import annotations

import re

from statecli.core.lazy_pattern import compile_on_use
from statecli.pickle_scan import operator_names

_LISTS = {
    "aten": operator_names.ATEN,
    "prim": operator_names.PRIM,
    "quantized": operator_names.QUANTIZED,
    "_quantized": operator_names.QUANTIZED,
    "higher_order": operator_names.HIGHER_ORDER,
    **operator_names.OTHERS,
}
#: Further namespaces of torch 2.13 and torchvision; saved programs need none of their operators.
_UNLISTED_NAMESPACES = {"_dtensor", "c10d", "export", "flex_lib", "fsdp", "mkl", "mkldnn", "streams", "video_reader"}
#: Namespaces of operators that torch's compilers, runtimes and tests call, and that no saved program needs: some of
#: them take offsets or lengths that they do not check.
_INTERNAL_NAMESPACES = frozenset(
    re.findall(
        r"\w+",
        """
        inductor inductor_prims _inductor_test symm_mem static_runtime tensorexpr debugprims debug_mode_ops
        _native _test
        """,
    )
)
_INTERNAL_HARM = "is internal to torch, and may read or overwrite memory outside of tensors"
_UNCHECKED_HARM = (
    "uses sizes or indices that torch does not check, and may read or overwrite memory outside the tensors"
)
#: Operators that do more than compute.
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
        "makes a view whose strides torch does not check, and may read or overwrite memory outside the tensor"
    ),
}
#: Operators that crashed the process for arguments which a program can make, and that torch writes into no program.
_UNCHECKED = frozenset(
    re.findall(
        r"\w+",
        """
        _add_batch_dim _autocast_to_full_precision _autocast_to_reduced_precision _batch_norm_no_update
        _batch_norm_with_update _batch_norm_with_update_functional _chunk_cat _compute_linear_combination
        _convert_indices_from_coo_to_csr _convert_indices_from_csr_to_coo _cummax_helper _cummin_helper
        _dyn_quant_matmul_4bit _fused_adagrad _fused_adagrad_ _fused_adam _fused_adam_ _fused_adamw
        _fused_adamw_ _fused_moving_avg_obs_fq_helper _fused_moving_avg_obs_fq_helper_functional _fused_sgd
        _fused_sgd_ _neg_view_copy _new_zeros_with_same_feature_meta _nnpack_spatial_convolution
        _remove_batch_dim _reshape_alias_copy _sobol_engine_draw _sobol_engine_ff_
        _sobol_engine_initialize_state_ _sobol_engine_scramble_ _transform_bias_rescale_qkv _unsafe_masked_index
        _unsafe_masked_index_put_accumulate _weight_norm_interface batch_norm_update_stats mkldnn_rnn_layer
        native_batch_norm quantized_lstm_cell segment_reduce _cholesky_solve_helper
        """,
    )
)
#: Gradients are computed from indices and sizes of the forward pass, which torch trusts.
_GRADIENT = compile_on_use(r"\w+::\w*_backward(?:_\w+)?")
_EMBEDDING_ROWS = compile_on_use(r"quantized::embedding_bag_\w*rowwise_offsets")
#: torch checks indices only where a program asks for it.
_UNSAFE_SPARSE = compile_on_use(
    r"aten::_sparse_\w+_tensor_(?:unsafe|with_dims_and_tensors)|aten::sparse_(?:coo|compressed|cs[rc]|bs[rc])_tensor"
)
_FILE_OPERATOR = compile_on_use(
    r"(?:image|video_reader|torchvision|torchaudio)::\w*(?:file|load|save|video|sox_io|stream)\w*"
)
#: Harmful operators of `aten` with an argument `self`, at any place: code can call them as methods of values.
HARMFUL_METHODS = frozenset(
    re.findall(
        r"\w+",
        """
        _reshape_alias _add_batch_dim _autocast_to_full_precision _autocast_to_reduced_precision
        _convert_indices_from_coo_to_csr _cummax_helper _cummin_helper _fused_adagrad _fused_adagrad_
        _fused_adam _fused_adam_ _fused_adamw _fused_adamw_ _fused_moving_avg_obs_fq_helper
        _fused_moving_avg_obs_fq_helper_functional _fused_sgd _fused_sgd_ _neg_view_copy
        _new_zeros_with_same_feature_meta _remove_batch_dim _reshape_alias_copy _sobol_engine_ff_
        _sobol_engine_initialize_state_ _sobol_engine_scramble_ _unsafe_masked_index
        _unsafe_masked_index_put_accumulate _cholesky_solve_helper _backward _gather_sparse_backward
        _sparse_mm_reduce_impl_backward conv_tbc_backward cudnn_grid_sampler_backward linear_backward
        matrix_exp_backward mkldnn_linear_backward mps_convolution_backward mps_convolution_transpose_backward
        _adaptive_avg_pool2d_backward _adaptive_avg_pool3d_backward _convolution_double_backward
        _fake_quantize_learnable_per_channel_affine_backward
        _fake_quantize_learnable_per_tensor_affine_backward _nested_select_backward _nested_sum_backward
        _pdist_backward _prelu_kernel_backward _slow_conv2d_backward _sparse_log_softmax_backward_data
        _sparse_softmax_backward_data _sparse_sum_backward adaptive_avg_pool3d_backward
        adaptive_max_pool2d_backward adaptive_max_pool3d_backward avg_pool2d_backward avg_pool3d_backward
        binary_cross_entropy_backward fractional_max_pool2d_backward fractional_max_pool3d_backward
        gather_backward glu_backward hardshrink_backward hardsigmoid_backward huber_loss_backward
        infinitely_differentiable_gelu_backward log_sigmoid_backward logit_backward matmul_backward
        max_pool2d_backward max_pool2d_with_indices_backward max_pool3d_with_indices_backward mish_backward
        mkldnn_adaptive_avg_pool2d_backward mse_loss_backward multi_margin_loss_backward
        multilabel_margin_loss_backward nll_loss2d_backward nll_loss_backward reflection_pad1d_backward
        reflection_pad2d_backward reflection_pad3d_backward replication_pad1d_backward
        replication_pad2d_backward replication_pad3d_backward rrelu_with_noise_backward smooth_l1_loss_backward
        soft_margin_loss_backward softshrink_backward
        """,
    )
)


def describe_harm(operator: str) -> str | None:
    """Return the known harm of an operator, given its qualified name; None if unknown."""
    namespace, _, name = operator.partition("::")
    if operator in _HARMS:
        return _HARMS[operator]
    if namespace in _INTERNAL_NAMESPACES:
        return _INTERNAL_HARM
    if _UNSAFE_SPARSE.fullmatch(operator):
        return (
            "makes a sparse tensor whose indices torch does not check; an operation on this tensor may overwrite "
            "memory outside the tensor"
        )
    if (namespace == "aten" and name in _UNCHECKED) or _EMBEDDING_ROWS.fullmatch(operator):
        return _UNCHECKED_HARM
    if _GRADIENT.fullmatch(operator) and not is_listed(operator):
        return _UNCHECKED_HARM
    return "reads or writes a file" if _FILE_OPERATOR.fullmatch(operator) else None


#: Operators of TorchScript on texts, lists and dicts, and the overloads of others, by torch's schemas of 2.13.
_TEXT_OPERATORS = frozenset(
    re.findall(
        r"\w+",
        """
        append bin capitalize center chr dict expandtabs format get hex join keys list ljust lower lstrip oct partition
        percentFormat pop popitem replace rjust rpartition rsplit rstrip setdefault splitlines str strip swapcase title
        upper values wait zfill EnumName EnumValue IfThenElse ModuleContainerIndex StringIndex TupleIndex Uninitialized
        awaitable_wait name type unchecked_cast unchecked_unwrap_optional
        """,
    )
)
#: `values` and `wait` of a sparse tensor or a stream have other overloads than those of a dict.
_TEXT_OVERLOAD = compile_on_use(r"str|any|list|dict|t|left_t|right_|(?:default_|Dict_)\w+")
_OF_TENSORS = frozenset(["aten::values.default", "aten::values.Tensor_Dict"])


def is_about_texts(operator: str, overload: str) -> bool:
    """Return True if the operator returns a text or a container: TorchScript's own operators, which no graph needs."""
    namespace, _, name = operator.partition("::")
    if namespace not in ("aten", "prim") or f"{operator}.{overload}" in _OF_TENSORS:
        return False
    return name in _TEXT_OPERATORS or _TEXT_OVERLOAD.fullmatch(overload) is not None


def is_listed(operator: str) -> bool:
    """Return True if torch writes the operator into programs."""
    namespace, _, name = operator.partition("::")
    return name in _LISTS.get(namespace, ())


def is_shipped(operator: str) -> bool:
    """Return True if torch, torchvision or torchaudio has this namespace."""
    namespace = operator.partition("::")[0]
    return namespace in _LISTS or namespace in _UNLISTED_NAMESPACES
