"""How many optimizer steps a batch of samples makes, and when the rest of them is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_rl_corr.config.fields import Options, Positive, option


@dataclass(frozen=True, kw_only=True)
class UpdatesConfig(Options):
    """Updates: how many optimizer steps the samples of one collection make."""

    updates_per_batch: Annotated[int, Positive()] = option(1, metavar="K")
    """Updates that a collected batch is cut into, each of --global-batch-size samples: K times as
    many are collected at once. An update is one iteration of Megatron; weights are pushed after the
    batch's last one.
    """

    epochs_per_batch: Annotated[int, Positive()] = option(1, metavar="E")
    """Times that each sample of a collected batch is trained on: `updates_per_batch` x E updates in all.
    Where these are parts of the batch, each time is cut in another order.
    """

    max_kl_to_old: Annotated[float | None, Positive(finite=True)] = option(None, metavar="X")
    """Leave out the rest of a batch's updates, the present one too, where the KL (k3) of the policy to
    pi_old is above X on an update's samples (bypass mode: to pi_rollout); they count as skipped
    iterations. Not judged at a batch's first update.
    """

    ess_step_scale: bool = False
    """Scale each update by sqrt(ESS / n) (VCPO, arXiv:2602.17616): the learning rate of that optimizer
    step, and with it decoupled weight decay. ESS = (sum w)^2 / sum w^2 over the update's n sequences that
    no rule rejects whole, w the product of a sequence's pi_train / pi_rollout, before bounds.
    """

    correction: Literal["auto"] | None = None
    """auto: the run chooses the importance weights of each batch from what it measured on the one before:
    min(w, c) of whole sequences once their effective sample size is 0.8 of them or more and until it is
    below 0.5, else of tokens; c = max(2, sqrt(n) / 4), n the samples of an update. `advantage` raw becomes
    group_mean, of groups of 1 batch_mean. auto/level says what it chose. In the place of `rollout_is`.
    """

    def check(self) -> None:
        if self.max_kl_to_old is not None and self.updates_of_batch == 1:
            raise ValueError(
                f"`max_kl_to_old` {self.max_kl_to_old:g} has no effect while a batch makes one update; give "
                "`updates_per_batch` or `epochs_per_batch`, or drop it"
            )

    @property
    def updates_of_batch(self) -> int:
        """U: all updates that a batch makes. With one, pi_old is the policy that is trained: r = 1."""
        return self.updates_per_batch * self.epochs_per_batch
