"""What the settings of a correction and of its run must agree on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from megatron_rl_corr.config.checks import plain
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.fields import make, options_of
from megatron_rl_corr.config.groups import SPREAD
from megatron_rl_corr.config.losses import WITHOUT_GROUPS, is_own
from megatron_rl_corr.config.problems import Problems, Refusal, check_each
from megatron_rl_corr.config.rules import check_trainer_inputs
from megatron_rl_corr.config.run import OVER_HTTP, RunConfig
from megatron_rl_corr.config.urls import check_urls_of

_CLIPS = (
    "clip_ratio_low",
    "clip_ratio_high",
    "clip_ratio_c",
    "sapo_temperature_pos",
    "sapo_temperature_neg",
    "dro_beta",
)
"""What acts on the ratio to pi_old alone: bounds, and what stands in their place."""


def check_together(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for settings of the one that the other leaves without effect or without what they need."""
    problems = Problems()
    for check in _TOGETHER:
        with problems.catch():
            check(config, run)
    problems.raise_all()


def _check_turns(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for what looks at turns where there is one in every rollout."""
    by_turn = config.decided_by_turn
    if by_turn and not run.maker and not run.replay:
        raise ValueError(
            f"{by_turn[0]} looks at turns, and without `environment` every rollout has one; add it, or use a "
            "token or sequence level"
        )


def _check_inputs(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for rules whose inputs the run would lack."""
    check_trainer_inputs(config.rollout_rs, partial(getattr, run), bypass_mode=config.bypass_mode)


def _check_statistics(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for statistics of a pass that is left out."""
    if config.bypass_mode and run.expert_statistics:
        raise ValueError(
            "`expert_statistics` watches the pass that computes old log-probs, which bypass mode leaves out; "
            "drop it"
        )


def _check_exactness(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for a comparison with updates whose weights are others than those that sampled."""
    if run.expect_exact is not None and config.bypass_mode and run.updates_of_batch > 1:
        raise ValueError(
            f"`expect_exact` {run.expect_exact:g} in bypass mode, with {run.updates_of_batch} updates a "
            "batch: there is no pass before them, and all but the first train other weights than sampled; "
            "drop `bypass_mode`, or make one update a batch"
        )


def _check_step_scale(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for a scale of updates that are not to be changed."""
    if config.diagnostics_only and run.ess_step_scale:
        raise ValueError(
            "`ess_step_scale` scales updates, and `diagnostics_only` promises that the correction changes "
            "nothing; drop one of them"
        )


def _check_groups(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for groups of one sample where an advantage compares the samples of a group."""
    if run.group_size > 1 or _is_unrewarded(config, run):
        return
    kind = config.advantage_kind
    if config.advantage_by_token:
        raise ValueError(
            f"`group_size` 1 leaves `advantage` {kind} without a baseline, as no other response has the same "
            "prompt; use 2 or more, or `advantage` raw or reinforce_plus_plus"
        )
    if kind not in WITHOUT_GROUPS and not is_own(kind):
        raise ValueError(
            f"`group_size` 1 leaves a group-relative `advantage` ({kind}) of 0 everywhere; use 2 or more, or "
            "`advantage` reinforce_plus_plus or raw"
        )


def _is_unrewarded(config: RolloutCorrectionConfig, run: RunConfig) -> bool:
    """True if a teacher alone trains: all rewards are 0, as far as the options say (a replay's don't)."""
    return bool(config.distill_coef) and not run.maker and not any(one.weight for one in run.rewards)


def _check_group_filter(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for groups of one sample, of unequal rewards, where nothing else needs larger ones."""
    compares = config.advantage_kind not in WITHOUT_GROUPS and not is_own(config.advantage_kind)
    if run.group_size == 1 and run.group_filter == SPREAD and not compares:
        raise ValueError(
            f"`group_filter` {SPREAD} with `group_size` 1: one reward has no spread, so no group would pass; "
            "drop it, or use 2 or more"
        )


def _check_penalty(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for a reference policy without a penalty."""

    def check(name: str) -> None:
        value = getattr(run, name)
        if value and not config.needs_reference:
            given = " ".join(value) if isinstance(value, tuple) else value
            raise ValueError(
                f"`{name}` {given} has no effect without a penalty; add `kl_loss_coef` or `kl_reward_coef`, "
                "or drop it"
            )

    check_each(check, ("reference_checkpoint", "reference_urls", "reference_reset"))


def _check_scored_distribution(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for servers that can't score what was sampled."""
    changed = {
        "temperature": lambda value: value != 1,
        "top_p": lambda value: value < 1,
        "top_k": lambda value: value > 0,
        "min_p": lambda value: value > 0,
    }

    def check(name: str) -> None:
        if run.reference_urls and changed[name](getattr(run, name)):
            raise ValueError(
                f"`reference_urls` with `{name}` {getattr(run, name)}: servers score tokens under the whole "
                "distribution at temperature 1, which is not the one that was sampled; use "
                f"`reference_checkpoint`, whose log-probs are of the sampled one, or drop `{name}`"
            )
        if run.teacher_urls and changed[name](getattr(run, name)):
            raise ValueError(
                f"`teacher_urls` with `{name}` {getattr(run, name)}: a teacher scores tokens under its whole "
                "distribution at temperature 1, and the policy must be sampled and trained under its own; "
                f"drop `{name}`"
            )

    check_each(check, changed)


def _check_scoring_urls(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for addresses that can't be servers'."""
    if run.engine in OVER_HTTP:
        check_urls_of("`reference_urls`", run.reference_urls)
        check_urls_of("`teacher_urls`", run.teacher_urls)


def _check_own_servers(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for servers of the reference or of the teacher to which the trained weights are pushed."""
    pushed = [other.rstrip("/") for other in run.urls]

    def check(url: str) -> None:
        if url.rstrip("/") in pushed and url in run.reference_urls:
            raise ValueError(
                f"`reference_urls` {url} is one of `urls` too, to which the trained weights are pushed; "
                "start a server of its own for the reference"
            )
        if url.rstrip("/") in pushed:
            raise ValueError(
                f"`teacher_urls` {url} is one of `urls` too, to which the trained weights are pushed; start "
                "a server of its own for the teacher"
            )

    check_each(check, run.scoring_urls)


def _check_teacher(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for a teacher without distillation, or the other way round."""
    if run.teacher_urls and not config.distill_coef:
        raise ValueError(
            f"`teacher_urls` {' '.join(run.teacher_urls)} has no effect without distillation; add "
            "`distill_coef`, 1 is usual, or drop it"
        )
    if config.distill_coef and not run.teacher_urls:
        raise ValueError(
            f"`distill_coef` {plain(config.distill_coef)} needs a teacher; name its servers with "
            "`teacher_urls`, or drop it"
        )


def _check_distillation(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for what distillation was not derived for, or what has no effect where it alone trains."""
    if not config.distill_coef:
        return
    coef, top = plain(config.distill_coef), config.distill_top_k
    refused = {
        f"`score_centering` {run.score_centering} with `distill_coef` {coef}: centering is derived for one "
        "advantage of all ids at a token, and a teacher gives each id its own; drop one of them": (
            run.score_centering is not None
        ),
        f"`distill_top_k` {top} with `linear_logprobs`, which gives log-probs of the sampled ids alone; drop "
        "one of them": top is not None and run.linear_logprobs,
        f"`group_filter` {SPREAD} without a reward: rewards that are all 0 have no spread, so no group "
        "would pass; drop it": run.group_filter == SPREAD and _is_unrewarded(config, run),
    }
    given = [text for text, is_given in refused.items() if is_given]
    if given:
        raise Refusal(given)


def _check_recorded_routes(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for --router-replay R2 where no pass records routes, or their repetition has no effect."""
    if run.router_replay != "R2":
        return
    if run.updates_of_batch == 1:
        raise ValueError(
            "`router_replay` R2 has no effect: it repeats the routes of the pass for old log-probs, and "
            "with one update a batch those are of the very weights that train; use R3, the servers' routes, "
            "or `router_replay` off, or several updates with `updates_per_batch`"
        )
    if config.bypass_mode:
        raise ValueError(
            "`router_replay` R2 repeats the routes of the pass that computes old log-probs, which bypass "
            "mode leaves out; use R3, the servers' routes, or `router_replay` off"
        )


def _check_later_updates(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for several updates a batch with a loss that would take each for the first.

    Weights and rules are of pi_old against pi_rollout, made once a batch. A loss without a ratio to pi_old
    does not follow the policy from there: from the second update on its samples are another policy's. In
    bypass mode they are of the policy as it is.
    """
    follows = config.kind.has_ratio or config.kind.pulls_to_old or is_own(config.loss)
    if run.updates_of_batch == 1 or follows or (config.bypass_mode and config.changes_gradient):
        return
    what = f"`loss` {config.loss} with {run.updates_of_batch} updates a batch"
    if config.rollout_is_mode == "gamma":
        what = f"`rollout_is_mode` gamma, {what}"
    raise ValueError(
        f"{what}: it has no ratio that follows the policy from one update to the next, so all but the first "
        "would train on samples of another policy, uncorrected. Add `bypass_mode` with `rollout_is` token, "
        "sequence or turn, or with `rollout_rs`, which are then of the policy as it is in each update (and "
        "leave `diagnostics_only` out), or use `loss` ppo_clip, whose ratio is clipped around pi_old, or one "
        "update a batch"
    )


def _check_age(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for samples of older weights that nothing corrects."""
    has_ratio = config.kind.has_ratio or is_own(config.loss)  # a function of the user's may have one
    # In bypass mode pi_old is the servers' policy, whatever its age: a ratio to it corrects, and a
    # pull to it bounds.
    corrected = config.changes_gradient or (config.bypass_mode and (has_ratio or config.kind.pulls_to_old))
    if run.max_lag > 0 and not corrected and run.score_centering is None:
        raise ValueError(
            f"`max_lag` {run.max_lag} trains on samples of older weights, and nothing corrects them; add "
            "`rollout_is` token, `rollout_rs`, `score_centering`, or a `rollout_correction_preset` such as "
            "decoupled_token_is (and leave `diagnostics_only` out), or use `max_lag` 0"
        )


def _check_sat(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for an interval that is shrunk where nothing is clipped.

    A file of settings is refused too: no peer's has this, so that it can't describe a peer's run.
    """
    if config.clip_sat_tail is not None and run.updates_of_batch == 1:
        raise ValueError(
            f"`clip_sat_tail` {plain(config.clip_sat_tail)} has no effect: a batch makes one update, so "
            "pi_old is the policy that is trained, its ratio is 1 and nothing is clipped. Drop it, or make "
            "several updates with `updates_per_batch`"
        )


def _check_score_centering(config: RolloutCorrectionConfig, run: RunConfig) -> None:
    """ValueError for settings that the centered gradient is not derived for.

    It is that of a token, w(y) A grad log p(y), whose weight w follows from the ratio of this token alone.
    """
    if run.score_centering is None:
        return
    kind, rules = config.kind, ",".join(rule.name for rule in config.rollout_rs)
    levels = config.rollout_is in (None, "token")
    refused = {
        f"`rollout_is` {config.rollout_is} weighs units of several tokens; use token, or none": not levels,
        "`rollout_is_batch_normalize` divides the weights by the batch's; drop it": (
            config.rollout_is_batch_normalize
        ),
        f"`rollout_rs` {rules} makes what is kept depend on the sampled token; drop it": config.rollout_rs,
        "`rollout_m2_threshold` makes what is kept depend on the sampled tokens; drop it": (
            config.rollout_m2_threshold is not None
        ),
        "`diagnostics_only` promises that the correction changes nothing; drop one of them": (
            config.diagnostics_only
        ),
        f"`loss` {config.loss} has another gradient than the weighed log-prob's; use ppo_clip or reinforce": (
            kind.whole_sequences or kind.pulls_to_old
        ),
        f"in bypass mode the ratio of `loss` {config.loss} is clipped by the advantage's sign; use `loss` "
        "reinforce": config.bypass_mode and kind.has_ratio,
        f"{run.updates_of_batch} updates a batch: the ratio to pi_old is 1 in the first of them alone; make "
        "one": run.updates_of_batch > 1,
        "`linear_logprobs` gives log-probs of the sampled ids alone; drop it": run.linear_logprobs,
        "`correction` auto takes weights of whole sequences too; use `rollout_is` token": run.correction,
    }
    given = [text for text, is_given in refused.items() if is_given]
    if given:
        raise Refusal(
            f"`score_centering` {run.score_centering} is not derived for this: {text}" for text in given
        )


_TOGETHER = (
    _check_penalty,
    _check_scored_distribution,
    _check_scoring_urls,
    _check_teacher,
    _check_distillation,
    _check_own_servers,
    _check_turns,
    _check_inputs,
    _check_statistics,
    _check_exactness,
    _check_step_scale,
    _check_later_updates,
    _check_recorded_routes,
    _check_age,
    _check_groups,
    _check_group_filter,
    _check_sat,
    _check_score_centering,
)
"""Each is check(correction, run)."""


def check_branches(config: RolloutCorrectionConfig) -> None:
    """ValueError for what can't be trained on samples of several sequences, as an agent's episodes are."""
    if config.advantage_by_token:
        raise ValueError(
            f"`advantage` {config.advantage_kind} compares a group's responses at each position, and an "
            "episode of several sequences has several tokens there; use another one"
        )


def check_given_clips(config: RolloutCorrectionConfig, given: Mapping[str, Any], updates: int) -> None:
    """ValueError for a clip given as a flag where it can't act.

    Args:
        config: the whole correction.
        given: the options of the command line, by field, as `flags.given_flags` returns them.
        updates: that a batch makes, `RunConfig.updates_of_batch`.

    With three policies and one update a batch pi_old is the policy that is trained: r = 1, and no bound on
    r acts. Clips of a YAML file pass, as a peer's file describes its whole run, where they always stand;
    `idle_clips` names them.
    """

    def check(name: str) -> None:
        if name in given:
            raise ValueError(
                f"`{name}` {given[name]} has no effect: a batch makes one update, so pi_old is the policy "
                "that is trained, its ratio is 1 and nothing is clipped, gated or "
                "pulled. " + _remedies(config, name)
            )

    check_each(check, _CLIPS if updates == 1 and not config.bypass_mode else ())


def _remedies(config: RolloutCorrectionConfig, name: str) -> str:
    """What a user may do about a setting of _CLIPS that can't act; each of it is accepted."""
    several = "make several updates with `updates_per_batch`"
    if name == "dro_beta":  # without it dro is refused, and with one update it is reinforce
        return (
            f"{several[0].upper()}{several[1:]}, or add `bypass_mode`, where the pull is to pi_rollout; or "
            "drop it and use `loss` reinforce, which is the same with one update"
        )
    bypass = "`bypass_mode` clips the ratio to pi_rollout, and " if _takes_bypass(config) else ""
    return f"Drop it, or {several}; {bypass}`rollout_is` with `rollout_is_threshold` bounds the weights"


def _takes_bypass(config: RolloutCorrectionConfig) -> bool:
    """True if `bypass_mode` could be added to these settings."""
    known, problems = {**vars(config), "bypass_mode": True}, Problems()
    make(RolloutCorrectionConfig, known, problems, options_of(RolloutCorrectionConfig).keys() - known)
    return not problems


def idle_clips(config: RolloutCorrectionConfig, updates: int) -> str | None:
    """One line for the user about clips of a YAML file that can't act, with so many updates a
    batch; None: all can.
    """
    usual = RolloutCorrectionConfig()
    given = [
        f"`{name}` {getattr(config, name)}"
        for name in _CLIPS
        if getattr(config, name) != getattr(usual, name)
    ]
    if updates > 1 or config.bypass_mode or not given:
        return None
    nothing = "nothing is clipped, gated or pulled"
    return f"{', '.join(given)} of the configuration can't act: with one update a batch r = 1, and {nothing}"
