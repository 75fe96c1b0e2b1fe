"""What the study found, from its finished runs: study.json, study.md, study.png and study_mismatch.png."""

import json
import math

from arms import ARMS, COLORS
from mismatch import updates_of, write_mismatch

from megatron_rl_corr.files import write_atomically
from megatron_rl_corr.observability.collapse import WINDOW, step_of_collapse, window_means

INCHES, DPI = (16.0, 7.5), 100
SHARE = "share that carries the gradient"
"""Not a metric of the run: see `carrying`."""
PANELS = {
    "reward/mean": "Mean reward",
    "rollout_corr/k3_kl": "Train-infer KL (k3)",
    SHARE: "ESS over tokens x share kept",
    "rollout_corr/ess_sequences": "ESS over responses",
    "grad_norm": "Gradient norm",
    "loss/entropy": "Entropy",
    "response_length/mean": "Tokens of a response",
}
LOGARITHMIC = ("rollout_corr/k3_kl", "grad_norm")
EARLY = 30
"""Steps in which every arm still learns: what is compared over them is not diluted by a
task that is solved.
"""


def last_reward(steps):
    """The mean reward of the last WINDOW steps."""
    return mean([step["reward/mean"] for step in steps[-WINDOW:]])


def mean(values):
    """The mean of those that are finite; None where none is, as of a run whose first
    gradient was not finite.
    """
    finite = [value for value in values if math.isfinite(value)]
    return sum(finite) / len(finite) if finite else None


def carrying(step):
    """The share of the tokens that carries the gradient: their ESS by weight, times the share
    that rules keep.

    0 where every weight is 0; None in a run without weights.

    Args:
        step: its metrics.
    """
    if "rollout_corr/weight_mean" not in step:
        return None
    if step["rollout_corr/weight_mean"] == 0:
        return 0.0
    return step.get("rollout_corr/ess", math.nan) * step["rollout_corr/kept_fraction"]


def deepest_fall(steps):
    """The lowest mean reward of WINDOW steps, as a share of the best such mean before it; 1
    where it never fell.
    """
    best, lowest = -math.inf, 1.0
    for mean in window_means([step["reward/mean"] for step in steps]):
        best = max(best, mean)
        if best > 0:
            lowest = min(lowest, mean / best)
    return lowest


def summary(runs):
    """What study.json has of each arm, by name.

    Args:
        runs: {arm: {seed: (its steps' metrics, whether it ended as its gradient was not finite)}}.
    """
    found = {}
    for arm, seeds in runs.items():
        rewards = {seed: last_reward(steps) for seed, (steps, _) in seeds.items()}
        known = [reward for reward in rewards.values() if reward is not None]
        found[arm] = {
            "last_reward": {
                "mean": mean(known),
                "lowest": min(known, default=None),
                "highest": max(known, default=None),
                "by_seed": rewards,
            },
            "step_of_collapse": {
                seed: step_of_collapse(steps, ended_nonfinite=ended) for seed, (steps, ended) in seeds.items()
            },
            "deepest_fall": {seed: deepest_fall(steps) for seed, (steps, _) in seeds.items()},
            "steps": {seed: len(steps) for seed, (steps, _) in seeds.items()},
            "updates": {seed: len(updates_of(steps)) for seed, (steps, _) in seeds.items()},
            "early_age": {
                seed: mean([step["weight_lag_mean"] for step in steps[:EARLY] if "weight_lag_mean" in step])
                for seed, (steps, _) in seeds.items()
            },
        }
    return found


def table(found, settings):
    """study.md: the settings, and a row an arm.

    Args:
        found: of `summary`.
        settings: of the study, by name.
    """
    given = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
    lines = [
        "# The study of mismatch",
        "",
        f"Settings: {given}.",
        "",
        f"Reward: the mean of a run's last {WINDOW} steps, then the mean over seeds (lowest to highest). By "
        f"seed: the deepest fall, of the mean of {WINDOW} steps, in percent of the best before; the step of "
        "the collapse; the steps that moved the weights; and the mean age of the samples over the first "
        f"{EARLY} steps, in versions.",
        "",
        "| arm | what it does | reward | deepest fall | collapse | updates | age |",
        "|---|---|---|---|---|---|---|",
    ]
    for arm, one in found.items():
        columns = (
            [f"{100 * (1 - share):.0f} %" for share in one["deepest_fall"].values()],
            [f"seed {seed}: {step or 'none'}" for seed, step in one["step_of_collapse"].items()],
            [f"{count} of {one['steps'][seed]}" for seed, count in one["updates"].items()],
            ["none" if age is None else f"{age:.1f}" for age in one["early_age"].values()],
        )
        cells = " | ".join(", ".join(column) for column in columns)
        lines.append(f"| {arm} | {ARMS[arm].text} | {_reward_text(one['last_reward'])} | {cells} |")
    return "\n".join(lines) + "\n"


def _reward_text(reward):
    """The mean over seeds and its extremes; of how many, where some have no step at all."""
    by_seed = list(reward["by_seed"].values())
    known = len(by_seed) - by_seed.count(None)
    if not known:
        return "none"
    text = f"{reward['mean']:.3f} ({reward['lowest']:.3f} to {reward['highest']:.3f})"
    return text if known == len(by_seed) else f"{text}, of {known} of {len(by_seed)} seeds"


def over_seeds(seeds, name):
    """(steps, means, lowest, highest) of a panel: at each step over the seeds that have a
    finite number there.
    """
    at = {}
    for steps, _ in seeds.values():
        for step in steps:
            value = carrying(step) if name == SHARE else step.get(name)
            if value is not None and math.isfinite(value):
                at.setdefault(step["step"], []).append(value)
    found = [at[step] for step in sorted(at)]
    means = [sum(values) / len(values) for values in found]
    return sorted(at), means, list(map(min, found)), list(map(max, found))


def draw(runs, path):
    """study.png: a panel a metric, in each the mean of every arm and the band from its lowest to
    its highest seed.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    *panels, unused = figure.subplots(2, 4).flat
    unused.axis("off")
    for axes, (name, title) in zip(panels, PANELS.items(), strict=True):
        positive = False
        for arm, seeds in runs.items():
            steps, means, lowest, highest = over_seeds(seeds, name)
            axes.plot(steps, means, color=COLORS[arm], label=arm, linewidth=1.2)
            positive = positive or any(value > 0 for value in means)
            for of_seed, ended in seeds.values():
                if ended and of_seed:  # the mean goes on without this seed
                    axes.axvline(len(of_seed) + 1, color=COLORS[arm], linewidth=0.8, linestyle=":")
            axes.fill_between(steps, lowest, highest, color=COLORS[arm], alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel="step")
        if name in LOGARITHMIC and positive:
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path)


def write_report(runs, settings, out, samples_of):
    """Write study.json, study.md, study.png and study_mismatch.png into the folder; the text of study.md.

    Args:
        samples_of: (arm, seed) -> the folder of the run's samples.
    """
    found = summary(runs)
    text = table(found, settings)
    where = write_mismatch(runs, samples_of, settings["response_length"], out / "study_mismatch.png")
    for arm, means in where.items():
        found[arm]["log_ratio_abs_mean"] = means
    content = json.dumps({"settings": settings, "arms": found}, indent=1, allow_nan=False)
    write_atomically(out / "study.json", content.encode())
    write_atomically(out / "study.md", text.encode())
    draw(runs, out / "study.png")
    return text
