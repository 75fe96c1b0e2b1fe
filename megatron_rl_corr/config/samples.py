"""How the responses to a prompt are sampled, and how far ahead of training."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from megatron_rl_corr.config.fields import Between, Options, Positive, option
from megatron_rl_corr.config.problems import Refusal


@dataclass(frozen=True, kw_only=True)
class SamplesConfig(Options):
    """Samples: how the responses to a prompt are sampled."""

    group_size: Annotated[int, Positive()] = option(8, metavar="G")
    """Samples of each prompt; --global-batch-size counts samples, those of one update."""

    max_new_tokens: Annotated[int, Positive()] = option(1024, metavar="N")
    """Longest response, in tokens; what an environment answers counts too."""

    temperature: Annotated[float, Positive(finite=True)] = option(1.0, metavar="T")
    """Sampling temperature; the training log-probs are divided by it too."""

    top_p: Annotated[float, Positive(), Between(0, 1)] = option(1.0, metavar="P")
    """Nucleus sampling; the training log-probs are renormalised on the ids that it kept."""

    top_k: int = option(-1, metavar="K")
    """Sample from the K likeliest ids, 2 to 4096. `top_p` needs it, because SGLang reports the kept ids
    only with it; -1 turns it off.
    """

    min_p: Annotated[float, Between(0)] = option(0.0, metavar="P")
    """Sample from the ids with at least this share of the likeliest one's probability; the training
    log-probs are renormalised on them. It needs a `top_k`, as `top_p` does, and servers without
    deterministic inference.
    """

    stop: tuple[str, ...] = option((), metavar="TEXT")
    """Texts that end a response, beside the end-of-sequence ids; the sampled ids up to the one that
    completes the text are the response, and are trained.
    """

    stop_token_ids: tuple[str, ...] = option((), metavar="ID")
    """Token ids that end a response, beside the end-of-sequence ids."""

    score_centering: Annotated[int | None, Positive("16, for example")] = option(None, metavar="K")
    """Score centering (arXiv:2609.20807): servers also return the K likeliest ids of each token, and the
    policy loss gets the term that removes the drift of the mean gradient which the mismatch causes: exactly
    on these ids, the rest scaled by one ratio. Alone, or with `rollout_is` token.
    """

    max_lag: Annotated[int, Between(0)] = option(0, metavar="K")
    """Sample ahead of training, from weights up to K versions old: servers and trainer work at the same
    time, and the correction takes the age into account. 0: on-policy, one after the other. A version is a
    push, one a batch.
    """

    stale_samples: Literal["keep", "drop"] = option("keep", needs="max_lag")
    """Samples that took so long that they are more than `max_lag` versions old: keep corrects them like
    the others, drop asks for new ones, which prefers short responses.
    """

    pause_mode: Literal["retract", "in_place"] = option("retract", needs="max_lag")
    """Responses that are running while weights change: retract computes their keys and values anew,
    in_place goes on with the old ones, and needs servers with --disable-overlap-schedule.
    """

    save_waiting_gib: Annotated[float, Between(0, finite=True)] = option(8.0, metavar="GIB")
    """Groups that are scored and wait to be trained are saved in each checkpoint, beside the training, and
    finished samples and replayable turns of those that are being sampled: up to so many GiB of samples for
    each data-parallel replica, with routes a byte or two for each token, layer and expert. A run that goes on
    trains them first; what is not saved is sampled again. 0: none.
    """

    def check(self) -> None:
        wrong = [token for token in self.stop_token_ids if not str(token).isdecimal()]
        if wrong:
            raise Refusal(
                f"`stop_token_ids` must be token ids, whole numbers of at least 0, got {token!r}"
                for token in wrong
            )

    def check_score_centering(self) -> None:
        for name, off in (("top_p", 1.0), ("top_k", -1), ("min_p", 0.0)):
            value = getattr(self, name)
            if self.score_centering is not None and value != off:
                raise ValueError(
                    f"`score_centering` {self.score_centering} is derived for samples of the whole softmax, "
                    f"and `{name}` {value:g} truncates it; use `{name}` {off:g}, or leave it out"
                )

    def check_top_k(self) -> None:
        if self.top_k != -1 and self.top_k < 2:
            raise ValueError(f"`top_k` must be -1 (off) or at least 2, got {self.top_k}")

    def check_min_p(self) -> None:
        if self.min_p >= 1:
            raise ValueError(f"`min_p` must be in [0, 1), got {self.min_p:g}; 0 keeps every token")

    def check_stop(self) -> None:
        if "" in self.stop:
            raise ValueError("`stop` has an empty text, which would end every response at once; drop it")
