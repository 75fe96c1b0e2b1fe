"""How a run was started: no secret is in it, and launches whose steps are done anew are dropped."""

import hashlib
import json

import pytest

from megatron_rl_corr.engines.secrets import without_lookalikes, without_secret_words
from megatron_rl_corr.observability.launch_record import hashes_of_files, launch_record, variables_of_numbers
from megatron_rl_corr.observability.run_log import RunLog

SECRET = "s3cr3t-of-no-known-form"
HIDDEN = "***"


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--api-key", SECRET, "--lr", "1"], ["--api-key", HIDDEN, "--lr", "1"]),
        ([f"--my-hf-token={SECRET}"], [f"--my-hf-token={HIDDEN}"]),
        (["--wandb_password", SECRET, SECRET], ["--wandb_password", HIDDEN, HIDDEN]),
        (["--url", f"http://me:{SECRET}@host/x"], ["--url", f"http://{HIDDEN}@host/x"]),
        (["--url", f"http://host/x?key={SECRET}&a=b"], ["--url", f"http://host/x?{HIDDEN}"]),
        (["--header", f"Authorization: Bearer {SECRET}"], ["--header", f"Authorization: Bearer {HIDDEN}"]),
        (["--x", f"password={SECRET}"], ["--x", f"password={HIDDEN}"]),
        (["--x", "hf_abcdefghijklmnop"], ["--x", HIDDEN]),
        (["--x", "in-my-variable"], ["--x", HIDDEN]),
        # names of variables, counts, and paths are no secrets
        (["--rollout-api-key-env", "MY_KEY"], ["--rollout-api-key-env", "MY_KEY"]),
        (["--rollout-max-new-tokens", "8"], ["--rollout-max-new-tokens", "8"]),
        (["--rollout-input-key", "messages"], ["--rollout-input-key", "messages"]),
        (["--rollout-label-key=answer"], ["--rollout-label-key=answer"]),
        (["--rollout-agent-command", f"a --key {SECRET}"], ["--rollout-agent-command", "a --key '***'"]),
        (["--fim-pad-token", "<pad>"], ["--fim-pad-token", "<pad>"]),
        (["--rollout-url", "http://127.0.0.1:30000"], ["--rollout-url", "http://127.0.0.1:30000"]),
        (["--save", "/runs/a:b@c"], ["--save", "/runs/a:b@c"]),
    ],
)
def test_words_when_they_hold_secrets_then_these_alone_are_hidden(words, shown):
    assert without_secret_words(words, {"OTHER_TOKEN": "in-my-variable", "PATH": "--lr"}) == shown


@pytest.mark.parametrize(
    ("name", "value"), [("MY_TOKEN", "short"), ("MY_KEY", "/a/long/path"), ("TOKENIZER", "a-long-value")]
)
def test_variable_when_it_is_no_secret_then_its_value_is_shown(name, value):
    assert without_lookalikes(f"x {value}", {name: value}) == f"x {value}"


def test_record_of_a_start_then_it_has_what_a_replay_needs_and_no_secret(tmp_path, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("PLANTED_SECRET", SECRET)
    (tmp_path / "loss.py").write_text("x = 1\n")
    (tmp_path / "prompts.jsonl").write_text("{}\n")
    arguments = ["--rollout-loss", "loss.py:f", "--rollout-prompts", "prompts.jsonl", "--x", SECRET]
    variables = variables_of_numbers()
    record = launch_record(
        "train.py",
        arguments,
        folder=str(tmp_path),
        environment=variables,
        launcher=True,
        megatron="0.19.2",
        transformer_engine="none",
    )
    assert variables["NCCL_ALGO"] == "Ring" and "PLANTED_SECRET" not in variables
    assert (record["processes"], record["processes_of_host"]) == (16, 8)
    assert record["arguments"] == [*arguments[:-1], HIDDEN]
    assert record["files"] == {"loss.py": hashlib.sha256(b"x = 1\n").hexdigest()}
    assert record["versions"]["megatron-core"] == "0.19.2" and "torch" in record["versions"]
    assert SECRET not in json.dumps(record)


def test_files_when_a_path_looks_secret_then_it_is_left_out(tmp_path):
    (tmp_path / "sk-abcdefghijklmnop.py").write_text("")
    assert hashes_of_files(["sk-abcdefghijklmnop.py", "--x=gone.py"], str(tmp_path)) == {}


def test_run_log_when_a_run_goes_on_then_launches_whose_steps_stay_are_kept(tmp_path):
    def launches(first_step):
        RunLog(str(tmp_path), {}, writer=object(), launch={"first_step": first_step, "script": "train.py"})
        return [one["first_step"] for one in json.loads((tmp_path / "run.json").read_text())["launches"]]

    assert launches(1) == [1] and launches(5) == [1, 5] and launches(9) == [1, 5, 9]
    assert launches(5) == [1, 5], "steps from 5 on are done anew"
    assert launches(1) == [1]
    (tmp_path / "run.json").write_text("{")
    assert launches(5) == [5]
