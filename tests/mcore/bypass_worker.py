"""Two policies on one rank: saves the loss and its gradient in the logits for test_bypass.py;
bypass_worker.py FILE.
"""

import math
import sys
from dataclasses import replace

import torch

from megatron_rl_corr.config.correction import RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.mcore.batch.packs import Packs
from megatron_rl_corr.mcore.batch.rollout_batch import RolloutBatch
from megatron_rl_corr.mcore.forward import LogprobSettings
from megatron_rl_corr.mcore.loss import CorrectedLoss, LossScale, make_unscored_loss_inputs
from megatron_rl_corr.reduce.collectives import ParallelGroups, merge
from tests.mcore.layout_cases import OWN

CONFIGS = {
    "ppo_clip": RolloutCorrectionConfig(
        bypass_mode=True, rollout_rs=(RejectionRule("seq_mean", "ratio", 0.5, 2.0),), advantage="raw"
    ),
    "reinforce": RolloutCorrectionConfig(
        bypass_mode=True,
        loss="reinforce",
        rollout_is="token",
        rollout_is_upper=1.5,
        advantage="raw",
        rollout_rs=(
            RejectionRule("seq_mean", "ratio", 0.5, 2.0),
            RejectionRule("seq_mean", "opsm", upper=0.1),
        ),
    ),
    "turns": RolloutCorrectionConfig(
        bypass_mode=True,
        loss="reinforce",
        rollout_is="turn",
        rollout_is_upper=1.2,
        advantage="raw",
        rollout_rs=(RejectionRule("turn_mean", "ratio", 0.8, 1.25),),
    ),
    "vespo": RolloutCorrectionConfig(
        bypass_mode=True,
        loss="reinforce",
        rollout_is="sequence",
        rollout_is_mode="gamma",
        advantage="raw",
    ),
    "vaco": RolloutCorrectionConfig(
        bypass_mode=True,
        loss="reinforce",
        advantage="raw",
        rollout_rs=(RejectionRule("seq_mean", "vaco", upper=0.3),),
    ),
    "dro": RolloutCorrectionConfig(bypass_mode=True, loss="dro", dro_beta=0.2, advantage="raw"),
    "dro without rewards": RolloutCorrectionConfig(
        bypass_mode=True, loss="dro", dro_beta=0.2, advantage="raw"
    ),
    "own": RolloutCorrectionConfig(bypass_mode=True, loss=f"{OWN}:distance", advantage="raw"),
    "gate": RolloutCorrectionConfig(bypass_mode=True, loss=f"{OWN}:soft_gate", advantage="raw"),
    "centered": RolloutCorrectionConfig(
        bypass_mode=True,
        loss="reinforce",
        advantage="raw",
        rollout_is="token",
        rollout_is_mode="mask",
        rollout_is_lower=50.0,
        rollout_is_upper=100.0,
    ),
}


def main(path: str) -> None:
    generator = torch.Generator().manual_seed(3)
    rows, length, vocab = 4, 6, 7
    logits = torch.randn(rows, length, vocab, generator=generator)
    labels = torch.randint(0, vocab, (rows, length), generator=generator)
    now = torch.log_softmax(logits.double(), -1).gather(2, labels[..., None])[..., 0].float()
    rollout = now + 0.3 * torch.randn(rows, length, generator=generator)
    rollout[1] -= 2.0  # row 1's mean ratio is far above 2
    rollout[2] += 0.5  # row 2's mean of -D is above 0.1, and its advantage negative
    mask = torch.rand(rows, length, generator=generator) < 0.7
    mask[:, 0] = True
    rollout[0, 0] = float("nan")
    batch = replace(
        RolloutBatch.empty([length] * rows, length),
        tokens=labels.view(-1),
        labels=labels.view(-1),
        loss_mask=mask.view(-1),
        rollout_logprobs=rollout.view(-1),
        rewards=torch.tensor([1.0, 2.0, -1.0, 0.5]),
        group_ids=torch.tensor([0, 0, 1, 1]),
    )
    turn_ids = (torch.arange(length) // 2).expand(rows, length).contiguous()
    saved = {
        "turn_ids": turn_ids,
        "logits": logits,
        "labels": labels,
        "rollout": rollout,
        "mask": mask,
        "rewards": batch.rewards,
    }
    for name, config in CONFIGS.items():
        groups = ParallelGroups()
        rows_of = replace(batch, turn_ids=turn_ids.view(-1), num_turns=3) if name == "turns" else batch
        if config.loss.startswith(str(OWN)) or name.endswith("without rewards"):
            rows_of = replace(batch, rewards=torch.zeros(rows))
        if name == "centered":
            # Ids that the server found 70 times less likely: of all ratios theirs alone are in bounds.
            of_ids = torch.log_softmax(logits.view(-1, vocab), -1)[:, :2] - math.log(70)
            ids = torch.tensor([0, 1], dtype=torch.int32).expand(rows * length, 2).contiguous()
            rows_of = replace(batch, top_ids=ids, top_logprobs=of_ids)
        targets = make_unscored_loss_inputs(rows_of, config, groups, group_size=2)
        scale = LossScale(num_microbatches=2, dp_size=1, per_token=False, global_positions=rows * length)
        loss = CorrectedLoss(config, LogprobSettings(None, 1.0, vocab), scale, scored=False, groups=groups)
        leaf = logits.clone().requires_grad_()
        parts = [
            loss(micro, leaf[2 * i : 2 * i + 2])[0]
            for i, micro in enumerate(Packs.of_rows(rows_of, 2, length).microbatches(targets))
        ]
        total = sum(parts) / 2  # the schedule divides by the number of microbatches
        total.backward()
        made = merge(loss.metrics.values())
        numbers = {key.removeprefix("rollout_corr/"): metric.value() for key, metric in made.items()}
        saved[name] = {
            "loss": total.detach(),
            "grad": leaf.grad,
            **numbers,
            "entropy": numbers["loss/entropy"],
        }
    torch.save(saved, path)


if __name__ == "__main__":
    main(sys.argv[1])
