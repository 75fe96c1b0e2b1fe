"""Whole runs of DeepSeek-V3 with its layer that predicts further tokens.

They train on the samples of another run, as SGLang has latent attention on a CPU with AMX alone.
"""

import pytest
import torch

from megatron_rl_corr.models.hf_checkpoint import HFCheckpoint
from tests.matrix.releases import OVERLAID, chosen
from tests.mcore.launched import launch, replayed, untimed_steps
from tests.mcore.mtp_models import COPIES, LAYER
from tests.mcore.test_mtp import model  # noqa: F401
from tests.mcore.test_runs import SCRIPT

pytestmark = pytest.mark.skipif(
    chosen() != OVERLAID, reason="make test-matrix runs it; tests/mcore has the gradients"
)
RUN = ["--global-batch-size", 16, "--train-iters", 3, "--save-interval", 2]
LAYOUT = [
    "--rollout-pad-sequences",
    "--no-rope-fusion",
    "--pipeline-model-parallel-size",
    2,
    "--clip-grad",
    0,
    "--moe-router-bias-update-rate",
    0,
    "--rollout-save-hf-interval",
    1,
    "--rollout-max-first-step-kl",
    100,
    "--tokenizer-type",
    "NullTokenizer",
    "--vocab-size",
    90,
]
"""YaRN's fused kernel needs a GPU."""
FURTHER = ["--mtp-num-layers", 1, "--mtp-detach-heads"]


@pytest.fixture(scope="module")
def runs(sglang_server_fp32, tiny_moe_dir, model, tmp_path_factory):  # noqa: F811
    """The folder of runs "with" and "without" the layer in Megatron, and "resumed" with it after step 2."""
    folder = tmp_path_factory.mktemp("runs")
    with replayed(sglang_server_fp32, tiny_moe_dir, folder) as door:
        flags = ["--rollout-save-trajectories", folder / "sampled/samples"]
        done = launch(folder, "sampled", tiny_moe_dir, door.url, SCRIPT, *RUN, *flags, processes=1)
        assert done.returncode == 0, done.stderr[-4000:]
    resumed = ["--load", folder / "with/checkpoints", "--ckpt-step", 2]
    for name, more in {"without": [], "with": FURTHER, "resumed": [*FURTHER, *resumed]}.items():
        replay = ["--rollout-replay", folder / "sampled/samples", "--rollout-save-hf", folder / name / "hf"]
        done = launch(folder, name, model, None, SCRIPT, *RUN, *LAYOUT, *replay, *more, processes=2)
        assert done.returncode == 0, done.stderr[-4000:]
    return folder


def test_run_when_the_layer_is_trained_then_the_policys_steps_and_weights_are_those_without_it(runs, model):  # noqa: F811
    without, trained = untimed_steps(runs / "without"), untimed_steps(runs / "with")
    assert len(trained) == 3 and all(step["loss/policy"] for step in trained)
    for step, expected in zip(trained, without, strict=True):
        # the layer has one too
        assert {name for name in expected if step[name] != expected[name]} <= {"grad_norm"}
    start, plain, found = (HFCheckpoint(path) for path in (model, hf(runs, "without"), hf(runs, "with")))
    assert set(found.names) == set(plain.names) == set(start.names)
    bias = f"{LAYER}mlp.gate.e_score_correction_bias"  # no gradient moves it
    for name in start.names:
        source = COPIES.get(name, name)
        if source.startswith(LAYER):  # the layer's own, and no copy of the model's
            assert torch.equal(plain.tensor(name), start.tensor(name)), name
            assert (name == bias) == torch.equal(found.tensor(name), start.tensor(name)), name
        else:
            assert torch.equal(found.tensor(name), plain.tensor(source)), name


def test_run_when_resumed_then_its_step_and_weights_are_those_of_a_run_that_never_ended(runs):
    assert untimed_steps(runs / "resumed") == untimed_steps(runs / "with")[2:]
    whole, resumed = HFCheckpoint(hf(runs, "with")), HFCheckpoint(hf(runs, "resumed"))
    assert all(torch.equal(resumed.tensor(name), whole.tensor(name)) for name in whole.names)


def hf(runs, name):
    return runs / name / "hf/iter_0000003"
