"""The calculator under the launcher, as its page says: turns from real SGLang to the correction
in real Megatron.
"""

import json
import re
import shlex
from pathlib import Path

import pytest

from megatron_rl_corr.rollout.sample_file import read_trajectories
from tests.preloaded import run_preloaded

ROOT = Path(__file__).resolve().parents[2]
FORKED = ROOT / "tests/examples/forked_quickstart.py"
README = ROOT / "examples/tool_use/README.md"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of three steps of the page's command, with a float32 server and the samples kept."""
    [command] = re.findall(
        r"^    \.venv/bin/python (.*)$", README.read_text().replace("\\\n", " "), re.MULTILINE
    )
    words = shlex.split(command)
    flags = words[words.index("--") + 1 :]
    assert words[0] == "examples/quickstart/run.py"
    out = tmp_path_factory.mktemp("tool_use") / "run"
    done = run_preloaded(
        [
            FORKED,
            "--steps",
            3,
            "--server-dtype",
            "float32",
            "--out",
            out,
            "--",
            *flags,
            "--rollout-save-trajectories",
            out / "samples",
        ],
        cwd=ROOT,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return out


def test_tool_use_when_trained_then_later_turns_are_corrected_and_what_was_said_is_not(run):
    samples = {
        step: list(read_trajectories(run / f"samples/step_{step:06d}_replica0.parquet")) for step in (1, 2, 3)
    }
    steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [step["step"] for step in steps] == [1, 2, 3]
    for metrics in steps:
        rows = [sample.trajectory for sample in samples[metrics["step"]]]
        first = sum(int((row.turn_ids == 0).sum()) for row in rows)
        later = sum(int((row.turn_ids > 0).sum()) for row in rows)
        assert later > 0 and any((row.turn_ids == -1).any() for row in rows)
        assert metrics["rollout_corr/by_turn/first/tokens"] == first
        assert metrics["rollout_corr/by_turn/later/tokens"] == later
        assert metrics["rollout_corr/valid_tokens"] == first + later
        assert metrics["rollout_corr/nonfinite_tokens"] == 0
        rewards = [row.environment_reward for row in rows]
        assert metrics["reward/mean"] == pytest.approx(sum(rewards) / len(rewards), rel=1e-5)


def test_tool_use_when_server_and_trainer_are_float32_then_every_turn_has_the_trainers_log_probs(run):
    apart = []
    for path in sorted((run / "samples").iterdir()):
        for sample in read_trajectories(path):
            sampled = sample.trajectory.sampled
            assert not (sample.loss_mask & ~sampled).any()
            difference = (sample.train_logprobs - sample.trajectory.rollout_logprobs)[sampled].abs()
            apart += [difference.max().item()] if difference.max() > 1e-4 else []
    # One sample in ten thousand has a router so near a tie that each engine takes another expert; a
    # fault moves all.
    assert len(apart) <= 1, apart
