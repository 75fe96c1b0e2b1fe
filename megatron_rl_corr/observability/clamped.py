"""Which means have a clamped variant beside them, and what it clamps: a few outliers must not be all one sees.

D = log pi_train - log pi_rollout of a sampled token.
"""

TOKEN, SEQUENCE = "D clamped to [-11.0, 2.61]", "clamped to +-2.61"
CLAMPS = {
    "rollout_corr/kl": TOKEN,
    "rollout_corr/k3_kl": TOKEN,
    "rollout_corr/jsd": TOKEN,
    "rollout_corr/chi2_token": TOKEN,
    "rollout_corr/log_ratio_abs_mean": "|D| at most 2.61",
    "rollout_corr/token_mult_prob_error": "|D| at most 2.61",
    "rollout_corr/chi2_geo": f"mean(D) {SEQUENCE}",
    "rollout_corr/chi2_seq": f"sum(D) {SEQUENCE}",
    "rollout_corr/ppl_ratio": f"mean(D) {SEQUENCE}",
    "rollout_corr/log_ppl_diff": f"mean(D) {SEQUENCE}",
    "rollout_corr/log_ppl_diff_abs": f"mean(D) {SEQUENCE}",
    "rollout_corr/training_ppl": "at most 100 a sequence",
    "rollout_corr/rollout_ppl": "at most 100 a sequence",
    "rollout_corr/training_log_ppl": "at most ln 100 a sequence",
    "rollout_corr/rollout_log_ppl": "at most ln 100 a sequence",
    "loss/old_new_k3_kl": "at most 10 a token",
}
"""By the name of the unclamped one; 2.61 is where k3 = e^D - 1 - D is 10, a ratio of 13.6."""


def clamped_text(name: str) -> str:
    """What the variant of this metric says."""
    return f"{name.split('/')[-1]} without outliers; where the two part, a few tokens make it"
