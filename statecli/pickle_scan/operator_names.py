"""Names of the operators called by programs of torch: an allow-list, made from torch 2.13.

`ATEN`: the operators of `torch._C._jit_get_all_schemas()` that are public in `torch`, `torch.Tensor`,
`torch.nn.functional`, `torch.linalg`, `torch.fft` and `torch.special`; Python's own on numbers, texts, lists and dicts;
the core ATen operators; the operators of fused attention; and operators written by `torch.jit.script`, `trace`,
`freeze`, `torch.export` and `run_decompositions` for the modules of torch.nn, for quantized modules, and for small
models of transformers. `OTHERS`: operators of smaller namespaces. `ATEN_OF_EXPORT`: operators whose arguments statecli
checks in a graph. Left out are gradients, and the operators that read or write memory outside of their tensors for some
arguments: each operator was called with hundreds of random arguments.
"""

from __future__ import annotations

import re

#: Operators of `aten` in TorchScript and in exported programs.
ATEN = frozenset(
    re.findall(
        r"\w+",
        """
        Bool Complex ComplexImplicit Delete Float FloatImplicit Generator Int IntImplicit ScalarImplicit Size
        __and__ __contains__ __derive_index __getitem__ __iand__ __ilshift__ __ior__ __irshift__ __is__
        __isnot__ __ixor__ __lshift__ __not__ __or__ __range_length __rshift__ __xor__ _adaptive_avg_pool2d
        _adaptive_avg_pool3d _add_relu _addmm_activation _aminmax _assert_async _assert_scalar
        _assert_tensor_metadata _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long
        _cast_Short _cdist_forward _choose_qparams_per_tensor _conj _conj_physical _convert_weight_to_int4pack
        _convert_weight_to_int4pack_for_cpu _convolution _convolution_mode _dim_arange _euclidean_dist
        _fake_quantize_learnable_per_channel_affine _fake_quantize_learnable_per_tensor_affine
        _fake_quantize_per_tensor_affine_cachemask_tensor_qparams _functional_assert_async
        _functional_assert_scalar _functional_sym_constrain_range _functional_sym_constrain_range_for_size
        _fused_rms_norm _grouped_mm _histogramdd_bin_edges _histogramdd_from_bin_cts
        _histogramdd_from_bin_tensors _int_mm _is_all_true _is_any_true _linalg_check_errors _linalg_det
        _linalg_eigh _linalg_eigvals _linalg_slogdet _linalg_solve_ex _linalg_svd _local_scalar_dense
        _log_softmax _log_softmax_backward_data _logcumsumexp _make_per_tensor_quantized_tensor _masked_softmax
        _native_multi_head_attention _nested_tensor_from_mask _nested_tensor_from_mask_left_aligned
        _nested_tensor_from_tensor_list _nnz _pack_padded_sequence _pad_circular _pad_enum _pad_packed_sequence
        _pdist_forward _prelu_kernel _print _safe_softmax _sample_dirichlet _scaled_dot_product_attention_math
        _scaled_dot_product_cudnn_attention _scaled_dot_product_efficient_attention
        _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
        _scaled_dot_product_fused_attention_overrideable _scaled_mm _shape_as_tensor _slow_conv2d_forward
        _softmax _softmax_backward_data _sparse_addmm _sparse_mm _stack _standard_gamma _to_copy _to_cpu
        _to_dense _to_sparse _transformer_encoder_layer_fwd _trilinear _unique _unique2 _unpack_dual
        _unsafe_index _unsafe_index_put _unsafe_view _upsample_bicubic2d_aa _upsample_bilinear2d_aa
        _upsample_lanczos2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
        _weight_int4pack_mm _weight_int4pack_mm_for_cpu _weight_int8pack_mm _weight_norm abs abs_ absolute
        absolute_ acos acos_ acosh acosh_ adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
        adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d add add_ addbmm addbmm_ addcdiv addcdiv_
        addcmul addcmul_ addmm addmm_ addmv addmv_ addr addr_ adjoint affine_grid_generator alias alias_copy all
        allclose alpha_dropout alpha_dropout_ amax amin aminmax angle any append arange arccos arccos_ arccosh
        arccosh_ arcsin arcsin_ arcsinh arcsinh_ arctan arctan2 arctan2_ arctan_ arctanh arctanh_ argmax argmin
        argsort argwhere as_strided as_strided_ as_strided_copy as_strided_scatter as_tensor asin asin_ asinh
        asinh_ atan atan2 atan2_ atan_ atanh atanh_ atleast_1d atleast_2d atleast_3d avg_pool1d avg_pool2d
        avg_pool3d backward baddbmm baddbmm_ bartlett_window batch_norm bernoulli bernoulli_ bilinear bin
        binary_cross_entropy binary_cross_entropy_with_logits bincount binomial bitwise_and bitwise_and_
        bitwise_left_shift bitwise_left_shift_ bitwise_not bitwise_not_ bitwise_or bitwise_or_
        bitwise_right_shift bitwise_right_shift_ bitwise_xor bitwise_xor_ blackman_window block_diag bmm
        broadcast_shapes broadcast_tensors broadcast_to bucketize can_cast capitalize cartesian_prod cat cauchy
        cauchy_ cdist ceil ceil_ celu celu_ center chain_matmul chalf channel_shuffle cholesky cholesky_inverse
        cholesky_solve chr chunk clamp clamp_ clamp_max clamp_max_ clamp_min clamp_min_ clear clip clip_ clone
        coalesce col2im column_stack combinations complex concat concatenate conj conj_physical conj_physical_
        constant_pad_nd contiguous conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d
        conv_transpose3d convolution copy copy_ copysign copysign_ corrcoef cos cos_ cosh cosh_
        cosine_embedding_loss cosine_similarity count count_nonzero cov cpu cross cross_entropy_loss cuda cummax
        cummin cumprod cumprod_ cumsum cumsum_ cumulative_trapezoid data deg2rad deg2rad_ degrees dense_dim
        dequantize det detach detach_ detach_copy device diag diag_embed diagflat diagonal diagonal_copy
        diagonal_scatter dict diff digamma digamma_ dim dist div div_ divide divide_ divmod dot dropout dropout_
        dsplit dstack eig einsum element_size elu elu_ elu_backward embedding embedding_bag embedding_renorm
        embedding_renorm_ empty empty_like empty_permuted empty_quantized empty_strided endswith eq eq_ equal
        erf erf_ erfc erfc_ erfinv erfinv_ exp exp2 exp2_ exp_ expand expand_as expand_copy expandtabs expm1
        expm1_ exponential exponential_ extend eye fabs factorial fake_quantize_per_channel_affine
        fake_quantize_per_channel_affine_cachemask fake_quantize_per_tensor_affine
        fake_quantize_per_tensor_affine_cachemask feature_alpha_dropout feature_alpha_dropout_ feature_dropout
        feature_dropout_ fft_fft fft_fft2 fft_fftfreq fft_fftn fft_fftshift fft_hfft fft_hfft2 fft_hfftn
        fft_ifft fft_ifft2 fft_ifftn fft_ifftshift fft_ihfft fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2
        fft_irfftn fft_rfft fft_rfft2 fft_rfftfreq fft_rfftn fill fill_ fill_diagonal_ find fix fix_ flatten
        flatten_dense_tensors flip fliplr flipud float_power float_power_ floor floor_ floor_divide
        floor_divide_ floordiv fmax fmin fmod fmod_ format frac frac_ fractional_max_pool2d
        fractional_max_pool3d frexp frobenius_norm full full_like fused_moving_avg_obs_fake_quant gamma gather
        gcd gcd_ ge ge_ gels gelu gelu_ gelu_backward geometric geometric_ geqrf ger get get_autocast_dtype
        get_device glu grad gradient greater greater_ greater_equal greater_equal_ grid_sampler grid_sampler_2d
        grid_sampler_3d group_norm gru gru_cell gt gt_ hamming_window hann_window hardshrink hardsigmoid
        hardsigmoid_ hardswish hardswish_ hardswish_backward hardtanh hardtanh_ hardtanh_backward
        has_torch_function hash hash_tensor heaviside heaviside_ hex hinge_embedding_loss histc histogram
        histogramdd hsplit hspmm hstack huber_loss hypot hypot_ i0 i0_ ifft igamma igamma_ igammac igammac_
        im2col imag index index_add index_add_ index_copy index_copy_ index_fill index_fill_ index_put
        index_put_ index_reduce index_reduce_ index_select initial_seed inner insert instance_norm int_repr
        inverse irfft is_autocast_cpu_enabled is_autocast_enabled is_coalesced is_complex is_conj is_contiguous
        is_distributed is_floating_point is_grad_enabled is_inference is_leaf is_neg
        is_non_overlapping_and_dense is_nonzero is_pinned is_same_size is_scripting is_set_to is_signed
        is_vulkan_available isalnum isalpha isclose isdecimal isdigit isfinite isidentifier isin isinf islower
        isnan isneginf isnumeric isposinf isprintable isreal isspace istft istitle isupper item items join
        kaiser_window keys kl_div kron kthvalue l1_loss layer_norm lcm lcm_ ldexp ldexp_ le le_ leaky_relu
        leaky_relu_ leaky_relu_backward len lerp lerp_ less less_ less_equal less_equal_ lgamma lgamma_ lift
        lift_fresh lift_fresh_copy linalg__powsum linalg_cholesky linalg_cholesky_ex linalg_cond linalg_cross
        linalg_det linalg_diagonal linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh
        linalg_householder_product linalg_inv linalg_inv_ex linalg_ldl_factor linalg_ldl_factor_ex
        linalg_ldl_solve linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_factor_ex linalg_lu_solve
        linalg_matmul linalg_matrix_exp linalg_matrix_norm linalg_matrix_power linalg_matrix_rank
        linalg_multi_dot linalg_norm linalg_pinv linalg_qr linalg_slogdet linalg_solve linalg_solve_ex
        linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv linalg_tensorsolve linalg_vander
        linalg_vecdot linalg_vector_norm linear linspace list ljust log log10 log10_ log1p log1p_ log2 log2_
        log_ log_normal log_normal_ log_sigmoid log_sigmoid_forward log_softmax logaddexp logaddexp2
        logcumsumexp logdet logical_and logical_and_ logical_not logical_not_ logical_or logical_or_ logical_xor
        logical_xor_ logit logit_ logspace logsumexp lower lstm lstm_cell lstrip lstsq lt lt_ lu_solve lu_unpack
        mH mT manual_seed margin_ranking_loss masked_fill masked_fill_ masked_scatter masked_scatter_
        masked_select mathremainder matmul matrix_H matrix_exp matrix_power matrix_rank max max_pool1d
        max_pool1d_with_indices max_pool2d max_pool2d_with_indices max_pool3d max_pool3d_with_indices
        max_unpool2d max_unpool3d maximum mean median meshgrid min minimum mish mish_ mm mode modf moveaxis
        movedim mse_loss msort mul mul_ multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward
        multinomial multiply multiply_ mv mvlgamma mvlgamma_ nan_to_num nan_to_num_ nanmean nanmedian
        nanquantile nansum narrow narrow_copy native_channel_shuffle native_dropout native_layer_norm
        native_layer_norm_backward ne ne_ neg neg_ negative negative_ new_empty new_empty_strided new_full
        new_ones new_zeros nextafter nextafter_ nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward
        nll_loss_nd nonzero nonzero_numpy nonzero_static norm norm_except_dim normal normal_ normal_functional
        not_equal not_equal_ nuclear_norm numel numpy_T oct one_hot ones ones_like ord orgqr ormqr outer
        output_nr pad pad_sequence pairwise_distance partition pdist percentFormat permute permute_copy
        pin_memory pinverse pixel_shuffle pixel_unshuffle poisson poisson_nll_loss polar polygamma polygamma_
        pop popitem positive pow pow_ prelu prod promote_types put put_ q_per_channel_axis q_per_channel_scales
        q_per_channel_zero_points q_scale q_zero_point qr qscheme quantile quantize_per_channel
        quantize_per_tensor quantize_per_tensor_dynamic quantized_batch_norm quantized_gru quantized_lstm
        quantized_max_pool1d quantized_max_pool2d quantized_max_pool3d rad2deg rad2deg_ radians rand rand_like
        randint randint_like randn randn_like random random_ randperm range ravel real reciprocal reciprocal_
        record_stream reflection_pad1d reflection_pad2d reflection_pad3d relu relu6 relu6_ relu_ remainder
        remainder_ remove renorm renorm_ repeat repeat_interleave replace replication_pad1d replication_pad2d
        replication_pad3d requires_grad_ reshape reshape_as resize_ resize_as_ resolve_conj resolve_neg
        result_type retain_grad retains_grad reverse rfft rfind rindex rjust rms_norm rnn_relu rnn_relu_cell
        rnn_tanh rnn_tanh_cell roll rot90 round round_ row_stack rpartition rrelu rrelu_ rrelu_with_noise
        rrelu_with_noise_ rrelu_with_noise_functional rsplit rsqrt rsqrt_ rstrip rsub scalar_tensor
        scaled_dot_product_attention scatter scatter_ scatter_add scatter_add_ scatter_reduce scatter_reduce_
        searchsorted seed select select_copy select_scatter selu selu_ set set_ set_grad_enabled setdefault sgn
        sgn_ sigmoid sigmoid_ sigmoid_backward sign sign_ signbit silu silu_ silu_backward sin sin_ sinc sinc_
        sinh sinh_ size slice slice_copy slice_inverse slice_scatter slogdet slow_conv3d slow_conv_dilated2d
        slow_conv_transpose2d slow_conv_transpose3d smm smooth_l1_loss soft_margin_loss softmax softplus
        softplus_backward softshrink solve sort sorted sparse_dim sparse_mask special_airy_ai special_bessel_j0
        special_bessel_j1 special_bessel_y0 special_bessel_y1 special_chebyshev_polynomial_t
        special_chebyshev_polynomial_u special_chebyshev_polynomial_v special_chebyshev_polynomial_w
        special_digamma special_entr special_erf special_erfc special_erfcx special_erfinv special_exp2
        special_expit special_expm1 special_gammainc special_gammaincc special_gammaln
        special_hermite_polynomial_h special_hermite_polynomial_he special_i0 special_i0e special_i1 special_i1e
        special_laguerre_polynomial_l special_legendre_polynomial_p special_log1p special_log_ndtr
        special_log_softmax special_logit special_logsumexp special_modified_bessel_i0
        special_modified_bessel_i1 special_modified_bessel_k0 special_modified_bessel_k1 special_multigammaln
        special_ndtr special_ndtri special_polygamma special_psi special_round special_scaled_modified_bessel_k0
        special_scaled_modified_bessel_k1 special_shifted_chebyshev_polynomial_t
        special_shifted_chebyshev_polynomial_u special_shifted_chebyshev_polynomial_v
        special_shifted_chebyshev_polynomial_w special_sinc special_softmax special_spherical_bessel_j0
        special_xlog1py special_xlogy special_zeta split split_copy split_with_sizes split_with_sizes_copy
        splitlines sqrt sqrt_ square square_ squeeze squeeze_ squeeze_copy sspaddmm stack startswith std
        std_mean stft storage_offset str stride strip sub sub_ subtract subtract_ sum sum_to_size svd swapaxes
        swapaxes_ swapcase swapdims swapdims_ sym_constrain_range sym_constrain_range_for_size sym_is_contiguous
        sym_numel sym_size sym_storage_offset sym_stride symeig t t_ t_copy take take_along_dim tan tan_ tanh
        tanh_ tanh_backward tensor tensor_split tensordot thnn_conv2d threshold threshold_ threshold_backward
        tile title to to_dense to_mkldnn to_padded_tensor to_sparse to_sparse_bsc to_sparse_bsr to_sparse_csc
        to_sparse_csr topk trace transpose transpose_ transpose_copy trapezoid trapz triangular_solve tril tril_
        tril_indices triplet_margin_loss triu triu_ triu_indices true_divide true_divide_ trunc trunc_ type_as
        unbind unbind_copy unflatten unflatten_dense_tensors unfold unfold_copy uniform uniform_
        unique_consecutive unique_dim unique_dim_consecutive unsafe_chunk unsafe_split unsafe_split_with_sizes
        unsqueeze unsqueeze_ unsqueeze_copy update upper upsample_bicubic2d upsample_bilinear2d
        upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_trilinear3d values
        values_copy vander var var_mean vdot view view_as view_as_complex view_as_complex_copy view_as_real
        view_as_real_copy view_copy vsplit vstack wait warn where xlogy xlogy_ zero zero_ zeros zeros_like zfill
        """,
    )
)

#: Operators of `aten` in exported programs, where `export_shapes` checks their arguments.
ATEN_OF_EXPORT = frozenset(
    re.findall(
        r"\w+",
        """
        _embedding_bag _embedding_bag_forward_only _fft_c2c _fft_c2r _fft_r2c _native_batch_norm_legit
        _native_batch_norm_legit_functional _native_batch_norm_legit_no_training native_group_norm
        """,
    )
)

#: Operators of `prim` in TorchScript.
PRIM = frozenset(
    re.findall(
        r"\w+",
        """
        AutogradZero ConstantChunk EnumName EnumValue IfThenElse ModuleContainerIndex NumToTensor Print
        RaiseException StringIndex TimePoint TupleIndex TupleUnpack Uninitialized abs awaitable_nowait
        awaitable_wait data device dtype grad id index is_cpu is_cuda is_ipu is_maia is_meta is_mkldnn is_mps
        is_mtia is_nested is_quantized is_sparse is_sparse_csr is_vulkan is_xla is_xpu itemsize layout max min
        name nbytes rangelist requires_grad tolist type unchecked_cast unchecked_unwrap_optional
        """,
    )
)

#: Operators of `quantized` and `_quantized`.
QUANTIZED = frozenset(
    re.findall(
        r"\w+",
        """
        _wrapped_linear_prepack _wrapped_quantized_linear_prepacked add add_out add_relu add_relu_out add_scalar
        add_scalar_out add_scalar_relu add_scalar_relu_out batch_norm batch_norm1d batch_norm1d_relu
        batch_norm2d batch_norm2d_relu batch_norm3d batch_norm3d_relu batch_norm_relu cat cat_out cat_relu
        cat_relu_out celu clamp conv1d conv1d_dynamic conv1d_prepack conv1d_relu conv1d_unpack conv2d conv2d_add
        conv2d_add_relu conv2d_dilation conv2d_dynamic conv2d_groups conv2d_output_padding conv2d_padding
        conv2d_prepack conv2d_relu conv2d_stride conv2d_transpose conv2d_unpack conv2d_unpack_sizes conv3d
        conv3d_dilation conv3d_dynamic conv3d_groups conv3d_output_padding conv3d_padding conv3d_prepack
        conv3d_relu conv3d_stride conv3d_transpose conv3d_unpack conv_prepack conv_transpose1d
        conv_transpose1d_dynamic conv_transpose1d_prepack conv_transpose1d_unpack conv_transpose2d
        conv_transpose2d_dilation conv_transpose2d_dynamic conv_transpose2d_groups
        conv_transpose2d_output_padding conv_transpose2d_padding conv_transpose2d_prepack
        conv_transpose2d_stride conv_transpose2d_transpose conv_transpose2d_unpack conv_transpose3d
        conv_transpose3d_dilation conv_transpose3d_dynamic conv_transpose3d_groups
        conv_transpose3d_output_padding conv_transpose3d_padding conv_transpose3d_prepack
        conv_transpose3d_stride conv_transpose3d_transpose conv_transpose3d_unpack conv_unpack dropout elu
        embedding_4bit embedding_bag_2bit_prepack embedding_bag_2bit_prepack_with_rowwise_min_max
        embedding_bag_2bit_unpack embedding_bag_4bit embedding_bag_4bit_prepack
        embedding_bag_4bit_prepack_with_rowwise_min_max embedding_bag_4bit_unpack embedding_bag_byte
        embedding_bag_byte_prepack embedding_bag_byte_prepack_with_rowwise_min_max embedding_bag_byte_unpack
        embedding_bag_prepack embedding_bag_unpack embedding_byte group_norm hardswish instance_norm
        int4mm_packed_weight_cpu layer_norm leaky_relu linear linear_dynamic linear_dynamic_fp16
        linear_dynamic_fp16_unpacked_weight linear_leaky_relu linear_prepack linear_prepack_fp16
        linear_prepack_fp16_legacy linear_prepack_legacy linear_relu linear_relu_dynamic
        linear_relu_dynamic_fp16 linear_tanh linear_unpack linear_unpack_fp16
        linear_with_input_q_dq_qweight_dq_output_fp32 linear_with_input_q_dq_qweight_dq_relu_output_fp32
        make_quantized_cell_params make_quantized_cell_params_dynamic make_quantized_cell_params_fp16 matmul
        max_pool1d max_pool2d mul mul_out mul_relu mul_relu_out mul_scalar mul_scalar_out mul_scalar_relu
        mul_scalar_relu_out prelu quantized_gru_cell_dynamic quantized_lstm_cell_dynamic
        quantized_rnn_relu_cell_dynamic quantized_rnn_tanh_cell_dynamic relu6 sigmoid softmax threshold
        wrapped_fbgemm_linear_fp16_weight wrapped_fbgemm_pack_gemm_matrix_fp16 wrapped_quantized_linear
        """,
    )
)
#: Operators on graphs that torch.export writes. Others call what their arguments name, or compile it.
HIGHER_ORDER = frozenset(
    re.findall(
        r"\w+",
        """
        associative_scan auto_functionalized auto_functionalized_v2 cond graphsafe_run_with_rng_state
        hints_wrapper invoke_subgraph local_map_hop map map_impl
        out_dtype run_and_save_rng_state run_with_rng_state scan strict_mode tag_activation_checkpoint while_loop
        while_loop_stack_output with_effects wrap_activation_checkpoint wrap_with_autocast wrap_with_set_grad_enabled
        """,
    )
)


def _read_lines(text: str) -> dict[str, frozenset[str]]:
    lines = (line.partition(":") for line in text.split(";"))
    return {namespace.strip(): frozenset(names.split()) for namespace, _, names in lines}


#: Operators of the smaller namespaces of torch 2.13, torchvision and torchaudio, and of runtimes for phones.
OTHERS = _read_lines(
    """
    prims: abs acos acosh add amax amin as_strided as_strided_scatter asin asinh atan atan2 atanh bessel_i0 bessel_i0e
        bessel_i1 bessel_i1e bessel_j0 bessel_j1 bitwise_and bitwise_not bitwise_or bitwise_xor broadcast_in_dim cat
        cbrt ceil clone collapse collapse_view conj conj_physical convert_element_type copy_strided copy_to cos cosh
        device_put digamma div empty empty_permuted empty_strided eq erf erf_inv erfc erfcx exp exp2 expm1 fft_c2c
        fft_c2r fft_r2c fill floor fmax fmin fmod frexp full full_like gcd ge gt hypot igamma igammac imag iota
        isfinite item le lgamma log log10 log1p log2 lt maximum maximum_value minimum minimum_value mul ndtri ne neg
        nextafter normal pow prod real reciprocal remainder reshape resize rev round rsqrt scalar_tensor shift_left
        shift_right_arithmetic sign signbit sin sinh spherical_bessel_j0 split_dim sqrt squeeze sub sum svd tan tanh
        transpose trunc uniform var view_of view_of_dtype where xor_sum zeta;
    rngprims: philox_rand;
    quantized_decomposed: _choose_qparams_per_token_asymmetric_impl choose_qparams choose_qparams_per_token
        choose_qparams_per_token_asymmetric choose_qparams_symmetric convert_element_type dequantize_per_channel
        dequantize_per_channel_group dequantize_per_tensor dequantize_per_token fake_quant_per_channel
        quantize_per_channel quantize_per_channel_group quantize_per_tensor quantize_per_token;
    quantization: _Bfloat16QuantizedToFloat _FloatToBfloat16Quantized;
    sparse: qlinear qlinear_dynamic qlinear_prepack qlinear_relu qlinear_relu_dynamic qlinear_unpack;
    mkldnn_prepacked: conv2d_prepack conv2d_run;
    onednn: linear_dynamic_fp16 linear_prepack_fp16 linear_relu_dynamic_fp16 qadd qadd_relu qbatch_norm2d
        qconv1d_pointwise qconv2d_pointwise qconv3d_pointwise qconv_pointwise qconv_prepack qlinear_pointwise
        qlinear_prepack qmul;
    prepacked: conv2d_clamp_prepack conv2d_clamp_run conv2d_transpose_clamp_prepack conv2d_transpose_clamp_run
        linear_clamp_prepack linear_clamp_run unpack_prepacked_sizes_conv2d unpack_prepacked_sizes_linear;
    metal_prepack: conv2d_prepack conv2d_run linear_prepack linear_run unpack_prepacked_sizes_conv2d
        unpack_prepacked_sizes_linear;
    vulkan_prepack: conv2d_clamp_prepack conv2d_clamp_run create_conv2d_context create_gru_context
        create_linear_context create_lstm_context create_tconv2d_context linear_prepack linear_run run_conv2d_context
        run_gru_context run_linear_context run_lstm_context run_tconv2d_context;
    onnx: Attention Reshape RotaryEmbedding Shape;
    onnx_symbolic: _symbolic _symbolic_multi_out;
    profiler: _record_function_enter _record_function_enter_new _record_function_exit;
    cuda: _current_device _set_device current_stream default_stream set_stream synchronize;
    c10d_functional: all_gather_into_tensor all_gather_into_tensor_coalesced all_reduce all_reduce_coalesced
        all_to_all_single broadcast reduce_scatter_tensor reduce_scatter_tensor_coalesced wait_tensor;
    _c10d_functional: all_gather_into_tensor all_gather_into_tensor_coalesced all_gather_into_tensor_out all_reduce
        all_reduce_ all_reduce_coalesced all_reduce_coalesced_ all_to_all_single broadcast broadcast_
        reduce_scatter_tensor reduce_scatter_tensor_coalesced reduce_scatter_tensor_out wait_tensor;
    _c10d_functional_autograd: all_gather_into_tensor all_to_all_single reduce_scatter_tensor;
    torchvision: deform_conv2d nms ps_roi_align ps_roi_pool roi_align roi_pool;
    image: decode_avif decode_gif decode_heic decode_image decode_jpeg decode_png decode_webp encode_jpeg encode_png;
    torchaudio: _lfilter _lfilter_core_loop _overdrive_core_loop forced_align rnnt_loss rnnt_loss_forward
    """
)
