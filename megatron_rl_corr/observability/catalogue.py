"""What every metric means, its formula and its usual range: the one table the page and the docs read.

D = log pi_train - log pi_rollout of a sampled token, rho = e^D, w = the importance weight after its bounds.
"""

from megatron_rl_corr.observability.clamped import CLAMPS, clamped_text
from megatron_rl_corr.observability.collection_meaning import COLLECTION, COLLECTION_FAMILIES
from megatron_rl_corr.observability.routing_meaning import ROUTING
from megatron_rl_corr.observability.usual import Meaning, UsualRange

GAP_REMEDY = (
    "Compare both sides: the same temperature and top-p/top-k support, lm_head in float32 on both or on "
    "neither, the same checkpoint and dtype, the prefix cache flushed after each weight update; in a mixture "
    "of experts, tokens that the two sides route to different experts. If KL(k1) is in its range, a few "
    "improbable tokens carry the gap: see max |log-ratio|. What remains depends on the GPU and its attention "
    "kernel: 5e-4 to 1e-2 is common."
)
SHIFT_REMEDY = (
    "If KL(k3) is in its range, all tokens are shifted alike: look for a temperature, or a top-p/top-k "
    "renormalisation, that only one side applies. Otherwise follow the advice for KL(k3)."
)
WEIGHT_REMEDY = (
    "Over long sequences a product of ratios collapses or explodes: use token or geometric weights, or "
    "reject sequences geometrically. If token weights drift too, close the gap itself first (see the KL)."
)


MEANINGS: dict[str, Meaning] = {
    "step": Meaning("training step"),
    "reward/mean": Meaning("reward of the step's samples; should rise", "mean(r)", "reward"),
    "reward/std": Meaning("spread of the rewards; 0 leaves nothing to learn from", "std(r)"),
    "reward/max": Meaning("best reward of the step", "max(r)"),
    "reward/min": Meaning("worst reward of the step", "min(r)"),
    "rollout_corr/kl": Meaning(
        "train-infer KL, k1 estimate: sees a shift common to all tokens", "mean(-D)", "KL(k1)",
        UsualRange("train and rollout probabilities are shifted against each other", SHIFT_REMEDY,
                   low=-1e-2, high=1e-2),
    ),
    "rollout_corr/k3_kl": Meaning(
        "train-infer KL, k3 estimate: never negative, dominated by the worst tokens",
        "mean(e^D - D - 1)", "KL(k3)",
        UsualRange("train and rollout disagree more than numerics explain", GAP_REMEDY, high=1e-2),
    ),
    "rollout_corr/jsd": Meaning(
        "Jensen-Shannon divergence of the two sides; its estimate grows linearly in rho",
        "mean(rho ln(2 rho / (1 + rho)) + ln(2 / (1 + rho))) / 2",
    ),
    "rollout_corr/log_ratio_abs_max": Meaning(
        "largest disagreement on one token", "max |D|", "max |log-ratio|"
    ),
    "rollout_corr/log_ratio_abs_mean": Meaning("average disagreement per token", "mean |D|"),
    "rollout_corr/log_ratio_abs_p50": Meaning("half of the tokens disagree by at most this; the end of a bin", "|D|"),
    "rollout_corr/log_ratio_abs_p99": Meaning("99 tokens of 100 disagree by at most this; the end of a bin", "|D|"),
    "rollout_corr/log_ratio_abs_p999": Meaning("999 of 1000 disagree by at most this; the end of a bin", "|D|"),
    "rollout_corr/log_ratio_large_fraction": Meaning(
        "tokens on which one side is more than twice as sure as the other", "tokens with |D| > ln 2 / valid tokens"
    ),
    "rollout_corr/token_mult_prob_error": Meaning(
        "average factor between the two probabilities of a token; 1 is ideal", "mean(e^|D|)"
    ),
    "rollout_corr/prob_diff_abs_mean": Meaning(
        "average difference of a token's two probabilities; says little of improbable tokens",
        "mean |pi_train - pi_rollout|",
    ),
    "rollout_corr/prob_diff_abs_max": Meaning(
        "largest difference of a token's two probabilities", "max |pi_train - pi_rollout|"
    ),
    "rollout_corr/prob_diff_std": Meaning(
        "spread of the difference of a token's two probabilities", "std(pi_train - pi_rollout)"
    ),
    "rollout_corr/weight_mean": Meaning(
        "average importance weight; 1 when both sides agree", "mean(w)", "weight",
        UsualRange("the correction rescales the whole gradient", WEIGHT_REMEDY, low=0.5, high=2.0),
    ),
    "rollout_corr/weight_std": Meaning("spread of the importance weights", "std(w)"),
    "rollout_corr/weight_max": Meaning(
        "largest importance weight; stays at the upper bound if truncated", "max(w)"
    ),
    "rollout_corr/weight_min": Meaning("smallest importance weight", "min(w)"),
    "rollout_corr/weight_out_of_bounds": Meaning(
        "tokens whose weight the bounds changed", "tokens with raw w outside its bounds / valid tokens"
    ),
    "rollout_corr/ess": Meaning(
        "effective sample size: share of the batch that carries the gradient; 1 is ideal",
        "1 / mean((w / mean(w))^2)", "ESS",
        UsualRange(
            "a few samples carry the gradient",
            "Lower the upper bound of the weights, or prefer token to sequence weights; check that samples "
            "are not several weight versions old.", low=0.3,
        ),
    ),
    "rollout_corr/kept_fraction": Meaning(
        "tokens left after rejection", "kept tokens / valid tokens", "kept"
    ),
    "rollout_corr/kept_sequence_fraction": Meaning(
        "sequences left after rejection", "kept sequences / valid sequences", "kept sequences"
    ),
    "rollout_corr/nonfinite_tokens": Meaning(
        "tokens dropped because a log-probability was NaN or infinite", "count", "dropped",
        UsualRange(
            "log-probabilities came back NaN or infinite",
            "Look for overflow in the rollout server's logits (its dtype and quantisation), and for tokens "
            "that sampling could not have produced.", low=0, high=0,
        ),
    ),
    "rollout_corr/padded_tokens": Meaning("positions outside the loss mask: prompts and padding", "count"),
    "rollout_corr/valid_tokens": Meaning("tokens in the loss mask with finite log-probabilities", "count"),
    "rollout_corr/sequences": Meaning("sequences with at least one valid token", "count"),
    "rollout_corr/chi2_token": Meaning(
        "chi-squared divergence per token: variance of the raw ratios", "mean(rho^2) - 1", "chi2",
        UsualRange(
            "raw ratios vary so much that weights are mostly noise",
            "Bound the weights on both sides (IcePop) or reject on k3; find out which tokens do it: "
            "improbable tokens and late turns come first.", high=1,
        ),
    ),
    "rollout_corr/chi2_geo": Meaning(
        "chi-squared divergence of geometric means over sequences", "mean(exp(2 mean(D))) - 1", "chi2 geometric",
        UsualRange(
            "whole sequences are shifted against each other",
            "A shift of every token of a sequence is no noise: look for a temperature, a stale weight version or a "
            "stale prefix cache.", high=1,
        ),
    ),
    "rollout_corr/chi2_seq": Meaning(
        "chi-squared divergence of products; above 1, sequence weights are mostly noise",
        "mean(exp(2 sum(D))) - 1, sum(D) clamped to +-20",
    ),
    "rollout_corr/training_ppl": Meaning(
        "perplexity of the samples under the trained model",
        "mean over sequences of exp(-mean log pi_train)",
    ),
    "rollout_corr/rollout_ppl": Meaning(
        "perplexity of the samples under the rollout server",
        "mean over sequences of exp(-mean log pi_rollout)",
    ),
    "rollout_corr/training_log_ppl": Meaning(
        "log-perplexity under the trained model: one bad sequence cannot hide the others",
        "mean over sequences of -mean log pi_train",
    ),
    "rollout_corr/rollout_log_ppl": Meaning(
        "log-perplexity under the rollout server", "mean over sequences of -mean log pi_rollout"
    ),
    "rollout_corr/ppl_ratio": Meaning(
        "how many times more perplexed the trained model is; 1 is ideal", "mean over sequences of exp(mean(-D))"
    ),
    "rollout_corr/log_ppl_diff": Meaning(
        "gap of the two log-perplexities", "mean over sequences of mean(log pi_rollout - log pi_train)"
    ),
    "rollout_corr/log_ppl_diff_abs": Meaning(
        "size of that gap: sequences shifted up and down do not cancel", "mean over sequences of |mean(D)|"
    ),
    "rollout_corr/log_ppl_diff_max": Meaning(
        "the sequence whose tokens training finds the least probable, against the server", "max of mean(-D)"
    ),
    "rollout_corr/log_ppl_diff_min": Meaning(
        "the sequence whose tokens training finds the most probable, against the server", "min of mean(-D)"
    ),
    "rollout_corr/pearson": Meaning(
        "correlation of the two sides' token probabilities; 1 is ideal", "corr(pi_train, pi_rollout)"
    ),
    "loss/policy": Meaning("policy loss; its level says little, jumps do"),
    "loss/clip_fraction": Meaning("tokens whose policy ratio was clipped", "clipped tokens / kept tokens"),
    "loss/dual_clip_fraction": Meaning(
        "tokens of negative advantage whose loss the dual clip bounded", "tokens at c |A| / kept tokens"
    ),
    "loss/old_new_k3_kl": Meaning(
        "how far the policy is from pi_old, k3 estimate; 0 with three policies, one update a batch"
    ),
    "loss/entropy": Meaning("entropy of the policy per token; a fall to 0 is collapse", "mean(-sum p log p)"),
    "grad_norm": Meaning("gradient norm before clipping; spikes often follow the KL", label="grad norm"),
    "response_length/mean": Meaning("tokens per response", label="response length"),
    "tokens_per_s": Meaning("response tokens per second of the whole step", label="tokens/s"),
    "time/collect_s": Meaning("seconds waiting for samples and rewards"),
    "time/score_s": Meaning(
        "seconds from samples to training: advantages, and the scoring pass if there is one"
    ),
    "time/save_s": Meaning("seconds writing samples to --rollout-save-trajectories"),
    "time/train_s": Meaning("seconds in forward, backward and optimizer"),
    "time/push_s": Meaning("seconds sending weights to the servers"),
    "time/step_s": Meaning("seconds of the whole step"),
    "weight_version": Meaning("weight version the servers hold after the step", label="version"),
    **COLLECTION,
    "skipped": Meaning(
        "1 when the optimizer step was left out", "", "skip",
        UsualRange(
            "all tokens rejected, all advantages 0, or a gradient not finite",
            "Widen the rejection bounds if the kept fraction is 0; look for prompts whose samples all have one reward "
            "if reward/std is small; otherwise find the first NaN in the losses.", low=0, high=0,
        ),
    ),
}

MEANINGS = {
    key: meaning
    for name, described in MEANINGS.items()
    for key, meaning in (
        (name, described),
        *([(f"{name}_clamped", Meaning(clamped_text(name), CLAMPS[name]))] if name in CLAMPS else []),
    )
}

PREFIXES: dict[str, Meaning] = {
    "eval/": Meaning(
        "reward, response_length, length_fraction of held-out prompts; failed: how many failed",
        "every --eval-interval steps, mean over one sample of each prompt that did not fail",
    ),
    "rollout_corr/rejected_fraction/": Meaning(
        "tokens that this rejection rule drops", "rejected tokens / valid tokens"
    ),
    "rollout_corr/by_prob/": Meaning(
        "tokens, kl, k3_kl, log_ratio_abs_mean (and *_clamped) of one band of pi_rollout",
        "the metric of that name over below_1e-4, 1e-4_to_1e-3, ..., above_1e-1",
    ),
    "rollout_corr/log_ratio_abs_bin/": Meaning(
        "share of tokens by size of disagreement: |D| up to this end, above the one before",
        "tokens in the bin / valid tokens; ends at 1, 2 and 5 of each decade and at ln 2",
    ),
    "rollout_corr/by_turn/": Meaning(
        "the same for first turns and later ones; later ones carry more, where tools answer",
        "the metric of that name over turn 0 (first) and the others (later)",
    ),
    "rollout_corr/batch_filtered": Meaning(
        "1 when the batch filter skipped the step", "KL(k3) > --rollout-batch-filter-kl", "filtered",
        UsualRange(
            "the train-infer KL of a whole step was above the filter's bound",
            "A step now and then is what the filter is for. If many go, close the gap itself (see KL(k3)), or raise "
            "the bound.", low=0, high=0,
        ),
    ),
    **COLLECTION_FAMILIES,
    **ROUTING,
}
"""Families of metrics, by the start of their names, and metrics that only some settings have."""


def meaning_of(name: str) -> Meaning | None:
    """The metric's meaning, or that of its family; None for a metric that is not known."""
    if name in MEANINGS:
        return MEANINGS[name]
    return next((meaning for prefix, meaning in PREFIXES.items() if name.startswith(prefix)), None)


def label_of(name: str) -> str:
    """The metric's short label, or its name where it has none."""
    meaning = meaning_of(name)
    return meaning.label if meaning and meaning.label else name


def usual_range(name: str) -> UsualRange | None:
    """The metric's usual range, or None for a metric that has none or is not known."""
    meaning = meaning_of(name)
    return meaning.usual if meaning else None
