"""How training is laid out over GPUs, what it is asked to hold at a time, and which layouts
Megatron can make.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl_corr.commands.planner.parameters import has_latent_attention
from megatron_rl_corr.models.architectures import Config, num_experts


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step is made of.

    Example: `Workload(max_prompt_tokens=1024, max_new_tokens=4096)` has sequences of up to 5120 tokens.
    """

    max_prompt_tokens: int = 1024
    max_new_tokens: int = 4096
    max_tokens_per_microbatch: int | None = None
    """Tokens of a packed microbatch, over all context-parallel ranks; None: those of the longest sequence."""
    global_batch_size: int = 128
    """Samples of an update."""
    group_size: int = 8
    """Samples of a prompt."""

    @property
    def seq_length(self) -> int:
        return self.max_prompt_tokens + self.max_new_tokens

    @property
    def microbatch_tokens(self) -> int:
        return self.max_tokens_per_microbatch or self.seq_length

    def problems(self) -> list[str]:
        """What is wrong with the numbers; none: nothing."""
        found = [
            f"{flag} must be positive, got {value}"
            for flag, value in (
                ("--max-prompt-tokens", self.max_prompt_tokens),
                ("--max-new-tokens", self.max_new_tokens),
                ("--global-batch-size", self.global_batch_size),
                ("--group-size", self.group_size),
            )
            if value < 1
        ]
        if self.microbatch_tokens < self.seq_length:
            found.append(
                f"--max-tokens-per-microbatch {self.microbatch_tokens} must be at least {self.seq_length}, "
                "the longest prompt and the longest response: a sequence is not cut"
            )
        return found


@dataclass(frozen=True, kw_only=True)
class TrainLayout:
    """Megatron's parallel sizes on the GPUs that train, and what is recomputed and offloaded.

    Example: `TrainLayout(gpus=4, expert=4, recompute="full", offload_optimizer=True)`.
    """

    gpus: int
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    expert: int = 1
    expert_tensor: int = 1
    recompute: str = "none"
    """none, selective (Megatron's default, the core of attention) or full."""
    distributed_optimizer: bool = True
    offload_optimizer: bool = False
    """Adam's state and the float32 weights lie in the host's memory."""
    linear_logprobs: bool = False
    """--rollout-linear-logprobs: the logits of a microbatch never exist."""
    expert_imbalance: float = 1.5
    """Tokens of the busiest expert-parallel rank over the mean: routers of real models are never balanced."""

    @property
    def replicas(self) -> int:
        """Data-parallel size."""
        return self.gpus // (self.tensor * self.pipeline * self.context)

    @property
    def dense_shards(self) -> int:
        """Ranks over which the distributed optimizer splits what is no expert's: data and
        context parallel.
        """
        return self.replicas * self.context

    @property
    def expert_shards(self) -> int:
        """Ranks over which it splits the experts' state: those with the same experts."""
        return self.gpus // (self.expert * self.expert_tensor * self.pipeline)

    def problems(self, config: Config, workload: Workload) -> list[str]:
        """Why Megatron, or a corrected step, can't make this layout; none: it can.

        Each line names a flag, its value and what it must be.
        """
        heads = config["num_attention_heads"]
        groups = heads if has_latent_attention(config) else config.get("num_key_value_heads") or heads
        experts, layers, chunks = (
            num_experts(config),
            config["num_hidden_layers"],
            2 * self.context * self.tensor,
        )
        ranks, expert_ranks = self.tensor * self.pipeline * self.context, self.expert * self.expert_tensor
        tensor, found = f"--tensor-model-parallel-size {self.tensor}", []
        if self.gpus % ranks:
            found.append(
                f"{tensor} x pipeline {self.pipeline} x context {self.context} must divide {self.gpus} GPUs"
            )
        elif workload.global_batch_size % (self.replicas * workload.group_size):
            found.append(
                f"--global-batch-size {workload.global_batch_size} must be a multiple of {self.replicas} "
                f"replicas x --group-size {workload.group_size}"
            )
        if heads % self.tensor or groups % self.tensor:
            found.append(f"{tensor} must divide the model's {heads} heads and {groups} key-value heads")
        if layers % self.pipeline:
            found.append(
                f"--pipeline-model-parallel-size {self.pipeline} must divide the model's {layers} layers"
            )
        if experts is None and expert_ranks > 1:
            found.append(
                f"--expert-model-parallel-size {self.expert}: the model has no experts; leave it out"
            )
        elif experts is not None and experts % self.expert:
            found.append(
                f"--expert-model-parallel-size {self.expert} must divide the model's {experts} experts"
            )
        if self.gpus % (expert_ranks * self.pipeline):
            found.append(
                f"--expert-model-parallel-size {self.expert} x expert tensor {self.expert_tensor} x pipeline "
                f"{self.pipeline} must divide {self.gpus} GPUs"
            )
        if workload.seq_length % chunks and self.context > 1:
            found.append(
                f"--context-parallel-size {self.context}: the longest sequence, {workload.seq_length} "
                f"tokens, must be a multiple of {chunks}; give another --max-new-tokens"
            )
        if self.offload_optimizer and not self.distributed_optimizer:
            found.append("--optimizer-cpu-offload needs the distributed optimizer")
        return found
