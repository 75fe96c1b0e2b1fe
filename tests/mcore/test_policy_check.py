"""Megatron flags that make another policy than the servers': every flag of the release is in one
table, and each is flipped in a real model: what is compared or refused moves log-probs, and what is
ignored does not.
"""

import json
from pathlib import Path

import pytest

from tests.mcore.policy_cases import COMPARED, IGNORED, NOT_RUN, TRAINING
from tests.mcore.tiny_models import make_model
from tests.megatron_forks import run_megatron
from tools.cpu import gpu_available

pytestmark = pytest.mark.skipif(gpu_available(), reason="without a GPU only")

WORKER = Path(__file__).with_name("policy_worker.py")
OUTSIDE = Path(__file__).with_name("outside_the_policy.txt")
MOVED, SAME = 1e-2, 5e-5
"""Differences of log-probs: what no rounding makes, and what is rounding of float32."""
KINDS = {"compared": COMPARED, "ignored": IGNORED, "training": TRAINING}


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the worker says of every flip, by kind and flag; its checks; and what Megatron's parser has."""
    root = tmp_path_factory.mktemp("policy")
    names = sorted({flip.model for flips in KINDS.values() for flip in flips.values()})
    for name in names:
        (root / name).mkdir()
        make_model(name, root / name)
    flips = [[flag, kind, flip._asdict()] for kind, flips in KINDS.items() for flag, flip in flips.items()]
    (root / "flips.json").write_text(json.dumps(flips))
    answer = run_megatron(WORKER, root / "flips.json", *(root / name for name in names))
    assert answer.returncode == 0, answer.stderr[-3000:]
    lines = [
        json.loads(line.removeprefix("RESULT ")) for line in answer.stdout.splitlines() if "RESULT " in line
    ]
    flipped = {kind: {line["flip"]: line for line in lines[:-1] if line["kind"] == kind} for kind in KINDS}
    assert {kind: set(found) for kind, found in flipped.items()} == {
        kind: set(flips) for kind, flips in KINDS.items()
    }
    return flipped | lines[-1]


def names(line):
    """The flags that lines of the check begin with."""
    return {entry.removeprefix("no ").split(" ")[0].rstrip(":") for entry in line["differences"]}


def test_compared_flags_when_one_is_flipped_then_log_probs_move_and_the_flag_is_named(said):
    wrong = {
        flag: line
        for flag, line in said["compared"].items()
        if line["error"] or not line["moved"] > MOVED or flag not in names(line) or line["refused"]
    }
    assert wrong == {}


def test_ignored_flags_when_one_is_flipped_then_log_probs_stay_and_nothing_is_said(said):
    wrong = {
        flag: line
        for flag, line in said["ignored"].items()
        if line["error"] or not line["moved"] < SAME or line["differences"] or line["refused"]
    }
    assert wrong == {}


def test_refused_flags_when_one_is_given_then_training_has_other_log_probs_than_scoring_and_it_is_named(said):
    wrong = {
        flag: line
        for flag, line in said["training"].items()
        if line["error"]
        or not line["moved"] > MOVED
        or not [r for r in line["refused"] if r.startswith(flag)]
    }
    assert wrong == {}


def tables():
    """Table -> its flags, from the package; pytest's own process never imports Megatron."""
    from megatron_rl_corr.mcore.checks import policy_flags

    ignored = {f"ignored, {why}": set(flags) for why, flags in policy_flags.IGNORED.items()}
    return {
        "refused": {row.flag for row in policy_flags.REFUSED},
        "compared": set(policy_flags.COMPARED),
    } | ignored


def test_tables_then_every_flag_and_field_of_the_release_is_in_exactly_one(said):
    found, destinations = said["inventory"], said["inventory"]["destinations"]
    outside = set(OUTSIDE.read_text().split())
    placed = [destinations[flag] for flags in tables().values() for flag in flags & set(destinations)]
    placed += sorted(outside)
    assert sorted({name for name in placed if placed.count(name) > 1}) == [], "in two tables"
    there = (set(destinations.values()) | set(found["fields"])) - set(found["ours"])
    assert sorted(there - set(placed)) == [], "new in this release: does it change log-probs?"
    assert sorted(outside - there) == [], "gone from this release"
    assert found["unknown"] == []


def test_tables_then_every_flag_of_them_is_flipped_or_there_is_a_reason_why_not(said):
    flags = tables()
    in_words = {
        word
        for flips in (COMPARED, IGNORED)
        for flip in flips.values()
        for word in [*flip.words.split(), *flip.without.split()]
        if word.startswith("--")
    }
    not_run = [flag for flags in NOT_RUN.values() for flag in flags]
    assert len(not_run) == len(set(not_run)) and not set(not_run) & set(COMPARED)
    assert set(COMPARED) <= flags["compared"]
    ignored = set().union(*(found for table, found in flags.items() if table.startswith("ignored")))
    assert set(IGNORED) <= ignored
    assert sorted((flags["compared"] | ignored) - in_words - set(not_run)) == []
    assert set(TRAINING) | {flag for flag in said["checks"] if flag.startswith("--")} == flags[
        "refused"
    ] & set(said["inventory"]["destinations"])


def test_check_when_flags_differ_from_config_json_then_all_are_told_at_once_with_the_flag_to_give(said):
    message, _ = said["checks"]["several"]
    assert message.splitlines() == [
        "Megatron would train another policy than the servers sample from:",
        "  no --disable-bias-linear: config.json says it is given; give --disable-bias-linear",
        "  --add-qkv-bias: config.json says it is not given; leave --add-qkv-bias out",
        "  --norm-epsilon 0.01: config.json says 1e-06; give --norm-epsilon 1e-06",
        "  no --swiglu: config.json says it is given; give --swiglu",
        "  --rotary-base 10000: config.json says 500000; give --rotary-base 500000",
        "--rollout-allow-model-differences makes a warning of what differs from config.json",
    ]


def test_check_when_differences_are_allowed_then_they_are_printed_and_refused_flags_stay_refused(said):
    message, printed = said["checks"]["allowed"]
    assert message == "" and printed.splitlines()[1:] == [
        "  --norm-epsilon 0.01: config.json says 1e-06; give --norm-epsilon 1e-06",
        "  --rotary-base 10000: config.json says 500000; give --rotary-base 500000",
    ]
    message, printed = said["checks"]["default dropout"]
    assert [line.split(":")[0] for line in message.splitlines()[1:]] == [
        "  --attention-dropout 0.1",
        "  --hidden-dropout 0.1",
    ]
    assert message.endswith("give --hidden-dropout 0")


def test_check_when_a_run_starts_then_its_arguments_are_checked_and_its_model_before_weights_are_loaded(said):
    assert "--hidden-dropout 0.5: " in said["checks"]["run's arguments"][0]
    assert said["checks"]["run's model"] == said["checks"]["stock script"]


def test_check_when_megatron_computes_something_else_than_the_model_then_refused_and_a_warning_where_allowed(
    said,
):
    words = (
        "--rollout-hf-checkpoint DIR: config.json: sliding_window 16 is not supported; use a model with "
        "full attention"
    )
    assert words in said["checks"]["no flags, False"][0]
    message, printed = said["checks"]["no flags, True"]
    assert message == "" and words in printed


def test_check_when_config_json_has_settings_that_no_flag_trains_then_all_are_named_beside_other_flags(said):
    settings = [
        "  --rollout-hf-checkpoint DIR: config.json: hidden_act 'gelu' is not what the flags train",
        "  --rollout-hf-checkpoint DIR: config.json: logit_scale 2.0 is no setting of llama that is known "
        "here",
        "  --rollout-hf-checkpoint DIR: config.json: mlp_bias true is not what the flags train",
        "  --norm-epsilon 0.01: config.json says 1e-06; give --norm-epsilon 1e-06",
    ]
    message, _ = said["checks"]["settings, False"]
    lines = message.splitlines()[1:-1]
    assert (
        sorted(lines) == sorted(line for line in lines if line.startswith(tuple(settings)))
        and len(lines) == 4
    )
    message, printed = said["checks"]["settings, True"]
    assert message == "" and all(start in printed for start in settings)


def test_model_when_the_script_gave_it_another_activation_than_its_flags_then_refused(said):
    message, _ = said["checks"]["own activation"]
    assert (
        "--swiglu or --quick-geglu: the script's model has activation_func <" in message and "gelu" in message
    )


def test_checkpoint_when_it_can_not_be_read_or_trained_then_its_flag_and_folder_are_named(said):
    missing = "--rollout-hf-checkpoint: nowhere is not a Hugging Face model folder: it has no config.json"
    assert said["checks"]["no folder"] == said["checks"]["run's folder"] == [missing, ""]
    message, _ = said["checks"]["run's table"]
    assert message.startswith(
        "--rollout-hf-checkpoint there: config.json: model_type 'gpt2' is not supported"
    )


def test_check_when_the_script_took_an_argument_out_then_it_is_an_error_and_no_default_stands_in(said):
    message, _ = said["checks"]["taken out"]
    assert message.startswith("--rotary-percent: the script's arguments have no rotary_percent any more")


def test_check_when_a_flag_is_of_no_table_but_of_the_models_configuration_then_it_is_compared(said):
    message, _ = said["checks"]["forks flag"]
    assert "--norm-epsilon 0.01: config.json says 1e-06" in message


def test_check_when_megatron_has_no_flag_for_the_model_then_refused_with_the_release(said):
    assert said["checks"]["unknown word"][0] == (
        "megatron-core 0.19.2 can't make the model of config.json: it has no --no-such-flag 3; install a "
        "newer one"
    )


def test_parameter_when_no_table_has_its_name_then_loading_is_an_error_that_names_it(said):
    assert said["checks"]["unknown parameter"][0].startswith(
        "Megatron's parameter decoder.layers.0.self_attention.linear_qkv.bias does not exist in"
    )


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "deepseek_v3"])
def test_check_when_flags_and_model_are_those_of_config_json_then_nothing_is_said(family, said):
    assert said["checks"][f"right {family}"] == said["checks"][f"right model {family}"] == ["", ""]


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("stock script", "rope_scaling_factor and seq_len_interpolation_factor"),
        ("positions", "--position-embedding-type rope: the script's model has none"),
        (
            "own config",
            "--hidden-dropout: the script's model has hidden_dropout 0.25: servers sample without dropout",
        ),
        (
            "own config",
            "--norm-epsilon: the script's model has layernorm_epsilon 0.001, and its arguments say 1e-06",
        ),
    ],
)
def test_model_when_the_script_built_another_than_its_arguments_say_then_refused_with_the_remedy(
    case, words, said
):
    message, _ = said["checks"][case]
    assert words in message


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--fp8-recipe", "--fp8-recipe delayed: with --fp8-format"),
        ("--use-megatron-fsdp", "use --use-distributed-optimizer"),
        ("--moe-mlp-glu-interleave-size", "--moe-mlp-glu-interleave-size 32: rows of gate and up"),
        ("--transformer-impl", "use transformer_engine or local"),
    ],
)
def test_refused_flags_when_given_then_the_reason_and_the_remedy(flag, words, said):
    [line] = said["checks"][flag]
    assert words in line


@pytest.mark.parametrize(
    ("case", "line"),
    [
        (
            "other number",
            "2: config.json has num_nextn_predict_layers 1; give --mtp-num-layers 1, or leave it out",
        ),
        (
            "attached",
            "1: the layers' own loss would move the policy too, which the corrected loss alone trains; give "
            "--mtp-detach-heads, with which it trains these layers alone",
        ),
        (
            "no loss",
            "1: with --mtp-loss-scaling-factor 0 the layers cost time and are not trained, but "
            "--weight-decay shrinks them; leave --mtp-num-layers out: exported folders keep the checkpoint's",
        ),
        (
            "repeated",
            "1: one layer in the place of several is no checkpoint's; leave --mtp-use-repeated-layer out",
        ),
        (
            "tied",
            "1: with tied embeddings what the layers' loss is there was not shown to be right; leave it out",
        ),
        (
            "context",
            "1: with --context-parallel-size, what the layers' loss is there was not shown to be right; use "
            "--context-parallel-size 1, or leave it out",
        ),
        (
            "packed",
            "1: with packed sequences what the layers' loss is there was not shown to be right; "
            "leave it out, or, without agents, give --rollout-pad-sequences",
        ),
        (
            "per token",
            "1: with --calculate-per-token-loss their gradient would be divided by all positions, padding "
            "too; leave one of the two out",
        ),
        (
            "hidden",
            "1: --rollout-linear-logprobs never holds the logits that they need; leave one of the two out",
        ),
        (
            "interleaved",
            "1: with interleaved stages, or a --pipeline-model-parallel-layout, what the layers' loss is "
            "there was not shown to be right; leave one of the two out",
        ),
        (
            "placed",
            "1: with interleaved stages, or a --pipeline-model-parallel-layout, what the layers' loss is "
            "there was not shown to be right; leave one of the two out",
        ),
        ("hybrid", "1: HybridModel's layers of this kind have no table of names; leave one of the two out"),
        (
            "fp8",
            "1: in FP8 or FP4 what the layers' loss is there was not shown to be right; leave one of the two "
            "out",
        ),
    ],
)
def test_layers_of_further_tokens_when_something_is_not_proven_with_them_then_refused_by_name(
    case, line, said
):
    assert said["checks"][f"mtp {case}"] == [f"--mtp-num-layers {line}"]


def test_layers_of_further_tokens_when_they_are_the_checkpoints_or_left_out_then_nothing_is_said(said):
    assert said["checks"]["mtp right"] == said["checks"]["mtp left out"] == []
    assert said["checks"]["mtp of none"] == [
        "--mtp-num-layers 1: config.json has num_nextn_predict_layers 0; leave it out"
    ]


def test_layers_of_further_tokens_when_a_run_starts_then_its_arguments_and_its_model_are_checked(said):
    message, _ = said["checks"]["mtp run's arguments"]
    assert "  --mtp-num-layers 1: the layers' own loss would move the policy too" in message
    message, _ = said["checks"]["mtp not built"]
    assert (
        "--mtp-num-layers 1: the script's model has no such layers; hand get_gpt_mtp_block_spec's" in message
    )


def test_experts_biases_when_megatron_would_move_them_then_said_with_the_flag_that_stops_it(said):
    assert said["checks"]["expert biases 0.001"][1] == (
        "[rollout] --moe-router-bias-update-rate 0.001 moves the bias of every expert after each step, and "
        "so the policy, whatever the loss and --lr are; give 0 unless that is wanted\n"
    )
    assert said["checks"]["expert biases 0.0"] == ["", ""]
