"""Ranks over gloo: whole corrections, losses and gradients of every family, sharded; and the
collectives they take.

python correction_worker.py FOLDER LAYOUT writes FOLDER/<rank>.pt. LAYOUT is cp2 (two ranks)
or cp2_dp2 (four).
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # what a backward pass imports: once, before the forks
import torch.distributed as dist
import torch.multiprocessing as mp

from benchmarks.exchanges import ExchangeCount
from megatron_rl_corr.config.correction import PRESETS, RejectionRule, RolloutCorrectionConfig
from megatron_rl_corr.config.losses import AGGREGATIONS
from megatron_rl_corr.core.aggregation import token_coefficients
from megatron_rl_corr.core.correction import compute_correction
from megatron_rl_corr.core.losses import policy_loss
from megatron_rl_corr.reduce.collectives import ParallelGroups, all_reduce_metrics, merge

NAN = float("nan")
LAYOUTS = {"cp2": (2, 1), "cp2_dp2": (2, 2)}
"""Context- and data-parallel sizes."""
TURNS = 4
LENGTHS = [16, 4, 0, 12, 8, 4, 20, 8]
"""Of the sequences of the global batch, packed into rows of several; each replica has four
of them, or all.
"""

TURN_RULE = RejectionRule("turn_mean", "ratio", 0.7, 1.5)
RULES = (
    RejectionRule("token", "ratio", 0.2, 5.0),
    RejectionRule("seq_mean", "ratio", 0.55, 1.8),
    RejectionRule("seq_max", "k2", upper=3.0),
)
WEIGHTS = {"rollout_is_mode": "clip", "rollout_is_lower": 0.5, "rollout_is_upper": 2.0}
CONFIGS: dict[str, RolloutCorrectionConfig] = {
    "m2po": RolloutCorrectionConfig(rollout_m2_threshold=0.3, rollout_is="token", rollout_is_upper=2.0),
    "sat": RolloutCorrectionConfig(clip_sat_tail=0.5, rollout_rs=RULES),
    "sat, m2po, batch filter, normalised": RolloutCorrectionConfig(
        clip_sat_tail=1.0,
        rollout_m2_threshold=0.3,
        rollout_batch_filter_kl=1e9,
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        **WEIGHTS,
    ),
    "m2po, kept lengths": RolloutCorrectionConfig(
        rollout_m2_threshold=0.3, loss="grpo", loss_denominator="kept", rollout_rs=RULES
    ),
    "gspo": RolloutCorrectionConfig(loss="gspo", rollout_is="geometric", **WEIGHTS),
    "gspo, rejecting": RolloutCorrectionConfig(loss="gspo", rollout_rs=RULES, loss_denominator="kept"),
    "turn weights": RolloutCorrectionConfig(rollout_is="turn", **WEIGHTS, loss="grpo"),
    "turn rules": RolloutCorrectionConfig(
        rollout_rs=(TURN_RULE, RejectionRule("turn_mean", "k3", upper=0.35), *RULES),
        loss="grpo",
        loss_denominator="kept",
        rollout_is="turn",
        rollout_is_batch_normalize=True,
        **WEIGHTS,
    ),
    "normalised turn weights, sequence rules": RolloutCorrectionConfig(
        rollout_rs=RULES,
        rollout_is="turn",
        rollout_is_batch_normalize=True,
        **WEIGHTS,
    ),
    "normalised sequence weights, turn rules": RolloutCorrectionConfig(
        rollout_rs=(TURN_RULE,),
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        **WEIGHTS,
    ),
    "opsm and veto": RolloutCorrectionConfig(
        rollout_rs=(
            RejectionRule("seq_mean", "opsm", upper=0.05),
            RejectionRule("seq_max", "ratio", 0.05, 20.0),
        )
    ),
    "vaco with other rules, kept": RolloutCorrectionConfig(
        rollout_rs=(RejectionRule("seq_mean", "vaco", upper=0.4), TURN_RULE, *RULES),
        loss="dppo_kl",
        loss_aggregation="seq-mean-token-mean",
        loss_denominator="kept",
    ),
    "vaco, kept": RolloutCorrectionConfig(
        rollout_rs=(RejectionRule("seq_mean", "vaco", upper=0.4),),
        loss="sapo",
        loss_denominator="kept",
    ),
    "gamma weights": RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_mode="gamma",
        loss="dro",
        dro_beta=0.3,
    ),
    "gamma weights, turn rules": RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_mode="gamma",
        rollout_rs=(TURN_RULE,),
        loss="sapo",
        loss_denominator="kept",
    ),
    "everything rejected": RolloutCorrectionConfig(
        rollout_is="sequence",
        rollout_is_batch_normalize=True,
        **WEIGHTS,
        loss="grpo",
        loss_denominator="kept",
        rollout_rs=(
            RejectionRule("token", "ratio", 0.999, 1.001),
            RejectionRule("seq_sum", "k3", upper=1e-9),
        ),
    ),
    **{
        f"{kind} over {denominator}": RolloutCorrectionConfig(
            loss_aggregation=kind,
            loss_denominator=denominator,
            rollout_rs=RULES,
            rollout_is="sequence",
            **WEIGHTS,
            loss_scale_length=20 if kind.endswith("norm") else None,
        )
        for kind in AGGREGATIONS
        for denominator in ("valid", "kept")
    },
    **{f"preset {name}": config for name, config in PRESETS.items() if not config.bypass_mode},
}


def global_batch() -> dict[str, torch.Tensor]:
    """Holes, a NaN, outliers beyond 20, and a sequence whose first quarter lies outside every token rule."""
    generator = torch.Generator().manual_seed(11)
    total = sum(LENGTHS)
    train = -torch.rand(total, generator=generator) * 3 - 0.01
    rollout = torch.minimum(train + torch.randn(total, generator=generator) * 0.5, torch.tensor(-1e-3))
    mask = torch.rand(total, generator=generator) < 0.85
    rollout[5], train[-3] = NAN, -40.0
    seq_ids = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])
    rollout[(seq_ids == 6) & (positions < 5)] -= 4.0
    # nothing of it on the first zigzag rank
    mask[(seq_ids == 4) & ((positions < 2) | (positions >= 6))] = False
    train[~mask] = NAN
    turn_ids = (positions * 3 // 10) % TURNS  # turns straddle every cut, and come again
    now = train + 0.3 * torch.randn(total, generator=generator)
    advantages = torch.randn(len(LENGTHS), generator=generator)[seq_ids]
    return {
        "train": train,
        "rollout": rollout,
        "mask": mask,
        "seq_ids": seq_ids,
        "turn_ids": turn_ids,
        "now": now,
        "advantages": advantages,
        "token_lags": positions * 7 % 4,
    }


def my_positions(cut: str, layout: str, rank: int) -> torch.Tensor:
    """Positions in the global batch of this rank's tokens: sequences go to replicas, then
    each is cut over cp.
    """
    cp, dp = LAYOUTS[layout]
    dp_rank, cp_rank = divmod(rank, cp)
    seq_ids, parts, each = global_batch()["seq_ids"], [], len(LENGTHS) // dp
    for sequence in range(each * dp_rank, each * (dp_rank + 1)):
        positions = (seq_ids == sequence).nonzero()[:, 0]
        if cut == "zigzag":
            chunks = positions.tensor_split(2 * cp)
            parts += [chunks[cp_rank], chunks[2 * cp - 1 - cp_rank]]
        elif cut == "contiguous":
            parts.append(positions.tensor_split(cp)[cp_rank])
        else:  # whole rows of packed sequences are cut: some sequences lie on one rank only
            parts.append(positions)
    mine = torch.cat(parts)
    return mine.tensor_split(cp)[cp_rank] if cut == "packed row" else mine


def run(
    config: RolloutCorrectionConfig,
    mine: torch.Tensor,
    first: int,
    sequences: int,
    groups: ParallelGroups | None,
) -> dict:
    """Correction, coefficients, loss and its gradient of some tokens; the collectives of
    the step by group.
    """
    batch = {name: values[mine] for name, values in global_batch().items()}
    seq_ids = batch["seq_ids"] - first
    names = {} if groups is None else {groups.cp.group_name: "cp", groups.dp_cp.group_name: "dp_cp"}
    with ExchangeCount(names) as collectives:
        made = compute_correction(
            batch["train"],
            batch["rollout"],
            batch["mask"],
            seq_ids,
            num_sequences=sequences,
            config=config,
            groups=groups,
            turn_ids=batch["turn_ids"],
            num_turns=TURNS,
            advantages=batch["advantages"],
            token_lags=batch["token_lags"],
        )
        coefficients = token_coefficients(made, seq_ids, config)
    now, metrics = batch["now"].clone().requires_grad_(), {}
    with ExchangeCount(names) as in_loss:
        losses = policy_loss(
            config.loss,
            now,
            batch["train"],
            batch["advantages"],
            made,
            config,
            seq_ids=seq_ids,
            num_sequences=sequences,
            groups=groups,
            metrics=metrics,
        )
        (losses * coefficients).sum().backward()
    everything = made.metrics | {f"loss/{name}": metric for name, metric in merge([metrics]).items()}
    with ExchangeCount(names) as reporting:
        numbers = all_reduce_metrics(everything, None if groups is None else groups.dp_cp)
    return {
        "positions": mine,
        "weights": made.weights,
        "mask": made.mask,
        "valid": made.valid,
        "kept_sequences": made.kept_sequences,
        "valid_tokens": made.valid_tokens.item(),
        "kept_tokens": made.kept_tokens.item(),
        "coefficients": coefficients,
        "losses": losses.detach(),
        "gradient": now.grad,
        "metrics": numbers,
        "lengths": made.lengths.tokens,
        "sequences": made.lengths.sequences.item(),
        "collectives": collectives.by_group,
        "in_loss": in_loss.by_group,
        "reporting": reporting.by_group,
    }


def main(rank: int, folder: str, layout: str) -> None:
    torch.set_num_threads(1)
    cp, dp = LAYOUTS[layout]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=cp * dp,
        timeout=timedelta(seconds=120),
    )
    replicas = [dist.new_group(list(range(first, first + cp))) for first in range(0, cp * dp, cp)]
    # A group of its own for each: the collectives are told apart by it.
    groups = ParallelGroups(cp=replicas[rank // cp], dp_cp=dist.new_group(list(range(cp * dp))))
    each = len(LENGTHS) // dp
    results = {
        (cut, name): run(config, my_positions(cut, layout, rank), each * (rank // cp), each, groups)
        for cut in ("zigzag", "contiguous", "packed row")
        for name, config in CONFIGS.items()
    }
    torch.save(results, Path(folder) / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # fork: torch is imported once for all ranks; this process has run nothing of it.
    size = LAYOUTS[sys.argv[2]]
    mp.start_processes(main, args=(sys.argv[1], sys.argv[2]), nprocs=size[0] * size[1], start_method="fork")
