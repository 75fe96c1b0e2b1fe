"""What score centering is refused with: each by its option, and what it goes with."""

import pytest

from megatron_rl_corr.config.flags import parse

BASE = ["--rollout-url", "http://127.0.0.1:1", "--rollout-hf-checkpoint", "m", "--rollout-prompts", "p.jsonl"]
BASE += ["--rollout-reward-function", "r.py:f", "--rollout-score-centering", "16"]
TOKEN = ["--rollout-is", "token", "--rollout-is-threshold", "2"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        TOKEN,
        ["--rollout-is", "token", "--rollout-is-mode", "mask", "--rollout-is-threshold", "0.5_2"],
        ["--rollout-is", "token", "--rollout-is-mode", "clip", "--rollout-is-threshold", "0.5_2"],
        ["--rollout-loss", "reinforce", "--rollout-bypass-mode", *TOKEN],
        ["--rollout-loss", "dapo", "--rollout-entropy-coef", "0.01", "--rollout-temperature", "0.7"],
        ["--rollout-batch-filter-kl", "0.1"],
        ["--rollout-max-lag", "2"],  # it corrects samples of older weights
        ["--rollout-correction-preset", "disabled", "--rollout-max-lag", "2"],
        ["--rollout-correction-preset", "nemo_rl_tis", "--rollout-max-lag", "2"],
        ["--rollout-correction-preset", "nemo_rl_icepop"],
        ["--rollout-correction-preset", "decoupled_token_is"],
        ["--rollout-correction-preset", "bypass_pg_token_icepop"],
    ],
)
def test_options_when_derived_then_accepted(flags):
    _, run = parse([*BASE, *flags])
    assert run.score_centering == 16


@pytest.mark.parametrize(
    "flags, named",
    [
        (
            ["--rollout-is", "sequence", "--rollout-is-threshold", "2"],
            "--rollout-is sequence weighs units of",
        ),
        ([*TOKEN, "--rollout-is-batch-normalize"], "--rollout-is-batch-normalize divides the weights"),
        (
            ["--rollout-rs", "token_k3", "--rollout-rs-threshold", "0.1"],
            "--rollout-rs token_k3 makes what is",
        ),
        (["--rollout-m2-threshold", "0.04"], "--rollout-m2-threshold makes what is kept depend"),
        (
            ["--rollout-correction-preset", "decoupled_geo_rs_token_tis"],
            "--rollout-rs seq_mean_ratio makes what is",
        ),
        (["--rollout-correction-preset", "slime_mis"], "--rollout-is-batch-normalize divides the weights"),
        (["--rollout-diagnostics-only"], "--rollout-diagnostics-only promises that the correction changes"),
        (["--rollout-loss", "gspo"], "--rollout-loss gspo has another gradient"),
        (["--rollout-loss", "dro", "--rollout-dro-beta", "0.1"], "--rollout-loss dro has another gradient"),
        (["--rollout-loss", "mine.py:loss"], "--rollout-loss mine.py:loss has another gradient"),
        (["--rollout-bypass-mode"], "in bypass mode the ratio of --rollout-loss ppo_clip is clipped"),
        (["--rollout-updates-per-batch", "2"], "2 updates a batch: the ratio to pi_old is 1 in the first"),
        (["--rollout-linear-logprobs"], "--rollout-linear-logprobs gives log-probs of the sampled ids alone"),
        (["--rollout-top-k", "20"], "--rollout-top-k 20 truncates it; use --rollout-top-k -1"),
        (["--rollout-top-p", "0.9", "--rollout-top-k", "20"], "--rollout-top-p 0.9 truncates it; use"),
    ],
)
def test_options_when_not_derived_then_refused_by_name(flags, named, capsys):
    with pytest.raises((ValueError, SystemExit)) as raised:
        parse([*BASE, *flags])
    text = str(raised.value) + capsys.readouterr().err
    assert "--rollout-score-centering 16 is" in text and named in text, text


def test_ids_when_none_then_refused():
    with pytest.raises((ValueError, SystemExit)):
        parse([*BASE[:-1], "0"])
