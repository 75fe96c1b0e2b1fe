"""What mends each finding of the doctor at an SGLang server."""

_DETERMINISTIC = (
    "with --enable-deterministic-inference (it needs --attention-backend fa3, fa4, flashinfer or triton, "
    "and a seed in every request, as ours have)"
)
REMEDIES = {
    "temperature_ignored": "train with --rollout-temperature 1, or serve with an SGLang that applies the "
    "temperature",
    "logprobs_without_temperature": "start the server without SGLANG_RETURN_ORIGINAL_LOGPROB, or train with "
    "--rollout-temperature 1",
    "logprobs_of_another_temperature": "train with --rollout-temperature 1, or serve with an unpatched "
    "SGLang 0.5.23",
    "logprobs_of_another_set": "train with --rollout-top-p 1 --rollout-top-k -1, or serve with SGLang 0.5.23",
    "sampling_mask_missing": "serve with SGLang 0.5.16 or newer, or train with --rollout-top-p 1 "
    "--rollout-top-k -1",
    "sampling_mask_wrong": "train with --rollout-top-p 1 --rollout-top-k -1, or serve with SGLang 0.5.23",
    "one_response": "serve with SGLang 0.5.23, or without --enable-deterministic-inference and "
    "--rl-on-policy-target",
    "another_checkpoint": "start the server with the --model-path that --rollout-hf-checkpoint names",
    "ids_differ": "start the server with the --model-path that --rollout-hf-checkpoint names, without a "
    "logit processor of its own; where it was sent weights, push them again",
    "servers_differ": "start all servers with one --model-path and one --dtype, and push the weights to all "
    "of them",
    "vocabulary_differs": "start the server with the --model-path and --tokenizer-path that "
    "--rollout-hf-checkpoint names",
    "dtype_differs": "start the server with the trainer's --dtype, or correct with "
    "--rollout-correction-preset decoupled_token_is",
    "model_difference": "start the server with --dtype float32, or correct with --rollout-correction-preset "
    "decoupled_token_is",
    "decode_prefill_difference": "start the server with another --attention-backend, or " + _DETERMINISTIC,
    "not_deterministic": "start the server " + _DETERMINISTIC,
    "routed_experts_missing": "start the server with --enable-return-routed-experts",
    "routed_experts_wrong": "serve with SGLang 0.5.23, and with the checkpoint that --rollout-hf-checkpoint "
    "names",
    "version_unsupported": "serve with SGLang 0.5.19 to 0.5.23",
    "no_weight_updates": "serve with SGLang 0.5.19 to 0.5.23",
    "quantisation_unsupported": "serve the model in 16 bits, or its checkpoint in FP8 with weight_block_size "
    "[128, 128]",
    "stale_prefix_cache": "POST /flush_cache after every weight update (a push of ours does), or start with "
    "--disable-radix-cache",
    "version_spans_wrong": "start the server with --disable-overlap-schedule, or pause with retract (a push "
    "of ours does)",
    "pause_mode_broken": "serve with SGLang 0.5.23; a push of ours needs the mode retract",
    "update_without_effect": "look for a failed load in the server's log; serve with SGLang 0.5.23",
    "state_not_restored": "restart the server, or push the weights again",
}
"""A name in the doctor's DEFECTS -> what to do."""
