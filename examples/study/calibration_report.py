"""What the bounds that the project recommends do to each serving's numerics:
calibration.json, .md and .png.
"""

import dataclasses
import json
import math
from pathlib import Path

import torch

from megatron_rl_corr.commands.correct.compare import KeptBatch
from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.rules import RejectionRule
from megatron_rl_corr.files import write_atomically
from megatron_rl_corr.observability.alerts import is_alert
from megatron_rl_corr.rollout.sample_file import read_trajectories
from megatron_rl_corr.tables import readable

INCHES, DPI = (13.0, 4.2), 100
COLORS = ("#999999", "#000000", "#0072B2", "#E69F00", "#D55E00", "#009E73", "#CC79A7")
RULES = {
    "token_ratio in [0.5, 2]": RejectionRule("token", "ratio", 0.5, 2.0),
    "token_ratio in [0.5, 5], IcePop": RejectionRule("token", "ratio", 0.5, 5.0),
    "token_ratio in [0.8, 1.2], bypass_ppo_clip's clip": RejectionRule("token", "ratio", 0.8, 1.2),
    "token_abs_diff up to 0.15, dppo_tv around the servers' policy": RejectionRule(
        "token", "abs_diff", upper=0.15
    ),
    "token_binary_kl up to 0.05, dppo_binary_kl": RejectionRule("token", "binary_kl", upper=0.05),
    "seq_mean_vaco up to 0.04, vaco": RejectionRule("seq_mean", "vaco", upper=0.04),
    "seq_max_ratio from 1e-4 on, slime's veto": RejectionRule("seq_max", "ratio", lower=1e-4),
    "seq_max_binary_kl up to 0.05, trm": RejectionRule("seq_max", "binary_kl", upper=0.05),
    "seq_mean_exp_abs up to 1.5, NeMo-RL": RejectionRule("seq_mean", "exp_abs", upper=1.5),
    "seq_mean_k3 up to 0.01, decoupled_k3_rs": RejectionRule("seq_mean", "k3", upper=0.01),
    "seq_mean_ratio in [1/1.001, 1/0.999], decoupled_geo_rs": RejectionRule(
        "seq_mean", "ratio", 1 / 1.001, 1 / 0.999
    ),
    "seq_mean_ratio in [0.999, 1.002], nemo_rl_seq_mask_tis": RejectionRule(
        "seq_mean", "ratio", 0.999, 1.002
    ),
    "seq_mean_opsm up to 1e-4, slime_opsm": RejectionRule("seq_mean", "opsm", upper=1e-4),
    "seq_mean_ratio in [0.9, 1.1]": RejectionRule("seq_mean", "ratio", 0.9, 1.1),
    "seq_sum_ratio in [0.5, 2]": RejectionRule("seq_sum", "ratio", 0.5, 2.0),
}
"""Rules with the bounds of presets, and of the study. What asks for the advantage is told that
all are negative.
"""
MEASURED = {
    "k3": ("rollout_corr/k3_kl", {}),
    "KL(k1)": ("rollout_corr/kl", {}),
    "ESS over tokens, token weights": ("rollout_corr/ess", {"rollout_is": "token", "rollout_is_upper": 2.0}),
    "ESS over responses, their products": ("rollout_corr/ess_sequences", {}),
    "chi2 of tokens": ("rollout_corr/chi2_token", {}),
    "chi2 of responses' geometric means": ("rollout_corr/chi2_geo", {}),
}
"""Metrics by their label: the name, and the correction that has it."""


def numbers_of(batch):
    """{row: value} of one serving: how far tokens are apart, metrics, and the share that each of RULES keeps:
    of tokens where it drops tokens, else of responses.

    Args:
        batch: its KeptBatch.
    """
    size = (batch.train_logprobs - batch.rollout_logprobs)[batch.sampled].abs()
    total, mean, k3, apart, length = responses(batch)
    total, mean = total.abs(), mean.abs()
    whole = mean[length == length.max()]
    found = {
        "tokens": size.numel(),
        "responses": mean.numel(),
        "mean |D|": size.mean().item(),
        "mean D^2, which m2po keeps up to 0.04": size.double().square().mean().item(),
        "99 % of |D| are at most": quantile(size, 0.99),
        "largest |D|": size.max().item(),
        "longest responses": whole.numel(),
        "99 % of their |mean of D| are at most": quantile(whole, 0.99),
        "99 % of |sum of D| of a response are at most": quantile(total, 0.99),
        "largest |sum of D| of a response": total.max().item(),
        "largest mean |D| of a response": apart.max().item(),
        "largest mean k3 of a response": k3.max().item(),
    }
    for label, (name, fields) in MEASURED.items():
        found[label] = batch.metrics(RolloutCorrectionConfig(**fields)).get(name, math.nan)
    batch = dataclasses.replace(batch, advantages=torch.full_like(batch.train_logprobs, -1.0))
    for label, rule in RULES.items():
        of_tokens = rule.level == "token" or rule.row.drops is not None
        kept = "kept_fraction" if of_tokens else "kept_sequence_fraction"
        found[label] = batch.metrics(RolloutCorrectionConfig(rollout_rs=(rule,)))[f"rollout_corr/{kept}"]
    return found


def quantile(values, share):
    """The smallest of the values that at least this share of them does not exceed.

    Args:
        values: [T].
        share: above 0, at most 1.
    """
    return values.sort().values[math.ceil(share * values.numel()) - 1].item()


def table(found):
    """calibration.md: a row a number, a column a serving; `!` marks what would be an alert."""
    lines = ["| | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    for row in next(iter(found.values())):
        cells = []
        for numbers in found.values():
            value = numbers[row]
            if row in RULES:
                cells.append(f"{100 * value:.1f} %")
            else:
                metric = MEASURED.get(row, (None,))[0]
                cells.append(readable(value) + ("!" if metric and is_alert(metric, value) else ""))
        lines.append("| " + row.replace("|", "\\|") + " | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def responses(batch):
    """(sum of D, mean of D, mean k3, mean |D|, tokens) of each response that has a token: [S] each."""
    d = torch.where(batch.sampled, batch.train_logprobs - batch.rollout_logprobs, 0.0).double()
    columns = torch.stack([d, d.expm1() - d, d.abs(), batch.sampled.double()])
    total, k3, apart, count = (
        torch.zeros(4, batch.num_sequences).double().index_add_(1, batch.seq_ids, columns)
    )
    left = count > 0
    return total[left], (total / count)[left], (k3 / count)[left], (apart / count)[left], count[left]


def draw(batches, path):
    """calibration.png: for tokens and responses, the share whose distance is above what the axis says."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    tokens, means, sums = figure.subplots(1, 3)
    for color, (name, batch) in zip(COLORS, batches.items(), strict=True):
        d = (batch.train_logprobs - batch.rollout_logprobs)[batch.sampled]
        total, mean, *_ = responses(batch)
        for axes, values in ((tokens, d), (means, mean), (sums, total)):
            ordered = values.abs().sort(descending=True).values
            share = torch.arange(1, len(ordered) + 1) / len(ordered)
            axes.plot(ordered, share, color=color, label=name, linewidth=1.2)
    panels = {
        tokens: ("Tokens: |D|", {"ratio 2": math.log(2), "ratio 5": math.log(5)}),
        means: ("Responses: |mean of D|", {"1.001": math.log(1.001), "1.1": math.log(1.1)}),
        sums: ("Responses: |sum of D|", {"ratio 2": math.log(2)}),
    }
    for axes, (title, bounds) in panels.items():
        for text, place in bounds.items():
            axes.axvline(place, color="#BBBBBB", linewidth=0.8)
            axes.annotate(
                text,
                (place, 1.0),
                xycoords=("data", "axes fraction"),
                fontsize=8,
                rotation=90,
                ha="right",
                va="top",
                color="#666666",
            )
        axes.set(title=title, xscale="log", yscale="log", ylabel="share above", xlim=(1e-7, 30))
        axes.spines[["top", "right"]].set_visible(False)
    handles, labels = tokens.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path)


def write_calibration(folders, out):
    """Write calibration.json, calibration.md and calibration.png into the folder; the table.

    Args:
        folders: of --rollout-save-trajectories, by the serving's name.
        out: the folder.
    """
    batches = {name: read_batch(folder) for name, folder in folders.items()}
    found = {name: numbers_of(batch) for name, batch in batches.items()}
    text = table(found)
    write_atomically(out / "calibration.json", json.dumps(found, indent=1).encode())
    write_atomically(out / "calibration.md", text.encode())
    draw(batches, out / "calibration.png")
    return text


def read_batch(folder):
    """The samples of all files in the folder as one batch."""
    files = sorted(Path(folder).glob("step_*.parquet"))
    return KeptBatch.of([sample for path in files for sample in read_trajectories(path)])
