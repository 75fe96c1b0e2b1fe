"""Our flags out of a Megatron command line: what they mean, what is missing, what is wrong."""

import argparse
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from megatron_rl_corr.config import flags as flags_module
from megatron_rl_corr.config.correction import PRESETS, RolloutCorrectionConfig
from megatron_rl_corr.config.cross_checks import idle_clips
from megatron_rl_corr.config.flags import add_flags, flags_by_field, name_flags, parse
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.reward_value import checked_reward
from megatron_rl_corr.integrations import megatron_rl_hooks
from megatron_rl_corr.rollout import RolloutClient

ROOT = Path(__file__).resolve().parents[2]
REQUIRED = [
    "--rollout-url",
    "http://a:30000",
    "http://b:30000",
    "--rollout-hf-checkpoint",
    "model",
    "--rollout-prompts",
    "prompts.jsonl",
    "--rollout-reward-function",
    "reward.py:reward",
]
SERVED = ("--rollout-kl-loss-coef", "1", "--rollout-reference-url", "http://c:1")
CLIENT = {
    "max_concurrency": 64,
    "max_per_server": None,
    "timeout_s": 600.0,
    "read_timeout_s": 60.0,
    "answer_timeout_s": None,
    "outage_timeout_s": 10.0,
    "update_timeout_s": 3600.0,
    "push_timeout_s": None,
    "max_retries": 3,
    "max_continuations": 8,
    "ingest_process": None,
    "ca_file": None,
    "engine": "auto",
}
DEFAULTS = CLIENT | {
    "urls": ("http://a:30000", "http://b:30000"),
    "servers_file": (),
    "servers_poll_s": None,
    "servers_drain_s": None,
    "servers_wait_s": None,
    "api_key_env": None,
    "hf_checkpoint": "model",
    "prompts": ("prompts.jsonl",),
    "prompts_weights": (),
    "input_key": None,
    "label_key": None,
    "apply_chat_template": False,
    "system_prompt": None,
    "tools_key": None,
    "chat_template_kwargs": None,
    "sampling_key": None,
    "max_prompt_tokens": None,
    "long_prompts": "drop",
    "agent": None,
    "agent_command": None,
    "agent_python": None,
    "agent_max_turns": None,
    "agent_timeout_s": None,
    "agent_memory_gib": None,
    "agent_branches": "episode",
    "agent_tool_parser": None,
    "agent_reasoning": "content",
    "gateway_host": None,
    "gateway_port": None,
    "gateway_strict": False,
    "eval_prompts": (),
    "eval_samples": (),
    "eval_temperature": None,
    "eval_top_p": None,
    "eval_top_k": None,
    "eval_max_new_tokens": None,
    "eval_pass_reward": 1.0,
    "model_provider": "auto",
    "allow_model_differences": False,
    "environment": None,
    "max_turns": None,
    "environment_timeout_s": None,
    "updates_per_batch": 1,
    "epochs_per_batch": 1,
    "max_kl_to_old": None,
    "ess_step_scale": False,
    "group_size": 8,
    "max_new_tokens": 1024,
    "temperature": 1.0,
    "max_lag": 0,
    "stale_samples": "keep",
    "pause_mode": "retract",
    "save_waiting_gib": 8.0,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "score_centering": None,
    "correction": None,
    "stop": (),
    "stop_token_ids": (),
    "linear_logprobs": False,
    "fp32_lm_head": False,
    "inplace_gradient": False,
    "batch_invariant": False,
    "expect_exact": None,
    "pad_sequences": False,
    "max_tokens_per_microbatch": None,
    "server_check": "semantic",
    "max_first_step_kl": None,
    "bucket_mib": None,
    "push": "full",
    "ingest_process": "auto",
    "push_full_every": 20,
    "log_dir": None,
    "save_trajectories": None,
    "save_routed_experts": False,
    "save_hf": None,
    "save_hf_interval": None,
    "replay": None,
    "trace": None,
    "router_replay": "off",
    "router_replay_min_agreement": None,
    "expert_statistics": False,
    "router_replay_effect_every": None,
    "indexer_replay": False,
    "weight_transport": "distributed",
    "weight_address": None,
    "weight_group_per_server": False,
    "weight_dir": None,
    "verify_push": "checksum",
    "probe_push": "on",
    "max_probe_log_ratio": None,
    "push_rounding": "none",
    "colocate": False,
    "quantized_checkpoint": None,
    "reference_checkpoint": None,
    "reference_reset": None,
    "reference_urls": (),
    "teacher_urls": (),
    "reward_function": ("reward.py:reward",),
    "reward_url": (),
    "reward_weights": (),
    "reward_workers": None,
    "reward_timeout_s": 120.0,
    "reward_url_batch": None,
    "reward_api_key_env": None,
    "truncated_samples": "train",
    "on_failed_reward": None,
    "max_failed_fraction": 0.05,
    "unread_labels": "error",
    "group_filter": None,
    "group_filter_limit": None,
    "group_filter_exhausted": "stop",
    "group_filter_measured": None,
    "ledger_interval": None,
    "ledger_share": 1 / 64,
    "ledger_top": None,
    "ledger_layouts": "off",
    "peak_memory": False,
    "oversampling": 1.0,
    "events": None,
    "metrics_port": None,
    "metrics_address": None,
}


def refusal(*arguments: str) -> str:
    with pytest.raises(ValueError) as raised:
        parse(arguments)
    return str(raised.value)


def test_group_size_when_1_with_token_advantages_then_refused_as_nothing_is_left_to_compare():
    assert refusal(*REQUIRED, "--rollout-advantage", "otb", "--rollout-group-size", "1") == (
        "--rollout-group-size 1 leaves --rollout-advantage otb without a baseline, as no other response has "
        "the same prompt; use 2 or more, or --rollout-advantage raw or reinforce_plus_plus"
    )


def test_parse_when_only_what_is_required_is_given_then_the_defaults():
    config, options = parse(REQUIRED)
    assert config == RolloutCorrectionConfig()
    assert asdict(options) == DEFAULTS


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ("--rollout-reference-checkpoint", "other"),
            "--rollout-reference-checkpoint other has no effect without a penalty; add "
            "--rollout-kl-loss-coef or --rollout-kl-reward-coef, or drop it",
        ),
        (
            ("--rollout-reference-reset", "4"),
            "--rollout-reference-reset 4 has no effect without a penalty; add --rollout-kl-loss-coef or "
            "--rollout-kl-reward-coef, or drop it",
        ),
        (
            (*SERVED, "--rollout-reference-reset", "4"),
            "--rollout-reference-reset 4 can't reset the weights of --rollout-reference-url, to which "
            "nothing is pushed; drop one",
        ),
        (
            (*SERVED, "--rollout-reference-checkpoint", "d"),
            "--rollout-reference-checkpoint d has no effect with --rollout-reference-url, whose servers "
            "score the samples; drop one",
        ),
        (
            ("--rollout-kl-loss-coef", "1", "--rollout-reference-url", "http://a:30000/"),
            "--rollout-reference-url http://a:30000/ is one of --rollout-url too, to which the trained "
            "weights are pushed; start a server of its own for the reference",
        ),
        (
            (*SERVED, "--rollout-temperature", "0.5"),
            "--rollout-reference-url with --rollout-temperature 0.5: servers score tokens under the whole "
            "distribution at temperature 1, which is not the one that was sampled; use "
            "--rollout-reference-checkpoint, whose log-probs are of the sampled one, or drop "
            "--rollout-temperature",
        ),
        (
            ("--rollout-kl-reward-type", "k2"),
            "--rollout-kl-reward-type k2 has no effect without --rollout-kl-reward-coef; drop it, or add "
            "--rollout-kl-reward-coef",
        ),
        (
            ("--rollout-kl-reward-coef", "1", "--rollout-kl-reward-type", "unbiased"),
            "--rollout-kl-reward-type must be one of k1, k2, k3; got 'unbiased'",
        ),
        (
            ("--rollout-sampler-kl-coef", "-1"),
            "--rollout-sampler-kl-coef must be at least 0, got -1; 0 turns it off",
        ),
    ],
)
def test_kl_flags_when_they_can_not_act_then_refused(given, told):
    assert refusal(*REQUIRED, *given) == told


def test_evaluation_sets_when_named_then_each_has_its_path_and_samples():
    sets = ("a=one.jsonl", "two.parquet", "c.d-1=./x=y")
    _, options = parse([*REQUIRED, "--rollout-eval-prompts", *sets, "--rollout-eval-samples", "4", "a=2"])
    assert [(one.name, one.path, one.samples, one.prefix) for one in options.evaluation_sets()] == [
        ("a", "one.jsonl", 2, "eval/a/"),
        ("", "two.parquet", 4, "eval/"),
        ("c.d-1", "./x=y", 4, "eval/c.d-1/"),
    ]


EVALUATED = ("--rollout-eval-prompts", "a=p", "q")


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (
            ("--rollout-eval-samples", "4"),
            "--rollout-eval-samples 4 has no effect without --rollout-eval-prompts; drop it, or add "
            "--rollout-eval-prompts",
        ),
        (
            (*EVALUATED, "--rollout-eval-samples", "b=4"),
            "--rollout-eval-samples b= names no set of --rollout-eval-prompts; the sets are a",
        ),
        (
            (*EVALUATED, "--rollout-eval-samples", "a=0"),
            "--rollout-eval-samples must be whole numbers of at least 1, got 0",
        ),
        (
            (*EVALUATED, "--rollout-eval-samples", "2", "3"),
            "--rollout-eval-samples has several without a name; give each a name of its own, as NAME=VALUE",
        ),
        (
            ("--rollout-eval-prompts", "a=p", "a=q"),
            "--rollout-eval-prompts has a twice; give each a name of its own, as NAME=VALUE",
        ),
        (
            ("--rollout-eval-prompts", "a="),
            "--rollout-eval-prompts a= has nothing after the =; give NAME=VALUE",
        ),
        (
            (*EVALUATED, "--rollout-eval-temperature", "0", "--rollout-eval-samples", "a=4"),
            "--rollout-eval-samples 4 with --rollout-eval-temperature 0: greedy samples of a prompt are all "
            "the same; use 1, or a temperature above 0",
        ),
        (
            (*EVALUATED, "--rollout-eval-temperature", "0", "--rollout-eval-top-p", "0.9"),
            "--rollout-eval-top-p 0.9 has no effect with --rollout-eval-temperature 0; drop one",
        ),
        (
            (*EVALUATED, "--rollout-eval-top-k", "1"),
            "--rollout-eval-top-k must be -1 (off) or at least 2, got 1; --rollout-eval-temperature 0 is "
            "greedy",
        ),
        ((*EVALUATED, "--rollout-eval-top-p", "0"), "--rollout-eval-top-p must be positive, got 0"),
        (
            (*EVALUATED, "--rollout-eval-pass-reward", "nan"),
            "--rollout-eval-pass-reward must be a number, got nan, which no reward reaches",
        ),
    ],
)
def test_evaluation_flags_when_they_can_not_act_then_refused(given, told):
    assert refusal(*REQUIRED, *given) == told


def test_parse_when_mixed_with_megatrons_flags_then_only_ours_are_taken():
    config, options = parse(
        [
            "--num-layers",
            "2",
            *REQUIRED,
            "--lr",
            "1e-6",
            "--rollout-correction-preset=decoupled_geo_rs_token_tis",
            "--bf16",
            "--rollout-is-threshold",
            "3",
            "--rollout-group-size",
            "4",
            "--use-mcore-models",
            "--rollout-max-new-tokens=32",
            "--rollout-temperature",
            "0.8",
            "--tensor-model-parallel-size",
            "2",
            "--rollout-max-concurrency",
            "7",
            "--rollout-timeout-s",
            "1.5",
            "--rollout-bucket-mib",
            "0.25",
            "--rollout-log-dir",
            "logs",
            "positional",
        ]
    )
    expected = PRESETS["decoupled_geo_rs_token_tis"]
    assert config.rollout_rs == expected.rollout_rs
    assert (config.rollout_is, config.rollout_is_upper) == ("token", 3.0)
    given = {
        "group_size": 4,
        "max_new_tokens": 32,
        "temperature": 0.8,
        "max_concurrency": 7,
        "timeout_s": 1.5,
        "bucket_mib": 0.25,
        "log_dir": "logs",
    }
    assert asdict(options) == DEFAULTS | given


@pytest.mark.parametrize("missing", ["url", "hf-checkpoint", "prompts", "reward-function"])
def test_parse_when_a_required_flag_is_missing_then_named(missing):
    start = REQUIRED.index(f"--rollout-{missing}")
    values = 3 if missing == "url" else 2
    assert refusal(*REQUIRED[:start], *REQUIRED[start + values :]) == (
        f"--rollout-{missing} is required; see --help"
    )


@pytest.mark.parametrize(
    "flag, value, words",
    [
        ("--rollout-group-size", "0", "--rollout-group-size must be positive, got 0"),
        (
            "--rollout-group-size",
            "1",
            "--rollout-group-size 1 leaves a group-relative --rollout-advantage (grpo) of 0 everywhere; use "
            "2 or more, or --rollout-advantage reinforce_plus_plus or raw",
        ),
        ("--rollout-group-size", "four", "--rollout-group-size: invalid int value: 'four'"),
        ("--rollout-max-new-tokens", "-3", "--rollout-max-new-tokens must be positive, got -3"),
        ("--rollout-max-concurrency", "0", "--rollout-max-concurrency must be positive, got 0"),
        ("--rollout-temperature", "0", "--rollout-temperature must be positive, got 0"),
        ("--rollout-temperature", "nan", "--rollout-temperature must be positive, got nan"),
        ("--rollout-min-p", "-0.1", "--rollout-min-p must be at least 0, got -0.1"),
        (
            "--rollout-stop",
            "",
            "--rollout-stop has an empty text, which would end every response at once; drop it",
        ),
        (
            "--rollout-stop-token-ids",
            "</s>",
            "--rollout-stop-token-ids must be token ids, whole numbers of at least 0, got '</s>'",
        ),
        ("--rollout-timeout-s", "-1", "--rollout-timeout-s must be positive, got -1"),
        ("--rollout-bucket-mib", "0", "--rollout-bucket-mib must be positive, got 0"),
        (
            "--rollout-weight-transport",
            "nccl",
            "--rollout-weight-transport must be one of distributed, tensor, disk; got 'nccl'",
        ),
        ("--rollout-verify-push", "no", "--rollout-verify-push must be one of checksum, off; got 'no'"),
        (
            "--rollout-weight-transport",
            "disk",
            "--rollout-weight-transport disk needs --rollout-weight-dir, a folder that every server sees by "
            "this path",
        ),
        (
            "--rollout-weight-dir",
            "w",
            "--rollout-weight-dir w has no effect without --rollout-weight-transport disk; drop it, or add "
            "--rollout-weight-transport disk",
        ),
        ("--rollout-grup-size", "4", "unknown flag --rollout-grup-size; did you mean --rollout-group-size?"),
        (
            "--rollout-grup-size=4",
            None,
            "unknown flag --rollout-grup-size; did you mean --rollout-group-size?",
        ),
        # No abbreviations: Megatron allows none either, and a later flag would change their meaning.
        ("--rollout-temp", "1", "unknown flag --rollout-temp; did you mean --rollout-temperature?"),
        ("--rollout-log-dir", None, "--rollout-log-dir: expected one argument"),
    ],
)
def test_parse_when_a_value_is_wrong_then_flag_rule_and_value(flag, value, words):
    assert refusal(*REQUIRED, flag, *([] if value is None else [value])) == words


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (
            ["--rollout-fp32-lm-head"],
            "--rollout-fp32-lm-head has no effect on Megatron's own logits; add --rollout-linear-logprobs",
        ),
        (
            ["--rollout-max-tokens-per-microbatch", "64", "--rollout-pad-sequences"],
            "--rollout-max-tokens-per-microbatch 64 has no effect with --rollout-pad-sequences; drop one",
        ),
        (
            ["--rollout-linear-logprobs", "--rollout-top-k", "5"],
            "--rollout-linear-logprobs with --rollout-top-p 1.0 and --rollout-top-k 5: the ids that the "
            "server kept are looked up in the logits; drop the one or the others",
        ),
        (
            ["--rollout-linear-logprobs", "--rollout-inplace-gradient"],
            "--rollout-inplace-gradient has no effect with --rollout-linear-logprobs, which holds no "
            "logits, nor with --rollout-top-k, whose gradient is sparse; drop it",
        ),
        (
            ["--rollout-server-check", "maybe"],
            "--rollout-server-check must be one of semantic, all, off; got 'maybe'",
        ),
    ],
)
def test_parse_when_flags_of_the_last_layer_do_not_go_together_then_refused(flags, words):
    assert refusal(*REQUIRED, *flags) == words


@pytest.mark.parametrize("read", [parse, megatron_rl_hooks.parse])
@pytest.mark.parametrize(
    "words", [["--rollout-samples", "4"], ["--rollout-samples=4"], ["--group-size", "4"]]
)
def test_flag_when_it_has_another_name_now_then_an_error_that_names_the_new_one(read, words, monkeypatch):
    new = {"--rollout-samples": "--rollout-group-size", "--group-size": "--rollout-group-size"}
    monkeypatch.setattr(flags_module, "RENAMED", new)
    with pytest.raises(ValueError) as raised:
        read([*(REQUIRED if read is parse else [megatron_rl_hooks.NEEDS]), *words])
    assert str(raised.value) == f"{words[0].split('=')[0]} is called --rollout-group-size now"


def test_renamed_flags_then_every_new_name_is_a_flag_and_no_old_one_is():
    known = set(flags_by_field().values())
    assert set(flags_module.RENAMED.values()) <= known and not known & set(flags_module.RENAMED)


def test_parser_when_it_is_megatrons_then_ours_join_it_and_nothing_is_required():
    # Megatron may parse a second time, with another command line; what is required is checked in parse.
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--num-layers", type=int)
    assert add_flags(parser) is parser
    values = vars(parser.parse_args(["--num-layers", "2"]))
    ours = {name for name in values if name.startswith(("rollout_", "router_", "expert_"))}
    assert set(values) == ours | {"num_layers"}
    dests = {flag.removeprefix("--").replace("-", "_") for flag in flags_by_field().values()}
    assert ours == dests and {flags_by_field()[name] for name in DEFAULTS} <= set(flags_by_field().values())
    assert values["rollout_group_size"] == 8 and values["rollout_eval_prompts"] == ()


def test_arguments_when_imported_and_parsed_then_without_torch():
    code = (
        "import sys\n"
        "from megatron_rl_corr.config.flags import parse\n"
        f"parse({REQUIRED!r} + ['--rollout-correction-preset', 'decoupled_token_is'])\n"
        "print([name for name in ('torch', 'numpy', 'megatron') if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )
    assert result.stdout == "[]\n", result.stderr


def test_client_options_when_parsed_then_the_clients_arguments(monkeypatch):
    given = {
        "max_per_server": 5,
        "read_timeout_s": 2.5,
        "answer_timeout_s": 70.0,
        "outage_timeout_s": 0.0,
        "max_retries": 0,
        "max_continuations": 1,
        "max_concurrency": 64,
        "timeout_s": 600.0,
        "update_timeout_s": 90.0,
        "push_timeout_s": 200.0,
        "ca_file": __file__,
    }
    flags = [
        word for name, value in given.items() for word in (f"--rollout-{name.replace('_', '-')}", str(value))
    ]
    monkeypatch.setenv("SERVER_KEY", "s3cret")
    _, options = parse([*REQUIRED, *flags, "--rollout-api-key-env", "SERVER_KEY"])
    others = {"engine": "auto", "api_key": "s3cret", "ingest_process": None}
    assert options.client_arguments() == given | others
    assert "s3cret" not in repr(options)
    RolloutClient(options.urls, vocab_size=10, **CLIENT)
    # The flags' defaults are the client's, which has more arguments.
    others = {"connect_timeout_s": 10.0, "experts": None, "seed": 0, "keyed_cache": False, "decode": None}
    others |= {"api_key": None, "engine": "sglang"}  # a client need not ask first what its servers run
    others |= {"pushes_retract": False, "replica": 0, "replicas": 1, "changes": False}
    assert RolloutClient.__init__.__kwdefaults__ == CLIENT | others


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rollout-max-per-server", "0"], "--rollout-max-per-server must be positive, got 0"),
        (["--rollout-read-timeout-s", "nan"], "--rollout-read-timeout-s must be positive, got nan"),
        (["--rollout-max-retries", "-1"], "--rollout-max-retries must be at least 0, got -1"),
        (
            ["--rollout-api-key-env", "NOT_SET_ANYWHERE"],
            "environment variable NOT_SET_ANYWHERE is not set; export it",
        ),
        (["--rollout-ca-file", "no.pem"], "--rollout-ca-file: there is no file no.pem"),
        (["--rollout-max-lag", "-1"], "--rollout-max-lag must be at least 0, got -1"),
        (
            ["--rollout-stale-samples", "drop"],
            "--rollout-stale-samples drop has no effect without --rollout-max-lag",
        ),
        (
            ["--rollout-pause-mode", "in_place"],
            "--rollout-pause-mode in_place has no effect without --rollout-max-lag",
        ),
        (
            ["--rollout-max-lag", "1", "--rollout-pause-mode", "abort"],
            "must be one of retract, in_place; got 'abort'",
        ),
    ],
)
def test_parse_when_a_server_flag_makes_no_sense_then_named_with_its_value(flags, said):
    assert said in refusal(*REQUIRED, *flags)


def test_parse_when_failed_rewards_have_a_value_then_that_or_none():
    def on_failed(value):
        return parse([*REQUIRED, "--rollout-on-failed-reward", value])[1].on_failed_reward

    assert (on_failed("drop"), on_failed("-1"), on_failed("0")) == (None, -1.0, 0.0)
    # With both, the function scores, and may fail.
    _, options = parse([*REQUIRED, "--rollout-environment", "e.py:E", "--rollout-on-failed-reward", "drop"])
    assert options.on_failed_reward is None
    # As float32 has it, which every reward is: a group of 0.1 and of failures at 0.1 has no spread.
    assert on_failed("0.1") == checked_reward(0.1, "reward") != 0.1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--rollout-reward-workers", "-1"], "--rollout-reward-workers must be at least 0, got -1"),
        (["--rollout-reward-timeout-s", "0"], "--rollout-reward-timeout-s must be positive, got 0"),
        (
            [
                "--rollout-reward-function",
                "none",
                "--rollout-environment",
                "e.py:E",
                "--rollout-reward-workers",
                "2",
            ],
            "--rollout-reward-workers 2 has no effect without --rollout-reward-function",
        ),
        (
            [
                "--rollout-reward-function",
                "none",
                "--rollout-environment",
                "e.py:E",
                "--rollout-on-failed-reward",
                "0",
            ],
            "--rollout-on-failed-reward 0 has no effect without --rollout-reward-function or "
            "--rollout-reward-url",
        ),
        # drop is what happens anyway, but where an environment scores no reward fails: its own
        # failures always drop.
        (
            [
                "--rollout-reward-function",
                "none",
                "--rollout-environment",
                "e.py:E",
                "--rollout-on-failed-reward",
                "drop",
            ],
            "--rollout-on-failed-reward drop has no effect without --rollout-reward-function or "
            "--rollout-reward-url; ",
        ),
        (
            ["--rollout-on-failed-reward", "nan"],
            "-on-failed-reward must be drop or a number that is finite in float32, got nan",
        ),
        (["--rollout-on-failed-reward", "1e39"], "a number that is finite in float32, got 1e+39"),
        (
            ["--rollout-on-failed-reward", "keep"],
            "--rollout-on-failed-reward must be a number or drop, got 'keep'",
        ),
        (
            ["--rollout-max-failed-fraction", "1.5"],
            "--rollout-max-failed-fraction must be from 0 to 1, got 1.5",
        ),
        (["--rollout-environment-timeout-s", "9"], "--rollout-environment-timeout-s 9 has no effect without"),
        (
            ["--rollout-reward-url", "http://a:1", "http://b:1"],
            "--rollout-reward-url: two rewards are called 'url'; name them, as in NAME=http://a:1",
        ),
        (
            ["--rollout-reward-url", "a:1"],
            "--rollout-reward-url must be http://HOST:PORT/PATH or https://HOST:PORT/PATH",
        ),
        (
            ["--rollout-reward-url", "http://me:secret@a:1"],
            "--rollout-reward-url: the address of a must not hold a pass",
        ),
        (
            ["--rollout-reward-url-batch", "4"],
            "--rollout-reward-url-batch 4 has no effect without --rollout-reward-url",
        ),
        (
            ["--rollout-reward-url", "http://a:1", "--rollout-reward-api-key-env", "NOT_THERE"],
            "--rollout-reward-api-key-env: the environment variable NOT_THERE is not set; export it",
        ),
        (
            ["--rollout-reward-weights", "1", "2"],
            "--rollout-reward-weights must have a weight for each of the 1 rewards (reward), got 2",
        ),
        (
            ["--rollout-reward-weights", "0"],
            "--rollout-reward-weights are all 0, which leaves every reward at 0",
        ),
        (
            ["--rollout-reward-weights", "1e39"],
            "--rollout-reward-weights must be finite in float32, got 1e+39",
        ),
        (["--rollout-reward-weights", "x"], "--rollout-reward-weights: invalid float value: 'x'"),
        (
            ["--rollout-environment", "e.py:E", "--rollout-environment-timeout-s", "0"],
            "must be positive, got 0",
        ),
    ],
)
def test_parse_when_a_reward_flag_makes_no_sense_then_named_with_its_value(flags, said):
    assert said in refusal(*REQUIRED, *flags)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (
            "maths",
            "'maths': there is no built-in reward of this name; they are math, exact, f1, format, "
            "overlong, length",
        ),
        ("overlong", "'overlong' needs cache: give overlong:cache=N"),
        ("overlong:4", "'overlong:4': overlong takes cache, max, penalty once each, got '4'"),
        ("overlong:cache=1.5", "'overlong:cache=1.5': cache must be a whole number above 0, got '1.5'"),
        (
            "overlong:cache=2000",
            "overlong: cache must be at most max (--rollout-max-new-tokens where it is not given), got "
            "cache 2000 and max 1024",
        ),
        ("length:penalty=nan", "'length:penalty=nan': penalty must be a number above 0, got 'nan'"),
        ("format:pattern=(", "'format:pattern=(': not a regular expression: "),
    ],
)
def test_parse_when_a_built_in_reward_is_wrong_then_flag_value_and_remedy(spec, said):
    assert refusal(*REQUIRED[:-1], spec).startswith(f"--rollout-reward-function {said}")


def test_parse_when_a_list_is_given_twice_then_the_last_counts_and_a_warning_says_so(capsys):
    assert parse([*REQUIRED, "--rollout-reward-function", "math"])[1].reward_function == ("math",)
    assert "--rollout-reward-function is given twice: the last one counts" in capsys.readouterr().err


def test_parse_when_rewards_are_several_then_named_weighted_and_complete():
    _, options = parse(
        [
            *REQUIRED[:-1],
            "a.py:f",
            "tidy=b.py:f",
            "short=overlong:cache=8,penalty=0.5",
            "--rollout-reward-url",
            "j=https://h/score?k=1",
            "--rollout-reward-weights",
            "1",
            "-0.1",
            "2",
            "0",
            "--rollout-max-new-tokens",
            "32",
        ]
    )
    tenth = checked_reward(-0.1, "w")
    assert [(one.name, one.source, one.weight, one.kind) for one in options.rewards] == [
        ("f", "a.py:f", 1, "function"),
        ("tidy", "b.py:f", tenth, "function"),
        ("short", "overlong", 2, "builtin"),
        ("j", "https://h/score?k=1", 0, "url"),
    ]
    assert options.rewards[2].parameters == {"cache": 8, "max": 32, "penalty": 0.5}
    assert (options.reward_url_batch, options.reward_timeout_s) == (32, 120.0)
    with pytest.raises(ValueError, match="^`reward_function` must be a list of texts, got 'a.py:f'"):
        RunConfig(**DEFAULTS | {"reward_function": "a.py:f"})


def test_options_when_built_then_frozen():
    with pytest.raises(AttributeError):
        RunConfig(**DEFAULTS).group_size = 2


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        (["--rollout-is", "turn", "--rollout-is-threshold", "2"], "--rollout-is turn"),
        (["--rollout-rs", "turn_mean_ratio", "--rollout-rs-threshold", "0.9_1.1"], "turn_mean_ratio"),
    ],
)
def test_parse_when_turns_decide_then_refused_unless_an_environment_makes_some(flags, rule):
    assert refusal(*REQUIRED, *flags) == (
        f"{rule} looks at turns, and without --rollout-environment every rollout has one; add it, or use a "
        "token or sequence level"
    )
    parse([*REQUIRED, *flags, "--rollout-environment", "tools.py:Tools"])


def test_parse_when_there_is_an_environment_then_it_may_score_and_turns_have_a_bound():
    environment = ["--rollout-environment", "tools.py:Tools"]
    assert REQUIRED[-2] == "--rollout-reward-function"
    _, options = parse([*REQUIRED[:-2], *environment])
    assert (options.environment, options.max_turns, options.reward_function) == ("tools.py:Tools", 8, ())
    _, options = parse([*REQUIRED, *environment, "--rollout-max-turns", "3"])
    assert (options.max_turns, options.reward_function) == (3, ("reward.py:reward",))
    _, options = parse([*REQUIRED, *environment, "--rollout-reward-function", "none"])
    assert options.reward_function == () == options.rewards


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--rollout-max-turns", "4"],
            "--rollout-max-turns 4 has no effect without --rollout-environment; drop it, "
            "or add --rollout-environment",
        ),
        (
            ["--rollout-max-turns", "0", "--rollout-environment", "tools.py:Tools"],
            "--rollout-max-turns must be positive, got 0",
        ),
        (["--rollout-reward-function", "none"], "--rollout-reward-function is required; see --help"),
        (
            ["--rollout-reward-function", "none", "--rollout-environment", ""],
            "--rollout-reward-function is required; see --help",
        ),
    ],
)
def test_parse_when_turns_or_rewards_make_no_sense_then_refused(flags, message):
    assert refusal(*REQUIRED, *flags) == message


@pytest.mark.parametrize(
    "flags, said",
    [
        (["--router-replay", "r3"], "--router-replay must be one of off, compare, R2, R3; got 'r3'"),
        (["--router-replay-min-agreement", "0.5"], "no effect without --router-replay R3; drop it"),
        (["--router-replay", "R3", "--router-replay-min-agreement", "1"], "must be in [-1, 1), got 1"),
        (
            ["--router-replay", "R2"],
            "--router-replay R2 has no effect: it repeats the routes of the pass for old log-",
        ),
        (
            ["--router-replay", "R2", "--rollout-bypass-mode"],
            "use R3, the servers' routes, or --router-replay off",
        ),
    ],
)
def test_router_replay_when_it_can_have_no_effect_or_sense_then_refused(flags, said):
    assert said in refusal(*REQUIRED, *flags)


def test_exactness_when_bypass_mode_trains_later_weights_then_refused():
    exact = [*REQUIRED, "--rollout-expect-exact", "0", "--rollout-log-dir", "log"]
    several = ["--rollout-updates-per-batch", "2"]
    parse([*exact, *several])
    parse([*exact, "--rollout-bypass-mode"])
    said = refusal(*exact, *several, "--rollout-bypass-mode")
    assert "--rollout-expect-exact 0 in bypass mode, with 2 updates a batch" in said


def test_router_replay_when_r3_then_the_default_bound_or_the_one_given():
    for flags, bound in (([], 0.25), (["--router-replay-min-agreement", "-1"], -1.0)):
        _, options = parse([*REQUIRED, "--router-replay", "R3", *flags])
        assert (options.router_replay, options.router_replay_min_agreement) == ("R3", bound)


def test_auto_when_given_then_the_run_begins_with_token_weights():
    rule = ["--rollout-rs", "token_k3", "--rollout-rs-threshold", "0.3", "--rollout-max-lag", "2"]
    config, options = parse([*REQUIRED, *rule, "--rollout-correction", "auto"])
    assert options.correction == "auto"
    assert (config.rollout_is, config.rollout_is_upper, config.rollout_is_mode) == ("token", 2.0, "truncate")
    assert [one.name for one in config.rollout_rs] == ["token_k3"]


@pytest.mark.parametrize(
    ("flags", "kind"),
    [
        ([], "grpo"),
        (["--rollout-advantage", "rloo"], "rloo"),
        (["--rollout-advantage", "raw"], "group_mean"),
        (["--rollout-advantage", "raw", "--rollout-group-size", "1"], "batch_mean"),
    ],
)
def test_auto_when_advantages_have_no_baseline_then_they_get_one(flags, kind):
    config, _ = parse([*REQUIRED, *flags, "--rollout-correction", "auto"])
    assert config.advantage_kind == kind


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (
            ("--rollout-is", "token", "--rollout-is-threshold", "2"),
            "--rollout-correction auto chooses the weights: drop --rollout-is token, and a preset that "
            "has it",
        ),
        (
            ("--rollout-correction-preset", "decoupled_seq_is"),
            "--rollout-correction auto chooses the weights: drop --rollout-is sequence, and a preset that "
            "has it",
        ),
        (
            ("--rollout-is-threshold", "2"),
            "--rollout-is-threshold 2 has no effect with --rollout-correction auto, which bounds them itself",
        ),
        (
            ("--rollout-bypass-mode",),
            "--rollout-correction auto chooses the weights: in bypass mode weights are of each microbatch's "
            "policy, for which the rule was not measured; drop --rollout-bypass-mode",
        ),
        (
            ("--rollout-diagnostics-only",),
            "--rollout-correction auto chooses the weights: --rollout-diagnostics-only promises that the "
            "correction changes nothing; drop one of them",
        ),
        (
            ("--rollout-score-centering", "16"),
            "--rollout-score-centering 16 is not derived for this: --rollout-correction auto takes weights "
            "of whole sequences too; use --rollout-is token",
        ),
        (("--rollout-correction", "always"), "--rollout-correction must be one of auto; got 'always'"),
    ],
)
def test_auto_when_something_does_not_go_with_it_then_refused(flags, told):
    given = [] if "--rollout-correction" in flags else ["--rollout-correction", "auto"]
    assert told in refusal(*REQUIRED, *given, *flags)


def test_routing_rule_when_nobody_compares_routes_then_refused():
    rule = ["--rollout-rs", "token_routing", "--rollout-rs-threshold", "0.5"]
    for flags in ([], ["--router-replay", "R2"], ["--router-replay", "R3", "--rollout-bypass-mode"]):
        assert "token_routing looks at the share of each token's experts" in refusal(*REQUIRED, *rule, *flags)
    config, _ = parse([*REQUIRED, *rule, "--router-replay", "R3"])
    assert config.rollout_rs[0].upper == 0.5


@pytest.mark.parametrize(
    "flag", ["--rollout-clip-ratio-low", "--rollout-clip-ratio-high", "--rollout-clip-ratio-c"]
)
def test_clip_flags_when_the_ratio_is_1_then_refused_unless_it_is_the_ratio_to_the_servers(flag, tmp_path):
    value = "2" if flag.endswith("-c") else "0.3"
    assert refusal(*REQUIRED, flag, value).startswith(
        f"{flag} {float(value)} has no effect: a batch makes one update"
    )
    config, _ = parse([*REQUIRED, flag, value, "--rollout-bypass-mode"])
    assert float(value) in (config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c)
    # A peer's file describes its whole run, clip included.
    (tmp_path / "peer.yaml").write_text(f"{flag.removeprefix('--rollout-').replace('-', '_')}: {value}\n")
    config, _ = parse([*REQUIRED, "--rollout-correction-config", str(tmp_path / "peer.yaml")])
    assert float(value) in (config.clip_ratio_low, config.clip_ratio_high, config.clip_ratio_c)
    assert name_flags(idle_clips(config, 1)).startswith(
        f"{flag} {float(value)} of the configuration can't act"
    )
    assert (
        idle_clips(replace(config, bypass_mode=True), 1) is None
        and idle_clips(RolloutCorrectionConfig(), 1) is None
    )


@pytest.mark.parametrize(
    "loss, flag, value",
    [
        ("sapo", "--rollout-sapo-temperature-pos", "2"),
        ("sapo", "--rollout-sapo-temperature-neg", "2"),
        ("dro", "--rollout-dro-beta", "0.1"),
    ],
)
def test_gate_and_pull_flags_when_the_ratio_is_1_then_refused_unless_it_is_the_ratio_to_the_servers(
    loss, flag, value
):
    flags = ["--rollout-loss", loss, flag, value]
    refused = refusal(*REQUIRED, *flags)
    assert refused.startswith(f"{flag} {float(value)} has no effect: a batch makes one update")
    assert "nothing is clipped, gated or pulled" in refused
    parse([*REQUIRED, *flags, "--rollout-bypass-mode"])
    parse([*REQUIRED, *flags, "--rollout-updates-per-batch", "4"])


def test_sat_when_nothing_is_clipped_then_refused_from_a_file_too(tmp_path):
    flags, path = ["--rollout-clip-sat-tail", "3"], tmp_path / "sat.yaml"
    path.write_text("clip_sat_tail: 3\n", "utf-8")
    for given in (flags, ["--rollout-correction-config", str(path)]):
        refused = refusal(*REQUIRED, *given)
        assert refused.startswith("--rollout-clip-sat-tail 3 has no effect: a batch makes one update"), (
            refused
        )
        config, _ = parse([*REQUIRED, *given, "--rollout-updates-per-batch", "2"])
        assert config.clip_sat_tail == 3


def test_dro_when_refused_then_each_remedy_that_is_named_is_accepted():
    dro, beta = ["--rollout-loss", "dro"], ["--rollout-dro-beta", "0.05"]
    lacking, idle = refusal(*REQUIRED, *dro), refusal(*REQUIRED, *dro, *beta)
    assert (
        "use 0.05, for example, and with it several updates a batch (--rollout-updates-per-batch) or --ro"
        in lacking
    )
    assert idle.endswith(
        "Make several updates with --rollout-updates-per-batch, or add --rollout-bypass-mode, where the "
        "pull is to pi_rollout; or drop it and use --rollout-loss reinforce, which is the same with one "
        "update"
    )
    for remedy in (["--rollout-updates-per-batch", "2"], ["--rollout-bypass-mode"]):
        assert parse([*REQUIRED, *dro, *beta, *remedy])[0].dro_beta == 0.05
    assert parse([*REQUIRED, "--rollout-loss", "reinforce"])[0].loss == "reinforce"


@pytest.mark.parametrize(
    ("flags", "takes_bypass"),
    [
        ([], True),
        (["--rollout-is", "token", "--rollout-is-threshold", "2"], False),
        (["--rollout-m2-threshold", "0.04"], False),
    ],
)
def test_idle_clip_when_the_correction_takes_no_bypass_mode_then_it_is_no_remedy(flags, takes_bypass):
    clip = ["--rollout-clip-ratio-high", "0.3"]
    refused = refusal(*REQUIRED, *flags, *clip)
    assert ("--rollout-bypass-mode clips the ratio" in refused) == takes_bypass
    parse([*REQUIRED, *flags])
    parse([*REQUIRED, *flags, *clip, "--rollout-updates-per-batch", "2"])
    if takes_bypass:
        parse([*REQUIRED, *flags, *clip, "--rollout-bypass-mode"])
    else:
        refusal(*REQUIRED, *flags, *clip, "--rollout-bypass-mode")


def test_preset_when_a_flag_does_not_go_with_its_settings_then_it_is_named_with_them(tmp_path):
    refused = refusal(*REQUIRED, "--rollout-correction-preset", "prime_rl", "--rollout-loss", "sapo")
    assert refused.startswith(
        "--rollout-clip-ratio-low has no effect with --rollout-loss sapo, which does not clip"
    )
    named = (
        "--rollout-clip-ratio-low 0.2 is of --rollout-correction-preset prime_rl: leave out what does not "
        "go with it, or the preset"
    )
    assert refused.endswith(named)
    path = tmp_path / "correction.yaml"
    path.write_text("preset: prime_rl\nloss: sapo\n")
    assert refusal(*REQUIRED, "--rollout-correction-config", str(path)).endswith(named)
    parse(
        [*REQUIRED, "--rollout-bypass-mode", "--rollout-loss", "sapo", "--rollout-sampler-kl-coef", "0.001"]
    )
    # One that the user gave is the user's.
    given = ["--rollout-clip-ratio-low", "0.3", "--rollout-loss", "sapo"]
    assert "prime_rl" not in refusal(*REQUIRED, "--rollout-correction-preset", "prime_rl", *given)


@pytest.mark.parametrize(
    "flags",
    [
        ["--rollout-loss", "reinforce"],
        ["--rollout-loss", "rloo", "--rollout-is", "token", "--rollout-is-threshold", "2"],
        ["--rollout-loss", "reinforce", "--rollout-bypass-mode"],
        [
            *["--rollout-loss", "rloo", "--rollout-bypass-mode", "--rollout-diagnostics-only"],
            *["--rollout-is", "token", "--rollout-is-threshold", "2"],
        ],
    ],
)
def test_later_updates_when_the_loss_has_no_ratio_to_follow_then_refused(flags):
    for several in (["--rollout-updates-per-batch", "4"], ["--rollout-epochs-per-batch", "4"]):
        refused = refusal(*REQUIRED, *flags, *several)
        assert refused.startswith(f"--rollout-loss {flags[1]} with 4 updates a batch: it has no ratio")
        # Its remedies.
        parse([*REQUIRED, *flags])
        parse([*REQUIRED, *several, "--rollout-loss", "ppo_clip"])
        weights = ["--rollout-is", "token", "--rollout-is-threshold", "2"]
        parse([*REQUIRED, *several, *flags[:2], "--rollout-bypass-mode", *weights])
        parse([*REQUIRED, *several, "--rollout-correction-preset", "bypass_pg_geo_rs"])


def test_gamma_weights_of_pi_old_when_a_loss_without_a_ratio_makes_several_updates_then_refused():
    vespo, several = ["--rollout-correction-preset", "vespo"], ["--rollout-updates-per-batch", "4"]
    three = [*vespo, "--no-rollout-bypass-mode"]
    refused = refusal(*REQUIRED, *three, *several)
    assert refused.startswith("--rollout-is-mode gamma, --rollout-loss reinforce with 4 updates a batch: ")
    # Its remedies.
    assert parse([*REQUIRED, *vespo, *several])[0].bypass_mode
    assert not parse([*REQUIRED, *three])[0].bypass_mode
    assert parse([*REQUIRED, *three, *several, "--rollout-loss", "ppo_clip"])[0].loss == "ppo_clip"


LAG = ["--rollout-max-lag", "2"]


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--rollout-loss", "gspo"],
        ["--rollout-correction-preset", "bypass_ppo_clip", "--rollout-loss", "reinforce"],
        ["--rollout-correction-preset", "decoupled_token_is", "--rollout-diagnostics-only"],
        ["--rollout-loss", "dro", "--rollout-dro-beta", "0.1", "--rollout-updates-per-batch", "2"],
    ],
)
def test_lag_when_nothing_corrects_older_samples_then_refused(flags):
    said = refusal(*REQUIRED, *LAG, *flags)
    assert said.startswith(
        "--rollout-max-lag 2 trains on samples of older weights, and nothing corrects them; add "
    )
    parse([*REQUIRED, *flags])


@pytest.mark.parametrize(
    "flags",
    [
        ["--rollout-is", "token", "--rollout-is-threshold", "2"],
        ["--rollout-correction-preset", "decoupled_geo_rs"],
        ["--rollout-correction-preset", "bypass_ppo_clip"],
        ["--rollout-m2-threshold", "0.04"],
        ["--rollout-correction-preset", "vespo"],
        ["--rollout-bypass-mode", "--rollout-loss", "sapo"],
        ["--rollout-correction-preset", "dro"],
    ],
)
def test_lag_when_weights_rules_or_bypass_correct_it_then_taken(flags):
    assert parse([*REQUIRED, *LAG, *flags])[1].max_lag == 2


def test_first_step_bound_when_not_positive_then_refused():
    for value in ("0", "-1", "nan"):
        assert "--rollout-max-first-step-kl must be positive, got " in refusal(
            *REQUIRED, "--rollout-max-first-step-kl", value
        )
    assert parse([*REQUIRED, "--rollout-max-first-step-kl", "inf"])[1].max_first_step_kl == float("inf")


SEVERAL = ["--rollout-updates-per-batch", "4"]


def test_updates_of_a_batch_when_several_then_clips_old_routes_and_a_bound_on_the_kl_have_an_effect():
    clips = ["--rollout-clip-ratio-low", "0.3", "--rollout-clip-ratio-c", "2"]
    config, options = parse(
        [*REQUIRED, *SEVERAL, *clips, "--router-replay", "R2", "--rollout-max-kl-to-old", "0.05"]
    )
    assert (config.clip_ratio_low, config.clip_ratio_c, options.router_replay) == (0.3, 2.0, "R2")
    assert (options.updates_of_batch, options.max_kl_to_old) == (4, 0.05)
    assert idle_clips(replace(config), 4) is None
    _, options = parse([*REQUIRED, *SEVERAL, "--rollout-epochs-per-batch", "3"])
    assert options.updates_of_batch == 12
    assert parse([*REQUIRED, "--rollout-ess-step-scale"])[1].ess_step_scale


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--rollout-max-kl-to-old", "0.05"],
            "--rollout-max-kl-to-old 0.05 has no effect while a batch makes one update; give "
            "--rollout-updates-per-batch",
        ),
        (["--rollout-updates-per-batch", "0"], "--rollout-updates-per-batch must be positive, got 0"),
        (["--rollout-epochs-per-batch", "0"], "--rollout-epochs-per-batch must be positive, got 0"),
        ([*SEVERAL, "--rollout-max-kl-to-old", "0"], "--rollout-max-kl-to-old must be positive, got 0"),
        (
            [*SEVERAL, "--router-replay", "R2", "--rollout-bypass-mode"],
            "--router-replay R2 repeats the routes of the pass that computes old log-probs, which bypass "
            "mode leaves out",
        ),
        (
            [*SEVERAL, "--rollout-max-lag", "1"],
            "--rollout-max-lag 1 trains on samples of older weights, and nothing corrects them",
        ),
        (
            ["--rollout-ess-step-scale", "--rollout-diagnostics-only"],
            "--rollout-ess-step-scale scales updates, and --rollout-diagnostics-only promises that the "
            "correction changes nothing; drop one of them",
        ),
    ],
)
def test_updates_of_a_batch_when_they_make_no_sense_then_refused_with_the_remedy(flags, message):
    assert refusal(*REQUIRED, *flags).startswith(message)


REPLAY = ["--rollout-replay", "samples", "--rollout-hf-checkpoint", "m"]


def test_parse_when_a_run_is_replayed_then_nothing_of_sampling_is_required():
    _, options = parse([*REPLAY, "--rollout-temperature", "0.7", "--rollout-group-size", "4"])
    assert options.replay == "samples" and options.urls == () and options.prompts == ()
    parse(
        [
            *REPLAY,
            "--rollout-kl-loss-coef",
            "0.1",
            "--rollout-reference-url",
            "http://a:1",
            "--rollout-max-concurrency",
            "3",
        ]
    )


@pytest.mark.parametrize(
    "given",
    [
        ["--rollout-url", "http://a:1"],
        ["--rollout-prompts", "p.jsonl"],
        ["--rollout-reward-function", "r.py:f"],
        ["--rollout-eval-prompts", "p.jsonl"],
        ["--rollout-environment", "e.py:E"],
        ["--rollout-bucket-mib", "2"],
        ["--rollout-max-lag", "1", "--rollout-correction-preset", "decoupled_token_is"],
        ["--rollout-max-retries", "5"],
    ],
)
def test_parse_when_a_replay_is_given_what_only_sampling_needs_then_refused_by_name(given):
    with pytest.raises(ValueError, match=f"{given[0]} has no effect with --rollout-replay"):
        parse([*REPLAY, *given])


def test_saved_routes_when_there_is_no_file_or_no_route_then_refused_by_name():
    flags = ["--rollout-save-routed-experts"]
    assert "has no effect without --rollout-save-trajectories" in refusal(*REQUIRED, *flags)
    flags += ["--rollout-save-trajectories", "samples"]
    assert "has no effect without --router-replay R3" in refusal(*REQUIRED, *flags)
    _, options = parse([*REQUIRED, *flags, "--router-replay", "R3"])
    assert options.save_routed_experts


def test_ingest_process_when_given_then_the_client_gets_it():
    for word, told in (("auto", None), ("on", True), ("off", False)):
        _, options = parse([*REQUIRED, "--rollout-ingest-process", word])
        assert options.client_arguments()["ingest_process"] is told


def test_replay_when_its_own_files_would_be_replaced_then_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    given = ["--rollout-save-trajectories", str(tmp_path / "samples/"), "--rollout-group-size", "4"]
    said = refusal(*REPLAY, *given, "--rollout-max-new-tokens", "8")
    assert "is the folder of --rollout-replay, whose files it would replace" in said
