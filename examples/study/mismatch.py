"""Where the two policies differ, in the study's runs: study_mismatch.png, from their metrics
and their samples.
"""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from arms import COLORS

from megatron_rl_corr.core.mismatch import BANDS, TURNS

INCHES, DPI = (13.0, 7.5), 100
SHOWN = ("none", "token_truncate", "twin")
"""The arms whose tokens are drawn one by one."""
POINTS = 6000
"""Tokens of a run that are drawn, at most."""
PLACES = 8
"""Equal parts of the longest response, for the mean by place."""
LOWEST = np.log((1e-5, 1e-9))
"""Log-probs at the left and at the lower edge."""
AGES = 10
"""Steps of a mean age."""
MEAN, TOKENS = "log_ratio_abs_mean", "tokens"
BY_PROBABILITY = tuple(f"by_prob/{band}" for band in BANDS)
BY_TURN = tuple(f"by_turn/{turn}" for turn in TURNS)


def updates_of(steps):
    """Steps that moved the weights: one whose groups all have equal rewards has no gradient."""
    return [step for step in steps if "grad_norm" in step]


def mean_by(parts_of, seeds):
    """The mean |D| of each part, over all its tokens in the steps that moved the weights; None
    where there is none.

    Args:
        parts_of: metrics of them, as by_prob/above_1e-1.
        seeds: {seed: (its steps' metrics, whether it ended as its gradient was not finite)}.
    """
    means = []
    for part in parts_of:
        prefix = f"rollout_corr/{part}"
        parts = [
            (step[f"{prefix}/{TOKENS}"], step[f"{prefix}/{MEAN}"])
            for steps, _ in seeds.values()
            for step in updates_of(steps)
            if step.get(f"{prefix}/{TOKENS}") and np.isfinite(step[f"{prefix}/{MEAN}"])
        ]
        tokens = sum(count for count, _ in parts)
        means.append(sum(count * mean for count, mean in parts) / tokens if tokens else None)
    return means


def read_tokens(folder):
    """(step, place in its response, log pi_rollout, log pi_train), each [T]: every sampled token
    of a run's files.

    What an environment returned was not sampled: its log-probs are NaN, and it is left out, as are tokens
    whose log-prob of the trainer is not finite.

    Args:
        folder: of --rollout-save-trajectories.
    """
    parts = [[np.zeros(0)] for _ in range(4)]
    for path in sorted(Path(folder).glob("step_*.parquet")):
        table = pq.read_table(path, columns=["rollout_logprobs", "train_logprobs"])
        rollout, train = (table[name].combine_chunks() for name in table.column_names)
        lengths = rollout.value_lengths().to_numpy()
        step = int(path.name.split("_")[1])
        found = (
            np.full(lengths.sum(), step),
            np.concatenate([np.arange(length) for length in lengths]),
            rollout.flatten().to_numpy(),
            train.flatten().to_numpy(),
        )
        for part, values in zip(parts, found, strict=True):
            part.append(values)
    whole = [np.concatenate(part) for part in parts]
    return [part[np.isfinite(whole[2]) & np.isfinite(whole[3])] for part in whole]


def mean_by_place(tokens, longest, updates):
    """The mean |D| in each of PLACES equal parts of the longest response; None where no token lies.

    Args:
        tokens: of `read_tokens`, one for each run.
        longest: tokens that a response may have.
        updates: the steps of each run that moved the weights.
    """
    moved = [np.isin(one[0], steps) for one, steps in zip(tokens, updates, strict=True)]
    place = np.concatenate([one[1][kept] for one, kept in zip(tokens, moved, strict=True)])
    size = np.concatenate([np.abs(one[3] - one[2])[kept] for one, kept in zip(tokens, moved, strict=True)])
    part = np.minimum(place * PLACES // longest, PLACES - 1)
    return [float(size[part == one].mean()) if (part == one).any() else None for one in range(PLACES)]


def drawn(tokens):
    """At most POINTS of the tokens, at random and always the same ones."""
    chosen = np.random.default_rng(0).permutation(len(tokens[0]))[:POINTS]
    return [one[np.sort(chosen)] for one in tokens]


def scatter(axes, tokens, title, steps):
    """pi_rollout against pi_train of each token, coloured by step; on the line the policies agree."""
    step, _, rollout, train = drawn(tokens)
    # What lies below the panel is drawn at its edge.
    rollout, train = np.exp(np.maximum(rollout, LOWEST[0])), np.exp(np.maximum(train, LOWEST[1]))
    shown = axes.scatter(rollout, train, c=step, s=3, alpha=0.6, vmin=1, vmax=steps, linewidths=0)
    axes.axline((1e-3, 1e-3), (1, 1), color="#D55E00", linewidth=0.8)
    left, lower = np.exp(LOWEST)
    axes.set(
        title=title,
        xlabel="pi_rollout",
        ylabel="pi_train",
        xscale="log",
        yscale="log",
        xlim=(left, 1.5),
        ylim=(lower, 1.5),
    )
    return shown


def lines(axes, names, means, title, xlabel):
    """A line an arm: its mean |D| in each part."""
    for arm, values in means.items():
        axes.plot(
            range(len(names)),
            [np.nan if value is None else value for value in values],
            marker="o",
            markersize=3,
            color=COLORS[arm],
            label=arm,
            linewidth=1.2,
        )
    axes.set(title=title, xlabel=xlabel, ylabel="mean |log pi_train - log pi_rollout|")
    if any(value for values in means.values() for value in values):
        axes.set_yscale("log")
    axes.set_xticks(range(len(names)), names, fontsize=8)
    _plain(axes)


def ages(axes, runs):
    """A line an arm: how old the weights were that sampled, mean over seeds of the last AGES steps."""
    for arm, seeds in runs.items():
        of = [[step.get("weight_lag_mean", np.nan) for step in steps] for steps, _ in seeds.values()]
        shortest = min(map(len, of))
        mean = np.mean([one[:shortest] for one in of], axis=0)
        if shortest >= AGES:
            smooth = np.convolve(mean, np.full(AGES, 1 / AGES), mode="valid")
            axes.plot(range(AGES, shortest + 1), smooth, color=COLORS[arm], linewidth=1.2)
    axes.set(title=f"Age of the samples, mean of {AGES} steps", xlabel="step", ylabel="versions")
    _plain(axes)


def _plain(axes):
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#DDDDDD")


def _shown(band):
    return band.replace("_to_", " to\n").replace("below_", "below\n").replace("above_", "above\n")


def write_mismatch(runs, folder_of, longest, path):
    """Draw study_mismatch.png; the numbers of its lines by arm, for study.json.

    Args:
        runs: {arm: {seed: (its steps' metrics, whether it ended as its gradient was not finite)}}.
        folder_of: (arm, seed) -> the folder of the run's samples.
        longest: tokens that a response may have.
        path: of the picture.
    """
    from matplotlib.figure import Figure

    tokens = {arm: [read_tokens(folder_of(arm, seed)) for seed in seeds] for arm, seeds in runs.items()}
    found = {}
    for arm, seeds in runs.items():
        updates = [[step["step"] for step in updates_of(steps)] for steps, _ in seeds.values()]
        found[arm] = {
            "by_prob": mean_by(BY_PROBABILITY, seeds),
            "by_place": mean_by_place(tokens[arm], longest, updates),
            "by_turn": mean_by(BY_TURN, seeds),
        }
    steps = max(len(of_seed) for seeds in runs.values() for of_seed, _ in seeds.values())
    by = {name: {arm: one[name] for arm, one in found.items()} for name in ("by_prob", "by_place", "by_turn")}
    has_turns = any(mean is not None for means in by["by_turn"].values() for mean in means)
    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    below = ("by_prob", "by_place", "by_age", *(["by_turn"] if has_turns else []))
    panels = figure.subplot_mosaic(
        [np.repeat(SHOWN, 4).tolist(), np.repeat(below, 12 // len(below)).tolist()]
    )
    shown = None
    for arm in SHOWN:
        if arm in runs:
            seed = next(iter(runs[arm]))
            shown = scatter(panels[arm], tokens[arm][0], f"{arm}, seed {seed}: sampled tokens", steps)
        else:
            panels[arm].set_title(f"{arm}: not run")
            panels[arm].axis("off")
    if shown is not None:
        figure.colorbar(shown, ax=[panels[arm] for arm in SHOWN], label="step", aspect=30)
    lines(
        panels["by_prob"],
        [_shown(band) for band in BANDS],
        by["by_prob"],
        "By the token's probability",
        "pi_rollout",
    )
    ends = [f"{-(-longest * (part + 1) // PLACES)}" for part in range(PLACES)]
    lines(panels["by_place"], ends, by["by_place"], "By place in the response", "up to token")
    ages(panels["by_age"], runs)
    if has_turns:
        lines(panels["by_turn"], TURNS, by["by_turn"], "By turn", "")
    handles, labels = panels["by_prob"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path)
    return found
