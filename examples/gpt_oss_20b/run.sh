#!/usr/bin/env bash
# gpt-oss-20b on mathematics, on one node of 8 GPUs with 80 GB each: 4 train, 4 serve. The servers' experts are replayed in
# training (R3). The node should have 500 GB of memory: Adam's state does not fit on 4 GPUs and lies in it, in up to 390 GiB.
# MODEL is a checkpoint in bfloat16; OpenAI's own is in MXFP4, of which transformers makes one (docs/reference/models.md#gpt-oss).
#
#   MODEL=models/gpt-oss-20b DATA=train.parquet examples/gpt_oss_20b/run.sh --dry-run
#   MODEL=models/gpt-oss-20b DATA=train.parquet examples/gpt_oss_20b/run.sh
#
# Several nodes of 8 GPUs, one of which serves, with Adam on the GPUs: NODES=2 (examples/recipes/README.md, and slurm.sbatch there).
set -euo pipefail
HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

MODEL=${MODEL:?folder of gpt-oss-20b}      # config.json, weights, tokenizer
DATA=${DATA:-}                               # a Parquet file: question, answer; or prompt (messages), reward_model
OUT=${OUT:-runs/gpt_oss_20b}               # logs, metrics, checkpoints
NODES=${NODES:-1}                            # nodes that train; from 2 on others serve
SERVE_NODES=${SERVE_NODES:-1}
COLOCATE=${COLOCATE:-0}                      # what is colocated is refused
PORT=${PORT:-30000}                          # of the first server
SERVER_GPUS=${SERVER_GPUS:-1}                # of one server: 42 GB of weights leave 29 GiB for keys and values
PROMPT_TOKENS=${PROMPT_TOKENS:-1024} RESPONSE_TOKENS=${RESPONSE_TOKENS:-4096} # longest prompt and response, in tokens
GROUP_SIZE=${GROUP_SIZE:-8} BATCH_SIZE=${BATCH_SIZE:-128} # samples of a prompt, samples of a step

if [ "$NODES" = 1 ] && [ "$COLOCATE" = 0 ]; then
    GPUS_TRAIN=${GPUS_TRAIN:-0,1,2,3} GPUS_SERVE=${GPUS_SERVE:-4,5,6,7}
    # Each matrix of attention on 2 GPUs, 8 of the 32 experts on each of 4. 45 GiB a GPU, by `--plan`. Experts with biases need
    # --expert-tensor-parallel-size 1.
    LAYOUT=(--tensor-model-parallel-size 2 --expert-model-parallel-size 4 --expert-tensor-parallel-size 1)
    # Adam's state in the node's memory, where the CPUs update it: the step is slower, and it fits. 16 bytes a parameter are 312 GiB;
    # torch rounds pinned tensors, as those of the gradients (4 of the 16), up to powers of two: at most 20 bytes, 390 GiB.
    ADAM=(--optimizer-cpu-offload --use-precision-aware-optimizer) PLAN_ADAM=(--optimizer-cpu-offload)
else
    GPUS_TRAIN=${GPUS_TRAIN:-0,1,2,3,4,5,6,7} GPUS_SERVE=${GPUS_SERVE:-0,1,2,3,4,5,6,7}
    LAYOUT=(--tensor-model-parallel-size 2 --expert-model-parallel-size 8 --expert-tensor-parallel-size 1)
    ADAM=() PLAN_ADAM=(--no-optimizer-cpu-offload)
fi
# Weights are handed over in memory in colocation, and those of experts that one tensor stacks are not.
[ "$COLOCATE" = 0 ] || { echo "[recipe] COLOCATE=$COLOCATE: gpt-oss is not colocated; leave it out" >&2; exit 2; }
PLAN_FLAGS=("${LAYOUT[@]}" --pipeline-model-parallel-size 1 --context-parallel-size 1
    "${PLAN_ADAM[@]}" --recompute none --max-prompt-tokens $PROMPT_TOKENS --max-new-tokens $RESPONSE_TOKENS
    --group-size $GROUP_SIZE --global-batch-size $BATCH_SIZE)

SERVER_FLAGS=(
    --dtype bfloat16                    # as the trainer computes: other pairs differ by more
    --tp-size $SERVER_GPUS              # GPUs of a server
    --mem-fraction-static 0.85          # of a GPU, for weights and cache; the rest is for activations and for pushes
    --enable-return-routed-experts      # the experts of every token, for --router-replay R3
)
# The same responses in every run, and slower sampling: DETERMINISTIC=1
[ "${DETERMINISTIC:-0}" = 0 ] || SERVER_FLAGS+=(--enable-deterministic-inference)

MEGATRON_FLAGS=(
    "${LAYOUT[@]}" "${ADAM[@]}"         # above
    --sequence-parallel                 # activations outside the matrices are split as well
    --use-distributed-optimizer         # Adam's state is split over the replicas
    --bf16                              # weights and activations; gradients and Adam are float32
    --no-gradient-accumulation-fusion   # its kernel is Apex's, which this needs no other part of
    --moe-grouped-gemm                  # all experts of a GPU in one multiplication
    --moe-permute-fusion                # tokens are sorted by expert in one kernel
    --seq-length $((PROMPT_TOKENS + RESPONSE_TOKENS)) # the longest sample
    --micro-batch-size 1                # a microbatch is packed: samples of together at most --seq-length tokens
    --global-batch-size $BATCH_SIZE          # a multiple of group size x replicas
    --train-iters 200                   # steps
    --lr 1e-6 --lr-decay-style constant # small, constant steps, as usual for policy gradients
    --weight-decay 0.0                  # weights are not drawn toward 0
    --clip-grad 1.0 --adam-beta2 0.98   # a rare large gradient is cut, and forgotten sooner
    --tokenizer-type NullTokenizer      # only sizes the embedding; by a tokenizer it may have fewer rows than the model's
    --mock-data --split 100,0,0         # the script's own data are made up and never read
    --num-workers 0 --no-create-attention-mask-in-dataloader # so nothing is prepared of them
    --eval-iters 0                      # its own evaluation would score that data
    --distributed-timeout-minutes 60    # ranks wait for each other while 42 GB are read and pushed the first time
    --save "$OUT/checkpoints" --save-interval 100 # each takes 290 GB
    --load "$OUT/checkpoints"           # started again, the run goes on from the last one
    --override-opt_param-scheduler      # by the --train-iters given then; another --lr needs --no-load-optim too
    --log-interval 1                    # Megatron's own log line, every step
    --tensorboard-dir "$OUT/tensorboard" # its numbers and ours
)
RUN_FLAGS=(
    --router-replay R3                  # a token goes to the experts that the server chose
    --rollout-reward-function math      # 1 where the answer equals the label as mathematics
    --rollout-group-size $GROUP_SIZE         # samples of a prompt; their mean is the baseline
    --rollout-max-new-tokens $RESPONSE_TOKENS  # longest response
    --rollout-max-concurrency 128       # samples in flight of each replica
    --rollout-max-lag 1                 # servers sample the next step while this one trains
    --rollout-correction-preset decoupled_geo_rs_token_tis # token weights up to 2; drops responses far from the policy
    --rollout-loss dapo                 # PPO's loss over tokens, with a higher upper clip
    --rollout-chat-template-kwargs '{"reasoning_effort": "low"}' # longer thoughts would be cut at RESPONSE_TOKENS
    --rollout-log-dir "$OUT"            # for megatron-rl-corr report
    --rollout-save-hf "$OUT/hf"         # the trained model, for transformers and servers
)

source "$HERE/../recipes/recipe.sh"
# One line, as bash reads a script while it runs it: this file may be edited meanwhile.
recipe "$@"; exit
