"""Two runs of the quickstart side by side: how fast they went and what they reached, as a
table and a picture.
"""

from pathlib import Path

from megatron_rl_corr.observability.metrics_file import FILE_NAME, read_metrics

INCHES, DPI = (11.0, 4.2), 100
LAST = 5
COLORS = ("#0072B2", "#D55E00")


class Run:
    """name: how it is called. The first batch warms up the engines and is left out of the speed, if
    it is not alone.
    """

    def __init__(self, name: str, folder: Path):
        self.name, self.steps = name, read_metrics(folder / FILE_NAME)
        self.seconds = [step["time/step_s"] for step in self.steps]
        # With several updates a batch, rewards and staleness are in the line of its first one.
        self.batches = [step for step in self.steps if "reward/mean" in step]
        self.rewards = [step["reward/mean"] for step in self.batches]
        self.speeds: list[tuple[int, float, float]] = []
        """Of each batch: its last step, its tokens per second, its seconds."""
        seconds = 0.0
        for step in self.steps:
            seconds += step["time/step_s"]
            if "tokens_per_s" in step:
                self.speeds.append((step["step"], step["tokens_per_s"], seconds))
                seconds = 0.0

    @property
    def tokens_per_s(self) -> float:
        counted = self.speeds[min(1, len(self.speeds) - 1) :]
        return sum(speed * seconds for _, speed, seconds in counted) / sum(seconds for *_, seconds in counted)

    @property
    def last_reward(self) -> float:
        return sum(self.rewards[-LAST:]) / len(self.rewards[-LAST:])

    @property
    def lag(self) -> float:
        return max(step["weight_lag"] for step in self.batches)

    def row(self) -> str:
        lag = sum(step["weight_lag_token_mean"] for step in self.batches) / len(self.batches)
        reached = f"{self.last_reward:>8.3f}{self.tokens_per_s:>11.0f}{sum(self.seconds):>9.0f}"
        return f"{self.name:14}{reached}{lag:>10.2f}{self.lag:>9.0f}"


def table(runs: list[Run]) -> str:
    """A row a run, and how much faster the last one is than the first."""
    head = f"{'':14}{'reward':>8}{'tokens/s':>11}{'seconds':>9}{'mean lag':>10}{'max lag':>9}"
    ratio = runs[-1].tokens_per_s / runs[0].tokens_per_s
    said = (
        f"{runs[-1].name} sampled and trained {ratio:.2f} times as many tokens per second as {runs[0].name}"
    )
    return "\n".join([head, *(run.row() for run in runs), said])


def draw(runs: list[Run], path: Path) -> Path:
    """Reward against the seconds of training, and tokens per second of each batch, as a PNG."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, dpi=DPI, layout="constrained")
    reward, speed = figure.subplots(1, 2)
    for run, color in zip(runs, COLORS, strict=True):
        ends = [sum(run.seconds[: at + 1]) for at, step in enumerate(run.steps) if step in run.batches]
        reward.plot(ends, run.rewards, color=color, label=run.name)
        steps, speeds, _ = zip(*run.speeds, strict=True)
        speed.plot(steps, speeds, color=color, label=run.name)
    reward.set(title="Mean reward", xlabel="seconds of training", ylim=(0, 1.02))
    speed.set(title="Tokens per second", xlabel="step")
    speed.set_ylim(bottom=0)
    for axes in (reward, speed):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", color="#DDDDDD")
        axes.legend(frameon=False)
    figure.savefig(path)
    return path
