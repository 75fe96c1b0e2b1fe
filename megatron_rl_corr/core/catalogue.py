"""What the metrics of a correction mean, with their usual ranges and what to do outside of them.

D = log pi_train - log pi_rollout of a sampled token, rho = e^D, w = the importance weight after its bounds.
"""

from megatron_rl_corr.core.metric_spec import Column, MetricSpec, UsualRange, in_group

CLOSE_THE_GAP = (
    "Compare both sides: the same temperature and top-p/top-k support, lm_head in float32 on both or on "
    "neither, the same checkpoint and dtype, the prefix cache flushed after each weight update; in a mixture "
    "of experts, tokens that the two sides route to different experts. If KL(k1) is in its range, a few "
    "improbable tokens carry the gap: see max |log-ratio|. What remains depends on the GPU and its attention "
    "kernel: 5e-4 to 1e-2 is common."
)
FIND_THE_SHIFT = (
    "If KL(k3) is in its range, all tokens are shifted alike: look for a temperature, or a top-p/top-k "
    "renormalisation, that only one side applies. Otherwise follow the advice for KL(k3)."
)
TAME_THE_WEIGHTS = (
    "Over long sequences a product of ratios collapses or explodes: use token or geometric weights, or "
    "reject sequences geometrically. If token weights drift too, close the gap itself first (see the KL)."
)
D_CLAMPED = "D clamped to [-11.0, 2.61]"
"""2.61 is where k3 = e^D - 1 - D is 10, a ratio of 13.6."""
ABS_CLAMPED = "|D| at most 2.61"
MEAN_CLAMPED = "mean(D) clamped to +-2.61"

TOKENS = in_group(
    "Mismatch of tokens",
    MetricSpec(
        "rollout_corr/kl",
        "train-infer KL, k1 estimate: sees a shift common to all tokens",
        "mean(-D)",
        "KL(k1)",
        UsualRange(
            "train and rollout probabilities are shifted against each other",
            FIND_THE_SHIFT,
            low=-1e-2,
            high=1e-2,
        ),
        clamped=D_CLAMPED,
        compared=True,
    ),
    MetricSpec(
        "rollout_corr/k3_kl",
        "train-infer KL, k3 estimate: never negative, dominated by the worst tokens",
        "mean(e^D - D - 1)",
        "KL(k3)",
        UsualRange("train and rollout disagree more than numerics explain", CLOSE_THE_GAP, high=1e-2),
        clamped=D_CLAMPED,
        column=Column(8, "{:.2e}".format),
        compared=True,
    ),
    MetricSpec(
        "rollout_corr/jsd",
        "Jensen-Shannon divergence of the two sides; its estimate grows linearly in rho",
        "mean(rho ln(2 rho / (1 + rho)) + ln(2 / (1 + rho))) / 2",
        clamped=D_CLAMPED,
    ),
    MetricSpec(
        "rollout_corr/log_ratio_abs_max",
        "largest disagreement on one token",
        "max |D|",
        "max |log-ratio|",
        compared=True,
    ),
    MetricSpec(
        "rollout_corr/log_ratio_abs_mean",
        "average disagreement per token",
        "mean |D|",
        clamped=ABS_CLAMPED,
        compared=True,
    ),
    MetricSpec(
        "rollout_corr/log_ratio_abs_p50",
        "half of the tokens disagree by at most this; the end of a bin",
        "|D|",
    ),
    MetricSpec(
        "rollout_corr/log_ratio_abs_p99", "99 tokens of 100 disagree by at most this; the end of a bin", "|D|"
    ),
    MetricSpec(
        "rollout_corr/log_ratio_abs_p999", "999 of 1000 disagree by at most this; the end of a bin", "|D|"
    ),
    MetricSpec(
        "rollout_corr/exact_fraction",
        "tokens whose two log-probs are equal in float32; 1 if both sides compute alike",
        "tokens with D = 0 / valid tokens",
    ),
    MetricSpec(
        "rollout_corr/log_ratio_large_fraction",
        "tokens on which one side is more than twice as sure as the other",
        "tokens with |D| > ln 2 / valid tokens",
    ),
    MetricSpec(
        "rollout_corr/token_mult_prob_error",
        "average factor between the two probabilities of a token; 1 is ideal",
        "mean(e^|D|)",
        clamped=ABS_CLAMPED,
    ),
    MetricSpec(
        "rollout_corr/prob_diff_abs_mean",
        "average difference of a token's two probabilities; hardly sees improbable tokens",
        "mean |pi_train - pi_rollout|",
    ),
    MetricSpec(
        "rollout_corr/prob_diff_abs_max",
        "largest difference of a token's two probabilities",
        "max |pi_train - pi_rollout|",
    ),
    MetricSpec(
        "rollout_corr/prob_diff_std",
        "standard deviation of the difference of a token's two probabilities",
        "std(pi_train - pi_rollout)",
    ),
    MetricSpec(
        "rollout_corr/chi2_token",
        "chi-squared divergence per token: variance of the raw ratios",
        "mean(rho^2) - 1",
        "chi2",
        UsualRange(
            "raw ratios vary so much that weights are mostly noise",
            "Bound the weights on both sides (IcePop) or reject on k3; find out which tokens do it: "
            "improbable tokens and late turns come first.",
            high=1,
        ),
        clamped=D_CLAMPED,
    ),
    MetricSpec(
        "rollout_corr/pearson",
        "correlation of the two sides' token probabilities; 1 is ideal",
        "corr(pi_train, pi_rollout)",
    ),
    MetricSpec(
        "rollout_corr/log_ratio_abs_bin/",
        "share of tokens by size of disagreement: |D| up to this end, above the one before",
        "tokens in the bin / valid tokens; ends at 1, 2 and 5 of each decade and at ln 2",
    ),
    MetricSpec(
        "rollout_corr/by_prob/",
        "tokens, kl, k3_kl, log_ratio_abs_mean (and *_clamped) of one band of pi_rollout",
        "the metric of that name over below_1e-4, 1e-4_to_1e-3, ..., above_1e-1",
    ),
    MetricSpec(
        "rollout_corr/by_turn/",
        "the same for first turns and later ones; later ones often contain tool results",
        "the metric of that name over turn 0 (first) and the others (later); tokens, k3_kl and "
        "log_ratio_abs_mean also over turns 1, 2_to_3, 4_to_15, 16+",
        only_with="an environment or an agent",
    ),
    MetricSpec(
        "rollout_corr/by_lag/",
        "the same by how many pushes ago the weights were sent that sampled the token",
        "the metric of that name over tokens of 0, 1, and 2 or more (2+) pushes ago",
        only_with="--rollout-max-lag",
    ),
    MetricSpec(
        "rollout_corr/by_engine/",
        "the same, and log_ratio_abs_max, of the samples of one rollout engine",
        "over each engine, and a+b: responses of which both sampled a part",
        only_with="servers of two engines",
    ),
)

SEQUENCES = in_group(
    "Mismatch of sequences",
    MetricSpec(
        "rollout_corr/chi2_geo",
        "chi-squared divergence of geometric means over sequences",
        "mean(exp(2 mean(D))) - 1",
        "chi2 geometric",
        UsualRange(
            "whole sequences are shifted against each other",
            "A shift of every token of a sequence is no noise: look for a temperature, a stale weight "
            "version or a stale prefix cache.",
            high=1,
        ),
        clamped=MEAN_CLAMPED,
    ),
    MetricSpec(
        "rollout_corr/chi2_seq",
        "chi-squared divergence of products; above 1, sequence weights are mostly noise",
        "mean(exp(2 sum(D))) - 1, sum(D) clamped to +-20",
        clamped="sum(D) clamped to +-2.61",
    ),
    MetricSpec(
        "rollout_corr/training_ppl",
        "perplexity of the samples under the trained model",
        "mean over sequences of exp(-mean log pi_train)",
        clamped="at most 100 a sequence",
    ),
    MetricSpec(
        "rollout_corr/rollout_ppl",
        "perplexity of the samples under the rollout server",
        "mean over sequences of exp(-mean log pi_rollout)",
        clamped="at most 100 a sequence",
    ),
    MetricSpec(
        "rollout_corr/training_log_ppl",
        "log-perplexity under the trained model: one bad sequence cannot hide the others",
        "mean over sequences of -mean log pi_train",
        clamped="at most ln 100 a sequence",
    ),
    MetricSpec(
        "rollout_corr/rollout_log_ppl",
        "log-perplexity under the rollout server",
        "mean over sequences of -mean log pi_rollout",
        clamped="at most ln 100 a sequence",
    ),
    MetricSpec(
        "rollout_corr/ppl_ratio",
        "how many times more perplexed the trained model is; 1 is ideal",
        "mean over sequences of exp(mean(-D))",
        clamped=MEAN_CLAMPED,
    ),
    MetricSpec(
        "rollout_corr/log_ppl_diff",
        "difference of the two log-perplexities",
        "mean over sequences of mean(log pi_rollout - log pi_train)",
        clamped=MEAN_CLAMPED,
    ),
    MetricSpec(
        "rollout_corr/log_ppl_diff_abs",
        "the same of absolute values: sequences that are shifted up and down do not cancel",
        "mean over sequences of |mean(D)|",
        clamped=MEAN_CLAMPED,
    ),
    MetricSpec(
        "rollout_corr/log_ppl_diff_max",
        "largest difference: the sequence that training finds the least probable, compared",
        "max of mean(-D)",
    ),
    MetricSpec(
        "rollout_corr/log_ppl_diff_min",
        "smallest difference: the sequence that training finds the most probable, compared",
        "min of mean(-D)",
    ),
)

WEIGHTS = in_group(
    "Importance weights",
    MetricSpec(
        "rollout_corr/weight_mean",
        "average importance weight; 1 when both sides agree",
        "mean(w)",
        "weight",
        UsualRange("the correction rescales the whole gradient", TAME_THE_WEIGHTS, low=0.5, high=2.0),
        column=Column(7, "{:.3f}".format),
        compared=True,
    ),
    MetricSpec(
        "rollout_corr/weight_std", "standard deviation of the importance weights", "std(w)", compared=True
    ),
    MetricSpec(
        "rollout_corr/weight_max",
        "largest importance weight; stays at the upper bound if truncated",
        "max(w)",
        compared=True,
    ),
    MetricSpec("rollout_corr/weight_min", "smallest importance weight", "min(w)"),
    MetricSpec(
        "rollout_corr/weight_out_of_bounds",
        "tokens whose weight the bounds changed (gamma has none)",
        "tokens with raw w outside its bounds / valid tokens",
    ),
    MetricSpec(
        "rollout_corr/ess",
        "effective sample size: share of the batch that carries the gradient; 1 is ideal",
        "1 / mean((w / mean(w))^2)",
        "ESS",
        UsualRange(
            "a few samples carry the gradient",
            "Lower the upper bound of the weights, or prefer token to sequence weights; check that samples "
            "are not several weight versions old.",
            low=0.3,
        ),
        column=Column(5, "{:.3f}".format),
        compared=True,
    ),
    MetricSpec(
        "rollout_corr/ess_sequences",
        "effective sample size of whole sequences' raw products, whatever weights are chosen (VCPO)",
        "(sum w)^2 / (n sum w^2) over sequences, w = exp(sum(D)), sum(D) clamped to +-340",
        compared=True,
    ),
)

REJECTION = in_group(
    "Rejection",
    MetricSpec(
        "rollout_corr/kept_fraction",
        "tokens that the rules keep: finite on both sides, and rejected by none",
        "kept tokens / tokens of the loss mask",
        "kept",
        column=Column(6, "{:.1%}".format),
        compared=True,
    ),
    MetricSpec(
        "rollout_corr/kept_sequence_fraction",
        "sequences left after rejection, of those with a finite log-prob",
        "kept sequences / sequences with valid tokens",
        "kept sequences",
        compared=True,
    ),
    MetricSpec(
        "rollout_corr/rejected_fraction/",
        "tokens that this rejection rule drops",
        "rejected tokens / valid tokens",
        only_with="a rejection rule",
        compared=True,
    ),
    MetricSpec(
        "rollout_corr/batch_filtered",
        "1 when the batch filter skipped the step",
        "KL(k3) > --rollout-batch-filter-kl",
        "filtered",
        UsualRange(
            "the train-infer KL of a whole step was above the filter's bound",
            "Single filtered steps are what the filter is for. If there are many, close the gap itself (see "
            "KL(k3)), or raise the bound.",
            low=0,
            high=0,
        ),
        only_with="--rollout-batch-filter-kl",
    ),
    MetricSpec(
        "rollout_corr/nonfinite_tokens",
        "tokens dropped because a log-probability was NaN or infinite",
        "count",
        "dropped",
        UsualRange(
            "log-probabilities came back NaN or infinite",
            "Look for overflow in the rollout server's logits (its dtype and quantisation), and for tokens "
            "that sampling could not have produced.",
            low=0,
            high=0,
        ),
        compared=True,
    ),
    MetricSpec(
        "rollout_corr/valid_tokens",
        "tokens in the loss mask with finite log-probabilities",
        "count",
        compared=True,
    ),
    MetricSpec("rollout_corr/padded_tokens", "positions outside the loss mask: prompts and padding", "count"),
    MetricSpec("rollout_corr/sequences", "sequences with at least one valid token", "count"),
)

QUADRANTS = {"good_above": (1, 1), "bad_below": (-1, -1), "good_below": (1, -1), "bad_above": (-1, 1)}
"""Name -> signs of A and D. The first two amplify the mismatch."""
_THAN = {1: ">", -1: "<"}
_QUADRANTS = tuple(
    (name, f"A {_THAN[a]} 0, D {_THAN[d]} 0", "away from" if a == d else "towards")
    for name, (a, d) in QUADRANTS.items()
)

DIRECTIONS = in_group(
    "Loss and gradient",
    *(
        MetricSpec(
            f"rollout_corr/quadrant/{name}",
            f"tokens that the update moves {where} the servers' policy, of {signs}",
            "kept tokens with these signs / kept tokens",
        )
        for name, signs, where in _QUADRANTS
    ),
    *(
        MetricSpec(
            f"rollout_corr/quadrant/{name}_mass",
            f"share of the gradient that moves tokens {where} the servers' policy, of {signs}",
            "sum of |c w A| of kept tokens with these signs / that of all kept",
            may_be_nan=True,  # without a gradient
        )
        for name, signs, where in _QUADRANTS
    ),
)

METRICS = TOKENS + SEQUENCES + WEIGHTS + REJECTION + DIRECTIONS
