"""What a microbatch's forward pass must give, and the log-probs of its labels out of that.

b rows of L tokens (of this context-parallel rank), V/tp vocabulary columns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_rl_corr.logprobs.sampling_mask import support_logprobs
from megatron_rl_corr.logprobs.vocab import vocab_parallel_logprobs

if TYPE_CHECKING:
    from megatron_rl_corr.mcore.batch import Microbatch


@dataclass(frozen=True)
class LogprobSettings:
    """How the model's last layer becomes log-probs of the same distribution that the server sampled from."""

    tp_group: ProcessGroup | None
    temperature: float
    vocab_size: int
    from_hidden: bool = False
    """Without ever holding all logits, through Megatron's output_processor hook."""
    fp32_lm_head: bool = False
    """Logits in float32, of float32 copies of hidden states and weight; with from_hidden."""
    inplace_gradient: bool = False
    """The logits' gradient is written over them."""


def model_arguments(micro: Microbatch, settings: LogprobSettings, *, with_entropy: bool) -> dict[str, Any]:
    """What the model's forward is called with beside tokens and positions: nothing, or the hook."""
    if not settings.from_hidden:
        return {}
    from megatron_rl_corr.mcore.output_processor import OutputContext, label_logprobs_of_hidden

    context = OutputContext(micro.labels, settings, with_entropy=with_entropy)
    return {"output_processor": label_logprobs_of_hidden, "output_processor_context": context}


def label_logprobs(
    output: Tensor, micro: Microbatch, settings: LogprobSettings, *, with_entropy: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Log-probs (and entropy) of a microbatch's labels, flat: [b * L], of the model's output for `model_arguments`.

    That is logits [b, L, V/tp], or log-probs [b, L, 1 or 2] already. Over the support that the server sampled from
    where it is known, else over the whole vocabulary.
    """
    if settings.from_hidden:
        from megatron_rl_corr.mcore.output_processor import split_output

        return split_output(output)
    logits, labels = output.reshape(-1, output.shape[-1]), micro.labels.reshape(-1)
    if micro.supports is not None:
        return support_logprobs(
            logits, labels, micro.supports, tp_group=settings.tp_group,
            temperature=settings.temperature, with_entropy=with_entropy,
        )
    return vocab_parallel_logprobs(
        logits, labels, tp_group=settings.tp_group, temperature=settings.temperature,
        vocab_size=settings.vocab_size, with_entropy=with_entropy, inplace_gradient=settings.inplace_gradient,
    )
