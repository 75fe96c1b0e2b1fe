"""The user's own advantage and loss, tried on made-up numbers before a run begins."""

import pytest

from megatron_rl_corr.config.correction import RolloutCorrectionConfig
from megatron_rl_corr.config.flags import name_flags, parse
from megatron_rl_corr.mcore.user_functions import check_user_functions

FILE = """
import torch

calls = []


def centred(rewards, kept, tokens):
    counted = torch.where(kept, rewards, 0)
    return rewards - counted.sum(1, keepdim=True) / kept.sum(1, keepdim=True)

def raises(rewards, kept, tokens):
    return rewards[0, 99]

def flat(rewards, kept, tokens):
    return rewards.mean(1)

def whole(rewards, kept, tokens):
    return rewards.long()

def infinite(rewards, kept, tokens):
    return rewards / (rewards - 1)

def random(rewards, kept, tokens):
    return torch.rand_like(rewards)

def changes(rewards, kept, tokens):
    rewards += 1
    return rewards

def reinforce(inputs, config):
    return -inputs.advantages * inputs.logprobs

def detached(inputs, config):
    return -inputs.advantages * inputs.logprobs.detach()

def cut_off(inputs, config):
    return -inputs.advantages * inputs.logprobs * 0

def overflows(inputs, config):
    return (inputs.logprobs * -1e9).exp()

def wrong_word(inputs, settings, extra):
    return inputs.logprobs

def of_whole_sequences(inputs, config):
    sums = torch.zeros(inputs.num_sequences).index_add(0, inputs.seq_ids, inputs.logprobs)
    return -inputs.advantages * sums[inputs.seq_ids] * config.clip[0]
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("own") / "own.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize("name", ["centred", "changes"])
def test_advantage_when_it_is_one_then_accepted(file, name):
    check_user_functions(RolloutCorrectionConfig(advantage=f"{file}:{name}"), 4)
    check_user_functions(RolloutCorrectionConfig(advantage=f"{file}:{name}"), 1)


@pytest.mark.parametrize("name", ["reinforce", "of_whole_sequences"])
def test_loss_when_it_is_one_then_accepted(file, name):
    check_user_functions(RolloutCorrectionConfig(loss=f"{file}:{name}", clip_ratio_low=0.1), 4)


@pytest.mark.parametrize(
    ("field", "name", "words"),
    [
        ("advantage", "raises", "failed on made-up numbers: IndexError: index 99 is out of bounds"),
        (
            "advantage",
            "flat",
            r"must return a floating-point tensor of shape [3, 4] on cpu, got torch.float64 [3] on cpu",
        ),
        ("advantage", "whole", "must return a floating-point tensor of shape [3, 4] on cpu, got torch.int64"),
        ("advantage", "infinite", "must return finite numbers for kept samples, got [["),
        (
            "advantage",
            "random",
            "must return the same for the same numbers, because every rank calls it; two calls gave",
        ),
        ("advantage", "missing", "has no 'missing'; it has centred, changes, "),
        (
            "loss",
            "detached",
            "must have a finite gradient in inputs.logprobs that is not 0 everywhere, got [0.0, 0.0",
        ),
        ("loss", "cut_off", "must have a finite gradient in inputs.logprobs that is not 0 everywhere"),
        ("loss", "overflows", "must return finite numbers, got [inf, inf"),
        (
            "loss",
            "wrong_word",
            "failed on made-up numbers: TypeError: wrong_word() missing 1 required positional",
        ),
    ],
)
def test_function_when_it_can_not_be_trained_on_then_flag_rule_and_value(file, field, name, words):
    with pytest.raises(ValueError) as raised:
        check_user_functions(RolloutCorrectionConfig(**{field: f"{file}:{name}"}), 4)
    text = name_flags(raised.value)
    assert f"--rollout-{field}" in text and "own.py" in text and words in text


REQUIRED = [
    "--rollout-url",
    "http://a",
    "--rollout-hf-checkpoint",
    "m",
    "--rollout-prompts",
    "p",
    "--rollout-reward-function",
    "r.py:r",
]
ALONE = ["--rollout-group-size", "1"]


def test_flags_when_groups_have_one_sample_then_only_what_compares_no_samples_of_a_group():
    for kind in ("raw", "reinforce_plus_plus", "own.py:f"):
        assert parse([*REQUIRED, *ALONE, "--rollout-advantage", kind])[1].group_size == 1
    for kind in ("grpo", "rloo", "group_mean", "reinforce_plus_plus_baseline"):
        with pytest.raises(
            ValueError, match=f"--rollout-group-size 1 leaves a group-relative .*{kind}.* of 0"
        ):
            parse([*REQUIRED, *ALONE, "--rollout-advantage", kind])
    with pytest.raises(
        ValueError, match="--rollout-group-filter spread with --rollout-group-size 1: one reward"
    ):
        parse([*REQUIRED, *ALONE, "--rollout-advantage", "raw", "--rollout-group-filter", "spread"])


def test_flags_when_the_loss_is_the_users_then_bypass_mode_takes_weights_and_ages():
    lag = ["--rollout-max-lag", "1", "--rollout-bypass-mode", "--rollout-loss", "own.py:f"]
    assert parse([*REQUIRED, *lag])[0].kind.whole_sequences
    weighted = parse([*REQUIRED, *lag, "--rollout-is", "token", "--rollout-is-threshold", "2"])[0]
    assert weighted.rollout_is == "token" and not weighted.kind.has_ratio
