"""What mends each finding of the doctor at a vLLM server."""

from megatron_rl_corr.engines.vllm.updates import EXTENSION

_TESTED = "vLLM 0.32 or 0.33"
_INVARIANT = "with VLLM_BATCH_INVARIANT=1 in its environment"
_PROCESSED = "start the server with --logprobs-mode processed_logprobs"
_V2 = "with VLLM_USE_V2_MODEL_RUNNER=1 in its environment where that is not the default"
_WHOLE = "train with --rollout-top-p 1 --rollout-top-k -1"
REMEDIES = {
    "temperature_ignored": f"train with --rollout-temperature 1, or serve with {_TESTED}",
    "logprobs_without_temperature": f"{_PROCESSED}, or train with --rollout-temperature 1",
    "logprobs_of_another_temperature": f"train with --rollout-temperature 1, or serve with {_TESTED}",
    "logprobs_of_another_set": f"{_PROCESSED}, or {_WHOLE}",
    "sampling_mask_missing": f"start the server with --return-sampling-mask, {_V2}, or {_WHOLE}",
    "sampling_mask_wrong": f"{_PROCESSED}, or {_WHOLE}",
    "one_response": f"serve with {_TESTED}",
    "another_checkpoint": "start the server with the --model that --rollout-hf-checkpoint names; where it "
    "was sent weights, restart it: a broken update leaves wrong ones behind",
    "ids_differ": "start the server with the --model that --rollout-hf-checkpoint names, without a logits "
    "processor of its own; where it was sent weights, push them again",
    "servers_differ": "start all servers with one --model and one --dtype, and push the weights to all of "
    "them",
    "vocabulary_differs": "start the server with the --model and --tokenizer that --rollout-hf-checkpoint "
    "names",
    "dtype_differs": "start the server with the trainer's --dtype, or correct with "
    "--rollout-correction-preset decoupled_token_is",
    "model_difference": "start the server with --dtype float32, or correct with --rollout-correction-preset "
    "decoupled_token_is",
    "decode_prefill_difference": f"start the server with another --attention-backend, or {_INVARIANT}",
    "not_deterministic": f"start the server {_INVARIANT}",
    "routed_experts_missing": f"start the server with --enable-return-routed-experts, {_V2}",
    "routed_experts_wrong": f"serve with {_TESTED}, and with the checkpoint that --rollout-hf-checkpoint "
    "names",
    "version_unsupported": f"serve with {_TESTED}",
    "no_weight_updates": f"serve with {_TESTED}, VLLM_SERVER_DEV_MODE=1 in its environment, and {EXTENSION}",
    "quantisation_unsupported": "serve the model in 16 bits",
    "stale_prefix_cache": "pause with clear_cache=true, or POST /reset_prefix_cache after every weight "
    "update (a push of ours does), or start with --no-enable-prefix-caching",
    "version_spans_wrong": f"pause with retract (a push of ours does), or serve with {_TESTED}",
    "pause_mode_broken": f"serve with {_TESTED}; a push of ours needs the mode retract",
    "update_without_effect": "look for a failed load in the server's log, and restart it",
    "state_not_restored": "restart the server, or push the weights again",
}
"""A name in the doctor's DEFECTS -> what to do."""
