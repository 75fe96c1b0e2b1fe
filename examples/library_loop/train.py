"""Your own Megatron-core loop with corrected steps.

torchrun --nproc_per_node 4 train.py TENSOR_PARALLEL_SIZE
"""

import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state as mpu
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

import megatron_rl_corr as rl
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.reduce.collectives import all_reduce_metrics

dist.init_process_group()
mpu.initialize_model_parallel(tensor_model_parallel_size=int(sys.argv[1]))
tp, dp_cp = mpu.get_tensor_model_parallel_group(), mpu.get_data_parallel_group(with_context_parallel=True)
torch.manual_seed(1), model_parallel_cuda_manual_seed(1)
config = TransformerConfig(
    num_layers=2,
    hidden_size=32,
    num_attention_heads=4,
    tensor_model_parallel_size=tp.size(),
    hidden_dropout=0.0,
    attention_dropout=0.0,
    use_cpu_initialization=True,
    gradient_accumulation_fusion=False,
    bias_dropout_fusion=False,
    masked_softmax_fusion=False,
    finalize_model_grads_func=finalize_model_grads,
)
gpt = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=64, max_sequence_length=16)
model = DistributedDataParallel(config, DistributedDataParallelConfig(), gpt)
optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3), [model])

# Yours: each replica's rows [B, L] with the log-probs that the rollout engine returned. Here it
# sampled uniformly.
rows = torch.arange(8)[dp_cp.rank() :: dp_cp.size()]
tokens, labels = torch.randint(64, (2, 8, 16), generator=torch.Generator().manual_seed(2))[:, rows].cuda()
positions = torch.arange(16).expand(len(rows), 16).cuda()
rollout, mask, seq_ids, count = rl.flatten_padded(
    torch.full((len(rows), 16), 1 / 64).log().cuda(), positions < 12
)
advantages = (rows % 2 * 2.0 - 1).repeat_interleave(16).cuda()
settings = rl.RolloutCorrectionConfig.from_preset("decoupled_token_is")


def loss_func(logits):
    logprobs, _ = rl.vocab_parallel_logprobs(logits.flatten(0, 1), labels.flatten(), tp_group=tp)
    old = logprobs.detach()  # one update a batch: pi_old is the current policy
    correction = rl.compute_correction(
        old,
        rollout,
        mask,
        seq_ids,
        num_sequences=count,
        config=settings,
        groups=rl.ParallelGroups(dp_cp=dp_cp),
    )
    losses = rl.policy_loss("grpo", logprobs, old, advantages, correction, settings)
    total = (losses * token_coefficients(correction, seq_ids, settings)).sum()
    # Megatron averages over the replicas
    return total * dp_cp.size(), all_reduce_metrics(correction.metrics, dp_cp)


for step in range(5):
    model.zero_grad_buffer(), optimizer.zero_grad()
    [metrics] = get_forward_backward_func()(
        forward_step_func=lambda _, gpt: (gpt(tokens, positions, None), loss_func),
        data_iterator=None,
        model=model,
        num_microbatches=1,
        seq_length=16,
        micro_batch_size=len(rows),
        forward_only=False,
    )
    optimizer.step()
    if dist.get_rank() == 0:
        print(
            f"step {step}  k3_kl {metrics['k3_kl']:.6e}  mean weight {metrics['weight_mean']:.6e}", flush=True
        )
