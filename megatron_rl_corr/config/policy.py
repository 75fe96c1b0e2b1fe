"""What a run trains and how it gets to the servers: the model, its weights, its experts; each
topic checks itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_rl_corr.config.fields import Between, Options, Positive, WrittenFolder, option
from megatron_rl_corr.config.problems import Refusal


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Options):
    """Model: what is trained, and how its log-probs are computed."""

    hf_checkpoint: str = option(metavar="DIR")
    """Hugging Face folder of the model that the servers run: loaded into Megatron's shards when a run
    starts without --load, and the source of weight names and of the true vocabulary size.
    """

    model_provider: Literal["auto", "table", "bridge"] = "auto"
    """Where names and layouts of the model's weights come from: this package's table, or Megatron-Bridge,
    which has families that the table lacks. auto: the table where it has the model_type, else Bridge.
    """

    allow_model_differences: bool = False
    """Warn of Megatron flags that make another model than config.json of `hf_checkpoint` describes,
    instead of refusing them.
    """

    max_first_step_kl: Annotated[float | None, Positive()] = option(None, metavar="X")
    """The run ends if the train-infer KL (k3) of the first step is above X: there the servers sampled with
    the very weights that are trained (default: 1e-4 where both sides are float32, 1e-1 with a quantised
    server or `push_rounding`, else 1e-2). inf in a replay: the step is not judged.
    """

    linear_logprobs: bool = False
    """Compute training log-probs from hidden states, a chunk of logits at a time, so that all logits are
    never held; not with a bias, MTP or truncated sampling.
    """

    fp32_lm_head: bool = False
    """Compute logits in float32, as SGLang's --enable-fp32-lm-head does; with `linear_logprobs`."""

    inplace_gradient: bool = False
    """Write the gradient of the logits over the logits, which saves one copy; nothing else may read them."""

    batch_invariant: bool = False
    """Require that a token's log-prob does not depend on what else is computed with it: Megatron gets
    --batch-invariant-mode, its log-probs are made as servers make them, by log-softmax of whole rows, and
    every server must run in its own such mode (SGLang --enable-deterministic-inference, vLLM
    VLLM_BATCH_INVARIANT=1), or the run does not start.
    """

    pad_sequences: bool = False
    """Train on rows padded to --seq-length, instead of sequences packed one behind the other: for
    --transformer-impl local, and for what else packing is refused with."""

    max_tokens_per_microbatch: Annotated[int | None, Positive()] = option(None, metavar="N")
    """Tokens of a packed microbatch, at most, and at least --seq-length (default: --seq-length
    times --micro-batch-size). Microbatches are balanced; their number is what the longest batch of
    a replica needs.
    """

    def check(self) -> None:
        if self.pad_sequences and self.max_tokens_per_microbatch is not None:
            raise ValueError(
                f"`max_tokens_per_microbatch` {self.max_tokens_per_microbatch} has no effect with "
                "`pad_sequences`; drop one"
            )

    def check_batch_invariant(self) -> None:
        if not self.batch_invariant:
            return
        refused = {
            "`linear_logprobs`, which sums over the vocabulary in other parts": self.linear_logprobs,
            "`top_p`, `top_k` or `min_p`, whose log-probs each side renormalises in its own way": (
                self.top_p < 1 or self.top_k > 0 or self.min_p > 0
            ),
        }
        given = [text for text, is_given in refused.items() if is_given]
        if given:
            raise Refusal(f"`batch_invariant` does not go with {text}; drop one of them" for text in given)

    def check_lm_head(self) -> None:
        if self.fp32_lm_head and not self.linear_logprobs:
            raise ValueError("`fp32_lm_head` has no effect on Megatron's own logits; add `linear_logprobs`")


@dataclass(frozen=True, kw_only=True)
class WeightSyncConfig(Options):
    """Weights: how new ones get to the servers, and how their arrival is verified."""

    writes = (WrittenFolder("weight_dir", by="senders", no_links=(".unfinished",)),)

    weight_transport: Literal["distributed", "tensor", "disk"] = "distributed"
    """distributed broadcasts new weights over NCCL or gloo, tensor hands them to servers on the same host,
    disk writes them to `weight_dir`.
    """

    weight_address: str | None = option(None, metavar="HOST", needs="weight_transport=distributed")
    """Address of this host at which a sender and the servers meet for broadcasts (default: the one on the
    route to a server, which is the loopback for a server on this host); nothing listens on any other.
    """

    weight_group_per_server: bool = option(False, needs="weight_transport=distributed")
    """With NCCL too each server has a broadcast group of its own, as with gloo: one that dies or hangs in a
    broadcast holds up no other. Weights are then sent once for each server, one after the other.
    """

    weight_dir: str | None = option(None, metavar="DIR", needs="weight_transport=disk")
    """Folder that every server sees under the same path; it gets a Hugging Face model for each of the
    last two versions.
    """

    push: Literal["full", "delta"] = "full"
    """delta sends the values that differ from those of the push before, and all of them every
    `push_full_every` pushes, to servers that do not have those, and where a check finds that they differ.
    SGLang servers need --custom-weight-loader megatron_rl_corr.engines.sglang.changes_loader.begin, and
    vLLM servers memory of the host for what their kernels pack.
    """

    push_full_every: Annotated[int, Between(2)] = option(20, needs="push=delta")
    """So many pushes from one that sends everything to the next."""

    push_rounding: Literal["none", "fp8_blockwise", "int4_group"] = "none"
    """Round the linear layers of what is pushed, never the trainer's own weights, as quantised rollouts
    do, and send them in their dtype: fp8_blockwise in float8 e4m3 with a scale for each block of 128 x
    128, int4_group in 4 bits with a scale for each 128 inputs of a row.
    """

    quantized_checkpoint: str | None = option(None, metavar="DIR")
    """FP8 checkpoint that the servers were started with. Its config.json says how what is pushed is
    quantised (default: that of the folder that each server names, where this host can read it).
    """

    colocate: bool = False
    """Trainer and servers take turns on the same GPUs: when a step's samples are in, servers release their
    memory, and get it back with the push; while they sample, Megatron frees its gradients, and its
    optimizer's state is on the host. It needs SGLang with --enable-memory-saver, `weight_transport` tensor
    and `max_lag` 0.
    """

    bucket_mib: Annotated[float | None, Positive()] = option(None, metavar="MIB")
    """Weights are sent in buckets of this size, in MiB; each is a request to every server, which needs so
    much free memory, and its sender twice as much (default: 256; above 16 servers 16 for each, up to 2048).
    """

    verify_push: Literal["checksum", "off"] = "checksum"
    """After every push, checksum asks every server for checksums of its weights, which must agree with the
    other servers' and with the trainer's own of up to 256 MiB a pipeline stage; off asks nothing.
    """

    def check(self) -> None:
        if self.push == "delta":
            others = {
                "weight_transport": (self.weight_transport, "distributed"),
                "verify_push": (self.verify_push, "checksum"),
                "push_rounding": (self.push_rounding, "none"),
                "colocate": (self.colocate, False),
            }
            for name, (value, needed) in others.items():
                if value != needed:
                    raise ValueError(
                        f"`push` delta is proven with `{name}` {needed} only, not {value}; use full"
                    )
        if self.weight_transport == "disk" and self.weight_dir is None:
            raise ValueError(
                "`weight_transport` disk needs `weight_dir`, a folder that every server sees by this path"
            )


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Options):
    """Mixture of experts: whose choice of experts trains, and what is logged of it."""

    router_replay: Literal["off", "compare", "R2", "R3"] = option("off", flag="--router-replay")
    """Experts of a token in training: off as Megatron's routers choose, R3 as the servers did (start them
    with --enable-return-routed-experts), R2 as they chose for the old log-probs, in each of several
    updates of a batch; compare as with off, and the servers' are asked for and compared with them.
    """

    router_replay_min_agreement: Annotated[float | None, Between(-1, 1)] = option(
        None, flag="--router-replay-min-agreement", metavar="K", needs="router_replay=R3", usual=0.25
    )
    """A step whose servers' routes agree less than this with Megatron's own choice, as Cohen's kappa of a
    sample, is refused before it trains; -1 turns the rule off.
    """

    expert_statistics: bool = option(False, flag="--expert-statistics")
    """Log tokens, mean |log-ratio|, mean weight and rejected fraction of every expert, in experts.jsonl of
    `log_dir` and as heat maps in TensorBoard.
    """

    def check(self) -> None:
        if self.router_replay_min_agreement == 1:
            raise ValueError("`router_replay_min_agreement` must be in [-1, 1), got 1")
