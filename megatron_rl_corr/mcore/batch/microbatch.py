"""One microbatch: the model's inputs, and what the loss needs of its tokens.

T tokens of a batch on this context-parallel rank, b rows of L of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from megatron_rl_corr.core.correction import Correction
from megatron_rl_corr.core.segments import padded_at
from megatron_rl_corr.logprobs.sampled_rows import SampledRows
from megatron_rl_corr.logprobs.sampling_mask import SamplingMasks


@dataclass(frozen=True)
class LossInputs:
    """What the loss needs of each token beside the logits; on the last pipeline stage only."""

    rollout_logprobs: Tensor
    """[T] float32, log pi_rollout of the label; NaN where the server gave none."""
    loss_mask: Tensor
    """[T] bool: the label was sampled by the policy, in a sample of the loss, whatever its log-prob."""
    from_current_weights: Tensor
    """[T] bool: sampled, and by the weights that the trainer has now, whether or not its
    sample is in the loss.
    """
    advantages: Tensor
    """[T] float32."""
    correction: Correction
    """The batch's; without a pass for old log-probs it only counts tokens, and the loss makes
    each microbatch's.
    """
    coefficients: Tensor
    """[T] float32: the loss of the global batch is the sum of coefficients x token losses."""
    old_logprobs: Tensor | None = None
    """[T] float32, log pi_old of the label; None without a pass for it."""
    ref_logprobs: Tensor | None = None
    """[T] float32, log pi_ref of the label; None without a reference policy."""
    turn_ids: Tensor | None = None
    """[T] int64, in [0, num_turns); None where sequences have one turn."""
    num_turns: int | None = None
    engine_ids: Tensor | None = None
    """[T] int64: which of `engines` sampled the label; None where all have the same."""
    engines: tuple[str, ...] = ()
    token_lags: Tensor | None = None
    """[T] int64: pushes since the weights that sampled the label; None: no metrics by lag."""
    top_ids: Tensor | None = None
    """[T, K] int32: the ids that were likeliest where the label was sampled; None: nobody asks for them."""
    top_logprobs: Tensor | None = None
    """[T, K] float32, log pi_rollout of these."""
    teacher_logprobs: Tensor | None = None
    """[T] float32, log pi of the teacher of the label, NaN where it is not known; None without a teacher."""
    teacher_ids: Tensor | None = None
    """[T, K] int32: the ids that the teacher finds likeliest; None: nobody asks for them."""
    teacher_top_logprobs: Tensor | None = None
    """[T, K] float32, its log-probs of these."""
    energies: Tensor | None = None
    """[T] float32, `gradient_energies` under pi_old; None: no advantage asks for them."""

    def at(self, places: Tensor, padding: int) -> LossInputs:
        """Those of the tokens at these places [T'], and behind them of so many that are no
        token: 0, masked.
        """
        tensors = {name: value for name, value in vars(self).items() if isinstance(value, Tensor)}
        part = {name: padded_at(value, places, padding) for name, value in tensors.items()}
        return replace(self, **part, correction=self.correction.at(places, padding))


@dataclass(frozen=True)
class Microbatch:
    """The model's inputs and, in training on the last stage, the loss's: b rows, or a pack (b = 1)."""

    index: int
    """Its number in the step."""
    tokens: Tensor | None
    """[b, L] int64; None on stages that have neither embedding nor logits."""
    labels: Tensor | None
    """[b, L] int64; None on stages without logits."""
    position_ids: Tensor
    """[b, L] int64, in the whole sequence."""
    seq_ids: Tensor
    """[b * L] int64: the sequence of each token, from 0; a pack's padding counts to the last."""
    num_sequences: int
    counted: int
    """Its part of the sum that --calculate-per-token-loss divides the gradient by: b * L positions of rows;
    1 of a pack, as that sum is known on every rank without asking the others for their tokens.
    """
    padding: Tensor
    """[b, L] bool: not a token of a sequence."""
    sampled: SampledRows | None
    """Which of the b * L labels were sampled; the others get no log-prob. None on stages without logits."""
    places: Tensor
    """[L, b] int64: each token's place among the batch's T; T in a pack's padding. As routers see
    tokens, L first.
    """
    loss_inputs: LossInputs | None = None
    """The loss inputs of the b * L tokens, flat."""
    sampling_masks: SamplingMasks | None = None
    """The ids that each of the b * L labels was drawn from."""
    packed_seq_params: PackedSeqParams | None = None
    """Where each sequence begins, in a pack; None: sequences are rows."""
    further_ids: Tensor | None = None
    """[b * L, K]: ids beside the labels whose log-probs a pass without a loss wants; None: none."""

    @property
    def top_ids(self) -> Tensor | None:
        """[b * L, K]: the ids beside the labels whose log-probs are wanted; None: none."""
        if self.loss_inputs is None:
            return self.further_ids
        inputs = self.loss_inputs
        return inputs.teacher_ids if inputs.top_ids is None else inputs.top_ids
