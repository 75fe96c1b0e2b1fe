# What the recipes of this folder share; a recipe sets its variables and arrays, then calls `recipe "$@"`.
#
#   recipe              one node: starts the servers, waits until they answer, trains, ends the servers
#   recipe --dry-run    checks every flag with SGLang's, Megatron's and our own parsers, and the data; starts nothing
#   recipe --plan       what the layout takes of each GPU
#   recipe --serve      only the servers, on all GPUs of GPUS_SERVE of this node, for trainers on other nodes
#   recipe --train      only the trainer, against the servers of SERVER_URLS
#   recipe --urls       the addresses of this node's servers
#
# What follows goes to the trainer, behind the recipe's own flags: the last of two wins.
#
# Set by the recipe: MODEL DATA OUT GPUS_TRAIN GPUS_SERVE SERVER_GPUS COLOCATED_FRACTION PORT NODES SERVE_NODES and the arrays
# SERVER_FLAGS MEGATRON_FLAGS RUN_FLAGS PLAN_FLAGS.

REPOSITORY=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-$REPOSITORY/.venv/bin/python}
# An ordinary Megatron script. Megatron-LM's own works as well: PRETRAIN=<checkout>/pretrain_gpt.py and PYTHONPATH=<checkout>.
PRETRAIN=${PRETRAIN:-$REPOSITORY/examples/quickstart/pretrain_moe.py}
# The address that servers listen on and are reached at; with several nodes, one of a private network.
SERVER_HOST=${SERVER_HOST:-127.0.0.1}
START_TIMEOUT_S=${START_TIMEOUT_S:-1800}
# What is left of the run so long after it was asked to end is killed.
END_TIMEOUT_S=${END_TIMEOUT_S:-60}

source "$REPOSITORY/examples/recipes/plan.sh"

server_pids=() trainer_pid="" forwarded="" cuda_libraries=""

say() { echo "[recipe] $*"; }
fail() { echo "[recipe] $*" >&2; exit 2; }

# "0,1,2,3" -> 4
count() { local IFS=,; set -- $1; echo $#; }

# The i-th server's GPUs: SERVER_GPUS of GPUS_SERVE.
gpus_of_server() { echo "$GPUS_SERVE" | cut -d, -f$(($1 * SERVER_GPUS + 1))-$((($1 + 1) * SERVER_GPUS)); }

colocated() { [ "${COLOCATE:-0}" != 0 ]; }

# COLOCATE=1: all GPUs train and serve, in turn. Called by a recipe behind its arrays.
set_colocation() {
    colocated || return 0
    [ "$NODES" = 1 ] || fail "COLOCATE=1 with NODES=$NODES: weights are handed over on one machine; leave one of them out"
    SERVER_FLAGS+=(
        --enable-memory-saver           # releases its memory while the trainer trains
        --mem-fraction-static "$COLOCATED_FRACTION" # the trainer's weights stay beside it
    )
    RUN_FLAGS+=(
        --rollout-colocate --rollout-weight-transport tensor # weights by CUDA IPC
        --rollout-max-lag 0             # servers can't sample while the trainer trains
    )
    PLAN_FLAGS+=(--colocate --mem-fraction-static "$COLOCATED_FRACTION")
}

# SGLang and FlashInfer compile kernels as they need them, and Transformer Engine some too: with CUDA_HOME's compiler, or
# else with /usr/local/cuda's, of whatever version. `make setup` has laid the lock's beside PYTHON.
compiler_variables() {
    local environment
    environment=$(dirname "$(dirname "$(command -v "$PYTHON")")")
    [ -d "$environment/cuda" ] || return 0
    environment=$(cd "$environment" && pwd)
    export PATH=$environment/bin:$PATH CUDA_HOME=${CUDA_HOME:-$environment/cuda}
    cuda_libraries=$environment/cuda/lib
    [ "$CUDA_HOME" = "$environment/cuda" ] || say "kernels are compiled by CUDA_HOME=$CUDA_HOME, which was set; the lock's is $environment/cuda"
}

# The checkout's own environment, where `make setup` found no GPU, has no kernels for one. PYTHON= is the user's to know.
check_environment() {
    local problem="$REPOSITORY/.venv was made on a machine without a GPU, and its packages are the CPU's; make setup DEVICE_FOR_SETUP=gpu"
    [ "$PYTHON" = "$REPOSITORY/.venv/bin/python" ] && [ -x "$PYTHON" ] && [ ! -d "$REPOSITORY/.venv/cuda" ] || return 0
    case $1 in
    dry-run) say "this would not start: $problem" ;;
    *) fail "$problem (an environment of your own: PYTHON=)" ;;
    esac
}

# What would leave trainer and servers without each other's turns. The memory saver of the lock looks for expandable segments
# under torch's old name of the variable only; under the new one nothing ends, and it is not known what is released.
check_turns() {
    local name
    [ "$(sorted "$GPUS_TRAIN")" = "$(sorted "$GPUS_SERVE")" ] ||
        fail "COLOCATE=1 with GPUS_TRAIN=$GPUS_TRAIN and GPUS_SERVE=$GPUS_SERVE: every GPU trains and serves; give both the same GPUs"
    for name in PYTORCH_ALLOC_CONF PYTORCH_CUDA_ALLOC_CONF; do
        case ${!name:-} in *expandable_segments:[Tt]rue*)
            fail "$name=${!name} with COLOCATE=1: SGLang's memory saver can't release expandable segments; unset it, or leave COLOCATE out" ;;
        esac
    done
}

# "1,0" -> 0 and 1, a line each
sorted() { tr , '\n' <<<"$1" | sort; }

# Before anything is started: what would put servers and trainer on the same GPUs, or start servers that nobody uses.
check_machines() {
    local gpu
    if [ "$1" != train ] && [ $(($(count "$GPUS_SERVE") % SERVER_GPUS)) != 0 ]; then
        fail "GPUS_SERVE=$GPUS_SERVE: a server takes $SERVER_GPUS GPUs, and these are $(count "$GPUS_SERVE"); give a multiple"
    fi
    if [ "$1" = all ] && [ "$NODES" -gt 1 ]; then
        fail "NODES=$NODES: other machines serve than those that train; give --serve on the former, --train on the latter"
    fi
    if [ "$1" = all ] && [ -n "${SERVER_URLS:-}" ]; then
        fail "SERVER_URLS=$SERVER_URLS: training would use those, and no server that is started here; give --train, or unset it"
    fi
    if [ "$1" = train ] && [ "$NODES" -gt 1 ]; then
        [ -n "${NODE_RANK:-}" ] || fail "NODES=$NODES without NODE_RANK: the number of this machine among those that train, from 0"
        [ -n "${MASTER_ADDR:-}" ] || fail "NODES=$NODES without MASTER_ADDR: the address of the first machine that trains"
    fi
    if colocated; then check_turns; fi
    case $1 in all | dry-run) ;; *) return 0 ;; esac
    if colocated || [ "$NODES" -gt 1 ] || [ -n "${SERVER_URLS:-}" ]; then return 0; fi
    for gpu in ${GPUS_TRAIN//,/ }; do
        case ,$GPUS_SERVE, in *,$gpu,*)
            fail "GPU $gpu is in GPUS_TRAIN=$GPUS_TRAIN and in GPUS_SERVE=$GPUS_SERVE; give each GPU to one, or all to both with COLOCATE=1" ;;
        esac
    done
}

number_of_servers() { echo $(($(count "$GPUS_SERVE") / SERVER_GPUS)); }

server_urls() {
    if [ -n "${SERVER_URLS:-}" ]; then echo "$SERVER_URLS"; return; fi
    local i
    for ((i = 0; i < $(number_of_servers); i++)); do echo "http://$SERVER_HOST:$((PORT + i))"; done
}

# Flags of data as they come: columns question and answer (GSM8K), or messages under prompt and the answer in
# reward_model.ground_truth (DAPO-math-17k, and whatever verl reads).
data_flags() {
    local columns
    columns=" $("$PYTHON" -c 'import sys, pyarrow.parquet as p; print(*p.read_schema(sys.argv[1]).names)' "$DATA") " ||
        fail "DATA=$DATA can't be read as Parquet; name a file with the columns question and answer, or prompt and reward_model"
    case $columns in
    *" question "*) DATA_FLAGS=(
        --rollout-input-key question --rollout-label-key answer --rollout-apply-chat-template
        --rollout-system-prompt 'Reason step by step, and put the final answer into \boxed{}.') ;;
    *" prompt "*) DATA_FLAGS=(--rollout-input-key prompt --rollout-label-key reward_model.ground_truth) ;;
    *) fail "DATA=$DATA has the columns$columns; it needs question and answer, or prompt and reward_model" ;;
    esac
}

# All flags of the script, into the array TRAIN_FLAGS.
train_flags() {
    local model_flags words
    data_flags
    model_flags=$("$PYTHON" -m megatron_rl_corr.cli model-flags "$MODEL") || exit 2
    read -ra words <<<"$model_flags" # no pattern of files: --moe-layer-freq [0,1,1]
    TRAIN_FLAGS=("${words[@]}" "${MEGATRON_FLAGS[@]}" --rollout-url $(server_urls) --rollout-hf-checkpoint "$MODEL"
        --rollout-prompts "$DATA" "${DATA_FLAGS[@]}" "${RUN_FLAGS[@]}" "${EXTRA_FLAGS[@]}")
}

# Whatever answers at a port of ours would be taken for our server, and the run would push its weights into it.
refuse_ports_in_use() {
    local i
    for ((i = 0; i < $(number_of_servers); i++)); do
        if (exec 3<>"/dev/tcp/$SERVER_HOST/$((PORT + i))") 2>/dev/null; then
            fail "port $((PORT + i)) of $SERVER_HOST is in use, by a server that this run did not start; end it, or give another PORT"
        fi
    done
}

# A server ends when its requests have, and never where one of its schedulers waits for a trainer that was killed in a push.
end_all() {
    local pid all=("${server_pids[@]}" $trainer_pid) end=$((SECONDS + END_TIMEOUT_S)) looks=50
    trap 'end=0' HUP INT TERM # a second signal: at once
    kill "${all[@]}" 2>/dev/null || true
    for pid in "${all[@]}"; do
        while kill -0 "$pid" 2>/dev/null && [ $SECONDS -lt $end ]; do sleep 0.2; done
        # Where the terminal is gone nothing can be said, and that must not end this.
        if kill -0 "$pid" 2>/dev/null; then say "process $pid has not ended within $END_TIMEOUT_S s: it is killed" 2>/dev/null || true; fi
        kill -KILL -- "-$pid" 2>/dev/null || true
    done
    for pid in "${all[@]}"; do # 10 s for a driver to give a GPU's memory back; one that hangs keeps nobody here
        while kill -0 "$pid" 2>/dev/null && ((looks-- > 0)); do sleep 0.2; done
    done
}

start_servers() {
    local i log
    refuse_ports_in_use
    mkdir -p "$OUT"
    trap end_all EXIT
    trap 'exit 129' HUP # the terminal was closed
    trap 'exit 130' INT
    trap 'exit 143' TERM
    for ((i = 0; i < $(number_of_servers); i++)); do
        log=$OUT/server-$(hostname)-$i.log
        say "server $i on GPUs $(gpus_of_server "$i"), $log"
        # A colocated server must see the GPU that weights are handed over on, which is the first trainer's.
        local visible=$(gpus_of_server "$i") first=() libraries=${LD_LIBRARY_PATH:-}
        if colocated; then
            visible=$GPUS_SERVE first=(--base-gpu-id $((i * SERVER_GPUS)))
            # The memory saver is loaded before Python, which knows where CUDA's wheels are, and needs their libcudart.
            [ -z "$cuda_libraries" ] || libraries=$cuda_libraries${libraries:+:$libraries}
        fi
        set -m # a process group for each, so that its schedulers can be killed with it
        LD_LIBRARY_PATH=$libraries CUDA_VISIBLE_DEVICES=$visible "$PYTHON" -m sglang.launch_server --model-path "$MODEL" \
            --host "$SERVER_HOST" --port $((PORT + i)) "${first[@]}" "${SERVER_FLAGS[@]}" </dev/null >"$log" 2>&1 &
        server_pids+=($!)
        set +m
    done
}

refuse_ended_servers() {
    local pid
    for pid in "${server_pids[@]}"; do
        kill -0 "$pid" 2>/dev/null || fail "a server ended at its start; see $OUT/server-*.log"
    done
}

# Until every server answers; a server of ours that ends meanwhile ends the wait.
wait_for_servers() {
    local url end=$((SECONDS + START_TIMEOUT_S))
    for url in $(server_urls); do
        until "$PYTHON" -c 'import sys, urllib.request as r; r.build_opener(r.ProxyHandler({})).open(sys.argv[1] + "/health", timeout=10)' "$url" 2>/dev/null; do
            refuse_ended_servers
            [ $SECONDS -lt $end ] || fail "$url does not answer after $START_TIMEOUT_S s; see $OUT/server-*.log"
            sleep 2
        done
        say "$url answers"
    done
    refuse_ended_servers # one that answered first may have ended while the others started
}

# One connection keeps the order of kernels and exchanges, which Megatron asks for with tensor or context parallelism.
# Set for the trainer alone.
train_variables() {
    export CUDA_DEVICE_MAX_CONNECTIONS=1
    # torchrun gives each trainer one thread, and CPUs that update the weights would do it on one core each.
    case " ${TRAIN_FLAGS[*]} " in *" --optimizer-cpu-offload "*)
        local threads=$(($(nproc) / $(count "$GPUS_TRAIN"))) memory=${PYTORCH_ALLOC_CONF:-${PYTORCH_CUDA_ALLOC_CONF:-}}
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
        # Else torch rounds each pinned tensor, as the host's gradients are, up to a power of two: at most to twice as much.
        case $memory in *pinned_max_round_threshold_mb*) ;; *)
            export PYTORCH_ALLOC_CONF=${memory:+$memory,}pinned_max_round_threshold_mb:1 ;;
        esac ;;
    esac
    export PYTHONPATH=$REPOSITORY${PYTHONPATH:+:$PYTHONPATH}
}

forward_signal() {
    forwarded=1
    [ -z "$trainer_pid" ] || kill -TERM "$trainer_pid" 2>/dev/null || true
}

# bash handles no signal while a program runs in its foreground, so the trainer runs behind it. It has a process group
# of its own: what ends the run, as Ctrl-C at a terminal or its end, reaches torchrun once, from here. The status is
# torchrun's.
train() {
    train_variables
    local status=0 where=(--standalone)
    if [ "$NODES" -gt 1 ]; then
        where=(--nnodes "$NODES" --node_rank "$NODE_RANK"
            --master_addr "$MASTER_ADDR" --master_port "${MASTER_PORT:-29500}")
    fi
    trap forward_signal HUP INT TERM
    set -m
    CUDA_VISIBLE_DEVICES=$GPUS_TRAIN "$PYTHON" -m torch.distributed.run "${where[@]}" --nproc_per_node "$(count "$GPUS_TRAIN")" \
        -m megatron_rl_corr.launch "$PRETRAIN" "${TRAIN_FLAGS[@]}" </dev/null &
    trainer_pid=$!
    set +m
    [ -z "$forwarded" ] || forward_signal
    wait "$trainer_pid" || status=$?
    while [ -n "$forwarded" ]; do # the signal ended the wait, and torchrun is ending its workers
        forwarded="" status=0
        wait "$trainer_pid" || status=$?
    done
    return $status
}

# The flags of --train and --serve are those that run; tools/cpu lets Megatron and SGLang parse them without a GPU.
dry_run() {
    plan || fail "the layout does not fit, by the plan above"
    say "SGLang parses the flags of $(number_of_servers) servers"
    "$PYTHON" "$REPOSITORY/examples/recipes/dry_run.py" server --model-path "$MODEL" --host "$SERVER_HOST" --port "$PORT" \
        "${SERVER_FLAGS[@]}" || exit 2
    train_variables
    say "Megatron and the launcher parse and check the flags of the trainer, the data and the reward"
    "$PYTHON" "$REPOSITORY/examples/recipes/dry_run.py" train $((NODES * $(count "$GPUS_TRAIN"))) "$PRETRAIN" "${TRAIN_FLAGS[@]}" || exit 2
}

recipe() {
    local what=all
    case ${1:-} in --dry-run | --plan | --serve | --train | --urls) what=${1#--}; shift ;; esac
    EXTRA_FLAGS=("$@")
    set_colocation
    [ "$what" = urls ] && { SERVER_URLS="" server_urls; return; }
    [ -f "$MODEL/config.json" ] || fail "MODEL=$MODEL is no Hugging Face folder: it has no config.json"
    check_machines "$what"
    [ "$what" = plan ] && { plan; return; }
    check_environment "$what"
    compiler_variables
    [ "$what" = serve ] && { start_servers; wait "${server_pids[@]}"; return; }
    [ -e "$DATA" ] || fail "DATA=$DATA: there is no such file"
    train_flags
    case $what in
    dry-run) dry_run ;;
    train) wait_for_servers; train ;;
    all) start_servers; wait_for_servers; train ;;
    esac
}
