# Sourced by recipe.sh: what `megatron-rl-corr plan` is asked for a recipe, with the flags that are added behind it.

# What is added for the trainer and `plan` counts, under plan's names, into the array ADDED: of two values the last one wins there too.
added_plan_flags() {
    local flag length="" response=$RESPONSE_TOKENS
    ADDED=()
    set -- "${EXTRA_FLAGS[@]}"
    while [ $# -gt 0 ]; do
        flag=${1%%=*}
        if [ "$flag" = "$1" ]; then shift; else set -- "${1#*=}" "${@:2}"; fi # --flag=value
        case $flag in
        --rollout-linear-logprobs | --optimizer-cpu-offload) ADDED+=("${flag/rollout-/}"); continue ;;
        esac
        [ $# -gt 0 ] || break
        case $flag in
        --tensor-model-parallel-size | --pipeline-model-parallel-size | --context-parallel-size | --expert-model-parallel-size | \
            --expert-tensor-parallel-size | --global-batch-size) ADDED+=("$flag" "$1") ;;
        --rollout-max-tokens-per-microbatch | --rollout-group-size) ADDED+=("${flag/rollout-/}" "$1") ;;
        --recompute-granularity) ADDED+=(--recompute "$1") ;;
        --rollout-max-new-tokens) response=$1 ADDED+=(--max-new-tokens "$1") ;;
        --seq-length) length=$1 ;;
        esac
    done
    # The rest of the longest sample is its prompt; where nothing is left the check of the flags says so.
    if [ -n "$length" ] && [ "$length" -gt "$response" ]; then ADDED+=(--max-prompt-tokens $((length - response))); fi
    [ ${#EXTRA_FLAGS[@]} = 0 ] || say "of the flags that you added the plan counts these, by its names, and no others: ${ADDED[*]:-none}"
}

# GiB of a GPU: GPU_GIB, else of the smallest of this machine, else 80.
gpu_gib() {
    local found=${GPU_GIB:-}
    if [ -z "$found" ] && command -v nvidia-smi >/dev/null; then
        found=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null |
            awk '/^ *[0-9]+ *$/ && (least == "" || $1 < least) {least = $1} END {if (least != "") printf "%.1f", least / 1024}') || found=""
    fi
    echo "${found:-80}"
}

plan() {
    local serving=$((SERVE_NODES * $(count "$GPUS_SERVE")))
    added_plan_flags
    ADDED+=(--gpu-memory-gib "$(gpu_gib)")
    if colocated; then
        "$PYTHON" -m megatron_rl_corr.cli plan --hf-checkpoint "$MODEL" --gpus "$(count "$GPUS_TRAIN")" \
            --serve-tensor-parallel-size "$SERVER_GPUS" "${PLAN_FLAGS[@]}" "${ADDED[@]}"
        return
    fi
    "$PYTHON" -m megatron_rl_corr.cli plan --hf-checkpoint "$MODEL" \
        --gpus $((NODES * $(count "$GPUS_TRAIN") + serving)) --serve-gpus $serving \
        --serve-tensor-parallel-size "$SERVER_GPUS" "${PLAN_FLAGS[@]}" "${ADDED[@]}"
}
