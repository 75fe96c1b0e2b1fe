"""The options of agents: what they bring, what is refused by name; and what is counted."""

from collections import Counter

import pytest
import torch

from megatron_rl_corr.config.run import RunConfig
from megatron_rl_corr.data.tokenizer import Tokenizer
from megatron_rl_corr.engines.trajectory import SamplingParams
from megatron_rl_corr.features.agent.making import make_agents
from megatron_rl_corr.features.agent.metrics import COUNTED, agent_metrics, counted
from megatron_rl_corr.features.agent.options import AgentConfig
from megatron_rl_corr.mcore.checks.prompt_checks import prompt_limits
from megatron_rl_corr.rollout.agents.agents import AgentCounts
from megatron_rl_corr.rollout.gateway.answering import answer_rules
from megatron_rl_corr.rollout.gateway.episode import EpisodeCounts
from tests.rollout.gateway.agents_model import fast

GIVEN = {"hf_checkpoint": "m", "max_new_tokens": 64, "group_size": 2}
SERVED = {"urls": ("http://a:1",), "prompts": ("p",)}


def test_agent_when_given_then_its_usual_settings_and_no_reward_function():
    options = RunConfig(**GIVEN, **SERVED, agent="f.py:run")
    assert options.maker is AgentConfig.makes_samples
    assert (options.most_turns, options.agent_timeout_s, options.agent_memory_gib) == (64, 1800.0, 4.0)
    assert (options.gateway_host, options.gateway_port, options.agent_tool_parser) == ("127.0.0.1", 0, "auto")
    assert RunConfig(**GIVEN, **SERVED, reward_function=("f1",)).maker is None


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"agent": "f.py:run", "agent_command": "x"}, ["`agent`", "`agent_command`"]),
        ({"agent": "f.py:run", "environment": "g.py:E"}, ["`environment`", "`agent`"]),
        ({"agent": "f.py:run", "pad_sequences": True}, ["`pad_sequences`"]),
        ({"agent_command": "'"}, ["`agent_command`"]),
        ({"agent_command": " "}, ["`agent_command` is empty"]),
        ({"agent": "f.py:run", "agent_max_turns": 0}, ["`agent_max_turns`"]),
        ({"agent": "f.py:run", "gateway_port": 65536}, ["`gateway_port`"]),
        ({"reward_function": ("f1",), "agent_timeout_s": 5.0}, ["`agent_timeout_s`", "`agent_command`"]),
        ({"reward_function": ("f1",), "gateway_strict": True}, ["`gateway_strict`"]),
    ],
)
def test_options_when_they_do_not_go_together_then_refused_by_name(given, names):
    with pytest.raises(ValueError, match="`") as raised:
        RunConfig(**GIVEN, **SERVED, **given)
    assert all(name in str(raised.value) for name in names)


def test_replay_when_an_agent_is_given_then_refused():
    with pytest.raises(ValueError, match="`agent` has no effect with `replay`"):
        RunConfig(**GIVEN, replay="samples", agent="f.py:run")


def test_prompts_when_an_agent_asks_then_one_token_is_room_for_a_turn():
    options = RunConfig(**GIVEN, **SERVED, agent="f.py:run")
    assert prompt_limits(options, vocab_size=9, seq_length=64, drop=False).max_tokens == 64
    scored = RunConfig(**GIVEN, **SERVED, reward_function=("f1",))
    assert prompt_limits(scored, vocab_size=9, seq_length=64, drop=False).max_tokens == 1


def test_agents_when_the_checkpoint_has_no_tokenizer_then_refused():
    with pytest.raises(ValueError, match="`agent` needs a tokenizer"):
        make_agents(RunConfig(**GIVEN, **SERVED, agent="f.py:run"), None, seq_length=64, replica=0)


def rules(template, tool_format):
    warned = []
    made = answer_rules(
        Tokenizer(fast(template), "FOLDER"),
        SamplingParams(8),
        max_tokens=9,
        max_turns=3,
        tool_format=tool_format,
        separate_thoughts=False,
        warn=warned.append,
    )
    return made, warned


def test_tool_format_when_auto_then_the_templates_or_none_with_a_line():
    made, warned = rules("qwen3", "auto")
    assert made.parse.args == ("hermes",) and warned == [] and not made.separates
    made, [line] = rules("{% for m in messages %}{{ m.content }}{% endfor %}", "auto")
    assert made.parse is None and "`agent_tool_parser` auto" in line
    with pytest.raises(ValueError, match="`agent_tool_parser` must be auto or one of .*hermes.*'mine'"):
        rules("qwen3", "mine")


def test_metrics_when_counted_then_means_are_over_episodes():
    counts = AgentCounts()
    forks = Counter(first=1, edited=1)
    own = EpisodeCounts(requests=5, refused=1, turns=4, branches=2, forks=forks)
    own.overridden.update({"temperature": 3, "top_p": 1})
    counts.add(own, 2.0)
    counts.add(EpisodeCounts(requests=1, turns=1, branches=1, rerendered=1, forks=forks), 4.0)
    values = counted(counts)
    assert values.shape == (len(COUNTED),)
    found = {name: metric.value() for name, metric in agent_metrics(values).items()}
    assert found == {
        "agent/episodes": 2,
        "agent/harness_s": 3.0,
        "agent/requests": 3.0,
        "agent/turns": 2.5,
        "agent/branches": 1.5,
        "agent/refused": 1,
        "agent/rerendered": 1,
        "agent/undelivered": 0,
        "agent/abandoned": 0,
        "agent/overridden": 4,
        "agent/forks_edited": 2,
        "agent/forks_template": 0,
        "agent/forks_tools": 0,
        "agent/forks_earlier": 0,
    }
    nothing = agent_metrics(torch.zeros_like(values))
    assert nothing.keys() == found.keys()
