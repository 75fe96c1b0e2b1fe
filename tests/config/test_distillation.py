"""What on-policy distillation is refused with, each by its option, and what it goes with."""

import pytest

from megatron_rl_corr.config.flags import parse

SERVERS = [
    "--rollout-url",
    "http://127.0.0.1:1",
    "--rollout-hf-checkpoint",
    "m",
    "--rollout-prompts",
    "p.jsonl",
]
TEACHER = ["--rollout-teacher-url", "http://127.0.0.1:2"]
ALONE = [*SERVERS, *TEACHER, "--rollout-distill-coef", "1"]
TOP = ["--rollout-distill-top-k", "8"]
REWARD = ["--rollout-reward-function", "r.py:f"]
ONE = ["--rollout-group-size", "1"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ONE,
        [*ONE, *TOP],
        [*ONE, "--rollout-loss", "reinforce"],
        [*ONE, *REWARD, "--rollout-reward-weights", "0"],
        [*REWARD, *TOP, "--rollout-correction-preset", "decoupled_token_is"],
        [*TOP, "--rollout-correction-preset", "decoupled_geo_rs_token_tis"],
        [*ONE, *TOP, "--rollout-bypass-mode", "--rollout-loss", "reinforce"],
        ["--rollout-kl-loss-coef", "0.1", "--rollout-reference-url", "http://127.0.0.1:3"],
        ["--rollout-linear-logprobs"],
        ["--rollout-updates-per-batch", "2", "--rollout-max-lag", "1", *TOP]
        + ["--rollout-is", "token", "--rollout-is-threshold", "2"],
    ],
)
def test_options_when_they_go_with_a_teacher_then_accepted(flags):
    config, run = parse([*ALONE, *flags])
    assert config.distill_coef == 1 and run.teacher_urls == ("http://127.0.0.1:2",)
    assert config.distill_top_k == (8 if "--rollout-distill-top-k" in flags else None)


@pytest.mark.parametrize(
    "flags, told",
    [
        (
            [*SERVERS, *REWARD, *TEACHER],
            "--rollout-teacher-url http://127.0.0.1:2 has no effect without distillation; add "
            "--rollout-distill-coef",
        ),
        (
            [*SERVERS, *REWARD, "--rollout-distill-coef", "0.5"],
            "--rollout-distill-coef 0.5 needs a teacher; name its servers with --rollout-teacher-url",
        ),
        (
            [*SERVERS, *REWARD, *TOP],
            "--rollout-distill-top-k 8 has no effect without --rollout-distill-coef",
        ),
        ([*SERVERS], "--rollout-reward-function is required"),
        ([*ALONE, "--rollout-distill-coef", "-1"], "--rollout-distill-coef must be at least 0"),
        ([*ALONE, "--rollout-distill-top-k", "0"], "--rollout-distill-top-k must be positive"),
        (
            [*ALONE, "--rollout-temperature", "0.7"],
            "--rollout-teacher-url with --rollout-temperature 0.7: a teacher scores tokens under its whole",
        ),
        (
            [*ALONE, "--rollout-top-k", "20"],
            "--rollout-teacher-url with --rollout-top-k 20: a teacher scores",
        ),
        (
            [*ALONE, "--rollout-teacher-url", "http://127.0.0.1:1/"],
            "--rollout-teacher-url http://127.0.0.1:1/ is one of --rollout-url too, to which the trained "
            "weights are pushed; start a server of its own for the teacher",
        ),
        ([*ALONE, "--rollout-teacher-url", "127.0.0.1"], "--rollout-teacher-url: a server address is"),
        (
            [*ALONE, "--rollout-score-centering", "8"],
            "--rollout-score-centering 8 with --rollout-distill-coef 1: centering is derived for one",
        ),
        (
            [*ALONE, *TOP, "--rollout-linear-logprobs"],
            "--rollout-distill-top-k 8 with --rollout-linear-logprobs, which gives log-probs of the sampled",
        ),
        (
            [*ALONE, "--rollout-is", "sequence", "--rollout-is-mode", "gamma"],
            "rollout_is_mode gamma needs the advantage of a whole response before the correction, and "
            "--rollout-distill-coef 1 gives one a token",
        ),
        (
            [*ALONE, "--rollout-group-filter", "spread"],
            "--rollout-group-filter spread without a reward: rewards that are all 0 have no spread",
        ),
        (
            [*ALONE, *REWARD, *ONE],
            "--rollout-group-size 1 leaves a group-relative --rollout-advantage (grpo) of 0 everywhere",
        ),
    ],
)
def test_options_when_they_do_not_go_together_then_refused_by_name(flags, told):
    with pytest.raises(ValueError) as raised:
        parse(flags)
    assert told in str(raised.value)


def test_replay_when_it_was_distilled_then_servers_of_the_teacher_and_groups_of_one_are_taken():
    replay = [
        "--rollout-replay",
        "s",
        "--rollout-hf-checkpoint",
        "m",
        *TEACHER,
        "--rollout-distill-coef",
        "1",
    ]
    _, run = parse([*replay, *ONE, "--rollout-max-retries", "5"])
    assert run.scoring_urls == ("http://127.0.0.1:2",)
