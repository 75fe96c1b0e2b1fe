"""The trials of a model, their commands, and what their numbers must be."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from megatron_rl_corr.cli import main
from megatron_rl_corr.commands.accept import servers
from megatron_rl_corr.commands.accept.arguments import NUMBER_TYPES
from megatron_rl_corr.commands.accept.judgement import BARS, TrialNumber, judge, measured
from megatron_rl_corr.commands.accept.servers import NOT_THE_CHECKPOINTS, rounding_of, server_rows, where
from megatron_rl_corr.commands.accept.trial import (
    EXPLAINED,
    OWN,
    REPLAYED,
    trial_command,
    trials,
    value_of,
    values_of,
)
from tests.models.published_configs import GPT_OSS_20B, QWEN3_8B

STEP = {
    "rollout_corr/k3_kl": 2e-10,
    "rollout_corr/log_ratio_abs_max": 3e-5,
    "rollout_corr/exact_fraction": 0.25,
    "rollout/probe_bits": 0.0,
    "router_replay/disagreement/layer_001": 0.0,
    "router_replay/disagreement/layer_002": 0.001,
}
FAKE = Path(__file__).with_name("fake_run.py")
"""Writes what a trial would log: the numbers of a file."""


@pytest.fixture(autouse=True)
def no_waiting_for_servers(monkeypatch):
    """Those of most tests are not there."""
    monkeypatch.setattr(servers, "CONNECT_S", 0.05)


def folder_of(config, path):
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return path


def steps(count=4, **changes):
    return [STEP | {"step": n, "weight_version": n} | changes for n in range(1, count + 1)]


def failed(rows):
    return [row.what for row in rows if not row.passed]


def test_trials_of_a_model_then_with_replay_only_where_it_has_experts(tmp_path):
    for config, expected in ((QWEN3_8B, (OWN,)), (GPT_OSS_20B, (OWN, REPLAYED))):
        folder = folder_of(config, tmp_path / config["model_type"])
        words = ["torchrun", "train.py", "--rollout-url", "http://a", "--rollout-hf-checkpoint", str(folder)]
        assert trials(words) == expected
        assert trials([f"--rollout-url=http://a --rollout-hf-checkpoint={folder}".split()][0]) == expected
        with pytest.raises(ValueError, match="--rollout-replay"):
            trials([*words, "--rollout-replay", "samples"])
    for left_out in ("--rollout-url", "--rollout-hf-checkpoint"):
        with pytest.raises(ValueError, match=f"the command has no {left_out}"):
            trials([word for word in words if word != left_out])


def test_command_of_a_trial_then_no_learning_rate_and_no_place_of_the_runs_own_is_left():
    run = "torchrun train.py --decoupled-lr 1e-5 --lr-warmup-init 1e-7 --load ckpt --wandb-project p "
    run += "--finetune --rollout-updates-per-batch 4 --rollout-clip-ratio-high 0.28 "
    run += "--rampup-batch-size 4 4 9 --seq-length 32"
    command = trial_command(run.split(), OWN, Path("/out"), steps=4, has_experts=False)
    assert command[:4] == ["torchrun", "train.py", "--seq-length", "32"] and command[4] == "--lr"
    joined = ["t.py", "--save=/x", "-h", "--router-replay=R3", "kept"]
    assert trial_command(joined, OWN, Path("/out"), steps=4, has_experts=False)[:3] == ["t.py", "-h", "kept"]


def test_command_of_a_trial_then_the_runs_at_learning_rate_0_without_what_it_saves():
    run = "torchrun -m launch t.py --lr 1e-6 --bf16 --save ckpt --rollout-eval-prompts a b "
    run += "--rollout-eval-top-k=4 --rollout-save-routed-experts --rollout-stale-samples drop "
    run += (
        "--lr-decay-style constant "
        "--router-replay=R2 --rollout-url http://a http://b --moe-router-enable-expert-bias --train-iters=9"
    )
    command = trial_command(run.split(), REPLAYED, Path("out"), steps=40, has_experts=True)
    assert " ".join(command) == (
        "torchrun -m launch t.py --bf16 --rollout-url http://a http://b --moe-router-enable-expert-bias "
        "--lr 0 --min-lr 0 --weight-decay 0 --train-iters 40 --eval-iters 0 --eval-interval 40 "
        f"--rollout-log-dir {Path('out').resolve()} --rollout-ledger-interval 10 --rollout-peak-memory "
        "--router-replay R3 --moe-router-bias-update-rate 0"
    )
    own = trial_command(run.split(), OWN, Path("out"), steps=40, has_experts=True)
    assert own[own.index("--router-replay") + 1] == "compare"
    assert "--router-replay" not in trial_command(run.split(), OWN, Path("out"), steps=4, has_experts=False)


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({}, []),
        ({"rollout_corr/k3_kl": 2e-8}, ["mean k3 of a step"]),
        ({"rollout_corr/k3_kl": float("nan")}, ["mean k3 of a step"]),
        ({"rollout_corr/k3_kl": None}, ["mean k3 of a step"]),
        ({"rollout_corr/log_ratio_abs_max": 2e-4}, ["largest |D| of a token"]),
        ({"rollout/probe_bits": 20.0}, ["evidence of other weights, bits"]),
        ({"weight_version": 1}, ["pushes"]),
        ({"skipped": 1}, ["steps that were skipped"]),
        ({"rollout/probe_bits": float("nan")}, ["evidence of other weights, bits"]),
        ({"router_replay/disagreement/layer_002": float("nan")}, ["most tokens of a layer to other experts"]),
        ({"router_replay/disagreement/layer_002": 0.02}, ["most tokens of a layer to other experts"]),
    ],
)
def test_trial_when_one_number_is_too_large_then_that_row_fails(changes, what):
    made = [{name: one for name, one in step.items() if one is not None} for step in steps(**changes)]
    rows = judge(REPLAYED, [steps(1)[0], *made[1:]], 4, BARS["float32"], has_experts=True)
    assert failed(rows) == what


def test_trial_when_one_step_of_few_tokens_has_many_to_other_experts_then_the_share_of_all_steps_counts():
    made = steps()
    made[2]["router_replay/disagreement/layer_002"] = 0.04
    made[1]["router_replay/disagreement/layer_001"] = 0.02
    rows = judge(REPLAYED, made, 4, BARS["float32"], has_experts=True)
    [row] = [row for row in rows if row.what == "most tokens of a layer to other experts"]
    assert (row.found, row.passed) == ("1.08% (layer_002)", False)  # (0.04 + 3 x 0.001) / 4 = 1.075 %
    assert measured(made)["disagreement"] == pytest.approx(0.01075)
    made[2]["router_replay/disagreement/layer_002"] = 0.03
    assert failed(judge(REPLAYED, made, 4, BARS["float32"], has_experts=True)) == []


def test_trial_of_a_model_with_experts_when_no_router_was_measured_then_it_fails():
    made = [{name: one for name, one in step.items() if "router" not in name} for step in steps()]
    [row] = [row for row in judge(REPLAYED, made, 4, BARS["float32"], has_experts=True) if not row.passed]
    assert (row.what, row.found) == ("most tokens of a layer to other experts", "not measured")
    assert failed(judge(OWN, made, 4, BARS["float32"], has_experts=False)) == []


def test_trial_of_the_trainers_own_experts_then_a_wide_bar_and_a_model_without_some_the_narrow_one():
    bar, near = BARS["float32"], steps(**{"rollout_corr/k3_kl": 1e-5, "rollout_corr/log_ratio_abs_max": 0.2})
    assert failed(judge(OWN, near, 4, bar, has_experts=True)) == []
    assert failed(judge(OWN, near, 4, bar, has_experts=False)) == [
        "mean k3 of a step",
        "largest |D| of a token",
    ]
    assert failed(judge(OWN, steps(3), 4, bar, has_experts=False)) == ["steps"]
    assert failed(judge(OWN, [], 4, bar, has_experts=False)) == ["steps"]
    [shown] = [row.found for row in judge(OWN, steps(), 4, bar, has_experts=True) if "layer" in row.what]
    assert shown == "0.10% (layer_002)"
    assert sorted(BARS) == sorted(NUMBER_TYPES)


def accept(tmp_path, name, rows, *options, status=0):
    folder, numbers = tmp_path / "model", tmp_path / f"{name}.json"
    if not folder.exists():
        folder_of(GPT_OSS_20B, folder)
    numbers.write_text(json.dumps(rows))
    words = [
        sys.executable,
        FAKE,
        numbers,
        status,
        "--rollout-url",
        "http://a",
        "--rollout-hf-checkpoint",
        folder,
    ]
    return main(["accept", "--out", str(tmp_path / name), "--steps", "4", *options, "--", *map(str, words)])


def test_command_when_both_trials_are_right_then_accepted_and_a_page(tmp_path, capsys):
    assert accept(tmp_path, "right", steps()) == 0
    page = (tmp_path / "right/accept.md").read_text()
    assert page.startswith("# accepted in float32\n") and "**failed**" not in page
    numbers = json.loads((tmp_path / "right/accept.json").read_text())
    assert numbers["accepted"] and {row["trial"] for row in numbers["rows"]} == {OWN, REPLAYED, "servers"}
    printed = capsys.readouterr().out
    assert "trial 2 of 2, replayed: " in printed and printed.endswith("accepted in float32\n")
    assert (tmp_path / "right/own.log").read_text() == "a step\n" * 4


def test_command_when_a_trial_is_wrong_or_ends_then_not_accepted_with_the_reason(tmp_path, capsys):
    far = steps(**{"rollout_corr/log_ratio_abs_max": 0.5})
    assert accept(tmp_path, "far", far) == 1
    assert "| replayed | largest \\|D\\| of a token | 0.5 | at most 1.00e-04 | **failed** |" in (
        (tmp_path / "far/accept.md").read_text()
    )
    assert accept(tmp_path, "wide", far, "--bar", "bfloat16") == 0
    assert accept(tmp_path, "ended", steps(2), status=3) == 1
    printed = capsys.readouterr().out
    assert "own ended with status 3; its last lines" in printed and printed.endswith(
        "not accepted in float32\n"
    )


def test_command_when_a_metric_is_not_a_number_then_not_accepted_and_a_page(tmp_path):
    rows = [
        step | {"rollout_corr/k3_kl": None, "nonfinite": {"rollout_corr/k3_kl": "NaN"}} for step in steps()
    ]
    assert accept(tmp_path, "nan", rows) == 1
    assert "| own | mean k3 of a step | nan |" in (tmp_path / "nan/accept.md").read_text()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_command_when_a_signal_comes_then_the_trial_ends_with_it(tmp_path, number, status):
    folder = folder_of(GPT_OSS_20B, tmp_path / "model")
    trial = [sys.executable, "-uc", "import os, time; print('pid', os.getpid()); time.sleep(600)"]
    words = [*trial, "--rollout-url", "http://a", "--rollout-hf-checkpoint", str(folder)]
    code = "import sys; from megatron_rl_corr.cli import main; "
    code += "from megatron_rl_corr.commands.accept import servers; servers.CONNECT_S = 0.05; "
    code += "sys.exit(main(sys.argv[1:]))"
    with subprocess.Popen(
        [sys.executable, "-uc", code, "accept", "--out", str(tmp_path / "out"), "--", *words],
        stdout=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    ) as process:
        try:
            pid = next(int(line.split()[1]) for line in process.stdout if line.startswith("pid"))
            process.send_signal(number)
            assert process.wait(30) == status
        finally:
            process.kill()
    assert not psutil.pid_exists(pid)


def test_command_when_it_can_not_begin_then_status_2_and_what_to_do(tmp_path, capsys):
    accept(tmp_path, "there", steps())
    assert accept(tmp_path, "there", steps()) == 2 and "is there and not empty" in capsys.readouterr().err
    assert main(["accept", "--out", str(tmp_path / "x"), "--steps", "3", "--", "a"]) == 2
    assert "--steps 3 must be 4 at least" in capsys.readouterr().err
    assert main(["accept", "--out", str(tmp_path / "x"), "--", "a"]) == 2
    assert "the command has no --rollout-url" in capsys.readouterr().err


def test_command_that_explains_then_one_step_that_no_check_ends_with_wrong_layouts_tried():
    run = "torchrun t.py --rollout-max-first-step-kl 1e-3 --rollout-probe-push on --lr 1 "
    run += "--rollout-ledger-share 1"
    command = trial_command(run.split(), EXPLAINED, Path("/out"), steps=40, has_experts=True)
    assert " ".join(command) == (
        "torchrun t.py --rollout-ledger-share 1 --lr 0 --min-lr 0 --weight-decay 0 --train-iters 1 "
        "--eval-iters 0 --eval-interval 1 --rollout-log-dir /out --rollout-ledger-interval 1 "
        "--rollout-peak-memory --rollout-probe-push off --rollout-max-first-step-kl inf "
        "--rollout-ledger-layouts on --router-replay R3 --router-replay-min-agreement -1"
    )
    assert "--rollout-probe-push on" in " ".join(
        trial_command(run.split(), OWN, Path("/out"), steps=40, has_experts=True)
    )


def test_command_when_a_trial_is_not_accepted_then_one_more_explains_it_and_is_not_judged(tmp_path, capsys):
    assert accept(tmp_path, "right", steps()) == 0
    assert "explained" not in capsys.readouterr().out and not (tmp_path / "right/explained").exists()
    ledger = {
        **{"ledger/tokens": 100, "ledger/mean_abs": 0.5, "ledger/mean_square": 0.3, "ledger/noise": 1e-5},
        **{"ledger/rest/share": 1.0, "ledger/rest/mean_abs": 0.5, "ledger/as_square": 0.3},
        **{"ledger/as/layout/gate_up/all/share": 1.0, "ledger/as/layout/gate_up/all/times": 1.0},
    }
    assert accept(tmp_path, "far", steps(**{"rollout_corr/log_ratio_abs_max": 0.5}, **ledger)) == 1
    assert "trial one more, explained: " in capsys.readouterr().out
    numbers = json.loads((tmp_path / "far/accept.json").read_text())
    assert any(
        note.startswith("explained: ") and "as if servers had gate and up exchanged" in note
        for note in numbers["notes"]
    )
    assert {row["trial"] for row in numbers["rows"]} == {OWN, REPLAYED, "servers"}


def test_memory_then_the_largest_peaks_first_and_not_judged():
    peaks = {f"memory/host_gib/rank_{rank}": 1.0 + rank for rank in range(10)}
    rows = judge(
        OWN, steps(**peaks, **{"memory/device_gib/rank_0": 70.5}), 4, BARS["float32"], has_experts=True
    )
    host, device = (row for row in rows if row.what.startswith("peak memory"))
    assert host.found.startswith("10.00 GiB (rank 9), 9.00 GiB (rank 8)")
    assert host.found.endswith("3.00 GiB (rank 2), less on 2 ranks") and host.passed
    assert (device.what, device.found) == ("peak memory of a rank on its GPU", "70.50 GiB (rank 0)")


def test_values_of_a_flag_then_all_up_to_the_next_flag():
    words = ["t.py", "--rollout-url", "http://a", "http://b", "--x", "1", "--rollout-url=http://c", "d"]
    assert values_of("--rollout-url", words) == ["http://a", "http://b", "http://c"]
    assert values_of("--y", words) == [] and value_of("--x", words) == "1"


@pytest.mark.parametrize(
    ("stored", "flags", "served", "is_compared"),
    [
        ("bfloat16", "", {"bfloat16"}, True),  # float32 holds bfloat16's numbers
        ("bfloat16", "--bf16", {"bfloat16"}, True),
        ("bfloat16", "--bf16", {"float32"}, True),
        ("float32", "--bf16", {"bfloat16"}, True),  # both sides round once, and alike
        ("float32", "--bf16", {"float32"}, False),
        ("bfloat16", "--fp16", {"bfloat16"}, False),
        ("float32", "--rollout-push-rounding int4_group", {"float32"}, False),
    ],
)
def test_weights_of_servers_then_compared_where_no_side_rounds(tmp_path, stored, flags, served, is_compared):
    folder = folder_of(QWEN3_8B | {"torch_dtype": stored}, tmp_path / "model")
    words = ["t.py", "--rollout-hf-checkpoint", str(folder), *flags.split()]
    assert (rounding_of(words, served) is None) == is_compared


def test_servers_when_they_do_not_answer_then_the_page_says_that_nothing_was_compared():
    [row] = server_rows([], "no answer")
    assert row.passed and row.found == "not compared: no answer" and where([row]) == []


def test_side_of_a_mismatch_then_of_the_push_where_servers_have_other_weights_and_else_of_the_trainer():
    far = TrialNumber(OWN, "mean k3 of a step", "1", "at most 1e-8", False)
    right = TrialNumber("servers", NOT_THE_CHECKPOINTS, "0 of 34", "0", True)
    wrong = TrialNumber("servers", NOT_THE_CHECKPOINTS, "1 of 34: x", "0", False)
    assert where([right]) == []
    [note] = where([far, right])
    assert "the pushes are right" in note
    [note] = where([far, wrong])
    assert "the push is wrong" in note
