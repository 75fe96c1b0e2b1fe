"""Which tests `make test` leaves to `make test-matrix`: they take long, and show in another layout, size or
engine what a test of `make test` shows, or a whole run of what its parts show there.

A file that has some is found by `make test-matrix` by its mark `matrix`, and runs whole there. The folder
tests/matrix is marked by itself, files of LEFT too; others have `pytestmark = matrix`.
"""

import os
from collections.abc import Iterable
from fnmatch import fnmatchcase

import pytest

IN_MATRIX = os.environ.get("MEGATRON_RELEASES") == "all"
"""What make test-matrix sets."""
matrix = pytest.mark.matrix
long = pytest.mark.skipif(not IN_MATRIX, reason="make test-matrix runs it")
"""One test that is left to the matrix."""

WHOLE = ("*",)
LEFT: dict[str, tuple[str, ...]] = {
    # whole runs, whose parts have tests of their own
    "examples/test_router_replay.py": WHOLE,
    "examples/test_tool_use.py": WHOLE,
    "features/test_agent.py": WHOLE,
    "mcore/test_colocation.py": WHOLE,
    "mcore/test_filtered_groups.py": WHOLE,
    "mcore/test_runs.py": ("test_auto_when_*",),
    "mcore/test_score_centering_run.py": WHOLE,
    "matrix/test_library_step.py": WHOLE,
    "matrix/test_resumed_updates.py": WHOLE,
    "matrix/test_mixed_releases.py": WHOLE,
    "matrix/test_doctor_vllm.py": WHOLE,
    "matrix/test_vllm_planted_faults.py": WHOLE,
    "examples/test_arithmetic.py": (
        "test_arithmetic_when_run_*",
        "test_arithmetic_when_its_model_is_made_*",
    ),
    "faults/test_agents.py": ("test_run_when_a_harness_is_killed_*",),
    "faults/test_begun.py": ("test_samples_and_turns_when_killed_*",),
    "faults/test_colocated_server.py": WHOLE,
    "faults/test_dripping.py": ("test_push_when_an_answer_drips_*", "test_server_when_its_health_*[[]head-*"),
    "faults/test_waiting.py": ("test_groups_when_killed_and_loaded_*",),
    "matrix/test_exact_runs.py": ("*[[]updates]", "test_run_without_the_modes_*"),
    "faults/test_push.py": WHOLE,
    "features/test_ledger_causes_runs.py": WHOLE,
    "docs/test_first_gpu_run.py": WHOLE,
    # other layouts
    "mcore/test_gradients.py": ("*_of_moe_in_every_layout_*[[][12]]", "*_of_dense_model_*", "*_centering_*"),
    "mcore/test_hf_models.py": ("*[[]1]", "*[[]1-*"),
    "mcore/test_distillation.py": ("*[[]1]",),
    "mcore/test_branches.py": WHOLE,
    "mcore/test_reference.py": WHOLE,
    "mcore/test_packed.py": ("*[[]4]",),
    "mcore/test_mtp.py": WHOLE,
    "features/test_ledger_places_runs.py": ("test_server_with_old_weights_*",),
    "features/test_ledger_distances_runs.py": ("*[[]*_tp2_ep2]", "test_list_without_the_ids_*"),
    "reduce/test_collectives_benchmark.py": WHOLE,
    # many ranks at once
    "test_scale_benchmark.py": WHOLE,
    # the other engine, or a third fault of the same kind
    "examples/test_agent.py": (
        "test_harness_when_the_policy_calls_*",
        "test_smolagents_*",
        "test_harness_when_a_real_*",
    ),
    "mcore/test_push_probe.py": (
        "test_probe_when_the_first_push_exchanges_two_experts_*",
        "test_probe_when_a_push_leaves_tensors_*",
        "test_probe_in_every_layout_*[[]1-*",
    ),
    "weight_sync/test_push_real_servers.py": (
        "test_push_when_all_weights_changed_*[[]vllm-disk]",
        "test_push_when_all_weights_changed_*[[]vllm-tensor]",
        "test_push_when_a_response_is_running_*[[]vllm]",
        "test_push_when_processes_announce_*",
        "test_push_when_rounded_*[[]*-disk]",
    ),
    "weight_sync/test_changes_real_server.py": (
        "test_changes_when_*_vllm_server_*",
        "*[[]vllm]",
        "*[[]vllm-*",
    ),
    "weight_sync/test_memory_real_server.py": ("test_server_when_asked_in_a_wrong_order_*",),
    "weight_sync/test_fp8_loader.py": ("*[[]qwen2]", "*[[]qwen2_moe]", "*[[]mixtral*", "*[[]kimi*"),
    "rollout/test_client_real_server.py": (
        "test_generate_when_prompts_are_longer_*[[]vllm]",
        "test_pause_when_not_aborting_*[[]vllm-*",
        "test_pause_when_truncated_*[[]vllm-*",
        "test_generate_when_likeliest_ids_*[[]vllm-*",
        "test_generate_when_a_stop_text_*[[]vllm-*",
    ),
    "rollout/test_seeds_real_server.py": WHOLE,
    "rollout/test_in_flight_real_servers.py": WHOLE,
    "rollout/test_retracted_routes.py": ("test_routes_when_a_server_short_of_memory_*",),
    "rollout/test_failover_real_servers.py": ("test_collect_when_one_server_pauses_*",),
    "rollout/test_silence_real_servers.py": ("test_generate_when_a_server_is_paused_*",),
    "rollout/gateway/test_episode_real_server.py": ("*[[]vllm_server_fp32*",),
    "rollout/gateway/test_random_conversations.py": (
        *(f"*[[]trl/{one}*" for one in ("nemotron", "gemma4_v5", "muse", "gpt", "glm", "deepseek")),
        *(f"test_faults_*[[]{one}]" for one in ("mistral", "llama_3_1", "kimi", "gpt_oss")),
    ),
    "engines/test_discovery_real_servers.py": WHOLE,
    "doctor/test_real_server.py": (
        "test_full_*",
        "test_servers_when_their_models_differ_*",
        "test_doctor_when_original_logprobs_*",
        "test_command_when_interrupted_*",
        "test_quick_check_when_every_request_is_drawn_*",
    ),
    "doctor/test_both_engines.py": WHOLE,
    "doctor/test_vocabulary_real_server.py": ("*[[]clean]",),
    "tools/test_local_server.py": ("test_owner_when_killed_*",),
    "tools/test_import_hook.py": ("test_megatron_when_hook_is_absent_*",),
    "logprobs/test_compiled.py": ("test_stats_when_compiled_*[[]torch.bfloat16-*", "test_combine_*[[]8-5]"),
    "core/test_no_host_sync.py": ("test_step_when_tensors_hold_no_data_then_it_runs*",),
    "core/test_kernel_count.py": ("test_correction_when_of_a_preset_*[[]*-False]",),
    "commands/report/test_plots.py": ("test_panels_when_rendered_as_svg_*", "test_overview_when_the_title_*"),
    "commands/report/test_page.py": ("test_page_when_a_trend_warns_*", "test_page_when_nothing_warns_*"),
    "examples/test_study.py": ("test_run_whose_first_gradient_*", "test_runs_whose_first_gradients_*"),
    "test_cli.py": ("test_report_when_the_folder_holds_a_run_*", "test_report_when_matplotlib_*"),
    "rollout/gateway/test_malformed_bodies.py": ("*[[]responses]", "*[[]messages]"),
    "rollout/test_ingest_process.py": (
        "test_error_when_a_server_fails_*",
        "test_process_when_it_starts_slowly_*",
        "test_process_when_a_signal_ends_*",
        "test_process_when_this_one_dies_*",
        "test_process_when_it_is_killed_*",
        "test_episode_of_20_turns_*[[]True]",
        "test_routes_when_of_a_real_server_*",
    ),
    "weight_sync/test_lost_answers.py": WHOLE,
    "mcore/test_step_scale.py": WHOLE,
    "rollout/test_failed_samples_real_server.py": WHOLE,
    "mcore/test_router_replay_effect.py": WHOLE,
    "features/test_ledger_runs.py": (
        "test_terms_of_each_token_*",
        "test_shares_and_means_*",
        *(f"test_planted_fault_*[[]{one}]" for one in ("clean_replayed_pp2", "hot", "narrow", "own_experts")),
        *(f"test_server_with_an_unknown_top_p_*[[]{one}]" for one in ("clean_replayed_pp2", "own_experts")),
    ),
    "weight_sync/test_announcers.py": (
        "test_bucket_when_a_process_is_killed_before_*",
        "test_servers_when_their_router_alone_*",
    ),
    "commands/accept/test_accept.py": ("test_command_when_a_signal_comes_*[[]2-130]",),
    "examples/test_quickstart.py": ("test_stop_while_the_server_starts_*",),
    "examples/test_recipes.py": (
        "test_training_flags_when_one_is_wrong_*[[]words[0-3]-*",
        "test_training_flags_when_one_is_wrong_*[[]words[5-8]-*",
        "test_training_flags_when_colocated_*",
        "test_pinned_memory_*[[]given[13]-*",
        "test_run_when_*",
        "test_slurm_job_*",
        "test_training_flags_when_the_model_has_no_weights_*",
    ),
    "commands/gateway/test_standalone.py": WHOLE,
}
"""File -> patterns of its tests' names, with parameters, that make test leaves out."""


def is_left(nodeid: str) -> bool:
    """True for a test that `make test` leaves to the matrix, by LEFT."""
    path, _, name = nodeid.removeprefix("tests/").partition("::")
    return any(fnmatchcase(name, pattern) for pattern in LEFT.get(path, ()))


def mark_left(items: Iterable[pytest.Item]) -> None:
    """Mark the files of LEFT for make test-matrix; elsewhere, skip their tests that are left to it."""
    for item in items:
        path = item.nodeid.partition("::")[0].removeprefix("tests/")
        if path in LEFT:
            item.add_marker(matrix)
        if is_left(item.nodeid):
            item.add_marker(long)


def in_matrix(*cases) -> list:
    """These cases of a test, in the matrix alone."""
    return list(cases) if IN_MATRIX else []
