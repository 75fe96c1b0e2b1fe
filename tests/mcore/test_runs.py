"""Whole runs on Transformer Engine's spec that go on from a checkpoint."""

from pathlib import Path

import pytest

from tests.mcore.launched import checksums, launch, replayed, untimed_steps

SCRIPT = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
GROUPED = ["--moe-grouped-gemm", "--moe-permute-fusion"]
RUN = ["--global-batch-size", 16, "--train-iters", 4, "--save-interval", 2]
LAYOUT = [
    *GROUPED, "--tensor-model-parallel-size", 2, "--sequence-parallel", "--pipeline-model-parallel-size", 2,
    "--expert-model-parallel-size", 2, "--expert-tensor-parallel-size", 1,
]  # fmt: skip

def made(folder, server, model, wanted):
    """Name -> (exit, folder of the run, the server's checksums after it, samples that no run before it asked for).

    wanted: name -> flags of the run.
    """
    found = {}
    with replayed(server, model, folder) as door:
        for name, flags in wanted.items():
            door.replay()
            done = launch(folder, name, model, door.url, SCRIPT, *RUN, *flags, processes=4)
            assert name == "local" or done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            found[name] = done, folder / name, checksums(server.url), door.sampled
    return found


def again(folder):
    """Flags that go on from the second step of the run "whole"."""
    return ["--load", folder / "whole/checkpoints", "--ckpt-step", 2]


@pytest.fixture(scope="module")
def runs(sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoints")
    local = ["--transformer-impl", "local", "--pipeline-model-parallel-size", 2, "--rollout-pad-sequences"]
    wanted = {"whole": LAYOUT, "resumed": [*LAYOUT, *again(folder)], "local": [*again(folder), *local]}
    return made(folder, sglang_server_fp32, tiny_moe_dir, wanted)


def test_run_when_resumed_in_the_same_layout_then_its_steps_and_weights_are_those_of_a_run_that_never_ended(runs):
    (_, whole, weights, _), (_, resumed, resumed_weights, sampled) = runs["whole"], runs["resumed"]
    wanted, steps = untimed_steps(whole), untimed_steps(resumed)
    assert [step["step"] for step in steps] == [3, 4] and len(wanted) == 4
    assert sampled == 0, "other samples were asked for"
    for step, expected in zip(steps, wanted[2:], strict=True):
        assert step["grad_norm"] > 0
        assert step == expected
    assert resumed_weights == weights


def test_run_when_resumed_on_layers_of_other_names_then_refused_with_the_remedy(runs):
    done, folder, *_ = runs["local"]
    saved = folder.parent / "whole/checkpoints/iter_0000002"
    assert done.returncode == 1 and not (folder / "log/metrics.jsonl").exists()
    assert (
        f"megatron_rl_corr: --transformer-impl local: the checkpoint {saved} was saved with transformer_engine, whose "
        "layers have other names"
    ) in done.stderr
