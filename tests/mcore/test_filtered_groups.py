"""A mismatch of easy prompts alone, whose groups the filter leaves out: whole runs show it, and
train without them.
"""

import json
import math
from pathlib import Path

import pytest
import torch
from aiohttp import web

from megatron_rl_corr.core.mismatch import filtered_metrics
from megatron_rl_corr.engines.trajectory import Trajectory, VersionSpan
from megatron_rl_corr.rollout.group_filter import chosen_sample, measured_samples
from tests.matrix.patched import unchanged
from tests.matrix.replaying_server import ReplayingServer
from tests.mcore.launched import launch, untimed_steps, write_data
from tests.tiers import IN_MATRIX, matrix

pytestmark = matrix

SCRIPT = Path(__file__).resolve().parents[1] / "matrix/pretrain_any.py"
# Prompts that end with an even id are always solved; of others some samples are.
REWARD = """
def reward(prompt, output_ids, finish_reason):
    return 1.0 if prompt.input_ids[-1] % 2 == 0 else float(output_ids[-1] % 3 > 0)
"""
K3 = "rollout/by_fate/filtered_k3_kl"
RUN = [
    "--global-batch-size",
    16,
    "--train-iters",
    2,
    "--save-interval",
    2,
    "--rollout-group-filter",
    "spread",
    "--moe-grouped-gemm",
]
LAYOUTS = {
    "packed, DP 2": [],
    "rows, PP 2": ["--rollout-pad-sequences", "--pipeline-model-parallel-size", 2],
}
if not IN_MATRIX:
    del LAYOUTS["packed, DP 2"]


class Door(ReplayingServer):
    """A server whose log-probs of the easy prompts' responses are too low by `shift`; what the
    probe asks is right.
    """

    shift = 0.0

    async def _answer(self, request):
        asked = await request.read()
        answer = await super()._answer(request)
        if (
            request.path != "/generate"
            or b'"top_logprobs_num"' in asked
            or json.loads(asked)["input_ids"][-1] % 2
        ):
            return answer
        found = json.loads(answer.body)
        for row in found["meta_info"]["output_token_logprobs"]:
            row[0] -= self.shift
        return web.json_response(found)


@pytest.fixture(scope="module", params=LAYOUTS)
def runs(request, sglang_server_fp32, tiny_moe_dir, tmp_path_factory):
    """Name -> (the steps, what was printed): with a mismatch of easy prompts, without, and with
    nothing measured.
    """
    folder, found = tmp_path_factory.mktemp("filtered"), {}
    write_data(folder)
    (folder / "reward.py").write_text(REWARD)
    with unchanged(sglang_server_fp32, tiny_moe_dir), Door(sglang_server_fp32.url) as door:
        for name, shift, flags in (
            ("planted", 0.5, ["--rollout-group-filter-measured", 0.5]),
            ("sound", 0.0, []),
            ("unmeasured", 0.0, ["--rollout-group-filter-measured", 0]),
        ):
            door.replay()
            door.shift = shift
            done = launch(
                folder,
                name,
                tiny_moe_dir,
                door.url,
                SCRIPT,
                *RUN,
                *LAYOUTS[request.param],
                *flags,
                processes=2,
            )
            assert done.returncode == 0, done.stderr[-4000:] + done.stdout[-2000:]
            found[name] = untimed_steps(folder / name), done.stdout
    return found


def test_run_when_easy_prompts_alone_mismatch_then_shown_and_the_batch_is_sound(runs):
    steps, printed = runs["planted"]
    measured = [step for step in steps if step.get(K3) is not None]
    assert measured, "no group was filtered"
    for step in measured:
        assert step["rollout_corr/k3_kl"] < 1e-3  # what is trained is sound
    # D = 0.5 has a k3 of e^0.5 - 1.5 = 0.149; hard groups without a spread are among them, with none.
    assert max(step[K3] for step in measured) > 0.05
    assert max(step["rollout/by_fate/filtered_log_ratio_abs_max"] for step in measured) == pytest.approx(
        0.5, 1e-3
    )
    assert "KL(k3) filtered" in printed, "the console says so"


def test_run_when_nothing_mismatches_then_the_same_samples_have_a_small_one(runs):
    steps, printed = runs["sound"]
    found = [step[K3] for step in steps if step.get(K3) is not None]
    assert found and max(found) < 1e-3 and "KL(k3) filtered" not in printed


def test_run_when_measured_then_the_training_is_bit_for_bit_that_of_one_that_does_not(runs):
    sound, unmeasured = runs["sound"][0], runs["unmeasured"][0]
    assert not any(K3 in step for step in unmeasured)
    assert [step["grad_norm"] for step in sound] == [step["grad_norm"] for step in unmeasured]
    assert sound[-1]["loss/policy"] == unmeasured[-1]["loss/policy"]


def sample(prompt, response, *, sampled=True):
    ids = torch.arange(response)
    turns = None if sampled else torch.full((response,), -1)
    return Trajectory(
        0,
        0,
        torch.zeros(prompt, dtype=torch.int64),
        ids,
        torch.zeros(response),
        "stop",
        (VersionSpan("r-0", 0, response),),
        0,
        "http://a",
        turn_ids=turns,
    )


def test_sample_when_chosen_then_another_place_in_each_group_and_none_that_can_not_be_scored():
    group = [sample(2, 3), sample(2, 5), sample(2, 4)]
    assert [chosen_sample(group, number, 7) for number in range(4)] == [
        group[0],
        group[1],
        group[2],
        group[0],
    ]
    assert chosen_sample(group, 1, 6) is group[2]  # 7 tokens are too many
    assert chosen_sample(group, 0, 4) is None
    assert chosen_sample([sample(2, 0), sample(1, 2, sampled=False)], 0, 99) is None


def test_count_when_of_a_share_then_rounded_up():
    assert [measured_samples(share, 64) for share in (None, 0.0, 0.0625, 0.001, 1.0)] == [0, 0, 4, 1, 64]


def test_metrics_when_of_untrained_samples_then_by_hand():
    train, rollout = torch.tensor([-1.0, -1.0, -2.0, 9.0]), torch.tensor([-1.5, -1.0, math.nan, -1.0])
    found = {
        name.removeprefix("rollout/by_fate/filtered_"): metric.value()
        for name, metric in filtered_metrics(train, rollout, torch.tensor([1, 1, 1, 0])).items()
    }
    # D = 0.5 and 0; the third has no log-prob, the fourth was not sampled.
    assert (found["tokens"], found["nonfinite_tokens"], found["log_ratio_abs_max"]) == (2, 1, 0.5)
    assert found["kl"] == -0.25 and found["log_ratio_abs_mean"] == 0.25
    assert found["k3_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 2)
    none = torch.zeros(0)
    assert math.isnan(filtered_metrics(none, none, none.bool())[K3].value())
