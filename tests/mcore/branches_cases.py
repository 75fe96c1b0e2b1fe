"""The batch of test_branches.py: which of its sequences are of one episode, and how it is trained."""

BRANCHES = ((5, 1, 1, 1), (1, 2, 1, 1), (1, 1, 3, 1), (1, 1, 1, 2))
"""Sequences of each episode, group by group: 24."""
OWN_REWARDS = (2, 2)
"""(group, sample) whose sequences have rewards of their own."""
SINGLE = ((1, 1, 1, 1),) * 6
"""Each sequence is a sample."""
REJECTED = {(1, 1, 0), (1, 1, 1), (0, 0, 3), (2, 2, 2), (3, 0, 0)}
"""(group, sample, branch) that the rule rejects: a whole episode of two, one of five branches, one of three
whose rewards differ, one alone.
"""
KEPT, WEIGHT, RATE = (0.8, 1.3), 1.05, 0.05
"""The rule's bounds of the mean ratio of a sequence's tokens; the largest weight; the learning rate."""
SEED, BATCH, SCALE_LENGTH = 7, 3, 11.0
CASES = {
    # loss_aggregation, loss_denominator, advantage, what means take as one
    "episodes": ("seq-mean-token-mean", "kept", "grpo", "episode"),
    "sequences": ("seq-mean-token-mean", "kept", "grpo", "sequence"),
    "sums": ("seq-mean-token-sum", "valid", "rloo", "episode"),
    "sums of sequences": ("seq-mean-token-sum", "valid", "rloo", "sequence"),
    "norm": ("seq-mean-token-sum-norm", "valid", "group_mean", "episode"),
    "tokens": ("token-mean", "kept", "reinforce_plus_plus_baseline", "episode"),
    "own": ("token-mean", "valid", "own", "episode"),
    "unscored": ("seq-mean-token-mean", "valid", "grpo", "episode"),
}
"""`unscored` makes one update without a pass for old log-probs, and has no rule; the others make two."""


def branched(samples, branches=BRANCHES):
    """The sequences with their episodes and rewards, sampled by a policy near the one that is trained."""
    made, left = [], iter(samples)
    for group, sizes in enumerate(branches):
        for number, size in enumerate(sizes):
            reward = 0.1 + (7 * group + 3 * number) % 10 / 10
            for branch in range(size):
                one = next(left)
                rollout = one["rollout"] - one["old_shift"]
                if (group, number, branch) in REJECTED:
                    rollout = rollout + 0.7
                own = 0.3 * branch if (group, number) == OWN_REWARDS else 0.0
                made.append(
                    {name: one[name] for name in ("prompt", "output", "routes")}
                    | {"rollout": rollout, "group": group, "sample": number, "branch": branch}
                    | {"reward": float(f"{reward + own:.6g}")}
                )
    assert next(left, None) is None
    return made


def labels_of(sample):
    """What tells the sequence from others: its labels."""
    return tuple([*sample["prompt"].tolist(), *sample["output"].tolist()][1:])
