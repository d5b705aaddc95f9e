"""Attributes of a module, which no tensor and no module of a program may replace: `_graph` is run by torch.

torch assigns the constants of a program to the module by the names in the signature, over any other attribute. The
modules of `torch.export.unflatten` call each other by their paths. A test compares the list with the installed torch.
Sources: torch/export/_unlift.py (`_register_attrs_to_new_gm`), torch/export/unflatten.py of torch 2.13.
"""

from __future__ import annotations

_NAMES = """
    T_destination _adapt_flat_args _apply _backward_hooks _backward_pre_hooks _boxed_call _buffers _call_impl
    _call_modules _code _compiled_call_impl _create_node_hooks _deepcopy_hooks _deepcopy_init _dispatch_modules
    _erase_node_hooks _forward_hooks _forward_hooks_always_called _forward_hooks_with_kwargs _forward_pre_hooks
    _forward_pre_hooks_with_kwargs _get_backward_hooks _get_backward_pre_hooks _get_name _graph _guards_fn _in_spec
    _is_full_backward_hook _lineno_map _load_from_state_dict _load_state_dict_post_hooks _load_state_dict_pre_hooks
    _maybe_warn_non_full_backward_hook _modules _named_members _non_persistent_buffers_set _num_calls _out_spec
    _parameters _print_graph _prologue_start _recompile_submodules _register_create_node_hook _register_deepcopy_hook
    _register_erase_node_hook _register_load_state_dict_pre_hook _register_replace_node_hook _register_state_dict_hook
    _replace_hooks _replicate_for_data_parallel _run_with_interpreter _save_to_state_dict _set_replace_hook
    _slow_forward _state_dict_hooks _state_dict_pre_hooks _tracer_cls _tracer_extras _ty _unregister_create_node_hook
    _unregister_deepcopy_hook _unregister_erase_node_hook _unregister_replace_node_hook _version _wrapped_call
    _wrapped_call_impl adapted add_module add_submodule apply arg_names bfloat16 buffers call_modules call_super_init
    check_input_constraints children code compile cpu cuda delete_all_unused_submodules delete_submodule double
    dump_patches equality_constraints eval extra_repr finalize flat_args_adapter float forward get_buffer
    get_extra_state get_parameter get_submodule graph graph_module graph_signature half input_placeholders ipu ivals
    load_state_dict meta module_call_graph modules mtia named_buffers named_children named_modules named_parameters
    parameters print_readable process_forward_inputs range_constraints recompile register_backward_hook register_buffer
    register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
    register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
    register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule shape_env
    share_memory state_dict to to_empty to_folder train training type type_name validate_inputs xpu zero_grad
"""
MODULE_ATTRIBUTES = frozenset(_NAMES.split())


def find_module_attribute(name: str) -> str | None:
    """Return the part of a dotted name that is an attribute of modules; None if each part may name a tensor."""
    parts = name.split(".")
    return next((part for part in parts if part in MODULE_ATTRIBUTES or part.startswith("__")), None)
