"""No secret in what a run writes of itself, and none in the hands of who needs none."""

import asyncio
import base64
import json
import os
from dataclasses import dataclass

import pytest

from megatron_rl_corr import plugin
from megatron_rl_corr.commands.report.page import write_page
from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.reward_functions import RewardFunctions
from megatron_rl_corr.data.reward_input import RewardInput
from megatron_rl_corr.engines import secrets
from megatron_rl_corr.engines.errors import RolloutServerError, SampleFailure
from megatron_rl_corr.engines.secrets import (
    for_message,
    json_without_secrets,
    text_without_secrets,
    without_lookalikes,
    without_secret_words,
)
from megatron_rl_corr.observability.run_log import RunLog
from megatron_rl_corr.reduce.failure import FailureWatch
from megatron_rl_corr.rollout.agents.harnesses import Harnesses
from megatron_rl_corr.rollout.agents.starter import HarnessKind
from tests.faults.drills import drill

CANARY = "canary-of-a-variable-8c1f"
FLAG = "sk-canaryOfAFlag0123456789"
COMMAND = (
    f"python tool.py --api-key {FLAG} --password='of the flag' --model m https://a/b?sig=canary-of-a-query"
)


@pytest.fixture(autouse=True)
def canary(monkeypatch):
    monkeypatch.setenv("JUDGE_TOKEN", CANARY)
    monkeypatch.setenv("TOOL_KEY", "/a/path/is/no/secret")


@dataclass
class Settings:
    agent_command: str = COMMAND
    reward_url: tuple = (f"http://judge/score?key={FLAG}",)
    agent: str = f"agent.py:{CANARY}"
    max_lag: int = 3
    place: str = "/a/path/is/no/secret"
    system: str = "it's - as ever - fine"


@drill("a command, an address and a variable with secrets in a run's settings", promised="run.json has none")
def test_settings_when_they_hold_secrets_then_neither_run_json_nor_the_page_has_them(
    tmp_path, make_steps, write_run, seen
):
    folder = write_run(make_steps(1))
    RunLog(str(folder), {"rollout": Settings()}, writer=object())
    text = (folder / "run.json").read_text()
    for secret in (CANARY, FLAG, "of the flag", "canary-of-a-query"):
        assert secret not in text, secret
    kept = json.loads(text)["rollout"]
    assert (
        kept["agent_command"] == "python tool.py --api-key '***' '--password=***' --model m 'https://a/b?***'"
    )
    assert kept["reward_url"] == ["http://judge/score?***"] and kept["max_lag"] == 3
    assert (kept["place"], kept["system"]) == ("/a/path/is/no/secret", "it's - as ever - fine")
    # of an earlier release, which wrote them
    (folder / "run.json").write_text(json.dumps({"rollout": {"agent_command": COMMAND, "x": CANARY}}))
    page = write_page(folder).read_text()
    assert CANARY not in page and FLAG not in page and "agent_command" in page
    seen("***")


def test_command_when_it_can_not_be_split_then_what_looks_secret_is_hidden_all_the_same():
    assert text_without_secrets(f"a 'b --key {FLAG}", {}) == "a 'b --key ***"
    assert text_without_secrets("a  'b -c'", {}) == "a  'b -c'"
    words = ["--rollout-agent-command", "tool --token 'of no form' --v", "--x=tool --key 'of no form'"]
    shown = ["--rollout-agent-command", "tool --token '***' --v", "--x=tool --key '***'"]
    assert without_secret_words(words, {}) == shown
    assert json_without_secrets({f"k {FLAG}": [FLAG, 1, None]}, {}) == {"k ***": ["***", 1, None]}


def test_errors_when_they_quote_a_variable_then_it_is_hidden():
    for error in (
        RolloutServerError("http://a", "/generate", 500, f"got {CANARY}"),
        SampleFailure("reward_error", f"Traceback: KeyError {CANARY!r}"),
    ):
        assert CANARY not in str(error) + error.detail and "***" in str(error)


def test_variables_when_they_name_keys_of_rows_or_special_tokens_then_their_words_stay(monkeypatch):
    monkeypatch.setenv("INPUT_KEY", "messages")
    monkeypatch.setenv("EOS_TOKEN", "<|im_end|>")
    monkeypatch.setenv("OTHER_TOKEN", "<|im_start|>")
    assert for_message("row 0 has no 'messages', <|im_end|>") == "row 0 has no 'messages', <|im_end|>"
    assert for_message("it begins with <|im_start|>") == "it begins with ***"
    assert json_without_secrets({"input_key": "messages"}, os.environ) == {"input_key": "messages"}


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_variables_when_one_names_this_host_then_addresses_stay_readable_and_other_words_hidden(
    monkeypatch, host
):
    monkeypatch.setenv("SHARD_KEY", host)
    monkeypatch.setenv("DATABASE_PASSWORD", "sunshine")  # a word, and a password
    text = f"http://{host}:30000 is not reached: sunshine"
    assert for_message(text) == f"http://{host}:30000 is not reached: ***"
    # a longer value is another one
    assert without_lookalikes(f"got {host}-7", {"SHARD_KEY": f"{host}-7"}) == "got ***"


def test_variables_when_a_secret_begins_as_a_path_then_it_is_hidden(tmp_path):
    secret, path = "/q0vGx2AbCdEf+wJalrXUtnFEMI/K7MDENG", tmp_path / "Key1OfTheJudges"
    path.write_text("")
    assert without_lookalikes(f"got {secret}!", {"AWS_SECRET_ACCESS_KEY": secret}) == "got ***!"
    for place in (str(path), "/etc/keys/Judge1.pem"):
        assert without_lookalikes(place, {"JUDGE_KEY": place}) == place


def test_variables_when_a_secret_is_long_then_messages_without_it_take_no_time(monkeypatch):
    made = []
    pattern = secrets._pattern
    monkeypatch.setattr(secrets, "_pattern", lambda secret: made.append(len(secret)) or pattern(secret))
    secret = "".join(chr(33 + place * 7 % 90) for place in range(400))
    variables = {"CLOUD_CREDENTIALS": secret}
    assert without_lookalikes("short", variables) == "short" and made == []
    assert without_lookalikes("a" * 400, variables) == "a" * 400 and max(made) <= 32
    for form in (secret, json.dumps(secret)[1:-1], base64.b64encode(secret.encode()).decode()):
        assert secret[100:120] not in without_lookalikes(f"it is {form}.", variables)
        assert "***" in without_lookalikes(f"it is {form}.", variables)


@drill("a rank whose error quotes a secret", promised="other ranks, events and tracebacks do not have it")
def test_failure_when_a_rank_tells_it_then_the_store_and_the_events_have_no_secret(
    told, capsys, monkeypatch, seen
):
    sent = []
    watch = FailureWatch()
    watch._ranks, watch._rank, watch._prefix = 2, 0, "p"

    class Store:
        def compare_set(self, name, before, after):
            sent.append(after)

    monkeypatch.setattr(watch, "_request", lambda ask: ask(Store()))
    watch.report(ValueError(f"no access with {CANARY}"))
    [(kind, facts)] = told
    assert kind == "rank_failed" and CANARY not in facts["reason"] and CANARY not in sent[0]
    assert CANARY not in plugin._message(ValueError(CANARY), False)
    seen("hidden")


def test_harness_when_its_command_has_a_secret_then_its_name_in_messages_has_not():
    words = ("python", "tool.py", "--api-key", FLAG)
    kind = HarnessKind(None, words, 1.0, None, "`agent_command`")
    assert Harnesses(kind).name == "`agent_command` python tool.py --api-key ***"


def test_keys_when_a_run_names_their_variables_then_reward_workers_lack_them(tmp_path, monkeypatch):
    for name in ("SERVERS_KEY", "JUDGES_KEY", "OWN_KEY"):
        monkeypatch.setenv(name, "a-value")
    (tmp_path / "reward.py").write_text(
        "import os\n"
        "NAMES = 'SERVERS_KEY', 'JUDGES_KEY', 'OWN_KEY'\n"
        "def reward(sample):\n"
        "    return {'score': 1.0} | {name: float(name in os.environ) for name in NAMES}\n"
    )
    options = RunConfig(
        **{"urls": ("http://127.0.0.1:9",), "prompts": ("p.jsonl",), "hf_checkpoint": str(tmp_path)},
        **{"reward_function": (f"{tmp_path}/reward.py:reward",), "reward_url": ("http://127.0.0.1:9/r",)},
        **{"api_key_env": "SERVERS_KEY", "reward_api_key_env": "JUDGES_KEY", "max_new_tokens": 8},
    )
    assert options.names_of_keys == {"SERVERS_KEY", "JUDGES_KEY"}

    async def scored():
        specs = [spec for spec in options.rewards if spec.kind == "function"]
        functions = RewardFunctions(specs, workers=1, limit_s=60.0, hidden=options.names_of_keys)
        try:
            await functions.start()
            return await functions.call("reward", [RewardInput("p", "r", None)], [])
        finally:
            await functions.close()

    assert asyncio.run(scored()) == [
        {"reward": 1.0, "reward/SERVERS_KEY": 0.0, "reward/JUDGES_KEY": 0.0, "reward/OWN_KEY": 1.0}
    ]
    assert "SERVERS_KEY" in os.environ
