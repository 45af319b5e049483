"""How torch's own tests of FSDP2 end here: those that do not pass, each with its reason.

The tests of torch 2.6 (test/distributed/_composable/fsdp) on CPU ranks over gloo, `fully_shard`
replaced at import. They are no part of this project; 89 of them pass there with torch 2.13's own.
"""

APPLY = 89

# Reason -> the tests that end by it.
ENDINGS = {
    "*refused*: tensor subclasses that gather themselves": (
        "extensions: test_all_gather_extensions_train_parity",
        "extensions: test_all_gather_extensions_end_to_end",
        "extensions: test_all_gather_extensions_monkey_patch",
        "extensions: test_all_gather_extension_outer_size_stride",
        "extensions: test_all_gather_extension_hsdp_mesh",
    ),
    "*better*: over gloo, 16-bit gradients are summed in fp32": (
        "mixed_precision: test_reduce_dtype",
    ),
    "*better*: expects an error of what works here, a scalar and a non-contiguous parameter": (
        "init: test_raise_scalar_parameter",
        "init: test_raise_noncontiguous_parameter",
    ),
    "*other*: gathered parameters that are cut along another dim than 0 are strided views": (
        "training: test_shard_placement_fn_contiguous_params_grads",
    ),
    "*other*: expects each parameter cut along dim 0, with a piece on every rank": (
        "init: test_shard_tensor_parameters",
        "init: test_hsdp_broadcast_across_replicas",
        "init: test_rank0_broadcast_meta_device_init",
        "state_dict: test_dp_state_dict_save_load",
    ),
    "*other*: the norm of `clip_grad_norm_` is a plain tensor": ("clip: test_clip_grad_norm_1d",),
    "*other*: `model.parameters()` are the sharded ones, also while gathered ones are in place": (
        "comm: test_unshard_without_lazy_init",
    ),
    "counts collectives by name: gathers over gloo are sends between pairs of ranks": (
        "comm: test_manual_reshard_with_reshard_after_forward_false",
    ),
    "replaces a function inside of torch's implementation to count its calls": (
        "comm: test_fully_shard_multi_module_unused_module",
        "frozen: test_train_mixed_requires_grad_per_group",
        "frozen: test_train_mixed_requires_grad_across_groups",
    ),
    "reads the private state of torch's implementation": (
        "init: test_managed_modules_nested",
        "init: test_managed_modules_nested_fully_shard_and_replicate",
        "init: test_managed_states_nested_fully_shard",
        "init: test_fully_shard_module_and_param_fqns",
        "init: test_fully_shard_double_lazy_init",
    ),
}


def rendered_endings() -> str:
    """The section of the page."""
    failing = sum(map(len, ENDINGS.values()))
    lines = [
        "## torch's own tests",
        "",
        f"Of the tests of FSDP2 in torch 2.6, {APPLY} pass on CPU ranks with torch 2.13; with "
        f"`fully_shard`\nreplaced by this one {APPLY - failing} of them pass. The others:",
        "",
        "| reason | tests |",
        "|---|---|",
    ]
    for reason, tests in ENDINGS.items():
        lines.append(f"| {reason} | {', '.join(f'`{test}`' for test in tests)} |")
    return "\n".join(lines) + "\n"
