"""Runs of the trainer on agents' episodes, on two ranks, with a real server."""

from pathlib import Path

import pytest

from megatron_rl_corr.rollout.sample_file import read_batch, read_trajectories
from tests.matrix.patched import unchanged
from tests.mcore.launched import launch, untimed_steps, write_data
from tests.rollout.agents.model_folder import folder_with_template, write_rows
from tests.rollout.agents.test_harnesses import FILE

SCRIPT = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
RUN = ["--global-batch-size", 8, "--seq-length", 256, "--train-iters", 3, "--save-interval", 2]
AGENT = [
    *["--rollout-agent", f"{FILE}:run", "--rollout-agent-timeout-s", 120, "--rollout-input-key", "messages"],
    *["--rollout-probe-push", "off", "--rollout-max-failed-fraction", 1],
]
REPLAYED = ["--global-batch-size", 8, "--seq-length", 256, "--train-iters", 3, "--save-interval", 100]


@pytest.fixture(scope="module")
def runs(sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    """Name -> (the ended process, the run's folder)."""
    folder, found = tmp_path_factory.mktemp("agent_runs"), {}
    write_data(folder)
    model = folder_with_template(tiny_moe_dir, folder / "model")
    rows = [{"do": "crash" if n == 5 else "mixed", "question": f"{n}?"} for n in range(8)]
    write_rows(folder / "prompts.jsonl", *rows)
    with unchanged(sglang_server_fp32, tiny_moe_dir):
        for name, flags in {
            "whole": [*RUN, *AGENT, "--rollout-save-trajectories", folder / "samples"],
            "resumed": [*RUN, *AGENT, "--load", folder / "whole/checkpoints", "--ckpt-step", 2],
            "replayed": [*REPLAYED, "--rollout-replay", folder / "samples"],
        }.items():
            url = None if name == "replayed" else sglang_server_fp32.url
            found[name] = launch(folder, name, model, url, SCRIPT, *flags, processes=2), folder / name
            done = found[name][0]
            assert done.returncode == 0, done.stderr[-6000:] + done.stdout[-3000:]
    return found


def test_run_when_agents_give_its_samples_then_their_metrics_are_of_all_replicas(runs):
    _, folder = runs["whole"]
    steps = untimed_steps(folder)
    assert [step["step"] for step in steps] == [1, 2, 3] and all(step["grad_norm"] > 0 for step in steps)
    for step in steps:
        ended, failed = step["agent/episodes"], step["rollout/failed/agent"]
        assert ended >= 8 and failed <= ended
        # A row of two branches forks once, one of two turns never; crashed ones ask nothing.
        assert step["agent/forks_edited"] * 2 == pytest.approx(step["agent/overridden"])
        assert step["agent/branches"] * ended == pytest.approx(
            ended - failed + step["agent/forks_edited"], abs=4
        )
        assert step["agent/requests"] >= step["agent/turns"] > 0 and step["agent/harness_s"] > 0


def test_samples_when_saved_then_branches_of_an_episode_stand_together(runs):
    folder = runs["whole"][1].parent / "samples"
    files = sorted(folder.iterdir())
    assert len(files) == 6  # of two replicas
    branches = 0
    for path in files:
        assert read_batch(path).agent_branches == "episode" and read_batch(path).num_turns == 64
        samples = list(read_trajectories(path))
        episodes = {(one.trajectory.prompt_index, one.trajectory.sample_index) for one in samples}
        assert len(episodes) == 4
        branches += len(samples) - len(episodes)
        for one, before in zip(samples[1:], samples, strict=False):
            if one.trajectory.branch:
                assert one.trajectory.branch == before.trajectory.branch + 1
                assert one.reward == before.reward
    assert branches > 0


def test_run_when_resumed_then_the_prompts_go_on(runs):
    [step] = untimed_steps(runs["resumed"][1])
    assert step["step"] == 3 and step["agent/episodes"] >= 8


def test_replay_when_samples_are_of_agents_then_it_trains_as_they_did(runs):
    """At the first step, whose weights are the same."""
    first, again = (untimed_steps(runs[name][1])[0] for name in ("whole", "replayed"))
    assert not any(name.startswith("agent/") for name in again)
    for name in ("grad_norm", "reward/mean", "rollout_corr/k3_kl"):
        assert again[name] == pytest.approx(first[name], rel=1e-5, abs=1e-9)
