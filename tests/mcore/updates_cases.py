"""The batch of test_updates.py: how its updates are made, and which samples each takes."""

import numpy as np

PARTS, EPOCHS, SEED, BATCH = 2, 2, 7, 3
"""Updates of an epoch, epochs, and what the order of the samples is drawn from."""
RATE = 0.2
CLIP = {
    "ppo_clip": (0.02, 0.03),
    "gspo": (0.01, 0.008),
    "cispo": (0.02, 0.03),
    "dppo_tv": (4e-4, 3e-4),
    "dppo_kl": (3e-6, 2e-6),
}
SOFT = {"sapo": {"sapo_temperature_pos": 8.0, "sapo_temperature_neg": 12.0}, "dro": {"dro_beta": 2.0}}
"""Losses without a clip, whose settings are far from the defaults so that what they do is seen
in a few updates.
"""
BY_SAMPLE = ("gspo", "sapo")
"""Losses that are means over samples of the mean over their tokens."""
WEIGHT = 1.05
"""Upper bound of a token's weight, or for gspo of a sequence's."""
REJECTING = {"ppo_clip rejected": "valid", "ppo_clip kept": "kept", "gspo kept": "kept"}
"""Cases with a rule, which leaves 11 of the 16 samples: what their losses are divided by."""
PACKED_RATE, BYPASS_KEPT = 0.05, (0.85, 1.18)
"""Of packed_updates_worker.py: the learning rate, and the rule of the case without a pass for pi_old.
With a larger rate the clip leaves the gradients of few tokens, which cancel, and rounding is a larger
share of what is left.
"""
KEPT = (0.95, 1.03)
"""The rule: bounds of the mean ratio pi_old / pi_rollout of a sample's tokens, on a logarithmic scale."""


BYPASS, TRUNCATED, WHOLE = "ppo_clip bypass", "ppo_clip truncated", "ppo_clip whole"
"""Cases of two policies; of samples whose tokens were each drawn from a few ids; of epochs of
one update each.
"""
OTB = "ppo_clip otb"
"""Its tokens have an advantage each."""
SAT, SAT_TAIL = "ppo_clip sat", 0.2
"""Its clip is narrower for tokens of |D| above a fifth of the batch's mean, which are most."""


def parts_of(case):
    """Updates of an epoch."""
    return 1 if case == WHOLE else PARTS


def sample_part(update, replicas, parts=PARTS):
    """The samples of an update: of each replica's share, in an order of its own, a half, or all."""
    epoch, part = divmod(update, parts)
    if parts == 1:
        return list(range(16))
    share = 16 // replicas
    chosen = []
    for replica in range(replicas):
        order = np.random.default_rng([SEED, BATCH, epoch, replica]).permutation(share)
        chosen += (replica * share + order[part * share // PARTS : (part + 1) * share // PARTS]).tolist()
    return chosen


def near(samples):
    """The samples, sampled by a policy near the one that is trained first."""
    return [s | {"rollout": s["rollout"] - s["old_shift"]} for s in samples]
