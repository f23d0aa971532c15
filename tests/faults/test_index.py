"""Which faults that people reported in public are held by which tests: issue -> `file::test`, read by whoever wants to know.

Each is a case of a kind; the tests hold the kind. Left out are faults of axes and features that this version does not have.
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

INDEX = {
    # sizes that do not divide
    "pytorch/pytorch#150336": "faults/test_uneven.py::test_a_hidden_size_the_axis_does_not_divide_keeps_its_true_width",
    "pytorch/pytorch#110762": "faults/test_uneven.py::test_a_boundary_of_five_over_two_ranks_is_five_everywhere",
    "pytorch/pytorch#144109": "runtime/test_extents.py::test_two_axes_left_to_right_and_on_different_dims",
    "pytorch/torchtitan#1306": "faults/test_uneven.py::test_an_odd_sequence_under_sequence_parallelism",
    "pytorch/torchtitan#686": "faults/test_uneven.py::test_an_odd_sequence_under_sequence_parallelism",
    "pytorch/pytorch#163241": "faults/test_uneven.py::test_a_mean_over_unequal_shards_weighs_every_element_once",
    "pytorch/pytorch#103306": "faults/test_uneven.py::test_five_rows_over_four_ranks",
    "pytorch/pytorch#137342": "faults/test_uneven.py::test_a_first_dim_smaller_than_the_data_axis",
    # heads and parts of a fused projection
    "pytorch/torchtitan#2574": "faults/test_heads.py::test_kv_heads_fewer_than_ranks",
    "huggingface/transformers#48307": "faults/test_heads.py::test_heads_that_do_not_divide_although_their_columns_do",
    "NVIDIA-NeMo/Automodel#799": "faults/test_heads.py::test_kv_heads_that_do_not_divide_while_heads_do",
    "NVIDIA/Megatron-LM#1699": "faults/test_heads.py::test_a_key_shared_by_all_heads_gets_its_gradient_from_every_rank",
    "NVIDIA-NeMo/Automodel#1324": "faults/test_fused.py::test_a_fused_projection_is_exact_with_and_without_declared_parts",
    "NVIDIA-NeMo/Automodel#1357": "faults/test_fused.py::test_data_sharding_that_cuts_inside_a_fused_group",
    "pytorch/torchtitan#4535": "faults/test_fused.py::test_the_logical_size_of_a_part_is_tested_and_not_the_stored_one",
    "pytorch/pytorch#149701": "faults/test_fused.py::test_a_rank_holds_its_rows_of_every_part_and_gathering_restores_the_order",
    "ROCm/Megatron-LM#63": "runtime/test_checkpoint.py::test_fused_parts_return_to_the_users_row_order",
    # tied weights
    "facebookresearch/fairseq2#1380": "faults/test_tied.py::test_an_embedding_tied_to_the_head_gets_both_gradients",
    "pytorch/torchtitan#2252": "faults/test_tied.py::test_an_embedding_tied_to_the_head_gets_both_gradients",
    "pytorch/pytorch#176076": "faults/test_tied.py::test_a_tied_weight_in_two_fsdp_units_is_refused",
    # names, wrappers, adapters
    "pytorch/pytorch#157182": "faults/test_names.py::test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names",
    "pytorch/pytorch#117399": "faults/test_names.py::test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names",
    "pytorch/pytorch#143969": "faults/test_names.py::test_names_are_the_users_inside_a_checkpoint_wrapper",
    "pytorch/pytorch#122968": "faults/test_names.py::test_overlapping_wildcards_are_refused_unless_the_later_one_overrides",
    "meta-pytorch/torchtune#2379": "faults/test_names.py::test_a_wildcard_is_one_segment_and_says_so_when_a_wrapper_is_between",
    "huggingface/peft#2394": "faults/test_names.py::test_a_plan_for_the_bare_model_says_what_an_adapter_moved",
    "huggingface/peft#3044": "faults/test_names.py::test_adapters_follow_their_base",
    "meta-pytorch/opacus#789": "faults/test_names.py::test_adapters_follow_their_base",
    "saforem2/ezpz#208": "faults/test_changed.py::test_a_change_after_lowering_is_refused_and_a_look_is_not",
    "axolotl-ai-cloud/axolotl#2992": "faults/test_weights.py::test_a_weight_of_a_unit_that_the_parent_reads",
    "Lightning-AI/litgpt#1417": "lowering/test_fsdp.py::test_frozen_parameters_stay_frozen_and_send_no_gradient",
    # options and meshes
    "Tencent-Hunyuan/UniRL#321": "faults/test_options.py::test_a_misspelt_sharding_strategy_is_refused",
    "pytorch/pytorch#161776": "faults/test_options.py::test_roles_go_by_name_in_any_order",
    "pytorch/pytorch#154888": "faults/test_options.py::test_replicas_of_one_shard_still_average_gradients",
    "pytorch/pytorch#127213": "faults/test_mesh.py::test_axes_of_one_rank_are_the_plain_model_without_communication",
    "huggingface/accelerate#3798": "faults/test_mesh.py::test_axes_of_one_rank_are_the_plain_model_without_communication",
    "axolotl-ai-cloud/axolotl#2977": "faults/test_mesh.py::test_a_mesh_that_does_not_multiply_to_the_world_is_refused",
    "cornstarch-org/Cornstarch#76": (
        "mesh/test_build.py::test_ranks_that_would_build_different_groups_all_raise_before_any_is_made"
    ),
    "pytorch/pytorch#193224": "cli/test_ranks.py::test_order_moves_axes_by_name",
    "NVIDIA-NeMo/Automodel#2768": "lowering/test_fsdp.py::test_refusals_say_what_would_be_legal",
    # inputs and outputs
    "meta-pytorch/autoparallel#486": "faults/test_inputs.py::test_keyword_only_inputs_in_any_order",
    "meta-pytorch/autoparallel#423": "faults/test_inputs.py::test_nested_inputs_are_sharded_and_each_rank_gets_its_part",
    "pytorch/pytorch#115957": "faults/test_inputs.py::test_each_layout_names_its_argument",
    "pytorch/torchtitan#3374": "faults/test_inputs.py::test_a_module_that_returns_what_is_not_a_tensor",
    "pytorch/pytorch#153077": "faults/test_inputs.py::test_tensors_in_a_container_are_cast_and_one_that_nobody_knows_is_refused",
    "huggingface/accelerate#3092": "faults/test_inputs.py::test_ranks_of_one_tp_group_given_different_batches_are_caught",
    # buffers and initial values
    "EvolvingLMMs-Lab/lmms-engine#185": "faults/test_buffers.py::test_unsaved_buffers_of_a_meta_model_are_rebuilt_on_every_rank",
    "NovaSky-AI/SkyRL#1709": "faults/test_buffers.py::test_a_model_real_on_one_rank_and_on_meta_on_another_is_refused",
    "pytorch/pytorch#164554": "runtime/test_meta.py::test_an_empty_shard_is_materialised_and_fsdp_trains_on_the_new_storage",
    "pytorch/torchtitan#3106": "faults/test_random.py::test_dropout_masks_are_one_devices_on_any_mesh",
    "pytorch/pytorch#168058": "faults/test_random.py::test_initial_values_are_one_devices_on_any_mesh",
    "NVIDIA-NeMo/Automodel#1675": "faults/test_layers.py::test_the_padding_row_of_a_split_table_is_zero_on_its_owner",
    # gradients: replicated parameters, partial values, biases
    "pytorch/torchtitan#2532": "faults/test_replicated.py::test_a_norm_of_one_head_over_split_heads",
    "NVIDIA-NeMo/RL#3716": "faults/test_replicated.py::test_a_norm_of_one_head_over_split_heads",
    "NVIDIA/TransformerEngine#441": (
        "faults/test_replicated.py::test_a_norm_of_one_head_stays_equal_on_all_ranks_over_three_steps"
    ),
    "pytorch/pytorch#172932": "faults/test_bias.py::test_two_branches_that_stay_partial_until_they_are_added",
    "awslabs/slapo#10": "faults/test_bias.py::test_the_bias_of_a_row_split_linear_is_added_once",
    "pytorch/torchtitan#2106": "faults/test_bias.py::test_two_row_split_branches_with_biases_of_their_own",
    "EleutherAI/gpt-neox#962": "faults/test_bias.py::test_the_bias_of_a_row_split_linear_is_added_once",
    # optimizers and clipping
    "pytorch/pytorch#109101": "faults/test_optimizer.py::test_an_optimizer_built_before_is_refused",
    "pytorch/pytorch#134212": "faults/test_optimizer.py::test_a_partly_planned_model_steps_in_one_list",
    "areal-project/AReaL#335": "faults/test_optimizer.py::test_the_norm_counts_each_element_once_and_takes_a_generator",
    "NVIDIA/Megatron-LM#7452 (8)": "faults/test_optimizer.py::test_the_norm_counts_each_element_once_and_takes_a_generator",
    "ROCm/TransformerEngine#715": "faults/test_optimizer.py::test_the_norm_counts_each_element_once_and_takes_a_generator",
    "pytorch/pytorch#180346": "runtime/test_clip.py::test_each_element_counts_once_whatever_its_mesh_and_layout",
    "huggingface/accelerate#4219": "runtime/test_clip.py::test_each_element_counts_once_whatever_its_mesh_and_layout",
    # losses
    "pytorch/torchtitan#3412": "faults/test_vocab_loss.py::test_losses_that_a_model_writes_itself",
    "NVIDIA/Megatron-LM#737": "faults/test_vocab_loss.py::test_a_loss_of_split_logits",
    "NVIDIA/Megatron-LM#7452 (1)": "faults/test_vocab_loss.py::test_a_loss_of_split_logits",
    "NVIDIA/Megatron-LM#7452 (2)": "faults/test_vocab_loss.py::test_a_loss_of_split_logits",
    "bigscience-workshop/Megatron-DeepSpeed#394": "faults/test_vocab_loss.py::test_a_split_loss_in_float32_is_within_rounding",
    "pytorch/torchtitan#2206": "faults/test_loss_scale.py::test_a_token_mean_of_unequal_counts_outside_the_model",
    "NVIDIA/Megatron-LM#7452 (3)": "faults/test_loss_scale.py::test_an_extra_head_counts_its_own_tokens",
    # FSDP and accumulation
    "pytorch/pytorch#153354": "faults/test_recompute.py::test_two_forwards_before_one_backward_under_fsdp",
    "NVIDIA/cosmos-framework#162": "lowering/test_fsdp.py::test_four_microbatches_meet_the_replicas_once_a_unit",
    "pytorch/pytorch#196996": "lowering/test_fsdp.py::test_what_is_first_used_at_the_last_microbatch_under_bf16",
    # checkpoints
    "NVIDIA/Megatron-LM#6024": "runtime/test_checkpoint.py::test_seven_rows_saved_on_two_load_on_three_four_and_one",
    "huggingface/transformers#48569": (
        "runtime/test_checkpoint.py::test_saving_on_some_ranks_raises_soon_and_leaves_ranks_in_step"
    ),
    "hpcaitech/ColossalAI#6108": "runtime/test_checkpoint.py::test_what_was_written_is_checked_before_it_takes_its_place",
    "huggingface/transformers#36436": "runtime/test_checkpoint.py::test_fsdp_and_tp_with_adam_load_on_one_device",
    "huggingface/transformers#37051": "runtime/test_checkpoint.py::test_fsdp_and_tp_with_adam_load_on_one_device",
    "pytorch/torchtitan#811": "runtime/test_checkpoint.py::test_resharding_moves_bits_unchanged",
    "pytorch/torchtitan#2622": "runtime/test_checkpoint.py::test_saved_keys_equal_the_eager_models_for_every_wrapper_order",
    # recompute and compile
    "meta-pytorch/torchtune#2451": "faults/test_recompute.py::test_two_forwards_before_one_backward_under_tp",
    "NVIDIA-NeMo/RL#1203": "faults/test_recompute.py::test_routing_is_the_same_when_it_is_computed_again",
    "pytorch/pytorch#185356": "faults/test_layers.py::test_split_tables_of_a_compiled_model_mask_each_call_anew",
    # operators and layers
    "pytorch/pytorch#131264": "faults/test_layers.py::test_two_vocabulary_split_tables_do_not_share_masks",
    "pytorch/pytorch#163193": "faults/test_ops.py::test_an_operation_on_a_split_or_partial_value",
    "pytorch/pytorch#159856": "faults/test_ops.py::test_an_operation_on_a_split_or_partial_value",
    "pytorch/pytorch#162460": "faults/test_ops.py::test_an_operation_on_a_split_or_partial_value",
    "pytorch/pytorch#153603": "faults/test_ops.py::test_an_operation_on_a_split_or_partial_value",
    "pytorch/pytorch#191926": "faults/test_layers.py::test_an_image_split_by_width_is_exact",
    "pytorch/pytorch#176446": "faults/test_layers.py::test_a_split_batch_of_images",
    "pytorch/pytorch#184825": "faults/test_layers.py::test_a_split_batch_of_images",
    # sequences over cp
    "huggingface/transformers#36607": "faults/test_context.py::test_a_shift_inside_loses_no_target_at_the_seams",
    "huggingface/transformers#48570": "faults/test_context.py::test_shifted_labels_that_a_model_ignores_are_refused",
    "huggingface/accelerate#4177": "faults/test_context.py::test_a_mask_is_never_replaced_by_plain_causal",
    "pytorch/pytorch#152261": (
        "distributed/test_context.py::test_shards_are_dealt_in_zigzag_order_and_gathered_outputs_are_in_true_order"
    ),
    "pytorch/pytorch#147793": "faults/test_context.py::test_whichever_kernel_a_model_asks_for_is_replaced_alike",
    "jzhang38/EasyContext#47": "faults/test_context.py::test_a_length_that_does_not_divide_is_refused_before_the_first_step",
    "zhuzilin/ring-flash-attention#46": "ops/attention/test_exact.py::test_gloo_ranks_are_one_device",  # documents of 5, 12, 7
    "xdit-project/xDiT#471": "faults/test_context.py::test_the_whole_length_comes_back_in_order",
    "NVIDIA/Megatron-LM#1464": "distributed/test_context.py::test_three_steps_are_those_of_one_device",
    "pytorch/torchtitan#4387": "faults/test_context.py::test_image_slots_are_found_in_the_full_sequence",
    "huggingface/trl#4314": "faults/test_context.py::test_adapters_recompute_and_fsdp_go_together_with_cp",
    # experts
    "pytorch/pytorch#160285": "distributed/test_experts.py::test_two_steps_with_weight_decay_are_those_of_one_device",
    "NVIDIA/Megatron-LM#5956": "distributed/test_experts.py::test_two_steps_with_weight_decay_are_those_of_one_device",
    "huggingface/transformers#48205": "distributed/test_experts.py::test_two_steps_with_weight_decay_are_those_of_one_device",
    "pytorch/torchtitan#2416": "distributed/test_experts.py::test_two_steps_with_weight_decay_are_those_of_one_device",
    "NVIDIA/Megatron-LM#5916": "distributed/test_experts.py::test_accumulated_and_clipped_steps_are_those_of_one_device",
    "NVIDIA/Megatron-LM#785": "distributed/test_experts.py::test_accumulated_and_clipped_steps_are_those_of_one_device",
    "NVIDIA-NeMo/Automodel#3680": "distributed/test_experts.py::test_any_routing_is_exact",
    "NVIDIA/Megatron-LM#4851": "distributed/test_experts.py::test_any_routing_is_exact",
    "sgl-project/sglang#25397": "distributed/test_experts.py::test_any_routing_is_exact",
    "PrimeIntellect-ai/prime-rl#3411": "ops/experts/test_exact.py::test_gloo_ranks_are_one_device",  # 5 and 9 tokens
    "InternLM/xtuner#2053": "ops/experts/test_exact.py::test_ranks_are_one_device",
    "pytorch/torchtitan#3000": "distributed/test_balance.py::test_two_microbatches_are_no_larger_batch",
    "pytorch/torchtitan#4154": "distributed/test_moe.py::test_biases_move_by_the_choices_of_all_ranks",
    "pytorch/torchtitan#1506": "ops/experts/test_balance.py::test_recompute_counts_nothing_twice",
    "vllm-project/tpu-inference#3435": "ops/experts/test_layout.py::test_a_shared_expert_that_every_rank_has_is_added_once",
    "sgl-project/sglang#35535": "ops/experts/test_layout.py::test_a_shared_expert_that_every_rank_has_is_added_once",
    # what verify says
    "pytorch/torchtitan#1750": "verify/test_run.py::test_a_right_program_passes_every_check",
    "NVIDIA/Megatron-LM#1736": "verify/test_run.py::test_float32_passes_at_its_own_tolerance",
}


@cache
def names_in(file: str) -> frozenset[str]:
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


@pytest.mark.parametrize("issue", INDEX)
def test_the_test_that_holds_an_issue_exists(issue):
    assert re.fullmatch(r"[\w.-]+/[\w.-]+#\d+( \(\d+\))?", issue)
    file, _, name = INDEX[issue].partition("::")
    assert name in names_in(file)


def test_every_issue_that_a_test_of_faults_names_is_in_the_index():
    # Tests name them as project#number; NeMo's repositories are called after their product alone.
    short = {issue.partition("/")[2].partition(" ")[0] for issue in INDEX} | {"NeMo-RL#1203", "NeMo-RL#3716", "oslo#85"}
    for file in (TESTS / "faults").glob("test_*.py"):
        if file.name != Path(__file__).name:
            assert set(re.findall(r"[A-Za-z][\w-]*#\d+", file.read_text(encoding="utf-8"))) <= short, file.name
