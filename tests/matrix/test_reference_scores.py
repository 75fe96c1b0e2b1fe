"""KL to another checkpoint under the launcher, against Hugging Face's log-probs of the samples
that the run saved.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_rl_corr.rollout.sample_file import read_trajectories
from tests.matrix.patched import unchanged
from tests.matrix.releases import OVERLAID, chosen
from tests.matrix.test_reference import REPLICAS, SHARDS, launch, steps_of
from tests.mcore.test_reference import kl_reference  # noqa: F401
from tests.preloaded import run_preloaded

pytestmark = pytest.mark.skipif(
    chosen() != OVERLAID, reason="make test-matrix runs it; tests/mcore has the gradients"
)
SEED, REWARD_COEF = 1234, 0.01  # Megatron's own seed
STILL = ["--lr", 1e-9, "--min-lr", 0]
"""Where updates of a batch are compared, so that pi_old is the policy of all of them."""
CASES = {
    "servers' routes": ([*SHARDS, "--router-replay", "R3"], 1, 2),
    "two updates, replicas": ([*REPLICAS, *STILL, "--rollout-updates-per-batch", 2], 2, 4),
    "two updates, servers' routes, stages": (
        [
            "--pipeline-model-parallel-size",
            2,
            "--router-replay",
            "R3",
            *STILL,
            "--rollout-updates-per-batch",
            2,
        ],
        2,
        4,
    ),
    "two updates, own routes, rows": (
        [
            *SHARDS,
            "--router-replay",
            "R2",
            *STILL,
            "--rollout-updates-per-batch",
            2,
            "--rollout-pad-sequences",
        ],
        2,
        4,
    ),
}
"""Name -> flags, updates a batch, steps."""


@pytest.mark.parametrize("case", CASES)
def test_kl_to_another_checkpoint_when_replayed_or_with_updates_then_as_hugging_face_scores_it(
    case,
    tmp_path,
    tiny_moe_dir,
    keeping_server,
    kl_reference,  # noqa: F811
):
    flags, updates, steps = CASES[case]
    other, _ = kl_reference
    with unchanged(keeping_server, tiny_moe_dir):
        done = launch(
            tmp_path / "run",
            tiny_moe_dir,
            keeping_server.url,
            *flags,
            "--rollout-reference-checkpoint",
            other,
            "--rollout-kl-loss-coef",
            0.1,
            "--rollout-kl-reward-coef",
            REWARD_COEF,
            "--rollout-save-trajectories",
            tmp_path / "samples",
            "--train-iters",
            steps,
        )
    assert done.returncode == 0, done.stderr[-4000:]
    made = run_preloaded(
        [Path(__file__).with_name("hf_scores.py"), other, tmp_path / "samples", tmp_path / "hf.pt"]
    )
    assert made.returncode == 0, made.stderr
    scores, found = torch.load(tmp_path / "hf.pt", weights_only=True), steps_of(tmp_path / "run")
    files = sorted((tmp_path / "samples").iterdir())
    replicas = 2 if "replicas" in case else 1
    assert len(found) == steps and len(files) == steps // updates * replicas
    for batch in range(steps // updates):
        of_batch = files[batch * replicas : (batch + 1) * replicas]
        far = [  # of each replica, each sample's d = log pi_old - log pi_ref
            [
                one.train_logprobs.double() - ref
                for one, ref in zip(read_trajectories(path), scores[path.name])  # noqa: B905
            ]
            for path in of_batch
        ]
        assert sum(map(len, far)) == 16 * updates
        reward = REWARD_COEF * np.mean([float(d.sum()) for replica in far for d in replica])
        assert found[batch * updates]["reward/reference_kl"] == pytest.approx(reward, rel=1e-4)
        for update in range(updates):
            slices = [part_of(replica, batch, update, updates, number) for number, replica in enumerate(far)]
            d = torch.cat([one for part in slices for one in part])
            k3 = float(((-d).exp() - 1 + d).clamp(max=10).mean())
            assert found[batch * updates + update]["loss/reference_kl"] == pytest.approx(k3, rel=1e-4)
            assert k3 > 1e-2 and found[batch * updates + update]["loss/reference_missing"] == 0


def part_of(samples, batch, update, updates, replica):
    """Those that the update trains on: the order is drawn from seed, batch, epoch and replica."""
    if updates == 1:
        return samples
    order = np.random.default_rng([SEED, batch, 0, replica]).permutation(len(samples))
    return [samples[i] for i in order.reshape(updates, -1)[update]]
