"""What the study found: study.json, study.md and study.png, from the metrics of its finished runs."""

import json
import math

from arms import ARMS
from collapse import WINDOW, step_of_collapse

from megatron_rl_corr.files import write_atomically

INCHES, DPI = (13.0, 7.5), 100
PANELS = {
    "reward/mean": "Mean reward", "rollout_corr/k3_kl": "Train-infer KL (k3)", "rollout_corr/ess": "ESS over tokens",
    "grad_norm": "Gradient norm", "loss/entropy": "Entropy", "response_length/mean": "Tokens of a response",
}  # fmt: skip
LOGARITHMIC = ("rollout_corr/k3_kl", "grad_norm")
COLORS = dict(zip(ARMS, ("#000000", "#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#009E73", "#CC79A7", "#999999"),
                  strict=True))  # fmt: skip


def last_reward(steps):
    """The mean reward of the last WINDOW steps."""
    rewards = [step["reward/mean"] for step in steps[-WINDOW:]]
    return sum(rewards) / len(rewards)


def summary(runs):
    """What study.json has of each arm, by name.

    Args:
        runs: {arm: {seed: (its steps' metrics, whether it ended as its gradient was not finite)}}.
    """
    found = {}
    for arm, seeds in runs.items():
        rewards = {seed: last_reward(steps) for seed, (steps, _) in seeds.items()}
        collapses = {seed: step_of_collapse(steps, ended_nonfinite=ended) for seed, (steps, ended) in seeds.items()}
        found[arm] = {
            "last_reward": {"mean": sum(rewards.values()) / len(rewards), "lowest": min(rewards.values()),
                            "highest": max(rewards.values()), "by_seed": rewards},
            "step_of_collapse": collapses,
            "steps": {seed: len(steps) for seed, (steps, _) in seeds.items()},
            "seconds_a_step": seconds_a_step(seeds),
        }  # fmt: skip
    return found


def seconds_a_step(seeds):
    """The mean over all steps but each run's first, which warms up the engines, if it is not alone."""
    seconds = [step["time/step_s"] for steps, _ in seeds.values() for step in steps[min(1, len(steps) - 1) :]]
    return sum(seconds) / len(seconds)


def table(found, settings):
    """study.md: the settings, and a row an arm.

    Args:
        found: of `summary`.
        settings: of the study, by name.
    """
    given = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in settings.items())
    lines = [
        "# The study of mismatch", "", f"Settings: {given}.", "",
        f"Reward: the mean of a run's last {WINDOW} steps, then the mean over seeds (lowest to highest). Collapse: the "
        "step, by seed.", "",
        "| arm | what it does | reward | collapse | seconds a step |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for arm, one in found.items():
        reward = one["last_reward"]
        collapsed = ", ".join(f"seed {seed}: {step or 'none'}" for seed, step in one["step_of_collapse"].items())
        lines.append(
            f"| {arm} | {ARMS[arm].text} | {reward['mean']:.3f} ({reward['lowest']:.3f} to {reward['highest']:.3f}) | "
            f"{collapsed} | {one['seconds_a_step']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def over_seeds(seeds, name):
    """(steps, means, lowest, highest) of a metric: at each step over the seeds that have a finite number there."""
    at = {}
    for steps, _ in seeds.values():
        for step in steps:
            if math.isfinite(step.get(name, math.nan)):
                at.setdefault(step["step"], []).append(step[name])
    found = [at[step] for step in sorted(at)]
    means = [sum(values) / len(values) for values in found]
    return sorted(at), means, list(map(min, found)), list(map(max, found))


def draw(runs, path):
    """study.png: a panel a metric, in each the mean of every arm and the band from its lowest to its highest seed."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    for axes, (name, title) in zip(figure.subplots(2, 3).flat, PANELS.items(), strict=True):
        for arm, seeds in runs.items():
            steps, means, lowest, highest = over_seeds(seeds, name)
            axes.plot(steps, means, color=COLORS[arm], label=arm, linewidth=1.2)
            axes.fill_between(steps, lowest, highest, color=COLORS[arm], alpha=0.15, linewidth=0)
        axes.set(title=title, xlabel="step")
        if name in LOGARITHMIC:
            axes.set_yscale("log")
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)
    figure.savefig(path)


def write_report(runs, settings, out):
    """Write study.json, study.md and study.png into the folder; the text of study.md."""
    found = summary(runs)
    text = table(found, settings)
    write_atomically(out / "study.json", json.dumps({"settings": settings, "arms": found}, indent=1).encode())
    write_atomically(out / "study.md", text.encode())
    draw(runs, out / "study.png")
    return text
