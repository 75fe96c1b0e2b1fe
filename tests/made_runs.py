"""A made run with known numbers for the report's tests."""

import json
from pathlib import Path

import pytest

from megatron_rl_corr.commands.report import page
from megatron_rl_corr.commands.report.plots import write_overview
from megatron_rl_corr.observability.metrics_file import FILE_NAME, MetricsFile

_DRAWN: dict = {}

HEALTHY = {
    "step": 7,
    "reward/mean": 0.53125,
    "reward/std": 0.25,
    "reward/max": 1.0,
    "reward/min": 0.0,
    "rollout_corr/kl": 1.1e-3,
    "rollout_corr/k3_kl": 1.234e-3,
    "rollout_corr/log_ratio_abs_max": 2.5,
    "rollout_corr/log_ratio_abs_mean": 0.0125,
    "rollout_corr/valid_tokens": 1000,
    "rollout_corr/log_ratio_abs_p50": 0.01,
    "rollout_corr/log_ratio_abs_p99": 0.5,
    "rollout_corr/log_ratio_abs_p999": 0.5,
    "rollout_corr/weight_mean": 1.0024,
    "rollout_corr/weight_std": 0.05,
    "rollout_corr/weight_max": 2.0,
    "rollout_corr/weight_min": 0.125,
    "rollout_corr/ess": 0.9126,
    "rollout_corr/kept_fraction": 0.9984,
    "rollout_corr/kept_sequence_fraction": 1.0,
    "rollout_corr/nonfinite_tokens": 0,
    "rollout_corr/chi2_token": 0.004,
    "rollout_corr/training_ppl": 1.31,
    "rollout_corr/rollout_ppl": 1.3,
    "rollout_corr/pearson": 0.999,
    "loss/policy": -0.0125,
    "loss/clip_fraction": 0.002,
    "loss/entropy": 0.5,
    "grad_norm": 0.43219,
    "response_length/mean": 412.5,
    "tokens_per_s": 12345.6,
    "time/collect_s": 8.0,
    "time/score_s": 2.0,
    "time/train_s": 6.0,
    "time/push_s": 1.0,
    "time/step_s": 17.5,
    "rollout/probe_max_abs_log_ratio": 2e-6,
    "rollout/probe_mean_abs_log_ratio": 4e-7,
    "weight_version": 7,
    "weight_lag": 1,
    "skipped": 0,
    "weight_lag_token_mean": 0.75,
    "rollout/groups_running": 8,
    "rollout/groups_ready": 1,
    "rollout/groups_dropped": 0,
}

# Half of a thousand tokens are at most 0.01, 499 between 0.2 and 0.5, one between 0.5 and ln 2.
SHARES = {"upto_0.01": 0.5, "upto_0.5": 0.499, "upto_0.693": 0.001}
DECADES = [f"{digit}e{power}" for power in range(-6, 2) for digit in (1, 2, 5)]
LABELS = sorted(
    {f"upto_{float(end):.3g}" for end in [*DECADES, "100", "0.693"]}, key=lambda label: float(label[5:])
)
BINS = {f"rollout_corr/log_ratio_abs_bin/{label}": SHARES.get(label, 0.0) for label in [*LABELS, "above_100"]}
HEALTHY |= BINS


@pytest.fixture
def figures_drawn_once(monkeypatch):
    """Pages of the same steps share their figures, which take seconds: for tests that look at
    what is beside them.
    """

    def overview(rows, path, *, title):
        key = (json.dumps(rows), title)
        if key not in _DRAWN:
            write_overview(rows, path, title=title)
            _DRAWN[key] = path.read_bytes()
        path.write_bytes(_DRAWN[key])

    def figures(rows):
        key = json.dumps(rows)
        if key not in _DRAWN:
            _DRAWN[key] = draw(rows)
        return _DRAWN[key]

    draw = page._figures
    monkeypatch.setattr(page, "write_overview", overview)
    monkeypatch.setattr(page, "_figures", figures)


@pytest.fixture
def healthy() -> dict:
    """The metrics of one step with every metric in its usual range."""
    return dict(HEALTHY)


@pytest.fixture
def make_steps():
    """make_steps(n, **changes): n healthy steps from step 1 on, the reward rising by 1/8 a step."""

    def make(count: int, **changes) -> list[dict]:
        return [HEALTHY | {"step": step, "reward/mean": step / 8} | changes for step in range(1, count + 1)]

    return make


@pytest.fixture
def write_run(tmp_path):
    """write_run(rows, config=None): a run's folder with these steps, and a run.json if there is a config."""

    def write(rows: list[dict], config: dict | None = None) -> Path:
        folder = tmp_path / "my-run"
        file = MetricsFile(folder / FILE_NAME)
        for row in rows:
            file.write(row)
        if config is not None:
            (folder / "run.json").write_text(json.dumps(config))
        return folder

    return write
