"""One Megatron model's loss and gradients, from logits and from hidden states, a JSON line for each layout.

Runs under torchrun's variables.

output_processor_worker.py '{"tp": 2, "sp": true}' '{"pp": 2}' ...
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from megatron.core import parallel_state as ps
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs
from megatron_rl_corr.mcore.output_processor import (
    LogprobSettings,
    OutputContext,
    label_logprobs_of_hidden,
    label_logprobs_of_layer,
    split_output,
)

HOOKS = {"hidden": label_logprobs_of_hidden, "layer": label_logprobs_of_layer}
VOCAB, PADDED, LENGTH, ROWS, MICROBATCHES = 60, 76, 12, 2, 2


def build(layout):
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        ffn_hidden_size=48,
        num_attention_heads=4,
        normalization="RMSNorm",
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
        attention_softmax_in_fp32=True,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        pipeline_dtype=torch.bfloat16 if layout.get("bf16") else torch.float32,
        bf16=layout.get("bf16", False),
        params_dtype=torch.bfloat16 if layout.get("bf16") else torch.float32,
        overlap_p2p_comm=False,
        tensor_model_parallel_size=layout.get("tp", 1),
        sequence_parallel=layout.get("sp", False),
        pipeline_model_parallel_size=layout.get("pp", 1),
        deallocate_pipeline_outputs=True,
        init_method_std=0.5,
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=PADDED,
        max_sequence_length=LENGTH,
        pre_process=ps.is_pipeline_first_stage(),
        post_process=ps.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=layout.get("tied", False),
    )
    wrapped = Float16Module(config, model) if layout.get("bf16") else model
    config.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), wrapped)
    return config, model, ddp


def batches():
    generator = torch.Generator().manual_seed(4)
    for _ in range(MICROBATCHES):
        tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=generator)
        # Unequal in every token, so that a permuted one shows.
        yield tokens[:, :-1], tokens[:, 1:], torch.randn(2, ROWS * LENGTH, generator=generator)


def sampled_of(labels):
    """About half of the labels, other columns in each row."""
    return SampledRows.of((labels % 2 == 0).reshape(-1).numpy())


class LogitCopies(TorchDispatchMode):
    """Counts copies of a microbatch's logits, in any type and order; nothing else here has
    as many columns.
    """

    def __init__(self, columns):
        super().__init__()
        self.columns, self.count = columns, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func._schema.name in ("aten::clone", "aten::copy_", "aten::_to_copy"):
            self.count += made.dim() == 3 and made.shape[2] == self.columns
        return made


def forward_step(settings, way, some_rows):
    positions = torch.arange(LENGTH).expand(ROWS, -1)

    def step(iterator, model):
        tokens, labels, (coefficients, entropy_coefficients) = next(iterator)
        sampled = sampled_of(labels) if some_rows else None
        context = OutputContext(
            labels, settings, with_entropy=True, sampled=sampled, chunk_tokens=7, with_collision=True
        )
        hook = {"output_processor": HOOKS.get(way), "output_processor_context": context}
        output = model(tokens, positions, None, **(hook if way in HOOKS else {}))

        def loss(output, non_loss_data=False):
            if way in HOOKS:
                logprobs, entropy, collision = split_output(output)
            else:
                logprobs, entropy, collision = vocab_parallel_logprobs(
                    output.reshape(-1, output.shape[-1]),
                    labels.reshape(-1),
                    tp_group=settings.tp_group,
                    temperature=settings.temperature,
                    vocab_size=settings.vocab_size,
                    with_entropy=True,
                    with_collision=True,
                )
                if some_rows:
                    kept = (labels % 2 == 0).reshape(-1)
                    columns = (logprobs, entropy, collision)
                    logprobs, entropy, collision = (torch.where(kept, x, 0.0) for x in columns)
            if non_loss_data:
                return torch.stack([logprobs, collision])
            total = (coefficients * logprobs + entropy_coefficients * entropy).sum()
            return total, {"loss": total.detach().clone()}

        return output, loss

    return step


def run_step(config, model, ddp, settings, way, some_rows=False):
    """The microbatches' losses, log-probs and collisions on the last stage, and this rank's gradients."""
    ddp.zero_grad_buffer()
    schedule = {
        "forward_step_func": forward_step(settings, way, some_rows),
        "model": ddp,
        "num_microbatches": MICROBATCHES,
        "seq_length": LENGTH,
        "micro_batch_size": ROWS,
    }
    reports = get_forward_backward_func()(data_iterator=batches(), forward_only=False, **schedule)
    gradients = {name: p.main_grad.clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        scored = get_forward_backward_func()(
            data_iterator=batches(), forward_only=True, collect_non_loss_data=True, **schedule
        )
    return [float(report["loss"]) for report in reports], scored, gradients


def compare(layout):
    """The worst relative errors of hidden states against logits, on this rank: of all rows, and of some."""
    ps.initialize_model_parallel(
        tensor_model_parallel_size=layout.get("tp", 1), pipeline_model_parallel_size=layout.get("pp", 1)
    )
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(ps.get_pipeline_model_parallel_rank())
    config, model, ddp = build(layout)
    settings = LogprobSettings(ps.get_tensor_model_parallel_group(), 0.8, VOCAB)
    whole = errors(*(run_step(config, model, ddp, settings, way) for way in ("logits", "hidden")))
    columns = PADDED // layout.get("tp", 1)
    with LogitCopies(columns) as copies:
        expected = run_step(config, model, ddp, settings, "logits", some_rows=True)
    with LogitCopies(columns) as copies_of_layer:
        of_layer = run_step(config, model, ddp, settings, "layer", some_rows=True)
    # Read by the hook alone now that the layers are made: it adds the weight's gradient to main_grad itself.
    config.gradient_accumulation_fusion = True
    some = errors(expected, run_step(config, model, ddp, settings, "hidden", some_rows=True))
    ps.destroy_model_parallel()
    return whole | {
        "sampled rows": some,
        "layer": errors(expected, of_layer),
        "copies": [copies.count, copies_of_layer.count],
    }


def errors(expected, found):
    """Of two results of run_step."""
    (losses, scores, gradients), (losses2, scores2, gradients2) = expected, found
    worst = {name: float((gradients2[name] - g).norm() / g.norm()) for name, g in gradients.items()}
    return {
        "loss": max((abs(b / a - 1) for a, b in zip(losses, losses2, strict=True)), default=0.0),
        "scores": max(
            (float((a - b).abs().max()) for a, b in zip(scores, scores2, strict=True)), default=0.0
        ),
        "gradient": max(worst.values()),
        "parameters": len(worst),
        "microbatches": len(losses2),
    }


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for layout in map(json.loads, sys.argv[1:]):
        everything = [None] * dist.get_world_size()
        dist.all_gather_object(everything, compare(layout))
        if dist.get_rank() == 0:
            print("RESULT " + json.dumps({"layout": layout, "ranks": everything}), flush=True)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # Megatron's leftovers may wait for each other at interpreter exit


if __name__ == "__main__":
    main()
