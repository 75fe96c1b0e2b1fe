"""The cases of the layout matrix: what its worker configures, and what its metrics are expected by."""

from pathlib import Path

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig

OWN = Path(__file__).resolve().parent / "own_functions.py"
LENGTH = 24
"""--seq-length: a multiple of 2 * cp for cp 4, and of tp after that for cp 2."""

CONFIGS = {
    "token": RolloutCorrectionConfig(
        rollout_is="token",
        rollout_is_upper=1.02,
        rollout_is_batch_normalize=True,
        rollout_rs=(
            RejectionRule("seq_mean", "ratio", 0.98, 1.03),
            RejectionRule("token", "ratio", 0.9, 1.12),
        ),
    ),
    "sequence": RolloutCorrectionConfig(
        loss="gspo",
        clip_ratio_low=0.05,
        clip_ratio_high=0.08,
        loss_aggregation="seq-mean-token-mean",
        loss_denominator="kept",
        rollout_is="sequence",
        rollout_is_upper=1.05,
        rollout_rs=(RejectionRule("seq_max", "ratio", 0.8, 1.25),),
    ),
    "bypass": RolloutCorrectionConfig(
        bypass_mode=True,
        loss="reinforce",
        advantage="grpo",
        loss_aggregation="token-mean",
        rollout_is="token",
        rollout_is_upper=1.1,
        rollout_rs=(RejectionRule("seq_mean", "ratio", 0.8, 1.25),),
    ),
    # One update a batch, and nothing that needs it whole: the loss knows pi_old, and makes the correction.
    "once token": RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=1.02),
    "once sequence": RolloutCorrectionConfig(loss="gspo", rollout_is="sequence", rollout_is_upper=1.05),
    "once plus plus": RolloutCorrectionConfig(
        advantage="reinforce_plus_plus_baseline", rollout_is="token", rollout_is_upper=1.02
    ),
    "once otb": RolloutCorrectionConfig(
        advantage="otb",
        rollout_is="token",
        rollout_is_upper=1.02,
        rollout_rs=(RejectionRule("token", "ratio", 0.9, 1.12),),
    ),
    "once centered": RolloutCorrectionConfig(),
    "once centered token": RolloutCorrectionConfig(rollout_is="token", rollout_is_upper=1.02),
    "once own": RolloutCorrectionConfig(
        advantage=f"{OWN}:leave_best_out", loss=f"{OWN}:soft_gate", rollout_is="token", rollout_is_upper=1.02
    ),
}
